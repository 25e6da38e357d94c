"""Lanes: elementwise instructions on tiles of one shape, with the temporaries between them.

An operand is a tile or a compile-time number. A tile with one element per partition is broadcast along the free
dimension by stride 0.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile, contiguous
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.vector import (
    CopyPredicated,
    Memset,
    Reciprocal,
    ScalarTensorTensor,
    TensorCopy,
    TensorScalar,
    TensorTensor,
)
from nxpipe.emulator.lower.kernel import Kernel
from nxpipe.emulator.numerics import settle

Operand = Tile | float

BITS_OF: Final = {1: DType.UINT8, 2: DType.UINT16, 4: DType.UINT32}


@dataclass(frozen=True)
class Lanes:
    """Partitions with `width` elements each."""

    k: Kernel
    partitions: int
    width: int

    def tile(self, dtype: DType = DType.FLOAT32) -> Tile:
        return self.k.tile(dtype, self.partitions, self.width).whole

    def filled(self, number: float, dtype: DType = DType.FLOAT32) -> Tile:
        """The number as a tile with one element per partition, broadcast by stride 0."""
        block = self.k.tile(dtype, self.partitions, 1)
        return repeated(self.memset(block.whole, number), self.width)

    def memset(self, dst: Tile, number: float) -> Tile:
        self.k.emit(Memset(engine=Engine.VECTOR, dst=dst, value=stored_number(number, dst.dtype)))
        return dst

    def copy(self, src: Operand, dst: Tile) -> Tile:
        if isinstance(src, Tile):
            self.k.emit(TensorCopy(engine=Engine.VECTOR, dst=dst, src=src))
        else:
            self.memset(dst, src)
        return dst

    def floats(self, src: Operand) -> Tile:
        """The operand as a float32 tile in SBUF, which bitwise operations and GpSimd require."""
        if isinstance(src, Tile) and src.dtype is DType.FLOAT32 and src.memory is Memory.SBUF:
            return src
        return self.copy(src, self.tile()) if isinstance(src, Tile) else self.filled(src)

    def two(self, op: Alu, left: Operand, right: Operand, dst: Tile | None = None) -> Tile:
        """`left op right` on the vector engine: float32 arithmetic, or bitwise."""
        out = dst or self.tile()
        if not isinstance(left, Tile) and not isinstance(right, Tile):
            left = self.filled(left)
        if isinstance(left, Tile) and isinstance(right, Tile) and not _is_column(right):
            self.k.emit(TensorTensor(engine=Engine.VECTOR, dst=out, left=left, right=right, op=op))
        elif isinstance(left, Tile):
            operand = replace(right, axes=contiguous(1)) if isinstance(right, Tile) else float(right)
            self.k.emit(TensorScalar(engine=Engine.VECTOR, dst=out, src=left, op0=op, operand0=operand))
        else:
            assert isinstance(right, Tile)  # of two numbers, the left was replaced by a tile
            self.k.emit(
                TensorScalar(engine=Engine.VECTOR, dst=out, src=right, op0=op, operand0=float(left), reverse0=True)
            )
        return out

    def then(self, src: Tile, op0: Alu, operand0: float, op1: Alu, operand1: float, dst: Tile | None = None) -> Tile:
        """`(src op0 operand0) op1 operand1`."""
        out = dst or self.tile()
        self.k.emit(
            TensorScalar(engine=Engine.VECTOR, dst=out, src=src, op0=op0, operand0=operand0, op1=op1, operand1=operand1)
        )
        return out

    def mixed(self, src: Tile, op0: Alu, operand0: float, op1: Alu, right: Tile, dst: Tile | None = None) -> Tile:
        """`(src op0 operand0) op1 right`."""
        out = dst or self.tile()
        self.k.emit(
            ScalarTensorTensor(engine=Engine.VECTOR, dst=out, src=src, op0=op0, operand0=operand0, op1=op1, right=right)
        )
        return out

    def exact(self, op: Alu, left: Tile, right: Tile, dst: Tile | None = None) -> Tile:
        """`left op right` on GpSimd: exact 32-bit integers, and powers."""
        out = dst or self.tile(left.dtype)
        self.k.emit(TensorTensor(engine=Engine.GPSIMD, dst=out, left=left, right=right, op=op))
        return out

    def function(self, function: Function, src: Operand, dst: Tile | None = None, scale: float = 1.0) -> Tile:
        out = dst or self.tile()
        source = src if isinstance(src, Tile) else self.filled(src)
        self.k.emit(Activation(engine=Engine.SCALAR, dst=out, src=source, function=function, scale=scale))
        return out

    def reciprocal(self, src: Operand, dst: Tile | None = None) -> Tile:
        out = dst or self.tile()
        source = src if isinstance(src, Tile) else self.filled(src)
        self.k.emit(Reciprocal(engine=Engine.VECTOR, dst=out, src=source))
        return out

    def choose(self, dst: Tile, predicate: Tile, src: Operand, *, reverse: bool = False) -> Tile:
        """Write `src` to `dst` where the predicate, a tile of bytes, is not 0."""
        source = src if isinstance(src, Tile) else self.filled(src, dst.dtype)
        if source.dtype is not dst.dtype:
            source = self.copy(source, self.tile(dst.dtype))
        self.k.emit(CopyPredicated(engine=Engine.VECTOR, dst=dst, src=source, predicate=predicate, reverse=reverse))
        return dst

    def compared(self, op: Alu, left: Operand, right: Operand) -> Tile:
        """A comparison as bytes: 1 where true, else 0."""
        return self.two(op, left, right, self.tile(DType.UINT8))


def repeated(column: Tile, width: int) -> Tile:
    """A tile with one element per partition, broadcast to `width` elements."""
    return replace(column, axes=(Axis(width, 0),) if width != 1 else contiguous(1))


def _is_column(tile: Tile) -> bool:
    """True if an instruction can take the tile as a per-partition scalar operand."""
    return tile.dtype is DType.FLOAT32 and tile.axes == (Axis(tile.elements, 0),) and tile.memory is Memory.SBUF


def stored_number(number: float, dtype: DType) -> float:
    """The number after conversion to a type: integers wrap, floats are rounded."""
    if dtype.is_float:
        return float(settle(np.asarray(number, np.float32), dtype))
    return float(np.asarray(int(number), np.int64).astype(dtype.stored))


def bits(tile: Tile) -> Tile:
    """The same bytes as unsigned integers."""
    return replace(tile, dtype=BITS_OF[tile.dtype.itemsize])


def bitcast_tile(tile: Tile, dtype: DType) -> Tile:
    """The same bytes as elements of another type of equal size."""
    return replace(tile, dtype=dtype)
