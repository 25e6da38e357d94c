"""Composite operators that the ATen and ONNX importers share: einsum, grid sampling, resize tables, pooling.

They are written as several operators of the graph IR, since neither the graph nor the hardware has one for them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from nxpipe.emulator.capture.site import NotExpressible, Site, present, require_table_fits
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
    TakeAlong,
    Transpose,
    Where,
)

_MOST_TERMS = 64  # of Einstein's notation: what remains of the names is looked through for each of them


def matrix_product(site: Site, a: Value, b: Value, out: DType) -> Value:
    """The tensor engine multiplies floats; integers are multiplied and added up by the general engine, exactly."""
    if a.type.dtype.is_float:
        return site.emit(MatMul(out), a, b)
    rows = site.reshape(a, (*a.type.shape, 1))
    columns = site.reshape(b, (*b.type.shape[:-2], 1, *b.type.shape[-2:]))
    terms = site.binary("multiply", rows, columns)
    return site.cast(site.emit(Reduce("sum", (terms.type.rank - 2,), False), terms), out)


def vector_product(site: Site, a: Value, b: Value, out: DType) -> Value:
    """A vector on the left is a row, on the right a column; the result forgets them."""
    row = a if a.type.rank > 1 else site.reshape(a, (1, *a.type.shape))
    column = b if b.type.rank > 1 else site.reshape(b, (*b.type.shape, 1))
    product = matrix_product(site, row, column, out)
    *batch, rows, columns = product.type.shape
    return site.reshape(product, (*batch, *(() if a.type.rank == 1 else (rows,)), *([columns] * (b.type.rank > 1))))


def einsum(site: Site, equation: str, operands: Sequence[Value], out: DType) -> Value:
    """Einstein's notation, from left to right, each two operands by one product of matrices."""
    if len(operands) > _MOST_TERMS:
        raise NotExpressible(f"it multiplies {len(operands):,} tensors, and the limit is {_MOST_TERMS}; use MatMul")
    terms, result = _labelled(equation, operands)
    waiting = [_diagonal(site, operand, term) for operand, term in zip(operands, terms, strict=True)]
    value, labels = waiting.pop(0)
    while waiting:
        other, names = waiting.pop(0)
        kept = {*result, *(name for _, later in waiting for name in later)}
        value, labels = _contracted(site, (value, labels), (other, names), kept, out)
    value, labels = _summed(site, value, labels, set(result))
    return site.cast(site.emit(Transpose(tuple(labels.index(name) for name in result)), value), out)


Labelled = tuple[Value, list[str]]


