"""Composite operators of the ATen and ONNX importers: einsum, grid sampling, resize tables, pooling.

Each is decomposed into several operators of the graph IR, which has no single operator for it.
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

_MOST_TERMS = 64  # of an einsum: each contraction scans the remaining labels


def matrix_product(site: Site, a: Value, b: Value, out: DType) -> Value:
    """A matmul on the tensor engine for floats; for integers an exact product and sum on the general engine."""
    if a.type.dtype.is_float:
        return site.emit(MatMul(out), a, b)
    rows = site.reshape(a, (*a.type.shape, 1))
    columns = site.reshape(b, (*b.type.shape[:-2], 1, *b.type.shape[-2:]))
    terms = site.binary("multiply", rows, columns)
    return site.cast(site.emit(Reduce("sum", (terms.type.rank - 2,), False), terms), out)


def vector_product(site: Site, a: Value, b: Value, out: DType) -> Value:
    """`torch.matmul`: a vector on the left is a row, on the right a column; the result drops that axis."""
    row = a if a.type.rank > 1 else site.reshape(a, (1, *a.type.shape))
    column = b if b.type.rank > 1 else site.reshape(b, (*b.type.shape, 1))
    product = matrix_product(site, row, column, out)
    *batch, rows, columns = product.type.shape
    return site.reshape(product, (*batch, *(() if a.type.rank == 1 else (rows,)), *([columns] * (b.type.rank > 1))))


def einsum(site: Site, equation: str, operands: Sequence[Value], out: DType) -> Value:
    """Einsum, contracted from left to right by one matmul for each pair of operands."""
    if len(operands) > _MOST_TERMS:
        raise NotExpressible(f"it multiplies {len(operands):,} tensors, and the limit is {_MOST_TERMS}; use MatMul")
    terms, result = _labelled(equation, operands)
    remaining = [_diagonal(site, operand, term) for operand, term in zip(operands, terms, strict=True)]
    value, labels = remaining.pop(0)
    while remaining:
        other, names = remaining.pop(0)
        kept = {*result, *(name for _, later in remaining for name in later)}
        value, labels = _contracted(site, (value, labels), (other, names), kept, out)
    value, labels = _summed(site, value, labels, set(result))
    return site.cast(site.emit(Transpose(tuple(labels.index(name) for name in result)), value), out)


Labelled = tuple[Value, list[str]]


def _labelled(equation: str, operands: Sequence[Value]) -> tuple[list[list[str]], list[str]]:
    """A label for each axis. Axes of an ellipsis are labelled by numbers, counted from the end."""
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
    """The diagonal of axes with the same label."""
    for name in names:
        if names.count(name) > 1:
            first, second = [axis for axis, other in enumerate(names) if other == name][:2]
            others = [axis for axis in range(x.type.rank) if axis not in (first, second)]
            count = site.emit(Iota(x.type.shape[first], 0, 1, DType.INT64))
            last = site.emit(Transpose((*others, first, second)), x)
            picked = site.emit(Index((len(others), len(others) + 1)), last, count, count)
            return _diagonal(site, picked, [*(names[axis] for axis in others), name])
    return x, names


def _summed(site: Site, x: Value, names: list[str], kept: set[str]) -> Labelled:
    """The sum over axes whose labels are not kept."""
    reduced = tuple(axis for axis, name in enumerate(names) if name not in kept)
    return (site.emit(Reduce("sum", reduced, False), x) if reduced else x), [name for name in names if name in kept]


def _contracted(site: Site, left: Labelled, right: Labelled, kept: set[str], out: DType) -> Labelled:
    """One pair as a matmul: shared labels are batch axes if they are kept, and contracted otherwise."""
    a, of_a = _summed(site, *left, kept | set(right[1]))
    b, of_b = _summed(site, *right, kept | set(left[1]))
    shared = [name for name in of_a if name in of_b]
    batch, inner = [n for n in shared if n in kept], [n for n in shared if n not in kept]
    rows, columns = [n for n in of_a if n not in shared], [n for n in of_b if n not in shared]
    sizes = {n: max(x.type.shape[of.index(n)] for x, of in ((a, of_a), (b, of_b)) if n in of) for n in (*of_a, *of_b)}

    def laid_out(x: Value, of: list[str], first: list[str], second: list[str]) -> Value:
        transposed = site.emit(Transpose(tuple(of.index(name) for name in (*batch, *first, *second))), x)
        whole = site.broadcast(transposed, [sizes[name] for name in (*batch, *first, *second)])
        matrix = (math.prod(sizes[n] for n in first), math.prod(sizes[n] for n in second))
        return site.reshape(whole, (*(sizes[n] for n in batch), *matrix))

    product = matrix_product(site, laid_out(a, of_a, rows, inner), laid_out(b, of_b, inner, columns), out)
    names = [*batch, *rows, *columns]
    return site.reshape(product, [sizes[name] for name in names]), names


def antialias_weights(old: int, positions: Array, stretch: float, *, cubic: float | None, repeat_border: bool) -> Array:
    """The weight table [old, new] of an antialiased resize, whose kernel widens as the axis shrinks.

    `positions` are the positions of the new elements on the old axis, `stretch` their distance, and `cubic` the
    constant of Keys' kernel; None selects the triangle kernel. With `repeat_border`, neighbours outside repeat the
    border; otherwise they are left out.
    """
    wide = max(stretch, 1.0)
    margin = math.ceil(2 * wide) + 1 if repeat_border else 0
    require_table_fits((old + 2 * margin, len(positions)))
    near = np.arange(-margin, old + margin)
    distance = np.abs((near[:, None] - positions[None, :]) / wide)
    weights = _triangle(distance) if cubic is None else _keys(distance, cubic)
    folded = np.zeros((old, len(positions)))
    np.add.at(folded, np.clip(near, 0, old - 1), weights / weights.sum(axis=0))
    return np.asarray(folded, np.float32)


def _triangle(d: Array) -> Array:
    """The kernel of linear interpolation, at distance d."""
    return np.asarray(np.maximum(1 - d, 0))


def _keys(d: Array, a: float) -> Array:
    """Keys' cubic convolution kernel, at distance d."""
    inner = ((a + 2) * d - (a + 3)) * d * d + 1
    outer = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.asarray(np.where(d <= 1, inner, np.where(d < 2, outer, 0)))


