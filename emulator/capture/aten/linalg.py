"""Matrix products and attention: the tensor engine's composites."""

import math
from typing import Any

from nxpipe.emulator.capture.aten.base import NotExpressible, Site, given, imports
from nxpipe.emulator.capture.composites.products import matrix_product, vector_product
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Attention, GroupedMatMul, Linear, Transpose


@imports("linear")
def linear(site: Site, x: Value, weight: Value, bias: Value | None = None) -> Value:
    if not x.type.dtype.is_float:
        product = vector_product(site, x, site.emit(Transpose((1, 0)), weight), site.result.dtype)
        return product if bias is None else site.binary("add", product, bias)
    return site.emit(Linear(site.result.dtype), *given([x, weight, bias]))


@imports("mm", "bmm")
def mm(site: Site, a: Value, b: Value, *_: Any) -> Value:
    return matrix_product(site, a, b, site.result.dtype)


@imports("matmul", "dot", "vdot", "mv")
def matmul(site: Site, a: Value, b: Value) -> Value:
    return vector_product(site, a, b, site.result.dtype)


@imports("addmm")
def addmm(site: Site, bias: Value, a: Value, b: Value, beta: float, alpha: float) -> Value:
    if alpha == beta == 1 and bias.type.shape == b.type.shape[1:] and a.type.dtype.is_float:
        return site.emit(Linear(site.result.dtype), a, site.emit(Transpose((1, 0)), b), bias)
    return baddbmm(site, bias, a, b, beta, alpha)


@imports("baddbmm")
def baddbmm(site: Site, bias: Value, a: Value, b: Value, beta: float, alpha: float) -> Value:
    # The sum is rounded once, after the bias is added.
    kind = float if site.result.dtype.is_float else int
    product = matrix_product(site, a, b, DType.FLOAT32 if kind is float else site.result.dtype)
    scaled = product if alpha == 1 else site.binary("multiply", product, kind(alpha))
    if beta == 0:  # whatever the bias holds, and be it not-a-number, does not count
        return site.broadcast(site.cast(scaled, site.result.dtype), site.result.shape)
    shifted = bias if beta == 1 else site.binary("multiply", bias, kind(beta))
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
