"""Scaled dot-product attention, kept whole because the hardware streams its softmax between two matrix products."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array, Floats, round_to
from nxpipe.emulator.ops.base import Operator, broadcast_shape, require
from nxpipe.emulator.ops.linalg import require_matrix_operands


@dataclass(frozen=True)
class Attention(Operator, name="attention"):
    """softmax(scale * q k^T + mask) v, for q [..., L, E], k [..., S, E], v [..., S, D].

    Fewer key than query heads (axis -3) means that each key head serves a group of neighbouring query heads. A boolean
    mask says where to look, a float mask is added. A row that may look nowhere yields zeros, as in PyTorch.
    """

    scale: float
    causal: bool
    probabilities: DType  # the element type in which the softmax enters the second product
    out: DType
    matrix_operands: ClassVar[int] = 3

    def infer(self, q: TensorType, k: TensorType, v: TensorType, mask: TensorType | None = None) -> TensorType:
        require_matrix_operands(self, q, k, v)
        require(min(q.rank, k.rank, v.rank) >= 2, self, f"{q}, {k} and {v} are not all matrices")
        agree = q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2] and k.shape[:-2] == v.shape[:-2]
        require(agree, self, f"query {q}, key {k} and value {v} do not agree")
        require(self.out.is_float and self.probabilities.is_float, self, "attention works on floats")
        batch = self._batch(q, k)
        if mask is not None:
            scores = (*batch, q.shape[-2], k.shape[-2])
            fits = mask.dtype is DType.BOOL or mask.dtype.is_float
            fits = fits and broadcast_shape(self, (mask.shape, scores)) == scores
            require(fits, self, f"the mask {mask} does not fit scores of shape {list(scores)}")
        return TensorType((*batch, q.shape[-2], v.shape[-1]), self.out)

    def _batch(self, q: TensorType, k: TensorType) -> tuple[int, ...]:
        if _group_size(q.shape, k.shape) > 1:
            require(q.shape[:-3] == k.shape[:-3], self, f"query {q} and key {k} differ in more than heads")
            return q.shape[:-2]
        return broadcast_shape(self, (q.shape[:-2], k.shape[:-2]))

    def compute(self, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        group = _group_size(q.shape, k.shape)
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


def _group_size(q: tuple[int, ...], k: tuple[int, ...]) -> int:
    """How many query heads share a key head."""
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
    # Where everything is masked, subtract nothing: exp(-inf) is 0, and the row stays empty instead of NaN.
    highest[np.isneginf(highest)] = 0
    scores -= highest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    total[total == 0] = 1
    scores /= total
