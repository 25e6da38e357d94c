"""Operators along an axis: reductions, running sums, sorting, and normalisations.

The statistics of normalisations are float32 for operands of any type, with one rounding at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array, Floats
from nxpipe.emulator.ops.base import Operator, require, require_axes

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "all": np.all,
    "any": np.any,
    "max": np.max,
    "mean": np.mean,
    "min": np.min,
    "prod": np.prod,
    "sum": np.sum,
}
_RUNNING: dict[str, np.ufunc] = {"cummax": np.maximum, "cummin": np.minimum, "cumprod": np.multiply, "cumsum": np.add}
_COUNTED = ("prod", "sum")  # integers and booleans are counted in 64 bits


@dataclass(frozen=True)
class Reduce(Operator, name="reduce"):
    """Folds whole axes into one element each."""

    function: str
    axes: tuple[int, ...]
    keep: bool

    def infer(self, x: TensorType) -> TensorType:
        require(self.function in _REDUCTIONS, self, "there is no reduction of this name")
        require_axes(self, self.axes, x.rank)
        folded = [x.shape[axis] for axis in self.axes]
        require(self.function not in ("max", "min") or 0 not in folded, self, f"{x} has no element to choose from")
        require(self.function != "mean" or x.dtype.is_float, self, f"the mean of {x} is not an integer")
        kept = [1 if axis in self.axes else size for axis, size in enumerate(x.shape)]
        shape = kept if self.keep else [size for axis, size in enumerate(x.shape) if axis not in self.axes]
        return TensorType(tuple(shape), self._dtype(x.dtype))

    def _dtype(self, dtype: DType) -> DType:
        if self.function in ("all", "any"):
            return DType.BOOL
        return DType.INT64 if self.function in _COUNTED and not dtype.is_float else dtype

    def compute(self, x: Array) -> Array:
        return np.asarray(_REDUCTIONS[self.function](x, axis=self.axes, keepdims=self.keep))


@dataclass(frozen=True)
class ArgReduce(Operator, name="arg_reduce"):
    """The position of the first largest or smallest element along an axis."""

    function: str
    axis: int
    keep: bool

    def infer(self, x: TensorType) -> TensorType:
        require(self.function in ("argmax", "argmin"), self, "there is no such search")
        require_axes(self, (self.axis,), x.rank)
        require(x.shape[self.axis] > 0, self, f"{x} has no element to find")
        middle = (1,) if self.keep else ()
        return TensorType(x.shape[: self.axis] + middle + x.shape[self.axis + 1 :], DType.INT64)

    def compute(self, x: Array) -> Array:
        find = np.argmax if self.function == "argmax" else np.argmin
        return np.asarray(find(x, axis=self.axis, keepdims=self.keep))


@dataclass(frozen=True)
class Cumulate(Operator, name="cumulate"):
    """Running sums, products or extremes along an axis."""

    function: str
    axis: int

    def infer(self, x: TensorType) -> TensorType:
        require(self.function in _RUNNING, self, "there is no running fold of this name")
        require_axes(self, (self.axis,), x.rank)
        counts = self.function in ("cumsum", "cumprod") and not x.dtype.is_float
        return x.with_dtype(DType.INT64) if counts else x

    def compute(self, x: Array) -> Array:
        dtype = x.dtype if x.dtype == np.float32 or self.function in ("cummax", "cummin") else np.dtype(np.int64)
        return np.asarray(_RUNNING[self.function].accumulate(x, axis=self.axis, dtype=dtype))


@dataclass(frozen=True)
class ArgSort(Operator, name="argsort"):
    """The positions that would sort an axis; equal elements keep their order."""

    axis: int
    descending: bool

    def infer(self, x: TensorType) -> TensorType:
        require_axes(self, (self.axis,), x.rank)
        return x.with_dtype(DType.INT64)

    def compute(self, x: Array) -> Array:
        if not self.descending:
            return np.argsort(x, axis=self.axis, kind="stable")
        # Sort the mirror image, so that the order of equal elements survives being turned around.
        mirrored = np.argsort(np.flip(x, self.axis), axis=self.axis, kind="stable")
        return np.asarray(x.shape[self.axis] - 1 - np.flip(mirrored, self.axis))


@dataclass(frozen=True)
class Softmax(Operator, name="softmax"):
    """Exponentials along an axis, scaled to sum to one; or their logarithm."""

    axis: int
    log: bool

    def infer(self, x: TensorType) -> TensorType:
        require(x.dtype.is_float, self, f"{x} is not a float")
        require_axes(self, (self.axis,), x.rank)
        return x

    def compute(self, x: Array) -> Array:
        if x.shape[self.axis] == 0:
            return x
        shifted = x - x.max(axis=self.axis, keepdims=True)
        exponentials = np.exp(shifted)
        total = exponentials.sum(axis=self.axis, keepdims=True)
        return np.asarray(shifted - np.log(total) if self.log else exponentials / total)


def _require_affine(op: Operator, x: TensorType, axes: int, affine: tuple[TensorType | None, ...]) -> None:
    require(x.dtype.is_float, op, f"{x} is not a float")
    require(1 <= axes <= x.rank, op, f"{x} does not have {axes} trailing axes")
    for operand in affine:
        fits = operand is None or (operand.shape == x.shape[x.rank - axes :] and operand.dtype.is_float)
        require(fits, op, f"{operand} does not scale the last {axes} axes of {x}")


@dataclass(frozen=True)
class LayerNorm(Operator, name="layer_norm"):
    """Zero mean and unit variance over the last `axes` axes, then a scale and a shift."""

    axes: int
    epsilon: float

    def infer(self, x: TensorType, weight: TensorType | None = None, bias: TensorType | None = None) -> TensorType:
        _require_affine(self, x, self.axes, (weight, bias))
        return x

    def compute(self, x: Floats, weight: Array | None = None, bias: Array | None = None) -> Array:
        over = tuple(range(x.ndim - self.axes, x.ndim))
        centred = x - x.mean(axis=over, keepdims=True)
        variance = np.mean(centred * centred, axis=over, keepdims=True)
        centred *= np.float32(1) / np.sqrt(variance + np.float32(self.epsilon))
        if weight is not None:
            centred *= weight
        if bias is not None:
            centred += bias
        return np.asarray(centred)


@dataclass(frozen=True)
class RmsNorm(Operator, name="rms_norm"):
    """Unit mean square over the last `axes` axes, then a scale."""

    axes: int
    epsilon: float

    def infer(self, x: TensorType, weight: TensorType | None = None) -> TensorType:
        _require_affine(self, x, self.axes, (weight,))
        return x

    def compute(self, x: Floats, weight: Array | None = None) -> Array:
        over = tuple(range(x.ndim - self.axes, x.ndim))
        mean_square = np.mean(x * x, axis=over, keepdims=True)
        scaled = x * (np.float32(1) / np.sqrt(mean_square + np.float32(self.epsilon)))
        return np.asarray(scaled if weight is None else scaled * weight)
