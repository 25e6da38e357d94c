"""ATen importers: reductions, argmax, sort, softmax and normalisations.

Softmax and normalisations are single operators of the graph, because the hardware computes them in one pass.
"""

import math
from collections.abc import Sequence
from typing import Any

from nxpipe.emulator.capture.aten.base import Site, axes_of, axis_of, imports, present, promote_scalars
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import (
    ArgReduce,
    ArgSort,
    Cumulate,
    Iota,
    LayerNorm,
    Reduce,
    RmsNorm,
    Softmax,
    TakeAlong,
    Transpose,
    Where,
)

Axes = Sequence[int] | int | None


def _reduced(site: Site, function: str, x: Value, axes: Axes = None, keep: bool = False) -> Value:
    return site.emit(Reduce(function, axes_of(x, axes), keep), x)


def _accumulated(site: Site, function: str, x: Value, axes: Axes, keep: bool) -> Value:
    """A reduction in the result's type: the operand is cast before the accumulation, not after."""
    return _reduced(site, function, site.cast(x, site.result.dtype), axes, keep)


@imports("sum.default")
def sum_all(site: Site, x: Value, *_: Any) -> Value:
    return _accumulated(site, "sum", x, None, False)


@imports("sum.dim_IntList")
def sum_axes(site: Site, x: Value, dims: Axes, keep: bool, *_: Any) -> Value:
    return _accumulated(site, "sum", x, dims, keep)


@imports("mean.default")
def mean_all(site: Site, x: Value, *_: Any) -> Value:
    return _accumulated(site, "mean", x, None, False)


@imports("mean.dim")
def mean_axes(site: Site, x: Value, dims: Axes, keep: bool, *_: Any) -> Value:
    return _accumulated(site, "mean", x, dims, keep)


@imports("prod.default")
def prod_all(site: Site, x: Value, *_: Any) -> Value:
    return _accumulated(site, "prod", x, None, False)


@imports("prod.dim_int")
def prod_axis(site: Site, x: Value, dim: int, keep: bool, *_: Any) -> Value:
    return _accumulated(site, "prod", x, dim, keep)


@imports("amax")
def amax(site: Site, x: Value, dims: Axes, keep: bool) -> Value:
    return _reduced(site, "max", x, dims, keep)


@imports("amin")
def amin(site: Site, x: Value, dims: Axes, keep: bool) -> Value:
    return _reduced(site, "min", x, dims, keep)


@imports("max.default")
def max_all(site: Site, x: Value) -> Value:
    return _reduced(site, "max", x)


@imports("min.default")
def min_all(site: Site, x: Value) -> Value:
    return _reduced(site, "min", x)


@imports("max.dim")
@promote_scalars
def max_axis(site: Site, x: Value, dim: int, keep: bool) -> list[Value]:
    return [_reduced(site, "max", x, dim, keep), site.emit(ArgReduce("argmax", axis_of(x, dim), keep), x)]


@imports("min.dim")
@promote_scalars
def min_axis(site: Site, x: Value, dim: int, keep: bool) -> list[Value]:
    return [_reduced(site, "min", x, dim, keep), site.emit(ArgReduce("argmin", axis_of(x, dim), keep), x)]


@imports("any")
def any_(site: Site, x: Value, dims: Axes = None, keep: bool = False) -> Value:
    return _reduced(site, "any", x, dims, keep)


@imports("all")
def all_(site: Site, x: Value, dims: Axes = None, keep: bool = False) -> Value:
    return _reduced(site, "all", x, dims, keep)


def _arg_reduced(site: Site, function: str, x: Value, dim: int | None, keep: bool) -> Value:
    if dim is None:
        flat = site.reshape(x, (x.type.elements,))
        return site.reshape(site.emit(ArgReduce(function, 0, False), flat), site.result.shape)
    return site.emit(ArgReduce(function, axis_of(x, dim), keep), x)


@imports("argmax")
@promote_scalars
def argmax(site: Site, x: Value, dim: int | None, keep: bool) -> Value:
    return _arg_reduced(site, "argmax", x, dim, keep)


@imports("argmin")
@promote_scalars
def argmin(site: Site, x: Value, dim: int | None, keep: bool) -> Value:
    return _arg_reduced(site, "argmin", x, dim, keep)


