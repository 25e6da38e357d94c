"""Conversion of elements between bits and numbers, and the ALU operators on floats, integers and bits.

Floats of every type are computed as float32 arrays (`emulator.numerics`), integers in their own type.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from nxpipe.emulator.core.faults import MalformedInstruction
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import BITS, UNARY, Alu
from nxpipe.emulator.numerics import Array, Floats, round_to, settle
from nxpipe.emulator.ops.elementwise import Unary

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def raw(dtype: DType) -> np.dtype[np.unsignedinteger]:
    """The unsigned type as wide as an element."""
    return _UNSIGNED[dtype.itemsize]


def decode(bits: Array, dtype: DType) -> Array:
    """Numbers from bits. The result may be a view of the bits, so it is read-only."""
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
    """Bits from results. A result is rounded here, once."""
    settled = settle(numbers, dtype)
    if dtype is DType.BFLOAT16:
        return (np.ascontiguousarray(settled).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return settled.astype(dtype.stored, copy=False).view(raw(dtype))


def signed(numbers: Array) -> Array:
    """Indices as signed numbers: an unsigned word with its highest bit set is a negative index."""
    return numbers.view(np.int32) if numbers.dtype == np.uint32 else numbers


def floats(numbers: Array) -> Floats:
    return numbers.astype(np.float32, copy=False)


WORDS: Final = (DType.INT32, DType.UINT32)

_UNARY: Final[dict[Alu, Callable[[Floats], Array]]] = {
    **{op: Unary(op.value).compute for op in UNARY - {Alu.SQUARE, Alu.INVERT}},
    Alu.SQUARE: np.square,
}
_BINARY: Final[dict[Alu, np.ufunc]] = {
    Alu.ADD: np.add,
    Alu.SUBTRACT: np.subtract,
    Alu.MULTIPLY: np.multiply,
    Alu.MAXIMUM: np.maximum,
    Alu.MINIMUM: np.minimum,
    Alu.EQUAL: np.equal,
    Alu.NOT_EQUAL: np.not_equal,
    Alu.GREATER_EQUAL: np.greater_equal,
    Alu.GREATER: np.greater,
    Alu.LESS_EQUAL: np.less_equal,
    Alu.LESS: np.less,
    Alu.LOGICAL_AND: np.logical_and,
    Alu.LOGICAL_OR: np.logical_or,
    Alu.LOGICAL_XOR: np.logical_xor,
    Alu.POWER: np.power,
}
_REDUCING: Final = frozenset(
    {
        *(Alu.ADD, Alu.SUBTRACT, Alu.MULTIPLY, Alu.MAXIMUM, Alu.MINIMUM),
        *(Alu.LOGICAL_AND, Alu.LOGICAL_OR, Alu.LOGICAL_XOR),
    }
)
_BITWISE: Final[dict[Alu, np.ufunc]] = {
    Alu.BITWISE_AND: np.bitwise_and,
    Alu.BITWISE_OR: np.bitwise_or,
    Alu.BITWISE_XOR: np.bitwise_xor,
    Alu.LEFT_SHIFT: np.left_shift,
    Alu.RIGHT_SHIFT: np.right_shift,
}


def combine(op: Alu, left: Floats, right: Array) -> Floats:
    """`left op right` in float32; a unary operator ignores `right`. Comparisons give 1 and 0."""
    if op in _UNARY:
        return floats(_UNARY[op](left))
    return floats(_known(_BINARY, op)(left, right))


def combine_words(op: Alu, left: Array, right: Array) -> Array:
    """`left op right` of 32-bit integers exactly; higher bits are dropped when the result is written."""
    return np.asarray(_known(_BINARY, op)(left.astype(np.int64), right.astype(np.int64)))


def combine_bits(op: Alu, left: Array, right: Array) -> Array:
    """`left op right` of unsigned words; shifts insert zeros."""
    return np.invert(left) if op is Alu.INVERT else np.asarray(_known(_BITWISE, op)(left, right))


def fold(op: Alu, values: Array, axis: int) -> Array:
    """A reduction along an axis: on words for bit operators, otherwise in float32."""
    if op in BITS:
        return np.asarray(_known(_BITWISE, op).reduce(values, axis=axis))
    if op not in _REDUCING:
        raise MalformedInstruction(f"{op} cannot reduce a row")
    return floats(np.asarray(_BINARY[op].reduce(values, axis=axis)))


def _known(table: dict[Alu, np.ufunc], op: Alu) -> np.ufunc:
    if op not in table:
        raise MalformedInstruction(f"{op} does not take operands of these types")
    return table[op]
