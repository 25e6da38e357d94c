"""What every gate of a release is: it finds out whether it has anything to do, and does it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from nxpipe.pipeline.release.state import Release

# `done`: before this run; `not run`: an earlier gate has failed; `to do`: of a dry run.
State: TypeAlias = Literal["passed", "done", "skipped", "failed", "interrupted", "not run", "to do"]
Figures: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Settled:
    """There is nothing to do, and why."""

    state: Literal["done", "skipped"]
    sentence: str


@dataclass(frozen=True)
class Outcome:
    """`code` is that of the table of exit codes; all but 0 end the release."""

    sentence: str
    code: int = 0
    figures: Figures = ()


@dataclass(frozen=True)
class Passage:
    """What became of a gate in one run."""

    gate: str
    state: State
    sentence: str
    code: int = 0
    seconds: float = 0.0
    figures: Figures = ()


class Gate(Protocol):
    @property
    def name(self) -> str: ...

    def settled(self, release: "Release") -> Settled | None:
        """Decided from the store and its channels, or from a record that only this machine writes."""
        ...

    def intention(self, release: "Release") -> str:
        """What it is going to do, in words; asked only where something is to be done."""
        ...

    def run(self, release: "Release") -> Outcome:
        """May be repeated after a kill at any moment. A failure is an error, or an outcome with its code."""
        ...
