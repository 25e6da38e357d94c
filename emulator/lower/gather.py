"""Gathers, scatters and indexed updates: rows by indirect DMA, single elements along an axis on GpSimd.

Indirect DMA copies rows by row number, 128 at a time. The position of an element is the sum of its indices times their
strides; divided by the strides' greatest common divisor it is a single row number. An index out of bounds must not
address another row. It is replaced by -1, which is out of bounds for every buffer, so that the DMA fails.

GpSimd gathers elements within a partition. A scatter compares the index of each update with all positions, one update
after the other, because several updates may have the same position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Final

import numpy as np

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import GatherFree, IotaPattern
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile
from nxpipe.emulator.lower.epilogue import load_tile
from nxpipe.emulator.lower.integers import EXACT_IN_FLOATS, WordArithmetic
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel
from nxpipe.emulator.lower.lanes import Lanes, Operand, bits, repeated
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.reduce import COMBINED, Accumulator, matrix
from nxpipe.emulator.lower.tiles import WIDEST, each_tile
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Gather, Index, IndexUpdate, Iota, ScatterAlong, TakeAlong
from nxpipe.emulator.ops.base import broadcast_shape


@dataclass(frozen=True)
class Address:
    """The indices of one axis. With `wraps`, negative indices count from its end."""

    indices: View
    size: int
    stride: int
    wraps: bool = False
    in_bounds: bool = False  # the indices are known to be in bounds


def whole_axis(low: Lowering, size: int, stride: int, axis: int, shape: tuple[int, ...]) -> Address:
    """The address of an axis that is taken as a whole: 0, 1, ... along `axis` of the shape."""
    table = low.constant(np.arange(size, dtype=np.int32), DType.INT32)
    strides = tuple(table.strides[0] if dimension == axis else 0 for dimension in range(len(shape)))
    return Address(View(table.buffer, table.dtype, table.offset, shape, strides), size, stride, in_bounds=True)


def row_numbers(low: Lowering, addresses: Sequence[Address], shape: tuple[int, ...]) -> tuple[View, int]:
    """The row number of each combination of indices, broadcast to a shape, and the distance of rows in elements.

    Constant indices are added up at compile time. Row numbers that no loop changes are computed once, before all loops,
    for all nodes that use them."""
    step = gcd(*(address.stride for address in addresses))
    known, computed = _constant_rows(low, addresses, shape, step)
    if not computed:
        return low.constant(known, DType.UINT32).broadcast(shape), step
    views = [address.indices for address in computed]
    key = ("row numbers", shape, step, tuple(computed), known.shape, known.tobytes())
    with low.once(key, views) as numbers:
        if not numbers:
            numbers.append(_computed_rows(low, computed, known, shape, step))
    return numbers[0], step


def _constant_rows(
    low: Lowering, addresses: Sequence[Address], shape: tuple[int, ...], step: int
) -> tuple[Array, list[Address]]:
    """The sum of the row numbers of constant indices in bounds, and the other addresses."""
    known, computed = np.zeros((1,) * len(shape), np.int64), []
    for address in addresses:
        table = low.table_of(address.indices.broadcast(shape))
        if table is None:
            computed.append(address)
            continue
        index = np.where((table < 0) & address.wraps, table + address.size, table)
        if index.size and not 0 <= index.min() <= index.max() < address.size:
            computed.append(address)  # an error of the run
        else:
            known = known + index * (address.stride // step)
    return known, computed


def _computed_rows(
    low: Lowering, addresses: Sequence[Address], known: Array, shape: tuple[int, ...], step: int
) -> View:
    """Row numbers of computed indices, plus those of constant indices. Up to 128 are computed one per partition, where
    the indirect DMA needs them."""
    numbers = low.scratch(DType.UINT32, (prod(shape),))
    views = [numbers.packed_as(shape), *(address.indices.broadcast(shape) for address in addresses)]
    number = int(known.flat[0]) if known.size and (known == known.flat[0]).all() else None
    if number is None:
        views.append(low.constant(known, DType.INT32).broadcast(shape))
    exact = sum(address.size * (address.stride // step) for address in addresses) + int(known.max())
    write = _rows_in_words if exact >= EXACT_IN_FLOATS else _rows_in_floats
    for rows, width, (to, *parts) in _number_tiles(low, views, prod(shape)):
        with low.k.scope():
            tiles = [load_tile(low.k, part) for part in parts]
            offset: Operand = number if number is not None else tiles[-1]
            low.k.copy(to.far(), bits(write(Lanes(low.k, rows, width), addresses, tiles, offset, step)))
    return numbers.packed_as(shape)


def _number_tiles(low: Lowering, views: Sequence[View], count: int) -> Iterator[tuple[int, int, list[View]]]:
    if count > PARTITIONS:
        yield from each_tile(low.k, views, WIDEST // 2)
        return
    columns = [view.reshaped((count, 1)) or low.packed(view).packed_as((count, 1)) for view in views]
    yield count, 1, columns


def _rows_in_floats(
    lanes: Lanes, addresses: Sequence[Address], indices: Sequence[Tile], total: Operand, step: int
) -> Tile:
    """Row numbers below 2^24, which the vector engine computes exactly. An index that float32 does not represent is out
    of bounds, also after rounding."""
    valid: Tile | None = None
    for address, index in zip(addresses, indices, strict=False):
        lowest = -address.size if address.wraps else 0
        if not address.in_bounds:
            bound = lanes.two(Alu.GREATER_EQUAL, index, lowest)
            below = lanes.mixed(index, Alu.LESS, address.size, Alu.MULTIPLY, bound)
            valid = below if valid is None else lanes.two(Alu.MULTIPLY, valid, below)
        if address.wraps:
            index = lanes.two(Alu.ADD, lanes.then(index, Alu.LESS, 0, Alu.MULTIPLY, address.size), index)
        if isinstance(total, Tile):
            total = lanes.mixed(index, Alu.MULTIPLY, address.stride // step, Alu.ADD, total)
        else:
            total = lanes.then(index, Alu.MULTIPLY, address.stride // step, Alu.ADD, total)
    assert isinstance(total, Tile)  # there is at least one address
    result = lanes.tile(DType.INT32)
    if valid is None:
        return lanes.copy(total, result)
    return lanes.two(Alu.SUBTRACT, lanes.mixed(total, Alu.ADD, 1, Alu.MULTIPLY, valid), 1, result)


def _rows_in_words(
    lanes: Lanes, addresses: Sequence[Address], indices: Sequence[Tile], offset: Operand, step: int
) -> Tile:
    words = WordArithmetic(lanes, DType.INT32)
    total: Tile | None = None
    violations: list[Tile] = []
    for address, tile in zip(addresses, indices, strict=False):
        index = words.load(tile)
        if address.wraps:
            below = lanes.two(Alu.LESS, index, 0, lanes.tile(DType.INT32))
            index = words.two(Alu.ADD, index, words.with_number(Alu.MULTIPLY, below, address.size))
        if not address.in_bounds:
            violations.append(words.with_number(Alu.LESS, index, 0))
            violations.append(words.with_number(Alu.GREATER_EQUAL, index, address.size))
        term = words.with_number(Alu.MULTIPLY, index, address.stride // step)
        total = term if total is None else words.two(Alu.ADD, total, term)
    assert total is not None  # there is at least one address
    if isinstance(offset, Tile) or offset:
        total = words.two(Alu.ADD, total, words.load(offset))
    for violation in violations:
        lanes.choose(total, bits(violation), -1)
    return total


MOST_AXES: Final = 3  # axes of a row


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor that are selected by number."""

    table: View  # the axes of a row, at row 0
    numbers: View  # of the selected rows
    step: int  # elements from one row to the next

    def far(self, numbers: Tile) -> Far:
        view = self.table
        axes = (Axis(numbers.partitions, self.step), *map(Axis, view.shape, view.strides))
        return Far(view.buffer, view.dtype, view.offset, axes, numbers)


