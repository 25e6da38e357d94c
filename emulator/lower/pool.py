"""Windows whose elements are folded: rows of channels on the partitions, and a window's places one after the other."""

from dataclasses import dataclass
from math import prod

import numpy as np

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.isa.vector import Memset, TensorCopy, TensorTensor
from nxpipe.emulator.lower.buffers import on_device
from nxpipe.emulator.lower.convolve import slab_rows
from nxpipe.emulator.lower.ending import Ending, room_of
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel
from nxpipe.emulator.lower.lanes import held
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.lower.windows import (
    WIDEST,
    Slab,
    Starts,
    Windows,
    blocks,
    each_place,
    linear,
    load_slab,
    padded,
    windows,
)
from nxpipe.emulator.ops import Pool


@lowers(Pool)
def _pool(low: Lowering, node: Node, op: Pool) -> None:
    x, places = low.view(node.operands[0]), node.result.type.shape[2:]
    ending = low.ending(node.result, prod(places))
    if not node.result.type.elements:
        return
    dtype = _folded_type(x.dtype)
    filling = _lowest(node.operands[0].type.dtype) if op.function == "max_pool" else 0.0
    lines = low.packed(x) if x.reshaped((x.shape[0] * x.shape[1], *x.shape[2:])) is None else x
    rows = lines.reshaped((x.shape[0] * x.shape[1], *x.shape[2:]))
    assert rows is not None  # packed axes are one
    view, over = windows(rows, op.window, op.stride, op.dilation, op.before, places)
    height = slab_rows(low.k.left(Memory.SBUF) // 2, over, 2 * dtype.itemsize)
    if height < places[0]:
        view, over = padded(low, view, over, filling)
    out = on_device(node.result.type.dtype)
    _Pool(
        low.k, view, over, Alu.MAXIMUM if op.function == "max_pool" else Alu.ADD, filling, height, ending, out
    ).write()


def _folded_type(dtype: DType) -> DType:
    """In which windows are folded: the graph rounds once, behind the last one; integers are exact in 32 bits."""
    if dtype.is_float:
        return DType.FLOAT32
    return dtype if dtype.itemsize == 4 else DType.INT32


def _lowest(dtype: DType) -> float:
    return -float("inf") if dtype.is_float else float(np.iinfo(on_device(dtype).value).min)


@dataclass(frozen=True)
class _Pool:
    k: Kernel
    x: View  # [rows, place ...]
    over: Windows
    op: Alu
    filling: float
    rows: int
    ending: Ending
    out: DType

    def write(self) -> None:
        k, dtype = self.k, _folded_type(self.x.dtype)
        for lanes in k.spans(self.x.shape[0], PARTITIONS):
            for rows in k.spans(self.over.places[0], self.rows):
                with k.room():
                    slab = load_slab(k, self.over, self.x.cut(lanes), rows, dtype, self.filling)
                    for starts, sizes in blocks(k, (rows[1], *self.over.places[1:]), self._widest()):
                        with k.room():
                            made = self._folded(slab, lanes[1], starts, sizes)
                            place = linear((starts[0] + rows[0], *starts[1:]), self.over.places)
                            self.ending.store(made, lanes, (place, prod(sizes)))

    def _widest(self) -> int:
        by_place = 2 * (self.out.itemsize + DType.FLOAT32.itemsize) + room_of(self.ending)
        return max(min(self.k.left(Memory.SBUF) * 3 // 4 // by_place, WIDEST), 1)

    def _folded(self, slab: Slab, count: int, starts: Starts, sizes: tuple[int, ...]) -> Tile:
        k, dtype = self.k, slab.block.dtype
        folded = k.tile(dtype, count, prod(sizes), turns=2).whole
        k.emit(Memset(engine=Engine.VECTOR, dst=folded, value=held(self.filling, dtype)))
        engine = Engine.VECTOR if dtype.is_float else Engine.GPSIMD
        for _, at in each_place(k, self.over.window):
            right = slab.shifted(count, 0, starts, sizes, at)
            k.emit(TensorTensor(engine=engine, dst=folded, left=folded, right=right, op=self.op))
        if self.out is dtype:
            return folded
        made = k.tile(self.out, count, prod(sizes), turns=2).whole
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=made, src=folded))
        return made
