"""Windows over places: convolutions and pooling."""

import numpy as np

from emulator.capture.aten.base import NotExpressible, given
from emulator.capture.onnx.base import OnnxSite, imports
from emulator.graph import Value
from emulator.ops import Convolution, Flip, Pad, Pool, Reduce, Transpose
from emulator.types import DType

Sizes = tuple[int, ...]


def _geometry(site: OnnxSite, x: Value, window: Sizes) -> tuple[Sizes, Sizes, Sizes, Sizes]:
    """Stride, padding before and after, dilation; named paddings worked out."""
    axes = len(window)
    stride = tuple(site.attribute("strides", [1] * axes))
    dilation = tuple(site.attribute("dilations", [1] * axes))
    mode = site.attribute("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        pads = site.attribute("pads", [0] * 2 * axes) if mode == "NOTSET" else [0] * 2 * axes
        return stride, tuple(pads[:axes]), tuple(pads[axes:]), dilation
    totals = []
    for size, length, step, apart in zip(x.type.shape[2:], window, stride, dilation, strict=True):
        places = -(-size // step)
        totals.append(max((places - 1) * step + (length - 1) * apart + 1 - size, 0))
    small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return (stride, small, large, dilation) if mode == "SAME_UPPER" else (stride, large, small, dilation)


@imports("Conv")
def convolution(site: OnnxSite, x: Value, weight: Value, bias: Value | None = None) -> Value:
    stride, before, after, dilation = _geometry(site, x, weight.type.shape[2:])
    op = Convolution(stride, before, after, dilation, site.attribute("group", 1), x.type.dtype)
    return site.emit(op, *given([x, weight, bias]))


@imports("ConvTranspose")
def transposed_convolution(site: OnnxSite, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """A convolution with the mirrored window over places spread apart by the stride."""
    window = weight.type.shape[2:]
    axes, groups = len(window), site.attribute("group", 1)
    stride, before, after, dilation = _unfolding(site, x, window)
    spread = _spread(site, x, stride)
    inputs, outputs = weight.type.shape[:2]
    parts = site.reshape(weight, (groups, inputs // groups, outputs, *window))
    swapped = site.emit(Transpose((0, 2, 1, *range(3, axes + 3))), parts)
    weights = site.reshape(swapped, (groups * outputs, inputs // groups, *window))
    mirrored = site.emit(Flip(tuple(range(2, axes + 2))), weights)
    op = Convolution((1,) * axes, before, after, dilation, groups, x.type.dtype)
    return site.emit(op, *given([spread, mirrored, bias]))


def _unfolding(site: OnnxSite, x: Value, window: Sizes) -> tuple[Sizes, Sizes, Sizes, Sizes]:
    """How much of the spread places' surroundings the mirrored window sees on each side."""
    axes = len(window)
    stride = tuple(site.attribute("strides", [1] * axes))
    dilation = tuple(site.attribute("dilations", [1] * axes))
    extra = site.attribute("output_padding", [0] * axes)
    pads = site.attribute("pads", [0] * 2 * axes)
    mode, wanted = site.attribute("auto_pad", "NOTSET"), site.attribute("output_shape")
    before, after = list(pads[:axes]), list(pads[axes:])
    for axis in range(axes):
        reach = (window[axis] - 1) * dilation[axis] + 1
        full = (x.type.shape[axis + 2] - 1) * stride[axis] + extra[axis] + reach
        if wanted is not None or mode.startswith("SAME"):
            size = wanted[axis - axes] if wanted is not None else x.type.shape[axis + 2] * stride[axis]
            total = full - size
            half = max(total, 0) // 2  # what is missing is added behind
            before[axis] = half if mode == "SAME_UPPER" else max(total, 0) - half
            after[axis] = total - before[axis]
    reach = [(length - 1) * apart for length, apart in zip(window, dilation, strict=True)]
    return (
        stride,
        tuple(r - b for r, b in zip(reach, before, strict=True)),
        tuple(r - a + e for r, a, e in zip(reach, after, extra, strict=True)),
        dilation,
    )


def _spread(site: OnnxSite, x: Value, stride: Sizes) -> Value:
    """Places with `stride - 1` zeros between each two."""
    for axis, step in enumerate(stride, 2):
        if step == 1:
            continue
        shape = x.type.shape
        column = site.reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
        zeros = [0] * column.type.rank
        zeros[axis + 1] = step - 1
        padded = site.emit(Pad((0,) * column.type.rank, tuple(zeros)), column, site.like(x, 0))
        joined = site.reshape(padded, (*shape[:axis], shape[axis] * step, *shape[axis + 1 :]))
        x = site.slice(joined, axis, 0, (shape[axis] - 1) * step + 1)
    return x


def _pool_geometry(site: OnnxSite, x: Value, window: Sizes) -> tuple[Sizes, Sizes, Sizes, Sizes]:
    """As for convolutions; rounding up is more padding behind, unless a window would lie in padding alone."""
    stride, before, after, dilation = _geometry(site, x, window)
    if not site.attribute("ceil_mode", 0):
        return stride, before, after, dilation
    grown = []
    for size, length, step, b, a, apart in zip(x.type.shape[2:], window, stride, before, after, dilation, strict=True):
        reach = (length - 1) * apart + 1
        places = -(-(size + b + a - reach) // step) + 1
        if (places - 1) * step >= size + b:
            places -= 1
        grown.append(max((places - 1) * step + reach - size - b, 0))
    return stride, before, tuple(grown), dilation


@imports("MaxPool")
def max_pool(site: OnnxSite, x: Value) -> Value:
    if site.wanted > 1:
        raise NotExpressible("it asks where the largest elements are; only their values are computed")
    window = tuple(site.attribute("kernel_shape"))
    pooled = site.emit(Pool("max_pool", window, *_pool_geometry(site, x, window)), site.floats(x))
    return site.cast(pooled, x.type.dtype)


@imports("AveragePool")
def average_pool(site: OnnxSite, x: Value) -> Value:
    """Sums divided by how many elements each window holds, which are constants."""
    window = tuple(site.attribute("kernel_shape"))
    op = Pool("sum_pool", window, *_pool_geometry(site, x, window))
    sums = site.emit(op, site.cast(x, DType.FLOAT32))
    return site.cast(site.binary("divide", sums, _counts(site, x, op)), x.type.dtype)


def _counts(site: OnnxSite, x: Value, op: Pool) -> Value:
    ones = np.ones((1, 1, *x.type.shape[2:]), np.float32)
    if site.attribute("count_include_pad", 0):
        # The padding that the model asks for counts, the padding that rounding up adds does not.
        _, before, after, _ = _geometry(site, x, op.window)
        ones = np.pad(ones, [(0, 0), (0, 0), *zip(before, after, strict=True)], constant_values=1)
        rest = tuple(max(total - asked, 0) for total, asked in zip(op.after, after, strict=True))
        op = Pool(op.function, op.window, op.stride, (0,) * len(before), rest, op.dilation)
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
