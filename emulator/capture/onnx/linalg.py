"""Matrix products, normalisations and softmax."""

import math

from nxpipe.emulator.capture.composites.products import einsum, matrix_product, vector_product
from nxpipe.emulator.capture.onnx.base import OnnxSite, imports
from nxpipe.emulator.capture.site import NotExpressible, given
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import ArgReduce, Iota, LayerNorm, Linear, Reduce, RmsNorm, Softmax, Transpose


@imports("MatMul")
def matmul(site: OnnxSite, a: Value, b: Value) -> Value:
    return vector_product(site, a, b, a.type.dtype)


@imports("Einsum")
def einsum_(site: OnnxSite, *operands: Value) -> Value:
    return einsum(site, site.attribute("equation"), operands, operands[0].type.dtype)


@imports("Gemm")
def gemm(site: OnnxSite, a: Value, b: Value, c: Value | None = None) -> Value:
    alpha, beta = site.attribute("alpha", 1.0), site.attribute("beta", 1.0)
    rows = site.emit(Transpose((1, 0)), a) if site.attribute("transA", 0) else a
    weight = b if site.attribute("transB", 0) else site.emit(Transpose((1, 0)), b)
    if alpha == beta == 1 and c is not None and c.type.shape == weight.type.shape[:1] and c.type.dtype.is_float:
        return site.emit(Linear(a.type.dtype), rows, weight, c)
    if a.type.dtype.is_float:
        product = site.emit(Linear(a.type.dtype), rows, weight)
    else:
        product = matrix_product(site, rows, site.emit(Transpose((1, 0)), weight), a.type.dtype)
    scaled = product if alpha == 1 else site.binary("multiply", product, site.like(product, alpha))
    if c is None:
        return scaled
    return site.binary("add", scaled, c if beta == 1 else site.binary("multiply", c, site.like(c, beta)))


@imports("Softmax", "LogSoftmax")
def softmax(site: OnnxSite, x: Value) -> Value:
    """Before operator set 13 all axes from the given one on were one."""
    log = site.operator == "LogSoftmax"
    if site.opset >= 13:
        return site.emit(Softmax(site.axis(x, -1), log), x)
    axis = site.axis(x, 1)
    flat = site.reshape(x, (math.prod(x.type.shape[:axis]), math.prod(x.type.shape[axis:])))
    return site.reshape(site.emit(Softmax(1, log), flat), x.type.shape)


@imports("Hardmax")
def hardmax(site: OnnxSite, x: Value) -> Value:
    """One where the first of the largest stands, nothing elsewhere."""
    axis = site.axis(x, -1)
    first = site.emit(ArgReduce("argmax", axis, True), x)
    numbers = site.emit(Iota(x.type.shape[axis], 0, 1, DType.INT64))
    places = site.reshape(numbers, (x.type.shape[axis], *[1] * (x.type.rank - axis - 1)))
    return site.cast(site.binary("equal", places, first), x.type.dtype)


@imports("LayerNormalization")
def layer_norm(site: OnnxSite, x: Value, scale: Value, bias: Value | None = None) -> list[Value]:
    axis = site.axis(x, -1)
    if scale.type.shape != x.type.shape[axis:]:
        raise NotExpressible("its scale does not cover the normalised axes; broadcast it")
    epsilon = float(site.attribute("epsilon", 1e-5))
    normal = site.emit(LayerNorm(x.type.rank - axis, epsilon), *given([x, scale, bias]))
    if site.wanted == 1:
        return [normal]
    over = tuple(range(axis, x.type.rank))
    wide = site.cast(x, DType.FLOAT32)
    mean = site.emit(Reduce("mean", over, True), wide)
    centred = site.binary("subtract", wide, mean)
    variance = site.emit(Reduce("mean", over, True), site.binary("multiply", centred, centred))
    return [normal, mean, site.unary("rsqrt", site.binary("add", variance, epsilon))]


