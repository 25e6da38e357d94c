"""How a tensor lies across ranks, before anyone says how many ranks there are.

A *cut* is one way of dividing work: into so many indivisible units, of which each rank gets its share. Query heads are
a cut, and so are the inner features of an MLP. Every tensor that is divided alike shares the cut, and each may find
that its units are coarser than was thought. Only at the end are the degrees tried against the units.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


class Cut:
    """One way of dividing work, known by the most pieces that it allows. Cuts that turn out alike are joined."""

    def __init__(self, units: int, name: str) -> None:
        self._joined: Cut | None = None
        self._units = units
        self._name = name
        self._even = False
        self._added = False
        self._shared = False
        self._coarser: list[Cut] = []

    def root(self) -> "Cut":
        cut = self
        while cut._joined is not None:
            cut = cut._joined
        return cut

    @property
    def units(self) -> int:
        """How many pieces there can be at most; every number of pieces divides it."""
        return self.root()._units

    @property
    def name(self) -> str:
        """The parameter that first asked for this cut."""
        return self.root()._name

    @property
    def even(self) -> bool:
        """Whether a degree that this work cannot be shared by is refused, instead of leaving the work whole."""
        return self.root()._even

    @property
    def added(self) -> bool:
        """Whether each rank's part of a sum hangs on this cut, so that no two ranks may have the same unit."""
        return self.root()._added

    def limit(self, size: int) -> None:
        """An axis of this size is divided so; pieces must be whole there too."""
        self.root()._units = math.gcd(self.units, size)

    def require_even(self) -> None:
        self.root()._even = True

    def add_up(self) -> None:
        self.root()._added = True

    def serves(self, finer: "Cut") -> None:
        """Each unit of this cut is needed by a run of units of the finer one: key heads, by the query heads."""
        self.root()._shared = True
        finer.root()._coarser.append(self)

    @property
    def served_by(self) -> "list[Cut]":
        return self.root()._coarser

    def join(self, other: "Cut") -> None:
        """From now on, the two are one."""
        mine, theirs = self.root(), other.root()
        if mine is theirs:
            return
        theirs._joined = mine
        mine._units = math.gcd(mine._units, theirs._units)
        mine._even |= theirs._even
        mine._added |= theirs._added
        mine._shared |= theirs._shared
        mine._coarser += theirs._coarser

    def parts(self, degree: int) -> int:
        """Into how many pieces the work falls at a degree: one each, or one for several ranks, or one for all."""
        if self.units % degree == 0:
            return degree
        return self.units if self._may_be_shared(degree) else 1

    def _may_be_shared(self, degree: int) -> bool:
        return self.root()._shared and not self.added and degree % self.units == 0

    def allows(self, degree: int) -> bool:
        """Whether ranks can share this work without doing any of it twice where that would be counted twice."""
        fits = all(cut.units % degree == 0 or cut._may_be_shared(degree) for cut in self.served_by)
        return fits and (not self.even or self.units % degree == 0)


@dataclass(frozen=True)
class Split:
    """One axis is divided: it is `outer` repetitions of a row of blocks, each block divided by its own cut."""

    axis: int
    outer: int
    sizes: tuple[int, ...]
    cuts: tuple[Cut, ...]

    def __post_init__(self) -> None:
        for size, cut in zip(self.sizes, self.cuts, strict=True):
            cut.limit(size)

    def at(self, axis: int) -> "Split":
        return Split(axis, self.outer, self.sizes, self.cuts)

    def parts(self, degree: int) -> tuple[int, ...]:
        return tuple(cut.parts(degree) for cut in self.cuts)

    def local(self, shape: Sequence[int], degree: int) -> tuple[int, ...]:
        """What is left of a shape on one rank."""
        share = sum(size // parts for size, parts in zip(self.sizes, self.parts(degree), strict=True))
        return (*shape[: self.axis], self.outer * share, *shape[self.axis + 1 :])

    def window(self, start: int, stop: int) -> "Split | None":
        """The blocks from one place to another, if blocks begin and end there."""
        edges = [sum(self.sizes[:number]) for number in range(len(self.sizes) + 1)]
        if self.outer != 1 or start not in edges or stop not in edges:
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

    queries: Cut

    def local(self, shape: Sequence[int], degree: int) -> tuple[int, ...]:
        heads = self.sizes[0] * shape[self.axis + 1] // self.queries.parts(degree)
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