def _address_axes(
    low: Lowering, x: View, axes: Sequence[int], indices: Sequence[View], *, wraps: bool
) -> tuple[View, list[Address], tuple[int, ...], int]:
    """The tensor with the addressed axes first, their addresses, the addresses' common shape, and the number of result
    axes before those of the indices. If the indexed axes are adjacent, the axes before them are addressed too, so that
    one DMA copies rows of many of their positions."""
    index_shape = indices[0].shape
    adjacent = axes[-1] - axes[0] == len(axes) - 1
    leading = tuple(range(axes[0])) if adjacent else ()
    trailing = tuple(axis for axis in range(x.rank) if axis not in axes and axis not in leading)
    transposed = x.transposed((*leading, *axes, *trailing))
    shape = (*(x.shape[axis] for axis in leading), *index_shape)
    addresses = [whole_axis(low, x.shape[axis], x.strides[axis], axis, shape) for axis in leading if x.shape[axis] > 1]
    for axis, view in zip(axes, indices, strict=True):
        addresses.append(Address(view.broadcast(shape), x.shape[axis], x.strides[axis], wraps))
    return transposed, addresses, shape, len(leading)


def rows_of(low: Lowering, x: View, axes: Sequence[int], indices: Sequence[View], *, wraps: bool) -> Rows:
    """The rows of a tensor that indices of some axes select."""
    ordered, addresses, shape, before = _address_axes(low, x, axes, indices, wraps=wraps)
    numbers, step = row_numbers(low, addresses, shape)
    row = ordered
    for _ in range(before + len(axes)):
        row = row.pick(0, 0)
    return Rows(row, numbers.packed_as((prod(shape),)), step)