@imports("var.correction")
def variance(site: Site, x: Value, dims: Axes, correction: float | None, keep: bool) -> Value:
    centred = site.binary("subtract", x, _reduced(site, "mean", x, dims, True))
    total = _reduced(site, "sum", site.binary("multiply", centred, centred), dims, keep)
    count = 1
    for axis in axes_of(x, dims):
        count *= x.type.shape[axis]
    return site.binary("divide", total, max(float(count - (1 if correction is None else correction)), 0.0))


@imports("cumsum")
@promote_scalars
def cumsum(site: Site, x: Value, dim: int, *_: Any) -> Value:
    return site.emit(Cumulate("cumsum", axis_of(x, dim)), site.cast(x, site.result.dtype))


@imports("cumprod")
@promote_scalars
def cumprod(site: Site, x: Value, dim: int, *_: Any) -> Value:
    return site.emit(Cumulate("cumprod", axis_of(x, dim)), site.cast(x, site.result.dtype))


def _sorted(site: Site, x: Value, dim: int, descending: bool) -> list[Value]:
    axis = axis_of(x, dim)
    order = site.emit(ArgSort(axis, descending), x)
    return [site.emit(TakeAlong(axis), x, order), order]


@imports("sort.default")
@promote_scalars
def sort(site: Site, x: Value, dim: int, descending: bool) -> list[Value]:
    return _sorted(site, x, dim, descending)


@imports("sort.stable")
@promote_scalars
def sort_stable(site: Site, x: Value, stable: bool | None, dim: int, descending: bool) -> list[Value]:
    return _sorted(site, x, dim, descending)


@imports("argsort.default")
@promote_scalars
def argsort(site: Site, x: Value, dim: int, descending: bool) -> Value:
    return site.emit(ArgSort(axis_of(x, dim), descending), x)


@imports("topk")
@promote_scalars
def topk(site: Site, x: Value, k: int, dim: int, largest: bool, ordered: bool) -> list[Value]:
    """The first elements of the sorted axis; `ordered` is ignored, because sorted results are valid too."""
    axis = axis_of(x, dim)
    return [site.slice(part, axis, 0, k) for part in _sorted(site, x, axis, largest)]


@imports("var_mean.correction")
def variance_and_mean(site: Site, x: Value, dims: Axes, correction: float | None, keep: bool) -> list[Value]:
    return [variance(site, x, dims, correction, keep), _reduced(site, "mean", x, dims, keep)]


@imports("std.correction")
def deviation(site: Site, x: Value, dims: Axes, correction: float | None, keep: bool) -> Value:
    return site.unary("sqrt", variance(site, x, dims, correction, keep))


@imports("linalg_vector_norm")
def vector_norm(site: Site, x: Value, order: float, dims: Axes, keep: bool, *_: Any) -> Value:
    size = site.unary("abs", site.cast(x, DType.FLOAT32))
    if math.isinf(order):
        return _reduced(site, "max" if order > 0 else "min", size, dims, keep)
    if order == 0:
        return _reduced(site, "sum", site.cast(site.binary("not_equal", size, 0), DType.FLOAT32), dims, keep)
    if order == 2:
        return site.unary("sqrt", _reduced(site, "sum", site.binary("multiply", size, size), dims, keep))
    powers = site.binary("power", size, float(order))
    return site.binary("power", _reduced(site, "sum", powers, dims, keep), 1 / order)


@imports("logsumexp")
def logsumexp(site: Site, x: Value, dims: Axes, keep: bool) -> Value:
    wide = site.cast(x, DType.FLOAT32)
    highest = _reduced(site, "max", wide, dims, True)
    # An infinite maximum is not subtracted, because the difference of infinities is NaN.
    highest = site.emit(Where(), site.unary("isfinite", highest), highest, site.value(0.0))
    total = _reduced(site, "sum", site.unary("exp", site.binary("subtract", wide, highest)), dims, keep)
    return site.binary("add", site.unary("log", total), site.reshape(highest, total.type.shape))


