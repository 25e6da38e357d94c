"""How ranks share an axis: which elements each has, where they lie on it, and what of its room is padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """Neighbouring elements that a rank has: from where on in its own, from where on in the whole, and how many."""

    own: int
    whole: int
    size: int


@dataclass(frozen=True)
class Share:
    """How ranks share one block of an axis: it falls into `parts` equal parts, and every rank has `slots` places of
    `length` for what it takes of them.

    The places of all ranks, one after the other, go to one part after the other, equally many to each. Where a place
    has room for its part, each place of that part holds all of it. Else they hold one stretch of it after the other.
    What is left over, in the last place of a part or behind the last part, is padding: zeros.
    """

    size: int
    parts: int
    slots: int
    length: int

    @property
    def local(self) -> int:
        """What a rank has, padding included."""
        return self.slots * self.length

    @property
    def is_whole(self) -> bool:
        """Whether every rank has just the block."""
        return self.parts == self.slots == 1 and self.length == self.size

    def is_even(self, degree: int) -> bool:
        """Whether every rank has one part, each part as many ranks, and nothing is padding."""
        return self.slots == 1 and self.length * self.parts == self.size and degree % self.parts == 0

    def is_possible(self, degree: int) -> bool:
        """Whether every element has a place."""
        if not 1 <= self.slots <= self.parts or self.size < 0 or self.size % self.parts:
            return False
        places, part = self._places(degree), self.size // self.parts
        return places > 0 and 0 <= self.length <= part <= places * self.length

    def stretches(self, rank: int, degree: int) -> Iterator[Stretch]:
        """What a rank has that is not padding."""
        part = self.size // self.parts
        for slot in range(self.slots):
            number, turn = divmod(rank * self.slots + slot, self._places(degree))
            first = 0 if self.length == part else turn * self.length
            size = min(self.length, part - first)
            if number < self.parts and size > 0:
                yield Stretch(slot * self.length, number * part + first, size)

    def _places(self, degree: int) -> int:
        """Of each part."""
        return degree * self.slots // self.parts


def shares_of(
    sizes: Sequence[int], parts: Sequence[int], slots: Sequence[int] = (), lengths: Sequence[int] = ()
) -> tuple[Share, ...]:
    """Of a row of blocks. `slots` and `lengths` are empty where every rank has one part of each block."""
    ones, whole = [1] * len(sizes), [size // max(count, 1) for size, count in zip(sizes, parts, strict=True)]
    rows = zip(sizes, parts, slots or ones, lengths or whole, strict=True)
    return tuple(Share(*row) for row in rows)


def uneven(shares: Sequence[Share], degree: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The slots and lengths of a row of blocks, as `shares_of` takes them: of equal rows there is one spelling."""
    if all(share.is_even(degree) for share in shares):
        return (), ()
    return tuple(share.slots for share in shares), tuple(share.length for share in shares)


def stretches(shares: Sequence[Share], rank: int, degree: int) -> list[Stretch]:
    """What a rank has of a row of blocks that is not padding."""
    found, own, whole = [], 0, 0
    for share in shares:
        found += [Stretch(own + it.own, whole + it.whole, it.size) for it in share.stretches(rank, degree)]
        own, whole = own + share.local, whole + share.size
    return found
