"""Running folds along an axis: every prefix has a result."""

from typing import Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.vector import TensorTensorScan
from nxpipe.emulator.lower.ending import load
from nxpipe.emulator.lower.integers import Words
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel
from nxpipe.emulator.lower.lanes import Lanes
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.reduce import WIDEST_ROW, Fold, fold_of, matrix
from nxpipe.emulator.ops import Cumulate


@lowers(Cumulate)
def _cumulate(low: Lowering, node: Node, op: Cumulate) -> None:
    """Floats by the vector engine's scan. Words by adding what is 1, 2, 4, ... places before, which is exact."""
    k, x, dtype = low.k, low.view(node.operands[0]), node.operands[0].type.dtype
    kept = tuple(axis for axis in range(x.rank) if axis != op.axis)
    order = (*kept, op.axis)
    source = matrix(low, x.transposed(order), len(kept))
    home = low.home(node.result).transposed(order)
    target = home.reshaped(source.shape)
    made = target or low.scratch(node.result.type.dtype, source.shape)
    fold = fold_of(_RUNNING[op.function], dtype)
    for top, height in k.spans(source.shape[0], PARTITIONS):
        with k.room():
            carried = k.tile(fold.dtype, height, 1).whole
            Lanes(k, height, 1).memset(carried, fold.start)
            for left, size in k.spans(source.shape[1], WIDEST_ROW // 2):
                with k.room():
                    tile = load(k, source.cut((top, height), (left, size)))
                    run = (_run_of_words if fold.is_exact else _run_of_floats)(k, fold, tile, carried)
                    result = k.tile(made.dtype, height, size, turns=2).whole
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
    lanes.copy(Words(lanes, fold.dtype).load(tile), run.whole)
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
