"""Matrix products and attention: the tensor engine's composites."""

import math
from typing import Any

from emulator.capture.aten.base import NotExpressible, Site, given, imports
from emulator.graph import Value
from emulator.ops import Attention, GroupedMatMul, Linear, MatMul, Transpose
from emulator.types import DType


@imports("linear")
def linear(site: Site, x: Value, weight: Value, bias: Value | None = None) -> Value:
    return site.emit(Linear(site.result.dtype), *given([x, weight, bias]))


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
    return site.emit(op, *given([q, k, v, mask]))


@imports("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_mm(
    site: Site, rows: Value, matrices: Value, ends: Value | None, bias: Value | None = None, *_: Any
) -> Value:
    """One weight an expert, rows sorted by expert."""
    if ends is None or bias is not None or rows.type.rank != 2 or matrices.type.rank != 3:
        raise NotExpressible("this form of grouped product is not compiled; sort rows by group, and pass their ends")
    return site.emit(GroupedMatMul(site.result.dtype), rows, matrices, ends)


@imports("dot", "vdot")
def dot(site: Site, a: Value, b: Value) -> Value:
    return matmul(site, a, b)


@imports("mv")
def mv(site: Site, a: Value, b: Value) -> Value:
    return matmul(site, a, b)