_CUBIC = -0.75  # the constant of Keys' convolution


def sample_grid(site: Site, x: Value, grid: Value, mode: str, padding: str, align_corners: bool) -> Value:
    """Grid sampling: x [batch, channels, spatial ...] at the points of grid [batch, spatial ..., axes] in [-1, 1].

    `mode` is nearest, linear or cubic; `padding` is zeros, border or reflection. A point has the coordinate of the last
    axis first.
    """
    (batch, channels, *sizes), out_sizes = x.type.shape, grid.type.shape[1:-1]
    points = site.reshape(site.cast(grid, DType.FLOAT32), (batch, math.prod(out_sizes), len(sizes)))
    axes = []
    for number, size in enumerate(sizes):
        column = site.slice(points, 2, len(sizes) - 1 - number, len(sizes) - number)
        position = _place(site, site.reshape(column, (batch, 1, math.prod(out_sizes))), size, align_corners)
        axes.append(_neighbours(site, position, size, mode, padding, align_corners))
    flat = site.reshape(x, (batch, channels, math.prod(sizes)))
    total: Value | None = None
    for corner in product(*axes):
        term = _corner(site, flat, corner, sizes)
        total = term if total is None else site.binary("add", total, term)
    assert total is not None
    return site.cast(site.reshape(total, (batch, channels, *out_sizes)), x.type.dtype)


_Neighbour = tuple[Value, Value]  # its index on an axis, and its weight


