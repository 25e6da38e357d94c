"""Reductions: sums and extremes over axes, positions of extremes, and prefix sums.

The reduced axes are on the free axis and the others across partitions, whichever they are in the tensor: the load is
strided. Pieces of a long row are reduced one after the other into a column, in float32. Integers wider than float32
holds are reduced by halves on GpSimd, which is exact.
"""

from dataclasses import dataclass
from math import inf, nan, prod
from typing import Final

import numpy as np

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import IotaPattern, PartitionReduce
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.vector import TensorReduce, TensorTensorScan
from nxpipe.emulator.lower.epilogue import load_tile
from nxpipe.emulator.lower.integers import WordArithmetic, is_wide
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lanes import Lanes, repeated
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.tiles import WIDEST, each_tile, fill
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import ArgReduce, Cumulate, Reduce

COMBINED: Final = {"add": Alu.ADD, "maximum": Alu.MAXIMUM, "minimum": Alu.MINIMUM, "multiply": Alu.MULTIPLY}


@dataclass(frozen=True)
class Accumulator:
    """The type in which values that meet in one place are combined: exact until the result is stored."""

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


WIDEST_ROW: Final = 4096  # elements of a row that are at hand at once
_WORTH_PARTS: Final = 512  # elements of a row from which on it is folded in parts
_WIDE_ENOUGH: Final = 8  # elements of a kept last axis: below, as well bring them one by one

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
    """A reduction: the operator, the number it starts with, and its type, 32-bit integers where float32 is not
    exact."""

    op: Alu
    neutral: float
    dtype: DType

    @property
    def is_exact(self) -> bool:
        return not self.dtype.is_float

    @property
    def crosses_partitions(self) -> bool:
        return not self.is_exact and self.op is not Alu.MULTIPLY

    @property
    def start(self) -> float:
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
    home, count = low.home(node.result), prod(x.shape[axis] for axis in op.axes)
    if not count:
        fill(low.k, home, nan if op.function == "mean" else _FOLDS[op.function][1])
        return
    if op.function in ("all", "any") and dtype is not DType.BOOL:
        x = _truths(low, x)
    kept = tuple(axis for axis in range(x.rank) if axis not in op.axes)
    epilogue = _Ending(low.k, fold_of(op.function, dtype), 1 / count if op.function == "mean" else None)
    last = x.rank - 1
    if last in kept and x.shape[last] >= _WIDE_ENOUGH and epilogue.fold.crosses_partitions:
        ordered = x.transposed((*kept[:-1], *op.axes, last))
        _reduce_downwards(low, epilogue, ordered, len(kept) - 1, home)
    else:
        source = matrix(low, x.transposed((*kept, *op.axes)), len(kept))
        _reduce_along(low, epilogue, source, home.packed_as((source.shape[0], 1)))


def _truths(low: Lowering, x: View) -> View:
    made = low.scratch(DType.UINT8, x.shape)
    for rows, width, (to, source) in each_tile(low.k, [made, x]):
        with low.k.scope():
            tile = load_tile(low.k, source)
            low.k.copy(to.far(), Lanes(low.k, rows, width).compared(Alu.NOT_EQUAL, tile, 0.0))
    return made


@dataclass(frozen=True)
class _Ending:
    """The factor by which a reduction's result is multiplied before it is stored."""

    k: Kernel
    fold: Fold
    factor: float | None

    def store(self, total: Tile, target: View) -> None:
        lanes = Lanes(self.k, total.partitions, total.elements)
        made = self.k.tile(target.dtype, total.partitions, total.elements, buffers=2).whole
        if self.factor is None:
            lanes.copy(total, made)
        else:
            lanes.two(Alu.MULTIPLY, total, self.factor, made)
        self.k.copy(target.far(), made)


def matrix(low: Lowering, view: View, rows: int) -> View:
    """The first axes as rows and the others as columns, copied where strides cannot express that."""
    shape = (prod(view.shape[:rows]), prod(view.shape[rows:]))
    return view.reshaped(shape) or low.packed(view).packed_as(shape)


