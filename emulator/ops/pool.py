"""Reductions of windows, and resampling by weighted neighbours."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Operator, require
from nxpipe.emulator.ops.convolve import padded_places, sliding_windows


@dataclass(frozen=True)
class Pool(Operator, name="pool"):
    """The largest, or the sum, of each window over the places of x [batch, channels, place ...]."""

    function: str
    window: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]

    def infer(self, x: TensorType) -> TensorType:
        require(self.function in ("max_pool", "sum_pool"), self, "there is no pooling of this name")
        attributes = (self.window, self.stride, self.before, self.after, self.dilation)
        fits = {len(attribute) for attribute in attributes} == {x.rank - 2} and x.rank >= 3
        require(fits, self, f"{x} needs a window, stride, paddings and dilation on each place axis")
        require(x.dtype is not DType.BOOL, self, f"{x} is no number")
        require(min(self.window + self.stride + self.dilation) > 0, self, "windows, strides, dilations start at 1")
        require(min(self.before + self.after) >= 0, self, "padding cannot be negative")
        places = []
        for size, length, step, b, a, apart in zip(x.shape[2:], *attributes, strict=True):
            places.append((size + b + a - (length - 1) * apart - 1) // step + 1)
        require(min(places) >= 0, self, f"the window {self.window} does not fit into {x}")
        return x.with_shape((*x.shape[:2], *places))

    def compute(self, x: Array) -> Array:
        lowest = -math.inf if x.dtype == np.float32 else np.iinfo(x.dtype).min
        filling, fold = (lowest, np.maximum) if self.function == "max_pool" else (0, np.add)
        padded = padded_places(x, self.before, self.after, filling)
        windows = sliding_windows(padded, self.window, self.stride, self.dilation)
        first, *others = np.ndindex(self.window)
        result = windows[(..., *first)].copy()
        for at in others:
            fold(result, windows[(..., *at)], out=result)
        return result


@dataclass(frozen=True)
class Resample(Operator, name="resample"):
    """Stretches the last axes to other sizes: each new place is a mixture of its old neighbours, axis by axis.

    A new place `i` stands at `scale * (i + 1/2) - 1/2` of the old axis, or at `scale * i` with corners aligned (and for
    the nearest place, which is the whole part of that).
    """

    function: str
    sizes: tuple[int, ...]
    scales: tuple[float, ...]
    aligned: bool

    def infer(self, x: TensorType) -> TensorType:
        require(self.function == "nearest" or self.function in _TAPS, self, "there is no resampling of this name")
        require(x.dtype.is_float, self, f"{x} is not a float")
        fits = 0 < len(self.sizes) == len(self.scales) <= x.rank and 0 not in x.shape
        require(fits and min(self.sizes) > 0 < min(self.scales), self, f"{x} cannot be resampled to {self.sizes}")
        return x.with_shape((*x.shape[: x.rank - len(self.sizes)], *self.sizes))

    def compute(self, x: Array) -> Array:
        result = x
        for axis, size, scale in zip(range(x.ndim - len(self.sizes), x.ndim), self.sizes, self.scales, strict=True):
            result = self._along(result, axis, size, np.float32(scale))
        return result

    def _along(self, x: Array, axis: int, size: int, scale: np.float32) -> Array:
        total: Any = np.float32(0)
        for near, share in self.taps(x.shape[axis], size, scale):
            if share is None:
                return np.asarray(np.take(x, near, axis))
            total = total + np.take(x, near, axis) * share.reshape(-1, *[1] * (x.ndim - axis - 1))
        return np.asarray(total)

    def taps(self, old: int, size: int, scale: np.float32) -> list[tuple[Array, Array | None]]:
        """Of an axis: old neighbours of each new place, and their shares; the nearest has no share to be multiplied."""
        steps = np.arange(size, dtype=np.float32)
        if self.function == "nearest":
            return [(np.minimum((steps * scale).astype(np.int64), old - 1), None)]
        at = steps * scale if self.aligned else (steps + np.float32(0.5)) * scale - np.float32(0.5)
        if self.function == "linear":
            at = np.maximum(at, 0)
        base = np.floor(at)
        near = base.astype(np.int64)
        return [(np.clip(near + offset, 0, old - 1), share) for offset, share in _TAPS[self.function](at - base)]


def linear_taps(fraction: Array) -> list[tuple[int, Array]]:
    """Neighbours of a place, by their distance from the one before it, and their shares."""
    return [(0, 1 - fraction), (1, fraction)]


def cubic_taps(fraction: Array, constant: float = -0.75) -> list[tuple[int, Array]]:
    """Keys' convolution; PyTorch's constant unless another is given."""
    a = fraction.dtype.type(constant)

    def inside(d: Array) -> Array:
        return np.asarray(((a + 2) * d - (a + 3)) * d * d + 1)

    def outside(d: Array) -> Array:
        return np.asarray(((a * d - 5 * a) * d + 8 * a) * d - 4 * a)

    f = fraction
    return [(-1, outside(f + 1)), (0, inside(f)), (1, inside(1 - f)), (2, outside(2 - f))]


_TAPS = {"cubic": cubic_taps, "linear": linear_taps}
