"""What an executor carries out, as one JSON document: a cell, or the publishing of an artifact."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from nxpipe.pipeline.build.asked import Asked
from nxpipe.pipeline.build.status import Fault
from nxpipe.pipeline.request import Shape
from nxpipe.pipeline.verify.verify import Thresholds


@dataclass(frozen=True)
class Item:
    """`key` names what it makes; `shape` is none of an artifact. `work` is its size beside others: the largest goes
    first. `memory` is what it may take, in bytes."""

    key: str
    title: str
    asked: Asked
    shape: Shape | None
    store: str
    thresholds: Thresholds
    force: bool
    work: float
    memory: int
    kms_key: str | None = None  # what the store encrypts with

    @property
    def kind(self) -> Literal["cell", "artifact"]:
        return "cell" if self.shape else "artifact"

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"asked": self.asked.document()}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Item":
        shape = document["shape"]
        return cls(
            **dict(document)
            | {
                "asked": Asked.from_document(document["asked"]),
                "shape": None if shape is None else Shape(**shape),
                "thresholds": Thresholds(**document["thresholds"]),
            }
        )


@dataclass(frozen=True)
class Begun:
    key: str
    worker: str


@dataclass(frozen=True)
class Said:
    """A step that it has begun, or a line of talk."""

    key: str
    text: str


@dataclass(frozen=True)
class Ended:
    """`cached`: somebody had made it before. `seconds` are those it took, `memory` the most it held, in bytes."""

    key: str
    seconds: float
    cached: bool = False
    memory: int = 0
    fault: Fault | None = None


Event: TypeAlias = Begun | Said | Ended
_KINDS: Final[dict[str, type[Begun] | type[Said] | type[Ended]]] = {
    kind.__name__.lower(): kind for kind in (Begun, Said, Ended)
}


def to_document(event: Event) -> dict[str, Any]:
    return {"event": type(event).__name__.lower(), **asdict(event)}


def from_document(document: Mapping[str, Any]) -> Event:
    fields = dict(document)
    kind = _KINDS[fields.pop("event")]
    if fields.get("fault") is not None:
        fields["fault"] = Fault(**fields["fault"])
    return kind(**fields)


@dataclass(frozen=True)
class Limits:
    """Of each item; none: as long as it takes, as much as there is."""

    seconds: float | None = None
    memory: int | None = None  # bytes


class Executor(Protocol):
    """Every item that was started ends in exactly one `Ended`, whatever becomes of the process that carried it out."""

    @property
    def name(self) -> str:
        """As in `--executor`."""
        ...

    def takes(self, item: Item) -> bool:
        """Whether it would begin this one now; False is asked again when something has ended."""
        ...

    def start(self, item: Item) -> None: ...

    def events(self, patience: float) -> Sequence[Event]:
        """What has happened since; if nothing has, wait for something, but no longer than this many seconds."""
        ...

    def close(self) -> None:
        """End what runs, at once. What it has committed stays."""
        ...
