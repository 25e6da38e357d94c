"""Attention kernel: scores of 128 query rows at a time, whose softmax never leaves SBUF.

A row's scores are side by side in SBUF where they fit, so that maximum, sum and rounded probabilities are those of a
separate softmax. Where they do not fit, keys pass three times in pieces: for the maximum, for the sum, and for the
product with the values. Scores are computed again each time, which costs less than bringing them back from HBM.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import TensorCopy
from nxpipe.emulator.lower.attention_scores import LOWEST, Nowhere, Scores
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.linear import batch_loop
from nxpipe.emulator.lower.matmul.tiling import BANK
from nxpipe.emulator.lower.tiles import fill
from nxpipe.emulator.lower.transpose import chunks_of, each_chunk, transpose_block, transpose_heads, transpose_type
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import Attention

_FULL = (DType.FLOAT32, DType.TFLOAT32)
_LONG_RUN = 4096  # bytes: so many heads beside each other make DMA fast


def split_heads(
    q: View, k: View, v: View, mask: View | None, home: View
) -> tuple[int, tuple[View, View, View, View, View | None]]:
    """The number of batch axes, and views that begin with them. Queries, result and mask continue with [key heads,
    queries of each, rows, ...], keys and values with [key heads, keys, ...], as grouped-query attention shares them.
    Where each query head has a single row, the query heads of a key head become the rows."""
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
    """How an attention kernel cuts its work: the largest tile that fits SBUF, since all tiles do the same work."""

    heads: int  # key heads at once
    piece: int  # keys at once
    buffers: int  # of scores and probabilities

    def __str__(self) -> str:
        return f"{self.heads} key heads, {self.piece} keys, {self.buffers} score buffers"

    @staticmethod
    def of(k: Kernel, op: Attention, views: Sequence[View], mask: View | None) -> "AttentionTiling":
        q, keys, values, out = views
        most = min(keys.shape[0], max(ceil(_LONG_RUN / (keys.shape[-1] * keys.dtype.itemsize + 1)), 1))
        sizes = _AttentionCosts(op, q, keys, values, out, mask)
        left = k.left(Memory.SBUF)
        for buffers in (2, 1):
            for heads in range(most, 0, -1):
                if sizes.nbytes(heads, keys.shape[1], buffers) <= left:
                    return AttentionTiling(heads, keys.shape[1], buffers)
        pieces = range(keys.shape[1] // PARTITIONS * PARTITIONS, PARTITIONS, -PARTITIONS)
        fitting = (piece for piece in pieces if sizes.nbytes(1, piece, 1, loads=2) <= left)
        return AttentionTiling(1, next(fitting, PARTITIONS), 1)


def is_matched(op: Attention, values: DType) -> bool:
    """True if probabilities and values can be multiplied in their own types; otherwise both are float32."""
    return (op.probabilities in _FULL) == (values in _FULL)


@dataclass(frozen=True)
class _AttentionCosts:
    """Sizes in SBUF of an attention kernel's tiles."""

    op: Attention
    q: View  # [key heads, queries of each, rows, elements]
    keys: View  # [key heads, keys, elements]
    values: View
    out: View
    mask: View | None

    def nbytes(self, heads: int, piece: int, buffers: int, loads: int = 1) -> int:
        """Bytes of each partition, with keys and values in `loads` buffers."""
        return loads * self._keys(heads, piece) + self._queries(heads) + buffers * self._scores(piece) + 4096

    def _keys(self, heads: int, piece: int) -> int:
        elements, width = self.keys.shape[-1], self.values.shape[-1]
        size = 4 if not is_matched(self.op, self.values.dtype) else self.values.dtype.itemsize
        standing = chunks_of(elements) * heads * piece * self.keys.dtype.itemsize
        return standing + chunks_of(piece) * heads * width * size

    def _queries(self, heads: int) -> int:
        each, elements = heads * self.q.shape[1], self.q.shape[-1]
        straight = each * elements * transpose_type(self.q.dtype).itemsize
        columns = chunks_of(elements) * each * PARTITIONS * self.q.dtype.itemsize
        return 2 * (straight + columns + each * self.out.shape[-1] * self.out.dtype.itemsize)

    def _scores(self, piece: int) -> int:
        size, passing = self.op.probabilities.itemsize, transpose_type(self.op.probabilities).itemsize
        columns = 4 if not is_matched(self.op, self.values.dtype) else size
        each = (
            4
            + size
            + (passing if passing != size else 0)
            + columns
            + 2 * (self.mask.dtype.itemsize if self.mask else 0)
        )
        return (piece + PARTITIONS) * each


