"""Folds, searches and orders along axes."""

import math
from collections.abc import Sequence
from typing import Any

from nxpipe.emulator.capture.aten.base import Site, along_an_axis, axes_of, axis_of, imports
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import ArgReduce, ArgSort, Cumulate, Iota, Reduce, TakeAlong, Where

Axes = Sequence[int] | int | None


def _reduced(site: Site, function: str, x: Value, axes: Axes = None, keep: bool = False) -> Value:
    return site.emit(Reduce(function, axes_of(x, axes), keep), x)


def _accumulated(site: Site, function: str, x: Value, axes: Axes, keep: bool) -> Value:
    """Sums and means widen to the result's type before they add up, not after."""
    return _reduced(site, function, site.cast(x, site.result.dtype), axes, keep)


@imports("sum.default")
def sum_all(site: Site, x: Value, *_: Any) -> Value:
    return _accumulated(site, "sum", x, None, False)


@imports("sum.dim_IntList")
def sum_axes(site: Site, x: Value, dims: Axes, keep: bool, *_: Any) -> Value:
    return _accumulated(site, "sum", x, dims, keep)


@imports("mean.default")
def mean_all(site: Site, x: Value, *_: Any) -> Value:
    return _accumulated(site, "mean", x, None, False)


@imports("mean.dim")
def mean_axes(site: Site, x: Value, dims: Axes, keep: bool, *_: Any) -> Value:
    return _accumulated(site, "mean", x, dims, keep)


@imports("prod.default")
def prod_all(site: Site, x: Value, *_: Any) -> Value:
    return _accumulated(site, "prod", x, None, False)


@imports("prod.dim_int")
def prod_axis(site: Site, x: Value, dim: int, keep: bool, *_: Any) -> Value:
    return _accumulated(site, "prod", x, dim, keep)


@imports("amax")
def amax(site: Site, x: Value, dims: Axes, keep: bool) -> Value:
    return _reduced(site, "max", x, dims, keep)


@imports("amin")
def amin(site: Site, x: Value, dims: Axes, keep: bool) -> Value:
    return _reduced(site, "min", x, dims, keep)


@imports("max.default")
def max_all(site: Site, x: Value) -> Value:
    return _reduced(site, "max", x)


@imports("min.default")
def min_all(site: Site, x: Value) -> Value:
    return _reduced(site, "min", x)


@imports("max.dim")
@along_an_axis
def max_axis(site: Site, x: Value, dim: int, keep: bool) -> list[Value]:
    return [_reduced(site, "max", x, dim, keep), site.emit(ArgReduce("argmax", axis_of(x, dim), keep), x)]


@imports("min.dim")
@along_an_axis
def min_axis(site: Site, x: Value, dim: int, keep: bool) -> list[Value]:
    return [_reduced(site, "min", x, dim, keep), site.emit(ArgReduce("argmin", axis_of(x, dim), keep), x)]


@imports("any")
def any_(site: Site, x: Value, dims: Axes = None, keep: bool = False) -> Value:
    return _reduced(site, "any", x, dims, keep)


@imports("all")
def all_(site: Site, x: Value, dims: Axes = None, keep: bool = False) -> Value:
    return _reduced(site, "all", x, dims, keep)


def _searched(site: Site, function: str, x: Value, dim: int | None, keep: bool) -> Value:
    if dim is None:
        flat = site.reshape(x, (x.type.elements,))
        return site.reshape(site.emit(ArgReduce(function, 0, False), flat), site.result.shape)
    return site.emit(ArgReduce(function, axis_of(x, dim), keep), x)


@imports("argmax")
@along_an_axis
def argmax(site: Site, x: Value, dim: int | None, keep: bool) -> Value:
    return _searched(site, "argmax", x, dim, keep)


@imports("argmin")
@along_an_axis
def argmin(site: Site, x: Value, dim: int | None, keep: bool) -> Value:
    return _searched(site, "argmin", x, dim, keep)


@imports("var.correction")
def variance(site: Site, x: Value, dims: Axes, correction: float | None, keep: bool) -> Value:
    centred = site.binary("subtract", x, _reduced(site, "mean", x, dims, True))
    total = _reduced(site, "sum", site.binary("multiply", centred, centred), dims, keep)
    count = 1
    for axis in axes_of(x, dims):
        count *= x.type.shape[axis]
    return site.binary("divide", total, max(float(count - (1 if correction is None else correction)), 0.0))


@imports("cumsum")
@along_an_axis
def cumsum(site: Site, x: Value, dim: int, *_: Any) -> Value:
    return site.emit(Cumulate("cumsum", axis_of(x, dim)), site.cast(x, site.result.dtype))


