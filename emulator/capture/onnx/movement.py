"""ONNX importers: reshape, slice, concatenation, padding, gather, scatter, sort and search."""

import math

import numpy as np

from nxpipe.emulator.capture.composites import extend_axis
from nxpipe.emulator.capture.onnx.base import OnnxSite, axis_in, dtype_of, imports
from nxpipe.emulator.capture.site import NotExpressible, require_table_fits
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import (
    ArgReduce,
    ArgSort,
    Concat,
    Cumulate,
    Flip,
    Gather,
    Index,
    IndexUpdate,
    Iota,
    Pad,
    ScatterAlong,
    Slice,
    TakeAlong,
    Transpose,
    Where,
)


@imports("Shape")
def shape(site: OnnxSite, x: Value) -> Value:
    part = x.type.shape[slice(site.attribute("start", 0), site.attribute("end"))]
    return site.builder.constant(np.asarray(part, np.int64), DType.INT64)


@imports("Size")
def size(site: OnnxSite, x: Value) -> Value:
    return site.builder.scalar(x.type.elements, DType.INT64)


@imports("Reshape")
def reshape(site: OnnxSite, x: Value, shape: Value | None = None) -> Value:
    sizes = site.numbers("shape", shape)
    if not site.attribute("allowzero", 0):
        sizes = [x.type.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    if -1 in sizes:
        others = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = x.type.elements // others if others else 0
    return site.reshape(x, sizes)


@imports("Flatten")
def flatten(site: OnnxSite, x: Value) -> Value:
    axis = site.attribute("axis", 1)
    axis = axis + x.type.rank if axis < 0 else axis
    return site.reshape(x, (math.prod(x.type.shape[:axis]), math.prod(x.type.shape[axis:])))


@imports("Squeeze")
def squeeze(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    ones = [axis for axis, size in enumerate(x.type.shape) if size == 1]
    dropped = {axis_in(axis, x.type.rank) for axis in site.numbers("axes", axes, ones)}
    return site.reshape(x, [size for axis, size in enumerate(x.type.shape) if axis not in dropped])


@imports("Unsqueeze")
def unsqueeze(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    inserted = site.numbers("axes", axes)
    rank = x.type.rank + len(inserted)
    new = {axis_in(axis, rank) for axis in inserted}
    sizes = iter(x.type.shape)
    return site.reshape(x, [1 if axis in new else next(sizes) for axis in range(rank)])


@imports("Transpose")
def transpose(site: OnnxSite, x: Value) -> Value:
    order = site.attribute("perm", list(range(x.type.rank))[::-1])
    return site.emit(Transpose(tuple(order)), x)


@imports("Concat")
def concat(site: OnnxSite, *parts: Value) -> Value:
    return site.emit(Concat(site.axis(parts[0], 0)), *parts)


@imports("Split")
def split(site: OnnxSite, x: Value, lengths: Value | None = None) -> list[Value]:
    axis = site.axis(x, 0)
    size, count = x.type.shape[axis], site.attribute("num_outputs", site.result_count)
    site.builder.step(max(count, 0))
    chunk = -(-size // count)
    equal = [min(chunk, size - part * chunk) for part in range(count)]
    parts, start = [], 0
    for length in site.numbers("split", lengths, equal):
        parts.append(site.slice(x, axis, start, start + length))
        start += length
    return parts


@imports("Slice")
def slice_(
    site: OnnxSite,
    x: Value,
    starts: Value | None = None,
    ends: Value | None = None,
    axes: Value | None = None,
    steps: Value | None = None,
) -> Value:
    first, last = site.numbers("starts", starts), site.numbers("ends", ends)
    along = [axis_in(axis, x.type.rank) for axis in site.numbers("axes", axes, range(len(first)))]
    strides = site.numbers("steps", steps, [1] * len(first))
    for axis, start, stop, step in zip(along, first, last, strides, strict=True):
        positions = range(*slice(start, stop, step).indices(x.type.shape[axis]))
        x = _sliced(site, x, axis, positions)
    return x


def _sliced(site: OnnxSite, x: Value, axis: int, positions: range) -> Value:
    """A slice of one axis, flipped if the step is negative."""
    if not positions:
        return site.slice(x, axis, 0, 0)
    low, high = min(positions[0], positions[-1]), max(positions[0], positions[-1])
    window = site.slice(x, axis, low, high + 1, abs(positions.step))
    return window if positions.step > 0 else site.emit(Flip((axis,)), window)


@imports("Expand")
def expand(site: OnnxSite, x: Value, shape: Value) -> Value:
    sizes = site.numbers("shape", shape)
    return site.broadcast(x, np.broadcast_shapes(x.type.shape, tuple(sizes)))


@imports("Tile")
def tile(site: OnnxSite, x: Value, repeats: Value) -> Value:
    counts = site.numbers("repeats", repeats)
    shape = x.type.shape
    unrepeated = [part for size in shape for part in (1, size)]
    repeated = [part for size, count in zip(shape, counts, strict=True) for part in (count, size)]
    wide = site.broadcast(site.reshape(x, unrepeated), repeated)
    return site.reshape(wide, [size * count for size, count in zip(shape, counts, strict=True)])


@imports("Pad")
def pad(
    site: OnnxSite, x: Value, pads: Value | None = None, filling: Value | None = None, axes: Value | None = None
) -> Value:
    numbers = site.numbers("pads", pads)
    along = [axis_in(axis, x.type.rank) for axis in site.numbers("axes", axes, range(x.type.rank))]
    sides = list(zip(along, numbers[: len(along)], numbers[len(along) :], strict=True))
    for axis, before, after in sides:  # negative padding crops
        cut = site.slice(x, axis, max(-before, 0), x.type.shape[axis] - max(-after, 0))
        x = cut if min(before, after) < 0 else x
    mode = site.attribute("mode", "constant")
    if mode != "constant":
        for axis, before, after in sides:
            x = extend_axis(site, x, axis, max(before, 0), max(after, 0), mode)
        return x
    scalar = site.like(x, site.attribute("value", 0)) if filling is None else site.reshape(filling, ())
    amounts = {axis: (max(before, 0), max(after, 0)) for axis, before, after in sides}
    pairs = [amounts.get(axis, (0, 0)) for axis in range(x.type.rank)]
    return site.emit(Pad(tuple(b for b, _ in pairs), tuple(a for _, a in pairs)), x, scalar)


@imports("ConstantOfShape")
def filled(site: OnnxSite, shape: Value) -> Value:
    import onnx

    tensor = site.attribute("value")
    number = np.zeros(1, np.float32) if tensor is None else onnx.numpy_helper.to_array(tensor)
    dtype = DType.FLOAT32 if tensor is None else dtype_of(tensor.data_type)
    return site.filled(number.reshape(-1)[0].item(), TensorType(tuple(site.numbers("shape", shape)), dtype))


@imports("Range")
def count_up(site: OnnxSite, start: Value, limit: Value, delta: Value) -> Value:
    first, last, step = (site.table("range", value).item() for value in (start, limit, delta))
    length = max(math.ceil((last - first) / step), 0)
    if start.type.dtype.is_integer:
        return site.emit(Iota(length, first, step, start.type.dtype))
    require_table_fits((length,))
    return site.builder.constant(first + step * np.arange(length), start.type.dtype)


@imports("EyeLike")
def eye(site: OnnxSite, x: Value) -> Value:
    number = site.attribute("dtype")
    dtype = x.type.dtype if number is None else dtype_of(number)
    rows, columns = x.type.shape
    require_table_fits((rows, columns))
    return site.builder.constant(np.eye(rows, columns, site.attribute("k", 0)), dtype)


@imports("Trilu")
def triangle(site: OnnxSite, x: Value, diagonal: Value | None = None) -> Value:
    k = 0 if diagonal is None else site.numbers("k", diagonal)[0]
    rows, columns = x.type.shape[-2:]
    upper = bool(site.attribute("upper", 1))
    require_table_fits((rows, columns), itemsize=1)
    kept = np.triu(np.ones((rows, columns), np.bool_), k) if upper else np.tri(rows, columns, k, np.bool_)
    return site.emit(Where(), site.builder.constant(kept, DType.BOOL), x, site.like(x, 0))


@imports("DepthToSpace")
def depth_to_space(site: OnnxSite, x: Value) -> Value:
    batch, channels, height, width = x.type.shape
    block = site.attribute("blocksize")
    if site.attribute("mode", "DCR") == "DCR":
        parts, order = (batch, block, block, channels // block**2, height, width), (0, 3, 4, 1, 5, 2)
    else:
        parts, order = (batch, channels // block**2, block, block, height, width), (0, 1, 4, 2, 5, 3)
    moved = site.emit(Transpose(order), site.reshape(x, parts))
    return site.reshape(moved, (batch, channels // block**2, height * block, width * block))


@imports("SpaceToDepth")
def space_to_depth(site: OnnxSite, x: Value) -> Value:
    batch, channels, height, width = x.type.shape
    block = site.attribute("blocksize")
    parts = site.reshape(x, (batch, channels, height // block, block, width // block, block))
    order = (0, 3, 5, 1, 2, 4) if site.attribute("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    moved = site.emit(Transpose(order), parts)
    return site.reshape(moved, (batch, channels * block**2, height // block, width // block))


@imports("NonZero", "Unique", "Compress")
def sized_by_data(site: OnnxSite, *_: Value) -> Value:
    raise NotExpressible("the size of its result depends on data; use Where, or pad to a fixed size")


def _non_negative(site: OnnxSite, indices: Value, size: int) -> Value:
    """Non-negative indices for indices that may count from the end."""
    table = site.builder.table_of(indices)
    if table is not None and (table >= 0).all():
        return indices
    below = site.binary("less", indices, site.like(indices, 0))
    return site.emit(Where(), below, site.binary("add", indices, site.like(indices, size)), indices)


@imports("Gather")
def gather(site: OnnxSite, x: Value, indices: Value) -> Value:
    axis = site.axis(x, 0)
    return site.emit(Gather(axis), x, _non_negative(site, indices, x.type.shape[axis]))


@imports("GatherElements")
def gather_elements(site: OnnxSite, x: Value, indices: Value) -> Value:
    axis = site.axis(x, 0)
    return site.emit(TakeAlong(axis), x, _non_negative(site, indices, x.type.shape[axis]))


def _columns(site: OnnxSite, indices: Value) -> list[Value]:
    """The coordinates in the last axis of the indices, as one index tensor per axis."""
    sizes = list(indices.type.shape)
    parts = [site.slice(indices, indices.type.rank - 1, i, i + 1) for i in range(sizes[-1])]
    return [site.reshape(part, sizes[:-1]) for part in parts]


@imports("GatherND")
def gather_nd(site: OnnxSite, x: Value, indices: Value) -> Value:
    batched = site.attribute("batch_dims", 0)
    columns = _columns(site, indices)
    common = columns[0].type.shape
    for axis in range(batched):
        require_table_fits((common[axis],))
        count = np.arange(common[axis]).reshape([-1 if i == axis else 1 for i in range(len(common))])
        columns.insert(axis, site.builder.constant(count, DType.INT64))
    return site.emit(Index(tuple(range(len(columns)))), x, *columns)


_REDUCTIONS = {"none": "", "add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


@imports("ScatterND")
def scatter_nd(site: OnnxSite, x: Value, indices: Value, update: Value) -> Value:
    columns = _columns(site, indices)
    function = _REDUCTIONS[site.attribute("reduction", "none")]
    return site.emit(IndexUpdate(tuple(range(len(columns))), function), x, update, *columns)


@imports("ScatterElements", "Scatter")
def scatter_elements(site: OnnxSite, x: Value, indices: Value, update: Value) -> Value:
    axis = site.axis(x, 0)
    positions = _non_negative(site, indices, x.type.shape[axis])
    return site.emit(ScatterAlong(axis, _REDUCTIONS[site.attribute("reduction", "none")]), x, update, positions)


@imports("TensorScatter")
def tensor_scatter(site: OnnxSite, cache: Value, update: Value, starts: Value | None = None) -> Value:
    """Write keys or values into a KV cache, for each row of the batch from its own position on."""
    axis = site.axis(cache, -2)
    count, size = update.type.shape[axis], cache.type.shape[axis]
    require_table_fits((count,))
    steps = site.builder.constant(np.arange(count).reshape(-1, *[1] * (cache.type.rank - axis - 1)), DType.INT64)
    if starts is not None:
        first = site.reshape(starts, (starts.type.elements, *[1] * (cache.type.rank - 1)))
        steps = site.binary("add", first, steps)
    if site.attribute("mode", "linear") == "circular":
        steps = site.binary("remainder", steps, size)
    return site.emit(ScatterAlong(axis, ""), cache, update, site.broadcast(steps, update.type.shape))


@imports("TopK")
def top_k(site: OnnxSite, x: Value, count: Value | None = None) -> list[Value]:
    (k,) = site.numbers("k", count, [site.attribute("k", 0)])
    axis = site.axis(x, -1)
    order = site.slice(site.emit(ArgSort(axis, bool(site.attribute("largest", 1))), x), axis, 0, k)
    return [site.emit(TakeAlong(axis), x, order), order]


@imports("ArgMax", "ArgMin")
def search(site: OnnxSite, x: Value) -> Value:
    axis, keep = site.axis(x, 0), bool(site.attribute("keepdims", 1))
    function = site.operator.lower()
    if not site.attribute("select_last_index", 0):
        return site.emit(ArgReduce(function, axis, keep), x)
    flipped = site.emit(ArgReduce(function, axis, keep), site.emit(Flip((axis,)), x))
    return site.binary("subtract", site.like(flipped, x.type.shape[axis] - 1), flipped)


@imports("CumSum", "CumProd")
def running(site: OnnxSite, x: Value, along: Value) -> Value:
    axis = axis_in(site.numbers("axis", along)[0], x.type.rank)
    backwards = bool(site.attribute("reverse", 0))
    operand = site.emit(Flip((axis,)), x) if backwards else x
    sums = site.emit(Cumulate(site.operator.lower(), axis), operand)
    if site.attribute("exclusive", 0):
        neutral = site.filled(int(site.operator == "CumProd"), sums.type.with_shape(_with_unit_axis(sums, axis)))
        sums = _concatenated(site, neutral, site.slice(sums, axis, 0, x.type.shape[axis] - 1), axis)
    return site.cast(site.emit(Flip((axis,)), sums) if backwards else sums, x.type.dtype)


def _with_unit_axis(x: Value, axis: int) -> tuple[int, ...]:
    return (*x.type.shape[:axis], 1, *x.type.shape[axis + 1 :])


def _concatenated(site: OnnxSite, a: Value, b: Value, axis: int) -> Value:
    return site.emit(Concat(axis), a, b)


@imports("OneHot")
def one_hot(site: OnnxSite, indices: Value, depth: Value, values: Value) -> Value:
    (count,) = site.numbers("depth", depth)
    axis = axis_in(site.attribute("axis", -1), indices.type.rank + 1)
    whole = site.cast(indices, DType.INT64)
    classes_of = _non_negative(site, whole, count)
    column = site.reshape(classes_of, (*whole.type.shape[:axis], 1, *whole.type.shape[axis:]))
    require_table_fits((count,))
    classes = np.arange(count).reshape((-1, *[1] * (whole.type.rank - axis)))
    hot = site.binary("equal", column, site.builder.constant(classes, DType.INT64))
    off, on = (site.reshape(site.emit(Slice((i,), (i + 1,), (1,)), values), ()) for i in (0, 1))
    shape = hot.type.shape
    return site.emit(Where(), hot, site.broadcast(on, shape), site.broadcast(off, shape))


@imports("ReverseSequence")
def reverse_sequence(site: OnnxSite, x: Value, lengths: Value) -> Value:
    time, batch = site.attribute("time_axis", 0), site.attribute("batch_axis", 1)
    rank = x.type.rank

    def along(axis: int) -> list[int]:
        return [-1 if i == axis else 1 for i in range(rank)]

    size = x.type.shape[time]
    require_table_fits((size,))
    step = site.builder.constant(np.arange(size).reshape(along(time)), DType.INT64)
    length = site.reshape(lengths, [x.type.shape[batch] if i == batch else 1 for i in range(rank)])
    mirrored = site.binary("subtract", site.binary("subtract", length, 1), step)
    place = site.emit(Where(), site.binary("less", step, length), mirrored, step)
    return site.emit(TakeAlong(time), x, site.broadcast(place, x.type.shape))
