"""Grouped matmuls (mixture of experts): rows, sorted by group, times the matrix of their group.

There are two forms, of which the cost model chooses the faster one. *All groups*: the matrices of all groups pass by,
each multiplies all rows, and a mask selects those of its group. *Gathered*: each row's own matrix is read by an
indirect DMA, in the contiguous runs in which it is stored, and multiplies that row alone. It reads no matrix that no
row needs, but one that several rows need several times, and software writes its descriptors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, divided
from nxpipe.emulator.isa.cost import DESCRIPTOR_NS, ISSUE, START_NS
from nxpipe.emulator.isa.gpsimd import IotaPattern
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul, NcTranspose
from nxpipe.emulator.isa.vector import CopyPredicated, Memset, TensorCopy, TensorReduce, TensorScalar
from nxpipe.emulator.lower.epilogue import Epilogue, epilogue_bytes
from nxpipe.emulator.lower.integers import EXACT_IN_FLOATS
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span, TiledBlock
from nxpipe.emulator.lower.kernel_cost import load_cost
from nxpipe.emulator.lower.lanes import Lanes, repeated
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.kernel import emit_matmuls
from nxpipe.emulator.lower.matmul.linear import as_matrix
from nxpipe.emulator.lower.matmul.tiling import BANK, STRIP
from nxpipe.emulator.lower.transpose import chunks_of, each_chunk, load_matrix, load_tiled, tiled_reads
from nxpipe.emulator.lower.view import TiledView, View
from nxpipe.emulator.ops import GroupedMatMul

_SPARE: Final = 20 << 10  # bytes of a partition for small tiles
_ROW_MATRICES: Final = len(DMA_QUEUES)  # that are read at once, by a queue each


@lowers(GroupedMatMul)
def _grouped(low: Lowering, node: Node, op: GroupedMatMul) -> None:
    rows, ends = low.view(node.operands[0]), low.view(node.operands[2])
    matrices = low.weight(node.operands[1])
    epilogue = low.epilogue(node.result, matrices.shape[2])
    if not node.result.type.elements:
        return
    x, out = as_matrix(low, rows, *rows.shape), node.result.type.dtype.on_device
    every = _AllGroups(low.k, x, matrices, ends, epilogue, out)
    if isinstance(matrices, TiledView) and 0 not in matrices.shape:
        gathered = _Gathered(low, x, matrices, ends, epilogue, out)
        if gathered.is_possible and gathered.ns < every.ns:
            gathered.write()
            return
    every.write()


@dataclass(frozen=True)
class _AllGroups:
    """Every group multiplies all rows; a mask selects the rows of the group."""

    k: Kernel
    x: View  # [rows, summed]
    matrices: View  # [groups, summed, columns]
    ends: View
    epilogue: Epilogue
    out: DType

    @property
    def ns(self) -> float:
        """Expected time in ns."""
        core, rows, (groups, summed, columns) = self.k.core, self.x.shape[0], self.matrices.shape
        load = load_cost(core, self.matrices.pick(0, 0), chunks_of(summed), columns).dma
        tiles, passes = chunks_of(rows), ceil(rows / self._height(chunks_of(summed)))
        slow = core.fp32_cycle_factor if self.x.dtype is DType.FLOAT32 else 1
        issued = columns // BANK * BANK + (max(columns % BANK, ISSUE) if columns % BANK else 0)
        tensor = slow * tiles * chunks_of(summed) * issued / core.tensor_ghz
        return groups * max(load * passes, tensor, tiles * issued / core.vector_ghz)

    def write(self) -> None:
        k, rows = self.k, self.x.shape[0]
        chunks = chunks_of(self.x.shape[1])
        for top, height in k.spans(rows, self._height(chunks)):
            with k.scope():
                transposed = _transposed_rows(k, self.x, (top, height))
                row_mask = self._row_mask(top, height)
                for columns, inside in _column_blocks(k, self.matrices, self._width(chunks, height)):
                    with k.scope():
                        self._write_block(transposed, row_mask, (top, height), columns, inside)

    def _height(self, chunks: int) -> int:
        """The number of rows whose sums, one PSUM bank wide, fit half of SBUF. More rows mean fewer loads of each
        matrix."""
        by_row = chunks * self.x.dtype.itemsize
        by_row_tile = BANK * DType.FLOAT32.itemsize + self.ends.shape[0]
        tiles = (self.k.free_bytes(Memory.SBUF) // 2) // (by_row * PARTITIONS + by_row_tile)
        return min(max(tiles, 1), chunks_of(self.x.shape[0])) * PARTITIONS

    def _width(self, chunks: int, height: int) -> int:
        by_column = 2 * chunks * self.matrices.dtype.itemsize + chunks_of(height) * DType.FLOAT32.itemsize
        by_column += 2 * self.out.itemsize + epilogue_bytes(self.epilogue)
        return _block_width(self.matrices, (self.k.free_bytes(Memory.SBUF) - _SPARE) // by_column)

    def _row_mask(self, top: Affine, height: int) -> Block:
        """A mask [128, tiles, groups] of bytes: 1 for each row and group whose end is after the row."""
        k, groups, tiles = self.k, self.ends.shape[0], chunks_of(height)
        row_mask = k.tile(DType.UINT8, PARTITIONS, tiles, max(groups, 1))
        ends = k.tile(self.ends.dtype, PARTITIONS, max(groups, 1))
        if groups:
            k.copy(ends.whole, self.ends.broadcast((PARTITIONS, groups)).far())
        with k.loop(tiles) as tile, k.scope():
            number = k.tile(DType.FLOAT32, PARTITIONS, 1, buffers=2).whole
            start = top + tile * PARTITIONS
            k.emit(IotaPattern(engine=Engine.GPSIMD, dst=number, start=start, by_partition=1, steps=(0,)))
            if groups:
                k.emit(
                    TensorScalar(
                        engine=Engine.VECTOR,
                        dst=row_mask.cut(PARTITIONS, (tile, 1)),
                        src=ends.whole,
                        op0=Alu.GREATER,
                        operand0=number,
                    )
                )
        return row_mask

    def _write_block(self, transposed: Block, row_mask: Block, rows: Span, columns: Span, inside: Span) -> None:
        # Groups are sorted, so that a row belongs to the first group whose end is after it. The loop visits groups from
        # the last to the first, and each overwrites the rows before its end, so that a row's own group writes it last.
        k, height, width, (groups, contraction, _) = self.k, rows[1], columns[1], self.matrices.shape
        sums_block = k.tile(DType.FLOAT32, PARTITIONS, chunks_of(height), width)
        k.emit(Memset(engine=Engine.VECTOR, dst=sums_block.whole, value=0.0))
        if groups and contraction:
            with k.loop(groups) as index, k.scope():
                group = index * -1 + (groups - 1)
                weight = _load_matrix_of(k, self.matrices.pick(0, group), columns, inside)
                for row, count in each_chunk(k, height):
                    for bank in k.spans(width, BANK):
                        with k.scope():
                            sums = k.psum(count, bank[1]).whole
                            row_span = (row * PARTITIONS, count)
                            emit_matmuls(k, sums, transposed, weight, Affine(), row_span, bank, contraction)
                            mask = repeated(row_mask.cut(count, (row, 1), (group, 1)), bank[1])
                            dst = sums_block.cut(count, (row, 1), bank)
                            k.emit(CopyPredicated(engine=Engine.VECTOR, dst=dst, src=sums, predicate=mask))
        for row, count in each_chunk(k, height):
            for left, strip in k.spans(width, STRIP):
                with k.scope():
                    out_tile = k.tile(self.out, count, strip, buffers=2).whole
                    sums = sums_block.cut(count, (row, 1), (left, strip))
                    k.emit(TensorCopy(engine=Engine.VECTOR, dst=out_tile, src=sums))
                    self.epilogue.store(out_tile, (row * PARTITIONS + rows[0], count), (left + columns[0], strip))


@dataclass(frozen=True)
class _Gathered:
    """Each row multiplies the matrix of its own group, which an indirect DMA reads: the row numbers of partition p are
    those of its first row of each matrix. The matrix is stationary, so that the sums have columns on the partitions;
    those of many rows share a bank of PSUM, and are transposed together."""

    low: Lowering
    x: View  # [rows, summed]
    matrices: TiledView  # [groups, summed, columns]
    ends: View
    epilogue: Epilogue
    out: DType

    @property
    def k(self) -> Kernel:
        return self.low.k

    @property
    def is_possible(self) -> bool:
        """True if the row numbers can be computed in float32, and a block of a matrix fits SBUF."""
        groups, summed, _ = self.matrices.shape
        return groups * summed < EXACT_IN_FLOATS and self._fitting(1) > 0

    @property
    def ns(self) -> float:
        """Expected time in ns. Queues prepare their descriptors at once, up to one for each matrix in SBUF."""
        core, rows, (_, summed, columns) = self.k.core, self.x.shape[0], self.matrices.shape
        width, chunks = self._width, chunks_of(summed)
        load = load_cost(core, self.matrices.pick(0, 0), chunks, min(width, columns)).dma
        start = START_NS + min(summed, PARTITIONS) * DESCRIPTOR_NS
        queues = min(self._fitting(width), rows, _ROW_MATRICES)
        slow = core.fp32_cycle_factor if self.x.dtype is DType.FLOAT32 else 1
        tensor = slow * chunks * chunks_of(width) * ISSUE / core.tensor_ghz
        return ceil(columns / width) * (rows * max(load, tensor, (start + load) / queues) + start)

    def write(self) -> None:
        k = self.k
        groups, valid = _groups_of_rows(self.low, self.ends, self.x.shape[0])
        for rows in k.spans(self.x.shape[0], PARTITIONS):
            with k.scope():
                transposed = _transposed_rows(k, self.x, rows)
                numbers = self._numbers(groups.cut(rows))
                for columns, inside in _column_blocks(k, self.matrices, self._width):
                    with k.scope():
                        self._write_block(transposed, numbers, valid, rows, columns, inside)

    def _fitting(self, width: int) -> int:
        """The number of blocks of so many columns that fit SBUF."""
        rows, (_, summed, _) = min(self.x.shape[0], PARTITIONS), self.matrices.shape
        by_column = 2 * self.out.itemsize + 2 * epilogue_bytes(self.epilogue)
        others = _SPARE + chunks_of(summed) * rows * self.x.dtype.itemsize + min(width, STRIP) * by_column
        return (self.k.free_bytes(Memory.SBUF) - others) // (chunks_of(summed) * width * self.matrices.dtype.itemsize)

    @property
    def _width(self) -> int:
        """Columns of a block: as many as leave space for four of them, or else for two."""
        columns, tile = self.matrices.shape[2], self.matrices.tile
        whole_tiles = (first * tile for first in range(ceil(columns / tile), 0, -1))
        widths = [min(width, columns) for width in whole_tiles]
        widths += [width for width in (tile // 2, tile // 4) if width < columns]
        for least in (4, 2):
            for width in widths:
                if self._fitting(width) >= least and (least == 2 or width >= min(tile, columns)):
                    return width
        return widths[-1]

    def _numbers(self, groups: View) -> dict[int, Block]:
        """For each distance of two partitions' first rows in a matrix, the row numbers [128, rows] of each row's
        matrix."""
        k, (_, summed, _) = self.k, self.matrices.shape
        count = groups.shape[0]
        of_rows = k.tile(DType.FLOAT32, PARTITIONS, count)
        k.copy(of_rows.whole, groups.broadcast((PARTITIONS, count)).far())
        numbers: dict[int, Block] = {}
        for distance in {max(summed // PARTITIONS, 1), 1}:
            first = k.tile(DType.FLOAT32, PARTITIONS, 1).whole
            k.emit(IotaPattern(engine=Engine.GPSIMD, dst=first, start=Affine(), by_partition=distance, steps=(0,)))
            block = k.tile(DType.INT32, PARTITIONS, count)
            k.emit(
                TensorScalar(
                    engine=Engine.VECTOR,
                    dst=block.whole,
                    src=of_rows.whole,
                    op0=Alu.MULTIPLY,
                    operand0=float(summed),
                    op1=Alu.ADD,
                    operand1=first,
                )
            )
            numbers[distance] = replace(block, dtype=DType.UINT32)
        return numbers

    def _write_block(
        self, transposed: Block, numbers: dict[int, Block], valid: View, rows: Span, columns: Span, inside: Span
    ) -> None:
        k, width = self.k, columns[1]
        chunks = chunks_of(width)
        for first, count in k.spans(rows[1], max(BANK // chunks, 1)):
            with k.scope():
                sums = k.psum(PARTITIONS, chunks, count)
                for start, at_once in k.spans(count, min(count, _ROW_MATRICES)):
                    with k.scope():
                        blocks = self._blocks(at_once, width)
                        for number in range(at_once):
                            row = first + start + number
                            weight = self._load(blocks[number % len(blocks)], numbers, row, columns, inside)
                            self._multiply(sums, start + number, weight, transposed, row, width)
                self._store(sums, valid, (first + rows[0], count), columns)

    def _blocks(self, rows: int, width: int) -> list[Block]:
        """As many blocks for matrices as so many rows use, or as fit."""
        fitting, (_, summed, _) = self._fitting(width), self.matrices.shape
        count, shape = min(rows, max(fitting, 1)), (chunks_of(summed), width)
        buffers = 2 if fitting >= 2 * count else 1
        return [self.k.tile(self.matrices.dtype, PARTITIONS, *shape, buffers=buffers) for _ in range(count)]

    def _load(self, block: Block, numbers: dict[int, Block], row: Affine, columns: Span, inside: Span) -> TiledBlock:
        """Load a block of columns of a row's matrix: each partition from its own row number on."""
        k, view = self.k, self.matrices.pick(0, 0)
        assert isinstance(view, TiledView)
        summed, total = view.shape
        for dst, far in tiled_reads(view, block, 0, summed, columns, inside):
            lanes = far.axes[0]
            row_tile = numbers[lanes.stride // total].cut(lanes.size, (row, 1))
            k.copy(dst, replace(far, axes=(Axis(lanes.size, total), *far.axes[1:]), rows=row_tile))
        return TiledBlock(**vars(block), tile=view.tile, whole_chunks=summed // PARTITIONS)

    def _multiply(
        self, sums: Block, place: Affine, weight: TiledBlock, transposed: Block, row: Affine, width: int
    ) -> None:
        k = self.k
        for left, tile_width in k.spans(width, min(weight.tile, width)):
            for inner, depth in k.spans(tile_width, PARTITIONS):
                dst = sums.cut(depth, (_chunk(left, inner), 1), (place, 1))
                for chunk, summed in each_chunk(k, self.x.shape[1]):
                    stationary = weight.cut_tile(summed, chunk, (left, tile_width), (inner, depth))
                    moving = transposed.cut(summed, (chunk, 1), (row, 1))
                    k.emit(
                        Matmul(engine=Engine.TENSOR, dst=dst, stationary=stationary, moving=moving, accumulate=chunk)
                    )

    def _store(self, sums: Block, valid: View, rows: Span, columns: Span) -> None:
        """Transpose the sums of a block of columns, and store those of rows that have a group; others are 0."""
        k, count, width = self.k, rows[1], columns[1]
        is_valid = k.tile(DType.UINT8, count, 1, buffers=2).whole
        k.copy(is_valid, valid.cut(rows).packed_as((count, 1)).far())
        full, rest = divmod(width, PARTITIONS)
        staged = k.tile(self.out, PARTITIONS, sums.shape[0], count, buffers=2)
        for depth, chunk, chunks in ((PARTITIONS, 0, full), (rest, full, 1)):
            if depth and chunks:
                src, dst = (block.cut(depth, (chunk, chunks)) for block in (sums, staged))
                k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=src, function=Function.COPY))
        for left, strip in k.spans(width, STRIP):
            with k.scope():
                out_tile = k.tile(self.out, count, strip, buffers=2)
                k.emit(Memset(engine=Engine.VECTOR, dst=out_tile.whole, value=0.0))
                for begin, size in k.spans(strip, BANK):
                    with k.scope():
                        turned = k.tile(self.out, count, size, memory=Memory.PSUM, buffers=2)
                        for inner, depth in k.spans(size, PARTITIONS):
                            src = staged.cut(depth, (_chunk(left, begin, inner), 1))
                            k.emit(NcTranspose(engine=Engine.TENSOR, dst=turned.cut(count, (inner, depth)), src=src))
                        dst, predicate = out_tile.cut(count, (begin, size)), repeated(is_valid, size)
                        k.emit(CopyPredicated(engine=Engine.VECTOR, dst=dst, src=turned.whole, predicate=predicate))
                self.epilogue.store(out_tile.whole, rows, (left + columns[0], strip))


