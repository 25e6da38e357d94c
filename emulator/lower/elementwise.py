"""Elementwise operators on tiles, and the math functions that no engine implements, as engine instructions.

Every node rounds to its own type, so that fusion does not change results. Intermediate results of a math function are
float32 until the result is stored; tests/lower states the error bounds.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf, log, pi
from typing import Any, Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType, TensorType, promote
from nxpipe.emulator.isa.instruction import Alu
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.scalar import Function
from nxpipe.emulator.lower import integers
from nxpipe.emulator.lower.kernel import Kernel
from nxpipe.emulator.lower.lanes import Lanes, Operand, bitcast_tile, bits
from nxpipe.emulator.ops import Binary, Cast, Unary, Where
from nxpipe.emulator.ops.base import Operator

_SIGN_BIT: Final = 0x80000000
_UPPER_HALF: Final = 0xFFFFF000  # mask of sign, exponent and upper mantissa bits; products of such halves are exact
_WHOLE: Final = 2.0**23  # float32 numbers from here on are integers
_MAGIC: Final = 1.5 * 2.0**23  # adding it rounds to an integer, whose lowest bit becomes the sum's lowest mantissa bit
# Cody-Waite range reduction: pi in parts of 8 bits, so that integer multiples of all parts but the last are exact.
_PI: Final = (3.140625, 0.000965118408203125, 2.5331974029541016e-06, 1.984187258941006e-09)
_END: Final = 3.1415925  # end of the engine's sine table; arguments that are too large to reduce are clamped to it
_HALF_PI: Final = (1.5707963705062866, -4.371138828673793e-08)  # pi / 2 in two parts


# Rounding


def rounded(lanes: Lanes, x: Tile, dst: Tile, correct: Alu | None = None) -> Tile:
    """Round to the nearest integer. With `correct`, subtract 1 if the rounded number is greater than x (floor), or add
    1 if it is less (ceil)."""
    with lanes.k.scope():
        source = lanes.floats(x)
        near = lanes.copy(lanes.copy(source, lanes.tile(DType.INT32)), lanes.tile())
        if correct is not None:
            correction = lanes.two(correct, near, source)
            near = lanes.two(Alu.SUBTRACT if correct is Alu.GREATER else Alu.ADD, near, correction)
        return _with_sign(lanes, _keep_integers(lanes, source, near), source, dst)


def _keep_integers(lanes: Lanes, x: Tile, near: Tile) -> Tile:
    """`near` if x has a fraction; else x itself: large numbers, infinities and NaN have none."""
    result = lanes.copy(x, lanes.tile())
    fraction = lanes.then(x, Alu.ABS, 0.0, Alu.LESS, _WHOLE, lanes.tile(DType.UINT8))
    return lanes.choose(result, fraction, near)


def _with_sign(lanes: Lanes, magnitude: Tile, x: Tile, dst: Tile) -> Tile:
    """The magnitude with the sign of x, also for zeros."""
    sign = lanes.two(Alu.BITWISE_AND, bits(x), _SIGN_BIT, lanes.tile(DType.UINT32))
    direct = dst.dtype is DType.FLOAT32
    result = dst if direct else lanes.tile()
    lanes.two(Alu.BITWISE_OR, bits(magnitude), sign, bits(result))
    return dst if direct else lanes.copy(result, dst)


def truncated(lanes: Lanes, x: Tile, dst: Tile) -> Tile:
    source = lanes.floats(x)
    magnitude = lanes.two(Alu.ABS, source, 0.0)
    near = lanes.copy(lanes.copy(magnitude, lanes.tile(DType.INT32)), lanes.tile())
    near = lanes.two(Alu.SUBTRACT, near, lanes.two(Alu.GREATER, near, magnitude))
    return _with_sign(lanes, _keep_integers(lanes, magnitude, near), source, dst)


# Divisions


def divided(lanes: Lanes, a: Operand, b: Operand, dst: Tile) -> Tile:
    """Divide with an error of at most one unit in the last place. The engines have a reciprocal, but no division."""
    if not isinstance(b, Tile) and b and abs(b) != inf:
        return lanes.two(Alu.MULTIPLY, a, 1.0 / b, dst)
    return lanes.two(Alu.MULTIPLY, a, lanes.reciprocal(b), dst)


def _exact_remainder(lanes: Lanes, a: Tile, q: Tile, b: Tile) -> Tile:
    """The remainder a - q * b without rounding error, if float32 can represent it: q and b are split in halves whose
    four products are exact, and the products are subtracted one by one."""
    difference = lanes.tile()
    with lanes.k.scope():
        minuend, product = a, lanes.tile()
        rights = _split_halves(lanes, b)
        for left in _split_halves(lanes, q):
            for right in rights:
                lanes.two(Alu.SUBTRACT, minuend, lanes.two(Alu.MULTIPLY, left, right, product), difference)
                minuend = difference
    return difference


def _split_halves(lanes: Lanes, x: Tile) -> tuple[Tile, Tile]:
    upper = bitcast_tile(lanes.two(Alu.BITWISE_AND, bits(x), _UPPER_HALF, lanes.tile(DType.UINT32)), DType.FLOAT32)
    return upper, lanes.two(Alu.SUBTRACT, x, upper)


def _quotient(lanes: Lanes, a: Tile, b: Tile) -> Tile:
    """a / b rounded to nearest, by one correction step; quotients from 2^23 on are integers and are not corrected."""
    estimate = lanes.tile()
    with lanes.k.scope():
        inverse = lanes.reciprocal(b)
        lanes.two(Alu.MULTIPLY, a, inverse, estimate)
        corrected = lanes.two(
            Alu.ADD, estimate, lanes.two(Alu.MULTIPLY, _exact_remainder(lanes, a, estimate, b), inverse)
        )
        small = lanes.then(estimate, Alu.ABS, 0.0, Alu.LESS, _WHOLE, lanes.tile(DType.UINT8))
        return lanes.choose(estimate, small, corrected)


def truncating_divide(lanes: Lanes, a: Operand, b: Operand, dst: Tile) -> None:
    truncated(lanes, _quotient(lanes, lanes.floats(a), lanes.floats(b)), dst)


def _floored(lanes: Lanes, a: Operand, b: Operand) -> tuple[Tile, Tile]:
    """Floored quotient and remainder.

    The quotient is truncated first, with an exact remainder. If the remainder is not zero and its sign differs from the
    divisor's, the truncated quotient is too large by one: it was negative, or had been rounded up to an integer."""
    left, right, quotient = lanes.floats(a), lanes.floats(b), lanes.tile()
    with lanes.k.scope():
        truncated(lanes, _quotient(lanes, left, right), quotient)
    rest = _exact_remainder(lanes, left, quotient, right)
    signs_differ = lanes.two(Alu.NOT_EQUAL, lanes.two(Alu.LESS, rest, 0.0), lanes.two(Alu.LESS, right, 0.0))
    excess = lanes.two(Alu.MULTIPLY, signs_differ, lanes.two(Alu.NOT_EQUAL, rest, 0.0))
    return lanes.two(Alu.SUBTRACT, quotient, excess), lanes.two(Alu.ADD, rest, lanes.two(Alu.MULTIPLY, excess, right))


