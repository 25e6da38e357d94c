"""Collectives, and the sharding of an axis among ranks: the elements of each rank, their positions, and the padding.

All ranks run the same program; a rank's number only selects its shards. A collective needs all ranks:
`emulator.run.fast` runs them together, each in a context with its rank number and a function that exchanges tensors
(MEMBERSHIP).
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
    """Consecutive elements of a rank: their start in the rank's share, their start in the whole axis, and their
    number."""

    own: int
    whole: int
    size: int


@dataclass(frozen=True)
class Share:
    """The sharding of one block of an axis: `parts` equal parts, and `slots` slots of `length` elements per rank.

    The slots of all ranks, in order, are assigned to the parts in order, with the same number of slots per part. If a
    slot is as long as a part, every slot of the part holds a copy of it; otherwise consecutive slots hold consecutive
    stretches of the part. Unused elements, in the last slot of a part or after the last part, are zero padding.
    """

    size: int
    parts: int
    slots: int
    length: int

    @property
    def local(self) -> int:
        """The number of elements of a rank, including padding."""
        return self.slots * self.length

    @property
    def is_whole(self) -> bool:
        """True if every rank has the whole block."""
        return self.parts == self.slots == 1 and self.length == self.size

    def is_even(self, degree: int) -> bool:
        """True if every rank has one part, every part has the same number of ranks, and there is no padding."""
        return self.slots == 1 and self.length * self.parts == self.size and degree % self.parts == 0

    def is_possible(self, degree: int) -> bool:
        """True if every element of the block is assigned to a slot."""
        if not 1 <= self.slots <= self.parts or self.size < 0 or self.size % self.parts:
            return False
        slots_per_part, part = self._slots_per_part(degree), self.size // self.parts
        return slots_per_part > 0 and 0 <= self.length <= part <= slots_per_part * self.length

    def stretches(self, rank: int, degree: int) -> Iterator[Stretch]:
        """The stretches of a rank, without padding."""
        part = self.size // self.parts
        for slot in range(self.slots):
            part_index, slot_in_part = divmod(rank * self.slots + slot, self._slots_per_part(degree))
            first = 0 if self.length == part else slot_in_part * self.length
            size = min(self.length, part - first)
            if part_index < self.parts and size > 0:
                yield Stretch(slot * self.length, part_index * part + first, size)

    def _slots_per_part(self, degree: int) -> int:
        """The number of slots per part."""
        return degree * self.slots // self.parts


def shares_of(
    sizes: Sequence[int], parts: Sequence[int], slots: Sequence[int] = (), lengths: Sequence[int] = ()
) -> tuple[Share, ...]:
    """The shares of a row of blocks. Empty `slots` and `lengths` mean that every rank has one part of each block."""
    ones, whole = [1] * len(sizes), [size // max(count, 1) for size, count in zip(sizes, parts, strict=True)]
    rows = zip(sizes, parts, slots or ones, lengths or whole, strict=True)
    return tuple(Share(*row) for row in rows)


def uneven(shares: Sequence[Share], degree: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The slots and lengths of a row of blocks for `shares_of`, in canonical form: empty for an even sharding."""
    if all(share.is_even(degree) for share in shares):
        return (), ()
    return tuple(share.slots for share in shares), tuple(share.length for share in shares)


def stretches(shares: Sequence[Share], rank: int, degree: int) -> list[Stretch]:
    """The stretches of a rank in a row of blocks, without padding."""
    result, own, whole = [], 0, 0
    for share in shares:
        result += [
            Stretch(own + stretch.own, whole + stretch.whole, stretch.size) for stretch in share.stretches(rank, degree)
        ]
        own, whole = own + share.local, whole + share.size
    return result


class Membership(Protocol):
    """A rank of a running group, and its exchange with the others."""

    @property
    def rank(self) -> int: ...

    @property
    def degree(self) -> int: ...

    def exchange(self, mine: Array) -> Sequence[Array]:
        """The tensors that all ranks pass, in the order of ranks."""


MEMBERSHIP: ContextVar[Membership] = ContextVar("membership")


def _membership(op: Operator, degree: int) -> Membership:
    try:
        member = MEMBERSHIP.get()
    except LookupError:
        raise ExecutionError(f"{op.name} needs its {degree} ranks; run the graph with LoadedRanks") from None
    if member.degree != degree:
        raise ExecutionError(f"{op.name} is for {degree} ranks, but {member.degree} are running")
    return member


@dataclass(frozen=True)
class AllReduce(Operator, name="all_reduce"):
    """The sum of the ranks' tensors, added in the order of ranks, so that all ranks have identical results."""

    degree: int

    def infer(self, x: TensorType) -> TensorType:
        require(self.degree > 1, self, f"needs 2 or more ranks, not {self.degree}")
        require(x.dtype.is_float, self, f"{x} is not a float")
        return x

    def compute(self, x: Array) -> Array:
        return _total(_membership(self, self.degree).exchange(x))


def _total(rank_tensors: Sequence[Array]) -> Array:
    """The sum in the order of ranks."""
    first, *others = rank_tensors
    total = first.copy()
    for other in others:
        total += other
    return total


