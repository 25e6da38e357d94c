"""Matrix products, attention and normalisations: the composites that the hardware has engines for."""

import math
from collections.abc import Sequence
from typing import Any

from emulator.capture.aten.base import NotExpressible, Site, axis_of, imports
from emulator.graph import Value
from emulator.ops import Attention, LayerNorm, Linear, MatMul, RmsNorm, Softmax, Transpose
from emulator.types import DType

# The step between 1 and the next number, which PyTorch's rms_norm takes when it is given no epsilon.
_EPSILON = {DType.FLOAT32: 2.0**-23, DType.BFLOAT16: 2.0**-7, DType.FLOAT16: 2.0**-10}


def _operands(values: Sequence[Value | None]) -> list[Value]:
    """Optional operands come last and are left out."""
    return [value for value in values if value is not None]


@imports("linear")
def linear(site: Site, x: Value, weight: Value, bias: Value | None = None) -> Value:
    return site.emit(Linear(site.result.dtype), *_operands([x, weight, bias]))


@imports("mm", "bmm")
def mm(site: Site, a: Value, b: Value, *_: Any) -> Value:
    return site.emit(MatMul(site.result.dtype), a, b)


@imports("matmul")
def matmul(site: Site, a: Value, b: Value) -> Value:
    """A vector on the left is a row, on the right a column; the result forgets them."""
    row = a if a.type.rank > 1 else site.reshape(a, (1, *a.type.shape))
    column = b if b.type.rank > 1 else site.reshape(b, (*b.type.shape, 1))
    return site.reshape(site.emit(MatMul(site.result.dtype), row, column), site.result.shape)


@imports("addmm")
def addmm(site: Site, bias: Value, a: Value, b: Value, beta: float, alpha: float) -> Value:
    if alpha == beta == 1 and bias.type.shape == b.type.shape[1:]:
        return site.emit(Linear(site.result.dtype), a, site.emit(Transpose((1, 0)), b), bias)
    return baddbmm(site, bias, a, b, beta, alpha)


@imports("baddbmm")
def baddbmm(site: Site, bias: Value, a: Value, b: Value, beta: float, alpha: float) -> Value:
    # The sum is rounded once, after the bias is added.
    product = site.emit(MatMul(DType.FLOAT32), a, b)
    scaled = product if alpha == 1 else site.binary("multiply", product, float(alpha))
    shifted = bias if beta == 1 else site.binary("multiply", bias, float(beta))
    return site.cast(site.binary("add", scaled, shifted), site.result.dtype)


@imports("scaled_dot_product_attention")
def attention(
    site: Site,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Value:
    if dropout:
        raise NotExpressible("attention drops probabilities; put the model in evaluation mode")
    width = 1 / math.sqrt(q.type.shape[-1]) if scale is None else float(scale)
    op = Attention(scale=width, causal=causal, probabilities=v.type.dtype, out=site.result.dtype)
    return site.emit(op, *_operands([q, k, v, mask]))


def _softmax(site: Site, x: Value, dim: int, *, log: bool) -> Value:
    return site.emit(Softmax(axis_of(x, dim), log), site.cast(x, site.result.dtype))


@imports("softmax.int", "_softmax")
def softmax(site: Site, x: Value, dim: int, *_: Any) -> Value:
    return _softmax(site, x, dim, log=False)


@imports("log_softmax.int", "_log_softmax")
def log_softmax(site: Site, x: Value, dim: int, *_: Any) -> Value:
    return _softmax(site, x, dim, log=True)


@imports("layer_norm")
def layer_norm(
    site: Site, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, epsilon: float, *_: Any
) -> Value:
    op = LayerNorm(len(shape), float(epsilon))
    if weight is None and bias is not None:
        return site.binary("add", site.emit(op, x), bias)
    return site.emit(op, *_operands([x, weight, bias]))


@imports("native_layer_norm")
def native_layer_norm(
    site: Site, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, epsilon: float
) -> list[Value]:
    """Its mean and deviation are by-products for a backward pass, which no compiled program has."""
    return [layer_norm(site, x, shape, weight, bias, epsilon)]


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


@imports("rms_norm")
def rms_norm(site: Site, x: Value, shape: Sequence[int], weight: Value | None, epsilon: float | None) -> Value:
    floor = _EPSILON[x.type.dtype] if epsilon is None else float(epsilon)
    return site.emit(RmsNorm(len(shape), floor), *_operands([x, weight]))
