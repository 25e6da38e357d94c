"""ATen importers: matrix products, attention, convolution, pooling, resampling."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nxpipe.emulator.capture.aten.base import NotExpressible, Site, imports, present
from nxpipe.emulator.capture.composites import (
    Geometry,
    adaptive_window_positions,
    antialias_weights,
    column_to_image,
    matrix_product,
    multiply_axis,
    sample_grid,
    transposed_convolution,
    unpool,
    vector_product,
    window_maximum,
    window_positions,
)
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Attention, Concat, Convolution, GroupedMatMul, Linear, Pool, Reduce, Resample, Transpose


@imports("linear")
def linear(site: Site, x: Value, weight: Value, bias: Value | None = None) -> Value:
    if not x.type.dtype.is_float:
        product = vector_product(site, x, site.emit(Transpose((1, 0)), weight), site.result.dtype)
        return product if bias is None else site.binary("add", product, bias)
    return site.emit(Linear(site.result.dtype), *present([x, weight, bias]))


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
    if beta == 0:  # the bias is ignored, even if it is NaN
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
    return site.emit(op, *present([q, k, v, mask]))


@imports("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_mm(
    site: Site, rows: Value, matrices: Value, ends: Value | None, bias: Value | None = None, *_: Any
) -> Value:
    """Grouped matmul: one weight per expert, and rows sorted by expert."""
    if ends is None or bias is not None or rows.type.rank != 2 or matrices.type.rank != 3:
        raise NotExpressible("this form of grouped matmul is not compiled; sort rows by group, and pass their ends")
    return site.emit(GroupedMatMul(site.result.dtype), rows, matrices, ends)


Sizes = Sequence[int]


def _per_axis(sizes: Sizes, axes: int) -> tuple[int, ...]:
    """One size per axis; a single size applies to all axes."""
    return tuple(sizes) * axes if len(sizes) == 1 else tuple(sizes)


@imports("convolution")
def convolution(
    site: Site,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Value:
    axes = weight.type.rank - 2
    stride, dilation = _per_axis(stride, axes), _per_axis(dilation, axes)
    before = after = _per_axis(padding, axes)
    if x.type.rank == axes + 1:
        x = site.reshape(x, (1, *x.type.shape))
    if transposed:
        geometry, extra = Geometry(stride, before, after, dilation), _per_axis(output_padding, axes)
        result = transposed_convolution(site, x, weight, bias, geometry, extra, groups, site.result.dtype)
    else:
        op = Convolution(stride, before, after, dilation, groups, site.result.dtype)
        result = site.emit(op, *present([x, weight, bias]))
    return site.reshape(result, site.result.shape)


@imports("conv1d.default", "conv2d.default", "conv3d.default")
def conv(
    site: Site, x: Value, weight: Value, bias: Value | None, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Value:
    return convolution(site, x, weight, bias, stride, padding, dilation, False, (0,), groups)


@imports("conv1d.padding", "conv2d.padding", "conv3d.padding")
def conv_padded_by_name(
    site: Site, x: Value, weight: Value, bias: Value | None, stride: Sizes, padding: str, dilation: Sizes, groups: int
) -> Value:
    """Convolution with padding `same` or `valid`; odd padding is larger at the end."""
    axes = weight.type.rank - 2
    dilation = _per_axis(dilation, axes)
    total = [step * (length - 1) for step, length in zip(dilation, weight.type.shape[2:], strict=True)]
    if padding == "valid":
        total = [0] * axes
    before, after = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    op = Convolution(_per_axis(stride, axes), before, after, dilation, groups, site.result.dtype)
    batched = x if x.type.rank == weight.type.rank else site.reshape(x, (1, *x.type.shape))
    return site.reshape(site.emit(op, *present([batched, weight, bias])), site.result.shape)


def _pooled(
    site: Site, function: str, x: Value, window: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, axes: int
) -> Value:
    """Pooling to the known result size: `ceil_mode` only changes the padding at the end."""
    batched = x if x.type.rank == axes + 2 else site.reshape(x, (1, *x.type.shape))
    window, dilation, before = _per_axis(window, axes), _per_axis(dilation, axes), _per_axis(padding, axes)
    stride = _per_axis(stride, axes) if stride else window
    in_sizes, out_sizes = batched.type.shape[2:], site.result.shape[-axes:]
    geometry = zip(out_sizes, stride, window, dilation, in_sizes, before, strict=True)
    after = tuple(max((o - 1) * s + d * (w - 1) + 1 - i - b, 0) for o, s, w, d, i, b in geometry)
    pooled = site.emit(Pool(function, window, stride, before, after, dilation), batched)
    for axis, size in enumerate(out_sizes, 2):
        pooled = site.slice(pooled, axis, 0, size) if pooled.type.shape[axis] != size else pooled
    return site.reshape(pooled, site.result.shape)


@imports("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(site: Site, x: Value, window: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil: bool) -> Value:
    return _pooled(site, "max_pool", x, window, stride, padding, dilation, max(len(window), _axes(site)))


@imports("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool_with_indices(
    site: Site, x: Value, window: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil: bool
) -> list[Value]:
    axes = max(len(window), _axes(site))
    pooled = max_pool(site, x, window, stride, padding, dilation, ceil)
    window, before = _per_axis(window, axes), _per_axis(padding, axes)
    geometry = Geometry(_per_axis(stride, axes) if stride else window, before, before, _per_axis(dilation, axes))
    in_sizes, out_sizes = x.type.shape[-axes:], site.result.shape[-axes:]
    positions = window_positions(in_sizes, window, geometry, out_sizes)
    return [pooled, window_maximum(site, x, positions, out_sizes)[1]]


def _axes(site: Site) -> int:
    return len(site.result.shape) - 2


@imports("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    site: Site,
    x: Value,
    window: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil: bool,
    count_padding: bool,
    divisor: int | None = None,
) -> Value:
    axes = max(len(window), _axes(site))
    total = _pooled(site, "sum_pool", x, window, stride, padding, (1,), axes)
    if divisor is not None:
        return site.binary("multiply", total, 1 / divisor)
    window, padding = _per_axis(window, axes), _per_axis(padding, axes)
    stride = _per_axis(stride, axes) if stride else window
    geometry = zip(site.result.shape[-axes:], x.type.shape[-axes:], window, stride, padding, strict=True)
    counts = np.ones((), np.float64)
    for size, in_size, length, step, margin in geometry:
        first = np.arange(size) * step - margin
        reach = margin if count_padding else 0
        inside = np.minimum(first + length, in_size + reach) - np.maximum(first, -reach)
        counts = counts[..., None] * inside
    if counts.size == 0 or counts.min() == counts.max():
        return site.binary("multiply", total, float(1 / counts.max(initial=1)))
    return site.binary("multiply", total, site.builder.constant(1 / counts, DType.FLOAT32))


@imports("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_avg_pool(site: Site, x: Value, sizes: Sizes) -> Value:
    """Average each axis over windows of nearly equal length: a mean of whole axes, or a matmul with a constant table of
    weights."""
    axes = range(x.type.rank - len(sizes), x.type.rank)
    whole = tuple(axis for axis in axes if site.result.shape[axis] == 1 < x.type.shape[axis])
    result = site.emit(Reduce("mean", whole, True), x) if whole else x
    for axis in axes:
        result = _adaptive_average(site, result, axis, site.result.shape[axis])
    return result


def _adaptive_average(site: Site, x: Value, axis: int, size: int) -> Value:
    in_size = x.type.shape[axis]
    if in_size == size:
        return x
    weights = np.zeros((in_size, size), np.float32)
    for index in range(size):
        start, stop = index * in_size // size, -(-(index + 1) * in_size // size)
        weights[start:stop, index] = 1 / (stop - start)
    return multiply_axis(site, x, axis, weights)


@imports("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(site: Site, x: Value, sizes: Sizes) -> list[Value]:
    in_sizes, out_sizes = x.type.shape[-len(sizes) :], site.result.shape[-len(sizes) :]
    return list(window_maximum(site, x, adaptive_window_positions(in_sizes, out_sizes), out_sizes))


@imports("max_unpool2d", "max_unpool3d")
def max_unpool(site: Site, x: Value, positions: Value, sizes: Sizes, *_: Any) -> Value:
    return unpool(site, x, positions, site.result.shape[-len(sizes) :])


@imports("col2im")
def fold(
    site: Site, columns: Value, sizes: Sizes, window: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes
) -> Value:
    batched = columns if columns.type.rank == 3 else site.reshape(columns, (1, *columns.type.shape))
    margin = _per_axis(padding, 2)
    geometry = Geometry(_per_axis(stride, 2), margin, margin, _per_axis(dilation, 2))
    return site.reshape(column_to_image(site, batched, tuple(sizes), _per_axis(window, 2), geometry), site.result.shape)


@imports("unfold.default")
def unfold(site: Site, x: Value, axis: int, size: int, step: int) -> Value:
    """Windows along an axis, as a new last axis."""
    if not x.type.rank:
        return site.reshape(x, site.result.shape)
    axis %= max(x.type.rank, 1)
    count = site.result.shape[axis]
    parts = [site.slice(x, axis, at, at + (count - 1) * step + 1, step) for at in range(size)]
    columns = [site.reshape(part, (*part.type.shape, 1)) for part in parts]
    return columns[0] if size == 1 else site.emit(Concat(x.type.rank), *columns)


@imports("pixel_shuffle")
def pixel_shuffle(site: Site, x: Value, factor: int) -> Value:
    *batch, channels, height, width = x.type.shape
    cells = site.reshape(x, (math.prod(batch), channels // factor**2, factor, factor, height, width))
    return site.reshape(site.emit(Transpose((0, 1, 4, 2, 5, 3)), cells), site.result.shape)


def _scales(site: Site, x: Value, factors: Sequence[float | None] | None, align_corners: bool) -> tuple[float, ...]:
    """Input step for one output step on each axis: from the scale factor if there is one, as in PyTorch."""
    axes = x.type.rank - 2
    optional = list(factors) if factors else [None] * axes
    pairs = zip(x.type.shape[2:], site.result.shape[2:], optional, strict=True)
    if align_corners:
        return tuple((old - 1) / (new - 1) if new > 1 else 0.0 for old, new, _ in pairs)
    return tuple(1 / factor if factor else old / new for old, new, factor in pairs)


def _resampled(
    site: Site, function: str, x: Value, factors: Sequence[float | None] | None, align_corners: bool
) -> Value:
    sizes, scales = site.result.shape[2:], _scales(site, x, factors, align_corners)
    # An axis with one output has a scale of zero; with any scale it reads the first input.
    return site.emit(Resample(function, sizes, tuple(scale or 1.0 for scale in scales), align_corners), x)


@imports("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def upsample_nearest(site: Site, x: Value, sizes: Sizes | None, factors: Sequence[float] | None) -> Value:
    return _resampled(site, "nearest", x, factors, align_corners=False)


@imports("upsample_nearest1d.default", "upsample_nearest2d.default", "upsample_nearest3d.default")
def upsample_nearest_axes(site: Site, x: Value, sizes: Sizes, *factors: float | None) -> Value:
    return _resampled(site, "nearest", x, factors, align_corners=False)


@imports("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def upsample_linear(
    site: Site, x: Value, sizes: Sizes | None, align_corners: bool, factors: Sequence[float] | None
) -> Value:
    return _resampled(site, "linear", x, factors, align_corners)


@imports("upsample_linear1d.default", "upsample_bilinear2d.default", "upsample_trilinear3d.default")
def upsample_linear_axes(site: Site, x: Value, sizes: Sizes, align_corners: bool, *factors: float | None) -> Value:
    return _resampled(site, "linear", x, factors, align_corners)


@imports("upsample_bicubic2d.vec")
def upsample_cubic(
    site: Site, x: Value, sizes: Sizes | None, align_corners: bool, factors: Sequence[float] | None
) -> Value:
    return _resampled(site, "cubic", x, factors, align_corners)


@imports("upsample_bicubic2d.default")
def upsample_cubic_axes(site: Site, x: Value, sizes: Sizes, align_corners: bool, *factors: float | None) -> Value:
    return _resampled(site, "cubic", x, factors, align_corners)


@imports("_upsample_bilinear2d_aa.default")
def upsample_linear_smoothed(site: Site, x: Value, sizes: Sizes, align_corners: bool, *factors: float | None) -> Value:
    return _antialiased(site, x, align_corners, factors, cubic=False)


@imports("_upsample_bicubic2d_aa.default")
def upsample_cubic_smoothed(site: Site, x: Value, sizes: Sizes, align_corners: bool, *factors: float | None) -> Value:
    return _antialiased(site, x, align_corners, factors, cubic=True)


def _antialiased(site: Site, x: Value, align_corners: bool, factors: Sequence[float | None], *, cubic: bool) -> Value:
    """Antialiased resize, one axis at a time, by a matmul with a constant table of weights."""
    scales = _scales(site, x, factors, align_corners)
    for axis, (size, scale) in enumerate(zip(site.result.shape[2:], scales, strict=True), 2):
        positions, constant = (np.arange(size) + 0.5) * scale - 0.5, -0.5 if cubic else None
        x = multiply_axis(
            site, x, axis, antialias_weights(x.type.shape[axis], positions, scale, cubic=constant, repeat_border=False)
        )
    return x


@imports("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(site: Site, x: Value, grid: Value, mode: int, padding: int, align_corners: bool) -> Value:
    modes, paddings = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")
    return sample_grid(site, x, grid, modes[mode], paddings[padding], align_corners)