@dataclass(frozen=True)
class _Blocks:
    """An axis as `outer` repetitions of a row of blocks, with block i divided into `parts[i]` equal parts.

    If a block has fewer parts than there are ranks, neighbouring ranks share a part. `slots` and `lengths` describe an
    uneven sharding; see Share.
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
        """The number of elements of a rank in one row of blocks."""
        return sum(share.local for share in self.shares)

    def whole_and_local(self, op: Operator) -> tuple[int, int]:
        """The length of the axis, and the length of one rank's share, after checks of the attributes."""
        blocks, optional = len(self.sizes), (len(self.slots), len(self.lengths))
        consistent = len(self.parts) == blocks > 0 < self.outer and optional in ((0, 0), (blocks, blocks))
        require(
            consistent, op, f"{self.parts} are not the parts of blocks {self.sizes}, or attributes differ in length"
        )
        fits = all(share.is_possible(self.degree) for share in self.shares)
        is_canonical = (self.slots, self.lengths) == uneven(self.shares, self.degree)
        require(
            fits and is_canonical,
            op,
            f"blocks of {self.sizes} cannot be divided into {self.parts} parts for {self.degree} ranks",
        )
        return self.outer * sum(self.sizes), self.outer * self.local

    def stretches(self, rank: int) -> list[Stretch]:
        """The stretches of a rank in one row of blocks, without padding."""
        return stretches(self.shares, rank, self.degree)

    def with_length(self, x: TensorType, length: int) -> TensorType:
        return x.with_shape((*x.shape[: self.axis], length, *x.shape[self.axis + 1 :]))

    def unfolded(self, x: Array) -> Array:
        """Split the axis in two: repetitions, and one row of blocks."""
        row = x.shape[self.axis] // self.outer
        return x.reshape(*x.shape[: self.axis], self.outer, row, *x.shape[self.axis + 1 :])

    def folded(self, rows: Array) -> Array:
        """Merge the two axes of `unfolded`."""
        length = rows.shape[self.axis] * rows.shape[self.axis + 1]
        return rows.reshape(*rows.shape[: self.axis], length, *rows.shape[self.axis + 2 :])

    def piece(self, x: Array, rank: int) -> Array:
        """The share of a rank, with zero padding."""
        rows, axis = self.unfolded(x), self.axis + 1
        own = np.zeros((*rows.shape[:axis], self.local, *rows.shape[axis + 1 :]), x.dtype)
        for stretch in self.stretches(rank):
            _copy(own, stretch.own, rows, stretch.whole, stretch.size, axis)
        return self.folded(own)


@dataclass(frozen=True)
class RankSlice(_Blocks, Operator, name="rank_slice"):
    """This rank's share of a tensor that all ranks have. On a parameter: the share that the rank loads."""

    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        require_axes(self, (self.axis,), x.rank)
        whole, local = self.whole_and_local(self)
        require(x.shape[self.axis] == whole, self, f"axis {self.axis} of {x} does not have {whole} elements")
        return self.with_length(x, local)

    def compute(self, x: Array) -> Array:
        return self.piece(x, _membership(self, self.degree).rank)


@dataclass(frozen=True)
class ReduceScatter(_Blocks, Operator, name="reduce_scatter"):
    """A rank's share, as of RankSlice with the same attributes, of the sum of AllReduce."""

    def infer(self, x: TensorType) -> TensorType:
        require_axes(self, (self.axis,), x.rank)
        whole, local = self.whole_and_local(self)
        require(x.shape[self.axis] == whole, self, f"axis {self.axis} of {x} does not have {whole} elements")
        require(self.degree > 1, self, f"needs 2 or more ranks, not {self.degree}")
        require(x.dtype.is_float, self, f"{x} is not a float")
        return self.with_length(x, local)

    def compute(self, x: Array) -> Array:
        member = _membership(self, self.degree)
        return self.piece(_total(member.exchange(x)), member.rank)


@dataclass(frozen=True)
class AllGather(_Blocks, Operator, name="all_gather"):
    """The whole tensor, from the ranks' shares: the inverse of RankSlice with the same attributes."""

    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        require_axes(self, (self.axis,), x.rank)
        whole, local = self.whole_and_local(self)
        require(x.shape[self.axis] == local, self, f"axis {self.axis} of {x} does not have {local} elements")
        require(self.degree > 1, self, f"needs 2 or more ranks, not {self.degree}")
        return self.with_length(x, whole)

    def compute(self, x: Array) -> Array:
        return self.joined(_membership(self, self.degree).exchange(x))

    def joined(self, rank_tensors: Sequence[Array]) -> Array:
        """The whole tensor from the shares of all ranks."""
        shares, axis = [self.unfolded(share) for share in rank_tensors], self.axis + 1
        first = shares[0]
        whole = np.empty((*first.shape[:axis], sum(self.sizes), *first.shape[axis + 1 :]), first.dtype)
        for rank in reversed(range(self.degree)):  # the first of several ranks with the same part overwrites the others
            for stretch in self.stretches(rank):
                _copy(whole, stretch.whole, shares[rank], stretch.own, stretch.size, axis)
        return self.folded(whole)


def _copy(target: Array, to: int, source: Array, start: int, count: int, axis: int) -> None:
    """Copy consecutive elements along an axis."""
    leading = (slice(None),) * axis
    target[(*leading, slice(to, to + count))] = source[(*leading, slice(start, start + count))]
