"""Windows over places: convolutions and pooling."""

import math

import numpy as np

from nxpipe.emulator.capture.composites.sample import grid_sampled
from nxpipe.emulator.capture.composites.windows import (
    Geometry,
    folded,
    largest_of,
    put_back,
    sliding_places,
    transposed_convolution,
)
from nxpipe.emulator.capture.onnx.base import OnnxSite, imports
from nxpipe.emulator.capture.room import require_room
from nxpipe.emulator.capture.site import given
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Convolution, Gather, Pool, Reduce

Sizes = tuple[int, ...]


def geometry_of(site: OnnxSite, x: Value, window: Sizes) -> tuple[Sizes, Sizes, Sizes, Sizes]:
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
    stride, before, after, dilation = geometry_of(site, x, weight.type.shape[2:])
    op = Convolution(stride, before, after, dilation, site.attribute("group", 1), x.type.dtype)
    return site.emit(op, *given([x, weight, bias]))


@imports("ConvTranspose")
def transposed(site: OnnxSite, x: Value, weight: Value, bias: Value | None = None) -> Value:
    extra = tuple(site.attribute("output_padding", [0] * (weight.type.rank - 2)))
    geometry = _unfolding(site, x, weight.type.shape[2:], extra)
    return transposed_convolution(site, x, weight, bias, geometry, extra, site.attribute("group", 1), x.type.dtype)


def _unfolding(site: OnnxSite, x: Value, window: Sizes, extra: Sizes) -> Geometry:
    """As the node says, or such that the result has the size that it asks for."""
    axes = len(window)
    stride = tuple(site.attribute("strides", [1] * axes))
    dilation = tuple(site.attribute("dilations", [1] * axes))
    pads = site.attribute("pads", [0] * 2 * axes)
    mode, wanted = site.attribute("auto_pad", "NOTSET"), site.attribute("output_shape")
    before, after = list(pads[:axes]), list(pads[axes:])
    if wanted is not None or mode.startswith("SAME"):
        for axis in range(axes):
            reach = (window[axis] - 1) * dilation[axis] + 1
            full = (x.type.shape[axis + 2] - 1) * stride[axis] + extra[axis] + reach
            size = wanted[axis - axes] if wanted is not None else x.type.shape[axis + 2] * stride[axis]
            half = max(full - size, 0) // 2  # what is missing is added behind
            before[axis] = half if mode == "SAME_UPPER" else max(full - size, 0) - half
            after[axis] = full - size - before[axis]
    return Geometry(stride, tuple(before), tuple(after), dilation)


def _pool_geometry(site: OnnxSite, x: Value, window: Sizes) -> tuple[Sizes, Sizes, Sizes, Sizes]:
    """As for convolutions; rounding up is more padding behind, unless a window would lie in padding alone."""
    stride, before, after, dilation = geometry_of(site, x, window)
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
def max_pool(site: OnnxSite, x: Value) -> list[Value]:
    window = tuple(site.attribute("kernel_shape"))
    geometry = _pool_geometry(site, x, window)
    pooled = site.emit(Pool("max_pool", window, *geometry), x)
    return [pooled] if site.wanted == 1 else [pooled, _positions(site, x, pooled, window, Geometry(*geometry))]


def _positions(site: OnnxSite, x: Value, pooled: Value, window: Sizes, geometry: Geometry) -> Value:
    """Where the largest elements stand, counted through the whole tensor; columns first, if the node says so."""
    sizes, made = x.type.shape[2:], pooled.type.shape[2:]
    place = largest_of(site, x, sliding_places(sizes, window, geometry, made), made)[1]
    area = math.prod(sizes)
    if site.attribute("storage_order", 0):
        require_room((area,))
        columns_first = np.arange(area).reshape(sizes[::-1]).T.reshape(-1)
        place = site.emit(Gather(0), site.builder.constant(columns_first, DType.INT64), place)
    require_room(x.type.shape[:2])
    planes = np.arange(math.prod(x.type.shape[:2])).reshape(*x.type.shape[:2], *[1] * len(sizes))
    return site.binary("add", place, site.builder.constant(planes * area, DType.INT64))


