"""ATen importers: arithmetic, comparisons, activations, casts, and tensor factories."""

import math
from typing import Any

import numpy as np

from nxpipe.emulator.capture.aten.base import NotExpressible, Site, axis_of, imports
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Iota, Where

_UNARY = {
    "abs": "abs",
    "acos": "acos",
    "asin": "asin",
    "atan": "atan",
    "bitwise_not": "invert",
    "ceil": "ceil",
    "cos": "cos",
    "cosh": "cosh",
    "erf": "erf",
    "exp": "exp",
    "expm1": "expm1",
    "floor": "floor",
    "isfinite": "isfinite",
    "isinf": "isinf",
    "isnan": "isnan",
    "log": "log",
    "log1p": "log1p",
    "log2": "log2",
    "logical_not": "logical_not",
    "neg": "negate",
    "reciprocal": "reciprocal",
    "relu": "relu",
    "rsqrt": "rsqrt",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "sin": "sin",
    "sinh": "sinh",
    "sqrt": "sqrt",
    "tan": "tan",
    "tanh": "tanh",
    "trunc": "trunc",
}
_BINARY = {
    "__and__": "and",
    "__or__": "or",
    "__xor__": "xor",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "eq": "equal",
    "floor_divide": "floor_divide",
    "ge": "greater_equal",
    "gt": "greater",
    "le": "less_equal",
    "lt": "less",
    "max.other": "maximum",
    "maximum": "maximum",
    "min.other": "minimum",
    "minimum": "minimum",
    "mul": "multiply",
    "ne": "not_equal",
    "pow": "power",
    "remainder": "remainder",
}
_LOGICAL = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor"}


def _register_unary(aten: str, function: str) -> None:
    @imports(aten)
    def importer(site: Site, x: Value, *_: Any) -> Value:
        return site.unary(function, x)


def _register_binary(aten: str, function: str) -> None:
    @imports(aten)
    def importer(site: Site, a: Value | float, b: Value | float, *_: Any) -> Value:
        return site.binary(function, a, b)


def _register_logical(aten: str, function: str) -> None:
    @imports(aten)
    def importer(site: Site, a: Value, b: Value) -> Value:
        return site.binary(function, site.binary("not_equal", a, 0), site.binary("not_equal", b, 0))


for _aten, _function in _UNARY.items():
    _register_unary(_aten, _function)
for _aten, _function in _BINARY.items():
    _register_binary(_aten, _function)
for _aten, _function in _LOGICAL.items():
    _register_logical(_aten, _function)


@imports("alias", "clone", "contiguous", "detach", "lift", "lift_fresh", "lift_fresh_copy", "positive", "_conj")
def same(site: Site, x: Value, *_: Any) -> Value:
    return x


@imports("dropout", "feature_dropout")
def dropout(site: Site, x: Value, p: float, train: bool) -> Value:
    if train and p:
        raise NotExpressible("dropout is active; put the model in evaluation mode")
    return x


@imports("to", "_to_copy", "type_as")
def cast(site: Site, x: Value, *_: Any) -> Value:
    return site.cast(x, site.result.dtype)


@imports("add")
def add(site: Site, a: Value | float, b: Value | float, alpha: float) -> Value:
    return site.binary("add", a, b if alpha == 1 else site.binary("multiply", b, alpha))


@imports("sub")
def sub(site: Site, a: Value | float, b: Value | float, alpha: float) -> Value:
    return site.binary("subtract", a, b if alpha == 1 else site.binary("multiply", b, alpha))


@imports("rsub")
def rsub(site: Site, a: Value, b: Value | float, alpha: float) -> Value:
    return sub(site, b, a, alpha)


