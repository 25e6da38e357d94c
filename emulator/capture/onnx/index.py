"""Reads and writes at computed places, orders, and searches."""

import numpy as np

from nxpipe.emulator.capture.onnx.base import OnnxSite, axis_in, imports
from nxpipe.emulator.capture.room import require_room
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import (
    ArgReduce,
    ArgSort,
    Concat,
    Cumulate,
    Flip,
    Gather,
    Index,
    IndexUpdate,
    ScatterAlong,
    Slice,
    TakeAlong,
    Where,
)


def _counted_from_the_front(site: OnnxSite, indices: Value, size: int) -> Value:
    """Indices below zero count from the end."""
    table = site.builder.table_of(indices)
    if table is not None and (table >= 0).all():
        return indices
    below = site.binary("less", indices, site.like(indices, 0))
    return site.emit(Where(), below, site.binary("add", indices, site.like(indices, size)), indices)


@imports("Gather")
def gather(site: OnnxSite, x: Value, indices: Value) -> Value:
    axis = site.axis(x, 0)
    return site.emit(Gather(axis), x, _counted_from_the_front(site, indices, x.type.shape[axis]))


@imports("GatherElements")
def gather_elements(site: OnnxSite, x: Value, indices: Value) -> Value:
    axis = site.axis(x, 0)
    return site.emit(TakeAlong(axis), x, _counted_from_the_front(site, indices, x.type.shape[axis]))


def _columns(site: OnnxSite, indices: Value) -> list[Value]:
    """The last axis of the indices holds an address; each of its parts is an index of its own."""
    whole = list(indices.type.shape)
    parts = [site.slice(indices, indices.type.rank - 1, i, i + 1) for i in range(whole[-1])]
    return [site.reshape(part, whole[:-1]) for part in parts]


@imports("GatherND")
def gather_nd(site: OnnxSite, x: Value, indices: Value) -> Value:
    batched = site.attribute("batch_dims", 0)
    columns = _columns(site, indices)
    common = columns[0].type.shape
    for axis in range(batched):
        require_room((common[axis],))
        count = np.arange(common[axis]).reshape([-1 if i == axis else 1 for i in range(len(common))])
        columns.insert(axis, site.builder.constant(count, DType.INT64))
    return site.emit(Index(tuple(range(len(columns)))), x, *columns)


_COMBINED = {"none": "", "add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


@imports("ScatterND")
def scatter_nd(site: OnnxSite, x: Value, indices: Value, update: Value) -> Value:
    columns = _columns(site, indices)
    how = _COMBINED[site.attribute("reduction", "none")]
    return site.emit(IndexUpdate(tuple(range(len(columns))), how), x, update, *columns)


@imports("ScatterElements", "Scatter")
def scatter_elements(site: OnnxSite, x: Value, indices: Value, update: Value) -> Value:
    axis = site.axis(x, 0)
    places = _counted_from_the_front(site, indices, x.type.shape[axis])
    return site.emit(ScatterAlong(axis, _COMBINED[site.attribute("reduction", "none")]), x, update, places)


@imports("TensorScatter")
def tensor_scatter(site: OnnxSite, cache: Value, update: Value, starts: Value | None = None) -> Value:
    """New keys or values written into a cache, for each row of the batch from a place of its own on."""
    axis = site.axis(cache, -2)
    count, size = update.type.shape[axis], cache.type.shape[axis]
    require_room((count,))
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
    found = site.emit(ArgReduce(function, axis, keep), site.emit(Flip((axis,)), x))
    return site.binary("subtract", site.like(found, x.type.shape[axis] - 1), found)


@imports("CumSum", "CumProd")
def running(site: OnnxSite, x: Value, along: Value) -> Value:
    axis = axis_in(site.numbers("axis", along)[0], x.type.rank)
    backwards = bool(site.attribute("reverse", 0))
    turned = site.emit(Flip((axis,)), x) if backwards else x
    sums = site.emit(Cumulate(site.operator.lower(), axis), turned)
    if site.attribute("exclusive", 0):
        neutral = site.filled(int(site.operator == "CumProd"), sums.type.with_shape(_thin(sums, axis)))
        sums = _joined(site, neutral, site.slice(sums, axis, 0, x.type.shape[axis] - 1), axis)
    return site.cast(site.emit(Flip((axis,)), sums) if backwards else sums, x.type.dtype)


def _thin(x: Value, axis: int) -> tuple[int, ...]:
    return (*x.type.shape[:axis], 1, *x.type.shape[axis + 1 :])


def _joined(site: OnnxSite, a: Value, b: Value, axis: int) -> Value:
    return site.emit(Concat(axis), a, b)


@imports("OneHot")
def one_hot(site: OnnxSite, indices: Value, depth: Value, values: Value) -> Value:
    (count,) = site.numbers("depth", depth)
    axis = axis_in(site.attribute("axis", -1), indices.type.rank + 1)
    whole = site.cast(indices, DType.INT64)
    places = _counted_from_the_front(site, whole, count)
    column = site.reshape(places, (*whole.type.shape[:axis], 1, *whole.type.shape[axis:]))
    require_room((count,))
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
    require_room((size,))
    step = site.builder.constant(np.arange(size).reshape(along(time)), DType.INT64)
    length = site.reshape(lengths, [x.type.shape[batch] if i == batch else 1 for i in range(rank)])
    mirrored = site.binary("subtract", site.binary("subtract", length, 1), step)
    place = site.emit(Where(), site.binary("less", step, length), mirrored, step)
    return site.emit(TakeAlong(time), x, site.broadcast(place, x.type.shape))
