"""Reads and writes at computed places."""

from collections.abc import Sequence
from typing import Any

from nxpipe.emulator.capture.aten.base import NotExpressible, Site, along_an_axis, axis_of, imports
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Gather, Index, IndexUpdate, Iota, Reduce, TakeAlong, Transpose, Where


@imports("embedding")
def embedding(site: Site, table: Value, indices: Value, *_: Any) -> Value:
    return site.emit(Gather(0), table, indices)


@imports("index_select")
@along_an_axis
def index_select(site: Site, x: Value, dim: int, indices: Value) -> Value:
    return site.emit(Gather(axis_of(x, dim)), x, indices)


@imports("gather")
@along_an_axis
def gather(site: Site, x: Value, dim: int, indices: Value, *_: Any) -> Value:
    if not site.result.elements:  # then their ranks need not even agree
        return site.filled(0, site.result)
    return site.emit(TakeAlong(axis_of(x, dim)), x, indices)


def _addressed(indices: Sequence[Value | None]) -> tuple[tuple[int, ...], list[Value]]:
    """The axes that have an index, and the indices; the other axes are taken whole."""
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(index.type.dtype is DType.BOOL for _, index in given):
        raise NotExpressible("the size of a boolean selection depends on data; use torch.where")
    return tuple(axis for axis, _ in given), [index for _, index in given]


@imports("index.Tensor", "_unsafe_index.Tensor")
def index(site: Site, x: Value, indices: Sequence[Value | None]) -> Value:
    axes, given = _addressed(indices)
    return site.emit(Index(axes), x, *given)


@imports("index_put", "_unsafe_index_put")
def index_put(site: Site, x: Value, indices: Sequence[Value | None], update: Value, accumulate: bool = False) -> Value:
    update = site.cast(update, x.type.dtype)
    masks = [index for index in indices if index is not None and index.type.dtype is DType.BOOL]
    if len(masks) == 1 == len(indices) and _fits_each(update, x.type.shape[masks[0].type.rank :]):
        return _put_where(site, x, masks[0], update, accumulate)
    axes, given = _addressed(indices)
    return site.emit(IndexUpdate(axes, "add" if accumulate else ""), x, update, *given)


def _put_where(site: Site, x: Value, mask: Value, update: Value, accumulate: bool) -> Value:
    """The same for all places that a mask of the leading axes chooses: the sizes do not depend on data."""
    rest = x.type.rank - mask.type.rank
    aligned = site.reshape(mask, mask.type.shape + (1,) * rest)
    each = site.reshape(update, update.type.shape[max(update.type.rank - rest, 0) :])
    return site.emit(Where(), aligned, site.binary("add", x, each) if accumulate else each, x)


def _fits_each(update: Value, place: Sequence[int]) -> bool:
    """Whether an update holds no more than one place, which it then is for all of them."""
    apart = max(update.type.rank - len(place), 0)
    return all(size == 1 for size in update.type.shape[:apart])


@imports("index_copy")
@along_an_axis
def index_copy(site: Site, x: Value, dim: int, indices: Value, update: Value) -> Value:
    return site.emit(IndexUpdate((axis_of(x, dim),), ""), x, update, indices)


@imports("index_add")
@along_an_axis
def index_add(site: Site, x: Value, dim: int, indices: Value, update: Value, alpha: float) -> Value:
    scaled = update if alpha == 1 else site.binary("multiply", update, alpha)
    return site.emit(IndexUpdate((axis_of(x, dim),), "add"), x, scaled, indices)


@imports("diagonal")
def diagonal(site: Site, x: Value, offset: int, first: int, second: int) -> Value:
    """Both axes counted at once; the diagonal becomes the last axis."""
    a, b = axis_of(x, first), axis_of(x, second)
    length = site.result.shape[-1]
    rows = site.emit(Iota(length, max(-offset, 0), 1, DType.INT64))
    columns = site.emit(Iota(length, max(offset, 0), 1, DType.INT64))
    rest = [axis for axis in range(x.type.rank) if axis not in (a, b)]
    last = site.emit(Transpose((*rest, a, b)), x)
    return site.emit(Index((len(rest), len(rest) + 1)), last, rows, columns)


@imports("bucketize.Tensor")
def bucketize(site: Site, x: Value, edges: Value, narrow: bool, right: bool) -> Value:
    """How many edges lie before each element."""
    apart = site.reshape(x, (*x.type.shape, 1))
    before = site.binary("greater_equal" if right else "greater", apart, edges)
    return site.cast(site.emit(Reduce("sum", (x.type.rank,), False), before), site.result.dtype)


@imports("histc")
def histc(site: Site, x: Value, bins: int, low: Value | float, high: Value | float) -> Value:
    """How many elements fall into each of equally wide bins; the last one is closed on both sides."""
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
    """The extremes of the data; a little more than that where all elements are equal."""
    low, high = (site.emit(Reduce(extreme, (0, 1), False), x) for extreme in ("min", "max"))
    margin = site.cast(site.binary("equal", low, high), x.type.dtype)
    return site.binary("subtract", low, margin), site.binary("add", high, margin)


@imports("one_hot")
def one_hot(site: Site, x: Value, classes: int = -1) -> Value:
    apart = site.reshape(x, (*x.type.shape, 1))
    return site.cast(
        site.binary("equal", apart, site.emit(Iota(site.result.shape[-1], 0, 1, DType.INT64))), DType.INT64
    )
