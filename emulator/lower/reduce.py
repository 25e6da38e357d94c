"""Reductions: sums and extremes over axes, positions of extremes, and prefix sums.

The reduced axes become the free dimension and the others the partition dimension, by a strided load. Long rows are
reduced in pieces, one after the other, into a float32 column. Integers that float32 cannot represent are reduced on
GpSimd, which is exact, by repeated halving.
"""

from dataclasses import dataclass, replace
from math import inf, nan, prod
from typing import Final

import numpy as np

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.cost import GPSIMD_START
from nxpipe.emulator.isa.gpsimd import IotaPattern, PartitionReduce
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Tile
from nxpipe.emulator.isa.vector import TensorReduce, TensorTensorScan
from nxpipe.emulator.lower.epilogue import load_tile
from nxpipe.emulator.lower.integers import EXACT_IN_FLOATS, WordArithmetic, is_wide
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lanes import Lanes, repeated
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.tiles import WIDEST, chunk_spans, each_tile, fill, over_lanes
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import ArgReduce, Cumulate, Reduce

COMBINED: Final = {"add": Alu.ADD, "maximum": Alu.MAXIMUM, "minimum": Alu.MINIMUM, "multiply": Alu.MULTIPLY}


@dataclass(frozen=True)
class Accumulator:
    """The type in which updates of one element are combined: float32, or exact 32-bit integers."""

    dtype: DType

    @classmethod
    def of(cls, dtype: DType) -> "Accumulator":
        return cls(DType.FLOAT32 if dtype.is_float else DType.INT32)

    def two(self, lanes: Lanes, op: Alu, left: Tile, right: Tile, dst: Tile) -> Tile:
        return lanes.two(op, left, right, dst) if self.dtype.is_float else lanes.exact(op, left, right, dst)

    def load(self, lanes: Lanes, tile: Tile) -> Tile:
        if self.dtype.is_float:
            return lanes.floats(tile)
        return WordArithmetic(lanes, self.dtype).load(tile)

    def store(self, lanes: Lanes, src: Tile, dst: Tile, dtype: DType) -> Tile:
        if self.dtype.is_float or dtype is DType.BOOL:
            lanes.copy(src, dst)
        else:
            WordArithmetic(lanes, self.dtype).store(src, dst, dtype)
        return dst


WIDEST_ROW: Final = 4096  # elements of a row in SBUF at a time
_WORTH_PARTS: Final = 512  # elements: longer rows are split into parts on several partitions
_LEAST_RUN: Final = 512  # bytes of a column block on a partition
_WIDE_ENOUGH: Final = 8  # elements: a shorter kept last axis is loaded with strides

_FOLDS: Final = {
    "all": (Alu.MINIMUM, 1),
    "any": (Alu.MAXIMUM, 0),
    "max": (Alu.MAXIMUM, -inf),
    "mean": (Alu.ADD, 0),
    "min": (Alu.MINIMUM, inf),
    "prod": (Alu.MULTIPLY, 1),
    "sum": (Alu.ADD, 0),
}


@dataclass(frozen=True)
class Fold:
    """A reduction: the operator, its neutral element, and its type (32-bit integers if float32 is not exact)."""

    op: Alu
    neutral: float
    dtype: DType

    @property
    def is_exact(self) -> bool:
        """True for a reduction in 32-bit integers, on GpSimd."""
        return not self.dtype.is_float

    @property
    def crosses_partitions(self) -> bool:
        """True if GpSimd can reduce across partitions."""
        return not self.is_exact and self.op is not Alu.MULTIPLY

    @property
    def start(self) -> float:
        """The neutral element in the type of the reduction."""
        if not self.is_exact or abs(self.neutral) != inf:
            return self.neutral
        limits = np.iinfo(self.dtype.stored)
        return int(limits.max if self.neutral > 0 else limits.min)