def _labelled(equation: str, operands: Sequence[Value]) -> tuple[list[list[str]], list[str]]:
    """A name for each axis. What an ellipsis stands for is named by numbers, counted from the end."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_names(term, operand.type.rank) for term, operand in zip(left.split(","), operands, strict=True)]
    every = [name for term in terms for name in term]
    numbered = sorted({name for name in every if name.isdigit()}, key=int, reverse=True)
    if arrow:
        before, dots, after = right.partition("...")
        return terms, [*before, *(numbered if dots else ()), *after]
    return terms, [*numbered, *sorted(name for name in set(every) if every.count(name) == 1 and not name.isdigit())]


def _names(term: str, rank: int) -> list[str]:
    before, dots, after = term.partition("...")
    missing = rank - len(before) - len(after)
    if missing < 0 or (missing and not dots):
        raise NotExpressible(f"its term {term!r} does not name the {rank} axes of its operand")
    return [*before, *(str(number) for number in reversed(range(missing))), *after]


def _diagonal(site: Site, x: Value, names: list[str]) -> Labelled:
    """A name that an operand has twice asks for its diagonal."""
    for name in names:
        if names.count(name) > 1:
            first, second = [axis for axis, other in enumerate(names) if other == name][:2]
            rest = [axis for axis in range(x.type.rank) if axis not in (first, second)]
            count = site.emit(Iota(x.type.shape[first], 0, 1, DType.INT64))
            last = site.emit(Transpose((*rest, first, second)), x)
            picked = site.emit(Index((len(rest), len(rest) + 1)), last, count, count)
            return _diagonal(site, picked, [*(names[axis] for axis in rest), name])
    return x, names


def _summed(site: Site, x: Value, names: list[str], kept: set[str]) -> Labelled:
    gone = tuple(axis for axis, name in enumerate(names) if name not in kept)
    return (site.emit(Reduce("sum", gone, False), x) if gone else x), [name for name in names if name in kept]


def _contracted(site: Site, left: Labelled, right: Labelled, kept: set[str], out: DType) -> Labelled:
    """Names that both have stay in front if they are kept, and are multiplied away if not."""
    a, of_a = _summed(site, *left, kept | set(right[1]))
    b, of_b = _summed(site, *right, kept | set(left[1]))
    shared = [name for name in of_a if name in of_b]
    batch, inner = [n for n in shared if n in kept], [n for n in shared if n not in kept]
    rows, columns = [n for n in of_a if n not in shared], [n for n in of_b if n not in shared]
    sizes = {n: max(x.type.shape[of.index(n)] for x, of in ((a, of_a), (b, of_b)) if n in of) for n in (*of_a, *of_b)}

    def laid_out(x: Value, of: list[str], first: list[str], second: list[str]) -> Value:
        turned = site.emit(Transpose(tuple(of.index(name) for name in (*batch, *first, *second))), x)
        whole = site.broadcast(turned, [sizes[name] for name in (*batch, *first, *second)])
        matrix = (math.prod(sizes[n] for n in first), math.prod(sizes[n] for n in second))
        return site.reshape(whole, (*(sizes[n] for n in batch), *matrix))

    product = matrix_product(site, laid_out(a, of_a, rows, inner), laid_out(b, of_b, inner, columns), out)
    names = [*batch, *rows, *columns]
    return site.reshape(product, [sizes[name] for name in names]), names


def antialias_weights(old: int, places: Array, stretch: float, *, cubic: float | None, beyond: bool) -> Array:
    """With antialiasing a new place mixes more neighbours the more the axis shrinks.

    `places` are those of the new elements on the old axis, `stretch` how far apart they are, and `cubic` the constant
    of Keys' kernel, where it is not a triangle. Neighbours beyond the border count as the border, or not at all.
    """
    wide = max(stretch, 1.0)
    margin = math.ceil(2 * wide) + 1 if beyond else 0
    require_table_fits((old + 2 * margin, len(places)))
    near = np.arange(-margin, old + margin)
    distance = np.abs((near[:, None] - places[None, :]) / wide)
    shares = _triangle(distance) if cubic is None else _keys(distance, cubic)
    folded = np.zeros((old, len(places)))
    np.add.at(folded, np.clip(near, 0, old - 1), shares / shares.sum(axis=0))
    return np.asarray(folded, np.float32)


def _triangle(d: Array) -> Array:
    return np.asarray(np.maximum(1 - d, 0))


def _keys(d: Array, a: float) -> Array:
    inner = ((a + 2) * d - (a + 3)) * d * d + 1
    outer = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.asarray(np.where(d <= 1, inner, np.where(d < 2, outer, 0)))


_CUBIC = -0.75  # the constant of Keys' convolution


def sample_grid(site: Site, x: Value, grid: Value, mode: str, padding: str, aligned: bool) -> Value:
    """x [batch, channels, place ...] at the points of grid [batch, place ..., axes], which reach from -1 to 1.

    `mode` is nearest, linear or cubic; beyond the border lie zeros, the border's own elements, or mirror images.
    A point names the last axis first.
    """
    (batch, channels, *sizes), made = x.type.shape, grid.type.shape[1:-1]
    points = site.reshape(site.cast(grid, DType.FLOAT32), (batch, math.prod(made), len(sizes)))
    axes = []
    for number, size in enumerate(sizes):
        column = site.slice(points, 2, len(sizes) - 1 - number, len(sizes) - number)
        place = _place(site, site.reshape(column, (batch, 1, math.prod(made))), size, aligned)
        axes.append(_neighbours(site, place, size, mode, padding, aligned))
    flat = site.reshape(x, (batch, channels, math.prod(sizes)))
    total: Value | None = None
    for corner in product(*axes):
        term = _corner(site, flat, corner, sizes)
        total = term if total is None else site.binary("add", total, term)
    assert total is not None
    return site.cast(site.reshape(total, (batch, channels, *made)), x.type.dtype)


_Neighbour = tuple[Value, Value]  # its number on an axis, and its share


def _corner(site: Site, flat: Value, corner: tuple[_Neighbour, ...], sizes: list[int]) -> Value:
    """One neighbour of each point, its numbers on all axes made one, its shares multiplied."""
    (place, share), *others = corner
    for (number, part), size in zip(others, sizes[1:], strict=True):
        place = site.binary("add", site.binary("multiply", place, size), number)
        share = site.binary("multiply", share, part)
    where = site.broadcast(place, (*flat.type.shape[:2], place.type.shape[2]))
    return site.binary("multiply", site.emit(TakeAlong(2), flat, where), share)


def _place(site: Site, point: Value, size: int, aligned: bool) -> Value:
    """From -1 to 1 means from the first to the last element, or from edge to edge of these."""
    span, start = (size - 1, 0.0) if aligned else (size, -0.5)
    half = site.binary("multiply", site.binary("add", point, 1.0), span / 2)
    return site.binary("add", half, start)


def _neighbours(site: Site, place: Value, size: int, mode: str, padding: str, aligned: bool) -> list[_Neighbour]:
    if mode == "cubic":  # each neighbour finds its own way back inside
        base = site.unary("floor", place)
        shares = _cubic_shares(site, site.binary("subtract", place, base))
        near = [site.binary("add", base, float(offset)) for offset in (-1, 0, 1, 2)]
        places = [_brought_inside(site, one, size, padding, aligned) for one in near]
    else:
        place = _brought_inside(site, place, size, padding, aligned)
        if mode == "nearest":
            places, shares = [site.unary("round", place)], [site.value(1.0)]
        else:
            base = site.unary("floor", place)
            after = site.binary("subtract", place, base)
            places, shares = [base, site.binary("add", base, 1.0)], [site.binary("subtract", 1.0, after), after]
    return [_numbered(site, place, share, size) for place, share in zip(places, shares, strict=True)]


def _numbered(site: Site, place: Value, share: Value, size: int) -> _Neighbour:
    """What still lies outside counts nothing."""
    inside = site.binary("and", site.binary("greater_equal", place, 0.0), site.binary("less", place, float(size)))
    number = site.cast(_clipped(site, place, size), DType.INT64)
    return number, site.emit(Where(), inside, share, site.value(0.0))


def _clipped(site: Site, place: Value, size: int) -> Value:
    return site.binary("minimum", site.binary("maximum", place, 0.0), float(size - 1))


def _brought_inside(site: Site, place: Value, size: int, padding: str, aligned: bool) -> Value:
    if padding == "zeros":
        return place
    if padding == "reflection":
        start, span = (0.0, float(size - 1)) if aligned else (-0.5, float(size))
        if span:
            there_and_back = site.binary("remainder", site.binary("subtract", place, start), 2 * span)
            mirrored = site.binary("subtract", 2 * span, there_and_back)
            place = site.binary("add", site.binary("minimum", there_and_back, mirrored), start)
    return _clipped(site, place, size)


def _cubic_shares(site: Site, f: Value) -> list[Value]:
    a = _CUBIC

    def polynomial(d: Value, *coefficients: float) -> Value:
        total = site.value(coefficients[0])
        for coefficient in coefficients[1:]:
            total = site.binary("add", site.binary("multiply", total, d), coefficient)
        return total

    def inner(d: Value) -> Value:
        return polynomial(d, a + 2, -(a + 3), 0.0, 1.0)

    def outer(d: Value) -> Value:
        return polynomial(d, a, -5 * a, 8 * a, -4 * a)

    rest = site.binary("subtract", 1.0, f)
    return [outer(site.binary("add", f, 1.0)), inner(f), inner(rest), outer(site.binary("add", rest, 1.0))]


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
    return site.emit(op, *present([x, turned, bias]))


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


def multiply_axis(site: Site, x: Value, axis: int, shares: Array) -> Value:
    """Each new place of an axis as a mixture of the old ones: a product with a table [old, new] of their shares."""
    if x.type.rank == 1:
        return site.reshape(multiply_axis(site, site.reshape(x, (1, x.type.elements)), 1, shares), (shares.shape[1],))
    order = list(range(x.type.rank))
    order[axis], order[-1] = order[-1], order[axis]
    turned = site.emit(Transpose(tuple(order)), x)
    product = site.emit(MatMul(x.type.dtype), turned, site.builder.constant(shares, x.type.dtype))
    return site.emit(Transpose(tuple(order)), product)


def window_positions(sizes: Sequence[int], window: Sizes, geometry: Geometry, made: Sequence[int]) -> Array:
    """For each of the `made` places in a row, the flat places that its window sees; -1 for padding."""
    require_table_fits((*window, *made))
    every = zip(window, geometry.stride, geometry.before, geometry.dilation, made, strict=True)
    axes = [
        np.arange(count)[:, None] * step - before + np.arange(length)[None, :] * apart
        for length, step, before, apart, count in every
    ]
    return _flat_places(sizes, axes)


def adaptive_window_positions(sizes: Sequence[int], made: Sequence[int]) -> Array:
    """The same for adaptive pooling: stretches of nearly equal length, short ones filled up with -1."""
    axes = []
    require_table_fits((*made, *(-(-size // max(count, 1)) + 1 for size, count in zip(sizes, made, strict=True))))
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


def window_maximum(site: Site, x: Value, places: Array, made: Sequence[int]) -> tuple[Value, Value]:
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


def unpool(site: Site, x: Value, places: Value, made: Sequence[int]) -> Value:
    """Each element at its flat place among zeros: what pooling with positions leaves behind, undone."""
    axes = len(made)
    batch = x.type.shape[: x.type.rank - axes]
    count = math.prod(x.type.shape[x.type.rank - axes :])
    zeros = site.filled(0, TensorType((*batch, math.prod(made)), x.type.dtype))
    op = ScatterAlong(len(batch), "")
    put = site.emit(op, zeros, site.reshape(x, (*batch, count)), site.reshape(places, (*batch, count)))
    return site.reshape(put, (*batch, *made))


def column_to_image(site: Site, columns: Value, sizes: Sequence[int], window: Sizes, geometry: Geometry) -> Value:
    """Columns [batch, channels * window, places] of windows, each element added where it came from (col2im)."""
    ends = zip(sizes, window, geometry.stride, geometry.before, geometry.after, geometry.dilation, strict=True)
    made = [(s + b + a - (w - 1) * d - 1) // step + 1 for s, w, step, b, a, d in ends]
    places = window_positions(sizes, window, geometry, made).T.reshape(-1)
    batch, area = columns.type.shape[0], math.prod(sizes)
    channels = columns.type.shape[1] // math.prod(window)
    flat = site.reshape(columns, (batch, channels, len(places)))
    # Padding is added up in a place behind the last, which is cut off.
    zeros = site.filled(0, TensorType((batch, channels, area + 1), columns.type.dtype))
    where = site.builder.constant(np.where(places < 0, area, places), DType.INT64)
    added = site.emit(ScatterAlong(2, "add"), zeros, flat, site.broadcast(where, flat.type.shape))
    return site.reshape(site.slice(added, 2, 0, area), (batch, channels, *sizes))


def extend_axis(site: Site, x: Value, axis: int, before: int, after: int, mode: str) -> Value:
    """An axis made longer with its own elements, by numpy's name of the mode; negative paddings cut."""
    size = x.type.shape[axis]
    require_table_fits((before + size + after,))
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
