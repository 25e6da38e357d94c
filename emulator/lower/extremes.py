"""Where along an axis the largest or smallest element is: the extreme first, then the least place that holds it."""

from math import inf
from typing import Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import IotaPattern
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.lower.integers import Words
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel
from nxpipe.emulator.lower.lanes import Lanes, repeated
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.reduce import WIDEST_ROW, Fold, combine, fold_of, fold_row, folded, matrix
from nxpipe.emulator.ops import ArgReduce

_LEAST: Final = Fold(Alu.MINIMUM, inf, DType.INT32)


@lowers(ArgReduce)
def _arg_reduce(low: Lowering, node: Node, op: ArgReduce) -> None:
    """The least place of those that hold the extreme, a NaN being one wherever there is any."""
    k, x, dtype = low.k, low.view(node.operands[0]), node.operands[0].type.dtype
    kept = tuple(axis for axis in range(x.rank) if axis != op.axis)
    source = matrix(low, x.transposed((*kept, op.axis)), len(kept))
    fold = fold_of("max" if op.function == "argmax" else "min", dtype)
    target = low.home(node.result).packed_as((source.shape[0], 1))
    for top, height in k.spans(source.shape[0], PARTITIONS):
        with k.room():
            extreme = folded(k, source, (top, height), fold)
            place, lanes = k.tile(DType.INT32, height, 1).whole, Lanes(k, height, 1)
            lanes.memset(place, _LEAST.start)
            for left, size in k.spans(source.shape[1], WIDEST_ROW // 2):
                with k.room():
                    tile = k.tile(source.dtype, height, size, turns=2)
                    k.copy(tile.whole, source.cut((top, height), (left, size)).far())
                    part = k.tile(DType.INT32, height, 1).whole
                    fold_row(k, _LEAST, _places(k, tile, extreme, left, fold), part)
                    combine(lanes, _LEAST, place, part)
            k.copy(target.cut((top, height)).far(), place)


def _places(k: Kernel, tile: Block, extreme: Tile, left: Affine, fold: Fold) -> Block:
    """The number of each element that is the extreme, and a large one for all others."""
    rows, size = tile.partitions, tile.shape[0]
    lanes = Lanes(k, rows, size)
    block = k.tile(DType.INT32, rows, size)
    k.emit(IotaPattern(engine=Engine.GPSIMD, dst=block.whole, start=left, by_partition=0, steps=(1,)))
    column = repeated(extreme, size)
    if fold.is_exact:
        words = Words(lanes, fold.dtype)
        apart = lanes.copy(words.two(Alu.NOT_EQUAL, words.load(tile.whole), column), lanes.tile(DType.UINT8))
    else:
        unlike, number = lanes.asked(Alu.NOT_EQUAL, tile.whole, column), lanes.asked(Alu.EQUAL, tile.whole, tile.whole)
        apart = lanes.two(Alu.MINIMUM, unlike, number, unlike)
    lanes.choose(block.whole, apart, _LEAST.start)
    return block