def floor_divide(lanes: Lanes, a: Operand, b: Operand, dst: Tile) -> None:
    lanes.copy(_floored(lanes, a, b)[0], dst)


def remainder(lanes: Lanes, a: Operand, b: Operand, dst: Tile) -> None:
    lanes.copy(_floored(lanes, a, b)[1], dst)


def power(lanes: Lanes, a: Operand, b: Operand, dst: Tile) -> None:
    """Raise to a power: on GpSimd for two tensors, on the vector engine if one operand is a number."""
    if isinstance(a, Tile) and isinstance(b, Tile):
        lanes.exact(Alu.POWER, lanes.floats(a), lanes.floats(b), dst)
    else:
        lanes.two(Alu.POWER, a, b, dst)


# Trigonometric functions


def _reduce_by_pi(lanes: Lanes, x: Tile) -> tuple[Tile, Tile]:
    """x minus the nearest multiple of pi, and a sign bit if that multiple is odd; for |x| up to 2^17."""
    source = lanes.floats(x)
    shifted = lanes.then(source, Alu.MULTIPLY, 1 / pi, Alu.ADD, _MAGIC)
    odd = lanes.two(Alu.LEFT_SHIFT, bits(shifted), 31, lanes.tile(DType.UINT32))
    multiples = lanes.two(Alu.SUBTRACT, shifted, _MAGIC)
    reduced = source
    for part in _PI:
        reduced = lanes.mixed(multiples, Alu.MULTIPLY, -part, Alu.ADD, reduced)
    return lanes.then(reduced, Alu.MAXIMUM, -_END, Alu.MINIMUM, _END), odd