def _running_extreme(site: Site, function: str, x: Value, axis: int) -> list[Value]:
    """Cumulative extreme and its last position: the cumulative maximum of the positions that equal it."""
    extremes = site.emit(Cumulate(function, axis), x)
    size, after = x.type.shape[axis], x.type.rank - axis - 1
    places = site.reshape(site.emit(Iota(size, 0, 1, DType.INT64)), (size, *[1] * after))
    seen = site.binary("equal", x, extremes)
    if x.type.dtype.is_float:
        seen = site.binary("or", seen, site.unary("isnan", x))
    return [extremes, site.emit(Cumulate("cummax", axis), site.emit(Where(), seen, places, site.value(0)))]


@imports("cummax")
@promote_scalars
def cummax(site: Site, x: Value, dim: int) -> list[Value]:
    return _running_extreme(site, "cummax", x, axis_of(x, dim))


@imports("cummin")
@promote_scalars
def cummin(site: Site, x: Value, dim: int) -> list[Value]:
    return _running_extreme(site, "cummin", x, axis_of(x, dim))


@imports("_is_all_true")
def is_all_true(site: Site, x: Value) -> Value:
    return _reduced(site, "all", x)


@imports("_is_any_true")
def is_any_true(site: Site, x: Value) -> Value:
    return _reduced(site, "any", x)


@imports("argsort.stable")
@promote_scalars
def argsort_stable(site: Site, x: Value, stable: bool, dim: int, descending: bool) -> Value:
    return site.emit(ArgSort(axis_of(x, dim), descending), x)


# Machine epsilon, the default epsilon of PyTorch's rms_norm.
_EPSILON = {DType.FLOAT32: 2.0**-23, DType.BFLOAT16: 2.0**-7, DType.FLOAT16: 2.0**-10}


def _softmax(site: Site, x: Value, dim: int, *, log: bool) -> Value:
    return site.emit(Softmax(axis_of(x, dim), log), site.cast(x, site.result.dtype))


@imports("softmax.int", "_softmax")
@promote_scalars
def softmax(site: Site, x: Value, dim: int, *_: Any) -> Value:
    return _softmax(site, x, dim, log=False)


@imports("log_softmax.int", "_log_softmax")
@promote_scalars
def log_softmax(site: Site, x: Value, dim: int, *_: Any) -> Value:
    return _softmax(site, x, dim, log=True)


@imports("layer_norm")
def layer_norm(
    site: Site, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, epsilon: float, *_: Any
) -> Value:
    op = LayerNorm(len(shape), float(epsilon))
    if weight is None and bias is not None:
        return site.binary("add", site.emit(op, x), bias)
    return site.emit(op, *present([x, weight, bias]))


@imports("native_layer_norm")
def native_layer_norm(
    site: Site, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, epsilon: float
) -> list[Value]:
    return [
        layer_norm(site, x, shape, weight, bias, epsilon),
        *_statistics(site, x, tuple(range(x.type.rank - len(shape), x.type.rank)), epsilon),
    ]


def _statistics(site: Site, x: Value, over: tuple[int, ...], epsilon: float) -> list[Value]:
    """Mean and inverse standard deviation; results that are not read are not compiled."""
    wide = site.cast(x, DType.FLOAT32)
    mean = site.emit(Reduce("mean", over, True), wide)
    centred = site.binary("subtract", wide, mean)
    variance = site.emit(Reduce("mean", over, True), site.binary("multiply", centred, centred))
    return [mean, site.unary("rsqrt", site.binary("add", variance, float(epsilon)))]


