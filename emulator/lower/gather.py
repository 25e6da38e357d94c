"""Gathers, scatters and indexed updates: rows by indirect DMA, single elements along an axis on GpSimd.

GpSimd picks elements inside of partitions. A scatter compares the number of each update with that of each position, one
update after the other, because several may have the same position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import GatherFree
from nxpipe.emulator.isa.gpsimd import IotaPattern as Counting
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.lower.epilogue import load_tile
from nxpipe.emulator.lower.indirect_dma import (
    MOST_AXES,
    Address,
    Rows,
    as_rows,
    counted,
    merged_rows,
    move,
    row_numbers,
    rows_of,
    upwards,
)
from nxpipe.emulator.lower.integers import Words
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel
from nxpipe.emulator.lower.lanes import Lanes, bits, repeated
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.reduce import COMBINED, Accumulator, matrix
from nxpipe.emulator.lower.tiles import WIDEST, each_tile
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import Gather, Index, IndexUpdate, Iota, ScatterAlong, TakeAlong
from nxpipe.emulator.ops.base import broadcast_shape


def fits(k: Kernel, size: int, dtype: DType) -> bool:
    """True if a whole line fits SBUF twice."""
    return size < 2**16 and 4 * size * dtype.itemsize <= k.left(Memory.SBUF)


def pick(low: Lowering, lines: View, numbers: View, home: View) -> None:
    """From each line, the last axis of `lines`, the elements at the positions in the same line of `numbers`."""
    k, size = low.k, lines.shape[-1]
    count = prod(numbers.shape) // max(prod(lines.shape[:-1]), 1)
    source = matrix(low, lines, lines.rank - 1)
    shape = (source.shape[0], count)
    places = numbers.reshaped(shape) or low.packed(numbers).packed_as(shape)
    target = home.reshaped(shape)
    made = target or low.scratch(home.dtype, shape)
    for top, height in k.spans(shape[0], PARTITIONS):
        with k.scope():
            line = k.tile(source.dtype, height, size, buffers=2).whole
            k.copy(line, source.cut((top, height)).far())
            for left, width in k.spans(count, WIDEST):
                with k.scope():
                    lanes = Lanes(k, height, width)
                    index = bits(Words(lanes, DType.INT32).load(load_tile(k, places.cut((top, height), (left, width)))))
                    found = k.tile(home.dtype, height, width, buffers=2).whole
                    k.emit(GatherFree(engine=Engine.GPSIMD, dst=found, src=line, indices=index))
                    k.copy(made.cut((top, height), (left, width)).far(), found)
    if target is None:
        low.copy(home, made.packed_as(home.shape))


@lowers(TakeAlong)
def _take_along(low: Lowering, node: Node, op: TakeAlong) -> None:
    x, indices = map(low.view, node.operands)
    home = low.home(node.result)
    if not home.elements:
        return
    order = (*(axis for axis in range(x.rank) if axis != op.axis), op.axis)
    corner = x.cut(*((0, x.shape[axis] if axis == op.axis else indices.shape[axis]) for axis in range(x.rank)))
    if fits(low.k, x.shape[op.axis], x.dtype):
        pick(low, corner.transposed(order), indices.transposed(order), home.transposed(order))
        return
    corner = upwards(low, corner, tuple(range(x.rank)))
    shape = indices.shape
    addresses = [
        Address(indices, x.shape[axis], corner.strides[axis])
        if axis == op.axis
        else counted(low, shape[axis], corner.strides[axis], axis, shape)
        for axis in range(x.rank)
    ]
    numbers, step = row_numbers(low, addresses, shape)
    first = replace(corner, shape=(), strides=())
    move(low, Rows(first, numbers.packed_as((prod(shape),)), step), home.packed_as((prod(shape),)), gather=True)


@lowers(ScatterAlong)
def _scatter_along(low: Lowering, node: Node, op: ScatterAlong) -> None:
    """Lines are across partitions. Each update is written where its number is that of the position."""
    k, home = low.k, low.updated(node)
    update, indices = map(low.view, node.operands[1:])
    if not indices.elements:
        return
    order = (*(axis for axis in range(home.rank) if axis != op.axis), op.axis)
    size = home.shape[op.axis]
    corner = home.cut(*((0, size if axis == op.axis else indices.shape[axis]) for axis in range(home.rank)))
    lines = corner.transposed(order)
    shape = (prod(lines.shape[:-1]), size)
    work = lines.reshaped(shape)
    made = work or low.copied(lines).packed_as(shape)
    news, places = (matrix(low, view.transposed(order), home.rank - 1) for view in (update, indices))
    scatter = _Scatter(k, Accumulator.of(node.result.type.dtype), op.combine, node.result.type.dtype)
    for top, height in k.spans(shape[0], PARTITIONS):
        with k.scope():
            news_here, places_here = (view.cut((top, height)) for view in (news, places))
            scatter.write(made.cut((top, height)), news_here, places_here, size)
    if work is None:
        low.copy(lines, made.packed_as(lines.shape))


@dataclass(frozen=True)
class _Scatter:
    k: Kernel
    exact: Accumulator
    combine: str
    dtype: DType

    def write(self, lines: View, update: View, indices: View, size: int) -> None:
        k, rows = self.k, lines.shape[0]
        for left, width in k.spans(size, WIDEST):
            with k.scope():
                lanes = Lanes(k, rows, width)
                piece = lines.cut((0, rows), (left, width))
                old = load_tile(k, piece)
                sums = self.exact.store(lanes, self.exact.load(lanes, old), lanes.tile(self.exact.dtype), DType.INT32)
                number = lanes.tile(DType.INT32)
                k.emit(Counting(engine=Engine.GPSIMD, dst=number, start=left, by_partition=0, steps=(1,)))
                for begin, count in k.spans(indices.shape[1], WIDEST // 4):
                    with k.scope():
                        self._lay_down(lanes, sums, number, update, indices, (begin, count), size)
                k.copy(piece.far(), self.exact.store(lanes, sums, lanes.tile(lines.dtype), self.dtype))

    def _lay_down(
        self, lanes: Lanes, sums: Tile, number: Tile, update: View, indices: View, span: tuple[Affine, int], size: int
    ) -> None:
        k, rows, count = self.k, lanes.partitions, span[1]
        own = Lanes(k, rows, count)
        words = Words(own, DType.INT32).load(load_tile(k, indices.cut((0, rows), span)))
        _require_inside(k, words, size)
        where, news = k.tile(DType.FLOAT32, rows, count), k.tile(self.exact.dtype, rows, count)
        own.copy(words, where.whole)
        own.copy(self.exact.load(own, load_tile(k, update.cut((0, rows), span))), news.whole)
        meets, together = lanes.tile(DType.UINT8), lanes.tile(self.exact.dtype)
        with k.loop(count) as index:
            lanes.two(Alu.EQUAL, number, repeated(where.cut(rows, (index, 1)), lanes.width), meets)
            new = repeated(news.cut(rows, (index, 1)), lanes.width)
            if self.combine:
                new = self.exact.two(lanes, COMBINED[self.combine], sums, new, together)
            lanes.choose(sums, meets, new)


def _require_inside(k: Kernel, words: Tile, size: int) -> None:
    """A gather from equally many elements as the axis has needs no copy, only the check of its indices."""
    block: Block = k.tile(DType.UINT32, words.partitions, words.elements)
    one = Lanes(k, words.partitions, size).filled(0, DType.UINT32)
    k.emit(GatherFree(engine=Engine.GPSIMD, dst=block.whole, src=one, indices=bits(words)))


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
        with k.scope():
            start = top * (width * op.step) + op.start
            k.copy(folded.cut((top, height)).far(), _counted(k, op, start, height, width))
    if rest:
        left = full * width
        k.copy(home.cut((left, rest)).far(), _counted(k, op, Affine(op.start + left * op.step), 1, rest))


def _counted(k: Kernel, op: Iota, start: Affine, rows: int, width: int) -> Tile:
    """Iota in 32-bit integers, of which narrower types keep the low bits."""
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
    exact = Accumulator.of(node.result.type.dtype)
    work = home if home.dtype.itemsize == exact.dtype.itemsize else low.scratch(exact.dtype, home.shape)
    if work is not home:
        low.copy(work, home)
    rows = rows_of(low, work, op.axes, indices, wraps=True)
    _combine_rows(low, rows, as_rows(low, update, rows), exact, COMBINED[op.combine])
    if work is not home:
        _settled(low, work, home, node.result.type.dtype)


def _settled(low: Lowering, work: View, home: View, dtype: DType) -> None:
    exact = Accumulator.of(dtype)
    for rows, width, (to, source) in each_tile(low.k, [home, work]):
        with low.k.scope():
            lanes = Lanes(low.k, rows, width)
            made = low.k.tile(home.dtype, rows, width, buffers=2).whole
            low.k.copy(to.far(), exact.store(lanes, load_tile(low.k, source), made, dtype))


def _combine_rows(low: Lowering, rows: Rows, update: View, exact: Accumulator, op: Alu) -> None:
    """Combine one row after the other, because several may have the same position."""
    k = low.k
    rows, straight = merged_rows(rows, update)
    if rows.table.rank > MOST_AXES:
        with k.loop(rows.table.shape[0]) as index:
            inner = replace(rows, table=rows.table.pick(0, index))
            _combine_rows(low, inner, straight.pick(1, index), exact, op)
        return
    with k.loop(rows.numbers.shape[0]) as index, k.scope():
        number = k.tile(DType.UINT32, 1, 1).whole
        k.copy(number, rows.numbers.cut((index, 1)).far())
        lanes = Lanes(k, 1, rows.table.elements)
        old, new = lanes.tile(rows.table.dtype), lanes.tile(straight.dtype)
        k.copy(old, rows.far(number))
        k.copy(new, straight.cut((index, 1)).far())
        exact.two(lanes, op, old, exact.load(lanes, new), old)
        k.copy(rows.far(number), old)