_GRID_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@imports("GridSample")
def grid_sample(site: OnnxSite, x: Value, grid: Value) -> Value:
    mode, padding = site.attribute("mode", "linear"), site.attribute("padding_mode", "zeros")
    return grid_sampled(site, x, grid, _GRID_MODES.get(mode, mode), padding, bool(site.attribute("align_corners", 0)))


@imports("MaxUnpool")
def max_unpool(site: OnnxSite, x: Value, places: Value, wanted: Value | None = None) -> Value:
    """Positions count through the tensor that was pooled, whose size follows from the window."""
    window = site.attribute("kernel_shape")
    axes = len(window)
    stride, pads = site.attribute("strides", [1] * axes), site.attribute("pads", [0] * 2 * axes)
    ends = zip(x.type.shape[2:], window, stride, pads[:axes], pads[axes:], strict=True)
    sizes = [(count - 1) * step + length - before - after for count, length, step, before, after in ends]
    made = sizes if wanted is None else site.numbers("shape", wanted)[2:]
    inside = site.binary("remainder", places, site.like(places, math.prod(sizes)))
    if made != sizes:
        inside = _moved_places(site, inside, sizes, made)
    return put_back(site, x, inside, made)


def _moved_places(site: OnnxSite, places: Value, sizes: list[int], made: list[int]) -> Value:
    """The same coordinates, counted in a larger tensor."""
    require_room(made)
    table = np.arange(math.prod(made)).reshape(made)[tuple(map(slice, sizes))].reshape(-1)
    return site.emit(Gather(0), site.builder.constant(table, DType.INT64), places)


@imports("Col2Im")
def columns_to_image(site: OnnxSite, x: Value, image: Value, block: Value) -> Value:
    sizes, window = site.numbers("shape", image), tuple(site.numbers("block", block))
    axes = len(window)
    pads = site.attribute("pads", [0] * 2 * axes)
    stride, dilation = (tuple(site.attribute(name, [1] * axes)) for name in ("strides", "dilations"))
    return folded(site, x, sizes, window, Geometry(stride, tuple(pads[:axes]), tuple(pads[axes:]), dilation))


@imports("LRN")
def local_response(site: OnnxSite, x: Value) -> Value:
    """Each element divided by a power of the squares around it, counted along the channels."""
    size, (batch, channels, *places) = site.attribute("size"), x.type.shape
    squares = site.reshape(site.binary("multiply", x, x), (batch, 1, channels, math.prod(places)))
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    op = Pool("sum_pool", (size, 1), (1, 1), (before, 0), (after, 0), (1, 1))
    around = site.reshape(site.emit(op, squares), x.type.shape)
    share = site.binary("multiply", around, site.like(x, site.attribute("alpha", 1e-4) / size))
    base = site.binary("add", share, site.like(x, site.attribute("bias", 1.0)))
    return site.binary("divide", x, site.binary("power", base, site.like(x, site.attribute("beta", 0.75))))


@imports("AveragePool")
def average_pool(site: OnnxSite, x: Value) -> Value:
    """Sums divided by how many elements each window holds, which are constants."""
    window = tuple(site.attribute("kernel_shape"))
    op = Pool("sum_pool", window, *_pool_geometry(site, x, window))
    sums = site.emit(op, site.cast(x, DType.FLOAT32))
    return site.cast(site.binary("divide", sums, _counts(site, x, op)), x.type.dtype)


def _counts(site: OnnxSite, x: Value, op: Pool) -> Value:
    padded = [size + b + a for size, b, a in zip(x.type.shape[2:], op.before, op.after, strict=True)]
    require_room((*padded, *op.window), itemsize=1)
    ones = np.ones((1, 1, *x.type.shape[2:]), np.float32)
    if site.attribute("count_include_pad", 0):
        # The padding that the model asks for counts, the padding that rounding up adds does not.
        _, before, after, _ = geometry_of(site, x, op.window)
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