def with_positive_strides(low: Lowering, x: View, axes: Sequence[int]) -> View:
    """The tensor, or a contiguous copy of it if a stride up to the last of these axes is not positive: row numbers must
    be distinct and at least 0."""
    numbered = range(max(axes) + 1)
    return x if all(x.strides[axis] > 0 or x.shape[axis] == 1 for axis in numbered) else low.copied(x)


def move(low: Lowering, rows: Rows, other: View, *, gather: bool) -> None:
    """Copy each row to (gather) or from its position in `other`, whose first axis counts rows."""
    k = low.k
    rows, row_views = merged_rows(rows, other)
    if rows.table.rank > MOST_AXES:
        with k.loop(rows.table.shape[0]) as index:
            move(low, replace(rows, table=rows.table.pick(0, index)), row_views.pick(1, index), gather=gather)
        return
    for top, count in k.spans(rows.numbers.shape[0], PARTITIONS):
        with k.scope():
            tile = k.tile(DType.UINT32, count, 1, buffers=2).whole
            k.copy(tile, rows.numbers.cut((top, count)).far())
            near, far = row_views.cut((top, count)).far(), rows.far(tile)
            k.copy(*((near, far) if gather else (far, near)))


def merged_rows(rows: Rows, other: View) -> tuple[Rows, View]:
    """The rows and `other` with as few axes per row as the strides of both allow."""
    row, inner = rows.table.merged([other.pick(0, 0)])
    row_views = replace(inner, shape=(other.shape[0], *inner.shape), strides=(other.strides[0], *inner.strides))
    return replace(rows, table=row), row_views


def as_rows(low: Lowering, view: View, rows: Rows) -> View:
    """The view with a single axis for the selected rows, followed by the axes of a row."""
    shape = (rows.numbers.shape[0], *rows.table.shape)
    return view.reshaped(shape) or low.packed(view).packed_as(shape)


def fits(k: Kernel, size: int, dtype: DType) -> bool:
    """True if a double-buffered line fits half of SBUF and its positions fit 16 bits."""
    return size < 2**16 and 4 * size * dtype.itemsize <= k.free_bytes(Memory.SBUF)


def gather_in_partitions(low: Lowering, lines: View, numbers: View, home: View) -> None:
    """Gather from each line (the last axis of `lines`) the elements at the positions in the same line of `numbers`."""
    k, size = low.k, lines.shape[-1]
    count = prod(numbers.shape) // max(prod(lines.shape[:-1]), 1)
    source = matrix(low, lines, lines.rank - 1)
    shape = (source.shape[0], count)
    positions = numbers.reshaped(shape) or low.packed(numbers).packed_as(shape)
    target = home.reshaped(shape)
    out = target or low.scratch(home.dtype, shape)
    for top, height in k.spans(shape[0], PARTITIONS):
        with k.scope():
            line = k.tile(source.dtype, height, size, buffers=2).whole
            k.copy(line, source.cut((top, height)).far())
            for left, width in k.spans(count, WIDEST):
                with k.scope():
                    lanes = Lanes(k, height, width)
                    index = bits(
                        WordArithmetic(lanes, DType.INT32).load(
                            load_tile(k, positions.cut((top, height), (left, width)))
                        )
                    )
                    gathered = k.tile(home.dtype, height, width, buffers=2).whole
                    k.emit(GatherFree(engine=Engine.GPSIMD, dst=gathered, src=line, indices=index))
                    k.copy(out.cut((top, height), (left, width)).far(), gathered)
    if target is None:
        low.copy(home, out.packed_as(home.shape))


