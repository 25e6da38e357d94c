"""Operators that move whole rows to or from computed places, and numbers that count."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Final

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import IotaPattern as Counting
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.lower.along import fits, pick
from nxpipe.emulator.lower.byrow import MOST_AXES, Rows, as_rows, merged_rows, move, rows_of, upwards
from nxpipe.emulator.lower.ending import load
from nxpipe.emulator.lower.integers import Words
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel
from nxpipe.emulator.lower.lanes import Lanes
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.sheets import WIDEST, sheets
from nxpipe.emulator.lower.sums import COMBINED, Sum
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import Gather, Index, IndexUpdate, Iota
from nxpipe.emulator.ops.base import broadcast_shape

_SMALL_ROW: Final = 64  # bytes: below, a copy of its own costs more than to pick elements inside of a partition


@lowers(Iota)
def _iota(low: Lowering, node: Node, op: Iota) -> None:
    k, home = low.k, low.home(node.result)
    if not op.length:
        return
    width = min(-(-op.length // PARTITIONS), WIDEST)
    full, rest = divmod(op.length, width)
    folded = replace(home, shape=(full, width), strides=(width, 1))
    for top, height in k.spans(full, PARTITIONS):
        with k.room():
            start = top * (width * op.step) + op.start
            k.copy(folded.cut((top, height)).far(), _counted(k, op, start, height, width))
    if rest:
        left = full * width
        k.copy(home.cut((left, rest)).far(), _counted(k, op, Affine(op.start + left * op.step), 1, rest))


def _counted(k: Kernel, op: Iota, start: Affine, rows: int, width: int) -> Tile:
    """In words, of which narrower integers keep the last bits."""
    lanes = Lanes(k, rows, width)
    words = Words.of(lanes, op.dtype)
    tile = lanes.tile(words.dtype)
    step = op.step
    k.emit(Counting(engine=Engine.GPSIMD, dst=tile, start=start, by_partition=width * step, steps=(step,)))
    if op.dtype.itemsize >= words.dtype.itemsize:
        return tile
    made = lanes.tile(op.dtype)
    words.store(tile, made, op.dtype)
    return made


@lowers(Gather)
def _gather(low: Lowering, node: Node, op: Gather) -> None:
    table, indices = map(low.view, node.operands)
    home = low.home(node.result)
    if not home.elements:
        return
    row = prod(table.shape[op.axis + 1 :]) * table.dtype.itemsize
    if op.axis and row < _SMALL_ROW and fits(low.k, table.shape[op.axis], table.dtype):
        before, behind = range(op.axis), range(op.axis + 1, table.rank)
        lines = table.transposed((*before, *behind, op.axis))
        places = tuple(range(op.axis, op.axis + indices.rank))
        others = tuple(axis for axis in range(home.rank) if axis not in places)
        numbers = indices.broadcast((*lines.shape[:-1], *indices.shape))
        pick(low, lines, numbers, home.transposed((*others, *places)))
        return
    table = upwards(low, table, (op.axis,))
    rows = rows_of(low, table, (op.axis,), [indices], wraps=False)
    move(low, rows, as_rows(low, home, rows), gather=True)


@lowers(Index)
def _index(low: Lowering, node: Node, op: Index) -> None:
    home = low.home(node.result)
    if not home.elements:
        return
    x = upwards(low, low.view(node.operands[0]), op.axes)
    rows = rows_of(low, x, op.axes, _together(low, node, node.operands[1:]), wraps=True)
    move(low, rows, as_rows(low, home, rows), gather=True)


def _together(low: Lowering, node: Node, indices: Sequence[Value]) -> list[View]:
    shape = broadcast_shape(node.op, [index.type.shape for index in indices])
    return [low.view(index).broadcast(shape) for index in indices]


@lowers(IndexUpdate)
def _index_update(low: Lowering, node: Node, op: IndexUpdate) -> None:
    home = low.updated(node)
    indices = _together(low, node, node.operands[2:])
    kept = tuple(size for axis, size in enumerate(home.shape) if axis not in op.axes)
    place = op.axes[0] if op.axes[-1] - op.axes[0] == len(op.axes) - 1 else 0
    hole = (*kept[:place], *indices[0].shape, *kept[place:])
    if not prod(hole):
        return
    update = low.view(node.operands[1]).broadcast(hole)
    if not op.combine:
        rows = rows_of(low, home, op.axes, indices, wraps=True)
        move(low, rows, as_rows(low, update, rows), gather=False)
        return
    exact = Sum.of(node.result.type.dtype)
    work = home if home.dtype.itemsize == exact.dtype.itemsize else low.scratch(exact.dtype, home.shape)
    if work is not home:
        low.copy(work, home)
    rows = rows_of(low, work, op.axes, indices, wraps=True)
    _combine_rows(low, rows, as_rows(low, update, rows), exact, COMBINED[op.combine])
    if work is not home:
        _settled(low, work, home, node.result.type.dtype)


def _settled(low: Lowering, work: View, home: View, dtype: DType) -> None:
    exact = Sum.of(dtype)
    for rows, width, (to, source) in sheets(low.k, [home, work]):
        with low.k.room():
            lanes = Lanes(low.k, rows, width)
            made = low.k.tile(home.dtype, rows, width, turns=2).whole
            low.k.copy(to.far(), exact.store(lanes, load(low.k, source), made, dtype))


def _combine_rows(low: Lowering, rows: Rows, update: View, exact: Sum, op: Alu) -> None:
    """One row after the other, for several may have the same place."""
    k = low.k
    rows, straight = merged_rows(rows, update)
    if rows.table.rank > MOST_AXES:
        with k.loop(rows.table.shape[0]) as turn:
            inner = replace(rows, table=rows.table.pick(0, turn))
            _combine_rows(low, inner, straight.pick(1, turn), exact, op)
        return
    with k.loop(rows.numbers.shape[0]) as turn, k.room():
        number = k.tile(DType.UINT32, 1, 1).whole
        k.copy(number, rows.numbers.cut((turn, 1)).far())
        lanes = Lanes(k, 1, rows.table.elements)
        old, new = lanes.tile(rows.table.dtype), lanes.tile(straight.dtype)
        k.copy(old, rows.far(number))
        k.copy(new, straight.cut((turn, 1)).far())
        exact.two(lanes, op, old, exact.load(lanes, new), old)
        k.copy(rows.far(number), old)