def _corner(site: Site, flat: Value, corner: tuple[_Neighbour, ...], sizes: list[int]) -> Value:
    """The contribution of one neighbour of each point: the element at its flat index, times its weights on all axes."""
    (position, weight), *others = corner
    for (number, part), size in zip(others, sizes[1:], strict=True):
        position = site.binary("add", site.binary("multiply", position, size), number)
        weight = site.binary("multiply", weight, part)
    where = site.broadcast(position, (*flat.type.shape[:2], position.type.shape[2]))
    return site.binary("multiply", site.emit(TakeAlong(2), flat, where), weight)


def _place(site: Site, point: Value, size: int, align_corners: bool) -> Value:
    """A coordinate in [-1, 1] as a position: from the first to the last element (`align_corners`), or from edge to
    edge."""
    span, start = (size - 1, 0.0) if align_corners else (size, -0.5)
    half = site.binary("multiply", site.binary("add", point, 1.0), span / 2)
    return site.binary("add", half, start)


def _neighbours(
    site: Site, position: Value, size: int, mode: str, padding: str, align_corners: bool
) -> list[_Neighbour]:
    if mode == "cubic":  # padding applies to each neighbour
        base = site.unary("floor", position)
        weights = _cubic_shares(site, site.binary("subtract", position, base))
        near = [site.binary("add", base, float(offset)) for offset in (-1, 0, 1, 2)]
        positions = [_pad_position(site, neighbour, size, padding, align_corners) for neighbour in near]
    else:
        position = _pad_position(site, position, size, padding, align_corners)
        if mode == "nearest":
            positions, weights = [site.unary("round", position)], [site.value(1.0)]
        else:
            base = site.unary("floor", position)
            after = site.binary("subtract", position, base)
            positions, weights = [base, site.binary("add", base, 1.0)], [site.binary("subtract", 1.0, after), after]
    return [_numbered(site, position, weight, size) for position, weight in zip(positions, weights, strict=True)]


def _numbered(site: Site, position: Value, weight: Value, size: int) -> _Neighbour:
    """The index of a neighbour and its weight, which is zero outside of the axis."""
    inside = site.binary("and", site.binary("greater_equal", position, 0.0), site.binary("less", position, float(size)))
    number = site.cast(_clipped(site, position, size), DType.INT64)
    return number, site.emit(Where(), inside, weight, site.value(0.0))


def _clipped(site: Site, position: Value, size: int) -> Value:
    return site.binary("minimum", site.binary("maximum", position, 0.0), float(size - 1))


def _pad_position(site: Site, position: Value, size: int, padding: str, align_corners: bool) -> Value:
    if padding == "zeros":
        return position
    if padding == "reflection":
        start, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
        if span:
            phase = site.binary("remainder", site.binary("subtract", position, start), 2 * span)
            mirrored = site.binary("subtract", 2 * span, phase)
            position = site.binary("add", site.binary("minimum", phase, mirrored), start)
    return _clipped(site, position, size)


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

    g = site.binary("subtract", 1.0, f)
    return [outer(site.binary("add", f, 1.0)), inner(f), inner(g), outer(site.binary("add", g, 1.0))]


Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """A convolution's or pooling's stride, padding before and after, and dilation, for each spatial axis."""

    stride: Sizes
    before: Sizes
    after: Sizes
    dilation: Sizes


