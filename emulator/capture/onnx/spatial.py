"""ONNX importers: convolution, pooling, resize, Fourier transforms.

Resizing and Fourier transforms are matmuls with constant tables, because each output is a fixed linear combination of
inputs.
"""

import math
from collections.abc import Callable

import numpy as np

from nxpipe.emulator.capture.composites import (
    Geometry,
    antialias_weights,
    column_to_image,
    multiply_axis,
    sample_grid,
    transposed_convolution,
    unpool,
    window_maximum,
    window_positions,
)
from nxpipe.emulator.capture.onnx.base import OnnxSite, axis_in, imports
from nxpipe.emulator.capture.site import NotExpressible, present, require_table_fits
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Concat, Convolution, Flip, Gather, MatMul, Pad, Pool, Reduce, Transpose, Where
from nxpipe.emulator.ops.spatial import cubic_taps, linear_taps

Sizes = tuple[int, ...]


def geometry_of(site: OnnxSite, x: Value, window: Sizes) -> tuple[Sizes, Sizes, Sizes, Sizes]:
    """Stride, padding before and after, and dilation, with `auto_pad` resolved."""
    axes = len(window)
    stride = tuple(site.attribute("strides", [1] * axes))
    dilation = tuple(site.attribute("dilations", [1] * axes))
    mode = site.attribute("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        pads = site.attribute("pads", [0] * 2 * axes) if mode == "NOTSET" else [0] * 2 * axes
        return stride, tuple(pads[:axes]), tuple(pads[axes:]), dilation
    totals = []
    for size, length, step, spacing in zip(x.type.shape[2:], window, stride, dilation, strict=True):
        outputs = -(-size // step)
        totals.append(max((outputs - 1) * step + (length - 1) * spacing + 1 - size, 0))
    small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return (stride, small, large, dilation) if mode == "SAME_UPPER" else (stride, large, small, dilation)


@imports("Conv")
def convolution(site: OnnxSite, x: Value, weight: Value, bias: Value | None = None) -> Value:
    stride, before, after, dilation = geometry_of(site, x, weight.type.shape[2:])
    op = Convolution(stride, before, after, dilation, site.attribute("group", 1), x.type.dtype)
    return site.emit(op, *present([x, weight, bias]))


@imports("ConvTranspose")
def transposed(site: OnnxSite, x: Value, weight: Value, bias: Value | None = None) -> Value:
    extra = tuple(site.attribute("output_padding", [0] * (weight.type.rank - 2)))
    geometry = _transposed_geometry(site, x, weight.type.shape[2:], extra)
    return transposed_convolution(site, x, weight, bias, geometry, extra, site.attribute("group", 1), x.type.dtype)


def _transposed_geometry(site: OnnxSite, x: Value, window: Sizes, extra: Sizes) -> Geometry:
    """The geometry of a transposed convolution: padding of the node, or such that the result has the requested size."""
    axes = len(window)
    stride = tuple(site.attribute("strides", [1] * axes))
    dilation = tuple(site.attribute("dilations", [1] * axes))
    pads = site.attribute("pads", [0] * 2 * axes)
    mode, sizes = site.attribute("auto_pad", "NOTSET"), site.attribute("output_shape")
    before, after = list(pads[:axes]), list(pads[axes:])
    if sizes is not None or mode.startswith("SAME"):
        for axis in range(axes):
            reach = (window[axis] - 1) * dilation[axis] + 1
            full = (x.type.shape[axis + 2] - 1) * stride[axis] + extra[axis] + reach
            size = sizes[axis - axes] if sizes is not None else x.type.shape[axis + 2] * stride[axis]
            half = max(full - size, 0) // 2  # an odd element is added at the end
            before[axis] = half if mode == "SAME_UPPER" else max(full - size, 0) - half
            after[axis] = full - size - before[axis]
    return Geometry(stride, tuple(before), tuple(after), dilation)


def _pool_geometry(site: OnnxSite, x: Value, window: Sizes) -> tuple[Sizes, Sizes, Sizes, Sizes]:
    """`geometry_of` a pooling; `ceil_mode` adds padding at the end, unless a window would contain only padding."""
    stride, before, after, dilation = geometry_of(site, x, window)
    if not site.attribute("ceil_mode", 0):
        return stride, before, after, dilation
    grown = []
    for size, length, step, b, a, spacing in zip(
        x.type.shape[2:], window, stride, before, after, dilation, strict=True
    ):
        reach = (length - 1) * spacing + 1
        outputs = -(-(size + b + a - reach) // step) + 1
        if (outputs - 1) * step >= size + b:
            outputs -= 1
        grown.append(max((outputs - 1) * step + reach - size - b, 0))
    return stride, before, tuple(grown), dilation


@imports("MaxPool")
def max_pool(site: OnnxSite, x: Value) -> list[Value]:
    window = tuple(site.attribute("kernel_shape"))
    geometry = _pool_geometry(site, x, window)
    pooled = site.emit(Pool("max_pool", window, *geometry), x)
    return [pooled] if site.result_count == 1 else [pooled, _positions(site, x, pooled, window, Geometry(*geometry))]


def _positions(site: OnnxSite, x: Value, pooled: Value, window: Sizes, geometry: Geometry) -> Value:
    """The flat positions of the maxima in the whole tensor; column-major with `storage_order` 1."""
    sizes, out_sizes = x.type.shape[2:], pooled.type.shape[2:]
    position = window_maximum(site, x, window_positions(sizes, window, geometry, out_sizes), out_sizes)[1]
    area = math.prod(sizes)
    if site.attribute("storage_order", 0):
        require_table_fits((area,))
        column_major = np.arange(area).reshape(sizes[::-1]).T.reshape(-1)
        position = site.emit(Gather(0), site.builder.constant(column_major, DType.INT64), position)
    require_table_fits(x.type.shape[:2])
    planes = np.arange(math.prod(x.type.shape[:2])).reshape(*x.type.shape[:2], *[1] * len(sizes))
    return site.binary("add", position, site.builder.constant(planes * area, DType.INT64))


_GRID_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@imports("GridSample")
def grid_sample(site: OnnxSite, x: Value, grid: Value) -> Value:
    mode, padding = site.attribute("mode", "linear"), site.attribute("padding_mode", "zeros")
    return sample_grid(site, x, grid, _GRID_MODES.get(mode, mode), padding, bool(site.attribute("align_corners", 0)))


@imports("MaxUnpool")
def max_unpool(site: OnnxSite, x: Value, positions: Value, shape: Value | None = None) -> Value:
    """Max unpooling; positions are flat in the pooled tensor, whose size follows from the window."""
    window = site.attribute("kernel_shape")
    axes = len(window)
    stride, pads = site.attribute("strides", [1] * axes), site.attribute("pads", [0] * 2 * axes)
    ends = zip(x.type.shape[2:], window, stride, pads[:axes], pads[axes:], strict=True)
    sizes = [(count - 1) * step + length - before - after for count, length, step, before, after in ends]
    out_sizes = sizes if shape is None else site.numbers("shape", shape)[2:]
    inside = site.binary("remainder", positions, site.like(positions, math.prod(sizes)))
    if out_sizes != sizes:
        inside = _positions_in(site, inside, sizes, out_sizes)
    return unpool(site, x, inside, out_sizes)


def _positions_in(site: OnnxSite, positions: Value, sizes: list[int], out_sizes: list[int]) -> Value:
    """The flat positions of the same coordinates in a larger tensor."""
    require_table_fits(out_sizes)
    table = np.arange(math.prod(out_sizes)).reshape(out_sizes)[tuple(map(slice, sizes))].reshape(-1)
    return site.emit(Gather(0), site.builder.constant(table, DType.INT64), positions)


@imports("Col2Im")
def columns_to_image(site: OnnxSite, x: Value, image: Value, block: Value) -> Value:
    sizes, window = site.numbers("shape", image), tuple(site.numbers("block", block))
    axes = len(window)
    pads = site.attribute("pads", [0] * 2 * axes)
    stride, dilation = (tuple(site.attribute(name, [1] * axes)) for name in ("strides", "dilations"))
    return column_to_image(site, x, sizes, window, Geometry(stride, tuple(pads[:axes]), tuple(pads[axes:]), dilation))


@imports("LRN")
def local_response(site: OnnxSite, x: Value) -> Value:
    """Local response normalisation: division by a power of the sum of squares in neighbouring channels."""
    size, (batch, channels, *places) = site.attribute("size"), x.type.shape
    squares = site.reshape(site.binary("multiply", x, x), (batch, 1, channels, math.prod(places)))
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    op = Pool("sum_pool", (size, 1), (1, 1), (before, 0), (after, 0), (1, 1))
    sums = site.reshape(site.emit(op, squares), x.type.shape)
    scaled = site.binary("multiply", sums, site.like(x, site.attribute("alpha", 1e-4) / size))
    base = site.binary("add", scaled, site.like(x, site.attribute("bias", 1.0)))
    return site.binary("divide", x, site.binary("power", base, site.like(x, site.attribute("beta", 0.75))))


@imports("AveragePool")
def average_pool(site: OnnxSite, x: Value) -> Value:
    """The sum of each window divided by its number of elements, a constant."""
    window = tuple(site.attribute("kernel_shape"))
    op = Pool("sum_pool", window, *_pool_geometry(site, x, window))
    sums = site.emit(op, site.cast(x, DType.FLOAT32))
    return site.cast(site.binary("divide", sums, _counts(site, x, op)), x.type.dtype)


def _counts(site: OnnxSite, x: Value, op: Pool) -> Value:
    """The number of elements in each window."""
    padded = [size + b + a for size, b, a in zip(x.type.shape[2:], op.before, op.after, strict=True)]
    require_table_fits((*padded, *op.window), itemsize=1)
    ones = np.ones((1, 1, *x.type.shape[2:]), np.float32)
    if site.attribute("count_include_pad", 0):
        # The model's own padding counts; the padding of `ceil_mode` does not.
        _, before, after, _ = geometry_of(site, x, op.window)
        ones = np.pad(ones, [(0, 0), (0, 0), *zip(before, after, strict=True)], constant_values=1)
        extra = tuple(max(total - own, 0) for total, own in zip(op.after, after, strict=True))
        op = Pool(op.function, op.window, op.stride, (0,) * len(before), extra, op.dilation)
    return site.builder.constant(op.compute(ones), DType.FLOAT32)


@imports("LpPool")
def lp_pool(site: OnnxSite, x: Value) -> Value:
    window = tuple(site.attribute("kernel_shape"))
    p = float(site.attribute("p", 2))
    powers = site.binary("power", site.unary("abs", x), site.like(x, p))
    sums = site.emit(Pool("sum_pool", window, *_pool_geometry(site, x, window)), powers)
    return site.binary("power", sums, site.like(x, 1 / p))


@imports("GlobalAveragePool", "GlobalMaxPool")
def global_pool(site: OnnxSite, x: Value) -> Value:
    function = "mean" if site.operator == "GlobalAveragePool" else "max"
    return site.emit(Reduce(function, tuple(range(2, x.type.rank)), True), x)


# The position of a new element on the old axis, from its index, the scale, and the new and old sizes.
_COORDINATES: dict[str, Callable[[Array, float, int, int], Array]] = {
    "half_pixel": lambda i, scale, new, old: (i + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda i, scale, new, old: (i + 0.5) / scale - 0.5 if new > 1 else i * 0.0,
    "align_corners": lambda i, scale, new, old: i * (old - 1) / (scale * old - 1) if new > 1 else i * 0.0,
    "asymmetric": lambda i, scale, new, old: i / scale,
    "half_pixel_symmetric": lambda i, scale, new, old: (
        old / 2 * (1 - new / (scale * old)) + (i + 0.5) / scale - 0.5  # centred, although sizes are integers
    ),
}
_NEAREST: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@imports("Resize", "Upsample")
def resize(
    site: OnnxSite, x: Value, roi: Value | None = None, scales: Value | None = None, sizes: Value | None = None
) -> Value:
    """Resize, one axis at a time. Upsample, the older operator, has no region and asymmetric coordinates."""
    is_upsample = site.operator == "Upsample"
    if is_upsample:
        roi, scales = None, roi
    rule = site.attribute("coordinate_transformation_mode", "asymmetric" if is_upsample else "half_pixel")
    axes = [axis_in(axis, x.type.rank) for axis in site.attribute("axes", range(x.type.rank))]
    for number, (axis, scale, new) in enumerate(_targets(site, x, axes, scales, sizes)):
        require_table_fits((new,))
        old = x.type.shape[axis]
        if rule == "tf_crop_and_resize":
            if roi is None:
                raise NotExpressible("it crops to a region, and has no region operand")
            region = site.table("region", roi).astype(np.float64)
            x = _cropped(site, x, axis, new, region[number], region[number + len(axes)])
        elif (scale, new) != (1, old):
            x = _resized(site, x, axis, _COORDINATES[rule](np.arange(new, dtype=np.float64), scale, new, old), scale)
    return x


def _resized(site: OnnxSite, x: Value, axis: int, at: Array, scale: float) -> Value:
    mode, old = site.attribute("mode", "nearest"), x.type.shape[axis]
    if mode == "nearest":
        return _nearest(site, x, axis, at)
    if site.attribute("antialias", 0):
        constant = site.attribute("cubic_coeff_a", -0.75) if mode == "cubic" else None
        repeat = not site.attribute("exclude_outside", 0)
        return multiply_axis(site, x, axis, antialias_weights(old, at, 1 / scale, cubic=constant, repeat_border=repeat))
    return multiply_axis(site, x, axis, _weights(site, mode, at, old).T)


def _cropped(site: OnnxSite, x: Value, axis: int, new: int, start: float, end: float) -> Value:
    """A region of an axis resized to the new one; positions outside of the axis have the extrapolation value."""
    last = x.type.shape[axis] - 1
    steps = np.arange(new) / max(new - 1, 1) if new > 1 else np.full(1, 0.5)
    at = (start + steps * (end - start)) * last
    resized = _resized(site, x, axis, at, 1.0)
    inside = ((at >= 0) & (at <= last)).reshape(-1, *[1] * (x.type.rank - axis - 1))
    filling = site.like(x, site.attribute("extrapolation_value", 0.0))
    return site.emit(Where(), site.builder.constant(inside, DType.BOOL), resized, filling)


def _targets(
    site: OnnxSite, x: Value, axes: list[int], scales: Value | None, sizes: Value | None
) -> list[tuple[int, float, int]]:
    """(axis, scale, new size) of each resized axis."""
    if sizes is None or not sizes.type.elements:
        if scales is None:
            raise NotExpressible("it has neither scales nor sizes")
        factors = [float(scale) for scale in site.table("scales", scales)]
        return [(a, s, math.floor(x.type.shape[a] * s)) for a, s in zip(axes, factors, strict=True)]
    targets = site.numbers("sizes", sizes)
    factors = [new / x.type.shape[axis] for axis, new in zip(axes, targets, strict=True)]
    policy = site.attribute("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        common = min(factors) if policy == "not_larger" else max(factors)
        factors = [common] * len(axes)
        targets = [math.floor(x.type.shape[axis] * common + 0.5) for axis in axes]
    return list(zip(axes, factors, targets, strict=True))


def _nearest(site: OnnxSite, x: Value, axis: int, at: Array) -> Value:
    rounding = "floor" if site.operator == "Upsample" else site.attribute("nearest_mode", "round_prefer_floor")
    nearest = _NEAREST[rounding](at)
    positions = np.clip(nearest, 0, x.type.shape[axis] - 1).astype(np.int64)
    return site.emit(Gather(axis), x, site.builder.constant(positions, DType.INT64))


def _weights(site: OnnxSite, mode: str, at: Array, old: int) -> Array:
    """The weights [new, old] of an interpolation."""
    require_table_fits((len(at), old))
    base = np.floor(at)
    taps = linear_taps(at - base) if mode == "linear" else cubic_taps(at - base, site.attribute("cubic_coeff_a", -0.75))
    weights = np.zeros((len(at), old))
    for offset, weight in taps:
        position = base + offset
        if site.attribute("exclude_outside", 0):
            weight = np.where((position >= 0) & (position < old), weight, 0)
        np.add.at(weights, (np.arange(len(at)), np.clip(position, 0, old - 1).astype(np.int64)), weight)
    return np.asarray(weights / weights.sum(1, keepdims=True))


@imports("DFT")
def fourier(site: OnnxSite, x: Value, length: Value | None = None, along: Value | None = None) -> Value:
    """Discrete Fourier transform; the last axis has real and imaginary parts, or one element for a real signal."""
    rank, opset_axis = x.type.rank, site.attribute("axis", 1)
    axis = axis_in(opset_axis if along is None and site.opset < 20 else _axis_operand(site, along, -2), rank)
    inverse, onesided = bool(site.attribute("inverse", 0)), bool(site.attribute("onesided", 0))
    if inverse and onesided:
        return _real_inverse(site, x, axis, length)
    count = x.type.shape[axis] if length is None else site.numbers("length", length)[0]
    return _transformed(site, x, axis, count, inverse, onesided)


def _axis_operand(site: OnnxSite, operand: Value | None, default: int) -> int:
    return default if operand is None else int(site.numbers("axis", operand)[0])


def _fitted(site: OnnxSite, x: Value, axis: int, count: int) -> Value:
    """The signal truncated or zero-padded to the length of the transform."""
    size = x.type.shape[axis]
    if size >= count:
        return site.slice(x, axis, 0, count)
    after = tuple(count - size if i == axis else 0 for i in range(x.type.rank))
    return site.emit(Pad((0,) * x.type.rank, after), x, site.like(x, 0))


def _table(old: int, new: int, inverse: bool, pair: int) -> Array:
    """The matrix [old * pair, new * 2] of a transform, with interleaved real and imaginary parts."""
    require_table_fits((old, pair, new, 2))
    angle = (2 if inverse else -2) * math.pi * (np.arange(old)[:, None] * np.arange(new)[None, :] % old) / old
    factors = np.stack([np.cos(angle), np.sin(angle)], -1)  # [old, new, 2]
    rows = factors[:, None] if pair == 1 else np.stack([factors, np.stack([-np.sin(angle), np.cos(angle)], -1)], 1)
    return np.asarray(rows.reshape(old * pair, new * 2) / (old if inverse else 1))


def _transformed(site: OnnxSite, x: Value, axis: int, count: int, inverse: bool, onesided: bool) -> Value:
    signal = _fitted(site, x, axis, count)
    pair, out_size = x.type.shape[-1], count // 2 + 1 if onesided else count
    others = [i for i in range(x.type.rank - 1) if i != axis]
    transposed = site.emit(Transpose((*others, axis, x.type.rank - 1)), signal)
    front = [x.type.shape[i] for i in others]
    rows = site.reshape(transposed, (math.prod(front), count * pair))
    table = site.builder.constant(_table(count, out_size, inverse, pair), x.type.dtype)
    product = site.reshape(site.emit(MatMul(x.type.dtype), rows, table), (*front, out_size, 2))
    back = [*range(axis), len(others), *range(axis, len(others)), len(others) + 1]
    return site.emit(Transpose(tuple(back)), product)


def _real_inverse(site: OnnxSite, x: Value, axis: int, length: Value | None) -> Value:
    """Inverse transform of a one-sided spectrum, completed by its conjugates; the result is real."""
    half = x.type.shape[axis]
    count = 2 * (half - 1) if length is None else int(site.numbers("length", length)[0])
    kept = _fitted(site, x, axis, count // 2 + 1)
    mirrored = site.emit(Flip((axis,)), site.slice(kept, axis, 1, count - count // 2))
    sign = site.builder.constant(np.array([1.0, -1.0]), x.type.dtype)
    whole = site.emit(Concat(axis), kept, site.binary("multiply", mirrored, sign))
    result = _transformed(site, whole, axis, count, inverse=True, onesided=False)
    return site.slice(result, result.type.rank - 1, 0, 1)


@imports("STFT")
def short_time_fourier(
    site: OnnxSite, x: Value, step: Value, window: Value | None = None, length: Value | None = None
) -> Value:
    """Short-time Fourier transform: frames of the signal, weighted by a window, each transformed."""
    if length is None and window is None:
        raise NotExpressible("it has neither a window nor a frame length")
    hop = site.numbers("step", step)[0]
    size = window.type.elements if length is None and window is not None else site.numbers("length", length)[0]
    frames = (x.type.shape[1] - size) // hop + 1
    require_table_fits((frames, size))
    positions = np.arange(frames)[:, None] * hop + np.arange(size)
    cut = site.emit(Gather(1), x, site.builder.constant(positions, DType.INT64))
    cut = cut if cut.type.rank == 4 else site.reshape(cut, (*cut.type.shape, 1))
    if window is not None:
        cut = site.binary("multiply", cut, site.reshape(window, (size, 1)))
    real = cut.type.shape[-1] == 1
    return _transformed(site, cut, 2, size, inverse=False, onesided=bool(site.attribute("onesided", 1)) and real)


@imports("MelWeightMatrix")
def mel_weights(site: OnnxSite, bands: Value, length: Value, rate: Value, low: Value, high: Value) -> Value:
    """Triangular filters over a spectrum, equally spaced on the mel scale: a constant."""
    from nxpipe.emulator.capture.onnx.base import dtype_of

    count, size, hertz = (int(site.table("size", value).item()) for value in (bands, length, rate))
    edges = [float(site.table("edge", value).item()) for value in (low, high)]
    first, last = (2595 * math.log10(1 + edge / 700) for edge in edges)
    require_table_fits((size // 2 + 1, count))
    site.builder.step(max(count, 0))
    mel = first + np.arange(count + 2) * (last - first) / (count + 2)
    bins = ((size + 1) * 700 * (10 ** (mel / 2595) - 1) // hertz).astype(np.int64)
    if not 0 <= bins.min() <= bins.max() <= size:
        raise NotExpressible("its edges are outside of the spectrum")
    weights = np.zeros((size // 2 + 1, count), np.float32)
    for band in range(count):
        lower, centre, upper = bins[band : band + 3]
        if lower == centre:
            weights[centre, band] = 1
        else:
            rising = np.arange(lower, centre + 1)
            weights[rising, band] = (rising - lower) / (centre - lower)
        falling = np.arange(centre, upper)
        weights[falling, band] = (upper - falling) / max(upper - centre, 1)
    return site.builder.constant(weights, dtype_of(site.attribute("output_datatype", 1)))
