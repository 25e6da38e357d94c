"""Pooling and resampling: channels on the partitions, and the positions of a window combined one after the other."""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.gpsimd import GatherFree
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.vector import Memset, TensorCopy, TensorTensor
from nxpipe.emulator.lower.convolution import (
    WIDEST,
    Slab,
    Starts,
    Windows,
    blocks,
    each_place,
    linear,
    load_slab,
    padded,
    slab_rows,
    windows,
)
from nxpipe.emulator.lower.epilogue import Epilogue, epilogue_bytes
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel
from nxpipe.emulator.lower.lanes import stored_number
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.linear import as_matrix
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Pool, Resample


@lowers(Pool)
def _pool(low: Lowering, node: Node, op: Pool) -> None:
    x, places = low.view(node.operands[0]), node.result.type.shape[2:]
    epilogue = low.epilogue(node.result, prod(places))
    if not node.result.type.elements:
        return
    dtype = _folded_type(x.dtype)
    filling = _lowest(node.operands[0].type.dtype) if op.function == "max_pool" else 0.0
    lines = low.packed(x) if x.reshaped((x.shape[0] * x.shape[1], *x.shape[2:])) is None else x
    rows = lines.reshaped((x.shape[0] * x.shape[1], *x.shape[2:]))
    assert rows is not None  # packed axes are one
    view, over = windows(rows, op.window, op.stride, op.dilation, op.before, places)
    height = slab_rows(low.k.free_bytes(Memory.SBUF) // 2, over, 2 * dtype.itemsize)
    if height < places[0]:
        view, over = padded(low, view, over, filling)
    out = node.result.type.dtype.on_device
    _Pool(
        low.k, view, over, Alu.MAXIMUM if op.function == "max_pool" else Alu.ADD, filling, height, epilogue, out
    ).write()


def _folded_type(dtype: DType) -> DType:
    """The type in which windows are reduced: the graph rounds once, at the end; integers are exact in 32 bits."""
    if dtype.is_float:
        return DType.FLOAT32
    return dtype if dtype.itemsize == 4 else DType.INT32


def _lowest(dtype: DType) -> float:
    return -float("inf") if dtype.is_float else float(np.iinfo(dtype.on_device.value).min)


@dataclass(frozen=True)
class _Pool:
    k: Kernel
    x: View  # [rows, place ...]
    over: Windows
    op: Alu
    filling: float
    rows: int
    epilogue: Epilogue
    out: DType

    def write(self) -> None:
        k, dtype = self.k, _folded_type(self.x.dtype)
        for lanes in k.spans(self.x.shape[0], PARTITIONS):
            for rows in k.spans(self.over.places[0], self.rows):
                with k.scope():
                    slab = load_slab(k, self.over, self.x.cut(lanes), rows, dtype, self.filling)
                    for starts, sizes in blocks(k, (rows[1], *self.over.places[1:]), self._widest()):
                        with k.scope():
                            made = self._folded(slab, lanes[1], starts, sizes)
                            place = linear((starts[0] + rows[0], *starts[1:]), self.over.places)
                            self.epilogue.store(made, lanes, (place, prod(sizes)))

    def _widest(self) -> int:
        by_place = 2 * (self.out.itemsize + DType.FLOAT32.itemsize) + epilogue_bytes(self.epilogue)
        return max(min(self.k.free_bytes(Memory.SBUF) * 3 // 4 // by_place, WIDEST), 1)

    def _folded(self, slab: Slab, count: int, starts: Starts, sizes: tuple[int, ...]) -> Tile:
        k, dtype = self.k, slab.block.dtype
        folded = k.tile(dtype, count, prod(sizes), buffers=2).whole
        k.emit(Memset(engine=Engine.VECTOR, dst=folded, value=stored_number(self.filling, dtype)))
        engine = Engine.VECTOR if dtype.is_float else Engine.GPSIMD
        for _, at in each_place(k, self.over.window):
            right = slab.shifted(count, 0, starts, sizes, at)
            k.emit(TensorTensor(engine=engine, dst=folded, left=folded, right=right, op=self.op))
        if self.out is dtype:
            return folded
        made = k.tile(self.out, count, prod(sizes), buffers=2).whole
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=made, src=folded))
        return made


@lowers(Resample)
def _resample(low: Lowering, node: Node, op: Resample) -> None:
    """Axis by axis, unrounded in between; the last axis comes last."""
    view, (source,) = low.view(node.operands[0]), node.operands
    last, first = source.type.rank - 1, source.type.rank - len(op.sizes)
    between = view.dtype if op.function == "nearest" else DType.FLOAT32
    for axis, size, scale in zip(range(first, last), op.sizes, op.scales, strict=False):
        shape = (*view.shape[:axis], size, *view.shape[axis + 1 :])
        made = low.scratch(between, shape)
        _Mixed(low, op, view.shape[axis], size, scale, between).along(view, made, axis)
        view = made
    mixed = _Mixed(low, op, view.shape[last], op.sizes[-1], op.scales[-1], between)
    out = node.result.type.dtype.on_device
    mixed.along_last(
        as_matrix(low, view, prod(view.shape[:-1]), view.shape[-1]), low.epilogue(node.result, op.sizes[-1]), out
    )


@dataclass(frozen=True)
class _Tables:
    """For each neighbour, the elements of a row that it is, and its weights. The compiler computes both; they are
    constants."""

    near: list[Tile]
    shares: list[Tile | None]


@dataclass(frozen=True)
class _Mixed:
    """Positions of an axis as weighted sums of old ones, from the tables."""

    low: Lowering
    op: Resample
    old: int
    size: int
    scale: float
    dtype: DType

    def along(self, x: View, made: View, axis: int) -> None:
        """Resample an axis; the axes behind it go with it in pieces."""
        k, outer, inner = self.low.k, prod(x.shape[:axis]), prod(x.shape[axis + 1 :])
        source = x.reshaped((outer, self.old, inner)) or self.low.packed(x).reshaped((outer, self.old, inner))
        dst = made.reshaped((outer, self.size, inner))
        assert source is not None  # packed
        assert dst is not None  # packed
        width = max(min(k.free_bytes(Memory.SBUF) // (self._by_column() * 2), inner), 1)
        full, rest = divmod(inner, width)
        for number, wide, start in ((full, width, 0), (1, rest, full * width)):
            if not wide or not number:
                continue
            with k.scope():
                tables = self._tables(min(outer, PARTITIONS), wide)
                with k.loop(number) as index:
                    for top, count in k.spans(outer, PARTITIONS):
                        with k.scope():
                            columns = (index * wide + start, wide)
                            straight = k.tile(self.dtype, count, self.old, wide, buffers=2)
                            k.copy(straight.whole, source.cut((top, count), (0, self.old), columns).far())
                            mixed = self._mix(straight, tables, wide)
                            k.copy(dst.cut((top, count), (0, self.size), columns).far(), mixed.whole)

    def along_last(self, x: View, epilogue: Epilogue, out: DType) -> None:
        k = self.low.k
        with k.scope():
            tables = self._tables(min(x.shape[0], PARTITIONS), 1)
            for top, count in k.spans(x.shape[0], PARTITIONS):
                with k.scope():
                    straight = k.tile(self.dtype, count, self.old, 1, buffers=2)
                    k.copy(straight.whole, x.cut((top, count)).far())
                    mixed = self._mix(straight, tables, 1).whole
                    if out is not self.dtype:
                        rounded = k.tile(out, count, self.size, buffers=2).whole
                        k.emit(TensorCopy(engine=Engine.VECTOR, dst=rounded, src=mixed))
                        mixed = rounded
                    epilogue.store(mixed, (top, count), (0, self.size))

    def _by_column(self) -> int:
        """Bytes of each element behind the axis."""
        taps = len(self.op.taps(self.old, self.size, np.float32(self.scale)))
        return 4 * (2 * self.old + (taps + 2 + 2 * 2) * self.size)

    def _tables(self, lanes: int, wide: int) -> _Tables:
        near: list[Tile] = []
        shares: list[Tile | None] = []
        for places, share in self.op.taps(self.old, self.size, np.float32(self.scale)):
            numbers = (places[:, np.newaxis] * wide + np.arange(wide)).reshape(-1)
            near.append(self._on_lanes(numbers, DType.UINT32, lanes))
            shares.append(None if share is None else self._repeated(share, lanes, wide))
        return _Tables(near, shares)

    def _repeated(self, share: Array, lanes: int, wide: int) -> Tile:
        tile = self._on_lanes(share, DType.FLOAT32, lanes)
        return replace(tile, axes=(Axis(self.size, 1), Axis(wide, 0)))

    def _on_lanes(self, numbers: Array, dtype: DType, lanes: int) -> Tile:
        tile = self.low.k.tile(dtype, lanes, len(numbers)).whole
        self.low.k.copy(tile, self.low.constant(numbers, dtype).broadcast((lanes, len(numbers))).far())
        return tile

    def _mix(self, straight: Block, tables: _Tables, wide: int) -> Block:
        k, count = self.low.k, straight.partitions
        total = k.tile(self.dtype, count, self.size, wide, buffers=2)
        for number, (near, share) in enumerate(zip(tables.near, tables.shares, strict=True)):
            dst = total if share is None else k.tile(DType.FLOAT32, count, self.size, wide)
            lanes = replace(near, partitions=count)
            k.emit(GatherFree(engine=Engine.GPSIMD, dst=dst.whole, src=straight.whole, indices=lanes))
            if share is None:
                continue
            if number == 0:
                k.emit(Memset(engine=Engine.VECTOR, dst=total.whole, value=0.0))
            factor = replace(share, partitions=count)
            k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst.whole, left=dst.whole, right=factor, op=Alu.MULTIPLY))
            k.emit(TensorTensor(engine=Engine.VECTOR, dst=total.whole, left=total.whole, right=dst.whole, op=Alu.ADD))
        return total
