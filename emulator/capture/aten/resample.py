"""Stretching and shrinking the places of images."""

from collections.abc import Sequence

import numpy as np

from nxpipe.emulator.capture.aten.base import Site, imports
from nxpipe.emulator.capture.aten.window import Sizes
from nxpipe.emulator.capture.composites.sample import grid_sampled
from nxpipe.emulator.capture.composites.stretch import smoothing
from nxpipe.emulator.capture.composites.windows import mixed
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ops import Resample


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
        places, constant = (np.arange(size) + 0.5) * scale - 0.5, -0.5 if cubic else None
        x = mixed(site, x, axis, smoothing(x.type.shape[axis], places, scale, cubic=constant, beyond=False))
    return x


@imports("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(site: Site, x: Value, grid: Value, mode: int, padding: int, aligned: bool) -> Value:
    by_number = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")
    return grid_sampled(site, x, grid, by_number[0][mode], by_number[1][padding], aligned)