def _groups_of_rows(low: Lowering, ends: View, count: int) -> tuple[View, View]:
    """The group of each row as float32, and bytes that are 1 if the row has one.

    A row belongs to the first group that ends after it. Groups count down to 1 here, so that the first one is the
    maximum, and 0 is none, for which the last group is read."""
    k, total = low.k, ends.shape[0]
    found = (low.scratch(DType.FLOAT32, (count,)), low.scratch(DType.UINT8, (count,)))
    for top, rows in k.spans(count, PARTITIONS):
        with k.scope():
            lanes, single = Lanes(k, rows, total), Lanes(k, rows, 1)
            number, countdown, loaded = single.tile(), lanes.tile(), lanes.tile(ends.dtype)
            k.copy(loaded, ends.broadcast((rows, total)).far())
            k.emit(IotaPattern(engine=Engine.GPSIMD, dst=number, start=top, by_partition=1, steps=(0,)))
            k.emit(IotaPattern(engine=Engine.GPSIMD, dst=countdown, start=Affine(total), by_partition=0, steps=(-1,)))
            open_groups = lanes.two(Alu.GREATER, loaded, repeated(number, total))
            lanes.two(Alu.MULTIPLY, open_groups, countdown, open_groups)
            most = single.tile()
            k.emit(TensorReduce(engine=Engine.VECTOR, dst=most, src=open_groups, op=Alu.MAXIMUM))
            known = single.two(Alu.GREATER, most, 0.0, single.tile(DType.UINT8))
            group = single.two(Alu.ADD, single.then(most, Alu.MAXIMUM, 1.0, Alu.MULTIPLY, -1.0), float(total))
            for view, tile in zip(found, (group, known), strict=True):
                k.copy(view.cut((top, rows)).packed_as((rows, 1)).far(), tile)
    return found


