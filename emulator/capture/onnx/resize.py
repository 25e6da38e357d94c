"""Resizing: along each axis every new place is a fixed mixture of old ones, so it is a product with a constant."""

import math
from collections.abc import Callable

import numpy as np

from nxpipe.emulator.capture.composites.stretch import smoothing
from nxpipe.emulator.capture.composites.windows import mixed
from nxpipe.emulator.capture.onnx.base import OnnxSite, axis_in, imports
from nxpipe.emulator.capture.room import require_room
from nxpipe.emulator.capture.site import NotExpressible
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Gather, Where
from nxpipe.emulator.ops.spatial import cubic_taps, linear_taps

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


@imports("Resize", "Upsample")
def resize(
    site: OnnxSite, x: Value, roi: Value | None = None, scales: Value | None = None, sizes: Value | None = None
) -> Value:
    """The older operator has no region, and places new elements by their numbers alone."""
    old_kind = site.operator == "Upsample"
    if old_kind:
        roi, scales = None, roi
    rule = site.attribute("coordinate_transformation_mode", "asymmetric" if old_kind else "half_pixel")
    axes = [axis_in(axis, x.type.rank) for axis in site.attribute("axes", range(x.type.rank))]
    for number, (axis, scale, new) in enumerate(_targets(site, x, axes, scales, sizes)):
        require_room((new,))
        old = x.type.shape[axis]
        if rule == "tf_crop_and_resize":
            if roi is None:
                raise NotExpressible("it crops to a region that it is not given")
            region = site.table("region", roi).astype(np.float64)
            x = _cropped(site, x, axis, new, region[number], region[number + len(axes)])
        elif (scale, new) != (1, old):
            x = _resized(site, x, axis, _PLACES[rule](np.arange(new, dtype=np.float64), scale, new, old), scale)
    return x


def _resized(site: OnnxSite, x: Value, axis: int, at: Array, scale: float) -> Value:
    mode, old = site.attribute("mode", "nearest"), x.type.shape[axis]
    if mode == "nearest":
        return _nearest(site, x, axis, at)
    if site.attribute("antialias", 0):
        constant = site.attribute("cubic_coeff_a", -0.75) if mode == "cubic" else None
        beyond = not site.attribute("exclude_outside", 0)
        return mixed(site, x, axis, smoothing(old, at, 1 / scale, cubic=constant, beyond=beyond))
    return mixed(site, x, axis, _weights(site, mode, at, old).T)


def _cropped(site: OnnxSite, x: Value, axis: int, new: int, start: float, end: float) -> Value:
    """A region of an axis stretched over the new one; what lies outside of the old one is filled."""
    last = x.type.shape[axis] - 1
    steps = np.arange(new) / max(new - 1, 1) if new > 1 else np.full(1, 0.5)
    at = (start + steps * (end - start)) * last
    stretched = _resized(site, x, axis, at, 1.0)
    inside = ((at >= 0) & (at <= last)).reshape(-1, *[1] * (x.type.rank - axis - 1))
    filling = site.like(x, site.attribute("extrapolation_value", 0.0))
    return site.emit(Where(), site.builder.constant(inside, DType.BOOL), stretched, filling)


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
    rounding = "floor" if site.operator == "Upsample" else site.attribute("nearest_mode", "round_prefer_floor")
    near = _NEAREST[rounding](at)
    places = np.clip(near, 0, x.type.shape[axis] - 1).astype(np.int64)
    return site.emit(Gather(axis), x, site.builder.constant(places, DType.INT64))


def _weights(site: OnnxSite, mode: str, at: Array, old: int) -> Array:
    """A row for each new place: how much of each old one it takes."""
    require_room((len(at), old))
    base = np.floor(at)
    taps = linear_taps(at - base) if mode == "linear" else cubic_taps(at - base, site.attribute("cubic_coeff_a", -0.75))
    weights = np.zeros((len(at), old))
    for offset, share in taps:
        place = base + offset
        if site.attribute("exclude_outside", 0):
            share = np.where((place >= 0) & (place < old), share, 0)
        np.add.at(weights, (np.arange(len(at)), np.clip(place, 0, old - 1).astype(np.int64)), share)
    return np.asarray(weights / weights.sum(1, keepdims=True))
