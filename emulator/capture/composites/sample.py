"""Samples of an image at places computed at run time, each a mixture of the neighbours that it falls between."""

import math
from itertools import product

from nxpipe.emulator.capture.site import Site
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import TakeAlong, Where

_CUBIC = -0.75  # the constant of Keys' convolution


def grid_sampled(site: Site, x: Value, grid: Value, mode: str, padding: str, aligned: bool) -> Value:
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
