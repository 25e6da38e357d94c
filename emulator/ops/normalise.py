"""Normalisations: statistics in float32 whatever the operand's type, one rounding at the end."""

from dataclasses import dataclass

import numpy as np

from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.numerics import Array, Floats
from nxpipe.emulator.ops.base import Operator, require, require_axes


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
