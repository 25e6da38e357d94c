"""Semantics of the tensor engine: products, summed in float32 in PSUM, and transposes."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from nxpipe.emulator.core.access import Bound, Handler, same_bits
from nxpipe.emulator.core.arithmetic import encode, floats
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.tensor import Matmul, NcTranspose
from nxpipe.emulator.numerics import Array, Floats

_ON_ONE_THREAD: Final = 1 << 18  # multiplications: up to here OpenBLAS uses one thread


def matmul(instruction: Matmul, at: Bound) -> None:
    product = multiply(at.floats("stationary").T, at.floats("moving"))
    if instruction.accumulate.at(at.indices) > 0:
        at.added += 1
        at.window("dst").add_to_sum(product)
    else:
        at.window("dst").begin_sum(product)


def transpose(instruction: NcTranspose, at: Bound) -> None:
    dst, src = at.window("dst"), at.window("src")
    if not same_bits(src.dtype, dst.dtype):
        dst.put(floats(src.numbers()).T)
        return
    transposed = src.bits().reshape(src.flat).T
    if instruction.engine is Engine.TENSOR and at.core.nki_gen < 3 and src.dtype.is_float:
        transposed = _multiplied(transposed, src.numbers().T, src.dtype)
    dst.put_bits(transposed)


def multiply(left: Floats, right: Floats) -> Floats:
    """A product of matrices, in blocks of columns so small that BLAS does not start threads for them: the products of
    tiles are too short to wait for a thread that a busy machine has to wake first."""
    (height, inner), width = left.shape, right.shape[1]
    few = max(_ON_ONE_THREAD // (height * inner), 1)
    count = width // few
    full = count * few
    result = np.empty((height, width), np.float32)
    pieces = result[:, :full].reshape(height, count, few, copy=False).transpose(1, 0, 2)
    np.matmul(left, right[:, :full].reshape(inner, count, few).transpose(1, 0, 2), out=pieces)
    np.matmul(left, right[:, full:], out=result[:, full:])
    return result


def _multiplied(bits: Array, numbers: Array, dtype: DType) -> Array:
    """Before v3 a transpose is a product with an identity matrix, so an infinity or a NaN makes its whole sum NaN."""
    spoiled = ~np.isfinite(numbers).all(axis=1)
    if spoiled.any():
        bits = bits.copy()
        bits[spoiled] = encode(np.full(1, np.nan, np.float32), dtype)
    return bits


HANDLERS: Final[Mapping[type[Instruction], Handler]] = {Matmul: matmul, NcTranspose: transpose}
