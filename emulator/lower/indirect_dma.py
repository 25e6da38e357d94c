"""Indirect DMA: row numbers computed from indices, and copies of rows by number, 128 at a time.

The position of an element is the sum of its indices times their strides; in units of the strides' greatest common
divisor it is one number. An index outside of its axis must not reach into another row: it becomes a number that no
buffer has, which the DMA refuses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Final

import numpy as np

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Alu
from nxpipe.emulator.isa.operands import Axis, Far, Tile
from nxpipe.emulator.lower.epilogue import load_tile
from nxpipe.emulator.lower.integers import Words
from nxpipe.emulator.lower.kernel import PARTITIONS
from nxpipe.emulator.lower.lanes import Lanes, bits
from nxpipe.emulator.lower.lowering import Lowering
from nxpipe.emulator.lower.tiles import WIDEST, each_tile
from nxpipe.emulator.lower.view import View


@dataclass(frozen=True)
class Address:
    """The indices of one axis. With `wraps`, negative ones count from its end."""

    indices: View
    size: int
    stride: int
    wraps: bool = False
    sure: bool = False  # they cannot be outside


def counted(low: Lowering, size: int, stride: int, axis: int, shape: tuple[int, ...]) -> Address:
    """An axis of which every index is taken in order, along an axis of the whole."""
    table = low.constant(np.arange(size, dtype=np.int32), DType.INT32)
    strides = tuple(table.strides[0] if each == axis else 0 for each in range(len(shape)))
    return Address(View(table.buffer, table.dtype, table.offset, shape, strides), size, stride, sure=True)


def row_numbers(low: Lowering, addresses: Sequence[Address], shape: tuple[int, ...]) -> tuple[View, int]:
    """The row number of each combination of indices that broadcast to a shape, and the elements from one row to the
    next."""
    step = gcd(*(each.stride for each in addresses))
    made = low.scratch(DType.UINT32, shape)
    views = [each.indices.broadcast(shape) for each in addresses]
    for rows, width, (to, *parts) in each_tile(low.k, [made, *views], WIDEST // 2):
        with low.k.scope():
            words = Words(Lanes(low.k, rows, width), DType.INT32)
            total: Tile | None = None
            outside: list[Tile] = []
            for each, part in zip(addresses, parts, strict=True):
                index = words.load(load_tile(low.k, part))
                if each.wraps:
                    below = words.with_number(Alu.LESS, index, 0)
                    index = words.two(Alu.ADD, index, words.with_number(Alu.MULTIPLY, below, each.size))
                if not each.sure:
                    outside.append(words.with_number(Alu.LESS, index, 0))
                    outside.append(words.with_number(Alu.GREATER_EQUAL, index, each.size))
                term = words.with_number(Alu.MULTIPLY, index, each.stride // step)
                total = term if total is None else words.two(Alu.ADD, total, term)
            assert total is not None  # something is addressed
            for breach in outside:
                words.lanes.choose(total, bits(breach), -1)
            low.k.copy(to.far(), bits(total))
    return made, step


MOST_AXES: Final = 3  # of a row


@dataclass(frozen=True)
class Rows:
    """A tensor as numbered rows: their numbers, their distance, and the axes of a row."""

    table: View  # any row's axes, beginning at the first element
    numbers: View  # one for each row that is meant
    step: int

    def far(self, numbers: Tile) -> Far:
        view = self.table
        axes = (Axis(numbers.partitions, self.step), *map(Axis, view.shape, view.strides))
        return Far(view.buffer, view.dtype, view.offset, axes, numbers)


def _addressed(
    low: Lowering, x: View, axes: Sequence[int], indices: Sequence[View], *, wraps: bool
) -> tuple[View, list[Address], tuple[int, ...], int]:
    """The tensor with the indexed axes first, their addresses, the shape of these together, and the number of result
    axes before the indices' own. Axes before adjacent indexed ones are numbered like them, so that one copy serves many
    of their rows."""
    common = indices[0].shape
    adjacent = axes[-1] - axes[0] == len(axes) - 1
    before = tuple(range(axes[0])) if adjacent else ()
    behind = tuple(axis for axis in range(x.rank) if axis not in axes and axis not in before)
    ordered = x.transposed((*before, *axes, *behind))
    shape = (*(x.shape[axis] for axis in before), *common)
    found = [counted(low, x.shape[axis], x.strides[axis], axis, shape) for axis in before if x.shape[axis] > 1]
    for axis, view in zip(axes, indices, strict=True):
        found.append(Address(view.broadcast(shape), x.shape[axis], x.strides[axis], wraps))
    return ordered, found, shape, len(before)


def rows_of(low: Lowering, x: View, axes: Sequence[int], indices: Sequence[View], *, wraps: bool) -> Rows:
    ordered, addresses, shape, before = _addressed(low, x, axes, indices, wraps=wraps)
    numbers, step = row_numbers(low, addresses, shape)
    row = ordered
    for _ in range(before + len(axes)):
        row = row.pick(0, 0)
    return Rows(row, numbers.packed_as((prod(shape),)), step)


def upwards(low: Lowering, x: View, axes: Sequence[int]) -> View:
    """Row numbers that count up from the first row and are distinct."""
    numbered = range(max(axes) + 1)
    return x if all(x.strides[axis] > 0 or x.shape[axis] == 1 for axis in numbered) else low.copied(x)


def move(low: Lowering, rows: Rows, other: View, *, gather: bool) -> None:
    """Copy each row to or from its place in `other`, whose first axis counts rows."""
    k = low.k
    rows, straight = merged_rows(rows, other)
    if rows.table.rank > MOST_AXES:
        with k.loop(rows.table.shape[0]) as index:
            move(low, replace(rows, table=rows.table.pick(0, index)), straight.pick(1, index), gather=gather)
        return
    for top, count in k.spans(rows.numbers.shape[0], PARTITIONS):
        with k.scope():
            tile = k.tile(DType.UINT32, count, 1, buffers=2).whole
            k.copy(tile, rows.numbers.cut((top, count)).far())
            near, far = straight.cut((top, count)).far(), rows.far(tile)
            k.copy(*((near, far) if gather else (far, near)))


def merged_rows(rows: Rows, other: View) -> tuple[Rows, View]:
    """A row and its counterpart behind the first axis of `other`, with as few axes as both allow."""
    row, inner = rows.table.merged([other.pick(0, 0)])
    straight = replace(inner, shape=(other.shape[0], *inner.shape), strides=(other.strides[0], *inner.strides))
    return replace(rows, table=row), straight


def as_rows(low: Lowering, view: View, rows: Rows) -> View:
    """The view with one axis for all numbered rows, then the axes of a row."""
    shape = (rows.numbers.shape[0], *rows.table.shape)
    return view.reshaped(shape) or low.packed(view).packed_as(shape)