@lowers(TakeAlong)
def _take_along(low: Lowering, node: Node, op: TakeAlong) -> None:
    x, indices = map(low.view, node.operands)
    home = low.home(node.result)
    if not home.elements:
        return
    order = (*(axis for axis in range(x.rank) if axis != op.axis), op.axis)
    corner = x.cut(*((0, x.shape[axis] if axis == op.axis else indices.shape[axis]) for axis in range(x.rank)))
    if fits(low.k, x.shape[op.axis], x.dtype):
        gather_in_partitions(low, corner.transposed(order), indices.transposed(order), home.transposed(order))
        return
    corner = with_positive_strides(low, corner, tuple(range(x.rank)))
    shape = indices.shape
    addresses = [
        Address(indices, x.shape[axis], corner.strides[axis])
        if axis == op.axis
        else whole_axis(low, shape[axis], corner.strides[axis], axis, shape)
        for axis in range(x.rank)
    ]
    numbers, step = row_numbers(low, addresses, shape)
    first = replace(corner, shape=(), strides=())
    move(low, Rows(first, numbers.packed_as((prod(shape),)), step), home.packed_as((prod(shape),)), gather=True)


@lowers(ScatterAlong)
def _scatter_along(low: Lowering, node: Node, op: ScatterAlong) -> None:
    """Scatter along an axis: lines are across partitions, and each update is written at the positions equal to its
    index."""
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
    lines_2d = work or low.copied(lines).packed_as(shape)
    updates, positions = (matrix(low, view.transposed(order), home.rank - 1) for view in (update, indices))
    scatter = _Scatter(k, Accumulator.of(node.result.type.dtype), op.combine, node.result.type.dtype)
    for top, height in k.spans(shape[0], PARTITIONS):
        with k.scope():
            update_rows, position_rows = (view.cut((top, height)) for view in (updates, positions))
            scatter.write(lines_2d.cut((top, height)), update_rows, position_rows, size)
    if work is None:
        low.copy(lines, lines_2d.packed_as(lines.shape))