_STAIRS: Final = 8  # of causal attention: groups of query rows, each of which sees as many keys as its last row does


@lowers(Attention)
def _attention(low: Lowering, node: Node, op: Attention) -> None:
    q, k, v = map(low.view, node.operands[:3])
    mask = low.view(node.operands[3]) if len(node.operands) > 3 else None
    home = low.transposable_home(node.result)
    if not home.elements:
        return
    causal = op.causal and home.shape[-2] > 1
    if op.causal:  # no row sees keys behind the last row's own; the single row of a decoder sees the first key alone
        seen = min(k.shape[-2], home.shape[-2])
        k, v = (view.cut(*((0, size) for size in view.shape[:-2]), (0, seen)) for view in (k, v))
        if mask is not None and mask.shape[-1] > 1:
            mask = mask.cut(*((0, size) for size in mask.shape[:-1]), (0, seen))
    if not k.shape[-2]:
        fill(low.k, home, 0.0)
        return
    axes, views = split_heads(q, k, v, mask, home)
    given = [view for view in views if view is not None]
    for _, here in batch_loop(low.k, given, axes):
        plan = AttentionTiling.of(low.k, op, here[:4], here[4] if mask else None)
        low.k.tilings.append(plan)
        _Attention(low.k, op, causal, plan, *here).write()