@imports("div")
def div(site: Site, a: Value | float, b: Value | float, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "trunc" and site.result.dtype.is_float:
        return site.unary("trunc", site.cast(site.binary("divide", a, b), site.result.dtype))
    return site.binary({None: "divide", "floor": "floor_divide", "trunc": "truncating_divide"}[rounding_mode], a, b)


@imports("fmod")
def fmod(site: Site, a: Value, b: Value | float) -> Value:
    return site.binary("subtract", a, site.binary("multiply", site.binary("truncating_divide", a, b), b))


@imports("square")
def square(site: Site, x: Value) -> Value:
    return site.binary("multiply", x, x)


@imports("round.default")
def round_(site: Site, x: Value) -> Value:
    return site.unary("round", x)


@imports("round.decimals")
def round_decimals(site: Site, x: Value, decimals: int) -> Value:
    """Round to multiples of the last kept decimal."""
    if not x.type.dtype.is_float:
        return x
    unit = float(10 ** abs(decimals))
    scale, unscale = ("multiply", "divide") if decimals >= 0 else ("divide", "multiply")
    return site.binary(unscale, site.unary("round", site.binary(scale, x, unit)), unit)


@imports("sign", "sgn")
def sign(site: Site, x: Value) -> Value:
    return x if x.type.dtype is DType.BOOL else site.unary("sign", x)


@imports("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(site: Site, condition: Value, a: Value | float, b: Value | float) -> Value:
    return site.emit(Where(), condition, site.value(a), site.value(b))


@imports("masked_fill")
def masked_fill(site: Site, x: Value, mask: Value, value: Value | float) -> Value:
    return site.emit(Where(), mask, site.cast(site.value(value), x.type.dtype), x)


@imports("clamp", "clip", "hardtanh")
def clamp(site: Site, x: Value, low: Value | float | None = None, high: Value | float | None = None) -> Value:
    if low is not None:
        x = site.binary("maximum", x, low)
    return x if high is None else site.binary("minimum", x, high)


@imports("clamp_min")
def clamp_min(site: Site, x: Value, low: Value | float) -> Value:
    return clamp(site, x, low)


@imports("clamp_max")
def clamp_max(site: Site, x: Value, high: Value | float) -> Value:
    return clamp(site, x, None, high)


@imports("gelu")
def gelu(site: Site, x: Value, approximate: str) -> Value:
    return site.unary("gelu_tanh" if approximate == "tanh" else "gelu", x)


@imports("relu6")
def relu6(site: Site, x: Value) -> Value:
    return clamp(site, x, 0, 6)


@imports("leaky_relu")
def leaky_relu(site: Site, x: Value, slope: float) -> Value:
    return site.emit(Where(), site.binary("greater", x, 0), x, site.binary("multiply", x, slope))


@imports("elu")
def elu(site: Site, x: Value, alpha: float, scale: float, input_scale: float) -> Value:
    below = site.unary("expm1", site.binary("multiply", x, input_scale))
    unscaled = site.emit(Where(), site.binary("greater", x, 0), x, site.binary("multiply", below, alpha))
    return site.binary("multiply", unscaled, scale)


@imports("softplus")
def softplus(site: Site, x: Value, beta: float, threshold: float) -> Value:
    smooth = site.binary("divide", site.unary("softplus", site.binary("multiply", x, beta)), beta)
    linear = site.binary("greater", site.binary("multiply", x, beta), threshold)
    return site.emit(Where(), linear, x, smooth)


@imports("log_sigmoid")
def log_sigmoid(site: Site, x: Value) -> Value:
    return site.unary("negate", site.unary("softplus", site.unary("negate", x)))


@imports("mish")
def mish(site: Site, x: Value) -> Value:
    return site.binary("multiply", x, site.unary("tanh", site.unary("softplus", x)))


@imports("hardsigmoid")
def hardsigmoid(site: Site, x: Value) -> Value:
    return site.binary("divide", clamp(site, site.binary("add", x, 3.0), 0.0, 6.0), 6.0)


@imports("hardswish")
def hardswish(site: Site, x: Value) -> Value:
    return site.binary("multiply", x, hardsigmoid(site, x))


@imports("exp2")
def exp2(site: Site, x: Value) -> Value:
    return site.binary("power", 2.0, x)


@imports("log10")
def log10(site: Site, x: Value) -> Value:
    return site.binary("multiply", site.unary("log", x), math.log10(math.e))


@imports("atan2")
def atan2(site: Site, y: Value, x: Value) -> Value:
    """The half-angle formula; only the negative half of the x axis is a special case."""
    y, x = site.cast(y, DType.FLOAT32), site.cast(x, DType.FLOAT32)
    radius = site.unary("sqrt", site.binary("add", square(site, x), square(site, y)))
    half = site.unary("atan", site.binary("divide", y, site.binary("add", radius, x)))
    behind = site.binary("and", site.binary("equal", y, 0), site.binary("less", x, 0))
    flat = site.emit(Where(), site.binary("equal", y, 0), site.value(0.0), site.binary("multiply", half, 2.0))
    return site.emit(Where(), behind, site.value(math.pi), flat)


@imports("prelu", "_prelu_kernel")
def prelu(site: Site, x: Value, slope: Value) -> Value:
    """One slope for all channels or one per channel; that of `_prelu_kernel` is already broadcastable."""
    if slope.type.rank == 1 and x.type.rank > 1:
        slope = site.reshape(slope, (slope.type.elements, *[1] * (x.type.rank - 2)))
    return site.emit(Where(), site.binary("greater", x, 0), x, site.binary("multiply", x, slope))


@imports("glu")
def glu(site: Site, x: Value, dim: int) -> Value:
    axis = axis_of(x, dim)
    half = x.type.shape[axis] // 2
    kept, gate = site.slice(x, axis, 0, half), site.slice(x, axis, half, 2 * half)
    return site.binary("multiply", kept, site.unary("sigmoid", gate))


@imports("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm")
@imports("normal", "normal_functional", "bernoulli", "multinomial", "uniform", "poisson", "exponential")
def random(site: Site, *_: Any) -> Value:
    raise NotExpressible(
        "a compiled program cannot generate random numbers; generate them on the host and pass them as an input"
    )


def _arange(site: Site, start: float, step: float) -> Value:
    (length,) = site.result.shape
    dtype = site.result.dtype
    if dtype.is_integer:  # PyTorch truncates both to integers first
        return site.emit(Iota(length, int(start), int(step), dtype))
    return site.builder.constant(start + step * np.arange(length), dtype)


@imports("arange.default")
def arange(site: Site, *_: Any) -> Value:
    return _arange(site, 0, 1)


@imports("arange.start")
def arange_start(site: Site, start: float, *_: Any) -> Value:
    return _arange(site, start, 1)


@imports("arange.start_step")
def arange_start_step(site: Site, start: float, end: float, step: float, *_: Any) -> Value:
    return _arange(site, start, step)


@imports("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "empty_permuted")
def zeros(site: Site, *_: Any) -> Value:
    return site.filled(0, site.result)


@imports("ones", "ones_like", "new_ones")
def ones(site: Site, *_: Any) -> Value:
    return site.filled(1, site.result)


@imports("full", "full_like")
def full(site: Site, shape_or_like: object, number: float, *_: Any) -> Value:
    return site.filled(number, site.result)


@imports("new_full")
def new_full(site: Site, like: Value, shape: object, number: float, *_: Any) -> Value:
    return site.filled(number, site.result)


@imports("fill")
def fill(site: Site, like: Value, number: Value | float) -> Value:
    return site.broadcast(site.cast(site.value(number), site.result.dtype), site.result.shape)


@imports("scalar_tensor")
def scalar_tensor(site: Site, number: float, *_: Any) -> Value:
    return site.filled(number, site.result)


@imports("copy")
def copy(site: Site, like: Value, source: Value, *_: Any) -> Value:
    return site.broadcast(site.cast(source, site.result.dtype), site.result.shape)


@imports("eye")
def eye(site: Site, *_: Any) -> Value:
    rows, columns = site.result.shape
    return site.builder.constant(np.eye(rows, columns), site.result.dtype)


@imports("linspace")
def linspace(site: Site, start: Value | float, end: Value | float, *_: Any) -> Value:
    """Computed from both ends, as in PyTorch, so that both are exact."""
    count, whole = site.result.elements, site.result.dtype.is_integer
    indices = np.arange(count)
    first_half = indices < count // 2 if count > 1 else indices == 0
    if isinstance(start, Value) or isinstance(end, Value):
        if whole:
            raise NotExpressible(
                "an integer linspace between tensors needs 64-bit integers; make the bounds Python numbers"
            )
        return _between_tensors(site, site.value(start), site.value(end), first_half)
    low, high = (float(int(bound) if whole else bound) for bound in (start, end))
    step = (high - low) / max(count - 1, 1)
    numbers = np.where(first_half, low + step * indices, high - step * (count - 1 - indices))
    return site.builder.constant(np.trunc(numbers) if whole else numbers, site.result.dtype)


def _between_tensors(site: Site, start: Value, end: Value, first_half: Any) -> Value:
    count = len(first_half)
    low, high = site.cast(start, DType.FLOAT32), site.cast(end, DType.FLOAT32)
    step = site.binary("divide", site.binary("subtract", high, low), float(max(count - 1, 1)))

    def steps(number: Any) -> Value:
        return site.binary("multiply", step, site.builder.constant(number, DType.FLOAT32))

    up = site.binary("add", low, steps(np.arange(count)))
    down = site.binary("subtract", high, steps(count - 1 - np.arange(count)))
    return site.emit(Where(), site.builder.constant(first_half, DType.BOOL), up, down)


@imports("tril_indices")
def tril_indices(site: Site, rows: int, columns: int, offset: int = 0, *_: Any) -> Value:
    return site.builder.constant(np.stack(np.tril_indices(rows, offset, columns)), site.result.dtype)


@imports("triu_indices")
def triu_indices(site: Site, rows: int, columns: int, offset: int = 0, *_: Any) -> Value:
    return site.builder.constant(np.stack(np.triu_indices(rows, offset, columns)), site.result.dtype)
