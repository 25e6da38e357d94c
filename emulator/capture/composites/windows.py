"""Windows over places: transposed convolutions, extremes with their positions, stretches of unequal length."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nxpipe.emulator.capture.site import NotExpressible, Site, given, require_room
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import (
    ArgReduce,
    Convolution,
    Flip,
    Gather,
    Index,
    Iota,
    MatMul,
    Pad,
    Reduce,
    ScatterAlong,
    Transpose,
)

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """How a window moves: on each place axis its stride, the padding before and after, and its dilation."""

    stride: Sizes
    before: Sizes
    after: Sizes
    dilation: Sizes


def transposed_convolution(
    site: Site, x: Value, weight: Value, bias: Value | None, geometry: Geometry, extra: Sizes, groups: int, out: DType
) -> Value:
    """As a plain convolution: zeros between the places of x, and the window turned around.

    The weight comes as [inputs, outputs of a group, window ...]; `geometry` is that of the convolution whose gradient
    this is, and `extra` adds places behind.
    """
    axes = len(geometry.stride)
    inputs, outputs, *window = weight.type.shape
    apart = site.reshape(weight, (groups, inputs // groups, outputs, *window))
    swapped = site.emit(Transpose((0, 2, 1, *range(3, 3 + axes))), apart)
    turned = site.emit(
        Flip(tuple(range(2, 2 + axes))), site.reshape(swapped, (groups * outputs, inputs // groups, *window))
    )
    for axis, step in enumerate(geometry.stride, 2):
        x = _spread(site, x, axis, step)
    reach = [apart * (length - 1) for apart, length in zip(geometry.dilation, window, strict=True)]
    before = tuple(r - b for r, b in zip(reach, geometry.before, strict=True))
    after = tuple(r - a + e for r, a, e in zip(reach, geometry.after, extra, strict=True))
    op = Convolution((1,) * axes, before, after, geometry.dilation, groups, out)
    return site.emit(op, *given([x, turned, bias]))


def _spread(site: Site, x: Value, axis: int, step: int) -> Value:
    """Zeros between neighbours on an axis."""
    if step == 1:
        return x
    shape = x.type.shape
    cells = site.reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    after = tuple(step - 1 if i == axis + 1 else 0 for i in range(cells.type.rank))
    padded = site.emit(Pad((0,) * len(after), after), cells, site.builder.scalar(0, x.type.dtype))
    length = max((shape[axis] - 1) * step + 1, 0)
    return site.slice(site.reshape(padded, (*shape[:axis], shape[axis] * step, *shape[axis + 1 :])), axis, 0, length)


def mixed(site: Site, x: Value, axis: int, shares: Array) -> Value:
    """Each new place of an axis as a mixture of the old ones: a product with a table [old, new] of their shares."""
    if x.type.rank == 1:
        return site.reshape(mixed(site, site.reshape(x, (1, x.type.elements)), 1, shares), (shares.shape[1],))
    order = list(range(x.type.rank))
    order[axis], order[-1] = order[-1], order[axis]
    turned = site.emit(Transpose(tuple(order)), x)
    product = site.emit(MatMul(x.type.dtype), turned, site.builder.constant(shares, x.type.dtype))
    return site.emit(Transpose(tuple(order)), product)


def sliding_places(sizes: Sequence[int], window: Sizes, geometry: Geometry, made: Sequence[int]) -> Array:
    """For each of the `made` places in a row, the flat places that its window sees; -1 for padding."""
    require_room((*window, *made))
    every = zip(window, geometry.stride, geometry.before, geometry.dilation, made, strict=True)
    axes = [
        np.arange(count)[:, None] * step - before + np.arange(length)[None, :] * apart
        for length, step, before, apart, count in every
    ]
    return _flat_places(sizes, axes)


def stretched_places(sizes: Sequence[int], made: Sequence[int]) -> Array:
    """The same for adaptive pooling: stretches of nearly equal length, short ones filled up with -1."""
    axes = []
    require_room((*made, *(-(-size // max(count, 1)) + 1 for size, count in zip(sizes, made, strict=True))))
    for size, count in zip(sizes, made, strict=True):
        starts, stops = np.arange(count) * size // count, -(-(np.arange(count) + 1) * size // count)
        seen = starts[:, None] + np.arange(np.max(stops - starts, initial=1))[None, :]
        axes.append(np.where(seen < stops[:, None], seen, -1))
    return _flat_places(sizes, axes)


def _flat_places(sizes: Sequence[int], axes: Sequence[Array]) -> Array:
    flat, inside = np.zeros((1, 1), np.int64), np.ones((1, 1), np.bool_)
    for size, seen in zip(sizes, axes, strict=True):
        fits = (seen >= 0) & (seen < size)
        places, taps = len(flat) * len(seen), flat.shape[1] * seen.shape[1]
        flat = (flat[:, None, :, None] * size + seen[None, :, None, :]).reshape(places, taps)
        inside = (inside[:, None, :, None] & fits[None, :, None, :]).reshape(places, taps)
    return np.where(inside, flat, -1)


def largest_of(site: Site, x: Value, places: Array, made: Sequence[int]) -> tuple[Value, Value]:
    """The largest element among those places for each row of a table, and the flat place where it stands first."""
    if (places < 0).all(axis=1).any():
        raise NotExpressible("a window lies in the padding alone, and has no element to choose from")
    axes = len(made)
    batch = x.type.shape[: x.type.rank - axes]
    # A place that does not exist repeats the window's first one, which changes neither the largest nor who is first.
    first = np.take_along_axis(places, (places >= 0).argmax(axis=1)[:, None], axis=1)
    table = site.builder.constant(np.where(places < 0, first, places), DType.INT64)
    flat = site.reshape(x, (*batch, math.prod(x.type.shape[x.type.rank - axes :])))
    seen = site.emit(Gather(len(batch)), flat, table)
    values = site.emit(Reduce("max", (len(batch) + 1,), False), seen)
    tap = site.emit(ArgReduce("argmax", len(batch) + 1, False), seen)
    place = site.emit(Index((0, 1)), table, site.emit(Iota(len(places), 0, 1, DType.INT64)), tap)
    return site.reshape(values, (*batch, *made)), site.reshape(place, (*batch, *made))


def put_back(site: Site, x: Value, places: Value, made: Sequence[int]) -> Value:
    """Each element at its flat place among zeros: what pooling with positions leaves behind, undone."""
    axes = len(made)
    batch = x.type.shape[: x.type.rank - axes]
    count = math.prod(x.type.shape[x.type.rank - axes :])
    zeros = site.filled(0, TensorType((*batch, math.prod(made)), x.type.dtype))
    op = ScatterAlong(len(batch), "")
    put = site.emit(op, zeros, site.reshape(x, (*batch, count)), site.reshape(places, (*batch, count)))
    return site.reshape(put, (*batch, *made))


def folded(site: Site, columns: Value, sizes: Sequence[int], window: Sizes, geometry: Geometry) -> Value:
    """Columns [batch, channels * window, places] of windows, each element added where it came from (col2im)."""
    ends = zip(sizes, window, geometry.stride, geometry.before, geometry.after, geometry.dilation, strict=True)
    made = [(s + b + a - (w - 1) * d - 1) // step + 1 for s, w, step, b, a, d in ends]
    places = sliding_places(sizes, window, geometry, made).T.reshape(-1)
    batch, area = columns.type.shape[0], math.prod(sizes)
    channels = columns.type.shape[1] // math.prod(window)
    flat = site.reshape(columns, (batch, channels, len(places)))
    # Padding is added up in a place behind the last, which is cut off.
    zeros = site.filled(0, TensorType((batch, channels, area + 1), columns.type.dtype))
    where = site.builder.constant(np.where(places < 0, area, places), DType.INT64)
    added = site.emit(ScatterAlong(2, "add"), zeros, flat, site.broadcast(where, flat.type.shape))
    return site.reshape(site.slice(added, 2, 0, area), (batch, channels, *sizes))


def continued(site: Site, x: Value, axis: int, before: int, after: int, mode: str) -> Value:
    """An axis made longer with its own elements, by numpy's name of the mode; negative paddings cut."""
    size = x.type.shape[axis]
    require_room((before + size + after,))
    places = np.arange(-before, size + after)
    if mode == "edge":
        places = np.clip(places, 0, size - 1)
    elif mode == "wrap":
        places %= size
    elif mode == "reflect":
        period = max(2 * (size - 1), 1)
        places = np.minimum(places % period, -places % period)
    else:
        raise NotExpressible(f"it pads by {mode}; use a constant, edge, reflect or wrap")
    return site.emit(Gather(axis), x, site.builder.constant(places, DType.INT64))