@imports("group_norm")
def group_norm(
    site: Site, x: Value, groups: int, weight: Value | None, bias: Value | None, epsilon: float, *_: Any
) -> Value:
    """A layer norm over each group's channels and spatial axes, then a scale and a shift per channel."""
    batch, channels, *places = x.type.shape
    grouped = site.reshape(site.cast(x, DType.FLOAT32), (batch, groups, x.type.elements // max(batch * groups, 1)))
    result = site.reshape(site.emit(LayerNorm(1, float(epsilon)), grouped), x.type.shape)
    for function, operand in (("multiply", weight), ("add", bias)):
        if operand is not None:
            result = site.binary(function, result, site.reshape(operand, (channels, *[1] * len(places))))
    return site.cast(result, site.result.dtype)


@imports("native_group_norm")
def native_group_norm(
    site: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    batch: int,
    channels: int,
    places: int,
    groups: int,
    epsilon: float,
) -> list[Value]:
    grouped = site.reshape(x, (batch, groups, x.type.elements // max(batch * groups, 1)))
    statistics = [site.reshape(part, (batch, groups)) for part in _statistics(site, grouped, (2,), epsilon)]
    return [group_norm(site, x, groups, weight, bias, epsilon), *statistics]


@imports("instance_norm")
def instance_norm(
    site: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    own: bool,
    momentum: float,
    epsilon: float,
    *_: Any,
) -> Value:
    if own or mean is None or variance is None:
        return group_norm(site, x, x.type.shape[1], weight, bias, epsilon)
    return _scaled_by_statistics(site, x, weight, bias, mean, variance, epsilon)


@imports("batch_norm")
def batch_norm(
    site: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool,
    momentum: float,
    epsilon: float,
    *_: Any,
) -> Value:
    if not x.type.elements:
        return site.filled(0, site.result)
    if training or mean is None or variance is None:
        return _scaled_by_batch(site, x, weight, bias, epsilon)
    return _scaled_by_statistics(site, x, weight, bias, mean, variance, epsilon)


@imports("_native_batch_norm_legit_no_training")
def native_batch_norm(
    site: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    momentum: float,
    epsilon: float,
) -> list[Value]:
    return [_scaled_by_statistics(site, x, weight, bias, mean, variance, epsilon)]


@imports("_native_batch_norm_legit.no_stats")
def native_batch_norm_of_batch(
    site: Site, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float, epsilon: float
) -> list[Value]:
    others = tuple(axis for axis in range(x.type.rank) if axis != 1)
    statistics = [site.reshape(part, (x.type.shape[1],)) for part in _statistics(site, x, others, epsilon)]
    return [_scaled_by_batch(site, x, weight, bias, epsilon), *statistics]


def _along_channels(site: Site, x: Value, operand: Value) -> Value:
    return site.reshape(operand, (x.type.shape[1], *[1] * (x.type.rank - 2)))


def _scaled_by_statistics(
    site: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    epsilon: float,
) -> Value:
    """Normalisation by running statistics: a scale and a shift per channel, computed from parameters in float32."""
    stabilised = site.binary("add", site.cast(variance, DType.FLOAT32), float(epsilon))
    scale = site.unary("rsqrt", stabilised)
    if weight is not None:
        scale = site.binary("multiply", scale, weight)
    shift = site.unary("negate", site.binary("multiply", mean, scale))
    if bias is not None:
        shift = site.binary("add", shift, bias)
    scaled = site.binary("multiply", x, _along_channels(site, x, scale))
    return site.cast(site.binary("add", scaled, _along_channels(site, x, shift)), site.result.dtype)


def _scaled_by_batch(site: Site, x: Value, weight: Value | None, bias: Value | None, epsilon: float) -> Value:
    """Normalisation by batch statistics: a layer norm over each channel's rows and spatial axes."""
    order = (1, 0, *range(2, x.type.rank))
    transposed = site.emit(Transpose(order), site.cast(x, DType.FLOAT32))
    rows = site.reshape(transposed, (x.type.shape[1], x.type.elements // x.type.shape[1]))
    normal = site.reshape(site.emit(LayerNorm(1, float(epsilon)), rows), transposed.type.shape)
    result = site.emit(Transpose(order), normal)
    for function, operand in (("multiply", weight), ("add", bias)):
        if operand is not None:
            result = site.binary(function, result, _along_channels(site, x, operand))
    return site.cast(result, site.result.dtype)


@imports("rms_norm")
def rms_norm(site: Site, x: Value, shape: Sequence[int], weight: Value | None, epsilon: float | None) -> Value:
    value = _EPSILON[x.type.dtype] if epsilon is None else float(epsilon)
    return site.emit(RmsNorm(len(shape), value), *present([x, weight]))


@imports("_weight_norm")
def weight_norm(site: Site, direction: Value, length: Value, dim: int) -> Value:
    """Weight normalisation: slices along `dim` scaled to their lengths; with dim -1 the whole tensor is one slice."""
    over = tuple(axis for axis in range(direction.type.rank) if axis != dim)
    wide = site.cast(direction, DType.FLOAT32)
    squares = site.emit(Reduce("sum", over, True), site.binary("multiply", wide, wide))
    scale = site.binary("divide", length, site.unary("sqrt", squares))
    return site.cast(site.binary("multiply", wide, scale), site.result.dtype)
