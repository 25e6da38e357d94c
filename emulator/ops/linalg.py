"""Matrix products, attention and reductions: operands of a single float type, sums in float32.

Attention is a single operator because its kernel keeps the softmax in SBUF between the two matrix products.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array, Floats, round_to
from nxpipe.emulator.ops.base import Operator, broadcast_shape, require, require_axes


def require_matrix_operands(op: Operator, *operands: TensorType) -> None:
    dtypes = {operand.dtype for operand in operands}
    listing = ", ".join(map(str, operands))
    require(len(dtypes) == 1 and operands[0].dtype.is_float, op, f"operands {listing} are not of one float type")


@dataclass(frozen=True)
class Linear(Operator, name="linear"):
    """x times the transpose of a weight [outputs, inputs] (the layout of checkpoints), plus a bias."""

    out: DType
    matrix_operands: ClassVar[int] = 2

    def infer(self, x: TensorType, weight: TensorType, bias: TensorType | None = None) -> TensorType:
        require_matrix_operands(self, x, weight)
        require(weight.rank == 2 and x.rank >= 1, self, f"{x} needs rank 1 or more, and the weight {weight} rank 2")
        require(x.shape[-1] == weight.shape[1], self, f"the last axes of {x} and {weight} differ in length")
        if bias is not None:
            fits = bias.shape == weight.shape[:1] and bias.dtype.is_float
            require(fits, self, f"the bias is {bias} for {weight.shape[0]} outputs")
        require(self.out.is_float, self, f"the result type {self.out} is not a float type")
        return TensorType(x.shape[:-1] + weight.shape[:1], self.out)

    def compute(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        # BLAS is faster with the weight on the left; the result is then stored column by column.
        columns = weight @ x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).T
        if bias is not None:
            columns += bias[:, np.newaxis]
        return columns.T.reshape(x.shape[:-1] + weight.shape[:1])


@dataclass(frozen=True)
class MatMul(Operator, name="matmul"):
    """Matrix products over the last two axes; the leading axes are broadcast."""

    out: DType
    matrix_operands: ClassVar[int] = 2

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        require_matrix_operands(self, a, b)
        require(a.rank >= 2 and b.rank >= 2, self, f"{a} and {b} are not both matrices")
        require(a.shape[-1] == b.shape[-2], self, f"{a} and {b} do not agree on the inner size")
        require(self.out.is_float, self, f"the result type {self.out} is not a float type")
        batch = broadcast_shape(self, (a.shape[:-2], b.shape[:-2]))
        return TensorType((*batch, a.shape[-2], b.shape[-1]), self.out)

    def compute(self, a: Array, b: Array) -> Array:
        return np.asarray(np.matmul(a, b))


@dataclass(frozen=True)
class GroupedMatMul(Operator, name="grouped_matmul"):
    """Rows [rows, inner], sorted by group, times their group's matrix [groups, inner, outputs] (mixture of experts).

    `ends[i]` is the end of group i. Rows after the last end belong to no group; their results are 0.
    """

    out: DType
    matrix_operands: ClassVar[int] = 2

    def infer(self, rows: TensorType, matrices: TensorType, ends: TensorType) -> TensorType:
        require_matrix_operands(self, rows, matrices)
        require(rows.rank == 2 and matrices.rank == 3, self, f"{rows} needs rank 2, and {matrices} rank 3")
        require(rows.shape[1] == matrices.shape[1], self, f"{rows} and {matrices} do not agree on the inner size")
        fits = ends.shape == matrices.shape[:1] and ends.dtype.is_integer
        require(fits, self, f"the ends are {ends} for {matrices.shape[0]} groups")
        require(self.out.is_float, self, f"the result type {self.out} is not a float type")
        return TensorType((rows.shape[0], matrices.shape[2]), self.out)

    def compute(self, rows: Array, matrices: Array, ends: Array) -> Array:
        result = np.zeros((rows.shape[0], matrices.shape[2]), np.float32)
        start = 0
        for matrix, end in zip(matrices, ends, strict=True):
            if end > start:
                result[start:end] = rows[start:end] @ matrix
                start = end
        return result


@dataclass(frozen=True)
class Attention(Operator, name="attention"):
    """softmax(scale * q k^T + mask) v, for q [..., L, E], k [..., S, E], v [..., S, D].

    With fewer key heads than query heads (axis -3), each key head is shared by a group of neighbouring query heads. A
    boolean mask is true for visible keys, a float mask is added. A row without visible keys yields zeros, as in
    PyTorch.
    """

    scale: float
    causal: bool
    probabilities: DType  # the element type of the softmax in the second product
    out: DType
    matrix_operands: ClassVar[int] = 3

    def infer(self, q: TensorType, k: TensorType, v: TensorType, mask: TensorType | None = None) -> TensorType:
        require_matrix_operands(self, q, k, v)
        require(min(q.rank, k.rank, v.rank) >= 2, self, f"{q}, {k} and {v} are not all matrices")
        agree = q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2] and k.shape[:-2] == v.shape[:-2]
        require(agree, self, f"query {q}, key {k} and value {v} do not agree")
        require(
            self.out.is_float and self.probabilities.is_float,
            self,
            "the result type and the type of probabilities must be floats",
        )
        batch = self._batch(q, k)
        if mask is not None:
            scores = (*batch, q.shape[-2], k.shape[-2])
            fits = mask.dtype is DType.BOOL or mask.dtype.is_float
            fits = fits and broadcast_shape(self, (mask.shape, scores)) == scores
            require(fits, self, f"the mask {mask} does not fit scores of shape {list(scores)}")
        return TensorType((*batch, q.shape[-2], v.shape[-1]), self.out)

    def _batch(self, q: TensorType, k: TensorType) -> tuple[int, ...]:
        if group_size(q.shape, k.shape) > 1:
            require(q.shape[:-3] == k.shape[:-3], self, f"query {q} and key {k} differ in more than heads")
            return q.shape[:-2]
        return broadcast_shape(self, (q.shape[:-2], k.shape[:-2]))

    def compute(self, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        group = group_size(q.shape, k.shape)
        if group > 1:
            q = q.reshape(*q.shape[:-3], -1, group, *q.shape[-2:])
            k, v = np.expand_dims(k, -3), np.expand_dims(v, -3)
        scores = np.matmul(q, np.swapaxes(k, -1, -2))
        scores *= np.float32(self.scale)
        heads = scores.reshape(*scores.shape[:-4], -1, *scores.shape[-2:]) if group > 1 else scores
        _apply_mask(heads, mask, self.causal)
        _softmax_in_place(heads)
        result = np.matmul(round_to(scores, self.probabilities), v)
        return np.asarray(result.reshape(*result.shape[:-4], -1, *result.shape[-2:]) if group > 1 else result)


def group_size(q: tuple[int, ...], k: tuple[int, ...]) -> int:
    """The number of query heads for each key head (GQA)."""
    if min(len(q), len(k)) < 3 or k[-3] in (0, 1) or q[-3] % k[-3]:
        return 1
    return q[-3] // k[-3]


def _apply_mask(scores: Floats, mask: Array | None, causal: bool) -> None:
    if mask is not None and mask.dtype == np.bool_:
        np.copyto(scores, -np.inf, where=~mask)
    elif mask is not None:
        scores += mask
    if causal:
        np.copyto(scores, -np.inf, where=~np.tri(*scores.shape[-2:], dtype=np.bool_))


def _softmax_in_place(scores: Floats) -> None:
    if scores.shape[-1] == 0:
        return
    highest = scores.max(axis=-1, keepdims=True)
    # Subtract 0 in a row with every key masked: exp(-inf) is 0, while -inf minus -inf is NaN.
    highest[np.isneginf(highest)] = 0
    scores -= highest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    total[total == 0] = 1
    scores /= total


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
_COUNTED = ("prod", "sum")  # for integers and booleans, the result is a 64-bit integer


@dataclass(frozen=True)
class Reduce(Operator, name="reduce"):
    """Reduces whole axes."""

    function: str
    axes: tuple[int, ...]
    keep: bool

    def infer(self, x: TensorType) -> TensorType:
        require(self.function in _REDUCTIONS, self, "unknown reduction")
        require_axes(self, self.axes, x.rank)
        reduced_sizes = [x.shape[axis] for axis in self.axes]
        require(self.function not in ("max", "min") or 0 not in reduced_sizes, self, f"a reduced axis of {x} is empty")
        require(self.function != "mean" or x.dtype.is_float, self, f"the mean needs a float operand, not {x}")
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
        require(self.function in ("argmax", "argmin"), self, "unknown function; use argmax or argmin")
        require_axes(self, (self.axis,), x.rank)
        require(x.shape[self.axis] > 0, self, f"axis {self.axis} of {x} is empty")
        middle = (1,) if self.keep else ()
        return TensorType(x.shape[: self.axis] + middle + x.shape[self.axis + 1 :], DType.INT64)

    def compute(self, x: Array) -> Array:
        find = np.argmax if self.function == "argmax" else np.argmin
        return np.asarray(find(x, axis=self.axis, keepdims=self.keep))


@dataclass(frozen=True)
class Cumulate(Operator, name="cumulate"):
    """Cumulative sums, products or extremes along an axis."""

    function: str
    axis: int

    def infer(self, x: TensorType) -> TensorType:
        require(self.function in _RUNNING, self, "unknown cumulative function")
        require_axes(self, (self.axis,), x.rank)
        counts = self.function in ("cumsum", "cumprod") and not x.dtype.is_float
        return x.with_dtype(DType.INT64) if counts else x

    def compute(self, x: Array) -> Array:
        dtype = x.dtype if x.dtype == np.float32 or self.function in ("cummax", "cummin") else np.dtype(np.int64)
        return np.asarray(_RUNNING[self.function].accumulate(x, axis=self.axis, dtype=dtype))


@dataclass(frozen=True)
class ArgSort(Operator, name="argsort"):
    """The positions that sort an axis; equal elements keep their order (stable)."""

    axis: int
    descending: bool

    def infer(self, x: TensorType) -> TensorType:
        require_axes(self, (self.axis,), x.rank)
        return x.with_dtype(DType.INT64)

    def compute(self, x: Array) -> Array:
        if not self.descending:
            return np.argsort(x, axis=self.axis, kind="stable")
        # A reversed ascending sort would reverse equal elements. Sorting the reversed axis keeps their order.
        mirrored = np.argsort(np.flip(x, self.axis), axis=self.axis, kind="stable")
        return np.asarray(x.shape[self.axis] - 1 - np.flip(mirrored, self.axis))


@dataclass(frozen=True)
class Softmax(Operator, name="softmax"):
    """Softmax along an axis, or its logarithm."""

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
        require(fits, op, f"the scale or shift {operand} does not match the last {axes} axes of {x}")


@dataclass(frozen=True)
class LayerNorm(Operator, name="layer_norm"):
    """Layer norm over the last `axes` axes, with optional scale and shift."""

    axes: int
    epsilon: float

    def infer(self, x: TensorType, weight: TensorType | None = None, bias: TensorType | None = None) -> TensorType:
        _require_affine(self, x, self.axes, (weight, bias))
        return x

    def compute(self, x: Floats, weight: Array | None = None, bias: Array | None = None) -> Array:
        axes = tuple(range(x.ndim - self.axes, x.ndim))
        centred = x - x.mean(axis=axes, keepdims=True)
        variance = np.mean(centred * centred, axis=axes, keepdims=True)
        centred *= np.float32(1) / np.sqrt(variance + np.float32(self.epsilon))
        if weight is not None:
            centred *= weight
        if bias is not None:
            centred += bias
        return np.asarray(centred)


@dataclass(frozen=True)
class RmsNorm(Operator, name="rms_norm"):
    """RMS norm over the last `axes` axes, with an optional scale."""

    axes: int
    epsilon: float

    def infer(self, x: TensorType, weight: TensorType | None = None) -> TensorType:
        _require_affine(self, x, self.axes, (weight,))
        return x

    def compute(self, x: Floats, weight: Array | None = None) -> Array:
        axes = tuple(range(x.ndim - self.axes, x.ndim))
        mean_square = np.mean(x * x, axis=axes, keepdims=True)
        scaled = x * (np.float32(1) / np.sqrt(mean_square + np.float32(self.epsilon)))
        return np.asarray(scaled if weight is None else scaled * weight)
