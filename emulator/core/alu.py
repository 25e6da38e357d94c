"""The operators of the vector engine and its kin, and when they work on floats, on integers or on bits."""

from collections.abc import Callable
from typing import Final

import numpy as np

from nxpipe.emulator.core.cells import floats
from nxpipe.emulator.core.faults import Malformed
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Alu
from nxpipe.emulator.isa.instruction import BITS, UNARY
from nxpipe.emulator.numerics import Array, Floats
from nxpipe.emulator.ops.elementwise import Unary

WORDS: Final = (DType.INT32, DType.UINT32)

_OF_ONE: Final[dict[Alu, Callable[[Floats], Array]]] = {
    **{op: Unary(op.value).compute for op in UNARY - {Alu.SQUARE, Alu.INVERT}},
    Alu.SQUARE: np.square,
}
_OF_TWO: Final[dict[Alu, np.ufunc]] = {
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
_FOLDING: Final = frozenset(
    {
        *(Alu.ADD, Alu.SUBTRACT, Alu.MULTIPLY, Alu.MAXIMUM, Alu.MINIMUM),
        *(Alu.LOGICAL_AND, Alu.LOGICAL_OR, Alu.LOGICAL_XOR),
    }
)
_OF_BITS: Final[dict[Alu, np.ufunc]] = {
    Alu.BITWISE_AND: np.bitwise_and,
    Alu.BITWISE_OR: np.bitwise_or,
    Alu.BITWISE_XOR: np.bitwise_xor,
    Alu.LEFT_SHIFT: np.left_shift,
    Alu.RIGHT_SHIFT: np.right_shift,
}


def combine(op: Alu, left: Floats, right: Array) -> Floats:
    """In float32; an operator of one operand ignores the other. Truths are 1 and 0."""
    if op in _OF_ONE:
        return floats(_OF_ONE[op](left))
    return floats(_known(_OF_TWO, op)(left, right))


def combine_words(op: Alu, left: Array, right: Array) -> Array:
    """32-bit integers exactly; what is over 32 bits is cut off when it is written."""
    return np.asarray(_known(_OF_TWO, op)(left.astype(np.int64), right.astype(np.int64)))


def combine_bits(op: Alu, left: Array, right: Array) -> Array:
    """Bits as they are, in unsigned words: shifts bring zeros."""
    return np.invert(left) if op is Alu.INVERT else np.asarray(_known(_OF_BITS, op)(left, right))


def fold(op: Alu, values: Array, axis: int) -> Array:
    """Along an axis: bits where the operator is one of bits, else in float32."""
    if op in BITS:
        return np.asarray(_known(_OF_BITS, op).reduce(values, axis=axis))
    if op not in _FOLDING:
        raise Malformed(f"{op} cannot fold a row")
    return floats(np.asarray(_OF_TWO[op].reduce(values, axis=axis)))


def _known(table: dict[Alu, np.ufunc], op: Alu) -> np.ufunc:
    if op not in table:
        raise Malformed(f"{op} is not an operator for what it is given")
    return table[op]