@imports("cumprod")
@along_an_axis
def cumprod(site: Site, x: Value, dim: int, *_: Any) -> Value:
    return site.emit(Cumulate("cumprod", axis_of(x, dim)), site.cast(x, site.result.dtype))


def _ordered(site: Site, x: Value, dim: int, descending: bool) -> list[Value]:
    axis = axis_of(x, dim)
    order = site.emit(ArgSort(axis, descending), x)
    return [site.emit(TakeAlong(axis), x, order), order]


@imports("sort.default")
@along_an_axis
def sort(site: Site, x: Value, dim: int, descending: bool) -> list[Value]:
    return _ordered(site, x, dim, descending)


@imports("sort.stable")
@along_an_axis
def sort_stable(site: Site, x: Value, stable: bool | None, dim: int, descending: bool) -> list[Value]:
    return _ordered(site, x, dim, descending)


@imports("argsort.default")
@along_an_axis
def argsort(site: Site, x: Value, dim: int, descending: bool) -> Value:
    return site.emit(ArgSort(axis_of(x, dim), descending), x)


@imports("topk")
@along_an_axis
def topk(site: Site, x: Value, k: int, dim: int, largest: bool, ordered: bool) -> list[Value]:
    """The head of the sorted axis, which is also right when the caller does not ask for order."""
    axis = axis_of(x, dim)
    return [site.slice(part, axis, 0, k) for part in _ordered(site, x, axis, largest)]


@imports("var_mean.correction")
def variance_and_mean(site: Site, x: Value, dims: Axes, correction: float | None, keep: bool) -> list[Value]:
    return [variance(site, x, dims, correction, keep), _reduced(site, "mean", x, dims, keep)]


@imports("std.correction")
def deviation(site: Site, x: Value, dims: Axes, correction: float | None, keep: bool) -> Value:
    return site.unary("sqrt", variance(site, x, dims, correction, keep))


@imports("linalg_vector_norm")
def vector_norm(site: Site, x: Value, order: float, dims: Axes, keep: bool, *_: Any) -> Value:
    size = site.unary("abs", site.cast(x, DType.FLOAT32))
    if math.isinf(order):
        return _reduced(site, "max" if order > 0 else "min", size, dims, keep)
    if order == 0:
        return _reduced(site, "sum", site.cast(site.binary("not_equal", size, 0), DType.FLOAT32), dims, keep)
    if order == 2:
        return site.unary("sqrt", _reduced(site, "sum", site.binary("multiply", size, size), dims, keep))
    powers = site.binary("power", size, float(order))
    return site.binary("power", _reduced(site, "sum", powers, dims, keep), 1 / order)


@imports("logsumexp")
def logsumexp(site: Site, x: Value, dims: Axes, keep: bool) -> Value:
    wide = site.cast(x, DType.FLOAT32)
    highest = _reduced(site, "max", wide, dims, True)
    # An infinite largest element stays outside, because the difference of infinities is not a number.
    highest = site.emit(Where(), site.unary("isfinite", highest), highest, site.value(0.0))
    total = _reduced(site, "sum", site.unary("exp", site.binary("subtract", wide, highest)), dims, keep)
    return site.binary("add", site.unary("log", total), site.reshape(highest, total.type.shape))


def _running_extreme(site: Site, function: str, x: Value, axis: int) -> list[Value]:
    """With the place where each extreme was seen last: the largest number of a place that equals it."""
    extremes = site.emit(Cumulate(function, axis), x)
    size, after = x.type.shape[axis], x.type.rank - axis - 1
    places = site.reshape(site.emit(Iota(size, 0, 1, DType.INT64)), (size, *[1] * after))
    seen = site.binary("equal", x, extremes)
    if x.type.dtype.is_float:
        seen = site.binary("or", seen, site.unary("isnan", x))
    return [extremes, site.emit(Cumulate("cummax", axis), site.emit(Where(), seen, places, site.value(0)))]


@imports("cummax")
@along_an_axis
def cummax(site: Site, x: Value, dim: int) -> list[Value]:
    return _running_extreme(site, "cummax", x, axis_of(x, dim))


@imports("cummin")
@along_an_axis
def cummin(site: Site, x: Value, dim: int) -> list[Value]:
    return _running_extreme(site, "cummin", x, axis_of(x, dim))


@imports("_is_all_true")
def is_all_true(site: Site, x: Value) -> Value:
    return _reduced(site, "all", x)


@imports("_is_any_true")
def is_any_true(site: Site, x: Value) -> Value:
    return _reduced(site, "any", x)


@imports("argsort.stable")
@along_an_axis
def argsort_stable(site: Site, x: Value, stable: bool, dim: int, descending: bool) -> Value:
    return site.emit(ArgSort(axis_of(x, dim), descending), x)
