"""Attention's operands as the heads that share keys, and how many of those heads are worked on at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.operands import Memory
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel
from nxpipe.emulator.lower.turned import chunks_of, transpose_type
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import Attention

_FULL = (DType.FLOAT32, DType.TFLOAT32)
_LONG_RUN = 4096  # bytes: so many heads beside each other make DMA fast


def split_heads(
    q: View, k: View, v: View, mask: View | None, home: View
) -> tuple[int, tuple[View, View, View, View, View | None]]:
    """How many axes of a batch there are, and views that begin with them: queries, result and mask then go on with
    [key heads, queries of each, rows, ...], keys and values with [key heads, keys, ...]. Where each query head has one
    row only, the query heads of a key head are the rows."""
    *batch, heads, rows, _ = home.shape if home.rank > 2 else (1, *home.shape)
    shared = k.shape[-3] if k.rank > 2 else 1
    key_heads = shared if heads % max(shared, 1) == 0 else heads

    def queries(view: View) -> View:
        wide = view.broadcast((*batch, heads, rows, view.shape[-1]))
        at, stride = len(batch), wide.strides[len(batch)]
        shape = (*batch, key_heads, heads // key_heads, *wide.shape[-2:])
        wide = replace(wide, shape=shape, strides=(*wide.strides[:at], stride * shape[at + 1], *wide.strides[at:]))
        order = (*range(at + 1), at + 2, at + 1, at + 3)
        return wide.transposed(order) if rows == 1 else wide

    def keys(view: View) -> View:
        return view.broadcast((*batch, key_heads, *view.shape[-2:]))

    masks = queries(mask.broadcast((*mask.shape[:-1], k.shape[-2]))) if mask else None
    return len(batch), (queries(q), keys(k), keys(v), queries(home), masks)


@dataclass(frozen=True)
class AttentionTiling:
    heads: int  # key heads at once
    piece: int  # keys at once
    turns: int  # of scores and probabilities

    @staticmethod
    def of(k: Kernel, op: Attention, views: Sequence[View], mask: View | None) -> "AttentionTiling":
        q, keys, values, out = views
        most = min(keys.shape[0], max(ceil(_LONG_RUN / (keys.shape[-1] * keys.dtype.itemsize + 1)), 1))
        sizes = _AttentionCosts(op, q, keys, values, out, mask)
        left = k.left(Memory.SBUF)
        for turns in (2, 1):
            for heads in range(most, 0, -1):
                if sizes.room(heads, keys.shape[1], turns) <= left:
                    return AttentionTiling(heads, keys.shape[1], turns)
        pieces = range(keys.shape[1] // PARTITIONS * PARTITIONS, PARTITIONS, -PARTITIONS)
        fitting = (piece for piece in pieces if sizes.room(1, piece, 1, loads=2) <= left)
        return AttentionTiling(1, next(fitting, PARTITIONS), 1)


def is_matched(op: Attention, values: DType) -> bool:
    """Whether probabilities and values can be multiplied as they are; if not, both are float32."""
    return (op.probabilities in _FULL) == (values in _FULL)


@dataclass(frozen=True)
class _AttentionCosts:
    op: Attention
    q: View  # [key heads, queries of each, rows, elements]
    keys: View  # [key heads, keys, elements]
    values: View
    out: View
    mask: View | None

    def room(self, heads: int, piece: int, turns: int, loads: int = 1) -> int:
        """Bytes of each partition, keys and values being there once, or in as many turns as they are loaded."""
        return loads * self._keys(heads, piece) + self._queries(heads) + turns * self._scores(piece) + 4096

    def _keys(self, heads: int, piece: int) -> int:
        elements, width = self.keys.shape[-1], self.values.shape[-1]
        size = 4 if not is_matched(self.op, self.values.dtype) else self.values.dtype.itemsize
        standing = chunks_of(elements) * heads * piece * self.keys.dtype.itemsize
        return standing + chunks_of(piece) * heads * width * size

    def _queries(self, heads: int) -> int:
        each, elements = heads * self.q.shape[1], self.q.shape[-1]
        straight = each * elements * transpose_type(self.q.dtype).itemsize
        turned = chunks_of(elements) * each * PARTITIONS * self.q.dtype.itemsize
        return 2 * (straight + turned + each * self.out.shape[-1] * self.out.dtype.itemsize)

    def _scores(self, piece: int) -> int:
        size, passing = self.op.probabilities.itemsize, transpose_type(self.op.probabilities).itemsize
        turned = 4 if not is_matched(self.op, self.values.dtype) else size
        each = (
            4 + size + (passing if passing != size else 0) + turned + 2 * (self.mask.dtype.itemsize if self.mask else 0)
        )
        return (piece + PARTITIONS) * each