@dataclass(frozen=True)
class _Scatter:
    """A scatter along the free dimension, into lines on partitions."""

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
                position = lanes.tile(DType.INT32)
                k.emit(IotaPattern(engine=Engine.GPSIMD, dst=position, start=left, by_partition=0, steps=(1,)))
                for begin, count in k.spans(indices.shape[1], WIDEST // 4):
                    with k.scope():
                        self._apply_updates(lanes, sums, position, update, indices, (begin, count), size)
                k.copy(piece.far(), self.exact.store(lanes, sums, lanes.tile(lines.dtype), self.dtype))

    def _apply_updates(
        self,
        lanes: Lanes,
        sums: Tile,
        position: Tile,
        update_view: View,
        indices: View,
        span: tuple[Affine, int],
        size: int,
    ) -> None:
        k, rows, count = self.k, lanes.partitions, span[1]
        update_lanes = Lanes(k, rows, count)
        words = WordArithmetic(update_lanes, DType.INT32).load(load_tile(k, indices.cut((0, rows), span)))
        _check_bounds(k, words, size)
        positions, updates = k.tile(DType.FLOAT32, rows, count), k.tile(self.exact.dtype, rows, count)
        update_lanes.copy(words, positions.whole)
        update_lanes.copy(self.exact.load(update_lanes, load_tile(k, update_view.cut((0, rows), span))), updates.whole)
        is_target, combined = lanes.tile(DType.UINT8), lanes.tile(self.exact.dtype)
        with k.loop(count) as index:
            lanes.two(Alu.EQUAL, position, repeated(positions.cut(rows, (index, 1)), lanes.width), is_target)
            update = repeated(updates.cut(rows, (index, 1)), lanes.width)
            if self.combine:
                update = self.exact.two(lanes, COMBINED[self.combine], sums, update, combined)
            lanes.choose(sums, is_target, update)


def _check_bounds(k: Kernel, words: Tile, size: int) -> None:
    """Emit a gather from a dummy of the axis' size. Its result is unused: the instruction fails if an index is out of
    bounds."""
    block: Block = k.tile(DType.UINT32, words.partitions, words.elements)
    dummy = Lanes(k, words.partitions, size).filled(0, DType.UINT32)
    k.emit(GatherFree(engine=Engine.GPSIMD, dst=block.whole, src=dummy, indices=bits(words)))


_SMALL_ROW: Final = 64  # bytes: for shorter rows, a gather within partitions is faster than a DMA descriptor per row


@lowers(Iota)
def _iota(low: Lowering, node: Node, op: Iota) -> None:
    k, home = low.k, low.home(node.result)
    if not op.length:
        return
    width = min(-(-op.length // PARTITIONS), WIDEST)
    full, tail = divmod(op.length, width)
    folded = replace(home, shape=(full, width), strides=(width, 1))
    for top, height in k.spans(full, PARTITIONS):
        with k.scope():
            start = top * (width * op.step) + op.start
            k.copy(folded.cut((top, height)).far(), _iota_tile(k, op, start, height, width))
    if tail:
        left = full * width
        k.copy(home.cut((left, tail)).far(), _iota_tile(k, op, Affine(op.start + left * op.step), 1, tail))


def _iota_tile(k: Kernel, op: Iota, start: Affine, rows: int, width: int) -> Tile:
    """Iota, computed in 32-bit integers; narrower types keep the low bits."""
    lanes = Lanes(k, rows, width)
    words = WordArithmetic.of(lanes, op.dtype)
    tile = lanes.tile(words.dtype)
    step = op.step
    k.emit(IotaPattern(engine=Engine.GPSIMD, dst=tile, start=start, by_partition=width * step, steps=(step,)))
    if op.dtype.itemsize >= words.dtype.itemsize:
        return tile
    narrow = lanes.tile(op.dtype)
    words.store(tile, narrow, op.dtype)
    return narrow


@lowers(Gather)
def _gather(low: Lowering, node: Node, op: Gather) -> None:
    table, indices = map(low.view, node.operands)
    home = low.home(node.result)
    if not home.elements:
        return
    row = prod(table.shape[op.axis + 1 :]) * table.dtype.itemsize
    if op.axis and row < _SMALL_ROW and fits(low.k, table.shape[op.axis], table.dtype):
        before, after = range(op.axis), range(op.axis + 1, table.rank)
        lines = table.transposed((*before, *after, op.axis))
        places = tuple(range(op.axis, op.axis + indices.rank))
        others = tuple(axis for axis in range(home.rank) if axis not in places)
        numbers = indices.broadcast((*lines.shape[:-1], *indices.shape))
        gather_in_partitions(low, lines, numbers, home.transposed((*others, *places)))
        return
    table = with_positive_strides(low, table, (op.axis,))
    rows = rows_of(low, table, (op.axis,), [indices], wraps=False)
    move(low, rows, as_rows(low, home, rows), gather=True)


@lowers(Index)
def _index(low: Lowering, node: Node, op: Index) -> None:
    home = low.home(node.result)
    if not home.elements:
        return
    x = with_positive_strides(low, low.view(node.operands[0]), op.axes)
    rows = rows_of(low, x, op.axes, _broadcast_indices(low, node, node.operands[1:]), wraps=True)
    move(low, rows, as_rows(low, home, rows), gather=True)


def _broadcast_indices(low: Lowering, node: Node, indices: Sequence[Value]) -> list[View]:
    shape = broadcast_shape(node.op, [index.type.shape for index in indices])
    return [low.view(index).broadcast(shape) for index in indices]


@lowers(IndexUpdate)
def _index_update(low: Lowering, node: Node, op: IndexUpdate) -> None:
    home = low.updated(node)
    indices = _broadcast_indices(low, node, node.operands[2:])
    remaining = tuple(size for axis, size in enumerate(home.shape) if axis not in op.axes)
    position = op.axes[0] if op.axes[-1] - op.axes[0] == len(op.axes) - 1 else 0
    update_shape = (*remaining[:position], *indices[0].shape, *remaining[position:])
    if not prod(update_shape):
        return
    update = low.view(node.operands[1]).broadcast(update_shape)
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
        _round_into(low, work, home, node.result.type.dtype)


def _round_into(low: Lowering, work: View, home: View, dtype: DType) -> None:
    exact = Accumulator.of(dtype)
    for rows, width, (to, source) in each_tile(low.k, [home, work]):
        with low.k.scope():
            lanes = Lanes(low.k, rows, width)
            rounded = low.k.tile(home.dtype, rows, width, buffers=2).whole
            low.k.copy(to.far(), exact.store(lanes, load_tile(low.k, source), rounded, dtype))


def _combine_rows(low: Lowering, rows: Rows, update: View, exact: Accumulator, op: Alu) -> None:
    """Combine one row after the other, because several updates may have the same position."""
    k = low.k
    rows, row_views = merged_rows(rows, update)
    if rows.table.rank > MOST_AXES:
        with k.loop(rows.table.shape[0]) as index:
            inner = replace(rows, table=rows.table.pick(0, index))
            _combine_rows(low, inner, row_views.pick(1, index), exact, op)
        return
    with k.loop(rows.numbers.shape[0]) as index, k.scope():
        number = k.tile(DType.UINT32, 1, 1).whole
        k.copy(number, rows.numbers.cut((index, 1)).far())
        lanes = Lanes(k, 1, rows.table.elements)
        old, new = lanes.tile(rows.table.dtype), lanes.tile(row_views.dtype)
        k.copy(old, rows.far(number))
        k.copy(new, row_views.cut((index, 1)).far())
        exact.two(lanes, op, old, exact.load(lanes, new), old)
        k.copy(rows.far(number), old)
