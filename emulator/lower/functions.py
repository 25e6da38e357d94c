"""Math functions that no engine has, composed of those that they have. Everything is float32 until the result is
stored; tests/lower states the error bounds."""

from collections.abc import Callable, Mapping
from math import inf, log, pi
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Alu
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.scalar import Function
from nxpipe.emulator.lower.lanes import Lanes, Operand, bitcast_tile, bits

_SIGN_BIT: Final = 0x80000000
_UPPER_HALF: Final = 0xFFFFF000  # of a mantissa, with sign and exponent: products of halves are exact
_WHOLE: Final = 2.0**23  # floats from here on have no fraction
_MAGIC: Final = 1.5 * 2.0**23  # what it is added to keeps no fraction, and its last bit is the whole number's
# pi in parts of 8 bits, so that whole multiples of all but the last are exact; half of pi in two.
_PI: Final = (3.140625, 0.000965118408203125, 2.5331974029541016e-06, 1.984187258941006e-09)
_END: Final = 3.1415925  # of the engine's table: what is beyond has been too large to be reduced
_HALF_PI: Final = (1.5707963705062866, -4.371138828673793e-08)


# Whole numbers


def rounded(lanes: Lanes, x: Tile, dst: Tile, correct: Alu | None = None) -> Tile:
    """Round to the nearest integer. With a comparison, correct it by one where it holds: floor goes down from what is
    greater, ceil up from what is less."""
    with lanes.k.scope():
        source = lanes.floats(x)
        near = lanes.copy(lanes.copy(source, lanes.tile(DType.INT32)), lanes.tile())
        if correct is not None:
            beside = lanes.two(correct, near, source)
            near = lanes.two(Alu.SUBTRACT if correct is Alu.GREATER else Alu.ADD, near, beside)
        return _with_sign(lanes, _unless_large(lanes, source, near), source, dst)


def _unless_large(lanes: Lanes, x: Tile, near: Tile) -> Tile:
    """Large numbers, infinities and NaN are integers already."""
    made = lanes.copy(x, lanes.tile())
    fraction = lanes.then(x, Alu.ABS, 0.0, Alu.LESS, _WHOLE, lanes.tile(DType.UINT8))
    return lanes.choose(made, fraction, near)


def _with_sign(lanes: Lanes, magnitude: Tile, x: Tile, dst: Tile) -> Tile:
    """Copy the sign, also of zeros."""
    sign = lanes.two(Alu.BITWISE_AND, bits(x), _SIGN_BIT, lanes.tile(DType.UINT32))
    direct = dst.dtype is DType.FLOAT32
    made = dst if direct else lanes.tile()
    lanes.two(Alu.BITWISE_OR, bits(magnitude), sign, bits(made))
    return dst if direct else lanes.copy(made, dst)


def truncated(lanes: Lanes, x: Tile, dst: Tile) -> Tile:
    source = lanes.floats(x)
    size = lanes.two(Alu.ABS, source, 0.0)
    near = lanes.copy(lanes.copy(size, lanes.tile(DType.INT32)), lanes.tile())
    near = lanes.two(Alu.SUBTRACT, near, lanes.two(Alu.GREATER, near, size))
    return _with_sign(lanes, _unless_large(lanes, size, near), source, dst)


# Divisions


def divided(lanes: Lanes, a: Operand, b: Operand, dst: Tile) -> Tile:
    """Divide within one unit of float32's last place: the engines have a reciprocal, no division."""
    if not isinstance(b, Tile) and b and abs(b) != inf:
        return lanes.two(Alu.MULTIPLY, a, 1.0 / b, dst)
    return lanes.two(Alu.MULTIPLY, a, lanes.reciprocal(b), dst)


def _rest(lanes: Lanes, a: Tile, q: Tile, b: Tile) -> Tile:
    """a - q * b without rounding, where the result is exact: products of halves, subtracted one by one."""
    rest = lanes.tile()
    with lanes.k.scope():
        before, product = a, lanes.tile()
        rights = _in_halves(lanes, b)
        for left in _in_halves(lanes, q):
            for right in rights:
                lanes.two(Alu.SUBTRACT, before, lanes.two(Alu.MULTIPLY, left, right, product), rest)
                before = rest
    return rest


def _in_halves(lanes: Lanes, x: Tile) -> tuple[Tile, Tile]:
    upper = bitcast_tile(lanes.two(Alu.BITWISE_AND, bits(x), _UPPER_HALF, lanes.tile(DType.UINT32)), DType.FLOAT32)
    return upper, lanes.two(Alu.SUBTRACT, x, upper)


def _quotient(lanes: Lanes, a: Tile, b: Tile) -> Tile:
    """a / b to nearest, unless it is so large that it is an integer anyway."""
    first = lanes.tile()
    with lanes.k.scope():
        inverse = lanes.reciprocal(b)
        lanes.two(Alu.MULTIPLY, a, inverse, first)
        better = lanes.two(Alu.ADD, first, lanes.two(Alu.MULTIPLY, _rest(lanes, a, first, b), inverse))
        small = lanes.then(first, Alu.ABS, 0.0, Alu.LESS, _WHOLE, lanes.tile(DType.UINT8))
        return lanes.choose(first, small, better)


