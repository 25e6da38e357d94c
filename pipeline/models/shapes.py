"""Programs of a model by phase, batch and sequence length: shapes of a build, and those that share a KV cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_PHASES: Final = {"text-generation": ("prefill", "decode")}
SAVED_PROGRAM: Final = "program"  # the phase of a program in a file, which has shapes of its own


@dataclass(frozen=True, order=True)
class Shape:
    """One program: its phase and its static shapes. A saved program has the shapes of its file."""

    phase: str
    batch: int
    sequence: int

    @property
    def name(self) -> str:
        return self.phase if self.phase == SAVED_PROGRAM else f"{self.phase}-b{self.batch}-s{self.sequence}"


def shapes_of(phases: Iterable[str], batches: Iterable[int], buckets: Sequence[int]) -> tuple[Shape, ...]:
    """A program for each phase, batch and bucket; one decode program serves all buckets, which share a KV cache."""
    longest = max(buckets)
    shapes = (
        Shape(phase, batch, longest if phase == "decode" else bucket)
        for phase in phases
        for batch in batches
        for bucket in buckets
    )
    return tuple(dict.fromkeys(shapes))


def cache_capacity(shape: Shape, beside: Iterable[Shape]) -> int | None:
    """Tokens that the KV cache of a prefill holds; None where the program's own sequence length decides.

    All prefill and decode programs of one batch size share a cache as long as the longest of them: whichever prefill
    a prompt fits into, decode continues with the cache that it left.
    """
    sharing = [
        other.sequence for other in beside if other.phase in ("prefill", "decode") and other.batch == shape.batch
    ]
    return max(sharing) if shape.phase == "prefill" and sharing else None


def all_phases(task: str) -> tuple[str, ...]:
    """All phases that a model of this task is served with."""
    return _PHASES.get(task, ("forward",))


def default_phases(task: str) -> tuple[str, ...]:
    """The phases of a build that names none."""
    return all_phases(task)[:1]