def fold_of(function: str, dtype: DType) -> Fold:
    op, neutral = _FOLDS[function]
    counted = not dtype.is_float and function in ("sum", "prod")
    if counted or (is_wide(dtype) and not dtype.is_float and function in ("max", "min")):
        return Fold(op, neutral, DType.UINT32 if dtype in (DType.UINT32, DType.UINT64) else DType.INT32)
    return Fold(op, neutral, DType.FLOAT32)


@lowers(Reduce)
def _reduce(low: Lowering, node: Node, op: Reduce) -> None:
    x, dtype = low.view(node.operands[0]), node.operands[0].type.dtype
    count = prod(x.shape[axis] for axis in op.axes)
    fold = fold_of(op.function, dtype)
    if dtype is DType.BOOL and op.function == "sum" and count < EXACT_IN_FLOATS:
        fold = Fold(Alu.ADD, 0, DType.FLOAT32)  # so many ones are counted exactly
    whole = op.axes == tuple(range(2, x.rank)) and op.keep
    if low.by_channel(node.operands[0]) and whole and count and not fold.is_exact and dtype.is_float:
        _reduce_channels(low, node, fold, 1 / count if op.function == "mean" else None)
        return
    home = low.home(node.result)
    if not count:
        fill(low.k, home, nan if op.function == "mean" else _FOLDS[op.function][1])
        return
    if op.function in ("all", "any") and dtype is not DType.BOOL:
        x = _as_booleans(low, x)
    kept = tuple(axis for axis in range(x.rank) if axis not in op.axes)
    finish = _Finish(low.k, fold, 1 / count if op.function == "mean" else None)
    last = x.rank - 1
    if last in kept and x.shape[last] >= _WIDE_ENOUGH and finish.fold.crosses_partitions:
        ordered = x.transposed((*kept[:-1], *op.axes, last))
        _reduce_downwards(low, finish, ordered, len(kept) - 1, home)
    else:
        source = matrix(low, x.transposed((*kept, *op.axes)), len(kept))
        _reduce_along(low, finish, source, home.packed_as((source.shape[0], 1)))


