"""Writes at computed places along an axis, and selections by a mask whose size stays fixed."""

import numpy as np

from nxpipe.emulator.capture.aten.base import Site, axis_of, imports
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Cumulate, Gather, ScatterAlong, Where

_COMBINED = {
    "add": "add",
    "amax": "maximum",
    "amin": "minimum",
    "multiply": "multiply",
    "prod": "multiply",
    "sum": "add",
}


def _scattered(site: Site, function: str, x: Value, dim: int, indices: Value, update: Value) -> Value:
    """PyTorch lets the update be larger than its indices; the rest of it is ignored."""
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
    return _scattered(site, _COMBINED[reduce], x, dim, indices, update)


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
        x = _emptied(site, x, dim, indices, update, _COMBINED[reduce])
    return _scattered(site, _COMBINED[reduce], x, dim, indices, update)


def _emptied(site: Site, x: Value, dim: int, indices: Value, update: Value, function: str) -> Value:
    """Elements that will be written start from what combining leaves alone, instead of from their own value."""
    if function in ("add", "multiply"):
        blank = site.filled(0 if function == "add" else 1, update.type)
    else:
        blank = site.filled(_extreme(x.type.dtype, lowest=function == "maximum"), update.type)
    return _scattered(site, "", x, dim, indices, blank)


def _extreme(dtype: DType, *, lowest: bool) -> float:
    """What every other number wins against."""
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
    base = x if include_self else _emptied(site, x, dim, indices, update, "add")
    total = _scattered(site, "add", base, dim, indices, update)
    if not x.type.dtype.is_float:  # PyTorch's integers are divided downwards
        return site.binary("floor_divide", total, site.cast(counts, x.type.dtype))
    return site.binary("divide", total, counts)


@imports("masked_scatter")
def masked_scatter(site: Site, x: Value, mask: Value, source: Value) -> Value:
    """The n-th chosen element takes the n-th of the source: a running count of the mask says which."""
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
    """One index for each slice of the update: the same for all of its elements."""
    if not x.type.rank:
        x, update = site.reshape(x, (1,)), site.reshape(update, (1,))
    axis = axis_of(x, dim)
    column = site.reshape(indices, (indices.type.elements, *[1] * (x.type.rank - axis - 1)))
    each = site.broadcast(column, update.type.shape)
    return site.reshape(scatter_reduce(site, x, axis, each, update, reduce, include_self), site.result.shape)