def transposed_convolution(
    site: Site, x: Value, weight: Value, bias: Value | None, geometry: Geometry, extra: Sizes, groups: int, out: DType
) -> Value:
    """A transposed convolution as a convolution of x, dilated with zeros, with the flipped window.

    The weight is [inputs, outputs of a group, window ...]; `geometry` is that of the convolution whose gradient this
    is, and `extra` is the output padding.
    """
    axes = len(geometry.stride)
    inputs, outputs, *window = weight.type.shape
    grouped = site.reshape(weight, (groups, inputs // groups, outputs, *window))
    swapped = site.emit(Transpose((0, 2, 1, *range(3, 3 + axes))), grouped)
    flipped = site.emit(
        Flip(tuple(range(2, 2 + axes))), site.reshape(swapped, (groups * outputs, inputs // groups, *window))
    )
    for axis, step in enumerate(geometry.stride, 2):
        x = _spread(site, x, axis, step)
    reach = [dilation * (length - 1) for dilation, length in zip(geometry.dilation, window, strict=True)]
    before = tuple(r - b for r, b in zip(reach, geometry.before, strict=True))
    after = tuple(r - a + e for r, a, e in zip(reach, geometry.after, extra, strict=True))
    op = Convolution((1,) * axes, before, after, geometry.dilation, groups, out)
    return site.emit(op, *present([x, flipped, bias]))


def _spread(site: Site, x: Value, axis: int, step: int) -> Value:
    """Insert step - 1 zeros between neighbours on an axis."""
    if step == 1:
        return x
    shape = x.type.shape
    cells = site.reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    after = tuple(step - 1 if i == axis + 1 else 0 for i in range(cells.type.rank))
    padded = site.emit(Pad((0,) * len(after), after), cells, site.builder.scalar(0, x.type.dtype))
    length = max((shape[axis] - 1) * step + 1, 0)
    return site.slice(site.reshape(padded, (*shape[:axis], shape[axis] * step, *shape[axis + 1 :])), axis, 0, length)


def multiply_axis(site: Site, x: Value, axis: int, weights: Array) -> Value:
    """Multiply one axis by a constant matrix [old, new]: each new element is a weighted sum of the old ones."""
    if x.type.rank == 1:
        return site.reshape(multiply_axis(site, site.reshape(x, (1, x.type.elements)), 1, weights), (weights.shape[1],))
    order = list(range(x.type.rank))
    order[axis], order[-1] = order[-1], order[axis]
    transposed = site.emit(Transpose(tuple(order)), x)
    product = site.emit(MatMul(x.type.dtype), transposed, site.builder.constant(weights, x.type.dtype))
    return site.emit(Transpose(tuple(order)), product)


def window_positions(sizes: Sequence[int], window: Sizes, geometry: Geometry, out_sizes: Sequence[int]) -> Array:
    """For each of the `out_sizes` outputs, the flat positions in its window: [outputs, window]; -1 for padding."""
    require_table_fits((*window, *out_sizes))
    every = zip(window, geometry.stride, geometry.before, geometry.dilation, out_sizes, strict=True)
    axes = [
        np.arange(count)[:, None] * step - before + np.arange(length)[None, :] * dilation
        for length, step, before, dilation, count in every
    ]
    return _flat_places(sizes, axes)


def adaptive_window_positions(sizes: Sequence[int], out_sizes: Sequence[int]) -> Array:
    """`window_positions` for adaptive pooling: windows of nearly equal length, padded with -1."""
    axes = []
    require_table_fits(
        (*out_sizes, *(-(-size // max(count, 1)) + 1 for size, count in zip(sizes, out_sizes, strict=True)))
    )
    for size, count in zip(sizes, out_sizes, strict=True):
        starts, stops = np.arange(count) * size // count, -(-(np.arange(count) + 1) * size // count)
        seen = starts[:, None] + np.arange(np.max(stops - starts, initial=1))[None, :]
        axes.append(np.where(seen < stops[:, None], seen, -1))
    return _flat_places(sizes, axes)


def _flat_places(sizes: Sequence[int], axes: Sequence[Array]) -> Array:
    flat, inside = np.zeros((1, 1), np.int64), np.ones((1, 1), np.bool_)
    for size, seen in zip(sizes, axes, strict=True):
        fits = (seen >= 0) & (seen < size)
        positions, taps = len(flat) * len(seen), flat.shape[1] * seen.shape[1]
        flat = (flat[:, None, :, None] * size + seen[None, :, None, :]).reshape(positions, taps)
        inside = (inside[:, None, :, None] & fits[None, :, None, :]).reshape(positions, taps)
    return np.where(inside, flat, -1)


def window_maximum(site: Site, x: Value, positions: Array, out_sizes: Sequence[int]) -> tuple[Value, Value]:
    """The maximum of each window, a row of `positions`, and the flat position of its first occurrence."""
    if (positions < 0).all(axis=1).any():
        raise NotExpressible("a window contains only padding, so it has no maximum")
    axes = len(out_sizes)
    batch = x.type.shape[: x.type.rank - axes]
    # Padding is replaced by the window's first element, which changes neither the maximum nor its first occurrence.
    first = np.take_along_axis(positions, (positions >= 0).argmax(axis=1)[:, None], axis=1)
    table = site.builder.constant(np.where(positions < 0, first, positions), DType.INT64)
    flat = site.reshape(x, (*batch, math.prod(x.type.shape[x.type.rank - axes :])))
    seen = site.emit(Gather(len(batch)), flat, table)
    values = site.emit(Reduce("max", (len(batch) + 1,), False), seen)
    tap = site.emit(ArgReduce("argmax", len(batch) + 1, False), seen)
    position = site.emit(Index((0, 1)), table, site.emit(Iota(len(positions), 0, 1, DType.INT64)), tap)
    return site.reshape(values, (*batch, *out_sizes)), site.reshape(position, (*batch, *out_sizes))


def unpool(site: Site, x: Value, positions: Value, out_sizes: Sequence[int]) -> Value:
    """Max unpooling: each element at its flat position in a tensor of zeros."""
    axes = len(out_sizes)
    batch = x.type.shape[: x.type.rank - axes]
    count = math.prod(x.type.shape[x.type.rank - axes :])
    zeros = site.filled(0, TensorType((*batch, math.prod(out_sizes)), x.type.dtype))
    op = ScatterAlong(len(batch), "")
    put = site.emit(op, zeros, site.reshape(x, (*batch, count)), site.reshape(positions, (*batch, count)))
    return site.reshape(put, (*batch, *out_sizes))


def column_to_image(site: Site, columns: Value, sizes: Sequence[int], window: Sizes, geometry: Geometry) -> Value:
    """col2im: columns [batch, channels * window, outputs], each element added at its position in the image."""
    ends = zip(sizes, window, geometry.stride, geometry.before, geometry.after, geometry.dilation, strict=True)
    out_sizes = [(s + b + a - (w - 1) * d - 1) // step + 1 for s, w, step, b, a, d in ends]
    positions = window_positions(sizes, window, geometry, out_sizes).T.reshape(-1)
    batch, area = columns.type.shape[0], math.prod(sizes)
    channels = columns.type.shape[1] // math.prod(window)
    flat = site.reshape(columns, (batch, channels, len(positions)))
    # Padding is accumulated in one extra element at the end, which is cut off.
    zeros = site.filled(0, TensorType((batch, channels, area + 1), columns.type.dtype))
    where = site.builder.constant(np.where(positions < 0, area, positions), DType.INT64)
    added = site.emit(ScatterAlong(2, "add"), zeros, flat, site.broadcast(where, flat.type.shape))
    return site.reshape(site.slice(added, 2, 0, area), (batch, channels, *sizes))


def extend_axis(site: Site, x: Value, axis: int, before: int, after: int, mode: str) -> Value:
    """Pad an axis with its own elements; `mode` is that of `numpy.pad`. Negative padding crops."""
    size = x.type.shape[axis]
    require_table_fits((before + size + after,))
    positions = np.arange(-before, size + after)
    if mode == "edge":
        positions = np.clip(positions, 0, size - 1)
    elif mode == "wrap":
        positions %= size
    elif mode == "reflect":
        period = max(2 * (size - 1), 1)
        positions = np.minimum(positions % period, -positions % period)
    else:
        raise NotExpressible(f"it pads by {mode}; use a constant, edge, reflect or wrap")
    return site.emit(Gather(axis), x, site.builder.constant(positions, DType.INT64))
