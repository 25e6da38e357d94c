"""ATen importers: views, concatenation, slicing, repetition, gather, scatter and masked selection."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nxpipe.emulator.capture.aten.base import NotExpressible, Site, axes_of, axis_of, imports, promote_scalars
from nxpipe.emulator.capture.composites import extend_axis
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import (
    Bitcast,
    Concat,
    Cumulate,
    Flip,
    Gather,
    Index,
    IndexUpdate,
    Iota,
    Pad,
    Reduce,
    ScatterAlong,
    SliceUpdate,
    TakeAlong,
    Transpose,
    Where,
)


@imports("view", "view_as", "reshape", "reshape_as", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")
def reshape(site: Site, x: Value, *_: Any) -> Value:
    return site.reshape(x, site.result.shape)


@imports("as_strided")
def as_strided(site: Site, x: Value, *_: Any) -> Value:
    raise NotExpressible("graph values have no strides; use slices, unfold, expand or permute")


@imports("view.dtype")
def reinterpret(site: Site, x: Value, *_: Any) -> Value:
    return site.emit(Bitcast(x.type.dtype, site.result.dtype), x)


@imports("expand", "expand_as", "broadcast_to")
def expand(site: Site, x: Value, *_: Any) -> Value:
    return site.broadcast(x, site.result.shape)


def _transposed(site: Site, x: Value, order: Sequence[int]) -> Value:
    return site.emit(Transpose(tuple(order)), x)


@imports("permute")
def permute(site: Site, x: Value, order: Sequence[int]) -> Value:
    return _transposed(site, x, [axis_of(x, axis) for axis in order])


@imports("transpose.int", "swapaxes")
def transpose(site: Site, x: Value, a: int, b: int) -> Value:
    order = list(range(x.type.rank))
    if order:
        a, b = axis_of(x, a), axis_of(x, b)
        order[a], order[b] = b, a
    return _transposed(site, x, order)


@imports("t", "numpy_T")
def reverse_axes(site: Site, x: Value) -> Value:
    return _transposed(site, x, range(x.type.rank)[::-1])


@imports("mT")
def transpose_matrices(site: Site, x: Value) -> Value:
    return transpose(site, x, -2, -1)


@imports("select.int")
def select(site: Site, x: Value, dim: int, index: int) -> Value:
    axis = axis_of(x, dim)
    place = index % x.type.shape[axis]
    return site.reshape(site.slice(x, axis, place, place + 1), site.result.shape)


def _bounds(x: Value, axis: int, start: int | None, end: int | None, step: int) -> tuple[int, int, int]:
    start, stop, step = slice(start, end, step).indices(x.type.shape[axis])
    return start, max(start, stop), step


@imports("slice.Tensor")
def slice_(site: Site, x: Value, dim: int, start: int | None, end: int | None, step: int) -> Value:
    axis = axis_of(x, dim)
    return site.slice(x, axis, *_bounds(x, axis, start, end, step))


@imports("narrow")
def narrow(site: Site, x: Value, dim: int, start: int, length: int) -> Value:
    return slice_(site, x, dim, start, start + length, 1)


def _updated(site: Site, x: Value, update: Value, axis: int, start: int, stop: int, step: int) -> Value:
    starts, stops, steps = [0] * x.type.rank, list(x.type.shape), [1] * x.type.rank
    starts[axis], stops[axis], steps[axis] = start, stop, step
    return site.emit(SliceUpdate(tuple(starts), tuple(stops), tuple(steps)), x, update)


@imports("slice_scatter")
def slice_scatter(
    site: Site, x: Value, update: Value, dim: int, start: int | None, end: int | None, step: int
) -> Value:
    axis = axis_of(x, dim)
    return _updated(site, x, update, axis, *_bounds(x, axis, start, end, step))


@imports("select_scatter")
def select_scatter(site: Site, x: Value, update: Value, dim: int, index: int) -> Value:
    axis = axis_of(x, dim)
    place = index % x.type.shape[axis]
    row = (*x.type.shape[:axis], 1, *x.type.shape[axis + 1 :])
    return _updated(site, x, site.reshape(update, row), axis, place, place + 1, 1)


@imports("cat", "concat")
def cat(site: Site, parts: Sequence[Value], dim: int = 0) -> Value:
    # PyTorch concatenates an empty vector with tensors of any rank.
    joined = [site.cast(part, site.result.dtype) for part in parts if part.type.shape != (0,)]
    if not joined:
        return parts[0]
    return joined[0] if len(joined) == 1 else site.emit(Concat(axis_of(joined[0], dim)), *joined)


@imports("stack")
def stack(site: Site, parts: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % len(site.result.shape)
    row = (*site.result.shape[:axis], 1, *site.result.shape[axis + 1 :])
    return site.emit(Concat(axis), *(site.reshape(site.cast(part, site.result.dtype), row) for part in parts))


@imports("split", "split_with_sizes", "chunk")
def split(site: Site, x: Value, sizes: object, dim: int = 0) -> list[Value]:
    """Slices of the known result sizes, for every overload."""
    axis, start, parts = axis_of(x, dim), 0, []
    for result in site.results:
        parts.append(site.slice(x, axis, start, start + result.shape[axis]))
        start += result.shape[axis]
    return parts


@imports("unbind")
def unbind(site: Site, x: Value, dim: int) -> list[Value]:
    return [select(site, x, dim, index) for index in range(x.type.shape[axis_of(x, dim)])]


@imports("flip")
def flip(site: Site, x: Value, dims: Sequence[int]) -> Value:
    return site.emit(Flip(axes_of(x, dims) if dims else ()), x)


@imports("roll")
def roll(site: Site, x: Value, shifts: Sequence[int], dims: Sequence[int]) -> Value:
    if not dims:
        return site.reshape(roll(site, site.reshape(x, (x.type.elements,)), shifts, (0,)), x.type.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = axis_of(x, dim)
        size = x.type.shape[axis]
        cut = -shift % max(size, 1)
        if cut:
            x = site.emit(Concat(axis), site.slice(x, axis, cut, size), site.slice(x, axis, 0, cut))
    return x


@imports("repeat")
def repeat(site: Site, x: Value, repeats: Sequence[int]) -> Value:
    shape = (1,) * (len(repeats) - x.type.rank) + x.type.shape
    unrepeated = [part for size in shape for part in (1, size)]
    repeated = [part for times, size in zip(repeats, shape, strict=True) for part in (times, size)]
    return site.reshape(site.broadcast(site.reshape(x, unrepeated), repeated), site.result.shape)


@imports("repeat_interleave.self_int")
def repeat_interleave(site: Site, x: Value, repeats: int, dim: int | None, *_: Any) -> Value:
    if dim is None:
        x, dim = site.reshape(x, (x.type.elements,)), 0
    axis = axis_of(x, dim)
    before, after = x.type.shape[: axis + 1], x.type.shape[axis + 1 :]
    return site.reshape(
        site.broadcast(site.reshape(x, (*before, 1, *after)), (*before, repeats, *after)), site.result.shape
    )


@imports("constant_pad_nd")
def constant_pad_nd(site: Site, x: Value, pad: Sequence[int], number: float = 0) -> Value:
    """PyTorch lists paddings from the last axis to the first; negative padding crops."""
    before, after = [0] * x.type.rank, [0] * x.type.rank
    for i in range(len(pad) // 2):
        before[-1 - i], after[-1 - i] = pad[2 * i], pad[2 * i + 1]
    for axis, size in enumerate(x.type.shape):
        if before[axis] < 0 or after[axis] < 0:
            x = site.slice(x, axis, max(-before[axis], 0), size - max(-after[axis], 0))
    filling = site.builder.scalar(number, x.type.dtype)
    return site.emit(Pad(tuple(max(b, 0) for b in before), tuple(max(a, 0) for a in after)), x, filling)


@imports("pad")
def pad_(site: Site, x: Value, pad: Sequence[int], mode: str, number: float | None = None) -> Value:
    return constant_pad_nd(site, x, pad, number or 0) if mode == "constant" else _padded(site, x, pad, _MODES[mode])


_MODES = {"circular": "wrap", "reflect": "reflect", "replicate": "edge"}


def _padded(site: Site, x: Value, pad: Sequence[int], mode: str) -> Value:
    """Pad with the tensor's own elements, one axis at a time; circular padding crops first."""
    for i in range(len(pad) // 2):
        axis, before, after = x.type.rank - 1 - i, pad[2 * i], pad[2 * i + 1]
        if mode == "wrap" and min(before, after) < 0:
            x = site.slice(x, axis, max(-before, 0), x.type.shape[axis] - max(-after, 0))
            before, after = max(before, 0), max(after, 0)
        x = extend_axis(site, x, axis, before, after, mode)
    return x


@imports("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(site: Site, x: Value, pad: Sequence[int]) -> Value:
    return _padded(site, x, pad, "reflect")


@imports("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(site: Site, x: Value, pad: Sequence[int]) -> Value:
    return _padded(site, x, pad, "edge")


@imports("diff")
@promote_scalars
def diff(site: Site, x: Value, times: int, dim: int, before: Value | None = None, after: Value | None = None) -> Value:
    """Differences of neighbours along an axis, `times` times."""
    axis = axis_of(x, dim)
    parts = [site.cast(part, site.result.dtype) for part in (before, x, after) if part is not None]
    x = site.emit(Concat(axis), *parts) if len(parts) > 1 else x
    function = "not_equal" if x.type.dtype is DType.BOOL else "subtract"
    for size in range(x.type.shape[axis], max(x.type.shape[axis] - times, 0), -1):
        x = site.binary(function, site.slice(x, axis, 1, size), site.slice(x, axis, 0, size - 1))
    return x


def _triangle(site: Site, x: Value, comparison: str, diagonal: int) -> Value:
    rows, columns = x.type.shape[-2:]
    row = site.reshape(site.emit(Iota(rows, diagonal, 1, DType.INT64)), (rows, 1))
    column = site.emit(Iota(columns, 0, 1, DType.INT64))
    kept = site.binary(comparison, column, row)
    return site.emit(Where(), kept, x, site.filled(0, TensorType((), x.type.dtype)))


@imports("tril")
def tril(site: Site, x: Value, diagonal: int = 0) -> Value:
    return _triangle(site, x, "less_equal", diagonal)


@imports("triu")
def triu(site: Site, x: Value, diagonal: int = 0) -> Value:
    return _triangle(site, x, "greater_equal", diagonal)


@imports("embedding")
def embedding(site: Site, table: Value, indices: Value, *_: Any) -> Value:
    return site.emit(Gather(0), table, indices)


@imports("index_select")
@promote_scalars
def index_select(site: Site, x: Value, dim: int, indices: Value) -> Value:
    return site.emit(Gather(axis_of(x, dim)), x, indices)


@imports("gather")
@promote_scalars
def gather(site: Site, x: Value, dim: int, indices: Value, *_: Any) -> Value:
    if not site.result.elements:  # the ranks may differ then
        return site.filled(0, site.result)
    return site.emit(TakeAlong(axis_of(x, dim)), x, indices)


def _indexed_axes(indices: Sequence[Value | None]) -> tuple[tuple[int, ...], list[Value]]:
    """The indexed axes and their indices; the other axes are whole."""
    indexed = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(index.type.dtype is DType.BOOL for _, index in indexed):
        raise NotExpressible("the size of a boolean selection depends on data; use torch.where")
    return tuple(axis for axis, _ in indexed), [index for _, index in indexed]


@imports("index.Tensor", "_unsafe_index.Tensor")
def index(site: Site, x: Value, indices: Sequence[Value | None]) -> Value:
    axes, operands = _indexed_axes(indices)
    return site.emit(Index(axes), x, *operands)


@imports("index_put", "_unsafe_index_put")
def index_put(site: Site, x: Value, indices: Sequence[Value | None], update: Value, accumulate: bool = False) -> Value:
    update = site.cast(update, x.type.dtype)
    masks = [index for index in indices if index is not None and index.type.dtype is DType.BOOL]
    if len(masks) == 1 == len(indices) and _is_broadcast(update, x.type.shape[masks[0].type.rank :]):
        return _masked_update(site, x, masks[0], update, accumulate)
    axes, operands = _indexed_axes(indices)
    return site.emit(IndexUpdate(axes, "add" if accumulate else ""), x, update, *operands)


def _masked_update(site: Site, x: Value, mask: Value, update: Value, accumulate: bool) -> Value:
    """Masked update with one value for all masked positions, which needs no data-dependent size."""
    trailing = x.type.rank - mask.type.rank
    condition = site.reshape(mask, mask.type.shape + (1,) * trailing)
    value = site.reshape(update, update.type.shape[max(update.type.rank - trailing, 0) :])
    return site.emit(Where(), condition, site.binary("add", x, value) if accumulate else value, x)


def _is_broadcast(update: Value, shape: Sequence[int]) -> bool:
    """True if an update is one value, broadcast to all masked positions."""
    leading = max(update.type.rank - len(shape), 0)
    return all(size == 1 for size in update.type.shape[:leading])


@imports("index_copy")
@promote_scalars
def index_copy(site: Site, x: Value, dim: int, indices: Value, update: Value) -> Value:
    return site.emit(IndexUpdate((axis_of(x, dim),), ""), x, update, indices)


@imports("index_add")
@promote_scalars
def index_add(site: Site, x: Value, dim: int, indices: Value, update: Value, alpha: float) -> Value:
    scaled = update if alpha == 1 else site.binary("multiply", update, alpha)
    return site.emit(IndexUpdate((axis_of(x, dim),), "add"), x, scaled, indices)


@imports("diagonal")
def diagonal(site: Site, x: Value, offset: int, first: int, second: int) -> Value:
    """The diagonal of two axes, as the last axis."""
    a, b = axis_of(x, first), axis_of(x, second)
    length = site.result.shape[-1]
    rows = site.emit(Iota(length, max(-offset, 0), 1, DType.INT64))
    columns = site.emit(Iota(length, max(offset, 0), 1, DType.INT64))
    others = [axis for axis in range(x.type.rank) if axis not in (a, b)]
    last = site.emit(Transpose((*others, a, b)), x)
    return site.emit(Index((len(others), len(others) + 1)), last, rows, columns)


@imports("bucketize.Tensor")
def bucketize(site: Site, x: Value, edges: Value, narrow: bool, right: bool) -> Value:
    """The number of edges below each element."""
    column = site.reshape(x, (*x.type.shape, 1))
    before = site.binary("greater_equal" if right else "greater", column, edges)
    return site.cast(site.emit(Reduce("sum", (x.type.rank,), False), before), site.result.dtype)


@imports("histc")
def histc(site: Site, x: Value, bins: int, low: Value | float, high: Value | float) -> Value:
    """The number of elements in each of equally wide bins; the last bin includes its upper edge."""
    flat = site.reshape(x, (x.type.elements, 1))
    if low == high and x.type.elements:
        low, high = _own_range(site, flat)
    span = site.binary("subtract", high, low)
    place = site.binary("divide", site.binary("multiply", site.binary("subtract", flat, low), bins), span)
    number = site.binary("minimum", site.unary("floor", place), float(bins - 1))
    inside = site.binary("and", site.binary("greater_equal", flat, low), site.binary("less_equal", flat, high))
    counted = site.emit(Iota(bins, 0, 1, DType.INT64))
    hits = site.binary("and", site.binary("equal", number, counted), inside)
    return site.cast(site.emit(Reduce("sum", (0,), False), hits), site.result.dtype)


def _own_range(site: Site, x: Value) -> tuple[Value, Value]:
    """Minimum and maximum of the data, widened by 1 if all elements are equal."""
    low, high = (site.emit(Reduce(extreme, (0, 1), False), x) for extreme in ("min", "max"))
    margin = site.cast(site.binary("equal", low, high), x.type.dtype)
    return site.binary("subtract", low, margin), site.binary("add", high, margin)


@imports("one_hot")
def one_hot(site: Site, x: Value, classes: int = -1) -> Value:
    column = site.reshape(x, (*x.type.shape, 1))
    return site.cast(
        site.binary("equal", column, site.emit(Iota(site.result.shape[-1], 0, 1, DType.INT64))), DType.INT64
    )


_REDUCTIONS = {
    "add": "add",
    "amax": "maximum",
    "amin": "minimum",
    "multiply": "multiply",
    "prod": "multiply",
    "sum": "add",
}


def _scattered(site: Site, function: str, x: Value, dim: int, indices: Value, update: Value) -> Value:
    """Scatter; elements of the update outside of the indices' shape are ignored, as in PyTorch."""
    if not x.type.rank:
        x, indices, update = (site.reshape(operand, (1,)) for operand in (x, indices, update))
    for axis, size in enumerate(indices.type.shape):
        if update.type.shape[axis] != size:
            update = site.slice(update, axis, 0, size)
    op = ScatterAlong(axis_of(x, dim), function)
    return site.reshape(site.emit(op, x, site.cast(update, x.type.dtype), indices), site.result.shape)


@imports("scatter.src")
def scatter(site: Site, x: Value, dim: int, indices: Value, update: Value) -> Value:
    return _scattered(site, "", x, dim, indices, update)


@imports("scatter.value")
def scatter_value(site: Site, x: Value, dim: int, indices: Value, number: float) -> Value:
    return _scattered(site, "", x, dim, indices, site.filled(number, x.type.with_shape(indices.type.shape)))


@imports("scatter.reduce")
def scatter_combined(site: Site, x: Value, dim: int, indices: Value, update: Value, reduce: str) -> Value:
    return _scattered(site, _REDUCTIONS[reduce], x, dim, indices, update)


@imports("scatter_add")
def scatter_add(site: Site, x: Value, dim: int, indices: Value, update: Value) -> Value:
    return _scattered(site, "add", x, dim, indices, update)


@imports("scatter_reduce.two")
def scatter_reduce(
    site: Site, x: Value, dim: int, indices: Value, update: Value, reduce: str, include_self: bool = True
) -> Value:
    if reduce == "mean":
        return _scattered_mean(site, x, dim, indices, update, include_self)
    if not include_self:
        x = _with_neutral_elements(site, x, dim, indices, update, _REDUCTIONS[reduce])
    return _scattered(site, _REDUCTIONS[reduce], x, dim, indices, update)


def _with_neutral_elements(site: Site, x: Value, dim: int, indices: Value, update: Value, function: str) -> Value:
    """Set the elements to be written to the neutral element of the reduction."""
    if function in ("add", "multiply"):
        blank = site.filled(0 if function == "add" else 1, update.type)
    else:
        blank = site.filled(_extreme(x.type.dtype, lowest=function == "maximum"), update.type)
    return _scattered(site, "", x, dim, indices, blank)


def _extreme(dtype: DType, *, lowest: bool) -> float:
    """The neutral element of max (`lowest`) or min."""
    if dtype.is_float:
        return float("-inf" if lowest else "inf")
    if dtype is DType.BOOL:
        return not lowest
    limits = np.iinfo(dtype.value)
    return int(limits.min if lowest else limits.max)


def _scattered_mean(site: Site, x: Value, dim: int, indices: Value, update: Value, include_self: bool) -> Value:
    own = 1 if include_self else 0
    counts = site.filled(own, x.type.with_dtype(DType.FLOAT32))
    ones = site.filled(1, update.type.with_dtype(DType.FLOAT32))
    counts = site.binary("maximum", _scattered(site, "add", counts, dim, indices, ones), 1)
    base = x if include_self else _with_neutral_elements(site, x, dim, indices, update, "add")
    total = _scattered(site, "add", base, dim, indices, update)
    if not x.type.dtype.is_float:  # PyTorch uses floor division for integers
        return site.binary("floor_divide", total, site.cast(counts, x.type.dtype))
    return site.binary("divide", total, counts)


@imports("masked_scatter")
def masked_scatter(site: Site, x: Value, mask: Value, source: Value) -> Value:
    """The n-th masked element takes the n-th element of the source, by a cumulative sum of the mask."""
    shape = site.result.shape
    chosen = site.reshape(site.broadcast(mask, shape), (site.result.elements,))
    number = site.binary("subtract", site.emit(Cumulate("cumsum", 0), chosen), 1)
    last = source.type.elements - 1
    number = site.binary("maximum", site.binary("minimum", number, last), 0)
    taken = site.emit(Gather(0), site.reshape(source, (source.type.elements,)), number)
    replaced = site.emit(Where(), chosen, taken, site.reshape(site.broadcast(x, shape), (site.result.elements,)))
    return site.reshape(replaced, shape)


@imports("index_reduce")
def index_reduce(
    site: Site, x: Value, dim: int, indices: Value, update: Value, reduce: str, include_self: bool = True
) -> Value:
    """Scatter-reduce with one index per slice of the update, broadcast to its elements."""
    if not x.type.rank:
        x, update = site.reshape(x, (1,)), site.reshape(update, (1,))
    axis = axis_of(x, dim)
    column = site.reshape(indices, (indices.type.elements, *[1] * (x.type.rank - axis - 1)))
    broadcast = site.broadcast(column, update.type.shape)
    return site.reshape(scatter_reduce(site, x, axis, broadcast, update, reduce, include_self), site.result.shape)
