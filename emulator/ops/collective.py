"""What ranks say to each other. All ranks run one program; a rank's number decides only which pieces are its own.

A collective cannot be computed by one rank. `emulator.ranks` runs all of them, each in a context that knows its
number and how to meet the others.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from emulator.errors import ExecutionError
from emulator.numerics import Array
from emulator.ops.base import Operator, require, require_axes
from emulator.types import TensorType


class Membership(Protocol):
    """One rank's place among its peers."""

    @property
    def rank(self) -> int: ...

    @property
    def degree(self) -> int: ...

    def exchange(self, mine: Array) -> Sequence[Array]:
        """What every rank brought to this meeting, in the order of ranks."""


MEMBERSHIP: ContextVar[Membership] = ContextVar("membership")


def _membership(op: Operator, degree: int) -> Membership:
    try:
        member = MEMBERSHIP.get()
    except LookupError:
        raise ExecutionError(f"{op.name} needs its {degree} ranks; run the graph with emulator.ranks") from None
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
        first, *others = _membership(self, self.degree).exchange(x)
        total = first.copy()
        for other in others:
            total += other
        return total


@dataclass(frozen=True)
class _Blocks:
    """An axis as `outer` repetitions of a row of blocks, block i cut into `parts[i]` pieces of equal size.

    Where a block has fewer pieces than there are ranks, neighbouring ranks share a piece.
    """

    axis: int
    outer: int
    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    degree: int

    def whole_and_local(self, op: Operator) -> tuple[int, int]:
        """The length of the axis, and of one rank's share of it."""
        require(len(self.sizes) == len(self.parts) > 0 < self.outer, op, f"{self.sizes} are not cut by {self.parts}")
        fits = all(
            parts > 0 <= size and size % parts == 0 and self.degree % parts == 0
            for size, parts in zip(self.sizes, self.parts, strict=True)
        )
        require(fits, op, f"blocks of {self.sizes} cannot be cut into {self.parts} for {self.degree} ranks")
        local = sum(size // parts for size, parts in zip(self.sizes, self.parts, strict=True))
        return self.outer * sum(self.sizes), self.outer * local

    def with_length(self, x: TensorType, length: int) -> TensorType:
        return x.with_shape((*x.shape[: self.axis], length, *x.shape[self.axis + 1 :]))

    def unfolded(self, x: Array) -> Array:
        """The axis as two: repetitions, and one row of blocks."""
        return x.reshape(*x.shape[: self.axis], self.outer, -1, *x.shape[self.axis + 1 :])


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

    def piece(self, x: Array, rank: int) -> Array:
        """What a given rank takes."""
        rows, start, pieces = self.unfolded(x), 0, []
        for size, parts in zip(self.sizes, self.parts, strict=True):
            length = size // parts
            mine = start + rank * parts // self.degree * length
            pieces.append(rows.take(range(mine, mine + length), axis=self.axis + 1))
            start += size
        joined = np.concatenate(pieces, axis=self.axis + 1) if len(pieces) > 1 else pieces[0]
        return joined.reshape(*x.shape[: self.axis], -1, *x.shape[self.axis + 1 :])


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
        shares = [self.unfolded(share) for share in of_ranks]
        start, blocks = 0, []
        for size, parts in zip(self.sizes, self.parts, strict=True):
            length = size // parts
            owners = shares[:: self.degree // parts]  # of ranks that share a piece, the first
            blocks += [owner.take(range(start, start + length), axis=self.axis + 1) for owner in owners]
            start += length
        whole, shape = np.concatenate(blocks, axis=self.axis + 1), of_ranks[0].shape
        return whole.reshape(*shape[: self.axis], -1, *shape[self.axis + 1 :])
