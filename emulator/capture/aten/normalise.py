"""Softmax and normalisations, kept whole where the hardware does them in one sweep."""

from collections.abc import Sequence
from typing import Any

from nxpipe.emulator.capture.aten.base import Site, along_an_axis, axis_of, given, imports
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import LayerNorm, Reduce, RmsNorm, Softmax, Transpose

# The step between 1 and the next number, which PyTorch's rms_norm takes when it is given no epsilon.
_EPSILON = {DType.FLOAT32: 2.0**-23, DType.BFLOAT16: 2.0**-7, DType.FLOAT16: 2.0**-10}


def _softmax(site: Site, x: Value, dim: int, *, log: bool) -> Value:
    return site.emit(Softmax(axis_of(x, dim), log), site.cast(x, site.result.dtype))


@imports("softmax.int", "_softmax")
@along_an_axis
def softmax(site: Site, x: Value, dim: int, *_: Any) -> Value:
    return _softmax(site, x, dim, log=False)


@imports("log_softmax.int", "_log_softmax")
@along_an_axis
def log_softmax(site: Site, x: Value, dim: int, *_: Any) -> Value:
    return _softmax(site, x, dim, log=True)


@imports("layer_norm")
def layer_norm(
    site: Site, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, epsilon: float, *_: Any
) -> Value:
    op = LayerNorm(len(shape), float(epsilon))
    if weight is None and bias is not None:
        return site.binary("add", site.emit(op, x), bias)
    return site.emit(op, *given([x, weight, bias]))


@imports("native_layer_norm")
def native_layer_norm(
    site: Site, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, epsilon: float
) -> list[Value]:
    return [
        layer_norm(site, x, shape, weight, bias, epsilon),
        *_statistics(site, x, tuple(range(x.type.rank - len(shape), x.type.rank)), epsilon),
    ]


def _statistics(site: Site, x: Value, over: tuple[int, ...], epsilon: float) -> list[Value]:
    """Mean and inverse deviation, which are results of their own; nobody who does not read them pays for them."""
    wide = site.cast(x, DType.FLOAT32)
    mean = site.emit(Reduce("mean", over, True), wide)
    centred = site.binary("subtract", wide, mean)
    variance = site.emit(Reduce("mean", over, True), site.binary("multiply", centred, centred))
    return [mean, site.unary("rsqrt", site.binary("add", variance, float(epsilon)))]


@imports("group_norm")
def group_norm(
    site: Site, x: Value, groups: int, weight: Value | None, bias: Value | None, epsilon: float, *_: Any
) -> Value:
    """A layer norm of each group's channels and places together, then a scale and a shift of each channel."""
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
    """With known statistics a scale and a shift of each channel, made of parameters alone and in float32."""
    steady = site.binary("add", site.cast(variance, DType.FLOAT32), float(epsilon))
    scale = site.unary("rsqrt", steady)
    if weight is not None:
        scale = site.binary("multiply", scale, weight)
    shift = site.unary("negate", site.binary("multiply", mean, scale))
    if bias is not None:
        shift = site.binary("add", shift, bias)
    scaled = site.binary("multiply", x, _along_channels(site, x, scale))
    return site.cast(site.binary("add", scaled, _along_channels(site, x, shift)), site.result.dtype)


def _scaled_by_batch(site: Site, x: Value, weight: Value | None, bias: Value | None, epsilon: float) -> Value:
    """Statistics of the batch itself: a layer norm of each channel's places in all of its rows."""
    order = (1, 0, *range(2, x.type.rank))
    turned = site.emit(Transpose(order), site.cast(x, DType.FLOAT32))
    rows = site.reshape(turned, (x.type.shape[1], x.type.elements // x.type.shape[1]))
    normal = site.reshape(site.emit(LayerNorm(1, float(epsilon)), rows), turned.type.shape)
    result = site.emit(Transpose(order), normal)
    for function, operand in (("multiply", weight), ("add", bias)):
        if operand is not None:
            result = site.binary(function, result, _along_channels(site, x, operand))
    return site.cast(result, site.result.dtype)


@imports("rms_norm")
def rms_norm(site: Site, x: Value, shape: Sequence[int], weight: Value | None, epsilon: float | None) -> Value:
    floor = _EPSILON[x.type.dtype] if epsilon is None else float(epsilon)
    return site.emit(RmsNorm(len(shape), floor), *given([x, weight]))


@imports("_weight_norm")
def weight_norm(site: Site, direction: Value, length: Value, dim: int) -> Value:
    """Rows of unit length, each times a length of its own; axis -1 makes one row of all."""
    over = tuple(axis for axis in range(direction.type.rank) if axis != dim)
    wide = site.cast(direction, DType.FLOAT32)
    squares = site.emit(Reduce("sum", over, True), site.binary("multiply", wide, wide))
    scale = site.binary("divide", length, site.unary("sqrt", squares))
    return site.cast(site.binary("multiply", wide, scale), site.result.dtype)
