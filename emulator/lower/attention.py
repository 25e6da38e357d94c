"""Attention kernel: scores of 128 query rows at a time, whose softmax stays in SBUF.

If all scores of a row fit SBUF, the row is processed in one pass, and maximum, sum and rounded probabilities equal
those of a separate softmax. Otherwise the keys are taken in pieces, with an online softmax: a running maximum and sum,
and a result that is rescaled as the maximum grows. Keys and values stay in SBUF if they fit, for all rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine, divided
from nxpipe.emulator.isa.instruction import Alu, Engine, Instruction
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import ScalarTensorTensor, TensorCopy, TensorScalar
from nxpipe.emulator.lower.attention_few_rows import FewRowsTiling, FewRowsViews, write_few_rows
from nxpipe.emulator.lower.attention_scores import LOWEST, MaskedKeys, Scores, is_matched, load_mask
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.linear import batch_loop
from nxpipe.emulator.lower.matmul.tiling import BANK
from nxpipe.emulator.lower.tiles import fill
from nxpipe.emulator.lower.transpose import chunks_of, each_chunk, transpose_heads, transpose_parts, transpose_type
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import Attention

_LONG_RUN = 4096  # bytes: heads are loaded together up to this run length, because short runs make DMA slow


def split_heads(
    q: View, k: View, v: View, mask: View | None, home: View
) -> tuple[int, tuple[View, View, View, View, View | None]]:
    """The number of batch axes, and the views (queries, keys, values, result, mask) that begin with these axes.

    Queries, result and mask continue with [key heads, query heads per key head, rows, ...], keys and values with [key
    heads, keys, ...] (grouped-query attention). If each query head has a single row (decode), the query heads of a key
    head become the rows, which are then multiplied together."""
    *batch, heads, rows, _ = home.shape if home.rank > 2 else (1, *home.shape)
    shared = k.shape[-3] if k.rank > 2 else 1
    key_heads = shared if heads % max(shared, 1) == 0 else heads

    def queries(view: View) -> View:
        broadcast = view.broadcast((*batch, heads, rows, view.shape[-1]))
        batch_axes, stride = len(batch), broadcast.strides[len(batch)]
        shape = (*batch, key_heads, heads // key_heads, *broadcast.shape[-2:])
        broadcast = replace(
            broadcast,
            shape=shape,
            strides=(*broadcast.strides[:batch_axes], stride * shape[batch_axes + 1], *broadcast.strides[batch_axes:]),
        )
        order = (*range(batch_axes + 1), batch_axes + 2, batch_axes + 1, batch_axes + 3)
        return broadcast.transposed(order) if rows == 1 else broadcast

    def keys(view: View) -> View:
        return view.broadcast((*batch, key_heads, *view.shape[-2:]))

    masks = queries(mask.broadcast((*mask.shape[:-1], k.shape[-2]))) if mask else None
    return len(batch), (queries(q), keys(k), keys(v), queries(home), masks)


@dataclass(frozen=True)
class AttentionTiling:
    """The tile sizes of an attention kernel: the largest that fit SBUF, since all tilings do the same work."""

    heads: int  # key heads in SBUF at a time
    piece: int  # keys in SBUF at a time
    buffers: int  # of scores and probabilities: 2 is double buffering
    loads: int = 1  # buffers of keys and values
    scores: int = 0  # keys whose scores are in SBUF at a time, if not those of all keys in SBUF

    def __str__(self) -> str:
        by = f" {self.scores} scores at a time," if self.scores else ""
        return f"{self.heads} key heads, {self.piece} keys,{by} {self.buffers} score buffers, {self.loads} key buffers"

    @staticmethod
    def of(k: Kernel, op: Attention, views: Sequence[View], mask: View | None) -> "AttentionTiling":
        q, keys, values, out = views
        max_heads = min(keys.shape[0], max(ceil(_LONG_RUN / (keys.shape[-1] * keys.dtype.itemsize + 1)), 1))
        sizes = _AttentionCosts(op, q, keys, values, out, mask)
        free = k.free_bytes(Memory.SBUF)
        count = keys.shape[1]
        for buffers in (2, 1):
            for heads in range(max_heads, 0, -1):
                for loads in (2, 1):
                    if sizes.nbytes(heads, count, buffers, loads) <= free // (2 if loads > 1 else 1):
                        return AttentionTiling(heads, count, buffers, loads)
        for scores in (_SCORES, _SCORES // 2, BANK):
            if scores < count and sizes.nbytes(1, count, 2, scores=scores) <= free:
                return AttentionTiling(1, count, 2, scores=scores)
        pieces = range(min(count // PARTITIONS * PARTITIONS, _SCORES), PARTITIONS, -PARTITIONS)
        fitting = (piece for piece in pieces if sizes.nbytes(1, piece, 1, loads=2) <= free)
        return AttentionTiling(1, next(fitting, PARTITIONS), 1, 2)


@dataclass(frozen=True)
class _AttentionCosts:
    """SBUF sizes of an attention kernel's tiles."""

    op: Attention
    q: View  # [key heads, query heads per key head, rows, elements]
    keys: View  # [key heads, keys, elements]
    values: View
    out: View
    mask: View | None

    def nbytes(self, heads: int, piece: int, buffers: int, loads: int = 1, scores: int = 0) -> int:
        """Bytes per partition, with keys and values in `loads` buffers."""
        by_row = self._scores(heads, scores or piece, buffers)
        return loads * self._keys(heads, piece) + self._queries(heads) + by_row + 4096

    def _keys(self, heads: int, piece: int) -> int:
        elements, width = self.keys.shape[-1], self.values.shape[-1]
        size = 4 if not is_matched(self.op, self.values.dtype) else self.values.dtype.itemsize
        key_bytes = chunks_of(elements) * heads * piece * self.keys.dtype.itemsize
        return key_bytes + chunks_of(piece) * heads * width * size

    def _queries(self, heads: int) -> int:
        query_heads, elements = heads * self.q.shape[1], self.q.shape[-1]
        loaded = query_heads * elements * transpose_type(self.q.dtype).itemsize
        transposed = chunks_of(elements) * query_heads * PARTITIONS * self.q.dtype.itemsize
        return 2 * (loaded + transposed + query_heads * self.out.shape[-1] * self.out.dtype.itemsize)

    def _scores(self, heads: int, piece: int, buffers: int) -> int:
        size, transposed = self.op.probabilities.itemsize, transpose_type(self.op.probabilities).itemsize
        columns = 4 if not is_matched(self.op, self.values.dtype) else size
        mask = 2 * (self.mask.dtype.itemsize if self.mask else 0)
        by_key = 4 + size + (transposed if transposed != size else 0) + mask
        if piece > BANK:
            return buffers * (piece + PARTITIONS) * (by_key + columns)
        together = heads_together(piece, self.values.shape[-1], heads)
        return _PIPELINED * (BANK * (4 + by_key) + max(2 * BANK, together * PARTITIONS) * columns)


