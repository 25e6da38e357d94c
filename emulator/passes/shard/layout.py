"""Layouts of tensors across ranks, independent of the number of ranks.

An *axis split* divides work into indivisible units, of which each rank gets a share: for example, query heads, or the
inner features of an MLP. All tensors that are divided in the same way share one split, and each may make its units
coarser. Degrees are checked against the units at the end. If the degree does not divide the number of units, units of
zeros (with zero weights) are added as padding, so that every rank has the same number.

With GQA, a key head serves several query heads. Each rank has slots for key heads, each with the same number of the
query heads that it serves. A key head with several slots is replicated, and its query heads are padded to fill its
slots. The number of slots is chosen by the work of a rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nxpipe.emulator.ops.collective import Share


class UnitShare(NamedTuple):
    """The share of a block in units: the number of parts, slots on a rank, and units in each slot."""

    parts: int
    slots: int
    length: int


class AxisSplit:
    """A division of work into units. Splits that must be equal are unified (union-find)."""

    def __init__(self, units: int, name: str) -> None:
        self._parent: AxisSplit | None = None
        self._units = units
        self._name = name
        self._required = False
        self._is_summed = False
        self._padding_obstacle = ""
        self._heads: set[int] = set()
        self._finer: list[AxisSplit] = []
        self._coarser: list[AxisSplit] = []

    def root(self) -> "AxisSplit":
        split = self
        while split._parent is not None:
            split = split._parent
        return split

    @property
    def units(self) -> int:
        """The number of units; without padding, the degree must divide it."""
        return self.root()._units

    @property
    def name(self) -> str:
        """The name of the parameter that introduced the split."""
        return self.root()._name

    @property
    def required(self) -> bool:
        """True if a degree that cannot divide the work is an error; otherwise the work is replicated."""
        return self.root()._required

    @property
    def is_summed(self) -> bool:
        """True if ranks sum over the units, so that no two ranks may have the same unit."""
        return self.root()._is_summed

    @property
    def padding_obstacle(self) -> str:
        """The reason why padding is not possible; empty if it is."""
        return self.root()._padding_obstacle

    @property
    def served_by(self) -> "list[AxisSplit]":
        return self.root()._coarser

    def limit(self, size: int) -> None:
        """Apply the split to an axis of this size: its units must divide the size."""
        self.root()._units = math.gcd(self.units, size)

    def require_division(self) -> None:
        self.root()._required = True

    def mark_summed(self) -> None:
        self.root()._is_summed = True

    def forbid_padding(self, reason: str) -> None:
        self.root()._padding_obstacle = self.padding_obstacle or reason

    def serves(self, finer: "AxisSplit", heads: int) -> None:
        """Declare that each unit (of `heads` key heads) serves consecutive units (query heads) of a finer split."""
        self.root()._heads.add(heads)
        self.root()._finer.append(finer)
        finer.root()._coarser.append(self)

    def join(self, other: "AxisSplit") -> None:
        """Unify this split with another one."""
        mine, theirs = self.root(), other.root()
        if mine is theirs:
            return
        theirs._parent = mine
        mine._units = math.gcd(mine._units, theirs._units)
        mine._required |= theirs._required
        mine._is_summed |= theirs._is_summed
        mine._padding_obstacle = mine._padding_obstacle or theirs._padding_obstacle
        mine._heads |= theirs._heads
        mine._finer += theirs._finer
        mine._coarser += theirs._coarser

    def share(self, size: int, degree: int) -> Share:
        """The share of a rank in a block of this size."""
        parts, slots, length = self._unit_share(degree)
        return Share(size, parts, slots, length * (size // max(self.units, 1)))

    def allows(self, degree: int) -> bool:
        """True if `degree` ranks can share the work, so that no sum counts a unit twice."""
        if self.served_by and self.root()._finer:
            return all(split.units % degree == 0 for split in (self, *self.served_by, *self.root()._finer))
        if self.served_by:
            slots = {split._slots(degree) for split in self.served_by}
            if len(slots) > 1 or None in slots or any(self.units % split.units for split in self.served_by):
                return False
        may_be_whole = not self.required and not self.served_by
        return may_be_whole or self._divides_evenly(degree) or (not self.padding_obstacle and degree <= self.units)

    def _divides_evenly(self, degree: int) -> bool:
        return self._unit_share(degree) == (degree, 1, self.units // degree) and self.units % degree == 0

    def _unit_share(self, degree: int) -> UnitShare:
        split = self.root()
        if split._finer:
            return split._key_share(degree)
        if split._coarser:
            return split._query_share(degree)
        share = -(-self.units // degree)
        busy = share * (degree - 1) < self.units  # every rank has at least one unit that is not padding
        if self.units % degree and (self.padding_obstacle or not (self.required or busy)):
            return UnitShare(1, 1, self.units)
        return self._contiguous_share(share, degree)

    def _key_share(self, degree: int) -> UnitShare:
        slots = self._slots(degree)
        if slots is None:
            return UnitShare(1, 1, self.units)
        copies = degree * slots // self.units
        return self._contiguous_share(slots, degree) if copies == 1 else UnitShare(self.units, slots, 1)

    def _query_share(self, degree: int) -> UnitShare:
        keys = self.served_by[0]
        slots = keys._slots(degree)
        if slots is None:
            return UnitShare(1, 1, self.units)
        group, copies = self.units // keys.units, degree * slots // keys.units
        length = -(-group // copies)
        if copies == 1 or degree * slots * length == self.units:
            return self._contiguous_share(slots * length, degree)
        return UnitShare(keys.units, slots, length)

    def _contiguous_share(self, share: int, degree: int) -> UnitShare:
        """`share` consecutive units for each rank, with padding on the last ranks."""
        return UnitShare(degree, 1, share) if share * degree == self.units else UnitShare(1, 1, share)

    def _slots(self, degree: int) -> int | None:
        """The number of slots of a rank for the key heads of this split, with the least work; None if there is none. A
        copy of a key head is preferred to padding of query heads."""
        groups = [finer.units // max(self.units, 1) for finer in self.root()._finer]
        can_replicate = not self.is_summed and self.root()._heads == {self.units}
        most_copies = min(groups) if can_replicate else 1
        if most_copies < 1:
            return None
        costs: dict[int, int] = {}
        for slots in range(-(-self.units // degree), (most_copies + 1) * self.units // degree + 1):
            copies = degree * slots // self.units
            if 1 <= copies <= most_copies and self._may_be_padded(degree, slots, copies, groups):
                costs[slots] = slots + sum(slots * -(-group // copies) for group in groups)
        return min(costs, key=lambda slots: costs[slots], default=None)

    def _may_be_padded(self, degree: int, slots: int, copies: int, groups: list[int]) -> bool:
        """True if the slots need no padding, or padding is allowed."""
        even = degree * slots == copies * self.units and not any(group % copies for group in groups)
        return even or not any(split.padding_obstacle for split in (self, *self.root()._finer))


@dataclass(frozen=True)
class Split:
    """A layout with one divided axis: `outer` repetitions of a sequence of blocks, each with its own split."""

    axis: int
    outer: int
    sizes: tuple[int, ...]
    splits: tuple[AxisSplit, ...]

    def __post_init__(self) -> None:
        for size, split in zip(self.sizes, self.splits, strict=True):
            split.limit(size)

    def at(self, axis: int) -> "Split":
        return Split(axis, self.outer, self.sizes, self.splits)

    def shares(self, degree: int) -> tuple[Share, ...]:
        return tuple(split.share(size, degree) for size, split in zip(self.sizes, self.splits, strict=True))

    def is_divided(self, degree: int) -> bool:
        """True if a rank has less than the whole tensor."""
        return not all(share.is_whole for share in self.shares(degree))

    def local(self, shape: Sequence[int], degree: int) -> tuple[int, ...]:
        """The shape on one rank, padding included."""
        length = sum(share.local for share in self.shares(degree))
        return (*shape[: self.axis], self.outer * length, *shape[self.axis + 1 :])

    def window(self, start: int, stop: int) -> "Split | None":
        """The layout of a slice of the axis; None unless the slice consists of one or more whole blocks."""
        edges = [sum(self.sizes[:number]) for number in range(len(self.sizes) + 1)]
        if self.outer != 1 or start == stop or start not in edges or stop not in edges:
            return None
        blocks = slice(edges.index(start), edges.index(stop))
        return Split(self.axis, 1, self.sizes[blocks], self.splits[blocks])

    def reshaped(self, before: Sequence[int], after: Sequence[int]) -> "Split | None":
        """The same layout after a reshape; None unless one axis of the new shape has the same division."""
        outer_elements, length = math.prod(before[: self.axis]) * self.outer, sum(self.sizes)
        before_axis = 1
        for axis, size in enumerate(after):
            if before_axis <= outer_elements < before_axis * size:
                return self._on(axis, outer_elements, before_axis, size, length)
            before_axis *= size
        return None

    def _on(self, axis: int, outer_elements: int, before_axis: int, size: int, length: int) -> "Split | None":
        outer = outer_elements // before_axis
        if outer_elements % before_axis or size % outer:
            return None
        scaled = [block * (size // outer) for block in self.sizes]
        if any(block % length for block in scaled):
            return None
        return Split(axis, outer, tuple(block // length for block in scaled), self.splits)

    def matches(self, other: "Split") -> bool:
        """True if both layouts divide the same axis into the same blocks."""
        return (self.axis, self.outer, self.sizes) == (other.axis, other.outer, other.sizes)

    def join(self, other: "Split") -> None:
        for mine, theirs in zip(self.splits, other.splits, strict=True):
            mine.join(theirs)


@dataclass(frozen=True)
class Repeated(Split):
    """The layout of repeated key heads: key heads on the divided axis, and the query heads of each on the next axis.

    With more ranks than key heads, a rank repeats its key head for its own query heads only.
    """

    queries: AxisSplit

    def local(self, shape: Sequence[int], degree: int) -> tuple[int, ...]:
        heads = self.queries.share(self.sizes[0] * shape[self.axis + 1], degree).local
        own = list(super().local(shape, degree))
        own[self.axis + 1] = heads // own[self.axis]
        return tuple(own)

    def reshaped(self, before: Sequence[int], after: Sequence[int]) -> "Split | None":
        """The layout after key heads and repetitions are merged to query heads; None for other reshapes."""
        heads = before[self.axis] * before[self.axis + 1]
        if tuple(after) != (*before[: self.axis], heads, *before[self.axis + 2 :]):
            return None
        return Split(self.axis, 1, (heads,), (self.queries,))


# None: the tensor is replicated.
Layout = Split | None
