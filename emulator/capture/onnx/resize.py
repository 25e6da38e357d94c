"""Resizing: along each axis every new place is a fixed mixture of old ones, so it is a product with a constant."""

import math
from collections.abc import Callable

import numpy as np

from emulator.capture.aten.base import NotExpressible
from emulator.capture.onnx.base import OnnxSite, axis_in, imports
from emulator.graph import Value
from emulator.numerics import Array
from emulator.ops import Gather, MatMul, Transpose
from emulator.types import DType

# Where a new place stands on the old axis, from its number, the scale, and the new and old sizes.
_PLACES: dict[str, Callable[[Array, float, int, int], Array]] = {
    "half_pixel": lambda i, scale, new, old: (i + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda i, scale, new, old: (i + 0.5) / scale - 0.5 if new > 1 else i * 0.0,
    "align_corners": lambda i, scale, new, old: i * (old - 1) / (scale * old - 1) if new > 1 else i * 0.0,
    "asymmetric": lambda i, scale, new, old: i / scale,
    "half_pixel_symmetric": lambda i, scale, new, old: (
        old / 2 * (1 - new / (scale * old)) + (i + 0.5) / scale - 0.5  # centred, though sizes are whole numbers
    ),
}
_NEAREST: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@imports("Resize")
def resize(
    site: OnnxSite, x: Value, roi: Value | None = None, scales: Value | None = None, sizes: Value | None = None
) -> Value:
    mode, rule = site.attribute("mode", "nearest"), site.attribute("coordinate_transformation_mode", "half_pixel")
    if site.attribute("antialias", 0) or rule not in _PLACES:
        raise NotExpressible(f"it resizes by {rule}, or smooths as it shrinks; use half_pixel without antialias")
    axes = [axis_in(axis, x.type.rank) for axis in site.attribute("axes", range(x.type.rank))]
    for axis, scale, new in _targets(site, x, axes, scales, sizes):
        old = x.type.shape[axis]
        if (scale, new) == (1, old):
            continue
        at = _PLACES[rule](np.arange(new, dtype=np.float64), scale, new, old)
        x = _nearest(site, x, axis, at) if mode == "nearest" else _mixed(site, x, axis, _weights(site, mode, at, old))
    return x


def _targets(
    site: OnnxSite, x: Value, axes: list[int], scales: Value | None, sizes: Value | None
) -> list[tuple[int, float, int]]:
    """For each axis its scale and its new size; one follows from the other."""
    if sizes is None or not sizes.type.elements:
        if scales is None:
            raise NotExpressible("it is given neither scales nor sizes")
        factors = [float(scale) for scale in site.table("scales", scales)]
        return [(a, s, math.floor(x.type.shape[a] * s)) for a, s in zip(axes, factors, strict=True)]
    wanted = site.numbers("sizes", sizes)
    factors = [new / x.type.shape[axis] for axis, new in zip(axes, wanted, strict=True)]
    policy = site.attribute("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        common = min(factors) if policy == "not_larger" else max(factors)
        factors = [common] * len(axes)
        wanted = [math.floor(x.type.shape[axis] * common + 0.5) for axis in axes]
    return list(zip(axes, factors, wanted, strict=True))


def _nearest(site: OnnxSite, x: Value, axis: int, at: Array) -> Value:
    near = _NEAREST[site.attribute("nearest_mode", "round_prefer_floor")](at)
    places = np.clip(near, 0, x.type.shape[axis] - 1).astype(np.int64)
    return site.emit(Gather(axis), x, site.builder.constant(places, DType.INT64))


def _weights(site: OnnxSite, mode: str, at: Array, old: int) -> Array:
    """A row for each new place: how much of each old one it takes."""
    base = np.floor(at)
    taps = _linear(at - base) if mode == "linear" else _cubic(at - base, site.attribute("cubic_coeff_a", -0.75))
    weights = np.zeros((len(at), old))
    for offset, share in taps:
        place = base + offset
        if site.attribute("exclude_outside", 0):
            share = np.where((place >= 0) & (place < old), share, 0)
        np.add.at(weights, (np.arange(len(at)), np.clip(place, 0, old - 1).astype(np.int64)), share)
    return np.asarray(weights / weights.sum(1, keepdims=True))


def _linear(fraction: Array) -> list[tuple[int, Array]]:
    return [(0, 1 - fraction), (1, fraction)]


def _cubic(fraction: Array, a: float) -> list[tuple[int, Array]]:
    """Keys' convolution."""

    def near(d: Array) -> Array:
        return np.asarray(((a + 2) * d - (a + 3)) * d * d + 1)

    def far(d: Array) -> Array:
        return np.asarray(((a * d - 5 * a) * d + 8 * a) * d - 4 * a)

    return [(-1, far(fraction + 1)), (0, near(fraction)), (1, near(1 - fraction)), (2, far(2 - fraction))]


def _mixed(site: OnnxSite, x: Value, axis: int, weights: Array) -> Value:
    order = [i for i in range(x.type.rank) if i != axis] + [axis]
    rows = site.emit(Transpose(tuple(order)), x)
    mixture = site.builder.constant(weights.T, x.type.dtype)
    if x.type.rank == 1:
        row = site.reshape(rows, (1, x.type.elements))
        return site.reshape(site.emit(MatMul(x.type.dtype), row, mixture), (len(weights),))
    mixed = site.emit(MatMul(x.type.dtype), rows, mixture)
    return site.emit(Transpose(tuple(np.argsort(order).tolist())), mixed)
