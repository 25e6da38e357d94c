"""Grouped matmul of a mixture of experts: groups of rows, each with its own matrix; the groups' ends are data.

Instructions have no loops whose length is data. So every matrix is multiplied with all rows, and each row keeps its own
result: the work is that of as many dense matmuls as there are groups. Groups are processed from the last to the first,
and each overwrites all rows before its end; a row is therefore left with the first group that ends behind it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import IotaPattern
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import CopyPredicated, Memset, TensorCopy, TensorScalar
from nxpipe.emulator.lower.epilogue import Epilogue, epilogue_bytes
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lanes import repeated
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.linear import as_matrix
from nxpipe.emulator.lower.matmul.tiling import BANK
from nxpipe.emulator.lower.transpose import chunks_of, each_chunk, load_matrix
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import GroupedMatMul


@lowers(GroupedMatMul)
def _grouped(low: Lowering, node: Node, op: GroupedMatMul) -> None:
    rows, matrices, ends = map(low.view, node.operands)
    x = as_matrix(low, rows, *rows.shape)
    epilogue = low.epilogue(node.result, matrices.shape[2])
    if node.result.type.elements:
        _Groups(low.k, x, matrices, ends, epilogue, node.result.type.dtype.on_device).write()


@dataclass(frozen=True)
class _Groups:
    """One grouped matmul."""

    k: Kernel
    x: View  # [rows, summed]
    matrices: View  # [groups, summed, columns]
    ends: View
    epilogue: Epilogue
    out: DType

    def write(self) -> None:
        k, rows = self.k, self.x.shape[0]
        chunks = chunks_of(self.x.shape[1])
        for top, height in k.spans(rows, self._height(chunks)):
            with k.scope():
                transposed = k.tile(self.x.dtype, PARTITIONS, max(chunks, 1), height)
                load_matrix(k, transposed, self.x.cut((top, height)).transposed((1, 0)))
                owned = self._owned(top, height)
                for left, width in k.spans(self.matrices.shape[2], self._width(chunks, height)):
                    with k.scope():
                        self._write_block(transposed, owned, (top, height), (left, width))

    def _height(self, chunks: int) -> int:
        """Rows whose sums fit half of SBUF, one PSUM bank wide: the more rows, the fewer times each matrix is
        loaded."""
        by_row = chunks * self.x.dtype.itemsize
        by_tile = BANK * DType.FLOAT32.itemsize + self.ends.shape[0]
        tiles = (self.k.left(Memory.SBUF) // 2) // (by_row * PARTITIONS + by_tile)
        return min(max(tiles, 1), chunks_of(self.x.shape[0])) * PARTITIONS

    def _width(self, chunks: int, height: int) -> int:
        by_column = 2 * chunks * self.matrices.dtype.itemsize + chunks_of(height) * DType.FLOAT32.itemsize
        by_column += 2 * self.out.itemsize + epilogue_bytes(self.epilogue)
        most = (self.k.left(Memory.SBUF) - (20 << 10)) // by_column
        return max(min(most // 64 * 64, BANK), 1)

    def _owned(self, top: Affine, height: int) -> Block:
        """For each row, the groups that end behind it: [128, tiles, groups] of bytes."""
        k, groups, tiles = self.k, self.ends.shape[0], chunks_of(height)
        owned = k.tile(DType.UINT8, PARTITIONS, tiles, max(groups, 1))
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
                        dst=owned.cut(PARTITIONS, (tile, 1)),
                        src=ends.whole,
                        op0=Alu.GREATER,
                        operand0=number,
                    )
                )
        return owned

    def _write_block(self, transposed: Block, owned: Block, rows: Span, columns: Span) -> None:
        k, height, width, (groups, inner, _) = self.k, rows[1], columns[1], self.matrices.shape
        kept = k.tile(DType.FLOAT32, PARTITIONS, chunks_of(height), width)
        k.emit(Memset(engine=Engine.VECTOR, dst=kept.whole, value=0.0))
        if groups and inner:
            with k.loop(groups) as index, k.scope():
                group = index * -1 + (groups - 1)
                weight = k.tile(self.matrices.dtype, PARTITIONS, transposed.shape[0], width, buffers=2)
                load_matrix(k, weight, self.matrices.pick(0, group).cut((0, inner), columns))
                for row, count in self._tiles(height):
                    with k.scope():
                        self._keep(self._sums(transposed, weight, (row * PARTITIONS, count)), kept, owned, row, group)
        for row, count in self._tiles(height):
            with k.scope():
                made = k.tile(self.out, count, width, buffers=2).whole
                k.emit(TensorCopy(engine=Engine.VECTOR, dst=made, src=kept.cut(count, (row, 1))))
                self.epilogue.store(made, (row * PARTITIONS + rows[0], count), columns)

    def _sums(self, transposed: Block, weight: Block, row: Span) -> Tile:
        sums = self.k.psum(row[1], weight.shape[1]).whole
        for chunk, depth in each_chunk(self.k, self.x.shape[1]):
            self.k.emit(
                Matmul(
                    engine=Engine.TENSOR,
                    dst=sums,
                    stationary=transposed.cut(depth, (chunk, 1), row),
                    moving=weight.cut(depth, (chunk, 1)),
                    accumulate=chunk,
                )
            )
        return sums

    def _keep(self, sums: Tile, kept: Block, owned: Block, row: Affine, group: Affine) -> None:
        mask = owned.cut(sums.partitions, (row, 1), (group, 1))
        predicate = repeated(mask, kept.shape[1])
        dst = kept.cut(sums.partitions, (row, 1))
        self.k.emit(CopyPredicated(engine=Engine.VECTOR, dst=dst, src=sums, predicate=predicate))

    def _tiles(self, height: int) -> Iterator[tuple[Affine, int]]:
        return each_chunk(self.k, height)