def truncating_divide(lanes: Lanes, a: Operand, b: Operand, dst: Tile) -> None:
    truncated(lanes, _quotient(lanes, lanes.floats(a), lanes.floats(b)), dst)


def _floored(lanes: Lanes, a: Operand, b: Operand) -> tuple[Tile, Tile]:
    """Integer quotient and remainder, first towards zero, where the remainder is exact. It tells whether the quotient
    is negative, or had been rounded up to an integer."""
    left, right, whole = lanes.floats(a), lanes.floats(b), lanes.tile()
    with lanes.k.scope():
        truncated(lanes, _quotient(lanes, left, right), whole)
    rest = _rest(lanes, left, whole, right)
    unlike = lanes.two(Alu.NOT_EQUAL, lanes.two(Alu.LESS, rest, 0.0), lanes.two(Alu.LESS, right, 0.0))
    wrong = lanes.two(Alu.MULTIPLY, unlike, lanes.two(Alu.NOT_EQUAL, rest, 0.0))
    return lanes.two(Alu.SUBTRACT, whole, wrong), lanes.two(Alu.ADD, rest, lanes.two(Alu.MULTIPLY, wrong, right))


def floor_divide(lanes: Lanes, a: Operand, b: Operand, dst: Tile) -> None:
    lanes.copy(_floored(lanes, a, b)[0], dst)


def remainder(lanes: Lanes, a: Operand, b: Operand, dst: Tile) -> None:
    lanes.copy(_floored(lanes, a, b)[1], dst)


def power(lanes: Lanes, a: Operand, b: Operand, dst: Tile) -> None:
    """Tensor exponents are computed on GpSimd, a number as exponent on the vector engine."""
    if isinstance(a, Tile) and isinstance(b, Tile):
        lanes.exact(Alu.POWER, lanes.floats(a), lanes.floats(b), dst)
    else:
        lanes.two(Alu.POWER, a, b, dst)


# Circular functions


def _half_turns(lanes: Lanes, x: Tile) -> tuple[Tile, Tile]:
    """x less the nearest multiple of pi, and a sign bit where that multiple is odd; for |x| up to 2^17."""
    source = lanes.floats(x)
    shifted = lanes.then(source, Alu.MULTIPLY, 1 / pi, Alu.ADD, _MAGIC)
    odd = lanes.two(Alu.LEFT_SHIFT, bits(shifted), 31, lanes.tile(DType.UINT32))
    multiples = lanes.two(Alu.SUBTRACT, shifted, _MAGIC)
    rest = source
    for part in _PI:
        rest = lanes.mixed(multiples, Alu.MULTIPLY, -part, Alu.ADD, rest)
    return lanes.then(rest, Alu.MAXIMUM, -_END, Alu.MINIMUM, _END), odd


def _signed(lanes: Lanes, values: Tile, odd: Tile, dst: Tile) -> None:
    made = dst if dst.dtype is DType.FLOAT32 else lanes.tile()
    lanes.two(Alu.BITWISE_XOR, bits(values), odd, bits(made))
    if made != dst:
        lanes.copy(made, dst)


def _from_quarter(lanes: Lanes, rest: Tile) -> Tile:
    """The cosine as a sine shifted by pi / 2."""
    size = lanes.two(Alu.ABS, rest, 0.0)
    across = lanes.then(size, Alu.MULTIPLY, -1.0, Alu.ADD, _HALF_PI[0])
    return lanes.function(Function.SIN, lanes.two(Alu.ADD, across, _HALF_PI[1]))


def _sin(lanes: Lanes, x: Tile, dst: Tile) -> None:
    rest, odd = _half_turns(lanes, x)
    _signed(lanes, lanes.function(Function.SIN, rest), odd, dst)


def _cos(lanes: Lanes, x: Tile, dst: Tile) -> None:
    rest, odd = _half_turns(lanes, x)
    _signed(lanes, _from_quarter(lanes, rest), odd, dst)


def _tan(lanes: Lanes, x: Tile, dst: Tile) -> None:
    rest, _ = _half_turns(lanes, x)
    inverse = lanes.reciprocal(_from_quarter(lanes, rest))
    lanes.two(Alu.MULTIPLY, lanes.function(Function.SIN, rest), inverse, dst)