def _reduce_along(low: Lowering, epilogue: _Ending, source: View, target: View) -> None:
    """Reduce rows along the free axis. Few long rows are reduced in parts first, so that all partitions have work."""
    k, (rows, width) = low.k, source.shape
    parts = max(part for part in range(1, PARTITIONS // min(rows, PARTITIONS) + 1) if width % part == 0)
    split = source.reshaped((rows * parts, width // parts)) if width >= _WORTH_PARTS and parts > 1 else None
    if split is not None:
        partial = low.scratch(epilogue.fold.dtype, (rows * parts, 1))
        _reduce_along(low, _Ending(k, epilogue.fold, None), split, partial)
        source = partial.packed_as((rows, parts))
    for top, height in k.spans(rows, PARTITIONS):
        with k.scope():
            total = folded(k, source, (top, height), epilogue.fold)
            epilogue.store(total, target.cut((top, height)))


def folded(k: Kernel, source: View, rows: Span, fold: Fold) -> Tile:
    """Reduce each row to an element of a column."""
    lanes, width = Lanes(k, rows[1], 1), source.shape[1]
    total = k.tile(fold.dtype, rows[1], 1).whole
    if width > WIDEST_ROW:
        lanes.memset(total, fold.start)
    for left, size in k.spans(width, WIDEST_ROW):
        with k.scope():
            tile = k.tile(source.dtype, rows[1], size, buffers=2)
            k.copy(tile.whole, source.cut(rows, (left, size)).far())
            if width <= WIDEST_ROW:
                fold_row(k, fold, tile, total)
            else:
                part = k.tile(fold.dtype, rows[1], 1).whole
                fold_row(k, fold, tile, part)
                combine(lanes, fold, total, part)
    return total


def combine(lanes: Lanes, fold: Fold, total: Tile, part: Tile) -> None:
    if fold.is_exact:
        lanes.exact(fold.op, total, part, total)
    else:
        lanes.two(fold.op, total, part, total)


def fold_row(k: Kernel, fold: Fold, values: Block, dst: Tile) -> None:
    """Reduce a tile to a column; 32-bit integers by adding one half to the other, repeatedly."""
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


def _reduce_downwards(low: Lowering, epilogue: _Ending, x: View, outer: int, home: View) -> None:
    """Reduce across partitions with the kept last axis on the free axis: rows are combined as they arrive, and
    partitions at the end."""
    k, width = low.k, x.shape[-1]
    shape = (prod(x.shape[:outer]), prod(x.shape[outer:-1]), width)
    flat = x.reshaped(shape) or low.packed(x).packed_as(shape)
    target = home.packed_as((shape[0], 1, width))
    with k.loop(shape[0]) as index:
        source, to = flat.pick(0, index), target.pick(0, index)
        for left, columns in k.spans(width, WIDEST):
            with k.scope():
                total = _combined(k, epilogue.fold, source, (left, columns))
                epilogue.store(_across(k, epilogue.fold, total), to.cut((0, 1), (left, columns)))


def _combined(k: Kernel, fold: Fold, source: View, columns: Span) -> Tile:
    """All rows, combined to one on each partition."""
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


def _across(k: Kernel, fold: Fold, tile: Tile) -> Tile:
    """Reduce partitions to one; a minimum is the negated maximum of negated elements."""
    around = fold.op is Alu.MINIMUM
    lanes = Lanes(k, tile.partitions, tile.elements)
    source = lanes.two(Alu.MULTIPLY, tile, -1.0, tile) if around else tile
    made = k.tile(DType.FLOAT32, 1, tile.elements).whole
    op = Alu.MAXIMUM if around else fold.op
    k.emit(PartitionReduce(engine=Engine.GPSIMD, dst=made, src=source, op=op))
    return Lanes(k, 1, tile.elements).two(Alu.MULTIPLY, made, -1.0, made) if around else made


_LEAST: Final = Fold(Alu.MINIMUM, inf, DType.INT32)


@lowers(ArgReduce)
def _arg_reduce(low: Lowering, node: Node, op: ArgReduce) -> None:
    """The least position of those that hold the extreme; a NaN is the extreme wherever there is one."""
    k, x, dtype = low.k, low.view(node.operands[0]), node.operands[0].type.dtype
    kept = tuple(axis for axis in range(x.rank) if axis != op.axis)
    source = matrix(low, x.transposed((*kept, op.axis)), len(kept))
    fold = fold_of("max" if op.function == "argmax" else "min", dtype)
    target = low.home(node.result).packed_as((source.shape[0], 1))
    for top, height in k.spans(source.shape[0], PARTITIONS):
        with k.scope():
            extreme = folded(k, source, (top, height), fold)
            place, lanes = k.tile(DType.INT32, height, 1).whole, Lanes(k, height, 1)
            lanes.memset(place, _LEAST.start)
            for left, size in k.spans(source.shape[1], WIDEST_ROW // 2):
                with k.scope():
                    tile = k.tile(source.dtype, height, size, buffers=2)
                    k.copy(tile.whole, source.cut((top, height), (left, size)).far())
                    part = k.tile(DType.INT32, height, 1).whole
                    fold_row(k, _LEAST, _places(k, tile, extreme, left, fold), part)
                    combine(lanes, _LEAST, place, part)
            k.copy(target.cut((top, height)).far(), place)


def _places(k: Kernel, tile: Block, extreme: Tile, left: Affine, fold: Fold) -> Block:
    """The position of each element that is the extreme, and a large number for all others."""
    rows, size = tile.partitions, tile.shape[0]
    lanes = Lanes(k, rows, size)
    block = k.tile(DType.INT32, rows, size)
    k.emit(IotaPattern(engine=Engine.GPSIMD, dst=block.whole, start=left, by_partition=0, steps=(1,)))
    column = repeated(extreme, size)
    if fold.is_exact:
        words = WordArithmetic(lanes, fold.dtype)
        differs = lanes.copy(words.two(Alu.NOT_EQUAL, words.load(tile.whole), column), lanes.tile(DType.UINT8))
    else:
        unlike, number = (
            lanes.compared(Alu.NOT_EQUAL, tile.whole, column),
            lanes.compared(Alu.EQUAL, tile.whole, tile.whole),
        )
        differs = lanes.two(Alu.MINIMUM, unlike, number, unlike)
    lanes.choose(block.whole, differs, _LEAST.start)
    return block


@lowers(Cumulate)
def _cumulate(low: Lowering, node: Node, op: Cumulate) -> None:
    """Prefix sums: floats with the vector engine's scan; integers by adding what is 1, 2, 4, ... positions before,
    which is exact."""
    k, x, dtype = low.k, low.view(node.operands[0]), node.operands[0].type.dtype
    kept = tuple(axis for axis in range(x.rank) if axis != op.axis)
    order = (*kept, op.axis)
    source = matrix(low, x.transposed(order), len(kept))
    home = low.home(node.result).transposed(order)
    target = home.reshaped(source.shape)
    made = target or low.scratch(node.result.type.dtype, source.shape)
    fold = fold_of(_RUNNING[op.function], dtype)
    for top, height in k.spans(source.shape[0], PARTITIONS):
        with k.scope():
            carried = k.tile(fold.dtype, height, 1).whole
            Lanes(k, height, 1).memset(carried, fold.start)
            for left, size in k.spans(source.shape[1], WIDEST_ROW // 2):
                with k.scope():
                    tile = load_tile(k, source.cut((top, height), (left, size)))
                    run = (_run_of_words if fold.is_exact else _run_of_floats)(k, fold, tile, carried)
                    result = k.tile(made.dtype, height, size, buffers=2).whole
                    Lanes(k, height, size).copy(run, result)
                    k.copy(made.cut((top, height), (left, size)).far(), result)
    if target is None:
        low.copy(home, made.packed_as(home.shape))


_RUNNING: Final = {"cummax": "max", "cummin": "min", "cumprod": "prod", "cumsum": "sum"}


def _run_of_floats(k: Kernel, fold: Fold, tile: Tile, carried: Tile) -> Tile:
    lanes = Lanes(k, tile.partitions, tile.elements)
    run = k.tile(DType.FLOAT32, tile.partitions, tile.elements)
    again = tile if fold.op in (Alu.MAXIMUM, Alu.MINIMUM) else lanes.filled(fold.start)
    k.emit(
        TensorTensorScan(
            engine=Engine.VECTOR, dst=run.whole, left=tile, right=again, initial=carried, op0=fold.op, op1=fold.op
        )
    )
    Lanes(k, tile.partitions, 1).copy(run.cut(tile.partitions, (tile.elements - 1, 1)), carried)
    return run.whole


def _run_of_words(k: Kernel, fold: Fold, tile: Tile, carried: Tile) -> Tile:
    rows, size = tile.partitions, tile.elements
    lanes = Lanes(k, rows, size)
    run, other = (k.tile(fold.dtype, rows, size) for _ in range(2))
    lanes.copy(WordArithmetic(lanes, fold.dtype).load(tile), run.whole)
    first = run.cut(rows, (0, 1))
    lanes.exact(fold.op, first, carried, first)
    step = 1
    while step < size:
        lanes.copy(run.cut(rows, (0, step)), other.cut(rows, (0, step)))
        lower, upper = run.cut(rows, (0, size - step)), run.cut(rows, (step, size - step))
        lanes.exact(fold.op, upper, lower, other.cut(rows, (step, size - step)))
        run, other, step = other, run, 2 * step
    lanes.copy(run.cut(rows, (size - 1, 1)), carried)
    return run.whole
