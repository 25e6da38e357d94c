"""ONNX importers: elementwise functions, casts, selection, quantised arithmetic."""

import math
from collections.abc import Callable
from functools import reduce

import numpy as np

from nxpipe.emulator.capture.onnx.base import OnnxSite, dtype_of, imports
from nxpipe.emulator.capture.onnx.spatial import geometry_of
from nxpipe.emulator.capture.site import NotExpressible
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import largest_finite
from nxpipe.emulator.ops import Bitcast, Convolution, MatMul, Where

_UNARY = {
    "Abs": "abs",
    "Acos": "acos",
    "Asin": "asin",
    "Atan": "atan",
    "Ceil": "ceil",
    "Cos": "cos",
    "Cosh": "cosh",
    "Erf": "erf",
    "Exp": "exp",
    "Floor": "floor",
    "IsNaN": "isnan",
    "Log": "log",
    "Neg": "negate",
    "Reciprocal": "reciprocal",
    "Relu": "relu",
    "Round": "round",
    "Sigmoid": "sigmoid",
    "Sign": "sign",
    "Sin": "sin",
    "Sinh": "sinh",
    "Softplus": "softplus",
    "Sqrt": "sqrt",
    "Tan": "tan",
    "Tanh": "tanh",
    "BitwiseNot": "invert",
    "Not": "logical_not",
}
_BINARY = {
    "Add": "add",
    "Sub": "subtract",
    "Mul": "multiply",
    "Equal": "equal",
    "Greater": "greater",
    "Less": "less",
    "GreaterOrEqual": "greater_equal",
    "LessOrEqual": "less_equal",
    "And": "and",
    "Or": "or",
    "Xor": "xor",
    "BitwiseAnd": "and",
    "BitwiseOr": "or",
    "BitwiseXor": "xor",
}


@imports(*_UNARY)
def unary(site: OnnxSite, x: Value) -> Value:
    return site.unary(_UNARY[site.operator], x)


@imports(*_BINARY)
def binary(site: OnnxSite, a: Value, b: Value) -> Value:
    return site.binary(_BINARY[site.operator], a, b)


@imports("Div")
def divide(site: OnnxSite, a: Value, b: Value) -> Value:
    """Integer division truncates towards zero."""
    return site.binary("divide" if a.type.dtype.is_float else "truncating_divide", a, b)


@imports("Mod")
def modulo(site: OnnxSite, a: Value, b: Value) -> Value:
    """The result has the sign of the divisor; with `fmod`, that of the dividend."""
    if not site.attribute("fmod", 0):
        return site.binary("remainder", a, b)
    whole = site.binary("truncating_divide", a, b)
    return site.binary("subtract", a, site.binary("multiply", whole, b))


@imports("Pow")
def power(site: OnnxSite, a: Value, b: Value) -> Value:
    """The result has the type of the base, for every type of the exponent."""
    if b.type.dtype.is_float and not a.type.dtype.is_float:
        return site.cast(site.binary("power", site.cast(a, DType.FLOAT32), b), a.type.dtype)
    return site.cast(site.binary("power", a, site.cast(b, a.type.dtype)), a.type.dtype)


@imports("Sum", "Max", "Min", "Mean")
def fold(site: OnnxSite, *operands: Value) -> Value:
    function = {"Sum": "add", "Mean": "add", "Max": "maximum", "Min": "minimum"}[site.operator]
    total = reduce(lambda a, b: site.binary(function, a, b), operands)
    return total if site.operator != "Mean" else site.binary("divide", total, site.like(total, len(operands)))


@imports("Identity")
def identity(site: OnnxSite, x: Value) -> Value:
    return x


@imports("Dropout")
def dropout(site: OnnxSite, x: Value, ratio: Value | None = None, training: Value | None = None) -> list[Value]:
    if training is not None and site.table("training mode", training):
        raise NotExpressible("it drops elements at random; export the model for inference")
    return [x, site.broadcast(site.builder.scalar(True), x.type.shape)][: site.result_count]