def _reduce_channels(low: Lowering, node: Node, fold: Fold, factor: float | None) -> None:
    """Reduce all positions of a tensor [batch, channels, position ...], with channels on partitions, several chunks of
    128 at a time, and with an epilogue."""
    k, x = low.k, low.view(node.operands[0])
    batch, channels, *places = x.shape
    by_channel = x.transposed((1, 0, *range(2, x.rank)))
    source = by_channel.reshaped((channels, batch, prod(places))) or low.packed(by_channel).packed_as(
        (channels, batch, prod(places))
    )
    chain, out = low.channel_epilogue(node.result).chain, node.result.type.dtype.on_device
    images = max(WIDEST_ROW // prod(places), 1)
    for image, count in k.spans(batch, images):
        width = count * prod(places)
        for rows in chunk_spans(k, channels, max(WIDEST_ROW // width, 1)):
            with k.scope():
                cut = [over_lanes(view.cut((0, channels), (image, count)), rows) for view in (source, *chain.views)]
                lanes, chunks, *_ = cut[0].shape
                total, result = (k.tile(dtype, lanes, chunks * count, buffers=2) for dtype in (DType.FLOAT32, out))
                _reduce_rows_of_channels(k, fold, cut[0], total)
                scaled = Lanes(k, lanes, chunks * count)
                if factor is None:
                    scaled.copy(total.whole, result.whole)
                else:
                    scaled.two(Alu.MULTIPLY, total.whole, factor, result.whole)
                chain.apply_to(k, cut[1:], {node.result: result.whole})


def _reduce_rows_of_channels(k: Kernel, fold: Fold, source: View, total: Block) -> None:
    """Reduce [lanes, chunks, images, positions] to [lanes, chunks and images]; long rows piece by piece."""
    lanes, chunks, images, places = source.shape
    every = [(0, size) for size in (lanes, chunks, images)]
    if places > WIDEST_ROW:
        Lanes(k, lanes, chunks * images).memset(total.whole, fold.start)
    for left, size in k.spans(places, WIDEST_ROW):
        with k.scope():
            tile = k.tile(source.dtype, lanes, chunks, images, size, buffers=2)
            k.copy(tile.whole, source.cut(*every, (left, size)).far())
            rows = replace(tile, shape=(chunks * images, size)).whole
            if size == places:
                k.emit(TensorReduce(engine=Engine.VECTOR, dst=total.whole, src=rows, op=fold.op))
                continue
            part = k.tile(DType.FLOAT32, lanes, chunks * images)
            k.emit(TensorReduce(engine=Engine.VECTOR, dst=part.whole, src=rows, op=fold.op))
            combine(Lanes(k, lanes, chunks * images), fold, total.whole, part.whole)


def _as_booleans(low: Lowering, x: View) -> View:
    truths = low.scratch(DType.UINT8, x.shape)
    for rows, width, (target, source) in each_tile(low.k, [truths, x]):
        with low.k.scope():
            tile = load_tile(low.k, source)
            low.k.copy(target.far(), Lanes(low.k, rows, width).compared(Alu.NOT_EQUAL, tile, 0.0))
    return truths


@dataclass(frozen=True)
class _Finish:
    """The final step of a reduction: an optional factor (1 / count of a mean), and the store."""

    k: Kernel
    fold: Fold
    factor: float | None

    def store(self, total: Tile, target: View) -> None:
        lanes = Lanes(self.k, total.partitions, total.elements)
        out = self.k.tile(target.dtype, total.partitions, total.elements, buffers=2).whole
        if self.factor is None:
            lanes.copy(total, out)
        else:
            lanes.two(Alu.MULTIPLY, total, self.factor, out)
        self.k.copy(target.far(), out)


def matrix(low: Lowering, view: View, rows: int) -> View:
    """A view as a matrix: the first `rows` axes are its rows. It is copied if strides cannot express that."""
    shape = (prod(view.shape[:rows]), prod(view.shape[rows:]))
    return view.reshaped(shape) or low.packed(view).packed_as(shape)


def _reduce_along(low: Lowering, finish: _Finish, source: View, target: View) -> None:
    """Reduce rows along the free dimension. Few long rows are split into parts first, which fill the partitions."""
    k, (rows, width) = low.k, source.shape
    parts = max(part for part in range(1, PARTITIONS // min(rows, PARTITIONS) + 1) if width % part == 0)
    split = source.reshaped((rows * parts, width // parts)) if width >= _WORTH_PARTS and parts > 1 else None
    if split is not None:
        partial = low.scratch(finish.fold.dtype, (rows * parts, 1))
        _reduce_along(low, _Finish(k, finish.fold, None), split, partial)
        source = partial.packed_as((rows, parts))
    for top, height in k.spans(rows, PARTITIONS):
        with k.scope():
            total = reduce_rows(k, source, (top, height), finish.fold)
            finish.store(total, target.cut((top, height)))


def reduce_rows(k: Kernel, source: View, rows: Span, fold: Fold) -> Tile:
    """Reduce each row to one element of a column."""
    lanes, width = Lanes(k, rows[1], 1), source.shape[1]
    total = k.tile(fold.dtype, rows[1], 1).whole
    if width > WIDEST_ROW:
        lanes.memset(total, fold.start)
    for left, size in k.spans(width, WIDEST_ROW):
        with k.scope():
            tile = k.tile(source.dtype, rows[1], size, buffers=2)
            k.copy(tile.whole, source.cut(rows, (left, size)).far())
            if width <= WIDEST_ROW:
                reduce_tile(k, fold, tile, total)
            else:
                part = k.tile(fold.dtype, rows[1], 1).whole
                reduce_tile(k, fold, tile, part)
                combine(lanes, fold, total, part)
    return total


def combine(lanes: Lanes, fold: Fold, total: Tile, part: Tile) -> None:
    if fold.is_exact:
        lanes.exact(fold.op, total, part, total)
    else:
        lanes.two(fold.op, total, part, total)


def reduce_tile(k: Kernel, fold: Fold, values: Block, dst: Tile) -> None:
    """Reduce a tile to a column; 32-bit integers by combining its two halves, repeatedly."""
    rows, width = values.partitions, values.shape[0]
    if not fold.is_exact:
        k.emit(TensorReduce(engine=Engine.VECTOR, dst=dst, src=values.whole, op=fold.op))
        return
    words = k.tile(fold.dtype, rows, width)
    lanes = Lanes(k, rows, width)
    lanes.copy(WordArithmetic(lanes, fold.dtype).load(values.whole), words.whole)
    while width > 1:
        half = width // 2
        lower, upper = words.cut(rows, (0, half)), words.cut(rows, (width - half, half))
        lanes.exact(fold.op, lower, upper, lower)
        width -= half
    lanes.copy(words.cut(rows, (0, 1)), dst)


def _reduce_downwards(low: Lowering, finish: _Finish, x: View, outer: int, home: View) -> None:
    """Reduce across partitions, with the kept last axis as the free dimension. Rows are combined partition by partition
    as they are loaded, and the partitions at the end."""
    k, width = low.k, x.shape[-1]
    shape = (prod(x.shape[:outer]), prod(x.shape[outer:-1]), width)
    flat = x.reshaped(shape) or low.packed(x).packed_as(shape)
    parts = _parts(k, flat)
    if parts:
        _reduce_between(k, finish, flat, home, parts)
        return
    target = home.packed_as((shape[0], 1, width))
    with k.loop(shape[0]) as index:
        source, row_target = flat.pick(0, index), target.pick(0, index)
        for left, columns in k.spans(width, WIDEST):
            with k.scope():
                total = _combine_rows(k, finish.fold, source, (left, columns))
                finish.store(_reduce_partitions(k, finish.fold, total), row_target.cut((0, 1), (left, columns)))


def _parts(k: Kernel, x: View) -> int:
    """The number of partitions of each row [depth, width] if its columns are added on their own partitions; 0 if that
    takes longer than to combine all rows partition by partition and to reduce across them."""
    (outer, depth, width), core = x.shape, k.core
    most = min(PARTITIONS // min(outer, PARTITIONS), max(width * x.dtype.itemsize // _LEAST_RUN, 1))
    parts = max(part for part in range(1, most + 1) if width % part == 0)
    between = -(-outer // PARTITIONS) * depth * width // parts / core.vector_ghz
    folded = -(-depth // PARTITIONS) * width / core.vector_ghz
    across = outer * (folded + (GPSIMD_START + min(depth, PARTITIONS) * width) / core.gpsimd_ghz)
    return parts if depth <= WIDEST_ROW and between < across else 0


def _reduce_between(k: Kernel, finish: _Finish, x: View, home: View, parts: int) -> None:
    """Reduce the middle axis of [outer, depth, width], with `parts` partitions for each of the outer axis."""
    (outer, depth, width), (outward, down, along) = x.shape, x.strides
    size = width // parts
    target = home.packed_as((outer * parts, size))
    for top, rows in k.spans(outer, PARTITIONS // parts):
        for left, columns in k.spans(size, max(WIDEST_ROW // depth, 1)):
            with k.scope():
                tile = k.tile(x.dtype, rows * parts, depth, columns, buffers=2).whole
                piece = x.cut((top, rows), (0, depth), (left, columns))
                shape, strides = (rows, parts, depth, columns), (outward, size * along, down, along)
                k.copy(tile, replace(piece, shape=shape, strides=strides).far())
                turned = replace(tile, axes=(Axis(columns, 1), Axis(depth, columns)))
                total = k.tile(DType.FLOAT32, rows * parts, columns).whole
                k.emit(TensorReduce(engine=Engine.VECTOR, dst=total, src=turned, op=finish.fold.op))
                finish.store(total, target.cut((top * parts, rows * parts), (left, columns)))


def _combine_rows(k: Kernel, fold: Fold, source: View, columns: Span) -> Tile:
    """Combine all rows to one row per partition."""
    depth, width = source.shape[0], columns[1]
    block = k.tile(DType.FLOAT32, min(depth, PARTITIONS), width)
    if depth > PARTITIONS:
        Lanes(k, block.partitions, width).memset(block.whole, fold.start)
    for top, height in k.spans(depth, PARTITIONS):
        with k.scope():
            tile = load_tile(k, source.cut((top, height), columns))
            lanes = Lanes(k, height, width)
            if depth > PARTITIONS:
                lanes.two(fold.op, block.cut(height), tile, block.cut(height))
            else:
                lanes.copy(tile, block.whole)
    return block.whole


def _reduce_partitions(k: Kernel, fold: Fold, tile: Tile) -> Tile:
    """Reduce across partitions; a minimum is the negated maximum of the negated elements."""
    negate = fold.op is Alu.MINIMUM
    lanes = Lanes(k, tile.partitions, tile.elements)
    source = lanes.two(Alu.MULTIPLY, tile, -1.0, tile) if negate else tile
    reduced = k.tile(DType.FLOAT32, 1, tile.elements).whole
    op = Alu.MAXIMUM if negate else fold.op
    k.emit(PartitionReduce(engine=Engine.GPSIMD, dst=reduced, src=source, op=op))
    return Lanes(k, 1, tile.elements).two(Alu.MULTIPLY, reduced, -1.0, reduced) if negate else reduced


_LEAST: Final = Fold(Alu.MINIMUM, inf, DType.INT32)


@lowers(ArgReduce)
def _arg_reduce(low: Lowering, node: Node, op: ArgReduce) -> None:
    """The first position of the extreme element; the first NaN if there is one."""
    k, x, dtype = low.k, low.view(node.operands[0]), node.operands[0].type.dtype
    kept = tuple(axis for axis in range(x.rank) if axis != op.axis)
    source = matrix(low, x.transposed((*kept, op.axis)), len(kept))
    fold = fold_of("max" if op.function == "argmax" else "min", dtype)
    target = low.home(node.result).packed_as((source.shape[0], 1))
    for top, height in k.spans(source.shape[0], PARTITIONS):
        with k.scope():
            extreme = reduce_rows(k, source, (top, height), fold)
            position, lanes = k.tile(DType.INT32, height, 1).whole, Lanes(k, height, 1)
            lanes.memset(position, _LEAST.start)
            for left, size in k.spans(source.shape[1], WIDEST_ROW // 2):
                with k.scope():
                    tile = k.tile(source.dtype, height, size, buffers=2)
                    k.copy(tile.whole, source.cut((top, height), (left, size)).far())
                    part = k.tile(DType.INT32, height, 1).whole
                    reduce_tile(k, _LEAST, _extreme_positions(k, tile, extreme, left, fold), part)
                    combine(lanes, _LEAST, position, part)
            k.copy(target.cut((top, height)).far(), position)


def _extreme_positions(k: Kernel, tile: Block, extreme: Tile, left: Affine, fold: Fold) -> Block:
    """The position of each element that equals the extreme or is NaN; a large number for all others."""
    rows, size = tile.partitions, tile.shape[0]
    lanes = Lanes(k, rows, size)
    block = k.tile(DType.INT32, rows, size)
    k.emit(IotaPattern(engine=Engine.GPSIMD, dst=block.whole, start=left, by_partition=0, steps=(1,)))
    column = repeated(extreme, size)
    if fold.is_exact:
        words = WordArithmetic(lanes, fold.dtype)
        is_other = lanes.copy(words.two(Alu.NOT_EQUAL, words.load(tile.whole), column), lanes.tile(DType.UINT8))
    else:
        is_other_value, is_number = (
            lanes.compared(Alu.NOT_EQUAL, tile.whole, column),
            lanes.compared(Alu.EQUAL, tile.whole, tile.whole),
        )
        is_other = lanes.two(Alu.MINIMUM, is_other_value, is_number, is_other_value)
    lanes.choose(block.whole, is_other, _LEAST.start)
    return block


@lowers(Cumulate)
def _cumulate(low: Lowering, node: Node, op: Cumulate) -> None:
    """Prefix reductions: floats with the vector engine's scan, integers exactly by a Hillis-Steele scan: step s
    combines each element with the one 2^s positions before it."""
    k, x, dtype = low.k, low.view(node.operands[0]), node.operands[0].type.dtype
    kept = tuple(axis for axis in range(x.rank) if axis != op.axis)
    order = (*kept, op.axis)
    source = matrix(low, x.transposed(order), len(kept))
    home = low.home(node.result).transposed(order)
    target = home.reshaped(source.shape)
    out = target or low.scratch(node.result.type.dtype, source.shape)
    fold = fold_of(_REDUCTION_OF[op.function], dtype)
    for top, height in k.spans(source.shape[0], PARTITIONS):
        with k.scope():
            carried = k.tile(fold.dtype, height, 1).whole
            Lanes(k, height, 1).memset(carried, fold.start)
            for left, size in k.spans(source.shape[1], WIDEST_ROW // 2):
                with k.scope():
                    tile = load_tile(k, source.cut((top, height), (left, size)))
                    prefixes = (_scan_integers if fold.is_exact else _scan_floats)(k, fold, tile, carried)
                    result = k.tile(out.dtype, height, size, buffers=2).whole
                    Lanes(k, height, size).copy(prefixes, result)
                    k.copy(out.cut((top, height), (left, size)).far(), result)
    if target is None:
        low.copy(home, out.packed_as(home.shape))


_REDUCTION_OF: Final = {"cummax": "max", "cummin": "min", "cumprod": "prod", "cumsum": "sum"}


def _scan_floats(k: Kernel, fold: Fold, tile: Tile, carried: Tile) -> Tile:
    lanes = Lanes(k, tile.partitions, tile.elements)
    prefixes = k.tile(DType.FLOAT32, tile.partitions, tile.elements)
    second = tile if fold.op in (Alu.MAXIMUM, Alu.MINIMUM) else lanes.filled(fold.start)
    k.emit(
        TensorTensorScan(
            engine=Engine.VECTOR, dst=prefixes.whole, left=tile, right=second, initial=carried, op0=fold.op, op1=fold.op
        )
    )
    Lanes(k, tile.partitions, 1).copy(prefixes.cut(tile.partitions, (tile.elements - 1, 1)), carried)
    return prefixes.whole


def _scan_integers(k: Kernel, fold: Fold, tile: Tile, carried: Tile) -> Tile:
    rows, size = tile.partitions, tile.elements
    lanes = Lanes(k, rows, size)
    prefixes, next_prefixes = (k.tile(fold.dtype, rows, size) for _ in range(2))
    lanes.copy(WordArithmetic(lanes, fold.dtype).load(tile), prefixes.whole)
    first = prefixes.cut(rows, (0, 1))
    lanes.exact(fold.op, first, carried, first)
    step = 1
    while step < size:
        lanes.copy(prefixes.cut(rows, (0, step)), next_prefixes.cut(rows, (0, step)))
        lower, upper = prefixes.cut(rows, (0, size - step)), prefixes.cut(rows, (step, size - step))
        lanes.exact(fold.op, upper, lower, next_prefixes.cut(rows, (step, size - step)))
        prefixes, next_prefixes, step = next_prefixes, prefixes, 2 * step
    lanes.copy(prefixes.cut(rows, (size - 1, 1)), carried)
    return prefixes.whole