def _atan(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """Beyond 1 by the reciprocal's arc tangent, because the engine's table ends there."""
    source = lanes.floats(x)
    beyond = lanes.then(source, Alu.ABS, 0.0, Alu.GREATER, 1.0, lanes.tile(DType.UINT8))
    inside = lanes.choose(lanes.copy(source, lanes.tile()), beyond, lanes.reciprocal(source))
    angle = lanes.function(Function.ARCTAN, inside)
    quarter = lanes.two(Alu.MULTIPLY, lanes.function(Function.SIGN, source), _HALF_PI[0])
    lanes.choose(angle, beyond, lanes.two(Alu.SUBTRACT, quarter, angle))
    lanes.copy(angle, dst)


def _asin(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """2 atan(x / (1 + sqrt(1 - x^2)))."""
    source = lanes.floats(x)
    across = lanes.function(Function.SQRT, _one_less_square(lanes, source))
    ratio = lanes.two(Alu.MULTIPLY, source, lanes.reciprocal(lanes.two(Alu.ADD, across, 1.0)))
    lanes.two(Alu.MULTIPLY, lanes.function(Function.ARCTAN, ratio), 2.0, dst)


def _acos(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """2 atan(sqrt(1 - x^2) / (1 + |x|)), and pi minus that for negative x."""
    source = lanes.floats(x)
    across = lanes.function(Function.SQRT, _one_less_square(lanes, source))
    inverse = lanes.reciprocal(lanes.then(source, Alu.ABS, 0.0, Alu.ADD, 1.0))
    half = lanes.function(Function.ARCTAN, lanes.two(Alu.MULTIPLY, across, inverse))
    angle = lanes.two(Alu.MULTIPLY, half, 2.0)
    left = lanes.compared(Alu.LESS, source, 0.0)
    lanes.choose(angle, left, lanes.then(angle, Alu.MULTIPLY, -1.0, Alu.ADD, pi))
    lanes.copy(angle, dst)


def _one_less_square(lanes: Lanes, x: Tile) -> Tile:
    below = lanes.then(x, Alu.MULTIPLY, -1.0, Alu.ADD, 1.0)
    return lanes.mixed(x, Alu.ADD, 1.0, Alu.MULTIPLY, below)


# Exponentials and logarithms


def _halves(lanes: Lanes, x: Tile, scale: float) -> Tile:
    """exp(2 * scale * x) / 2, which stays finite where the exponential alone would overflow too early."""
    half = lanes.function(Function.EXP, x, scale=scale)
    return lanes.mixed(half, Alu.MULTIPLY, 0.5, Alu.MULTIPLY, half)


def _cosh(lanes: Lanes, x: Tile, dst: Tile) -> None:
    lanes.two(Alu.ADD, _halves(lanes, x, 0.5), _halves(lanes, x, -0.5), dst)


def _sinh(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """tanh(x / 2) * (cosh(x) + 1), without cancellation."""
    cosh = lanes.two(Alu.ADD, _halves(lanes, x, 0.5), _halves(lanes, x, -0.5))
    lanes.mixed(cosh, Alu.ADD, 1.0, Alu.MULTIPLY, lanes.function(Function.TANH, x, scale=0.5), dst)


def _expm1(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """tanh(x / 2) * (exp(x) + 1), without cancellation."""
    exponential = lanes.function(Function.EXP, x)
    lanes.mixed(exponential, Alu.ADD, 1.0, Alu.MULTIPLY, lanes.function(Function.TANH, x, scale=0.5), dst)


def _log1p(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """log(1 + x), corrected for the rounding of that sum."""
    source = lanes.floats(x)
    whole = lanes.two(Alu.ADD, source, 1.0)
    kept = lanes.two(Alu.SUBTRACT, whole, 1.0)
    ratio = lanes.two(Alu.MULTIPLY, source, lanes.reciprocal(kept))
    made = lanes.two(Alu.MULTIPLY, lanes.function(Function.LOG, whole), ratio)
    lanes.choose(made, lanes.compared(Alu.EQUAL, kept, 0.0), source)
    lanes.choose(made, lanes.compared(Alu.EQUAL, source, inf), source)
    lanes.copy(made, dst)


def _log2(lanes: Lanes, x: Tile, dst: Tile) -> None:
    lanes.two(Alu.MULTIPLY, lanes.function(Function.LOG, x), 1 / log(2), dst)


COMPOSED: Final[Mapping[str, Callable[[Lanes, Tile, Tile], None]]] = {
    "acos": _acos,
    "asin": _asin,
    "atan": _atan,
    "cos": _cos,
    "cosh": _cosh,
    "expm1": _expm1,
    "log1p": _log1p,
    "log2": _log2,
    "sin": _sin,
    "sinh": _sinh,
    "tan": _tan,
}
LOOKED_UP: Final = {
    "erf": Function.ERF,
    "exp": Function.EXP,
    "gelu": Function.GELU,
    "gelu_tanh": Function.GELU_TANH,
    "log": Function.LOG,
    "rsqrt": Function.RSQRT,
    "sigmoid": Function.SIGMOID,
    "silu": Function.SILU,
    "softplus": Function.SOFTPLUS,
    "sqrt": Function.SQRT,
    "tanh": Function.TANH,
}