def _transposed_rows(k: Kernel, x: View, rows: Span) -> Block:
    transposed = k.tile(x.dtype, PARTITIONS, max(chunks_of(x.shape[1]), 1), rows[1])
    load_matrix(k, transposed, x.cut(rows).transposed((1, 0)))
    return transposed


def _load_matrix_of(k: Kernel, matrix: View, columns: Span, inside: Span) -> Block:
    depth = matrix.shape[0]
    if isinstance(matrix, TiledView):
        return load_tiled(k, matrix, (Affine(), depth), columns, inside, 2)
    weight = k.tile(matrix.dtype, PARTITIONS, chunks_of(depth), columns[1], buffers=2)
    load_matrix(k, weight, matrix.cut((0, depth), columns))
    return weight


def _block_width(matrices: View, most: int) -> int:
    """A width of at most so many columns: all columns, whole banks, or a part of one."""
    columns = matrices.shape[2]
    if columns <= most:
        return columns
    return most // BANK * BANK or max(most // 64 * 64, 1)


def _column_blocks(k: Kernel, matrices: View, width: int) -> Iterator[tuple[Span, Span]]:
    """Loops over blocks of columns. One that is narrower than a stored tile lies within the tile that follows it."""
    columns = matrices.shape[2]
    if width >= min(BANK, columns):
        for block in k.spans(columns, width):
            yield block, block
        return
    for first, tile_width in k.spans(columns, BANK):
        for left, size in k.spans(tile_width, width):
            yield (left + first, size), (first, tile_width)


def _chunk(*columns: Affine) -> Affine:
    """The chunk of 128 columns that begins at the sum of some columns."""
    return divided(sum(columns, Affine()), PARTITIONS)
