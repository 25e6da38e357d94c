"""Work along an axis: sums, extremes, running sums, orders."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
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