def heads_together(keys: int, width: int, heads: int) -> int:
    """The number of heads, evenly divided, whose scores of a row fit a PSUM bank, as do their results: their softmax
    has one instruction for each step."""
    most = max(min(BANK // max(keys, width), heads), 1)
    return -(-heads // -(-heads // most))


_SCORES: Final = 2048  # keys whose scores are in SBUF at a time, if not those of a whole row

_PIPELINED: Final = 4  # groups of heads in a software pipeline

# Causal attention cuts the query rows into this many groups. A group computes scores only for the keys that its last
# row sees, which skips nearly half of the score matrix.
_CAUSAL_GROUPS: Final = 8


@lowers(Attention)
def _attention(low: Lowering, node: Node, op: Attention) -> None:
    q, k, v = map(low.view, node.operands[:3])
    mask = low.view(node.operands[3]) if len(node.operands) > 3 else None
    home = low.transposable_home(node.result)
    if not home.elements:
        return
    causal = op.causal and home.shape[-2] > 1
    if op.causal:  # no row sees keys after the last row's own position; a single row sees the first key only
        visible = min(k.shape[-2], home.shape[-2])
        k, v = (view.cut(*((0, size) for size in view.shape[:-2]), (0, visible)) for view in (k, v))
        if mask is not None and mask.shape[-1] > 1:
            mask = mask.cut(*((0, size) for size in mask.shape[:-1]), (0, visible))
    if not k.shape[-2]:
        fill(low.k, home, 0.0)
        return
    axes, views = split_heads(q, k, v, mask, home)
    if _write_few_rows(low.k, op, causal, axes, views):
        return
    present = [view for view in views if view is not None]
    for _, batch_views in batch_loop(low.k, present, axes):
        tiling = AttentionTiling.of(low.k, op, batch_views[:4], batch_views[4] if mask else None)
        low.k.tilings.append(tiling)
        _Attention(low.k, op, causal, tiling, *batch_views).write()


def _write_few_rows(
    k: Kernel, op: Attention, causal: bool, axes: int, views: tuple[View, View, View, View, View | None]
) -> bool:
    """Write the attention with the keys on the partitions; False if another form is better, or necessary."""
    if causal:
        return False
    present = [view for view in views if view is not None]
    if not axes:
        present, axes = [replace(view, shape=(1, *view.shape), strides=(0, *view.strides)) for view in present], 1
    first = present
    for _ in range(axes - 1):
        first = [view.pick(0, 0) for view in first]
    few = FewRowsViews.of(first)
    tiling = FewRowsTiling.of(k, op, few) if few else None
    if tiling is None:
        return False
    k.tilings.append(tiling)
    for _, batch_views in batch_loop(k, present, axes - 1):
        few = FewRowsViews.of(batch_views)
        assert few is not None  # its shapes and strides are those of the first one
        write_few_rows(k, op, tiling, few)
    return True


@dataclass(frozen=True)
class _Attention:
    """The attention of one batch element."""

    k: Kernel
    op: Attention
    causal: bool  # False for a single row
    tiling: AttentionTiling
    q: View  # [key heads, query heads per key head, rows, elements]
    keys: View  # [key heads, keys, elements]
    values: View
    out: View  # shape of q
    mask: View | None = None

    def write(self) -> None:
        k, whole = self.k, self.tiling.piece == self.keys.shape[1]
        for heads in k.spans(self.keys.shape[0], self.tiling.heads):
            with k.scope():
                masked_keys = (
                    MaskedKeys.of(k, self.op, self.q.dtype, self.mask) if self.mask and self.q.shape[-1] else None
                )
                resident = self.load(heads, (0, self.tiling.piece)) if whole else None
                for rows, first, extent in self._blocks():
                    with k.scope():
                        _Block(self, heads, rows, first, extent, resident, masked_keys).write()

    def load(self, heads: Span, piece: Span) -> tuple[Block, Block]:
        """Load keys as [128 elements, chunks, heads, keys] and values as [128 keys, chunks, heads, elements]."""
        return self._keys(heads, piece), self._values(heads, piece)

    def _keys(self, heads: Span, piece: Span) -> Block:
        k, elements = self.k, self.keys.shape[-1]
        shape = (max(chunks_of(elements), 1), heads[1], piece[1])
        block = k.tile(self.keys.dtype, PARTITIONS, *shape, buffers=self.tiling.loads)
        transpose_heads(k, block, self.keys.cut(heads, piece), engine=Engine.SCALAR)
        return block

    def _values(self, heads: Span, piece: Span) -> Block:
        k, width = self.k, self.values.shape[-1]
        dtype = self.values.dtype if is_matched(self.op, self.values.dtype) else DType.FLOAT32
        block = k.tile(dtype, PARTITIONS, chunks_of(piece[1]), heads[1], width, buffers=self.tiling.loads)
        source = self.values.cut(heads, piece).transposed((1, 0, 2))
        for chunk, depth in each_chunk(k, piece[1]):
            k.copy(block.cut(depth, (chunk, 1)), source.cut((chunk * PARTITIONS, depth)).far())
        return block

    def _blocks(self) -> Iterator[tuple[Span, int, int]]:
        """Blocks of query rows, each with the number of keys that every row sees, and the number that the last row
        sees."""
        k, rows, keys = self.k, self.q.shape[2], self.keys.shape[1]
        group = -(-chunks_of(rows) // _CAUSAL_GROUPS) * PARTITIONS if self.causal else rows
        for first in range(0, rows, group):
            height = min(group, rows - first)
            for row, count in k.spans(height, PARTITIONS):
                yield (row + first, count), first, min(first + height, keys) if self.causal else keys


@dataclass(frozen=True)
class _Block:
    """Up to 128 query rows of several heads. Every row sees the first `visible_keys` of `extent` keys."""

    whole: _Attention
    heads: Span
    rows: Span
    visible_keys: int
    extent: int
    resident: tuple[Block, Block] | None  # keys and values, if SBUF holds all of them
    masked_keys: MaskedKeys | None

    @property
    def k(self) -> Kernel:
        return self.whole.k

    def write(self) -> None:
        k, whole, (heads, query_heads, count) = self.k, self.whole, (self.heads[1], self.whole.q.shape[1], self.rows[1])
        elements, width = whole.q.shape[-1], whole.values.shape[-1]
        columns = k.tile(whole.q.dtype, PARTITIONS, max(chunks_of(elements), 1), heads * query_heads, count, buffers=2)
        rows = whole.q.cut(self.heads, (0, query_heads), self.rows)
        engine = Engine.SCALAR if self._masks_on_vector else Engine.VECTOR
        with k.loop(query_heads) as query:
            transpose_heads(k, columns, rows.pick(1, query), query * heads, engine)
        out_tile = k.tile(whole.out.dtype, count, heads * query_heads, width, buffers=2)
        mask_view = None if self.masked_keys else whole.mask
        shared_mask = self._shared_mask(mask_view) if mask_view and self._is_whole else None

        def rows_of(query: Affine, head: Affine, together: int) -> _Rows:
            mask = None if mask_view is None else mask_view.pick(1, query).cut((head + self.heads[0], together))
            scores = self._scores(columns, mask, shared_mask, (head, together), query * heads + head)
            return _Rows(self, scores, out_tile.cut(count, (query * heads + head, together)))

        together = heads_together(self.extent, width, heads) if self._is_whole else 1
        if heads == together:
            self._write_all(query_heads, lambda query: rows_of(query, Affine(), heads))
        else:
            full, remainder = divmod(heads, together)
            with k.loop(query_heads) as query:
                self._write_all(full, lambda number: rows_of(query, number * together, together))
                if remainder:
                    self._write_all(1, lambda _: rows_of(query, Affine(full * together), remainder))
        with k.loop(query_heads) as query:
            home = whole.out.cut(self.heads, (query, 1), self.rows).pick(1, 0)
            k.copy(home.transposed((1, 0, 2)).far(), out_tile.cut(count, (query * heads, heads)))

    def _write_all(self, count: int, rows_of: Callable[[Affine], "_Rows"]) -> None:
        """Write groups of rows, several at a time."""
        k = self.k
        most = _PIPELINED if self.extent <= BANK else self.whole.tiling.buffers
        together = -(-count // -(-count // most))
        for first, groups in k.spans(count, together if self._is_whole else 1):
            with k.scope():
                if self._is_whole:
                    self._write_pipelined([rows_of(first + number) for number in range(groups)])
                else:
                    rows_of(first).write_in_pieces()

    def _write_pipelined(self, groups: Sequence["_Rows"]) -> None:
        """Write groups of rows in a software pipeline. An engine runs its instructions in program order; it would be
        idle if those of one group, which wait for each other, came before all of the next."""
        k = self.k
        sums, transposed, products = (k.tile(DType.FLOAT32, PARTITIONS, 2, BANK, memory=Memory.PSUM) for _ in range(3))
        banks = [tuple(_bank(block, number) for block in (sums, transposed, products)) for number in range(2)]
        for step in range(len(groups) + 3):
            for stage, lag in ((_Rows.start, 0), (_Rows.exponentiate, 1), (_Rows.multiply, 3), (_Rows.normalise, 2)):
                if 0 <= step - lag < len(groups):
                    stage(groups[step - lag], *banks[(step - lag) % 2])

    @property
    def _is_whole(self) -> bool:
        """True if the scores of whole rows are in SBUF."""
        return self.resident is not None and not self.whole.tiling.scores

    @property
    def _masks_on_vector(self) -> bool:
        """True if the vector engine masks the scores; the scalar engine then copies the transposed queries."""
        return self.whole.mask is not None and self.masked_keys is None

    def _scores(
        self, columns: Block, mask: View | None, shared_mask: Block | None, heads: tuple[Affine, int], query: Affine
    ) -> Scores:
        whole = self.whole
        return Scores(
            k=self.k,
            op=whole.op,
            causal=whole.causal,
            buffers=1 if self._is_whole else whole.tiling.buffers,
            queries=columns,
            elements=whole.q.shape[-1],
            query=query,
            head=heads[0],
            heads=heads[1],
            in_bank=self._is_whole and heads[1] * self.extent <= BANK,
            rows=self.rows,
            visible_keys=self.visible_keys,
            masked_keys=self.masked_keys,
            mask=mask,
            loaded_mask=shared_mask,
        )

    def _shared_mask(self, mask: View) -> Block | None:
        """The mask rows [rows, 1, keys], loaded once if all heads share them; otherwise None."""
        if any(mask.strides[:2]):
            return None
        return load_mask(self.k, mask.pick(1, 0).cut((0, 1), self.rows, (0, self.extent)))


def _bank(block: Block, number: int) -> Block:
    """One of the banks of a tile in PSUM."""
    return replace(block, shape=block.shape[1:], offset=block.offset + number * BANK * block.dtype.itemsize)


@dataclass
class _Rows:
    """The query rows of several heads, in stages that follow one another. Each has banks of PSUM for scores, transposed
    probabilities and results."""

    block: _Block
    scores: Scores
    place: Tile  # of the result
    _scored: Block | None = None
    _exponentials: Block | None = None
    _total: Block | None = None
    _columns: Block | None = None

    @property
    def k(self) -> Kernel:
        return self.block.k

    @property
    def count(self) -> int:
        return self.block.rows[1]

    @property
    def piece(self) -> tuple[int, int]:
        return (0, self.block.extent)

    def start(self, bank: Block, *_: Block) -> None:
        assert self.block.resident is not None
        heads, extent = self.scores.heads, self.block.extent
        if self.scores.in_bank:
            self._scored = replace(bank, partitions=self.count, shape=(heads, extent))
        else:
            self._scored = self.k.tile(DType.FLOAT32, self.count, heads, extent)
        self.scores.start(self._scored, self.block.resident[0], self.piece)

    def exponentiate(self, *_: Block) -> None:
        assert self._scored is not None
        scores = self.scores.masked(self._scored, self.piece)
        negative = self.scores.negative(self.scores.highest(scores), scores.scale)
        self._total = self.scores.column()
        self._exponentials = self.scores.exponentials(scores, negative, self._total)

    def normalise(self, _: Block, bank: Block, *__: Block) -> None:
        assert self._exponentials is not None
        assert self._total is not None
        probabilities = self.scores.probabilities(self._exponentials, self.scores.inverse(self._total))
        self._columns = self._transposed(probabilities, self.block.extent, bank if self.scores.in_bank else None)

    def multiply(self, _: Block, __: Block, bank: Block) -> None:
        assert self.block.resident is not None
        assert self._columns is not None
        width = self.block.whole.values.shape[-1]
        with self.k.scope():
            in_bank = self.scores.heads * width <= BANK
            sums = replace(bank, partitions=self.count, shape=(self.scores.heads, width)) if in_bank else self._sums()
            self._multiply(sums, self._columns, self.block.resident[1], Affine(), self.block.extent)
            self._copy_from_psum(self.place, sums)

    def write_in_pieces(self) -> None:
        """Online softmax: one pass over the keys, with a running maximum. The sums so far are those of exponentials
        relative to an older maximum, and are multiplied by the exponential of its difference from the newer one."""
        k, width = self.k, self.block.whole.values.shape[-1]
        highest, total = self.scores.column(), self.scores.column()
        result = k.tile(DType.FLOAT32, self.count, width, buffers=2)
        self.scores.memset(highest.whole, LOWEST)
        self.scores.memset(total.whole, 0.0)
        self.scores.memset(result.whole, 0.0)
        for scores, piece in self._pieces():
            with k.scope():
                self._add_piece(scores, piece, highest, total, result)
        inverse = self.scores.inverse(total)
        k.emit(_scaled(self.place, result.whole, inverse.whole))

    def _pieces(self) -> Iterator[tuple[Scores, Span]]:
        """Pieces of the keys: those that every row sees, which need no causal mask, and the others."""
        k, extent, step = self.k, self.block.extent, self.block.whole.tiling.scores or self.block.whole.tiling.piece
        seen = min(self.block.visible_keys, extent) // PARTITIONS * PARTITIONS if self.scores.causal else extent
        for piece in k.spans(seen, step):
            yield replace(self.scores, causal=False), piece
        for start, size in k.spans(extent - seen, step):
            yield replace(self.scores, visible_keys=0), (start + seen, size)

    def _add_piece(self, scores: Scores, piece: Span, highest: Block, total: Block, result: Block) -> None:
        k, size = self.k, piece[1]
        keys, values, first = self._load(piece)
        tile = scores.compute(keys, piece, first)
        newer, factor, piece_total = scores.highest(tile), scores.column(), scores.column()
        scores.combine(newer, newer, Alu.MAXIMUM, highest)
        negative = scores.negative(newer, 1.0)
        k.emit(
            Activation(
                engine=Engine.SCALAR, dst=factor.whole, src=highest.whole, function=Function.EXP, bias=negative.whole
            )
        )
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=highest.whole, src=newer.whole))
        columns = self._transposed(scores.rounded_exponentials(tile, negative, piece_total), size, None)
        k.emit(_scaled(total.whole, total.whole, factor.whole, piece_total.whole))
        sums = self._sums()
        self._multiply(sums, columns, values, divided(first, PARTITIONS), size)
        k.emit(_scaled(result.whole, result.whole, factor.whole, self._joined(sums)))

    def _load(self, piece: Span) -> tuple[Block, Block, Affine]:
        """Keys and values of a piece, and the place of its first key in them."""
        if self.block.resident:
            return *self.block.resident, affine(piece[0])
        return *self.block.whole.load(self.block.heads, piece), Affine()

    def _sums(self) -> Block:
        """Sums [rows, heads, elements], or of a single head [rows, banks, 512 elements] if they need several banks."""
        width = self.block.whole.values.shape[-1]
        if width <= BANK:
            return self.k.psum(self.count, self.scores.heads, width)
        return self.k.psum(self.count, -(-width // BANK), BANK, buffers=1)

    def _multiply(self, sums: Block, columns: Block, values: Block, first: Affine, size: int) -> None:
        """Multiply probabilities by values, from a chunk on."""
        k, width, at = self.k, self.block.whole.values.shape[-1], self.scores.head
        with k.loop(self.scores.heads) as head:
            for chunk, depth in each_chunk(k, size):
                for bank, part in ((bank, min(width - bank * BANK, BANK)) for bank in range(-(-width // BANK))):
                    k.emit(
                        Matmul(
                            engine=Engine.TENSOR,
                            dst=sums.cut(self.count, (head + bank, 1), (0, part)),
                            stationary=columns.cut(depth, (head, 1), (chunk, 1)),
                            moving=values.cut(depth, (first + chunk, 1), (at + head, 1), (bank * BANK, part)),
                            accumulate=chunk,
                        )
                    )

    def _transposed(self, probabilities: Block, size: int, bank: Block | None) -> Block:
        """Probabilities [rows, heads, keys], transposed to [128 keys, heads, chunks, rows] by way of a bank."""
        k, count, (full, tail) = self.k, self.count, divmod(size, PARTITIONS)
        op, values = self.block.whole.op, self.block.whole.values
        dtype = op.probabilities if is_matched(op, values.dtype) else DType.FLOAT32
        columns = k.tile(dtype, PARTITIONS, self.scores.heads, chunks_of(size), count, buffers=self.scores.buffers)
        most = k.core.psum_bank // (count * probabilities.dtype.itemsize)
        for first, chunks, depth in ((0, full, PARTITIONS), (full, int(tail > 0), tail)):
            for chunk, width in k.spans(chunks, most):
                for head, heads in k.spans(self.scores.heads, max(most // width, 1)):
                    with k.scope():
                        place = (head, heads), (chunk + first, width)
                        transpose_parts(k, columns, probabilities, place, depth, bank)
        return columns

    def _copy_from_psum(self, dst: Tile, sums: Block) -> None:
        self.k.emit(TensorCopy(engine=Engine.VECTOR, dst=dst, src=self._joined(sums)))

    def _joined(self, sums: Block) -> Tile:
        width = self.block.whole.values.shape[-1]
        return sums.whole if width <= BANK else replace(sums, shape=(sums.shape[0] * BANK,)).cut(self.count, (0, width))


def _scaled(dst: Tile, src: Tile, factor: Tile, plus: Tile | None = None) -> Instruction:
    """`src * factor + plus`, with a factor for each row."""
    if plus is None:
        return TensorScalar(engine=Engine.VECTOR, dst=dst, src=src, op0=Alu.MULTIPLY, operand0=factor)
    return ScalarTensorTensor(
        engine=Engine.VECTOR, dst=dst, src=src, op0=Alu.MULTIPLY, operand0=factor, op1=Alu.ADD, right=plus
    )