@imports("RMSNormalization")
def rms_norm(site: OnnxSite, x: Value, scale: Value) -> Value:
    axis = site.axis(x, -1)
    op = RmsNorm(x.type.rank - axis, float(site.attribute("epsilon", 1e-5)))
    if scale.type.shape == x.type.shape[axis:]:
        return site.emit(op, x, scale)
    return site.binary("multiply", site.emit(op, x), scale)


def _grouped_norm(site: OnnxSite, x: Value, groups: int, default: float) -> Value:
    """Zero mean and unit variance in each group of channels, in float32."""
    batch = x.type.shape[0]
    wide = site.cast(x, DType.FLOAT32)
    flat = site.reshape(wide, (batch, groups, x.type.elements // max(batch * groups, 1)))
    return site.reshape(site.emit(LayerNorm(1, float(site.attribute("epsilon", default))), flat), x.type.shape)


def _by_channel(site: OnnxSite, parameter: Value, x: Value) -> Value:
    return site.reshape(parameter, (parameter.type.elements, *[1] * (x.type.rank - 2)))


def _scaled(site: OnnxSite, normal: Value, x: Value, scale: Value, bias: Value) -> Value:
    product = site.binary("multiply", normal, _by_channel(site, scale, x))
    return site.cast(site.binary("add", product, _by_channel(site, bias, x)), x.type.dtype)


@imports("InstanceNormalization")
def instance_norm(site: OnnxSite, x: Value, scale: Value, bias: Value) -> Value:
    return _scaled(site, _grouped_norm(site, x, x.type.shape[1], 1e-5), x, scale, bias)


@imports("GroupNormalization")
def group_norm(site: OnnxSite, x: Value, scale: Value, bias: Value) -> Value:
    channels, groups = x.type.shape[1], site.attribute("num_groups")
    if scale.type.elements == groups != channels:  # before operator set 21, one for each group
        share = channels // groups
        scale, bias = (
            site.reshape(site.broadcast(site.reshape(part, (groups, 1)), (groups, share)), (channels,))
            for part in (scale, bias)
        )
    return _scaled(site, _grouped_norm(site, x, groups, 1e-5), x, scale, bias)


@imports("BatchNormalization")
def batch_norm(site: OnnxSite, x: Value, scale: Value, bias: Value, mean: Value, variance: Value) -> list[Value]:
    """In training mode by the batch's own statistics, which also move the running ones."""
    running: list[Value] = []
    if site.attribute("training_mode", 0):
        others = tuple(axis for axis in range(x.type.rank) if axis != 1)
        wide = site.cast(x, DType.FLOAT32)
        own = site.emit(Reduce("mean", others, False), wide)
        centred = site.binary("subtract", wide, _by_channel(site, own, x))
        spread = site.emit(Reduce("mean", others, False), site.binary("multiply", centred, centred))
        running = [_moved(site, mean, own), _moved(site, variance, spread)]
        mean, variance = own, spread
    epsilon = site.attribute("epsilon", 1e-5)
    deviation = site.unary("rsqrt", site.binary("add", site.cast(variance, DType.FLOAT32), epsilon))
    factor = site.binary("multiply", deviation, scale)
    centred = site.binary("subtract", x, _by_channel(site, mean, x))
    return [_scaled(site, centred, x, factor, bias), *running]


def _moved(site: OnnxSite, running: Value, own: Value) -> Value:
    momentum = site.attribute("momentum", 0.9)
    kept = site.binary("multiply", running, site.like(running, momentum))
    return site.cast(site.binary("add", kept, site.binary("multiply", own, 1 - momentum)), running.type.dtype)


@imports("LpNormalization")
def lp_norm(site: OnnxSite, x: Value) -> Value:
    """Nothing divided by nothing is nothing here."""
    axis = site.axis(x, -1)
    if site.attribute("p", 2) == 1:
        length = site.emit(Reduce("sum", (axis,), True), site.unary("abs", x))
    else:
        length = site.unary("sqrt", site.emit(Reduce("sum", (axis,), True), site.binary("multiply", x, x)))
    empty = site.cast(site.binary("equal", length, site.like(length, 0)), length.type.dtype)
    return site.binary("divide", x, site.binary("add", length, empty))