def _apply_sign(lanes: Lanes, values: Tile, odd: Tile, dst: Tile) -> None:
    result = dst if dst.dtype is DType.FLOAT32 else lanes.tile()
    lanes.two(Alu.BITWISE_XOR, bits(values), odd, bits(result))
    if result != dst:
        lanes.copy(result, dst)


def _reduced_cosine(lanes: Lanes, reduced: Tile) -> Tile:
    """The cosine of a reduced argument: sin(pi / 2 - |x|)."""
    magnitude = lanes.two(Alu.ABS, reduced, 0.0)
    shifted = lanes.then(magnitude, Alu.MULTIPLY, -1.0, Alu.ADD, _HALF_PI[0])
    return lanes.function(Function.SIN, lanes.two(Alu.ADD, shifted, _HALF_PI[1]))


def _sin(lanes: Lanes, x: Tile, dst: Tile) -> None:
    reduced, odd_sign = _reduce_by_pi(lanes, x)
    _apply_sign(lanes, lanes.function(Function.SIN, reduced), odd_sign, dst)


def _cos(lanes: Lanes, x: Tile, dst: Tile) -> None:
    reduced, odd_sign = _reduce_by_pi(lanes, x)
    _apply_sign(lanes, _reduced_cosine(lanes, reduced), odd_sign, dst)


def _tan(lanes: Lanes, x: Tile, dst: Tile) -> None:
    reduced, _ = _reduce_by_pi(lanes, x)
    inverse = lanes.reciprocal(_reduced_cosine(lanes, reduced))
    lanes.two(Alu.MULTIPLY, lanes.function(Function.SIN, reduced), inverse, dst)


