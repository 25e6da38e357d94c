"""Exact integer arithmetic: 32-bit words on GpSimd, the only engine that computes with more than 24 bits.

Narrower integers are widened, computed as words, and cut to their own width, so that they wrap as numpy's do.
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
    """True if float32 does not hold all numbers of the type."""
    return dtype.on_device.itemsize == 4


@dataclass(frozen=True)
class WordArithmetic:
    """Arithmetic on words of one kind, signed or unsigned."""

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
        """Combine with the bits of a number, which no conversion changes."""
        return bitcast_tile(self.lanes.two(op, bits(left), number, self.lanes.tile(DType.UINT32)), self.dtype)

    def rounded(self, values: Tile) -> Tile:
        """Round floats to the nearest words."""
        return self.lanes.copy(values, self.lanes.tile(self.dtype))

    def store(self, word: Tile, dst: Tile, dtype: DType) -> None:
        """Store as elements of a type, cut to its width."""
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


def _divided(words: WordArithmetic, a: Tile, b: Tile) -> tuple[Tile, Tile]:
    """Quotient towards minus infinity, and remainder. A first quotient in float32 leaves a remainder that is small
    enough for float32, whose own quotient is off by one at most. Division by zero gives zeros. A remainder may be
    negative although the words are unsigned."""
    lanes, signed = words.lanes, WordArithmetic(words.lanes, DType.INT32)
    inverse = lanes.reciprocal(b)
    quotient = words.rounded(lanes.two(Alu.MULTIPLY, a, inverse))
    rest = signed.two(Alu.SUBTRACT, a, words.two(Alu.MULTIPLY, quotient, b))
    more = signed.rounded(lanes.two(Alu.MULTIPLY, rest, inverse))
    quotient = words.two(Alu.ADD, quotient, more)
    rest = signed.two(Alu.SUBTRACT, rest, words.two(Alu.MULTIPLY, more, b))
    zero = words.load(0)
    wrong = words.two(Alu.MULTIPLY, words.two(Alu.NOT_EQUAL, rest, zero), _unlike(words, rest, b, zero))
    quotient = words.two(Alu.SUBTRACT, quotient, wrong)
    rest = signed.two(Alu.ADD, rest, words.two(Alu.MULTIPLY, wrong, b))
    divides = words.two(Alu.NOT_EQUAL, b, zero)
    return words.two(Alu.MULTIPLY, quotient, divides), words.two(Alu.MULTIPLY, rest, divides)


def _unlike(words: WordArithmetic, a: Tile, b: Tile, zero: Tile) -> Tile:
    """True if exactly one of them is negative."""
    return words.two(Alu.NOT_EQUAL, words.two(Alu.LESS, a, zero), words.two(Alu.LESS, b, zero))


def _floor_divide(words: WordArithmetic, a: Tile, b: Tile) -> Tile:
    return _divided(words, a, b)[0]


def _remainder(words: WordArithmetic, a: Tile, b: Tile) -> Tile:
    return _divided(words, a, b)[1]


def _truncating_divide(words: WordArithmetic, a: Tile, b: Tile) -> Tile:
    quotient, rest = _divided(words, a, b)
    zero = words.load(0)
    below = words.two(Alu.MULTIPLY, words.two(Alu.NOT_EQUAL, rest, zero), _unlike(words, a, b, zero))
    return words.two(Alu.ADD, quotient, below)


def _power(words: WordArithmetic, a: Tile, b: Tile) -> Tile:
    """With a negative exponent only powers of 1 and -1 are integers; the low bit of the exponent gives their sign."""
    made = _raised(words, a, b)
    if words.dtype is DType.UINT32:
        return made
    direct = words.two(Alu.GREATER_EQUAL, b, words.load(0))
    for unit in (1, -1):
        words.two(Alu.MAXIMUM, direct, words.with_number(Alu.EQUAL, a, unit), direct)
    return words.two(Alu.MULTIPLY, made, direct)


def _raised(words: WordArithmetic, a: Tile, b: Tile) -> Tile:
    """Exponentiation by squaring, one bit of the exponent in each iteration."""
    base = words.two(Alu.ADD, a, words.load(0))
    exponent = words.two(Alu.ADD, b, words.load(0))
    one = words.load(1)
    made = words.two(Alu.SUBTRACT, words.two(Alu.ADD, a, one), a)
    with words.lanes.k.loop(32), words.lanes.k.scope():
        odd = words.bit(Alu.BITWISE_AND, exponent, 1)
        factor = words.two(Alu.MULTIPLY, odd, words.two(Alu.SUBTRACT, base, one))
        words.two(Alu.MULTIPLY, made, words.two(Alu.ADD, factor, one), made)
        words.two(Alu.MULTIPLY, base, base, base)
        words.lanes.two(Alu.RIGHT_SHIFT, bits(exponent), 1, bits(exponent))
    return made


_PLAIN: Final = {
    "add": Alu.ADD,
    "subtract": Alu.SUBTRACT,
    "multiply": Alu.MULTIPLY,
    "maximum": Alu.MAXIMUM,
    "minimum": Alu.MINIMUM,
}
_WRITTEN_OUT: Final[Mapping[str, Callable[[WordArithmetic, Tile, Tile], Tile]]] = {
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "truncating_divide": _truncating_divide,
    "power": _power,
}


def fitted(lanes: Lanes, source: DType, target: DType, operand: Operand) -> Operand:
    """An operand in the type in which a function computes; a scalar that does not fit wraps."""
    before, after = source.on_device, target.on_device
    if np.can_cast(before.stored, after.stored):
        return operand
    if not isinstance(operand, Tile):
        return stored_number(operand, after)
    made = lanes.tile(after)
    with lanes.k.scope():
        convert(lanes, source, target, made, operand)
    return made


def arithmetic(lanes: Lanes, function: str, dtype: DType, dst: Tile, left: Operand, right: Operand) -> None:
    """A function of two integers whose result is an integer of this type."""
    words = WordArithmetic.of(lanes, dtype)
    a, b = words.load(left), words.load(right)
    if function not in _PLAIN:
        words.store(_WRITTEN_OUT[function](words, a, b), dst, dtype)
    elif dst.dtype.itemsize == 4:
        words.two(_PLAIN[function], a, b, bitcast_tile(dst, words.dtype))
    else:
        words.store(words.two(_PLAIN[function], a, b), dst, dtype)


def compare(lanes: Lanes, op: Alu, dtype: DType, dst: Tile, left: Operand, right: Operand) -> None:
    """Compare integers of this type. Float32 distinguishes a small number from all others, so that one such operand
    suffices."""
    small = any(not isinstance(each, Tile) and abs(each) < EXACT_IN_FLOATS for each in (left, right))
    if small or not is_wide(dtype):
        lanes.two(op, left, right, dst)
    else:
        words = WordArithmetic.of(lanes, dtype)
        lanes.copy(words.two(op, words.load(left), words.load(right)), dst)


def combine(lanes: Lanes, op: Alu, dtype: DType, dst: Tile, left: Operand, right: Operand) -> None:
    """Combine the bits of integers of this type."""
    same = [each for each in (left, right) if not isinstance(each, Tile) or each.dtype.itemsize == dst.dtype.itemsize]
    if len(same) == 2 and (isinstance(left, Tile) or isinstance(right, Tile)):
        if not isinstance(left, Tile):
            left, right = right, left
        assert isinstance(left, Tile)  # one of them is
        other = bits(right) if isinstance(right, Tile) else int(right)
        lanes.two(op, bits(left), other, bits(dst))
        return
    words = WordArithmetic.of(lanes, dtype)
    made = lanes.two(op, bits(words.load(left)), bits(words.load(right)), lanes.tile(DType.UINT32))
    words.store(bitcast_tile(made, words.dtype), dst, dtype)


def convert(lanes: Lanes, source: DType, target: DType, dst: Tile, src: Operand) -> None:
    """Convert between integer types; excess bits are cut off."""
    before, after = source.on_device.itemsize, target.on_device.itemsize
    if (after > before and (target in _SIGNED or source not in _SIGNED)) or (
        after == before and (target in _SIGNED) == (source in _SIGNED)
    ):
        lanes.copy(src, dst)
    else:  # what is too wide is cut off, and what is below zero becomes large
        words = WordArithmetic.of(lanes, target)
        words.store(words.load(src), dst, target)
