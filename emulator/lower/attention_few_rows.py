"""Attention of few query rows, as in decode: the keys are on the partitions, so that the softmax uses all lanes.

Partition p holds consecutive keys, one of each chunk, so that a DMA reads long runs of the KV cache. A chunk of 128
keys is transposed on the tensor engine, and as the stationary operand gives the scores of these keys [128 keys, rows].
The scores of all rows of several batch elements and heads are one tile [128 keys, rows, chunks]: each step of their
softmax is one instruction. The tensor engine reduces over the partitions: it transposes their maxima, and adds up their
sums by a product with ones. Values as the stationary operand give the result [elements, rows].
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul, NcTranspose
from nxpipe.emulator.isa.vector import (
    CopyPredicated,
    Memset,
    Reciprocal,
    ScalarTensorTensor,
    TensorCopy,
    TensorReduce,
    TensorScalar,
    TensorTensor,
)
from nxpipe.emulator.lower.attention_scores import LOWEST, is_matched
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.matmul.tiling import BANK
from nxpipe.emulator.lower.transpose import chunks_of, copy_from_psum, each_chunk, transpose_type
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import Attention

_MOST_ROWS: Final = 64  # of a key head; with more, a softmax of rows on the partitions uses as many lanes
_LOAD: Final = 8192  # bytes of keys or values of a partition in one load: a run at nearly the full rate of DMA
_SPARE: Final = 8192  # bytes of a partition for small tiles


@dataclass(frozen=True)
class FewRowsTiling:
    """The tile sizes of an attention kernel with the keys on the partitions."""

    batch: int  # batch elements whose softmax is one tile
    heads: int  # key heads of each
    loaded: int  # key heads in one load
    chunks: int  # chunks of 128 keys in one load

    def __str__(self) -> str:
        return (
            f"keys on partitions, {self.batch} batch elements with {self.heads} key heads, loads of {self.loaded} "
            f"heads and {self.chunks * PARTITIONS} keys"
        )

    @staticmethod
    def of(k: Kernel, op: Attention, views: "FewRowsViews") -> "FewRowsTiling | None":
        """The largest tiles that fit SBUF; None if no tile fits."""
        batch, heads, rows, elements = views.q.shape
        width, keys = views.values.shape[-1], views.keys.shape[-2]
        key_bytes, value_bytes = elements * transpose_type(views.keys.dtype).itemsize, width * views.value_size(op)
        chunks = min(max(keys // PARTITIONS, 1), BANK // rows, max(_LOAD // max(key_bytes, value_bytes), 1))
        most_rows = min(PARTITIONS, BANK // chunks_of(width))
        most_heads = min(heads, most_rows // rows)
        most_loaded = max(min(BANK // (chunks * rows), 2 * _LOAD // (chunks * max(key_bytes, value_bytes))), 1)
        sizes = [(count, heads) for count in range(min(batch, most_rows // (heads * rows)), 0, -1)]
        sizes += [(1, count) for count in range(most_heads, 0, -1)]
        for batch_count, head_count in sizes:
            tiling = FewRowsTiling(batch_count, head_count, min(most_loaded, head_count), chunks)
            if tiling._nbytes(op, views) <= k.free_bytes(Memory.SBUF):
                return tiling
        return None

    def _nbytes(self, op: Attention, views: "FewRowsViews") -> int:
        """Bytes per partition."""
        elements, width, items = views.q.shape[-1], views.values.shape[-1], self.loaded * self.chunks
        key_type = views.keys.dtype
        keys = items * (
            elements * transpose_type(key_type).itemsize + chunks_of(elements) * PARTITIONS * key_type.itemsize
        )
        values = items * width * views.value_size(op)
        rows = self.batch * self.heads * views.q.shape[2]
        by_score = 4 + op.probabilities.itemsize + (0 if is_matched(op, views.values.dtype) else 4)
        scores = rows * chunks_of(views.keys.shape[-2]) * by_score + items * views.q.shape[2] * 8
        masks = 2 * rows * self.chunks * views.mask.dtype.itemsize if views.mask else 0
        queries = 4 * elements + chunks_of(elements) * rows * 4 + 4 * width
        return 2 * (keys + values) + scores + masks + 2 * queries + _SPARE


@dataclass(frozen=True)
class FewRowsViews:
    """Views [batch, key heads, rows of a key head, elements], and [batch, key heads, keys, elements]."""

    q: View
    keys: View
    values: View
    out: View
    mask: View | None  # [batch, key heads, rows, keys]

    @staticmethod
    def of(views: Sequence[View]) -> "FewRowsViews | None":
        """The views of `attention.split_heads` for one batch axis; None if another form is better, or necessary."""
        q, keys, values, out, *masks = views
        rows, (key_count, elements) = q.shape[2] * q.shape[3], keys.shape[-2:]
        long_runs = keys.strides[-1] == 1 or elements == 1
        if rows > _MOST_ROWS or key_count < PARTITIONS // 2 or not elements or not long_runs:
            return None
        if chunks_of(values.shape[-1]) * rows > BANK:
            return None

        lines = [view.reshaped((*view.shape[:2], rows, view.shape[-1])) for view in (q, out, *masks)]
        by_row = [view for view in lines if view is not None]
        if len(by_row) < len(lines):
            return None
        return FewRowsViews(by_row[0], keys, values, by_row[1], by_row[2] if masks else None)

    def value_size(self, op: Attention) -> int:
        return self.values.dtype.itemsize if is_matched(op, self.values.dtype) else 4

    def cut(self, batch: Span, heads: Span) -> "FewRowsViews":
        q, keys, values, out = (view.cut(batch, heads) for view in (self.q, self.keys, self.values, self.out))
        return FewRowsViews(q, keys, values, out, self.mask.cut(batch, heads) if self.mask else None)


def write_few_rows(k: Kernel, op: Attention, tiling: FewRowsTiling, views: FewRowsViews) -> None:
    with k.scope():
        ones = k.tile(DType.FLOAT32, PARTITIONS, PARTITIONS)
        k.emit(Memset(engine=Engine.GPSIMD, dst=ones.whole, value=1.0))
        for batch in k.spans(views.q.shape[0], tiling.batch):
            for heads in k.spans(views.q.shape[1], tiling.heads):
                with k.scope():
                    _Group(k, op, tiling, views.cut(batch, heads), ones).write()


@dataclass(frozen=True)
class _Piece:
    """Keys from `start` on: `chunks` consecutive keys in each of `lanes` partitions, one in each chunk from `first`
    on."""

    start: Affine
    first: Affine
    chunks: int
    lanes: int

    def of(self, view: View, axis: int) -> View:
        """A view with the keys on `axis` as [partitions, ..., chunks, ...]."""
        before, after = view.shape[:axis], view.shape[axis + 1 :]
        part = view.cut(*((0, size) for size in before), (self.start, self.lanes * self.chunks))
        folded = part.reshaped((*before, self.lanes, self.chunks, *after))
        assert folded is not None  # splitting an axis is always possible
        return folded.transposed((axis, *(other for other in range(folded.rank) if other != axis)))


@dataclass(frozen=True)
class _Group:
    """The rows of several batch elements and key heads, whose softmax is one tile."""

    k: Kernel
    op: Attention
    tiling: FewRowsTiling
    views: FewRowsViews
    ones: Block  # [128, 128]

    @property
    def heads(self) -> int:
        return self.views.q.shape[1]

    @property
    def rows(self) -> int:
        return self.views.q.shape[2]

    @property
    def all_rows(self) -> int:
        return self.views.q.shape[0] * self.heads * self.rows

    def write(self) -> None:
        k, width, keys = self.k, self.views.values.shape[-1], self.views.keys.shape[-2]
        columns = self._queries()
        sums = k.psum(PARTITIONS, chunks_of(width), self.all_rows)
        scores = k.tile(DType.FLOAT32, PARTITIONS, self.all_rows, chunks_of(keys))
        if self._is_boolean or keys % PARTITIONS:
            k.emit(Memset(engine=Engine.GPSIMD, dst=scores.whole, value=-float("inf")))
        for piece in self._pieces():
            self._write_scores(columns, scores, piece)
        probabilities = self._softmax(scores)
        for piece in self._pieces():
            self._multiply(sums, probabilities, piece)
        self._store(sums)

    @property
    def _is_boolean(self) -> bool:
        return self.views.mask is not None and self.views.mask.dtype is DType.UINT8

    def _pieces(self) -> Iterator[_Piece]:
        """The keys that are loaded at a time: loops over full pieces, then the remaining chunks, then a part of a
        chunk."""
        full, remainder = divmod(self.views.keys.shape[-2], PARTITIONS)
        for first, chunks in self.k.spans(full, self.tiling.chunks):
            yield _Piece(first * PARTITIONS, first, chunks, PARTITIONS)
        if remainder:
            yield _Piece(Affine(full * PARTITIONS), Affine(full), 1, remainder)

    def _heads_of(self, batch: Affine) -> Iterator[tuple[Span, Affine]]:
        """The key heads that are loaded at a time, and the number of their first row."""
        for head, count in self.k.spans(self.heads, self.tiling.loaded):
            with self.k.scope():
                yield (head, count), (batch * self.heads + head) * self.rows

    # Queries and keys

    def _queries(self) -> Block:
        """The queries as [128 elements, chunks, rows]."""
        k, view, elements = self.k, self.views.q, self.views.q.shape[-1]
        columns = k.tile(view.dtype, PARTITIONS, chunks_of(elements), self.all_rows, buffers=2)
        with k.scope():
            loaded = k.tile(transpose_type(view.dtype), self.all_rows, elements, buffers=2)
            self._copy_rows(view, loaded, load=True)
            for chunk, depth in each_chunk(k, elements):
                source = loaded.cut(self.all_rows, (chunk * PARTITIONS, depth))
                transposed = self._transposed(source)
                k.emit(TensorCopy(engine=Engine.VECTOR, dst=columns.cut(depth, (chunk, 1)), src=transposed.whole))
        return columns

    def _copy_rows(self, view: View, rows: Block, load: bool) -> None:
        """Copy between a view [batch, heads, rows, elements] and a tile with one row on each partition."""
        lines = replace(view, shape=view.shape[:-1], strides=view.strides[:-1]).merged()[0]
        lines = replace(lines, shape=(*lines.shape, view.shape[-1]), strides=(*lines.strides, view.strides[-1]))
        dst, src = (rows.whole, lines.far()) if load else (lines.far(), rows.whole)
        self.k.copy(dst, src)

    def _transposed(self, source: Tile) -> Block:
        """A tile transposed into PSUM."""
        transposed = self.k.tile(source.dtype, source.elements, source.partitions, memory=Memory.PSUM)
        self.k.emit(NcTranspose(engine=Engine.TENSOR, dst=transposed.whole, src=source))
        return transposed

    def _load(self, block: Block, view: View) -> None:
        """Load a view [partitions, heads, chunks, elements] by two DMAs, of which one starts while the other runs."""
        lanes, heads, _, elements = view.shape
        axis = 1 if heads > 1 else 2
        size = view.shape[axis]
        short = heads == 1 and size * elements * view.dtype.itemsize < _LOAD
        half = 0 if short else size // 2
        for part in ((0, size - half), (size - half, half)) if half else ((0, size),):
            spans = ((0, heads), part) if axis == 2 else (part,)
            self.k.copy(block.cut(lanes, *spans), view.cut((0, lanes), *spans).far())

    def _keys(self, batch: Affine, heads: Span, piece: _Piece) -> Block:
        """Keys as [128 elements, chunks of elements, heads and chunks of keys, 128 keys]."""
        k, elements = self.k, self.views.keys.shape[-1]
        dtype, items = self.views.keys.dtype, heads[1] * piece.chunks
        columns = k.tile(dtype, PARTITIONS, chunks_of(elements), items, piece.lanes, buffers=2)
        loaded = k.tile(transpose_type(dtype), piece.lanes, heads[1], piece.chunks, elements, buffers=2)
        self._load(loaded, piece.of(self.views.keys.pick(0, batch).cut(heads), axis=1))
        rows = replace(loaded, shape=(items, elements))
        bank = k.core.psum_bank // (piece.lanes * rows.dtype.itemsize)
        for chunk, depth in each_chunk(k, elements):
            for first, count in k.spans(items, 2 * bank):
                with k.scope():
                    self._transpose_keys(columns, rows, (chunk, depth), (first, count))
        return columns

    def _transpose_keys(self, columns: Block, rows: Block, elements: Span, items: Span) -> None:
        """Transpose the keys of several chunks. Vector and scalar engine share the copy from PSUM."""
        k, (chunk, depth), (begin, count), lanes = self.k, elements, items, rows.partitions
        half = count - count // 2
        parts = {Engine.VECTOR: (0, half), Engine.SCALAR: (half, count - half)}
        for engine, (offset, size) in parts.items():
            if not size:
                continue
            transposed = k.tile(rows.dtype, depth, size, lanes, memory=Memory.PSUM, buffers=2)
            with k.loop(size) as item:
                source = rows.cut(lanes, (begin + offset + item, 1), (affine(chunk) * PARTITIONS, depth))
                k.emit(NcTranspose(engine=Engine.TENSOR, dst=transposed.cut(depth, (item, 1)), src=source))
            copy_from_psum(k, columns.cut(depth, (chunk, 1), (affine(begin) + offset, size)), transposed, engine)

    # Scores

    def _write_scores(self, columns: Block, scores: Block, piece: _Piece) -> None:
        k, rows = self.k, self.rows
        with k.scope():
            mask = self._mask(piece) if self.views.mask else None
            with k.loop(self.views.q.shape[0]) as batch:
                for heads, row in self._heads_of(batch):
                    keys = self._keys(batch, heads, piece)
                    sums = k.psum(piece.lanes, heads[1], rows, piece.chunks)
                    with k.loop(heads[1]) as head, k.loop(piece.chunks) as chunk:
                        for number, depth in each_chunk(k, self.views.q.shape[-1]):
                            k.emit(
                                Matmul(
                                    engine=Engine.TENSOR,
                                    dst=sums.cut(piece.lanes, (head, 1), (0, rows), (chunk, 1)),
                                    stationary=keys.cut(depth, (number, 1), (head * piece.chunks + chunk, 1)),
                                    moving=columns.cut(depth, (number, 1), (row + head * rows, rows)),
                                    accumulate=number,
                                )
                            )
                    place = scores.cut(piece.lanes, (row, heads[1] * rows), (piece.first, piece.chunks))
                    self._place(place, sums, None if mask is None else self._mask_of(mask, batch, heads, piece))

    def _mask(self, piece: _Piece) -> Block:
        """The mask of a piece as [128 keys, heads, batch elements, rows, chunks]; an axis along which the mask is the
        same has size 1."""
        k, view = self.k, self.views.mask
        assert view is not None
        view = view.cut(
            *((0, size if stride else 1) for size, stride in zip(view.shape[:3], view.strides, strict=False))
        )
        batch, heads, rows, _ = view.shape
        chunks = piece.chunks if view.strides[3] else 1
        block = k.tile(view.dtype, piece.lanes, heads, batch, rows, chunks, buffers=2)
        with k.loop(heads) as head:
            part = piece.of(view.pick(1, head), axis=2)  # [partitions, batch elements, rows, chunks]
            k.copy(
                block.cut(piece.lanes, (head, 1)), part.cut(*((0, size) for size in part.shape[:3]), (0, chunks)).far()
            )
        return block

    def _mask_of(self, mask: Block, batch: Affine, heads: Span, piece: _Piece) -> Tile:
        """The mask of some key heads, repeated for the heads, rows and chunks that share it."""
        mask_heads, batches, rows, chunks = mask.shape
        tile = mask.cut(mask.partitions, (heads[0] if mask_heads > 1 else 0, 1), (batch if batches > 1 else 0, 1))
        axes = (
            Axis(heads[1], batches * rows * chunks if mask_heads > 1 else 0),
            Axis(self.rows, chunks if rows > 1 else 0),
            Axis(piece.chunks, 1 if chunks > 1 else 0),
        )
        return replace(tile, axes=axes)

    def _place(self, dst: Tile, sums: Block, mask: Tile | None) -> None:
        """Copy scores from PSUM, scaled and masked. Where a boolean mask hides a key, `dst` remains minus infinity."""
        k, scale = self.k, self.op.scale
        if mask is not None and mask.dtype is not DType.UINT8:
            k.emit(
                ScalarTensorTensor(
                    engine=Engine.VECTOR,
                    dst=dst,
                    src=sums.whole,
                    op0=Alu.MULTIPLY,
                    operand0=scale,
                    op1=Alu.ADD,
                    right=mask,
                )
            )
            return
        scaled = dst if mask is None else k.tile(DType.FLOAT32, sums.partitions, *sums.shape, buffers=2).whole
        k.emit(Activation(engine=Engine.SCALAR, dst=scaled, src=sums.whole, function=Function.COPY, scale=scale))
        if mask is not None:
            k.emit(CopyPredicated(engine=Engine.VECTOR, dst=dst, src=scaled, predicate=mask))

    # Softmax

    def _softmax(self, scores: Block) -> Block:
        """The probabilities [128 keys, rows, chunks], rounded to their type."""
        k, (rows, chunks) = self.k, scores.shape
        dtype = self.op.probabilities
        rounded = k.tile(dtype, PARTITIONS, rows, chunks)
        with k.scope():
            negative = self._negative_highest(scores)
            self._combine(scores.whole, scores.whole, Alu.ADD, _by_row(negative, chunks))
            k.emit(Activation(engine=Engine.SCALAR, dst=scores.whole, src=scores.whole, function=Function.EXP))
            inverse = self._inverse_total(scores)
            self._combine(rounded.whole, scores.whole, Alu.MULTIPLY, _by_row(inverse, chunks))
        if is_matched(self.op, self.views.values.dtype) or dtype is DType.FLOAT32:
            return rounded
        wide = k.tile(DType.FLOAT32, PARTITIONS, rows, chunks)
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=wide.whole, src=rounded.whole))
        return wide

    def _combine(self, dst: Tile, left: Tile, op: Alu, right: Tile) -> None:
        self.k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst, left=left, right=right, op=op))

    def _negative_highest(self, scores: Block) -> Block:
        """The negated maximum of each row, on all partitions. The lowest finite number replaces minus infinity, which
        has no difference to itself, and which the tensor engine of v2 cannot transpose."""
        k, rows = self.k, self.all_rows
        by_lane, highest, line = (
            k.tile(DType.FLOAT32, PARTITIONS, rows),
            k.tile(DType.FLOAT32, rows, 1),
            k.tile(DType.FLOAT32, 1, rows),
        )
        k.emit(TensorReduce(engine=Engine.VECTOR, dst=by_lane.whole, src=scores.whole, op=Alu.MAXIMUM))
        k.emit(
            TensorScalar(engine=Engine.VECTOR, dst=by_lane.whole, src=by_lane.whole, op0=Alu.MAXIMUM, operand0=LOWEST)
        )
        transposed = self._transposed(by_lane.whole)
        k.emit(TensorReduce(engine=Engine.VECTOR, dst=highest.whole, src=transposed.whole, op=Alu.MAXIMUM, negate=True))
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=line.whole, src=self._transposed(highest.whole).whole))
        return self._product_with_ones(line)

    def _inverse_total(self, exponentials: Block) -> Block:
        """The inverse of the sum of each row, on all partitions. The highest score contributes exp(0) = 1, so that a
        sum below 1 is the 0 of a row with every key masked. Raising it to 1 keeps that row's probabilities at 0."""
        k, rows = self.k, self.all_rows
        by_lane, inverse = k.tile(DType.FLOAT32, PARTITIONS, rows), k.tile(DType.FLOAT32, PARTITIONS, rows)
        k.emit(TensorReduce(engine=Engine.VECTOR, dst=by_lane.whole, src=exponentials.whole, op=Alu.ADD))
        total = self._product_with_ones(by_lane)
        k.emit(TensorScalar(engine=Engine.VECTOR, dst=by_lane.whole, src=total.whole, op0=Alu.MAXIMUM, operand0=1.0))
        k.emit(Reciprocal(engine=Engine.VECTOR, dst=inverse.whole, src=by_lane.whole))
        return inverse

    def _product_with_ones(self, block: Block) -> Block:
        """The sum over the block's partitions, on all partitions."""
        sums = self.k.psum(PARTITIONS, *block.shape, buffers=1)
        ones = self.ones.cut(block.partitions)
        self.k.emit(Matmul(engine=Engine.TENSOR, dst=sums.whole, stationary=ones, moving=block.whole))
        return sums

    # Values

    def _multiply(self, sums: Block, probabilities: Block, piece: _Piece) -> None:
        """Add the products of a piece's values and probabilities to the sums [128 elements, chunks, rows]."""
        k, width, rows = self.k, self.views.values.shape[-1], self.rows
        dtype = self.views.values.dtype if is_matched(self.op, self.views.values.dtype) else DType.FLOAT32
        with k.loop(self.views.q.shape[0]) as batch:
            for heads, row in self._heads_of(batch):
                values = k.tile(dtype, piece.lanes, heads[1], piece.chunks, width, buffers=2)
                self._load(values, piece.of(self.views.values.pick(0, batch).cut(heads), axis=1))
                with k.loop(heads[1]) as head, k.loop(piece.chunks) as chunk:
                    for number, depth in each_chunk(k, width):
                        own = (row + head * rows, rows)
                        k.emit(
                            Matmul(
                                engine=Engine.TENSOR,
                                dst=sums.cut(depth, (number, 1), own),
                                stationary=values.cut(piece.lanes, (head, 1), (chunk, 1), (number * PARTITIONS, depth)),
                                moving=probabilities.cut(piece.lanes, own, (piece.first + chunk, 1)),
                                accumulate=piece.first + chunk,
                            )
                        )

    def _store(self, sums: Block) -> None:
        """Transpose the sums [128 elements, chunks, rows] and store them."""
        k, width, dtype = self.k, self.views.out.shape[-1], self.views.out.dtype
        with k.scope():
            result = k.tile(dtype, self.all_rows, width, buffers=2)
            for number, depth in each_chunk(k, width):
                with k.scope():
                    stage = k.tile(dtype if dtype.itemsize > 1 else DType.FLOAT32, depth, self.all_rows, buffers=2)
                    k.emit(TensorCopy(engine=Engine.VECTOR, dst=stage.whole, src=sums.cut(depth, (number, 1))))
                    place = result.cut(self.all_rows, (number * PARTITIONS, depth))
                    k.emit(TensorCopy(engine=Engine.VECTOR, dst=place, src=self._transposed(stage.whole).whole))
            self._copy_rows(self.views.out, result, load=False)


def _by_row(block: Block, chunks: int) -> Tile:
    """One number for each row, repeated for all chunks."""
    tile = block.whole
    return replace(tile, axes=(*tile.axes, Axis(chunks, 0)))