@imports("Where")
def where(site: OnnxSite, condition: Value, a: Value, b: Value) -> Value:
    return site.emit(Where(), condition, a, b)


@imports("Cast")
def cast(site: OnnxSite, x: Value) -> Value:
    return _cast(site, x, dtype_of(site.attribute("to")))


@imports("CastLike")
def cast_like(site: OnnxSite, x: Value, like: Value) -> Value:
    return _cast(site, x, like.type.dtype)


def _cast(site: OnnxSite, x: Value, dtype: DType) -> Value:
    if dtype is DType.BOOL and x.type.dtype is not DType.BOOL:
        return site.binary("not_equal", x, site.like(x, 0))
    if dtype.value.startswith("float8") and site.attribute("saturate", 1):
        wide, highest = site.floats(x), largest_finite(dtype)
        x = site.binary("minimum", site.binary("maximum", wide, site.like(wide, -highest)), site.like(wide, highest))
    return site.cast(x, dtype)


@imports("BitCast")
def bit_cast(site: OnnxSite, x: Value) -> Value:
    return site.emit(Bitcast(x.type.dtype, dtype_of(site.attribute("to"))), x)


@imports("Clip")
def clip(site: OnnxSite, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    bounds = [low, high]
    for position, name in enumerate(("min", "max")):
        if bounds[position] is None and name in site.attributes:
            bounds[position] = site.like(x, site.attributes[name])
    above = x if bounds[0] is None else site.binary("maximum", x, bounds[0])
    return above if bounds[1] is None else site.binary("minimum", above, bounds[1])


@imports("IsInf")
def is_infinite(site: OnnxSite, x: Value) -> Value:
    infinite = site.unary("isinf", x)
    for attribute, wrong_side in (("detect_negative", "less"), ("detect_positive", "greater")):
        if not site.attribute(attribute, 1):
            wrong = site.binary(wrong_side, x, site.like(x, 0))
            infinite = site.binary("and", infinite, site.unary("logical_not", wrong))
    return infinite


@imports("BitShift")
def shift(site: OnnxSite, x: Value, places: Value) -> Value:
    """Shifts by the width of the type or more give zero, or the sign of a right shift."""
    width = 8 * x.type.dtype.itemsize
    left = site.attribute("direction") == "LEFT"
    below = site.binary("less", places, site.like(places, 0))
    beyond = site.binary("greater_equal", places, site.like(places, width))
    outside = site.binary("or", below, beyond)
    near = site.emit(Where(), outside, site.like(places, 0), places)
    overflow = site.like(x, 0) if left else site.binary("floor_divide", x, site.like(x, 2 ** (width - 1) - 1))
    if not left:
        overflow = site.binary("minimum", overflow, site.like(x, 0))
    # In two steps, because 2 to the power of the highest bit does not fit into the type.
    half = site.binary("floor_divide", near, site.like(near, 2))
    for step in (half, site.binary("subtract", near, half)):
        factor = site.binary("power", site.like(x, 2), step)
        x = site.binary("multiply" if left else "floor_divide", x, factor)
    return site.emit(Where(), outside, overflow, x)


@imports("Gelu")
def gelu(site: OnnxSite, x: Value) -> Value:
    return site.unary("gelu_tanh" if site.attribute("approximate", "none") == "tanh" else "gelu", x)


@imports("Swish")
def swish(site: OnnxSite, x: Value) -> Value:
    alpha = site.attribute("alpha", 1.0)
    if alpha == 1:
        return site.unary("silu", x)
    return site.binary("multiply", x, site.unary("sigmoid", site.binary("multiply", x, site.like(x, alpha))))


@imports("LeakyRelu")
def leaky_relu(site: OnnxSite, x: Value) -> Value:
    return _where_negative(site, x, site.binary("multiply", x, site.like(x, site.attribute("alpha", 0.01))))


@imports("PRelu")
def prelu(site: OnnxSite, x: Value, slope: Value) -> Value:
    return _where_negative(site, x, site.binary("multiply", x, slope))


def _where_negative(site: OnnxSite, x: Value, below: Value) -> Value:
    """`below` for negative elements, x for the others."""
    return site.emit(Where(), site.binary("less", x, site.like(x, 0)), below, x)


def _exponential(site: OnnxSite, x: Value, factor: float, divisor: float = 1.0) -> Value:
    scaled = x if divisor == 1 else site.binary("divide", x, site.like(x, divisor))
    return site.binary("multiply", site.unary("expm1", scaled), site.like(x, factor))


@imports("Elu")
def elu(site: OnnxSite, x: Value) -> Value:
    return _where_negative(site, x, _exponential(site, x, site.attribute("alpha", 1.0)))


@imports("Celu")
def celu(site: OnnxSite, x: Value) -> Value:
    alpha = site.attribute("alpha", 1.0)
    return _where_negative(site, x, _exponential(site, x, alpha, alpha))


@imports("Selu")
def selu(site: OnnxSite, x: Value) -> Value:
    alpha = site.attribute("alpha", 1.67326319217681884765625)
    unscaled = _where_negative(site, x, _exponential(site, x, alpha))
    return site.binary("multiply", unscaled, site.like(x, site.attribute("gamma", 1.05070102214813232421875)))


@imports("ThresholdedRelu")
def thresholded_relu(site: OnnxSite, x: Value) -> Value:
    above = site.binary("greater", x, site.like(x, site.attribute("alpha", 1.0)))
    return site.emit(Where(), above, x, site.like(x, 0))


@imports("HardSigmoid")
def hard_sigmoid(site: OnnxSite, x: Value) -> Value:
    return _hard(site, x, site.attribute("alpha", 0.2), site.attribute("beta", 0.5))


@imports("HardSwish")
def hard_swish(site: OnnxSite, x: Value) -> Value:
    return site.binary("multiply", x, _hard(site, x, 1 / 6, 0.5))


def _hard(site: OnnxSite, x: Value, slope: float, middle: float) -> Value:
    line = site.binary("add", site.binary("multiply", x, site.like(x, slope)), site.like(x, middle))
    return site.binary("minimum", site.binary("maximum", line, site.like(x, 0)), site.like(x, 1))


@imports("Mish")
def mish(site: OnnxSite, x: Value) -> Value:
    return site.binary("multiply", x, site.unary("tanh", site.unary("softplus", x)))


@imports("Softsign")
def softsign(site: OnnxSite, x: Value) -> Value:
    return site.binary("divide", x, site.binary("add", site.unary("abs", x), site.like(x, 1)))


@imports("Asinh")
def asinh(site: OnnxSite, x: Value) -> Value:
    """sign(x) log(|x| + sqrt(x^2 + 1)), by log1p, so that small numbers keep their precision."""
    size = site.unary("abs", x)
    square = site.binary("multiply", x, x)
    root = site.unary("sqrt", site.binary("add", square, site.like(x, 1)))
    excess = site.binary("divide", square, site.binary("add", root, site.like(x, 1)))
    return site.binary("multiply", site.unary("sign", x), site.unary("log1p", site.binary("add", size, excess)))


@imports("Acosh")
def acosh(site: OnnxSite, x: Value) -> Value:
    under = site.binary("subtract", site.binary("multiply", x, x), site.like(x, 1))
    return site.unary("log", site.binary("add", x, site.unary("sqrt", under)))


@imports("Atanh")
def atanh(site: OnnxSite, x: Value) -> Value:
    above, below = site.unary("log1p", x), site.unary("log1p", site.unary("negate", x))
    return site.binary("multiply", site.binary("subtract", above, below), site.like(x, 0.5))


@imports("Shrink")
def shrink(site: OnnxSite, x: Value) -> Value:
    edge, bias = site.attribute("lambd", 0.5), site.like(x, site.attribute("bias", 0.0))
    low = site.binary("less", x, site.like(x, -edge))
    high = site.binary("greater", x, site.like(x, edge))
    zero = site.like(x, 0)
    lowered = site.emit(Where(), high, site.binary("subtract", x, bias), zero)
    return site.emit(Where(), low, site.binary("add", x, bias), lowered)


# The sum of this many products of two 9-bit numbers is below 2**24, so it is exact in float32.
_EXACT = 256


def _per_axis(site: OnnxSite, x: Value, parameter: Value) -> Value:
    """A scale or zero point per tensor, per slice along an axis, or per block of the axis, broadcastable to x."""
    if parameter.type.elements == 1:
        return site.reshape(parameter, ())
    axis = site.axis(x, 1)
    if parameter.type.rank == 1:
        return site.reshape(parameter, (parameter.type.shape[0], *[1] * (x.type.rank - axis - 1)))
    blocks, block = parameter.type.shape[axis], site.attribute("block_size", 0)
    before, after = parameter.type.shape[:axis], parameter.type.shape[axis + 1 :]
    column = site.reshape(parameter, (*before, blocks, 1, *after))
    whole = site.reshape(site.broadcast(column, (*before, blocks, block, *after)), (*before, blocks * block, *after))
    return site.slice(whole, axis, 0, x.type.shape[axis])


@imports("DequantizeLinear")
def dequantise(site: OnnxSite, x: Value, scale: Value, zero: Value | None = None) -> Value:
    wide = site.cast(x, DType.FLOAT32)
    if zero is not None:
        wide = site.binary("subtract", wide, site.cast(_per_axis(site, x, zero), DType.FLOAT32))
    return site.cast(site.binary("multiply", wide, _per_axis(site, x, scale)), scale.type.dtype)


@imports("QuantizeLinear")
def quantise(site: OnnxSite, x: Value, scale: Value, zero: Value | None = None) -> Value:
    number = site.attribute("output_dtype", 0)
    dtype = zero.type.dtype if zero is not None else dtype_of(number) if number else DType.UINT8
    scaled = site.binary("divide", site.floats(x), _per_axis(site, x, scale))
    return _saturated(site, scaled, None if zero is None else _per_axis(site, x, zero), dtype)


def _saturated(site: OnnxSite, x: Value, zero: Value | None, dtype: DType) -> Value:
    """Round, add the zero point, and saturate to the type; the cast rounds narrow floats."""
    if dtype.is_float:
        lowest, highest = -largest_finite(dtype), largest_finite(dtype)
    else:
        x = site.unary("round", x)
        limits = np.iinfo(dtype.value)
        lowest, highest = float(limits.min), float(limits.max)
    if zero is not None:
        x = site.binary("add", x, site.cast(zero, DType.FLOAT32))
    return site.cast(site.binary("minimum", site.binary("maximum", x, lowest), highest), dtype)


def _without_zero_point(
    site: OnnxSite, x: Value, zero: Value | None, *, columns: bool = False, trailing: int = 0
) -> Value:
    """x minus its zero point, in float32, which is exact for 8-bit integers."""
    if x.type.dtype.itemsize > 1:
        raise NotExpressible("it multiplies integers of more than eight bits; use int8 or uint8")
    wide = site.cast(x, DType.FLOAT32)
    if zero is None:
        return wide
    return site.binary("subtract", wide, site.cast(_broadcastable(site, zero, columns, trailing), DType.FLOAT32))


def _broadcastable(site: OnnxSite, parameter: Value, columns: bool = False, trailing: int = 0) -> Value:
    """A scale or zero point per tensor, row, column, or channel (before `trailing` axes), broadcastable."""
    if parameter.type.elements == 1:
        return site.reshape(parameter, ())
    if parameter.type.rank > 1 or columns:
        return parameter
    return site.reshape(parameter, (parameter.type.elements, *[1] * (trailing or 1)))


def _accumulated(site: OnnxSite, inner: int, step: int, part: Callable[[int, int], Value]) -> Value:
    """The sum of partial products, each exact in float32, accumulated as integers."""
    total: Value | None = None
    for start in range(0, inner, step):
        piece = site.cast(part(start, min(start + step, inner)), DType.INT32)
        total = piece if total is None else site.binary("add", total, piece)
    if total is None:
        raise NotExpressible("its matrices have an inner size of zero")
    return total


def _product(site: OnnxSite, a: Value, b: Value) -> Value:
    def part(start: int, stop: int) -> Value:
        left = site.slice(a, a.type.rank - 1, start, stop)
        return site.emit(MatMul(DType.FLOAT32), left, site.slice(b, b.type.rank - 2, start, stop))

    return _accumulated(site, a.type.shape[-1], _EXACT, part)


def _convolved(site: OnnxSite, x: Value, weight: Value) -> Value:
    groups, window = site.attribute("group", 1), math.prod(weight.type.shape[2:])
    inner = weight.type.shape[1]
    step = _EXACT // window if groups == 1 else inner
    if not step or step * window > _EXACT:
        raise NotExpressible(f"its windows have more than {_EXACT} elements, and their sums could be inexact")
    op = Convolution(*geometry_of(site, x, weight.type.shape[2:]), groups, DType.FLOAT32)

    def part(start: int, stop: int) -> Value:
        channels = x if groups > 1 else site.slice(x, 1, start, stop)
        return site.emit(op, channels, site.slice(weight, 1, start, stop))

    return _accumulated(site, inner, step, part)


@imports("MatMulInteger")
def integer_product(
    site: OnnxSite, a: Value, b: Value, zero_a: Value | None = None, zero_b: Value | None = None
) -> Value:
    return _product(site, _without_zero_point(site, a, zero_a), _without_zero_point(site, b, zero_b, columns=True))


@imports("ConvInteger")
def integer_convolution(
    site: OnnxSite, x: Value, weight: Value, zero_x: Value | None = None, zero_weight: Value | None = None
) -> Value:
    trailing = weight.type.rank - 1
    return _convolved(
        site, _without_zero_point(site, x, zero_x), _without_zero_point(site, weight, zero_weight, trailing=trailing)
    )


@imports("QLinearMatMul")
def quantised_product(
    site: OnnxSite,
    a: Value,
    scale_a: Value,
    zero_a: Value,
    b: Value,
    scale_b: Value,
    zero_b: Value,
    scale: Value,
    zero: Value,
) -> Value:
    sums = _product(site, _without_zero_point(site, a, zero_a), _without_zero_point(site, b, zero_b, columns=True))
    return _rescaled(
        site, sums, (_broadcastable(site, scale_a), _broadcastable(site, scale_b, columns=True)), scale, zero
    )


def _rescaled(site: OnnxSite, sums: Value, scales: tuple[Value, Value], scale: Value, zero: Value) -> Value:
    before = site.binary("multiply", *(site.cast(factor, DType.FLOAT32) for factor in scales))
    factor = site.binary("divide", before, site.cast(_broadcastable(site, scale), DType.FLOAT32))
    exact = site.binary("multiply", site.cast(sums, DType.FLOAT32), factor)
    return _saturated(site, exact, _broadcastable(site, zero), zero.type.dtype)


@imports("QLinearConv")
def quantised_convolution(
    site: OnnxSite,
    x: Value,
    scale_x: Value,
    zero_x: Value,
    weight: Value,
    scale_weight: Value,
    zero_weight: Value,
    scale: Value,
    zero: Value,
    bias: Value | None = None,
) -> Value:
    trailing = weight.type.rank - 2
    sums = _convolved(
        site,
        _without_zero_point(site, x, zero_x),
        _without_zero_point(site, weight, zero_weight, trailing=trailing + 1),
    )
    if bias is not None:
        sums = site.binary("add", sums, site.reshape(bias, (bias.type.elements, *[1] * trailing)))
    scales = (_broadcastable(site, scale_x), _broadcastable(site, scale_weight, trailing=trailing))
    return _rescaled(site, sums, scales, scale, zero)
