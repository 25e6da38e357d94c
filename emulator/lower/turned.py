"""Matrices as the tensor engine wants them: the summed axis on the partitions, 128 of its elements a chunk.

A matrix whose other axis is contiguous comes from HBM so. One whose summed axis is contiguous would come two bytes at a
time; it is loaded as it lies, and turned 128 x 128 elements at a time on the tensor engine itself.
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


def must_turn(view: View) -> bool:
    """Of a matrix [summed, others]."""
    return view.strides[0] == 1 and view.shape[0] > 1 and not (view.strides[1] == 1 or view.shape[1] == 1)


def chunks_of(size: int) -> int:
    return -(-size // PARTITIONS)


def passing_type(dtype: DType) -> DType:
    """Types of one byte are turned two bytes wide, which holds them exactly: from v3 on they cannot be turned."""
    return dtype if dtype.itemsize > 1 else DType.BFLOAT16


def room_to_turn(dtype: DType) -> int:
    """Bytes in each partition that turning takes beside its result."""
    return 2 * AT_ONCE * PARTITIONS * passing_type(dtype).itemsize


def load(k: Kernel, dst: Block, view: View) -> None:
    """A matrix [summed, others] into a block [128, chunks, others]."""
    if must_turn(view):
        _load_turned(k, dst, view)
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


def _load_turned(k: Kernel, dst: Block, view: View) -> None:
    rows = view.transposed((1, 0))
    dtype = passing_type(view.dtype)
    full, rest = divmod(view.shape[0], PARTITIONS)
    for top, count in k.spans(view.shape[1], PARTITIONS):
        for first, number in k.spans(full, AT_ONCE):
            with k.room():
                straight = k.tile(dtype, count, number, PARTITIONS, turns=2)
                place = rows.cut((top, count), (first * PARTITIONS, number * PARTITIONS))
                k.copy(straight.whole, place.far())
                turn(k, dst, straight, first, (top, count))
        if rest:
            with k.room():
                straight = k.tile(dtype, count, 1, rest, turns=2)
                k.copy(straight.whole, rows.cut((top, count), (full * PARTITIONS, rest)).far())
                turn(k, dst, straight, Affine(full), (top, count))


def turn(
    k: Kernel,
    dst: Block,
    straight: Block,
    first: Affine,
    columns: tuple[Affine | int, int],
    engine: Engine = Engine.VECTOR,
) -> None:
    """A block [count, chunks, depth] of rows becomes the chunks from the first on of columns of [128, chunks, rows].
    The engine is who brings them away from the tensor engine."""
    number, depth = straight.shape
    count = straight.partitions
    most = k.core.psum_bank // (count * straight.dtype.itemsize)
    for begin, some in k.spans(number, most):
        with k.room():
            passing = k.tile(straight.dtype, depth, some, count, memory=Memory.PSUM, turns=2)
            with k.loop(some) as at:
                source = straight.cut(count, (begin + at, 1))
                k.emit(NcTranspose(engine=Engine.TENSOR, dst=passing.cut(depth, (at, 1)), src=source))
            place = dst.cut(depth, (begin + first, some), columns)
            if engine is Engine.SCALAR:
                k.emit(Activation(engine=engine, dst=place, src=passing.whole, function=Function.COPY))
            else:
                k.emit(TensorCopy(engine=engine, dst=place, src=passing.whole))


def turn_tile(k: Kernel, dst: Block, tile: Tile, left: Affine | int, rows: Span) -> None:
    """Rows in SBUF, from this column on, which begins a chunk, become columns of [128, chunks, rows]."""
    first = divided(left, PARTITIONS)
    full, rest = divmod(tile.elements, PARTITIONS)
    if full:
        turn(k, dst, Block(tile.memory, tile.dtype, tile.partitions, (full, PARTITIONS), tile.offset), first, rows)
    if rest:
        offset = tile.offset + full * PARTITIONS * tile.dtype.itemsize
        turn(k, dst, Block(tile.memory, tile.dtype, tile.partitions, (1, rest), offset), first + full, rows)


def turn_heads(k: Kernel, dst: Block, source: View, first: int = 0) -> None:
    """Heads [heads, rows, elements] into [128, chunks, heads, rows], the elements being on the partitions."""
    heads, rows, elements = source.shape
    if not elements:
        return
    if source.strides[2] != 1 and elements > 1:
        with k.loop(heads) as head:
            for chunk, depth in each_chunk(k, elements):
                place = dst.cut(depth, (chunk, 1), (head + first, 1), (0, rows))
                k.copy(place, source.pick(0, head).transposed((1, 0)).cut((chunk * PARTITIONS, depth)).far())
        return
    dtype = passing_type(source.dtype)
    for top, count in k.spans(rows, PARTITIONS):
        with k.room():
            straight = k.tile(dtype, count, heads, elements, turns=2)
            k.copy(straight.whole, source.transposed((1, 0, 2)).cut((top, count)).far())
            for head, some in k.spans(heads, k.core.psum_bank // (count * dtype.itemsize)):
                for chunk, depth in each_chunk(k, elements):
                    _turn_some(k, dst, straight, (chunk, depth), (head, some), first, (top, count))


def _turn_some(
    k: Kernel, dst: Block, straight: Block, chunk: tuple[Affine, int], heads: Span, first: int, rows: Span
) -> None:
    (number, depth), (head, some), count = chunk, heads, rows[1]
    with k.room():
        passing = k.tile(straight.dtype, depth, some, count, memory=Memory.PSUM, turns=2)
        with k.loop(some) as at:
            source = straight.cut(count, (at + head, 1), (number * PARTITIONS, depth))
            k.emit(NcTranspose(engine=Engine.TENSOR, dst=passing.cut(depth, (at, 1)), src=source))
        place = dst.cut(depth, (number, 1), (head + first, some), rows)
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=place, src=passing.whole))


def each_slab(k: Kernel, size: int, chunks: int) -> Iterator[tuple[Affine, int]]:
    """Of a summed axis in slabs of so many chunks: the number of the first chunk, and how many elements there are."""
    full, rest = divmod(size, chunks * PARTITIONS)
    if full:
        with k.loop(full) as turn:
            yield turn * chunks, chunks * PARTITIONS
    if rest:
        yield Affine(full * chunks), rest


def each_chunk(k: Kernel, size: int) -> Iterator[tuple[Affine, int]]:
    """The number of each chunk of a summed axis, and how much of it there is."""
    return each_slab(k, size, 1)
