"""How a tensor lies across ranks, before anyone says how many ranks there are.

A *cut* is one way of dividing work; see `cuts.py`. Every tensor that is divided alike shares the cut, and each may find
that its units are coarser than was thought. Only at the end are the degrees tried against the units.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nxpipe.emulator.ops.shares import Share
from nxpipe.emulator.passes.shard.cuts import AxisSplit


@dataclass(frozen=True)
class Split:
    """One axis is divided: it is `outer` repetitions of a row of blocks, each block divided by its own cut."""

    axis: int
    outer: int
    sizes: tuple[int, ...]
    cuts: tuple[AxisSplit, ...]

    def __post_init__(self) -> None:
        for size, cut in zip(self.sizes, self.cuts, strict=True):
            cut.limit(size)

    def at(self, axis: int) -> "Split":
        return Split(axis, self.outer, self.sizes, self.cuts)

    def shares(self, degree: int) -> tuple[Share, ...]:
        return tuple(cut.share(size, degree) for size, cut in zip(self.sizes, self.cuts, strict=True))

    def is_divided(self, degree: int) -> bool:
        """Whether a rank has another tensor than the whole."""
        return not all(share.is_whole for share in self.shares(degree))

    def local(self, shape: Sequence[int], degree: int) -> tuple[int, ...]:
        """The shape on one rank, padding included."""
        length = sum(share.local for share in self.shares(degree))
        return (*shape[: self.axis], self.outer * length, *shape[self.axis + 1 :])

    def window(self, start: int, stop: int) -> "Split | None":
        """The blocks from one place to another, if blocks begin and end there and there are any."""
        edges = [sum(self.sizes[:number]) for number in range(len(self.sizes) + 1)]
        if self.outer != 1 or start == stop or start not in edges or stop not in edges:
            return None
        blocks = slice(edges.index(start), edges.index(stop))
        return Split(self.axis, 1, self.sizes[blocks], self.cuts[blocks])

    def reshaped(self, before: Sequence[int], after: Sequence[int]) -> "Split | None":
        """The same division seen under another shape, if one axis of that still holds it."""
        ahead, length = math.prod(before[: self.axis]) * self.outer, sum(self.sizes)
        passed = 1
        for axis, size in enumerate(after):
            if passed <= ahead < passed * size:
                return self._on(axis, ahead, passed, size, length)
            passed *= size
        return None

    def _on(self, axis: int, ahead: int, passed: int, size: int, length: int) -> "Split | None":
        outer = ahead // passed
        if ahead % passed or size % outer:
            return None
        scaled = [block * (size // outer) for block in self.sizes]
        if any(block % length for block in scaled):
            return None
        return Split(axis, outer, tuple(block // length for block in scaled), self.cuts)

    def matches(self, other: "Split") -> bool:
        """Whether the same elements could lie on the same ranks."""
        return (self.axis, self.outer, self.sizes) == (other.axis, other.outer, other.sizes)

    def join(self, other: "Split") -> None:
        for mine, theirs in zip(self.cuts, other.cuts, strict=True):
            mine.join(theirs)


@dataclass(frozen=True)
class Repeated(Split):
    """Key heads on one axis, and on the next, how often each is repeated: once for each query head that it serves.

    More ranks than key heads means that a rank repeats its key head for its own few query heads only.
    """

    queries: AxisSplit

    def local(self, shape: Sequence[int], degree: int) -> tuple[int, ...]:
        heads = self.queries.share(self.sizes[0] * shape[self.axis + 1], degree).local
        own = list(super().local(shape, degree))
        own[self.axis + 1] = heads // own[self.axis]
        return tuple(own)

    def reshaped(self, before: Sequence[int], after: Sequence[int]) -> "Split | None":
        """Seen as so many query heads, or not at all."""
        heads = before[self.axis] * before[self.axis + 1]
        if tuple(after) != (*before[: self.axis], heads, *before[self.axis + 2 :]):
            return None
        return Split(self.axis, 1, (heads,), (self.queries,))


# None: every rank holds the whole tensor.
Layout = Split | None
