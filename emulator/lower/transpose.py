"""Transposes: operands of the tensor engine in SBUF, and copies in HBM that change the contiguous axis.

The tensor engine needs the contraction axis on the partition dimension, in chunks of 128 elements. If the other axis of
a matrix is contiguous, DMA loads the matrix in this layout. If the contraction axis is contiguous, such a DMA would
move one element at a time; the matrix is loaded in its stored layout and transposed on the tensor engine, 128 x 128
elements at a time.

A strided copy in HBM that makes another axis contiguous also moves one element at a time, about a hundred times slower
than contiguous runs. Blocks of both axes are loaded, transposed, and stored: by DMA on v3 and later; on v2, and for
one-byte elements, by the vector engine, 32 x 32 elements at a time. Both preserve every bit. The tensor engine of v2
does not: it multiplies by ones and zeros, and infinity times 0 is NaN.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine, divided
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import NcTranspose
from nxpipe.emulator.isa.vector import TensorCopy
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span, TiledBlock
from nxpipe.emulator.lower.view import TiledView, View

CHUNKS_PER_LOAD: Final = 16  # chunks loaded per transpose: 4 KiB of two-byte elements per row


def must_transpose(view: View) -> bool:
    """True for a matrix [contraction, others] whose contraction axis is the contiguous one."""
    return view.strides[0] == 1 and view.shape[0] > 1 and not (view.strides[1] == 1 or view.shape[1] == 1)


def chunks_of(size: int) -> int:
    """The number of chunks of 128 elements."""
    return -(-size // PARTITIONS)


def transpose_type(dtype: DType) -> DType:
    """The type in which a matrix is transposed. One-byte types are widened to bfloat16, which represents them exactly,
    because v3 and later cannot transpose them."""
    return dtype if dtype.itemsize > 1 else DType.BFLOAT16


def transpose_bytes(dtype: DType) -> int:
    """Bytes per partition that a transpose needs in addition to its result."""
    return 2 * CHUNKS_PER_LOAD * PARTITIONS * transpose_type(dtype).itemsize


def load_matrix(k: Kernel, dst: Block, view: View) -> None:
    """Load a matrix [contraction, others] into a block [128, chunks, others]."""
    if must_transpose(view):
        _load_transposed(k, dst, view)
    else:
        _load_as_stored(k, dst, view)


def load_tiled(k: Kernel, view: TiledView, rows: Span, columns: Span, inside: Span, buffers: int) -> TiledBlock:
    """Load a span of chunks, given as first chunk and number of rows, and a span of columns of a tiled matrix;
    `inside` as in `TiledView.loads`."""
    (chunk, depth), (_, width) = rows, columns
    block = k.tile(view.dtype, PARTITIONS, chunks_of(depth), width, buffers=buffers)
    for dst, far in tiled_reads(view, block, chunk, depth, columns, inside):
        k.copy(dst, far)
    return TiledBlock(**vars(block), tile=view.tile, whole_chunks=depth // PARTITIONS)


def tiled_reads(
    view: TiledView, block: Block, chunk: Affine | int, depth: int, columns: Span, inside: Span
) -> Iterator[tuple[Tile, Far]]:
    """The destination in a block and the source of each read."""
    for first, lanes, far in view.loads(chunk, depth, columns, inside):
        axes = contiguous(*(axis.size for axis in far.axes[1:]))
        offset = block.offset + first * block.dtype.itemsize
        yield Tile(block.memory, block.dtype, 0, lanes, offset, axes, block.allocation), far


def _load_as_stored(k: Kernel, dst: Block, view: View) -> None:
    full, remainder = divmod(view.shape[0], PARTITIONS)
    width = view.shape[1]
    if full:
        folded = view.cut((0, full * PARTITIONS)).reshaped((full, PARTITIONS, width))
        assert folded is not None  # splitting an axis is always possible
        k.copy(dst.cut(PARTITIONS, (0, full), (0, width)), folded.transposed((1, 0, 2)).far())
    if remainder:
        k.copy(dst.cut(remainder, (full, 1), (0, width)), view.cut((full * PARTITIONS, remainder)).far())


def _load_transposed(k: Kernel, dst: Block, view: View) -> None:
    rows = view.transposed((1, 0))
    # The shorter type is transposed: DMA rounds what is stored in a longer one, a copy from PSUM widens the shorter.
    dtype = transpose_type(min(view.dtype, dst.dtype, key=lambda dtype: dtype.itemsize))
    full, remainder = divmod(view.shape[0], PARTITIONS)
    for top, count in k.spans(view.shape[1], PARTITIONS):
        for first, chunks in k.spans(full, CHUNKS_PER_LOAD):
            with k.scope():
                loaded = k.tile(dtype, count, chunks, PARTITIONS, buffers=2)
                source = rows.cut((top, count), (first * PARTITIONS, chunks * PARTITIONS))
                k.copy(loaded.whole, source.far())
                transpose_block(k, dst, loaded, first, (top, count))
        if remainder:
            with k.scope():
                loaded = k.tile(dtype, count, 1, remainder, buffers=2)
                k.copy(loaded.whole, rows.cut((top, count), (full * PARTITIONS, remainder)).far())
                transpose_block(k, dst, loaded, Affine(full), (top, count))


def transpose_block(
    k: Kernel,
    dst: Block,
    rows_tile: Block,
    first: Affine,
    columns: tuple[Affine | int, int],
    engine: Engine = Engine.VECTOR,
) -> None:
    """Transpose a block of rows [count, chunks, depth] into `columns` of [128, chunks, rows], from chunk `first` on.
    `engine` copies the result from PSUM."""
    all_chunks, depth = rows_tile.shape
    count = rows_tile.partitions
    psum_chunks = k.core.psum_bank // (count * rows_tile.dtype.itemsize)
    for begin, chunks in k.spans(all_chunks, psum_chunks):
        with k.scope():
            transposed = k.tile(rows_tile.dtype, depth, chunks, count, memory=Memory.PSUM, buffers=2)
            with k.loop(chunks) as chunk:
                source = rows_tile.cut(count, (begin + chunk, 1))
                k.emit(NcTranspose(engine=Engine.TENSOR, dst=transposed.cut(depth, (chunk, 1)), src=source))
            copy_from_psum(k, dst.cut(depth, (begin + first, chunks), columns), transposed, engine)


def transpose_parts(
    k: Kernel, dst: Block, src: Block, parts: tuple[Span, Span], depth: int, bank: Block | None = None
) -> None:
    """Transpose chunks of `depth` elements of several heads, from rows [rows, heads, elements] to [128 elements, heads,
    chunks, rows]; `parts` are the heads and the chunks. `bank` is PSUM to use."""
    (head, heads), (chunk, chunks) = parts
    count = src.partitions
    if bank is None:
        transposed = k.tile(src.dtype, depth, heads, chunks, count, memory=Memory.PSUM, buffers=2)
    else:
        transposed = Block(Memory.PSUM, src.dtype, depth, (heads, chunks, count), bank.offset, bank.allocation)
    with k.loop(heads) as head_offset, k.loop(chunks) as chunk_offset:
        start = (affine(chunk) + chunk_offset) * PARTITIONS
        source = src.cut(count, (affine(head) + head_offset, 1), (start, depth))
        k.emit(
            NcTranspose(
                engine=Engine.TENSOR, dst=transposed.cut(depth, (head_offset, 1), (chunk_offset, 1)), src=source
            )
        )
    copy_from_psum(k, dst.cut(depth, (head, heads), (chunk, chunks)), transposed, Engine.SCALAR)


def transpose_tile(
    k: Kernel, dst: Block, tile: Tile, left: Affine | int, rows: Span, engine: Engine = Engine.VECTOR
) -> None:
    """Transpose rows in SBUF into the columns `rows` of [128, chunks, rows]. `left` is the tile's first column in the
    matrix, a multiple of 128. `engine` copies the result from PSUM."""
    first = divided(left, PARTITIONS)
    full, remainder = divmod(tile.elements, PARTITIONS)
    if full:
        block = Block(tile.memory, tile.dtype, tile.partitions, (full, PARTITIONS), tile.offset, tile.allocation)
        transpose_block(k, dst, block, first, rows, engine)
    if remainder:
        offset = tile.offset + full * PARTITIONS * tile.dtype.itemsize
        block = Block(tile.memory, tile.dtype, tile.partitions, (1, remainder), offset, tile.allocation)
        transpose_block(k, dst, block, first + full, rows, engine)


def transpose_heads(
    k: Kernel, dst: Block, source: View, first: Affine | int = 0, engine: Engine = Engine.VECTOR
) -> None:
    """Load heads [heads, rows, elements] into [128, chunks, heads, rows], with the elements on the partitions. `engine`
    copies the transposed elements from PSUM."""
    heads, rows, elements = source.shape
    if not elements:
        return
    if source.strides[2] != 1 and elements > 1:
        with k.loop(heads) as head:
            for chunk, depth in each_chunk(k, elements):
                target = dst.cut(depth, (chunk, 1), (head + first, 1), (0, rows))
                k.copy(target, source.pick(0, head).transposed((1, 0)).cut((chunk * PARTITIONS, depth)).far())
        return
    dtype = transpose_type(source.dtype)
    for top, count in k.spans(rows, PARTITIONS):
        with k.scope():
            loaded = k.tile(dtype, count, heads, elements, buffers=2)
            k.copy(loaded.whole, source.transposed((1, 0, 2)).cut((top, count)).far())
            for head, heads_in_bank in k.spans(heads, k.core.psum_bank // (count * dtype.itemsize)):
                for chunk, depth in each_chunk(k, elements):
                    with k.scope():
                        _transpose_heads_of_chunk(
                            k, dst, loaded, (chunk, depth), (head, heads_in_bank), first, (top, count), engine
                        )


def _transpose_heads_of_chunk(
    k: Kernel,
    dst: Block,
    loaded: Block,
    chunk: tuple[Affine, int],
    heads: Span,
    first: Affine | int,
    rows: Span,
    engine: Engine,
) -> None:
    (number, depth), (head, head_count), count = chunk, heads, rows[1]
    transposed = k.tile(loaded.dtype, depth, head_count, count, memory=Memory.PSUM, buffers=2)
    with k.loop(head_count) as offset:
        source = loaded.cut(count, (offset + head, 1), (number * PARTITIONS, depth))
        k.emit(NcTranspose(engine=Engine.TENSOR, dst=transposed.cut(depth, (offset, 1)), src=source))
    copy_from_psum(k, dst.cut(depth, (number, 1), (head + first, head_count), rows), transposed, engine)


def copy_from_psum(k: Kernel, dst: Tile, block: Block, engine: Engine) -> None:
    """Copy a block on the vector or on the scalar engine."""
    if engine is Engine.SCALAR:
        k.emit(Activation(engine=engine, dst=dst, src=block.whole, function=Function.COPY))
    else:
        k.emit(TensorCopy(engine=engine, dst=dst, src=block.whole))


def each_slab(k: Kernel, size: int, chunks: int) -> Iterator[tuple[Affine, int]]:
    """Loop over slabs of a contraction axis; yields the first chunk and the number of elements of each."""
    full, remainder = divmod(size, chunks * PARTITIONS)
    if full:
        with k.loop(full) as index:
            yield index * chunks, chunks * PARTITIONS
    if remainder:
        yield Affine(full * chunks), remainder


def each_chunk(k: Kernel, size: int) -> Iterator[tuple[Affine, int]]:
    """Loop over chunks of a contraction axis; yields the index and the number of elements of each."""
    return each_slab(k, size, 1)


_BLOCK: Final = 512  # elements per axis: runs of 1 KiB for two-byte types
_VECTOR_BLOCK: Final = 32  # rows and columns of one transpose on the vector engine
_LEAST: Final = 16  # elements per axis: for fewer, transposed runs are too short to gain from


def transposed_axis(dst: View, src: View) -> int | None:
    """The source's contiguous axis, if the destination's is another one and both are long enough to transpose blocks;
    otherwise None."""
    if dst.rank < 2 or dst.dtype is not src.dtype or dst.strides[-1] != 1 or src.strides[-1] == 1:
        return None
    for axis in range(src.rank - 1):
        if src.strides[axis] == 1 and min(src.shape[axis], src.shape[-1]) >= _LEAST and src.strides[-1]:
            return axis
    return None


def copy_transposed(k: Kernel, dst: View, src: View, axis: int) -> None:
    """Copy in HBM; `axis` is contiguous in the source, the last axis in the destination."""
    others = tuple(other for other in range(src.rank - 1) if other != axis)
    _copy_matrix(k, *(view.transposed((*others, axis, src.rank - 1)) for view in (dst, src)))


def _copy_matrix(k: Kernel, dst: View, src: View) -> None:
    if dst.rank > 2:
        with k.loop(dst.shape[0]) as index:
            _copy_matrix(k, dst.pick(0, index), src.pick(0, index))
        return
    rows, columns = dst.shape  # the row axis is contiguous in the source
    for left, width in k.spans(columns, _BLOCK):
        for top, height in k.spans(rows, _BLOCK):
            with k.scope():
                part = src.cut((top, height), (left, width)).transposed((1, 0))
                block = k.tile(dst.dtype, min(height, PARTITIONS), -(-height // PARTITIONS), width, buffers=2)
                _load_part(k, block, part)
                for chunk, depth in k.chunks(height):
                    target = dst.cut((top + chunk * PARTITIONS, depth), (left, width))
                    k.copy(target.far(), block.cut(depth, (chunk, 1)))


def load_column(k: Kernel, vector: View) -> Block:
    """Load a vector into a block [128, 1, chunks] of float32: element 128 c + p into partition p."""
    full, rest = divmod(vector.shape[0], PARTITIONS)
    block = k.tile(DType.FLOAT32, PARTITIONS, 1, full + bool(rest))
    if full:
        with k.scope():
            part = vector.cut((0, full * PARTITIONS)).reshaped((full, PARTITIONS))
            assert part is not None  # splitting an axis is always possible
            stored = k.tile(vector.dtype, PARTITIONS, 1, full)
            _load_part(k, stored, part)
            dst = block.cut(PARTITIONS, (0, 1), (0, full))
            k.emit(TensorCopy(engine=Engine.VECTOR, dst=dst, src=stored.whole))
    if rest:
        last = replace(vector.cut((full * PARTITIONS, rest)), shape=(rest, 1), strides=(*vector.strides, 1))
        k.copy(block.cut(rest, (0, 1), (full, 1)), last.far())
    return block


def _load_part(k: Kernel, block: Block, part: View) -> None:
    """Load a part [columns, rows], transposed, into a block [128, chunks of rows, columns]."""
    columns, rows = part.shape
    if k.core.nki_gen > 2 and part.dtype.itemsize in (2, 4):
        for chunk, depth in k.chunks(rows):
            far = part.cut((0, columns), (chunk * PARTITIONS, depth)).far()
            k.transpose(block.cut(depth, (chunk, 1)), far)
        return
    for left, width in k.spans(columns, PARTITIONS):
        with k.scope():
            loaded = k.tile(part.dtype, width, rows, buffers=2)
            k.copy(loaded.whole, part.cut((left, width)).far())
            for chunk, depth in k.chunks(rows):
                _transpose_blocks(k, block, loaded, chunk, (left, depth))


def _transpose_blocks(k: Kernel, block: Block, loaded: Block, chunk: Affine, columns: Span) -> None:
    left, depth = columns
    for first_lane in range(0, loaded.partitions, _VECTOR_BLOCK):
        lanes = min(_VECTOR_BLOCK, loaded.partitions - first_lane)
        for first in range(0, depth, _VECTOR_BLOCK):
            count = min(_VECTOR_BLOCK, depth - first)
            dst = block.cut((first, count), (chunk, 1), (left + first_lane, lanes))
            src = loaded.cut((first_lane, lanes), (chunk * PARTITIONS + first, count))
            k.emit(NcTranspose(engine=Engine.VECTOR, dst=dst, src=src))
