"""Transposes: operands of the tensor engine in SBUF, and copies in HBM that change the contiguous axis.

The tensor engine needs the contraction axis on the partitions, 128 elements a chunk. A matrix whose other axis is
contiguous is loaded so by DMA. One whose contraction axis is contiguous would be loaded one element at a time; it is
loaded as it is stored and transposed 128 x 128 elements at a time on the tensor engine.

A copy in HBM that makes another axis contiguous would by strides alone also move one element at a time, a hundred times
slower than whole runs. Blocks of both axes are loaded, transposed in SBUF, and stored: by DMA from v3 on; before that,
and for single bytes, by the vector engine, 32 x 32 elements at a time. Both keep every bit. The tensor engine of v2
does not: it multiplies by ones and zeros, and infinity times 0 is NaN.
"""

from collections.abc import Iterator
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, divided
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import NcTranspose
from nxpipe.emulator.isa.vector import TensorCopy
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.view import View

AT_ONCE: Final = 16  # chunks that are loaded for turning: 4 KiB of two-byte elements in each row


def must_transpose(view: View) -> bool:
    """True for a matrix [contraction, others] whose contraction axis is the contiguous one."""
    return view.strides[0] == 1 and view.shape[0] > 1 and not (view.strides[1] == 1 or view.shape[1] == 1)


def chunks_of(size: int) -> int:
    return -(-size // PARTITIONS)


def transpose_type(dtype: DType) -> DType:
    """The type in which a matrix is transposed. One-byte types are widened to bfloat16, which holds them exactly,
    because they cannot be transposed from v3 on."""
    return dtype if dtype.itemsize > 1 else DType.BFLOAT16


def transpose_bytes(dtype: DType) -> int:
    """Bytes of each partition that a transpose takes beside its result."""
    return 2 * AT_ONCE * PARTITIONS * transpose_type(dtype).itemsize


def load_matrix(k: Kernel, dst: Block, view: View) -> None:
    """Load a matrix [contraction, others] into a block [128, chunks, others]."""
    if must_transpose(view):
        _load_transposed(k, dst, view)
    else:
        _load_straight(k, dst, view)


def _load_straight(k: Kernel, dst: Block, view: View) -> None:
    full, rest = divmod(view.shape[0], PARTITIONS)
    width = view.shape[1]
    if full:
        folded = view.cut((0, full * PARTITIONS)).reshaped((full, PARTITIONS, width))
        assert folded is not None  # an axis in two always has strides
        k.copy(dst.cut(PARTITIONS, (0, full), (0, width)), folded.transposed((1, 0, 2)).far())
    if rest:
        k.copy(dst.cut(rest, (full, 1), (0, width)), view.cut((full * PARTITIONS, rest)).far())


def _load_transposed(k: Kernel, dst: Block, view: View) -> None:
    rows = view.transposed((1, 0))
    dtype = transpose_type(view.dtype)
    full, rest = divmod(view.shape[0], PARTITIONS)
    for top, count in k.spans(view.shape[1], PARTITIONS):
        for first, number in k.spans(full, AT_ONCE):
            with k.scope():
                straight = k.tile(dtype, count, number, PARTITIONS, buffers=2)
                place = rows.cut((top, count), (first * PARTITIONS, number * PARTITIONS))
                k.copy(straight.whole, place.far())
                transpose_block(k, dst, straight, first, (top, count))
        if rest:
            with k.scope():
                straight = k.tile(dtype, count, 1, rest, buffers=2)
                k.copy(straight.whole, rows.cut((top, count), (full * PARTITIONS, rest)).far())
                transpose_block(k, dst, straight, Affine(full), (top, count))


def transpose_block(
    k: Kernel,
    dst: Block,
    straight: Block,
    first: Affine,
    columns: tuple[Affine | int, int],
    engine: Engine = Engine.VECTOR,
) -> None:
    """Transpose a block [count, chunks, depth] of rows into columns of [128, chunks, rows], from chunk `first` on;
    `engine` copies the result from PSUM."""
    number, depth = straight.shape
    count = straight.partitions
    most = k.core.psum_bank // (count * straight.dtype.itemsize)
    for begin, some in k.spans(number, most):
        with k.scope():
            passing = k.tile(straight.dtype, depth, some, count, memory=Memory.PSUM, buffers=2)
            with k.loop(some) as at:
                source = straight.cut(count, (begin + at, 1))
                k.emit(NcTranspose(engine=Engine.TENSOR, dst=passing.cut(depth, (at, 1)), src=source))
            place = dst.cut(depth, (begin + first, some), columns)
            if engine is Engine.SCALAR:
                k.emit(Activation(engine=engine, dst=place, src=passing.whole, function=Function.COPY))
            else:
                k.emit(TensorCopy(engine=engine, dst=place, src=passing.whole))


def transpose_tile(k: Kernel, dst: Block, tile: Tile, left: Affine | int, rows: Span) -> None:
    """Transpose rows in SBUF, from column `left` on, which begins a chunk, into columns of [128, chunks, rows]."""
    first = divided(left, PARTITIONS)
    full, rest = divmod(tile.elements, PARTITIONS)
    if full:
        transpose_block(
            k, dst, Block(tile.memory, tile.dtype, tile.partitions, (full, PARTITIONS), tile.offset), first, rows
        )
    if rest:
        offset = tile.offset + full * PARTITIONS * tile.dtype.itemsize
        transpose_block(k, dst, Block(tile.memory, tile.dtype, tile.partitions, (1, rest), offset), first + full, rows)


def transpose_heads(k: Kernel, dst: Block, source: View, first: int = 0) -> None:
    """Load heads [heads, rows, elements] into [128, chunks, heads, rows], elements on the partitions."""
    heads, rows, elements = source.shape
    if not elements:
        return
    if source.strides[2] != 1 and elements > 1:
        with k.loop(heads) as head:
            for chunk, depth in each_chunk(k, elements):
                place = dst.cut(depth, (chunk, 1), (head + first, 1), (0, rows))
                k.copy(place, source.pick(0, head).transposed((1, 0)).cut((chunk * PARTITIONS, depth)).far())
        return
    dtype = transpose_type(source.dtype)
    for top, count in k.spans(rows, PARTITIONS):
        with k.scope():
            straight = k.tile(dtype, count, heads, elements, buffers=2)
            k.copy(straight.whole, source.transposed((1, 0, 2)).cut((top, count)).far())
            for head, some in k.spans(heads, k.core.psum_bank // (count * dtype.itemsize)):
                for chunk, depth in each_chunk(k, elements):
                    _transpose_some(k, dst, straight, (chunk, depth), (head, some), first, (top, count))


def _transpose_some(
    k: Kernel, dst: Block, straight: Block, chunk: tuple[Affine, int], heads: Span, first: int, rows: Span
) -> None:
    (number, depth), (head, some), count = chunk, heads, rows[1]
    with k.scope():
        passing = k.tile(straight.dtype, depth, some, count, memory=Memory.PSUM, buffers=2)
        with k.loop(some) as at:
            source = straight.cut(count, (at + head, 1), (number * PARTITIONS, depth))
            k.emit(NcTranspose(engine=Engine.TENSOR, dst=passing.cut(depth, (at, 1)), src=source))
        place = dst.cut(depth, (number, 1), (head + first, some), rows)
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=place, src=passing.whole))


