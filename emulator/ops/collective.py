"""Collectives, and how ranks share an axis: the elements of each, their places on it, and the padding.

All ranks run one program; a rank's number decides only which pieces are its own. A collective cannot be computed by one
rank: `emulator.run.fast` runs all of them, each in a context that holds its number and the means of exchange.
"""

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from nxpipe.emulator.errors import ExecutionError
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Operator, require, require_axes


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
        """Elements of a rank, padding included."""
        return self.slots * self.length

    @property
    def is_whole(self) -> bool:
        """Every rank has exactly the block."""
        return self.parts == self.slots == 1 and self.length == self.size

    def is_even(self, degree: int) -> bool:
        """Every rank has one part, every part equally many ranks, and nothing is padding."""
        return self.slots == 1 and self.length * self.parts == self.size and degree % self.parts == 0

    def is_possible(self, degree: int) -> bool:
        """Every element has a place."""
        if not 1 <= self.slots <= self.parts or self.size < 0 or self.size % self.parts:
            return False
        places, part = self._places(degree), self.size // self.parts
        return places > 0 and 0 <= self.length <= part <= places * self.length

    def stretches(self, rank: int, degree: int) -> Iterator[Stretch]:
        """The elements of a rank that are not padding."""
        part = self.size // self.parts
        for slot in range(self.slots):
            number, turn = divmod(rank * self.slots + slot, self._places(degree))
            first = 0 if self.length == part else turn * self.length
            size = min(self.length, part - first)
            if number < self.parts and size > 0:
                yield Stretch(slot * self.length, number * part + first, size)

    def _places(self, degree: int) -> int:
        """The length of each part."""
        return degree * self.slots // self.parts