def _atan(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """For |x| > 1, where the engine's table ends: sign(x) * pi / 2 - atan(1 / x)."""
    source = lanes.floats(x)
    outside = lanes.then(source, Alu.ABS, 0.0, Alu.GREATER, 1.0, lanes.tile(DType.UINT8))
    inside = lanes.choose(lanes.copy(source, lanes.tile()), outside, lanes.reciprocal(source))
    angle = lanes.function(Function.ARCTAN, inside)
    quarter = lanes.two(Alu.MULTIPLY, lanes.function(Function.SIGN, source), _HALF_PI[0])
    lanes.choose(angle, outside, lanes.two(Alu.SUBTRACT, quarter, angle))
    lanes.copy(angle, dst)


def _asin(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """2 atan(x / (1 + sqrt(1 - x^2)))."""
    source = lanes.floats(x)
    cosine = lanes.function(Function.SQRT, _one_minus_square(lanes, source))
    ratio = lanes.two(Alu.MULTIPLY, source, lanes.reciprocal(lanes.two(Alu.ADD, cosine, 1.0)))
    lanes.two(Alu.MULTIPLY, lanes.function(Function.ARCTAN, ratio), 2.0, dst)


def _acos(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """2 atan(sqrt(1 - x^2) / (1 + |x|)), and pi minus that for negative x."""
    source = lanes.floats(x)
    sine = lanes.function(Function.SQRT, _one_minus_square(lanes, source))
    inverse = lanes.reciprocal(lanes.then(source, Alu.ABS, 0.0, Alu.ADD, 1.0))
    half = lanes.function(Function.ARCTAN, lanes.two(Alu.MULTIPLY, sine, inverse))
    angle = lanes.two(Alu.MULTIPLY, half, 2.0)
    is_negative = lanes.compared(Alu.LESS, source, 0.0)
    lanes.choose(angle, is_negative, lanes.then(angle, Alu.MULTIPLY, -1.0, Alu.ADD, pi))
    lanes.copy(angle, dst)


def _one_minus_square(lanes: Lanes, x: Tile) -> Tile:
    complement = lanes.then(x, Alu.MULTIPLY, -1.0, Alu.ADD, 1.0)
    return lanes.mixed(x, Alu.ADD, 1.0, Alu.MULTIPLY, complement)


# Exponentials and logarithms


def _half_exponential(lanes: Lanes, x: Tile, scale: float) -> Tile:
    """exp(2 * scale * x) / 2, as a product of two smaller exponentials, so that no intermediate result overflows."""
    half = lanes.function(Function.EXP, x, scale=scale)
    return lanes.mixed(half, Alu.MULTIPLY, 0.5, Alu.MULTIPLY, half)


def _cosh(lanes: Lanes, x: Tile, dst: Tile) -> None:
    lanes.two(Alu.ADD, _half_exponential(lanes, x, 0.5), _half_exponential(lanes, x, -0.5), dst)


def _sinh(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """tanh(x / 2) * (cosh(x) + 1), without cancellation."""
    cosh = lanes.two(Alu.ADD, _half_exponential(lanes, x, 0.5), _half_exponential(lanes, x, -0.5))
    lanes.mixed(cosh, Alu.ADD, 1.0, Alu.MULTIPLY, lanes.function(Function.TANH, x, scale=0.5), dst)


def _expm1(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """tanh(x / 2) * (exp(x) + 1), without cancellation."""
    exponential = lanes.function(Function.EXP, x)
    lanes.mixed(exponential, Alu.ADD, 1.0, Alu.MULTIPLY, lanes.function(Function.TANH, x, scale=0.5), dst)


def _log1p(lanes: Lanes, x: Tile, dst: Tile) -> None:
    """log(1 + x), corrected for the rounding of that sum."""
    source = lanes.floats(x)
    total = lanes.two(Alu.ADD, source, 1.0)
    increment = lanes.two(Alu.SUBTRACT, total, 1.0)
    ratio = lanes.two(Alu.MULTIPLY, source, lanes.reciprocal(increment))
    result = lanes.two(Alu.MULTIPLY, lanes.function(Function.LOG, total), ratio)
    lanes.choose(result, lanes.compared(Alu.EQUAL, increment, 0.0), source)
    lanes.choose(result, lanes.compared(Alu.EQUAL, source, inf), source)
    lanes.copy(result, dst)


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


_ARITHMETIC: Final = {
    "add": Alu.ADD,
    "subtract": Alu.SUBTRACT,
    "multiply": Alu.MULTIPLY,
    "maximum": Alu.MAXIMUM,
    "minimum": Alu.MINIMUM,
}
_DIRECT: Final = {*_ARITHMETIC, *LOOKED_UP}  # a single instruction on floats
_ON_BOOLEANS: Final = {"add": Alu.MAXIMUM, "multiply": Alu.MINIMUM, "maximum": Alu.MAXIMUM, "minimum": Alu.MINIMUM}
_COMPARISONS: Final = {
    "equal": Alu.EQUAL,
    "greater": Alu.GREATER,
    "greater_equal": Alu.GREATER_EQUAL,
    "less": Alu.LESS,
    "less_equal": Alu.LESS_EQUAL,
    "not_equal": Alu.NOT_EQUAL,
}
_BITWISE: Final = {"and": Alu.BITWISE_AND, "or": Alu.BITWISE_OR, "xor": Alu.BITWISE_XOR}
_DIVISIONS: Final[Mapping[str, Callable[[Lanes, Operand, Operand, Tile], Any]]] = {
    "divide": divided,
    "floor_divide": floor_divide,
    "power": power,
    "remainder": remainder,
    "truncating_divide": truncating_divide,
}
_MULTI_STEP: Final = ("floor_divide", "power", "remainder", "truncating_divide")
_FEW, _ROUNDING, _MANY, _TRUNCATING = 8, 10, 28, 32  # bounds on temporaries


def is_applicable(node: Node) -> bool:
    """True for an elementwise operator."""
    return type(node.op) in _APPLIED


def is_exact(node: Node) -> bool:
    """True for a cast between float types that represents every value exactly."""
    source, target = node.operands[0].type.dtype, node.result.type.dtype
    return isinstance(node.op, Cast) and source.is_float and _holds(target, source)


def _holds(wide: DType, narrow: DType) -> bool:
    return wide.is_float and promote(TensorType((), wide), TensorType((), narrow)) is wide


def temporaries(node: Node) -> int:
    """An upper bound on the float32 tiles that a node needs in addition to operands and result; tests/lower checks it
    for all operators."""
    types = [*(operand.type.dtype for operand in node.operands), node.result.type.dtype]
    if all(dtype.is_float for dtype in types) and (isinstance(node.op, Cast) or node.op.label in _DIRECT):
        return 0
    function = node.op.label
    if function == "truncating_divide":
        return _TRUNCATING
    if function in COMPOSED or function in _MULTI_STEP:
        return _MANY
    return _ROUNDING if function in ("cast", "ceil", "floor", "round", "trunc") else _FEW


def apply(k: Kernel, node: Node, dst: Tile, operands: Sequence[Operand]) -> None:
    """Emit the instructions of a node. An operand is a tile or a compile-time number."""
    with k.scope():
        _APPLIED[type(node.op)](Lanes(k, dst.partitions, dst.elements), node, dst, operands)


def _binary(lanes: Lanes, node: Node, dst: Tile, operands: Sequence[Operand]) -> None:
    types = [operand.type for operand in node.operands]
    dtype, function = promote(*types), node.op.label
    if not dtype.is_float and function != "divide":
        operands = [
            integers.convert_operand(lanes, type_.dtype, dtype, operand)
            for type_, operand in zip(types, operands, strict=True)
        ]
    left, right = operands
    if function in _COMPARISONS:
        op = _COMPARISONS[function]
        if dtype.is_float:
            lanes.two(op, left, right, dst)
        else:
            integers.compare(lanes, op, dtype, dst, left, right)
    elif function in _BITWISE:
        integers.combine(lanes, _BITWISE[function], dtype, dst, left, right)
    elif dtype.is_float or function == "divide":
        if function in _DIVISIONS:
            _DIVISIONS[function](lanes, left, right, dst)
        else:
            lanes.two(_ARITHMETIC[function], left, right, dst)
    elif dtype is DType.BOOL:
        lanes.two(_ON_BOOLEANS[function], left, right, dst)
    else:
        integers.arithmetic(lanes, function, dtype, dst, left, right)


def _unary(lanes: Lanes, node: Node, dst: Tile, operands: Sequence[Operand]) -> None:
    function, dtype, operand = node.op.label, node.operands[0].type.dtype, operands[0]
    dtype_of_number = dst.dtype if function in _TYPE_PRESERVING else _float(dtype)
    x = operand if isinstance(operand, Tile) else lanes.filled(operand, dtype_of_number)
    if function in LOOKED_UP:
        lanes.function(LOOKED_UP[function], x, dst)
    elif function in COMPOSED:
        COMPOSED[function](lanes, x, dst)
    elif function == "reciprocal":
        lanes.reciprocal(x, dst)
    elif function in _PREDICATES:
        _PREDICATES[function](lanes, x, dst)
    elif dtype.is_float:
        _ON_FLOATS[function](lanes, x, dst)
    else:
        _on_integers(lanes, function, dtype, x, dst)


def _float(dtype: DType) -> DType:
    return DType.FLOAT32 if not dtype.is_float else dtype


def _isinf(lanes: Lanes, x: Tile, dst: Tile) -> None:
    lanes.then(x, Alu.ABS, 0.0, Alu.EQUAL, inf, dst)


def _isfinite(lanes: Lanes, x: Tile, dst: Tile) -> None:
    lanes.then(x, Alu.ABS, 0.0, Alu.LESS, inf, dst)


_PREDICATES: Final[Mapping[str, Callable[[Lanes, Tile, Tile], Any]]] = {
    "isfinite": _isfinite,
    "isinf": _isinf,
    "isnan": lambda lanes, x, dst: lanes.two(Alu.NOT_EQUAL, x, x, dst),
    "logical_not": lambda lanes, x, dst: lanes.two(Alu.EQUAL, x, 0.0, dst),
}
_ON_FLOATS: Final[Mapping[str, Callable[[Lanes, Tile, Tile], Any]]] = {
    "abs": lambda lanes, x, dst: lanes.two(Alu.ABS, x, 0.0, dst),
    "ceil": lambda lanes, x, dst: rounded(lanes, x, dst, Alu.LESS),
    "floor": lambda lanes, x, dst: rounded(lanes, x, dst, Alu.GREATER),
    "negate": lambda lanes, x, dst: lanes.two(Alu.MULTIPLY, x, -1.0, dst),
    "relu": lambda lanes, x, dst: lanes.two(Alu.MAXIMUM, x, 0.0, dst),
    "round": rounded,
    "sign": lambda lanes, x, dst: lanes.function(Function.SIGN, x, dst),
    "trunc": truncated,
}
_TYPE_PRESERVING: Final = {*_ON_FLOATS, "invert"}  # the result has the operand's type


def _on_integers(lanes: Lanes, function: str, dtype: DType, x: Tile, dst: Tile) -> None:
    if function in ("ceil", "floor", "round", "trunc"):
        lanes.copy(x, dst)
    elif function == "sign":
        lanes.function(Function.SIGN, x, dst)
    elif function == "relu":
        integers.arithmetic(lanes, "maximum", dtype, dst, x, 0)
    elif function == "invert":
        every_bit = 1 if dtype is DType.BOOL else 2 ** (8 * dst.dtype.itemsize) - 1
        integers.combine(lanes, Alu.BITWISE_XOR, dtype, dst, x, every_bit)
    elif function == "negate":
        integers.arithmetic(lanes, "subtract", dtype, dst, 0, x)
    else:
        words = integers.WordArithmetic.of(lanes, dtype)
        word = words.load(x)
        negative = words.two(Alu.SUBTRACT, words.load(0), word)
        words.store(words.two(Alu.MAXIMUM, word, negative) if words.dtype is DType.INT32 else word, dst, dtype)


def _where(lanes: Lanes, node: Node, dst: Tile, operands: Sequence[Operand]) -> None:
    condition, chosen, other = operands
    _, chosen_type, other_type = (operand.type.dtype for operand in node.operands)
    target = node.result.type.dtype
    if not isinstance(condition, Tile):
        _converted(lanes, chosen_type if condition else other_type, target, dst, chosen if condition else other)
        return
    _converted(lanes, other_type, target, dst, other)
    if isinstance(chosen, Tile) and chosen.dtype is not dst.dtype:
        converted = lanes.tile(dst.dtype)
        _converted(lanes, chosen_type, target, converted, chosen)
        chosen = converted
    lanes.choose(dst, condition, chosen)


def _converted(lanes: Lanes, source: DType, target: DType, dst: Tile, operand: Operand) -> None:
    """Convert with wrap-around; a plain copy between integer types saturates."""
    if isinstance(operand, Tile) and source.is_integer and target.is_integer:
        integers.convert(lanes, source, target, dst, operand)
    else:
        lanes.copy(operand, dst)


def _cast(lanes: Lanes, node: Node, dst: Tile, operands: Sequence[Operand]) -> None:
    source, target = node.operands[0].type.dtype, node.result.type.dtype
    operand = operands[0]
    x = operand if isinstance(operand, Tile) else lanes.filled(operand, _float(source))
    if target is DType.BOOL:
        lanes.two(Alu.NOT_EQUAL, x, 0.0, dst)
    elif target.is_float or source is DType.BOOL:
        lanes.copy(x, dst)
    elif source.is_float:
        lanes.copy(truncated(lanes, x, lanes.tile()), dst)
    else:
        integers.convert(lanes, source, target, dst, operand)


_APPLIED: Final[Mapping[type[Operator], Callable[[Lanes, Node, Tile, Sequence[Operand]], None]]] = {
    Binary: _binary,
    Cast: _cast,
    Unary: _unary,
    Where: _where,
}
