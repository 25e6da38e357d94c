"""One way of dividing work: into so many indivisible units, of which each rank gets its share.

Query heads are a cut, and so are the inner features of an MLP. A number of units that ranks cannot share evenly is
padded with units of zeros, whose weights are zeros, so that every rank has equally many.

Few key heads serve many query heads. Ranks get places for key heads, each with equally many query heads that it serves:
a key head that has several places is there several times, and the query heads that it serves are padded until they go
up in its places. How many places a rank has is chosen by what ranks then compute.
"""

import math
from typing import NamedTuple

from nxpipe.emulator.ops.shares import Share


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
        """How many pieces there can be at most, unless some are padding; every number of pieces divides it."""
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
        """From now on, the two are one."""
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
        """Of a block of this size."""
        parts, slots, length = self._deal(degree)
        return Share(size, parts, slots, length * (size // max(self.units, 1)))

    def allows(self, degree: int) -> bool:
        """Whether ranks can share this work without doing any of it twice where that would be counted twice."""
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
        """Whether nothing is padded, or all that is may be."""
        even = degree * places == copies * self.units and not any(group % copies for group in groups)
        return even or not any(cut.unpadded for cut in (self, *self.root()._finer))
