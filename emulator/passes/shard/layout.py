"""Layouts of tensors across ranks, for an open number of ranks.

An *axis split* is one way of dividing work: into indivisible units, of which each rank gets its share. Query heads are
one, the inner features of an MLP are another. Every tensor that is divided alike shares the split, and each may find
that its units are coarser than was thought; only at the end are degrees tried against the units. A number of units that
ranks cannot share evenly is padded with units of zeros, whose weights are zeros, so that every rank has equally many.

Few key heads serve many query heads (GQA). Ranks get slots for key heads, each with equally many query heads that it
serves: a key head with several slots is replicated, and the query heads that it serves are padded until they fill its
slots. The number of slots of a rank is chosen by what ranks then compute.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nxpipe.emulator.ops.collective import Share


class Deal(NamedTuple):
    """A Share of a block whose size is the number of units."""

    parts: int
    slots: int
    length: int


class AxisSplit:
    """Known by the most pieces that it allows. Cuts that turn out alike are joined."""

    def __init__(self, units: int, name: str) -> None:
        self._joined: AxisSplit | None = None
        self._units = units
        self._name = name
        self._even = False
        self._added = False
        self._unpadded = ""
        self._heads: set[int] = set()
        self._finer: list[AxisSplit] = []
        self._coarser: list[AxisSplit] = []

    def root(self) -> "AxisSplit":
        cut = self
        while cut._joined is not None:
            cut = cut._joined
        return cut

    @property
    def units(self) -> int:
        """The largest number of pieces without padding; every possible number of pieces divides it."""
        return self.root()._units

    @property
    def name(self) -> str:
        """The parameter that introduced this split."""
        return self.root()._name

    @property
    def even(self) -> bool:
        """A degree that this work cannot be divided by is refused, instead of replicating the work."""
        return self.root()._even

    @property
    def added(self) -> bool:
        """Each rank's part of a sum depends on this split, so that no two ranks may have the same unit."""
        return self.root()._added

    @property
    def unpadded(self) -> str:
        """Why there may be no units of zeros; empty if there may."""
        return self.root()._unpadded

    @property
    def served_by(self) -> "list[AxisSplit]":
        return self.root()._coarser

    def limit(self, size: int) -> None:
        """An axis of this size is divided so; pieces must be whole there too."""
        self.root()._units = math.gcd(self.units, size)

    def require_even(self) -> None:
        self.root()._even = True

    def add_up(self) -> None:
        self.root()._added = True

    def forbid_padding(self, why: str) -> None:
        self.root()._unpadded = self.unpadded or why

    def serves(self, finer: "AxisSplit", heads: int) -> None:
        """Each unit of this cut is needed by a run of units of the finer one: of so many key heads, by query heads."""
        self.root()._heads.add(heads)
        self.root()._finer.append(finer)
        finer.root()._coarser.append(self)

    def join(self, other: "AxisSplit") -> None:
        """Unify two splits."""
        mine, theirs = self.root(), other.root()
        if mine is theirs:
            return
        theirs._joined = mine
        mine._units = math.gcd(mine._units, theirs._units)
        mine._even |= theirs._even
        mine._added |= theirs._added
        mine._unpadded = mine._unpadded or theirs._unpadded
        mine._heads |= theirs._heads
        mine._finer += theirs._finer
        mine._coarser += theirs._coarser

    def share(self, size: int, degree: int) -> Share:
        """The share of a block of this size."""
        parts, slots, length = self._deal(degree)
        return Share(size, parts, slots, length * (size // max(self.units, 1)))

    def allows(self, degree: int) -> bool:
        """Ranks can share this work without computing a unit twice where a sum would count it twice."""
        if self.served_by and self.root()._finer:
            return all(cut.units % degree == 0 for cut in (self, *self.served_by, *self.root()._finer))
        if self.served_by:
            places = {cut._places(degree) for cut in self.served_by}
            if len(places) > 1 or None in places or any(self.units % cut.units for cut in self.served_by):
                return False
        may_be_whole = not self.even and not self.served_by
        return may_be_whole or self._goes_up(degree) or (not self.unpadded and degree <= self.units)

    def _goes_up(self, degree: int) -> bool:
        return self._deal(degree) == (degree, 1, self.units // degree) and self.units % degree == 0

    def _deal(self, degree: int) -> Deal:
        cut = self.root()
        if cut._finer:
            return cut._as_keys(degree)
        if cut._coarser:
            return cut._as_queries(degree)
        share = -(-self.units // degree)
        busy = share * (degree - 1) < self.units  # each rank, with something that is not padding
        if self.units % degree and (self.unpadded or not (self.even or busy)):
            return Deal(1, 1, self.units)
        return self._in_turn(share, degree)

    def _as_keys(self, degree: int) -> Deal:
        places = self._places(degree)
        if places is None:
            return Deal(1, 1, self.units)
        copies = degree * places // self.units
        return self._in_turn(places, degree) if copies == 1 else Deal(self.units, places, 1)

    def _as_queries(self, degree: int) -> Deal:
        keys = self.served_by[0]
        places = keys._places(degree)
        if places is None:
            return Deal(1, 1, self.units)
        group, copies = self.units // keys.units, degree * places // keys.units
        each = -(-group // copies)
        if copies == 1 or degree * places * each == self.units:
            return self._in_turn(places * each, degree)
        return Deal(keys.units, places, each)

    def _in_turn(self, share: int, degree: int) -> Deal:
        """So many units to each rank, and padding to the last."""
        return Deal(degree, 1, share) if share * degree == self.units else Deal(1, 1, share)

    def _places(self, degree: int) -> int | None:
        """How many places for units of this cut each rank has, if it can have any: as few as its queries allow, but
        rather a copy of a key head than padding among the query heads."""
        groups = [finer.units // max(self.units, 1) for finer in self.root()._finer]
        copyable = not self.added and self.root()._heads == {self.units}
        most = min(groups) if copyable else 1
        if most < 1:
            return None
        costs: dict[int, int] = {}
        for places in range(-(-self.units // degree), (most + 1) * self.units // degree + 1):
            copies = degree * places // self.units
            if 1 <= copies <= most and self._may_pad(degree, places, copies, groups):
                costs[places] = places + sum(places * -(-group // copies) for group in groups)
        return min(costs, key=lambda places: costs[places], default=None)

    def _may_pad(self, degree: int, places: int, copies: int, groups: list[int]) -> bool:
        """Nothing would be padded that must not be."""
        even = degree * places == copies * self.units and not any(group % copies for group in groups)
        return even or not any(cut.unpadded for cut in (self, *self.root()._finer))


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
        """A rank has less than the whole tensor."""
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
        """Both layouts can place the same elements on the same ranks."""
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
