"""Operators on spatial axes: convolutions (matrix products over windows), pooling, resampling.

The weight of a convolution is [outputs, inputs of a group, window ...].
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array, Floats
from nxpipe.emulator.ops.base import Operator, require
from nxpipe.emulator.ops.linalg import require_matrix_operands

# Floats of unfolded windows in memory at a time: enough for large products, little compared with a model.
_UNFOLDED = 1 << 22


@dataclass(frozen=True)
class Convolution(Operator, name="convolution"):
    """The convolution of x [batch, channels, position ...], padded with zeros on each spatial axis.

    `dilation` is the distance of neighbours within the window; `groups` divides the channels into independent groups.
    Negative padding crops, which some transposed convolutions need.
    """

    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    out: DType
    matrix_operands: ClassVar[int] = 2

    def infer(self, x: TensorType, weight: TensorType, bias: TensorType | None = None) -> TensorType:
        require_matrix_operands(self, x, weight)
        require(x.rank >= 3 and x.rank == weight.rank, self, f"{x} and {weight} need equal ranks of 3 or more")
        attributes = {len(self.stride), len(self.before), len(self.after), len(self.dilation)}
        require(attributes == {x.rank - 2}, self, f"{x} needs a stride, paddings and a dilation on each spatial axis")
        require(
            min(self.stride + self.dilation) > 0 < self.groups, self, "strides, dilations and groups must be at least 1"
        )
        agree = x.shape[1] == self.groups * weight.shape[1] and weight.shape[0] % self.groups == 0
        require(agree, self, f"the channels of {x} and {weight} do not agree in {self.groups} groups")
        if bias is not None:
            fits = bias.shape == weight.shape[:1] and bias.dtype.is_float
            require(fits, self, f"the bias is {bias} for {weight.shape[0]} outputs")
        require(self.out.is_float, self, f"the result type {self.out} is not a float type")
        places = self._output_positions(x.shape[2:], weight.shape[2:])
        require(min(places) >= 0, self, f"the window of {weight} does not fit into {x}")
        return TensorType((x.shape[0], weight.shape[0], *places), self.out)

    def _output_positions(self, sizes: tuple[int, ...], window: tuple[int, ...]) -> tuple[int, ...]:
        padded = (sum(part) for part in zip(self.before, sizes, self.after, strict=True))
        extents = ((length - 1) * dilation + 1 for length, dilation in zip(window, self.dilation, strict=True))
        return tuple((p - r) // s + 1 for p, r, s in zip(padded, extents, self.stride, strict=True))

    def compute(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        padded = padded_positions(x, self.before, self.after, 0)
        windows = sliding_windows(padded, weight.shape[2:], self.stride, self.dilation)
        if self.groups == x.shape[1] == weight.shape[0]:
            result = _depthwise(windows, weight)
        else:
            result = _grouped(windows, weight, self.groups)
        if bias is not None:
            result += bias.reshape(-1, *[1] * (x.ndim - 2))
        return result


def padded_positions(x: Array, before: tuple[int, ...], after: tuple[int, ...], filling: float) -> Array:
    """Pad the spatial axes with a number; negative padding crops."""
    if not any(before + after):
        return x
    cut = tuple(slice(max(-b, 0), size - max(-a, 0)) for b, a, size in zip(before, after, x.shape[2:], strict=True))
    margins = [(0, 0), (0, 0), *((max(b, 0), max(a, 0)) for b, a in zip(before, after, strict=True))]
    return np.pad(x[(slice(None), slice(None), *cut)], margins, constant_values=filling)


def sliding_windows(x: Array, window: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Array:
    """A view [batch, channels, position ..., window ...]; nothing is copied."""
    axes = tuple(range(2, x.ndim))
    reach = tuple((length - 1) * spacing + 1 for length, spacing in zip(window, dilation, strict=True))
    all_windows = np.lib.stride_tricks.sliding_window_view(x, reach, axes)
    steps = tuple(slice(None, None, step) for step in stride + dilation)
    return all_windows[(slice(None), slice(None), *steps)]


def _depthwise(windows: Array, weight: Array) -> Floats:
    """A depthwise convolution, as a sum over window positions: single channels are too narrow for a matrix product."""
    positions = windows.shape[: windows.ndim - (weight.ndim - 2)]
    result = np.zeros(positions, np.float32)
    for position in np.ndindex(weight.shape[2:]):
        scale = weight[(slice(None), 0, *position)].reshape(-1, *[1] * (weight.ndim - 2))
        result += windows[(..., *position)] * scale
    return result


def _grouped(windows: Array, weight: Array, groups: int) -> Floats:
    """Unfold windows into columns, a slab of output positions at a time, and multiply (im2col)."""
    batch, channels = windows.shape[:2]
    positions, inner = windows.shape[2 : weight.ndim], weight.ndim - 2
    outputs, depth = weight.shape[0] // groups, math.prod(weight.shape[1:])
    matrices = weight.reshape(groups, outputs, depth)
    result = np.empty((batch, groups, outputs, *positions), np.float32)
    # Channels and window axes before the output positions: they are the rows of the column matrix.
    order = (0, 1, *range(2 + inner, 2 + 2 * inner), *range(2, 2 + inner))
    by_row = windows.transpose(order)
    for slab in _slabs(positions[0], channels * math.prod(weight.shape[2:]) * math.prod(positions[1:])):
        windows_of_slab = by_row[(slice(None),) * (2 + inner) + (slab,)]
        columns = windows_of_slab.reshape(batch, groups, depth, -1)
        product = np.matmul(matrices, columns)
        result[:, :, :, slab] = product.reshape(batch, groups, outputs, -1, *positions[1:])
    return result.reshape(batch, groups * outputs, *positions)


def _slabs(length: int, width: int) -> Iterator[slice]:
    """Slabs of the first spatial axis whose unfolded windows have at most `_UNFOLDED` elements."""
    step = max(_UNFOLDED // max(width, 1), 1)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


@dataclass(frozen=True)
class Pool(Operator, name="pool"):
    """The maximum, or the sum, of each window of x [batch, channels, position ...]."""

    function: str
    window: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]

    def infer(self, x: TensorType) -> TensorType:
        require(self.function in ("max_pool", "sum_pool"), self, "unknown pooling")
        attributes = (self.window, self.stride, self.before, self.after, self.dilation)
        fits = {len(attribute) for attribute in attributes} == {x.rank - 2} and x.rank >= 3
        require(fits, self, f"{x} needs a window, stride, paddings and dilation on each spatial axis")
        require(x.dtype is not DType.BOOL, self, f"pooling of {x} is not defined")
        require(
            min(self.window + self.stride + self.dilation) > 0,
            self,
            "windows, strides and dilations must be at least 1",
        )
        require(min(self.before + self.after) >= 0, self, "padding cannot be negative")
        positions = []
        for size, length, step, b, a, spacing in zip(x.shape[2:], *attributes, strict=True):
            positions.append((size + b + a - (length - 1) * spacing - 1) // step + 1)
        require(min(positions) >= 0, self, f"the window {self.window} does not fit into {x}")
        return x.with_shape((*x.shape[:2], *positions))

    def compute(self, x: Array) -> Array:
        lowest = -math.inf if x.dtype == np.float32 else np.iinfo(x.dtype).min
        filling, fold = (lowest, np.maximum) if self.function == "max_pool" else (0, np.add)
        padded = padded_positions(x, self.before, self.after, filling)
        windows = sliding_windows(padded, self.window, self.stride, self.dilation)
        first, *others = np.ndindex(self.window)
        result = windows[(..., *first)].copy()
        for at in others:
            fold(result, windows[(..., *at)], out=result)
        return result


@dataclass(frozen=True)
class Resample(Operator, name="resample"):
    """Resamples the last axes to other sizes, axis by axis: each new position is a weighted sum of old neighbours.

    New position `i` is at `scale * (i + 1/2) - 1/2` on the old axis, or at `scale * i` with aligned corners. For
    `nearest` it is the integer part of `scale * i`.
    """

    function: str
    sizes: tuple[int, ...]
    scales: tuple[float, ...]
    aligned: bool

    def infer(self, x: TensorType) -> TensorType:
        require(self.function == "nearest" or self.function in _TAPS, self, "unknown resampling")
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
        for neighbours, weights in self.taps(x.shape[axis], size, scale):
            if weights is None:
                return np.asarray(np.take(x, neighbours, axis))
            total = total + np.take(x, neighbours, axis) * weights.reshape(-1, *[1] * (x.ndim - axis - 1))
        return np.asarray(total)

    def taps(self, old: int, size: int, scale: np.float32) -> list[tuple[Array, Array | None]]:
        """The old neighbours of each new position of an axis, with their weights; None for the nearest neighbour."""
        steps = np.arange(size, dtype=np.float32)
        if self.function == "nearest":
            return [(np.minimum((steps * scale).astype(np.int64), old - 1), None)]
        coordinates = steps * scale if self.aligned else (steps + np.float32(0.5)) * scale - np.float32(0.5)
        if self.function == "linear":
            coordinates = np.maximum(coordinates, 0)
        base = np.floor(coordinates)
        nearest = base.astype(np.int64)
        return [
            (np.clip(nearest + offset, 0, old - 1), weights)
            for offset, weights in _TAPS[self.function](coordinates - base)
        ]


def linear_taps(fraction: Array) -> list[tuple[int, Array]]:
    """Linear interpolation: neighbours, relative to the position before a point, and their weights."""
    return [(0, 1 - fraction), (1, fraction)]


def cubic_taps(fraction: Array, constant: float = -0.75) -> list[tuple[int, Array]]:
    """Cubic convolution (Keys); the default constant is PyTorch's."""
    a = fraction.dtype.type(constant)

    def inside(d: Array) -> Array:
        return np.asarray(((a + 2) * d - (a + 3)) * d * d + 1)

    def outside(d: Array) -> Array:
        return np.asarray(((a * d - 5 * a) * d + 8 * a) * d - 4 * a)

    f = fraction
    return [(-1, outside(f + 1)), (0, inside(f)), (1, inside(1 - f)), (2, outside(2 - f))]


_TAPS = {"cubic": cubic_taps, "linear": linear_taps}
