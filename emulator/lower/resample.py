"""Places that are mixtures of their old neighbours, axis by axis: gathers inside of partitions, and sums of shares.

Which neighbours a place has, and their shares, is known when the program is written; both lie in HBM as tables.
"""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.gpsimd import GatherFree
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.vector import Memset, TensorCopy, TensorTensor
from nxpipe.emulator.lower.buffers import on_device
from nxpipe.emulator.lower.ending import Ending
from nxpipe.emulator.lower.kernel import PARTITIONS, Block
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.products import as_rows
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Resample


@lowers(Resample)
def _resample(low: Lowering, node: Node, op: Resample) -> None:
    """Axis by axis, unrounded in between; the last axis of all comes last."""
    view, (source,) = low.view(node.operands[0]), node.operands
    last, first = source.type.rank - 1, source.type.rank - len(op.sizes)
    between = view.dtype if op.function == "nearest" else DType.FLOAT32
    for axis, size, scale in zip(range(first, last), op.sizes, op.scales, strict=False):
        shape = (*view.shape[:axis], size, *view.shape[axis + 1 :])
        made = low.scratch(between, shape)
        _Mixed(low, op, view.shape[axis], size, scale, between).along(view, made, axis)
        view = made
    mixed = _Mixed(low, op, view.shape[last], op.sizes[-1], op.scales[-1], between)
    out = on_device(node.result.type.dtype)
    mixed.along_last(
        as_rows(low, view, prod(view.shape[:-1]), view.shape[-1]), low.ending(node.result, op.sizes[-1]), out
    )


@dataclass(frozen=True)
class _Tables:
    """Of each neighbour: which elements of a row they are, and their shares."""

    near: list[Tile]
    shares: list[Tile | None]


@dataclass(frozen=True)
class _Mixed:
    """Places of an axis as mixtures of old ones, from tables that the compiler makes."""

    low: Lowering
    op: Resample
    old: int
    size: int
    scale: float
    dtype: DType

    def along(self, x: View, made: View, axis: int) -> None:
        """An axis with others behind it, which go with it in pieces."""
        k, outer, inner = self.low.k, prod(x.shape[:axis]), prod(x.shape[axis + 1 :])
        source = x.reshaped((outer, self.old, inner)) or self.low.packed(x).reshaped((outer, self.old, inner))
        dst = made.reshaped((outer, self.size, inner))
        assert source is not None  # packed
        assert dst is not None  # packed
        width = max(min(k.left(Memory.SBUF) // (self._by_column() * 2), inner), 1)
        full, rest = divmod(inner, width)
        for number, wide, start in ((full, width, 0), (1, rest, full * width)):
            if not wide or not number:
                continue
            with k.room():
                tables = self._tables(min(outer, PARTITIONS), wide)
                with k.loop(number) as turn:
                    for top, count in k.spans(outer, PARTITIONS):
                        with k.room():
                            columns = (turn * wide + start, wide)
                            straight = k.tile(self.dtype, count, self.old, wide, turns=2)
                            k.copy(straight.whole, source.cut((top, count), (0, self.old), columns).far())
                            mixed = self._mix(straight, tables, wide)
                            k.copy(dst.cut((top, count), (0, self.size), columns).far(), mixed.whole)

    def along_last(self, x: View, ending: Ending, out: DType) -> None:
        k = self.low.k
        with k.room():
            tables = self._tables(min(x.shape[0], PARTITIONS), 1)
            for top, count in k.spans(x.shape[0], PARTITIONS):
                with k.room():
                    straight = k.tile(self.dtype, count, self.old, 1, turns=2)
                    k.copy(straight.whole, x.cut((top, count)).far())
                    mixed = self._mix(straight, tables, 1).whole
                    if out is not self.dtype:
                        rounded = k.tile(out, count, self.size, turns=2).whole
                        k.emit(TensorCopy(engine=Engine.VECTOR, dst=rounded, src=mixed))
                        mixed = rounded
                    ending.store(mixed, (top, count), (0, self.size))

    def _by_column(self) -> int:
        """Bytes for each element behind the axis."""
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
        total = k.tile(self.dtype, count, self.size, wide, turns=2)
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
