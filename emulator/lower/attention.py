"""Attention: scores of 128 query rows at a time, whose softmax never leaves SBUF.

A row's scores stand side by side in SBUF where they fit, so that maximum, sum and rounded probabilities are those of a
softmax by itself. Where they do not fit, keys pass by three times in pieces: for the maximum, for the sum, and for the
product. Scores are made anew each time, which costs less than bringing them back from HBM.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import TensorCopy
from nxpipe.emulator.lower.filling import fill
from nxpipe.emulator.lower.heads import Plan, matched, split
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.plan import BANK
from nxpipe.emulator.lower.products import each_of_batch
from nxpipe.emulator.lower.scores import LOWEST, Nowhere, Scores
from nxpipe.emulator.lower.turned import chunks_of, each_chunk, turn, turn_heads
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import Attention

_STAIRS: Final = 8  # of causal attention: groups of query rows, each of which sees as many keys as its last row does


@lowers(Attention)
def _attention(low: Lowering, node: Node, op: Attention) -> None:
    q, k, v = map(low.view, node.operands[:3])
    mask = low.view(node.operands[3]) if len(node.operands) > 3 else None
    home = low.turned_home(node.result)
    if not home.elements:
        return
    causal = op.causal and home.shape[-2] > 1
    if op.causal:  # nobody sees keys behind the last row's own; the one row of a decoder sees the first alone
        seen = min(k.shape[-2], home.shape[-2])
        k, v = (view.cut(*((0, size) for size in view.shape[:-2]), (0, seen)) for view in (k, v))
        if mask is not None and mask.shape[-1] > 1:
            mask = mask.cut(*((0, size) for size in mask.shape[:-1]), (0, seen))
    if not k.shape[-2]:
        fill(low.k, home, 0.0)
        return
    axes, views = split(q, k, v, mask, home)
    given = [view for view in views if view is not None]
    for _, here in each_of_batch(low.k, given, axes):
        plan = Plan.of(low.k, op, here[:4], here[4] if mask else None)
        _Attention(low.k, op, causal, plan, *here).write()


@dataclass(frozen=True)
class _Attention:
    k: Kernel
    op: Attention
    causal: bool  # and of more than one row
    plan: Plan
    q: View  # [key heads, queries of each, rows, elements]
    keys: View  # [key heads, keys, elements]
    values: View
    out: View  # as q
    mask: View | None = None

    def write(self) -> None:
        k, whole = self.k, self.plan.piece == self.keys.shape[1]
        for heads in k.spans(self.keys.shape[0], self.plan.heads):
            with k.room():
                nowhere = Nowhere.of(k, self.op, self.q.dtype, self.mask) if self.mask and self.q.shape[-1] else None
                there = self.load(heads, (0, self.plan.piece)) if whole else None
                for rows, first, extent in self._blocks():
                    with k.room():
                        _Block(self, heads, rows, first, extent, there, nowhere).write()

    def load(self, heads: Span, piece: Span) -> tuple[Block, Block]:
        """Keys as [128 elements, chunks, heads, keys], values as [128 keys, chunks, heads, elements]."""
        turns = 1 if piece[1] == self.keys.shape[1] else 2
        return self._keys(heads, piece, turns), self._values(heads, piece, turns)

    def _keys(self, heads: Span, piece: Span, turns: int) -> Block:
        k, elements = self.k, self.keys.shape[-1]
        block = k.tile(self.keys.dtype, PARTITIONS, max(chunks_of(elements), 1), heads[1], piece[1], turns=turns)
        turn_heads(k, block, self.keys.cut(heads, piece))
        return block

    def _values(self, heads: Span, piece: Span, turns: int) -> Block:
        k, width = self.k, self.values.shape[-1]
        dtype = self.values.dtype if matched(self.op, self.values.dtype) else DType.FLOAT32
        block = k.tile(dtype, PARTITIONS, chunks_of(piece[1]), heads[1], width, turns=turns)
        source = self.values.cut(heads, piece).transposed((1, 0, 2))
        for chunk, depth in each_chunk(k, piece[1]):
            k.copy(block.cut(depth, (chunk, 1)), source.cut((chunk * PARTITIONS, depth)).far())
        return block

    def _blocks(self) -> Iterator[tuple[Span, int, int]]:
        """Query rows, how many keys each of them may see, and how many the last of them may."""
        k, rows, keys = self.k, self.q.shape[2], self.keys.shape[1]
        stair = -(-chunks_of(rows) // _STAIRS) * PARTITIONS if self.causal else rows
        for first in range(0, rows, stair):
            height = min(stair, rows - first)
            for row, count in k.spans(height, PARTITIONS):
                yield (row + first, count), first, min(first + height, keys) if self.causal else keys


@dataclass(frozen=True)
class _Block:
    """Up to 128 query rows of several heads. All of the rows may see the first `open_` of `extent` keys."""

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
        turned = k.tile(whole.q.dtype, PARTITIONS, max(chunks_of(elements), 1), heads * each, count, turns=2)
        rows = whole.q.cut(self.heads, (0, each), self.rows)
        for query in range(each):
            turn_heads(k, turned, rows.pick(1, query), query * heads)
        made = k.tile(whole.out.dtype, count, heads * each, width, turns=2)
        seen = None if self.nowhere else whole.mask
        masked = self._mask_of_all(seen) if seen and self.there else None
        for query in range(each):
            with k.loop(heads) as head, k.room():
                at = head + query * heads
                mask = None if seen is None else seen.pick(1, query).pick(0, self.heads[0] + head)
                place = made.cut(count, (at, 1))
                scores = self._scores(turned, mask, masked, head, at)
                _Rows(self, scores).write(place)
        for query in range(each):
            out = whole.out.cut(self.heads, (query, 1), self.rows).pick(1, 0)
            k.copy(out.transposed((1, 0, 2)).far(), made.cut(count, (query * heads, heads)))

    def _scores(self, turned: Block, mask: View | None, masked: Block | None, head: Affine, query: Affine) -> Scores:
        whole = self.whole
        return Scores(
            k=self.k,
            op=whole.op,
            causal=whole.causal,
            turns=whole.plan.turns,
            queries=turned,
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
        """Where all heads have the same."""
        if any(mask.strides[:2]):
            return None
        block = self.k.tile(mask.dtype, self.rows[1], self.extent, turns=2)
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
        with self.k.room():
            sums = self._sums()
            self._multiply(sums, probabilities, values, Affine(), self.block.extent)
            self._bring(dst, sums)

    def _write_in_pieces(self, dst: Tile) -> None:
        k, step = self.k, self.block.whole.plan.piece
        highest, total = self.scores.column(), self.scores.column()
        self.scores.memset(highest, LOWEST)
        for piece in k.spans(self.block.extent, step):
            with k.room():
                more = self.scores.highest(self.scores.made(self._loaded(piece)[0], piece))
                self.scores.combine(highest, highest, Alu.MAXIMUM, more)
        negative = self.scores.negative(highest)
        self.scores.memset(total, 0.0)
        for piece in k.spans(self.block.extent, step):
            with k.room():
                scores, some = self.scores.made(self._loaded(piece)[0], piece), self.scores.column()
                self.scores.exponentials(scores, negative, some)
                self.scores.combine(total, total, Alu.ADD, some)
        inverse = self.scores.inverse(total)
        with k.room():
            sums = self._sums()
            for start, size in k.spans(self.block.extent, step):
                with k.room():
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
        return self.k.psum(self.count, banks, BANK, turns=2 if banks == 1 else 1)

    def _multiply(self, sums: Block, probabilities: Block, values: Block, start: Affine, size: int) -> None:
        k, whole = self.k, self.block.whole
        dtype = whole.op.probabilities if matched(whole.op, whole.values.dtype) else DType.FLOAT32
        turned = k.tile(dtype, PARTITIONS, chunks_of(size), self.count, turns=whole.plan.turns)
        (full, rest), lanes = divmod(size, PARTITIONS), (0, self.count)
        if full:
            turn(k, turned, replace(probabilities, shape=(full, PARTITIONS)), Affine(), lanes, Engine.SCALAR)
        if rest:
            last = probabilities.offset + full * PARTITIONS * probabilities.dtype.itemsize
            turn(k, turned, replace(probabilities, shape=(1, rest), offset=last), Affine(full), lanes, Engine.SCALAR)
        for chunk, depth in each_chunk(k, size):
            for bank, wide in self._banks():
                k.emit(
                    Matmul(
                        engine=Engine.TENSOR,
                        dst=sums.cut(self.count, (bank, 1), (0, wide)),
                        stationary=turned.cut(depth, (chunk, 1)),
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
