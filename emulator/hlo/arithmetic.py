"""Elementwise operators as StableHLO, in the arithmetic of the engines.

Floats are widened to float32, computed, and rounded once to the declared type. Functions without an opcode are composed
as in `emulator.numerics`, so that they have its errors and no others.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from nxpipe.emulator.hlo.writer import ELEMENTS, HloWriter, Tensor
from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType, promote
from nxpipe.emulator.numerics import ATANH_ERF
from nxpipe.emulator.ops import Cast

Function = Callable[[HloWriter, Tensor], Tensor]

# The largest number that is not rounded to NaN, of types without infinity. float8_e4m3 is strict: a number above its
# largest is never rounded to it; float8_e4m3fn rounds down to 448 what is nearer to it than to the next step, 480.
_LIMITS: Final = {DType.FLOAT8_E4M3: 240.0, DType.FLOAT8_E4M3FN: 464.0}
_SQRT_HALF: Final = float(np.float32(np.sqrt(0.5)))
_SQRT_2_OVER_PI: Final = float(np.float32(np.sqrt(2 / np.pi)))
_WHOLE: Final = 2.0**23  # floats from here on have no fraction


# Types


def widened(w: HloWriter, x: Tensor) -> Tensor:
    """A float as float32; other types unchanged."""
    return w.convert(x, "f32") if x.is_float else x


def as_float32(w: HloWriter, x: Tensor) -> Tensor:
    """Numbers of any type as float32."""
    return w.convert(x, "f32")


def rounded(w: HloWriter, x: Tensor, dtype: DType) -> Tensor:
    """Float32 numbers as a float type, as `numerics.round_to` rounds them."""
    if dtype is DType.TFLOAT32:
        return _rounded_to_tfloat32(w, x)
    if dtype in _LIMITS:
        x = w.select(w.compare("GT", w.unary("abs", x), _LIMITS[dtype]), math.nan, x)
    return w.convert(x, ELEMENTS[dtype])


def _rounded_to_tfloat32(w: HloWriter, x: Tensor) -> Tensor:
    """Rounding of the bits, with a carry into the exponent: 13 bits of the mantissa are dropped."""
    bits = w.bitcast(x, x.shape, "ui32")
    is_odd = w.binary("and", w.binary("shift_right_logical", bits, 13), 1)
    carried = w.binary("add", bits, w.binary("add", is_odd, (1 << 12) - 1))
    kept = w.bitcast(w.binary("and", carried, 0xFFFFE000), x.shape, "f32")
    return w.select(w.compare("NE", x, x), x, kept)


def settled(w: HloWriter, x: Tensor, dtype: DType) -> Tensor:
    """A computed result in its declared type: float32 is rounded, integers wrap."""
    if dtype.is_float:
        return rounded(w, as_float32(w, x), dtype)
    return w.convert(x, ELEMENTS[dtype]) if dtype is not DType.BOOL else truth(w, x)


def truth(w: HloWriter, x: Tensor) -> Tensor:
    """True where a number is not zero."""
    return x if x.element == "i1" else w.compare("NE", x, 0)


def operand_of(w: HloWriter, x: Tensor, dtype: DType) -> Tensor:
    """An operand in the form in which an engine reads it for a result of `dtype`: float32, or that integer type."""
    return as_float32(w, x) if dtype.is_float else w.convert(x, ELEMENTS[dtype])


def to_integer(w: HloWriter, x: Tensor, dtype: DType) -> Tensor:
    """Float32 numbers without their fraction, saturating; NaN is zero."""
    limits, element = np.iinfo(dtype.on_device.value), ELEMENTS[dtype]
    whole = truncated(w, w.select(w.compare("EQ", x, x), x, 0))
    highest = float(np.nextafter(np.float32(limits.max + 1), np.float32(0)))  # the greatest float32 below the limit
    inside = w.binary("minimum", w.binary("maximum", whole, float(limits.min)), highest)
    return w.select(w.compare("GT", whole, highest), limits.max, w.convert(inside, element))


# Functions of float32


def truncated(w: HloWriter, x: Tensor) -> Tensor:
    return w.select(w.compare("LT", x, 0), w.unary("ceil", x), w.unary("floor", x))


def _nearest_even(w: HloWriter, x: Tensor) -> Tensor:
    below = w.unary("floor", x)
    fraction = w.binary("subtract", x, below)
    half = w.binary("multiply", below, 0.5)
    is_odd = w.compare("NE", half, w.unary("floor", half))
    up = w.binary("or", w.compare("GT", fraction, 0.5), w.binary("and", w.compare("EQ", fraction, 0.5), is_odd))
    nearest = w.select(up, w.binary("add", below, 1), below)
    return w.select(w.compare("LT", w.unary("abs", x), _WHOLE), nearest, x)


def reciprocal(w: HloWriter, x: Tensor) -> Tensor:
    return w.binary("divide", w.like(x, 1), x)


def reciprocal_root(w: HloWriter, x: Tensor) -> Tensor:
    return reciprocal(w, w.unary("sqrt", x))


def _one_plus_exponential(w: HloWriter, x: Tensor) -> Tensor:
    """1 + exp(-x)."""
    return w.binary("add", w.unary("exponential", w.unary("negate", x)), 1)


def _sigmoid(w: HloWriter, x: Tensor) -> Tensor:
    return reciprocal(w, _one_plus_exponential(w, x))


def _silu(w: HloWriter, x: Tensor) -> Tensor:
    return w.binary("divide", x, _one_plus_exponential(w, x))


def _gated(w: HloWriter, x: Tensor, inner: Tensor) -> Tensor:
    """x/2 * (1 + tanh(inner)), as x / (1 + exp(-2 * inner))."""
    exponential = w.unary("exponential", w.binary("multiply", inner, -2))
    return w.binary("divide", x, w.binary("add", exponential, 1))


def _atanh_erf(w: HloWriter, x: Tensor) -> Tensor:
    square = w.binary("multiply", x, x)
    result = w.binary("multiply", square, ATANH_ERF[-1])
    for coefficient in ATANH_ERF[-2:0:-1]:
        result = w.binary("multiply", w.binary("add", result, coefficient), square)
    return w.binary("multiply", w.binary("add", result, ATANH_ERF[0]), x)


def _erf(w: HloWriter, x: Tensor) -> Tensor:
    return w.unary("tanh", _atanh_erf(w, x))


def _gelu(w: HloWriter, x: Tensor) -> Tensor:
    return _gated(w, x, _atanh_erf(w, w.binary("multiply", x, _SQRT_HALF)))


def _gelu_tanh(w: HloWriter, x: Tensor) -> Tensor:
    cube = w.binary("multiply", w.binary("multiply", w.binary("multiply", x, 0.044715), x), x)
    return _gated(w, x, w.binary("multiply", w.binary("add", cube, x), _SQRT_2_OVER_PI))


# log(1 + x) near 0 is y (1 + y^2/12 + y^4/80 + ...) for y = 2 x / (2 + x). A series of y / 2 would give 0 for the
# smallest x, whose halves are below the normal numbers. The usual correction of log(1 + x) by the rounding of that sum
# is no alternative: a compiler that simplifies 1 + x - 1 to x undoes it. At 1/4 the error of the series is 3e-10.
_NEAR: Final = 0.25
_SERIES: Final = tuple(1 / (power + 1) / 2**power for power in range(0, 10, 2))


def _log1p(w: HloWriter, x: Tensor) -> Tensor:
    y = w.binary("divide", w.binary("multiply", x, 2), w.binary("add", x, 2))
    square = w.binary("multiply", y, y)
    series = w.like(x, _SERIES[-1])
    for coefficient in _SERIES[-2::-1]:
        series = w.binary("add", w.binary("multiply", series, square), coefficient)
    is_near = w.compare("LT", w.unary("abs", x), _NEAR)
    return w.select(is_near, w.binary("multiply", y, series), w.unary("log", w.binary("add", x, 1)))


def _softplus(w: HloWriter, x: Tensor) -> Tensor:
    small = w.unary("exponential", w.unary("negate", w.unary("abs", x)))
    return w.binary("add", w.binary("maximum", x, 0), _log1p(w, small))


def _half_exponential(w: HloWriter, x: Tensor, scale: float) -> Tensor:
    """exp(2 * scale * x) / 2, as a product of two smaller exponentials, so that no intermediate result overflows."""
    half = w.unary("exponential", w.binary("multiply", x, scale))
    return w.binary("multiply", w.binary("multiply", half, 0.5), half)


def _cosh(w: HloWriter, x: Tensor) -> Tensor:
    return w.binary("add", _half_exponential(w, x, 0.5), _half_exponential(w, x, -0.5))


def _half_tangent(w: HloWriter, x: Tensor) -> Tensor:
    """tanh(x / 2)"""
    return w.unary("tanh", w.binary("multiply", x, 0.5))


def _sinh(w: HloWriter, x: Tensor) -> Tensor:
    """tanh(x / 2) * (cosh(x) + 1), without cancellation."""
    return w.binary("multiply", w.binary("add", _cosh(w, x), 1), _half_tangent(w, x))


def _expm1(w: HloWriter, x: Tensor) -> Tensor:
    """tanh(x / 2) * (exp(x) + 1), without cancellation."""
    return w.binary("multiply", w.binary("add", w.unary("exponential", x), 1), _half_tangent(w, x))


def _complement_root(w: HloWriter, x: Tensor) -> Tensor:
    """sqrt(1 - x^2), without cancellation."""
    minus = w.binary("subtract", w.like(x, 1), x)
    return w.unary("sqrt", w.binary("multiply", w.binary("add", x, 1), minus))


def _acos(w: HloWriter, x: Tensor) -> Tensor:
    return w.binary("atan2", _complement_root(w, x), x)


def _asin(w: HloWriter, x: Tensor) -> Tensor:
    return w.binary("atan2", x, _complement_root(w, x))


def _atan(w: HloWriter, x: Tensor) -> Tensor:
    return w.binary("atan2", x, 1)


def _tan(w: HloWriter, x: Tensor) -> Tensor:
    return w.binary("divide", w.unary("sine", x), w.unary("cosine", x))


def _log2(w: HloWriter, x: Tensor) -> Tensor:
    return w.binary("multiply", w.unary("log", x), 1 / math.log(2))


def _opcode(name: str) -> Function:
    return lambda w, x: w.unary(name, x)


SMOOTH: Final[Mapping[str, Function]] = {
    "acos": _acos,
    "asin": _asin,
    "atan": _atan,
    "cos": _opcode("cosine"),
    "cosh": _cosh,
    "erf": _erf,
    "exp": _opcode("exponential"),
    "expm1": _expm1,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "log": _opcode("log"),
    "log1p": _log1p,
    "log2": _log2,
    "reciprocal": reciprocal,
    "rsqrt": reciprocal_root,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "sin": _opcode("sine"),
    "sinh": _sinh,
    "softplus": _softplus,
    "sqrt": _opcode("sqrt"),
    "tan": _tan,
    "tanh": _opcode("tanh"),
}


# Functions that keep the type, and predicates


def _whole(function: Function) -> Function:
    """A rounding, which leaves integers as they are."""
    return lambda w, x: function(w, x) if x.is_float else x


def _sign(w: HloWriter, x: Tensor) -> Tensor:
    """The sign; 0 for NaN."""
    signs = (w.convert(w.compare(direction, x, 0), x.element) for direction in ("GT", "LT"))
    return w.binary("subtract", *signs)


def _absolute(w: HloWriter, x: Tensor) -> Tensor:
    return x if x.element[0] == "u" else w.unary("abs", x)


KEEPING: Final[Mapping[str, Function]] = {
    "abs": _absolute,
    "ceil": _whole(_opcode("ceil")),
    "floor": _whole(_opcode("floor")),
    "invert": _opcode("not"),
    "negate": _opcode("negate"),
    "relu": lambda w, x: w.binary("maximum", x, 0),
    "round": _whole(_nearest_even),
    "sign": _sign,
    "trunc": _whole(truncated),
}


def _magnitude(direction: str, of_integers: bool) -> Function:
    """A comparison of the magnitude with infinity, with the answer for all integers."""

    def function(w: HloWriter, x: Tensor) -> Tensor:
        if not x.is_float:
            return w.filled(of_integers, x.shape, "i1")
        return w.compare(direction, w.unary("abs", x), math.inf)

    return function


PREDICATES: Final[Mapping[str, Function]] = {
    "isfinite": _magnitude("LT", of_integers=True),
    "isinf": _magnitude("EQ", of_integers=False),
    "isnan": lambda w, x: w.compare("NE", x, x),
    "logical_not": lambda w, x: w.unary("not", x) if x.element == "i1" else w.compare("EQ", x, 0),
}


def unary(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    (x,), function, dtype = operands, node.op.label, node.result.type.dtype
    if function in PREDICATES:
        return PREDICATES[function](w, widened(w, x))
    result = SMOOTH[function](w, as_float32(w, x)) if function in SMOOTH else KEEPING[function](w, widened(w, x))
    return settled(w, result, dtype)


# Functions of two operands


def _has_remainder(w: HloWriter, remainder: Tensor, divisor: Tensor) -> Tensor:
    """Where a quotient that was truncated is one above that which is rounded down."""
    if divisor.element[0] == "u":
        return w.filled(False, divisor.shape, "i1")
    signs = (w.compare("LT", x, 0) for x in (remainder, divisor))
    return w.binary("and", w.compare("NE", remainder, 0), w.binary("xor", *signs))


def _unless_zero(w: HloWriter, divisor: Tensor, result: Tensor) -> Tensor:
    """0 for division of integers by zero, as in numpy."""
    return result if result.is_float else w.select(w.compare("EQ", divisor, 0), 0, result)


def _remainder(w: HloWriter, a: Tensor, b: Tensor) -> Tensor:
    """The remainder with the sign of the divisor."""
    remainder = w.binary("remainder", a, b)
    moved = w.select(_has_remainder(w, remainder, b), w.binary("add", remainder, b), remainder)
    return _unless_zero(w, b, moved)


def _floor_divide(w: HloWriter, a: Tensor, b: Tensor) -> Tensor:
    remainder = w.binary("remainder", a, b)
    below = _has_remainder(w, remainder, b)
    if not a.is_float:
        quotient = w.binary("divide", a, b)
        return _unless_zero(w, b, w.binary("subtract", quotient, w.convert(below, a.element)))
    # The quotient of what is left without the remainder is whole but for its rounding.
    quotient = w.binary("divide", w.binary("subtract", a, remainder), b)
    whole = _nearest_even(w, w.select(below, w.binary("subtract", quotient, 1), quotient))
    return w.select(w.compare("EQ", b, 0), w.binary("divide", a, b), whole)


def _truncating_divide(w: HloWriter, a: Tensor, b: Tensor) -> Tensor:
    quotient = w.binary("divide", a, b)
    return truncated(w, quotient) if a.is_float else _unless_zero(w, b, quotient)


def _power(w: HloWriter, a: Tensor, b: Tensor) -> Tensor:
    """Powers of integers by repeated squaring, which wrap. For a negative exponent those of 1 and -1 are exact, and all
    others 0."""
    if a.is_float:
        return w.binary("power", a, b)
    is_signed = a.element[0] == "i"
    is_negative = w.compare("LT", b, 0) if is_signed else None
    exponent = b if is_negative is None else w.select(is_negative, w.binary("and", b, 1), b)
    result, square = w.like(a, 1), a
    bits = a.numpy.itemsize * 8 - is_signed
    for bit in range(bits):
        digit = w.binary("and", w.binary("shift_right_logical", exponent, bit), 1)
        result = w.select(truth(w, digit), w.binary("multiply", result, square), result)
        square = w.binary("multiply", square, square) if bit + 1 < bits else square
    if is_negative is None:
        return result
    is_unit = w.compare("EQ", w.unary("abs", a), 1)
    return w.select(w.binary("and", is_negative, w.unary("not", is_unit)), 0, result)


def _extreme(opcode: str) -> Callable[[HloWriter, Tensor, Tensor], Tensor]:
    on_truth = {"maximum": "or", "minimum": "and", "add": "or", "multiply": "and"}[opcode]
    return lambda w, a, b: w.binary(on_truth if a.element == "i1" else opcode, a, b)


def _direct(opcode: str) -> Callable[[HloWriter, Tensor, Tensor], Tensor]:
    return lambda w, a, b: w.binary(opcode, a, b)


def _comparison(direction: str) -> Callable[[HloWriter, Tensor, Tensor], Tensor]:
    return lambda w, a, b: w.compare(direction, a, b)


PAIRED: Final[Mapping[str, Callable[[HloWriter, Tensor, Tensor], Tensor]]] = {
    **{name: _extreme(name) for name in ("add", "maximum", "minimum", "multiply")},
    **{name: _direct(name) for name in ("and", "or", "xor", "subtract")},
    "divide": lambda w, a, b: w.binary("divide", as_float32(w, a), as_float32(w, b)),
    "equal": _comparison("EQ"),
    "floor_divide": _floor_divide,
    "greater": _comparison("GT"),
    "greater_equal": _comparison("GE"),
    "less": _comparison("LT"),
    "less_equal": _comparison("LE"),
    "not_equal": _comparison("NE"),
    "power": _power,
    "remainder": _remainder,
    "truncating_divide": _truncating_divide,
}


def binary(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """The quotient of integers is a float: they are not wrapped to a common integer type before."""
    type_ = node.result.type
    common = type_.dtype if node.op.label == "divide" else promote(*(operand.type for operand in node.operands))
    a, b = (w.expanded(operand_of(w, x, common), type_.shape) for x in operands)
    return settled(w, PAIRED[node.op.label](w, a, b), type_.dtype)


def where(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    type_ = node.result.type
    condition, *choices = operands
    if any(choice.type.dtype is not type_.dtype for choice in node.operands[1:]):
        choices = [settled(w, operand_of(w, x, type_.dtype), type_.dtype) for x in choices]
    a, b = (w.expanded(x, type_.shape) for x in choices)
    return w.select(w.expanded(condition, type_.shape), a, b)


def cast(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    (x,), op = operands, node.op
    assert isinstance(op, Cast)
    if node.operands[0].type.dtype is op.dtype:
        return x
    if x.is_float and op.dtype.is_integer:
        return to_integer(w, as_float32(w, x), op.dtype)
    return settled(w, x, op.dtype)
