"""Elements as they lie in memory, and as numbers to calculate with.

Floats of every type are calculated with as float32 arrays (`emulator.numerics`), integers as they are.
"""

import numpy as np

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array, Floats, round_to, settle

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def raw(dtype: DType) -> np.dtype[np.unsignedinteger]:
    """Bits without a meaning, as wide as an element."""
    return _UNSIGNED[dtype.itemsize]


def decode(bits: Array, dtype: DType) -> Array:
    """Numbers from bits; not a copy where none is needed, so not to be written to."""
    if dtype is DType.BFLOAT16:
        words = bits.astype(np.uint32)
        words <<= np.uint32(16)
        return words.view(np.float32)
    if dtype is DType.TFLOAT32:
        return round_to(bits.view(np.float32), dtype)
    if dtype is DType.BOOL:
        return np.not_equal(bits, 0).view(np.uint8)
    stored = bits.view(dtype.stored)
    return stored.astype(np.float32, copy=False) if dtype.is_float else stored


def encode(numbers: Array, dtype: DType) -> Array:
    """Bits from results, which are rounded here, and once."""
    settled = settle(numbers, dtype)
    if dtype is DType.BFLOAT16:
        return (np.ascontiguousarray(settled).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return settled.astype(dtype.stored, copy=False).view(raw(dtype))


def signed(numbers: Array) -> Array:
    """Indices as whoever computed them meant them: words whose highest bit is set came out below zero."""
    return numbers.view(np.int32) if numbers.dtype == np.uint32 else numbers


def floats(numbers: Array) -> Floats:
    return numbers.astype(np.float32, copy=False)
