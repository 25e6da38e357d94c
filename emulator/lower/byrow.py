"""Rows that are found by number, moved by indirect copies: 128 at a time, each wherever its number says."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.operands import Axis, Far, Tile
from nxpipe.emulator.lower.kernel import PARTITIONS
from nxpipe.emulator.lower.lowering import Lowering
from nxpipe.emulator.lower.numbers import Address, counted, row_numbers
from nxpipe.emulator.lower.view import View

MOST_AXES: Final = 3  # of a row


@dataclass(frozen=True)
class Rows:
    """A tensor as rows that are found by number: their numbers, how far apart neighbours are, and a row's own axes."""

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
    """The tensor with the axes first that are found by number; their addresses; the shape of those together; and how
    many axes of the result come before the indices' own. Axes before adjacent ones are numbered like them, so that one
    copy serves many of their rows."""
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
    """Row numbers count upwards from the first row, and tell rows apart."""
    numbered = range(max(axes) + 1)
    return x if all(x.strides[axis] > 0 or x.shape[axis] == 1 for axis in numbered) else low.copied(x)


def move(low: Lowering, rows: Rows, other: View, *, gather: bool) -> None:
    """Each row to or from its place in `other`, whose first axis counts rows."""
    k = low.k
    rows, straight = merged_rows(rows, other)
    if rows.table.rank > MOST_AXES:
        with k.loop(rows.table.shape[0]) as turn:
            move(low, replace(rows, table=rows.table.pick(0, turn)), straight.pick(1, turn), gather=gather)
        return
    for top, count in k.spans(rows.numbers.shape[0], PARTITIONS):
        with k.room():
            tile = k.tile(DType.UINT32, count, 1, turns=2).whole
            k.copy(tile, rows.numbers.cut((top, count)).far())
            near, far = straight.cut((top, count)).far(), rows.far(tile)
            k.copy(*((near, far) if gather else (far, near)))


def merged_rows(rows: Rows, other: View) -> tuple[Rows, View]:
    """A row with as few axes as it has together with what it is copied to or from, behind the first axis of that."""
    row, inner = rows.table.merged([other.pick(0, 0)])
    straight = replace(inner, shape=(other.shape[0], *inner.shape), strides=(other.strides[0], *inner.strides))
    return replace(rows, table=row), straight


def as_rows(low: Lowering, view: View, rows: Rows) -> View:
    """With one axis for all rows that are numbered, and then a row's own."""
    shape = (rows.numbers.shape[0], *rows.table.shape)
    return view.reshaped(shape) or low.packed(view).packed_as(shape)
