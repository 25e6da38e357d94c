"""What is told of an item while it is carried out, and of its end. Plain: it crosses processes as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

# What becomes of a failed item: docs/reference/building.md, section 4.
Sort: TypeAlias = Literal["deterministic", "environmental", "limit", "here"]


@dataclass(frozen=True)
class Fault:
    """Why an item failed. `kind` is the error's class, `code` its number in the table of exit codes."""

    sort: Sort
    kind: str
    message: str
    code: int
    log: str = ""  # the traceback, or the end of what a process said


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
