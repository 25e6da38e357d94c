"""Exact integer arithmetic: 32-bit words on GpSimd, the only engine whose integers have more than 24 exact bits.

Narrower integers are widened to words, computed, and truncated to their own width, so that they wrap as in numpy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Alu
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.lower.lanes import Lanes, Operand, bitcast_tile, bits, stored_number

_SIGNED: Final = (DType.INT8, DType.INT16, DType.INT32, DType.INT64)
EXACT_IN_FLOATS: Final = 2**24


def is_wide(dtype: DType) -> bool:
    """True if float32 cannot represent every number of the type."""
    return dtype.on_device.itemsize == 4


@dataclass(frozen=True)
class WordArithmetic:
    """Arithmetic on 32-bit words, all signed or all unsigned."""

    lanes: Lanes
    dtype: DType

    @classmethod
    def of(cls, lanes: Lanes, dtype: DType) -> "WordArithmetic":
        return cls(lanes, DType.UINT32 if dtype in (DType.UINT32, DType.UINT64) else DType.INT32)

    def load(self, operand: Operand) -> Tile:
        if not isinstance(operand, Tile):
            return self.lanes.filled(operand, self.dtype)
        if operand.dtype.itemsize == 4:
            return bitcast_tile(operand, self.dtype)
        return bitcast_tile(self.lanes.copy(operand, self.lanes.tile(DType.INT32)), self.dtype)

    def two(self, op: Alu, left: Tile, right: Tile, dst: Tile | None = None) -> Tile:
        return self.lanes.exact(op, left, right, dst or self.lanes.tile(self.dtype))

    def with_number(self, op: Alu, left: Tile, right: int) -> Tile:
        return self.two(op, left, self.load(right))

    def bit(self, op: Alu, left: Tile, number: int) -> Tile:
        """Bitwise operation with a number, without a conversion of either."""
        return bitcast_tile(self.lanes.two(op, bits(left), number, self.lanes.tile(DType.UINT32)), self.dtype)

    def rounded(self, values: Tile) -> Tile:
        """Round floats to the nearest words."""
        return self.lanes.copy(values, self.lanes.tile(self.dtype))

    def store(self, word: Tile, dst: Tile, dtype: DType) -> None:
        """Store as elements of a type, truncated to its width."""
        if dst.dtype.itemsize == 4:
            self.lanes.copy(word, bitcast_tile(dst, self.dtype))
            return
        width = 8 * dst.dtype.itemsize
        low = self.bit(Alu.BITWISE_AND, word, 2**width - 1)
        if dtype in _SIGNED:
            half = 2 ** (width - 1)
            self.lanes.two(Alu.SUBTRACT, self.bit(Alu.BITWISE_XOR, low, half), half, dst)
        else:
            self.lanes.copy(low, dst)


def _floored_division(words: WordArithmetic, a: Tile, b: Tile) -> tuple[Tile, Tile]:
    """Floored quotient, and remainder; both are 0 for a division by zero.

    The first quotient, in float32, has a relative error of about 2^-23. Its remainder is therefore small enough for a
    second float32 division, which leaves an error of at most one. A remainder with the wrong sign shows that error and
    corrects it. Remainders are signed even if the words are unsigned, since the first quotient may be too large."""
    lanes, signed = words.lanes, WordArithmetic(words.lanes, DType.INT32)
    inverse = lanes.reciprocal(b)
    quotient = words.rounded(lanes.two(Alu.MULTIPLY, a, inverse))
    remainder = signed.two(Alu.SUBTRACT, a, words.two(Alu.MULTIPLY, quotient, b))
    correction = signed.rounded(lanes.two(Alu.MULTIPLY, remainder, inverse))
    quotient = words.two(Alu.ADD, quotient, correction)
    remainder = signed.two(Alu.SUBTRACT, remainder, words.two(Alu.MULTIPLY, correction, b))
    zero = words.load(0)
    is_wrong = words.two(
        Alu.MULTIPLY, words.two(Alu.NOT_EQUAL, remainder, zero), _signs_differ(words, remainder, b, zero)
    )
    quotient = words.two(Alu.SUBTRACT, quotient, is_wrong)
    remainder = signed.two(Alu.ADD, remainder, words.two(Alu.MULTIPLY, is_wrong, b))
    is_valid = words.two(Alu.NOT_EQUAL, b, zero)
    return words.two(Alu.MULTIPLY, quotient, is_valid), words.two(Alu.MULTIPLY, remainder, is_valid)


def _signs_differ(words: WordArithmetic, a: Tile, b: Tile, zero: Tile) -> Tile:
    """1 where the signs differ, else 0."""
    return words.two(Alu.NOT_EQUAL, words.two(Alu.LESS, a, zero), words.two(Alu.LESS, b, zero))


def _floor_divide(words: WordArithmetic, a: Tile, b: Tile) -> Tile:
    return _floored_division(words, a, b)[0]


def _remainder(words: WordArithmetic, a: Tile, b: Tile) -> Tile:
    return _floored_division(words, a, b)[1]


def _truncating_divide(words: WordArithmetic, a: Tile, b: Tile) -> Tile:
    quotient, remainder = _floored_division(words, a, b)
    zero = words.load(0)
    correction = words.two(Alu.MULTIPLY, words.two(Alu.NOT_EQUAL, remainder, zero), _signs_differ(words, a, b, zero))
    return words.two(Alu.ADD, quotient, correction)


def _power(words: WordArithmetic, a: Tile, b: Tile) -> Tile:
    """Integer power; 0 for a negative exponent, except for the bases 1 and -1, whose powers are integers."""
    powers = _raise_by_squaring(words, a, b)
    if words.dtype is DType.UINT32:
        return powers
    is_integer = words.two(Alu.GREATER_EQUAL, b, words.load(0))
    for unit in (1, -1):
        words.two(Alu.MAXIMUM, is_integer, words.with_number(Alu.EQUAL, a, unit), is_integer)
    return words.two(Alu.MULTIPLY, powers, is_integer)


def _raise_by_squaring(words: WordArithmetic, a: Tile, b: Tile) -> Tile:
    """Exponentiation by squaring, one exponent bit per iteration. A negative exponent is read as unsigned, which is
    correct for the bases 1 and -1: the result depends on the lowest bit only."""
    base = words.two(Alu.ADD, a, words.load(0))
    exponent = words.two(Alu.ADD, b, words.load(0))
    unit = words.load(1)
    result = words.two(Alu.SUBTRACT, words.two(Alu.ADD, a, unit), a)
    with words.lanes.k.loop(32), words.lanes.k.scope():
        odd = words.bit(Alu.BITWISE_AND, exponent, 1)
        factor = words.two(Alu.MULTIPLY, odd, words.two(Alu.SUBTRACT, base, unit))
        words.two(Alu.MULTIPLY, result, words.two(Alu.ADD, factor, unit), result)
        words.two(Alu.MULTIPLY, base, base, base)
        words.lanes.two(Alu.RIGHT_SHIFT, bits(exponent), 1, bits(exponent))
    return result


_ONE_INSTRUCTION: Final = {
    "add": Alu.ADD,
    "subtract": Alu.SUBTRACT,
    "multiply": Alu.MULTIPLY,
    "maximum": Alu.MAXIMUM,
    "minimum": Alu.MINIMUM,
}
_MULTI_STEP: Final[Mapping[str, Callable[[WordArithmetic, Tile, Tile], Tile]]] = {
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "truncating_divide": _truncating_divide,
    "power": _power,
}


def convert_operand(lanes: Lanes, source: DType, target: DType, operand: Operand) -> Operand:
    """Convert an operand to the type in which a function computes; a number that does not fit wraps."""
    before, after = source.on_device, target.on_device
    if np.can_cast(before.stored, after.stored):
        return operand
    if not isinstance(operand, Tile):
        return stored_number(operand, after)
    converted = lanes.tile(after)
    with lanes.k.scope():
        convert(lanes, source, target, converted, operand)
    return converted


def arithmetic(lanes: Lanes, function: str, dtype: DType, dst: Tile, left: Operand, right: Operand) -> None:
    """Apply a function of two integers whose result is an integer of the type."""
    words = WordArithmetic.of(lanes, dtype)
    a, b = words.load(left), words.load(right)
    if function not in _ONE_INSTRUCTION:
        words.store(_MULTI_STEP[function](words, a, b), dst, dtype)
    elif dst.dtype.itemsize == 4:
        words.two(_ONE_INSTRUCTION[function], a, b, bitcast_tile(dst, words.dtype))
    else:
        words.store(words.two(_ONE_INSTRUCTION[function], a, b), dst, dtype)


def compare(lanes: Lanes, op: Alu, dtype: DType, dst: Tile, left: Operand, right: Operand) -> None:
    """Compare integers of a type. Float32 is exact below 2^24 and monotonic, so that a comparison with such a number is
    correct in float32 for any other operand."""
    exact_in_float32 = any(
        not isinstance(operand, Tile) and abs(operand) < EXACT_IN_FLOATS for operand in (left, right)
    )
    if exact_in_float32 or not is_wide(dtype):
        lanes.two(op, left, right, dst)
    else:
        words = WordArithmetic.of(lanes, dtype)
        lanes.copy(words.two(op, words.load(left), words.load(right)), dst)


def combine(lanes: Lanes, op: Alu, dtype: DType, dst: Tile, left: Operand, right: Operand) -> None:
    """Bitwise operation on integers of a type."""
    same_width = [
        operand
        for operand in (left, right)
        if not isinstance(operand, Tile) or operand.dtype.itemsize == dst.dtype.itemsize
    ]
    if len(same_width) == 2 and (isinstance(left, Tile) or isinstance(right, Tile)):
        if not isinstance(left, Tile):
            left, right = right, left
        assert isinstance(left, Tile)  # at least one operand is a tile
        other = bits(right) if isinstance(right, Tile) else int(right)
        lanes.two(op, bits(left), other, bits(dst))
        return
    words = WordArithmetic.of(lanes, dtype)
    word = lanes.two(op, bits(words.load(left)), bits(words.load(right)), lanes.tile(DType.UINT32))
    words.store(bitcast_tile(word, words.dtype), dst, dtype)


def convert(lanes: Lanes, source: DType, target: DType, dst: Tile, src: Operand) -> None:
    """Convert between integer types with wrap-around."""
    before, after = source.on_device.itemsize, target.on_device.itemsize
    if (after > before and (target in _SIGNED or source not in _SIGNED)) or (
        after == before and (target in _SIGNED) == (source in _SIGNED)
    ):
        lanes.copy(src, dst)
    else:  # a copy would saturate; words are truncated instead
        words = WordArithmetic.of(lanes, target)
        words.store(words.load(src), dst, target)