def shares_of(
    sizes: Sequence[int], parts: Sequence[int], slots: Sequence[int] = (), lengths: Sequence[int] = ()
) -> tuple[Share, ...]:
    """The shares of a row of blocks. `slots` and `lengths` are empty where every rank has one part of each block."""
    ones, whole = [1] * len(sizes), [size // max(count, 1) for size, count in zip(sizes, parts, strict=True)]
    rows = zip(sizes, parts, slots or ones, lengths or whole, strict=True)
    return tuple(Share(*row) for row in rows)


def uneven(shares: Sequence[Share], degree: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The slots and lengths of a row of blocks, as `shares_of` takes them: of equal rows there is one spelling."""
    if all(share.is_even(degree) for share in shares):
        return (), ()
    return tuple(share.slots for share in shares), tuple(share.length for share in shares)


def stretches(shares: Sequence[Share], rank: int, degree: int) -> list[Stretch]:
    """The elements of a rank in a row of blocks, without padding."""
    found, own, whole = [], 0, 0
    for share in shares:
        found += [Stretch(own + it.own, whole + it.whole, it.size) for it in share.stretches(rank, degree)]
        own, whole = own + share.local, whole + share.size
    return found


class Membership(Protocol):
    """One rank's place among its peers."""

    @property
    def rank(self) -> int: ...

    @property
    def degree(self) -> int: ...

    def exchange(self, mine: Array) -> Sequence[Array]:
        """The contributions of all ranks, in the order of ranks."""


MEMBERSHIP: ContextVar[Membership] = ContextVar("membership")


def _membership(op: Operator, degree: int) -> Membership:
    try:
        member = MEMBERSHIP.get()
    except LookupError:
        raise ExecutionError(
            f"{op.name} needs its {degree} ranks; run the graph with emulator.run.fast.LoadedRanks"
        ) from None
    if member.degree != degree:
        raise ExecutionError(f"{op.name} is for {degree} ranks, but {member.degree} are running")
    return member


@dataclass(frozen=True)
class AllReduce(Operator, name="all_reduce"):
    """The sum of what the ranks hold. Added in the order of ranks, so that every rank has the same bits."""

    degree: int

    def infer(self, x: TensorType) -> TensorType:
        require(self.degree > 1, self, f"{self.degree} ranks have nothing to add")
        require(x.dtype.is_float, self, f"{x} is not a float")
        return x

    def compute(self, x: Array) -> Array:
        return _total(_membership(self, self.degree).exchange(x))


def _total(of_ranks: Sequence[Array]) -> Array:
    """In the order of ranks."""
    first, *others = of_ranks
    total = first.copy()
    for other in others:
        total += other
    return total


@dataclass(frozen=True)
class _Blocks:
    """An axis as `outer` repetitions of a row of blocks, block i cut into `parts[i]` pieces of equal size.

    Where a block has fewer pieces than there are ranks, neighbouring ranks share a piece. `slots` and `lengths` say of
    each block what room a rank has for it, where blocks do not go up evenly; see Share.
    """

    axis: int
    outer: int
    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    degree: int
    slots: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def shares(self) -> tuple[Share, ...]:
        return shares_of(self.sizes, self.parts, self.slots, self.lengths)

    @property
    def local(self) -> int:
        """The length of one row of blocks on a rank."""
        return sum(share.local for share in self.shares)

    def whole_and_local(self, op: Operator) -> tuple[int, int]:
        """The length of the axis, and of one rank's share of it."""
        blocks, optional = len(self.sizes), (len(self.slots), len(self.lengths))
        consistent = len(self.parts) == blocks > 0 < self.outer and optional in ((0, 0), (blocks, blocks))
        require(consistent, op, f"{self.sizes} are not cut by {self.parts}")
        fits = all(share.is_possible(self.degree) for share in self.shares)
        once = (self.slots, self.lengths) == uneven(self.shares, self.degree)
        require(
            fits and once,
            op,
            f"blocks of {self.sizes} cannot be cut into {self.parts} for {self.degree} ranks",
        )
        return self.outer * sum(self.sizes), self.outer * self.local

    def stretches(self, rank: int) -> list[Stretch]:
        """The elements of a rank in one row of blocks, without padding."""
        return stretches(self.shares, rank, self.degree)

    def with_length(self, x: TensorType, length: int) -> TensorType:
        return x.with_shape((*x.shape[: self.axis], length, *x.shape[self.axis + 1 :]))

    def unfolded(self, x: Array) -> Array:
        """The axis as two: repetitions, and one row of blocks."""
        row = x.shape[self.axis] // self.outer
        return x.reshape(*x.shape[: self.axis], self.outer, row, *x.shape[self.axis + 1 :])

    def folded(self, rows: Array) -> Array:
        """The two axes as one again."""
        length = rows.shape[self.axis] * rows.shape[self.axis + 1]
        return rows.reshape(*rows.shape[: self.axis], length, *rows.shape[self.axis + 2 :])

    def piece(self, x: Array, rank: int) -> Array:
        """The piece of a given rank."""
        rows, axis = self.unfolded(x), self.axis + 1
        own = np.zeros((*rows.shape[:axis], self.local, *rows.shape[axis + 1 :]), x.dtype)
        for stretch in self.stretches(rank):
            _copy(own, stretch.own, rows, stretch.whole, stretch.size, axis)
        return self.folded(own)


@dataclass(frozen=True)
class RankSlice(_Blocks, Operator, name="rank_slice"):
    """This rank's pieces of a tensor that all ranks know. On a parameter: what this rank loads of it."""

    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        require_axes(self, (self.axis,), x.rank)
        whole, local = self.whole_and_local(self)
        require(x.shape[self.axis] == whole, self, f"axis {self.axis} of {x} is not {whole} long")
        return self.with_length(x, local)

    def compute(self, x: Array) -> Array:
        return self.piece(x, _membership(self, self.degree).rank)


@dataclass(frozen=True)
class ReduceScatter(_Blocks, Operator, name="reduce_scatter"):
    """A rank's slice (as by RankSlice of the same attributes) of the sum that AllReduce gives."""

    def infer(self, x: TensorType) -> TensorType:
        require_axes(self, (self.axis,), x.rank)
        whole, local = self.whole_and_local(self)
        require(x.shape[self.axis] == whole, self, f"axis {self.axis} of {x} is not {whole} long")
        require(self.degree > 1, self, f"{self.degree} ranks have nothing to add")
        require(x.dtype.is_float, self, f"{x} is not a float")
        return self.with_length(x, local)

    def compute(self, x: Array) -> Array:
        member = _membership(self, self.degree)
        return self.piece(_total(member.exchange(x)), member.rank)


@dataclass(frozen=True)
class AllGather(_Blocks, Operator, name="all_gather"):
    """The tensor of which each rank holds what RankSlice of the same attributes gives it."""

    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        require_axes(self, (self.axis,), x.rank)
        whole, local = self.whole_and_local(self)
        require(x.shape[self.axis] == local, self, f"axis {self.axis} of {x} is not {local} long")
        require(self.degree > 1, self, f"{self.degree} ranks have nothing to gather")
        return self.with_length(x, whole)

    def compute(self, x: Array) -> Array:
        return self.joined(_membership(self, self.degree).exchange(x))

    def joined(self, of_ranks: Sequence[Array]) -> Array:
        """The whole, from what every rank holds."""
        shares, axis = [self.unfolded(share) for share in of_ranks], self.axis + 1
        first = shares[0]
        whole = np.empty((*first.shape[:axis], sum(self.sizes), *first.shape[axis + 1 :]), first.dtype)
        for rank in reversed(range(self.degree)):  # of ranks that share a piece, the first has the last word
            for stretch in self.stretches(rank):
                _copy(whole, stretch.whole, shares[rank], stretch.own, stretch.size, axis)
        return self.folded(whole)


def _copy(target: Array, to: int, source: Array, start: int, count: int, axis: int) -> None:
    """Neighbours along an axis of both."""
    ahead = (slice(None),) * axis
    target[(*ahead, slice(to, to + count))] = source[(*ahead, slice(start, start + count))]