@dataclass(frozen=True)
class _Attention:
    k: Kernel
    op: Attention
    causal: bool  # and of more than one row
    plan: AttentionTiling
    q: View  # [key heads, queries of each, rows, elements]
    keys: View  # [key heads, keys, elements]
    values: View
    out: View  # as q
    mask: View | None = None

    def write(self) -> None:
        k, whole = self.k, self.plan.piece == self.keys.shape[1]
        for heads in k.spans(self.keys.shape[0], self.plan.heads):
            with k.scope():
                nowhere = Nowhere.of(k, self.op, self.q.dtype, self.mask) if self.mask and self.q.shape[-1] else None
                there = self.load(heads, (0, self.plan.piece)) if whole else None
                for rows, first, extent in self._blocks():
                    with k.scope():
                        _Block(self, heads, rows, first, extent, there, nowhere).write()

    def load(self, heads: Span, piece: Span) -> tuple[Block, Block]:
        """Keys as [128 elements, chunks, heads, keys], values as [128 keys, chunks, heads, elements]."""
        buffers = 1 if piece[1] == self.keys.shape[1] else 2
        return self._keys(heads, piece, buffers), self._values(heads, piece, buffers)

    def _keys(self, heads: Span, piece: Span, buffers: int) -> Block:
        k, elements = self.k, self.keys.shape[-1]
        block = k.tile(self.keys.dtype, PARTITIONS, max(chunks_of(elements), 1), heads[1], piece[1], buffers=buffers)
        transpose_heads(k, block, self.keys.cut(heads, piece))
        return block

    def _values(self, heads: Span, piece: Span, buffers: int) -> Block:
        k, width = self.k, self.values.shape[-1]
        dtype = self.values.dtype if is_matched(self.op, self.values.dtype) else DType.FLOAT32
        block = k.tile(dtype, PARTITIONS, chunks_of(piece[1]), heads[1], width, buffers=buffers)
        source = self.values.cut(heads, piece).transposed((1, 0, 2))
        for chunk, depth in each_chunk(k, piece[1]):
            k.copy(block.cut(depth, (chunk, 1)), source.cut((chunk * PARTITIONS, depth)).far())
        return block

    def _blocks(self) -> Iterator[tuple[Span, int, int]]:
        """Blocks of query rows, the keys that every row of the block sees, and those that its last row sees."""
        k, rows, keys = self.k, self.q.shape[2], self.keys.shape[1]
        stair = -(-chunks_of(rows) // _STAIRS) * PARTITIONS if self.causal else rows
        for first in range(0, rows, stair):
            height = min(stair, rows - first)
            for row, count in k.spans(height, PARTITIONS):
                yield (row + first, count), first, min(first + height, keys) if self.causal else keys


@dataclass(frozen=True)
class _Block:
    """Up to 128 query rows of several heads. All of the rows see the first `open_` of `extent` keys."""

    whole: _Attention
    heads: Span
    rows: Span
    open_: int
    extent: int
    there: tuple[Block, Block] | None  # keys and values, where all of them are at hand
    nowhere: Nowhere | None

    @property
    def k(self) -> Kernel:
        return self.whole.k

    def write(self) -> None:
        k, whole, (heads, each, count) = self.k, self.whole, (self.heads[1], self.whole.q.shape[1], self.rows[1])
        elements, width = whole.q.shape[-1], whole.values.shape[-1]
        columns = k.tile(whole.q.dtype, PARTITIONS, max(chunks_of(elements), 1), heads * each, count, buffers=2)
        rows = whole.q.cut(self.heads, (0, each), self.rows)
        for query in range(each):
            transpose_heads(k, columns, rows.pick(1, query), query * heads)
        made = k.tile(whole.out.dtype, count, heads * each, width, buffers=2)
        seen = None if self.nowhere else whole.mask
        masked = self._mask_of_all(seen) if seen and self.there else None
        for query in range(each):
            with k.loop(heads) as head, k.scope():
                at = head + query * heads
                mask = None if seen is None else seen.pick(1, query).pick(0, self.heads[0] + head)
                place = made.cut(count, (at, 1))
                scores = self._scores(columns, mask, masked, head, at)
                _Rows(self, scores).write(place)
        for query in range(each):
            out = whole.out.cut(self.heads, (query, 1), self.rows).pick(1, 0)
            k.copy(out.transposed((1, 0, 2)).far(), made.cut(count, (query * heads, heads)))

    def _scores(self, columns: Block, mask: View | None, masked: Block | None, head: Affine, query: Affine) -> Scores:
        whole = self.whole
        return Scores(
            k=self.k,
            op=whole.op,
            causal=whole.causal,
            buffers=whole.plan.buffers,
            queries=columns,
            elements=whole.q.shape[-1],
            query=query,
            head=head,
            rows=self.rows,
            open_=self.open_,
            nowhere=self.nowhere,
            mask=mask,
            masked=masked,
        )

    def _mask_of_all(self, mask: View) -> Block | None:
        """The mask rows, loaded once where all heads share them."""
        if any(mask.strides[:2]):
            return None
        block = self.k.tile(mask.dtype, self.rows[1], self.extent, buffers=2)
        self.k.copy(block.whole, mask.pick(0, 0).pick(0, 0).cut(self.rows, (0, self.extent)).far())
        return block


@dataclass(frozen=True)
class _Rows:
    """The query rows of one head."""

    block: _Block
    scores: Scores

    @property
    def k(self) -> Kernel:
        return self.block.k

    @property
    def count(self) -> int:
        return self.block.rows[1]

    def write(self, dst: Tile) -> None:
        if self.block.there is not None:
            self._write_at_once(dst, *self.block.there)
        else:
            self._write_in_pieces(dst)

    def _write_at_once(self, dst: Tile, keys: Block, values: Block) -> None:
        piece = (0, self.block.extent)
        scores = self.scores.made(keys, piece)
        negative = self.scores.negative(self.scores.highest(scores))
        total = self.scores.column()
        self.scores.exponentials(scores, negative, total)
        probabilities = self.scores.probabilities(scores, self.scores.inverse(total))
        with self.k.scope():
            sums = self._sums()
            self._multiply(sums, probabilities, values, Affine(), self.block.extent)
            self._bring(dst, sums)

    def _write_in_pieces(self, dst: Tile) -> None:
        k, step = self.k, self.block.whole.plan.piece
        highest, total = self.scores.column(), self.scores.column()
        self.scores.memset(highest, LOWEST)
        for piece in k.spans(self.block.extent, step):
            with k.scope():
                more = self.scores.highest(self.scores.made(self._loaded(piece)[0], piece))
                self.scores.combine(highest, highest, Alu.MAXIMUM, more)
        negative = self.scores.negative(highest)
        self.scores.memset(total, 0.0)
        for piece in k.spans(self.block.extent, step):
            with k.scope():
                scores, some = self.scores.made(self._loaded(piece)[0], piece), self.scores.column()
                self.scores.exponentials(scores, negative, some)
                self.scores.combine(total, total, Alu.ADD, some)
        inverse = self.scores.inverse(total)
        with k.scope():
            sums = self._sums()
            for start, size in k.spans(self.block.extent, step):
                with k.scope():
                    keys, values = self._loaded((start, size))
                    scores = self.scores.made(keys, (start, size))
                    self.scores.exponentials(scores, negative, None)
                    self._multiply(sums, self.scores.probabilities(scores, inverse), values, start, size)
            self._bring(dst, sums)

    def _loaded(self, piece: Span) -> tuple[Block, Block]:
        return self.block.whole.load(self.block.heads, piece)

    def _sums(self) -> Block:
        width = self.block.whole.values.shape[-1]
        banks = -(-width // BANK)
        return self.k.psum(self.count, banks, BANK, buffers=2 if banks == 1 else 1)

    def _multiply(self, sums: Block, probabilities: Block, values: Block, start: Affine, size: int) -> None:
        k, whole = self.k, self.block.whole
        dtype = whole.op.probabilities if is_matched(whole.op, whole.values.dtype) else DType.FLOAT32
        columns = k.tile(dtype, PARTITIONS, chunks_of(size), self.count, buffers=whole.plan.buffers)
        (full, rest), lanes = divmod(size, PARTITIONS), (0, self.count)
        if full:
            transpose_block(
                k, columns, replace(probabilities, shape=(full, PARTITIONS)), Affine(), lanes, Engine.SCALAR
            )
        if rest:
            last = probabilities.offset + full * PARTITIONS * probabilities.dtype.itemsize
            transpose_block(
                k, columns, replace(probabilities, shape=(1, rest), offset=last), Affine(full), lanes, Engine.SCALAR
            )
        for chunk, depth in each_chunk(k, size):
            for bank, wide in self._banks():
                k.emit(
                    Matmul(
                        engine=Engine.TENSOR,
                        dst=sums.cut(self.count, (bank, 1), (0, wide)),
                        stationary=columns.cut(depth, (chunk, 1)),
                        moving=values.cut(depth, (chunk, 1), (self.scores.head, 1), (bank * BANK, wide)),
                        accumulate=start + chunk,
                    )
                )

    def _banks(self) -> Iterator[tuple[int, int]]:
        width = self.block.whole.values.shape[-1]
        return ((bank, min(width - bank * BANK, BANK)) for bank in range(-(-width // BANK)))

    def _bring(self, dst: Tile, sums: Block) -> None:
        width = self.block.whole.values.shape[-1]
        src = replace(sums, shape=(sums.shape[0] * BANK,)).cut(self.count, (0, width))
        self.k.emit(TensorCopy(engine=Engine.VECTOR, dst=dst, src=src))
