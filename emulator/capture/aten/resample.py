"""Stretching and shrinking the places of images."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from emulator.capture.aten.base import Site, imports
from emulator.capture.aten.window import Sizes, mixed
from emulator.graph import Value
from emulator.ops import Resample


def _scales(site: Site, x: Value, factors: Sequence[float | None] | None, aligned: bool) -> tuple[float, ...]:
    """Old distance for one new step, which PyTorch takes from the factor that it was given, if any."""
    axes = x.type.rank - 2
    given = list(factors) if factors else [None] * axes
    pairs = zip(x.type.shape[2:], site.result.shape[2:], given, strict=True)
    if aligned:
        return tuple((old - 1) / (new - 1) if new > 1 else 0.0 for old, new, _ in pairs)
    return tuple(1 / factor if factor else old / new for old, new, factor in pairs)


def _resampled(site: Site, function: str, x: Value, factors: Sequence[float | None] | None, aligned: bool) -> Value:
    sizes, scales = site.result.shape[2:], _scales(site, x, factors, aligned)
    # A scale of zero, of an axis with a single new place, looks at the first old one, as any scale does.
    return site.emit(Resample(function, sizes, tuple(scale or 1.0 for scale in scales), aligned), x)


@imports("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def upsample_nearest(site: Site, x: Value, sizes: Sizes | None, factors: Sequence[float] | None) -> Value:
    return _resampled(site, "nearest", x, factors, aligned=False)


@imports("upsample_nearest1d.default", "upsample_nearest2d.default", "upsample_nearest3d.default")
def upsample_nearest_axes(site: Site, x: Value, sizes: Sizes, *factors: float | None) -> Value:
    return _resampled(site, "nearest", x, factors, aligned=False)


@imports("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def upsample_linear(site: Site, x: Value, sizes: Sizes | None, aligned: bool, factors: Sequence[float] | None) -> Value:
    return _resampled(site, "linear", x, factors, aligned)


@imports("upsample_linear1d.default", "upsample_bilinear2d.default", "upsample_trilinear3d.default")
def upsample_linear_axes(site: Site, x: Value, sizes: Sizes, aligned: bool, *factors: float | None) -> Value:
    return _resampled(site, "linear", x, factors, aligned)


@imports("upsample_bicubic2d.vec")
def upsample_cubic(site: Site, x: Value, sizes: Sizes | None, aligned: bool, factors: Sequence[float] | None) -> Value:
    return _resampled(site, "cubic", x, factors, aligned)


@imports("upsample_bicubic2d.default")
def upsample_cubic_axes(site: Site, x: Value, sizes: Sizes, aligned: bool, *factors: float | None) -> Value:
    return _resampled(site, "cubic", x, factors, aligned)


@imports("_upsample_bilinear2d_aa.default")
def upsample_linear_smoothed(site: Site, x: Value, sizes: Sizes, aligned: bool, *factors: float | None) -> Value:
    return _smoothed(site, x, aligned, factors, cubic=False)


@imports("_upsample_bicubic2d_aa.default")
def upsample_cubic_smoothed(site: Site, x: Value, sizes: Sizes, aligned: bool, *factors: float | None) -> Value:
    return _smoothed(site, x, aligned, factors, cubic=True)


def _smoothed(site: Site, x: Value, aligned: bool, factors: Sequence[float | None], *, cubic: bool) -> Value:
    """With antialiasing a new place mixes more neighbours the more the axis shrinks; a table of shares says how."""
    scales = _scales(site, x, factors, aligned)
    for axis, (size, scale) in enumerate(zip(site.result.shape[2:], scales, strict=True), 2):
        x = mixed(site, x, axis, _smoothing(x.type.shape[axis], size, scale, cubic=cubic))
    return x


def _smoothing(old: int, new: int, scale: float, *, cubic: bool) -> Any:
    stretch = max(scale, 1.0)
    centres = (np.arange(new) + 0.5) * scale
    distance = np.abs((np.arange(old)[:, None] + 0.5 - centres[None, :]) / stretch)
    shares = _cubic(distance) if cubic else np.maximum(1 - distance, 0)
    return (shares / shares.sum(axis=0)).astype(np.float32)


def _cubic(d: Any, a: float = -0.5) -> Any:
    """Keys' kernel; images are smoothed with a = -1/2, unlike stretched ones."""
    inner = ((a + 2) * d - (a + 3)) * d * d + 1
    outer = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, inner, np.where(d < 2, outer, 0))