def each_slab(k: Kernel, size: int, chunks: int) -> Iterator[tuple[Affine, int]]:
    """Slabs of a contraction axis: the number of the first chunk, and the elements in the slab."""
    full, rest = divmod(size, chunks * PARTITIONS)
    if full:
        with k.loop(full) as index:
            yield index * chunks, chunks * PARTITIONS
    if rest:
        yield Affine(full * chunks), rest


def each_chunk(k: Kernel, size: int) -> Iterator[tuple[Affine, int]]:
    """Chunks of a contraction axis: the number of each, and its elements."""
    return each_slab(k, size, 1)


_BLOCK: Final = 512  # elements of either axis: runs of 1 KiB for types of two bytes
_CORNER: Final = 32  # rows and columns of the vector engine's transpose
_LEAST: Final = 16  # elements of either axis: below, runs are hardly longer than elements


def transposed_axis(dst: View, src: View) -> int | None:
    """The axis that is contiguous in the source of a copy, if another one is in the destination and both are long
    enough to transpose blocks; None otherwise."""
    if dst.rank < 2 or dst.dtype is not src.dtype or dst.strides[-1] != 1 or src.strides[-1] == 1:
        return None
    for axis in range(src.rank - 1):
        if src.strides[axis] == 1 and min(src.shape[axis], src.shape[-1]) >= _LEAST and src.strides[-1]:
            return axis
    return None


def copy_transposed(k: Kernel, dst: View, src: View, axis: int) -> None:
    others = tuple(each for each in range(src.rank - 1) if each != axis)
    _copy_matrix(k, *(view.transposed((*others, axis, src.rank - 1)) for view in (dst, src)))


def _copy_matrix(k: Kernel, dst: View, src: View) -> None:
    if dst.rank > 2:
        with k.loop(dst.shape[0]) as index:
            _copy_matrix(k, dst.pick(0, index), src.pick(0, index))
        return
    rows, columns = dst.shape  # of the result; rows are contiguous in the source
    for left, width in k.spans(columns, _BLOCK):
        for top, height in k.spans(rows, _BLOCK):
            with k.scope():
                part = src.cut((top, height), (left, width)).transposed((1, 0))
                block = k.tile(dst.dtype, min(height, PARTITIONS), -(-height // PARTITIONS), width, buffers=2)
                _bring(k, block, part)
                for chunk, depth in k.chunks(height):
                    to = dst.cut((top + chunk * PARTITIONS, depth), (left, width))
                    k.copy(to.far(), block.cut(depth, (chunk, 1)))


def _bring(k: Kernel, block: Block, part: View) -> None:
    """Load a part [columns, rows] into a block [128, chunks of rows, columns]."""
    columns, rows = part.shape
    if k.core.nki_gen > 2 and part.dtype.itemsize in (2, 4):
        for chunk, depth in k.chunks(rows):
            far = part.cut((0, columns), (chunk * PARTITIONS, depth)).far()
            k.transpose(block.cut(depth, (chunk, 1)), far)
        return
    for left, width in k.spans(columns, PARTITIONS):
        with k.scope():
            straight = k.tile(part.dtype, width, rows, buffers=2)
            k.copy(straight.whole, part.cut((left, width)).far())
            for chunk, depth in k.chunks(rows):
                _transpose_blocks(k, block, straight, chunk, (left, depth))


def _transpose_blocks(k: Kernel, block: Block, straight: Block, chunk: Affine, place: Span) -> None:
    left, depth = place
    for low in range(0, straight.partitions, _CORNER):
        lanes = min(_CORNER, straight.partitions - low)
        for first in range(0, depth, _CORNER):
            count = min(_CORNER, depth - first)
            dst = block.cut((first, count), (chunk, 1), (left + low, lanes))
            src = straight.cut((low, lanes), (chunk * PARTITIONS + first, count))
            k.emit(NcTranspose(engine=Engine.VECTOR, dst=dst, src=src))
