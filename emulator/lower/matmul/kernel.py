"""Matmul kernel: matmuls that read the same rows, emitted together, so that the rows are loaded and transposed once.

`tiling` chooses how the work is cut. Matmuls whose results meet in one elementwise node form an output group: the same
columns of all of them are in SBUF together, so that only the result of that node is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from nxpipe.emulator.isa.affine import Affine, divided
from nxpipe.emulator.isa.collective import CollectiveReduceScatter
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import Memset, TensorCopy, TensorTensor
from nxpipe.emulator.lower.grouping import RowSharding
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.matmul.tiling import (
    BANK,
    STRIP,
    LoadableRows,
    LoadRows,
    OutputGroup,
    TileShape,
    Tiling,
    cheapest_tiling,
    psum_buffers,
    strip_width,
)
from nxpipe.emulator.lower.transpose import chunks_of, each_chunk, each_slab, load_matrix
from nxpipe.emulator.lower.view import View


@dataclass(frozen=True)
class MatmulKernel:
    k: Kernel
    rows: LoadableRows
    parts: tuple[OutputGroup, ...]
    first: Affine | int = 0  # row of the epilogues' views that row 0 of this kernel is

    def write(self) -> None:
        if not self.rows.shape[0]:
            return
        note = self.k.note
        if self.rows.shape[1]:
            for parts, tiling in self._plan:
                self.k.note = note
                replace(self, parts=parts)._write(tiling)
        else:
            for part in self.parts:
                _Columns(self, part, (0, part.columns)).write_empty_sums()
        self.k.note = note

    @property
    def ns(self) -> float:
        """Expected time."""
        return sum(tiling.ns for _, tiling in self._plan)

    @cached_property
    def _plan(self) -> list[tuple[tuple[OutputGroup, ...], Tiling]]:
        """Output groups with their tilings: all groups in one kernel, or each in its own where that is cheaper.

        Together they share the loads of rows, but also SBUF, so that blocks are smaller.
        """
        parts = tuple(part for part in self.parts if part.columns)
        if not parts:
            return []
        core, budget = self.k.core, self.k.free_bytes(Memory.SBUF)
        together = cheapest_tiling(core, budget, self.rows, [part.sizes for part in parts])
        alone = (
            [cheapest_tiling(core, budget, self.rows, [part.sizes]) for part in parts] if len(parts) > 1 else [together]
        )
        if sum(tiling.ns for tiling in alone) < together.ns:
            return [((part,), tiling) for part, tiling in zip(parts, alone, strict=True)]
        return [(parts, together)]

    def _write(self, tiling: Tiling) -> None:
        self.k.tilings.append(tiling)
        with self.k.scope():
            fill = self._noted(self.rows.begin())
            if tiling.weight_stationary:
                self._weight_stationary(tiling, fill)
            else:
                self._activation_stationary(tiling, fill)

    def _noted(self, fill: LoadRows) -> LoadRows:
        note = self.k.note

        def noted(transposed: Block, rows: Span) -> None:
            self.k.note = note
            fill(transposed, rows)

        return noted

    def _activation_stationary(self, tiling: Tiling, fill: LoadRows) -> None:
        k = self.k
        for rows in k.spans(self.rows.shape[0], tiling.height):
            with k.scope():
                transposed = self.rows.block(rows[1], 1)
                with k.scope():
                    fill(transposed, rows)
                for part, piece in zip(self.parts, tiling.pieces, strict=True):
                    for columns in k.spans(part.columns, piece.width):
                        with k.scope():
                            _Columns(self, part, columns).write(transposed, rows, piece)

    def _weight_stationary(self, tiling: Tiling, fill: LoadRows) -> None:
        """Only a single output group may be cut into blocks of columns."""
        k, (first, *others) = self.k, self.parts
        for columns in k.spans(first.columns, tiling.pieces[0].width):
            with k.scope():
                places = [_Columns(self, first, columns), *(_Columns(self, part, (0, part.columns)) for part in others)]
                ready = [place.begin(1 + tiling.prefetch) for place in places]
                for rows in k.spans(self.rows.shape[0], tiling.height):
                    with k.scope():
                        transposed = self.rows.block(rows[1], tiling.buffers)
                        with k.scope():
                            fill(transposed, rows)
                        for each in ready:
                            each.write(transposed, rows)


@dataclass(frozen=True)
class _Columns:
    """Some columns of an output group."""

    products: MatmulKernel
    part: OutputGroup
    columns: Span

    @property
    def k(self) -> Kernel:
        return self.products.k

    def begin(self, buffers: int) -> "_LoadedColumns":
        """Load their weights and biases, the whole contraction axis."""
        self.k.note = self.part.note
        return _LoadedColumns(self, self.common(buffers), self.weights(Affine(), self.products.rows.shape[1], buffers))

    def write(self, transposed: Block, rows: Span, piece: TileShape) -> None:
        self.k.note = self.part.note
        if piece.slab < chunks_of(self.products.rows.shape[1]):
            self._write_in_slabs(transposed, rows, piece.slab)
        else:
            self.begin(2).write(transposed, rows)

    def _write_in_slabs(self, transposed: Block, rows: Span, slab: int) -> None:
        """All partial sums stay in PSUM until the last slab of the weights. The search admits few, so their loop is
        unrolled."""
        k, height, width = self.k, rows[1], self.columns[1]
        tiles, banks, common = chunks_of(height), -(-width // BANK), self.common(2)
        buffers = psum_buffers(len(self.part.factors) * tiles * banks)
        waiting = [k.psum(min(height, PARTITIONS), tiles, banks, BANK, buffers=buffers) for _ in self.part.factors]
        rows_of = [(tile, min(height - tile * PARTITIONS, PARTITIONS)) for tile in range(tiles)]
        wide_of = [min(width - bank * BANK, BANK) for bank in range(banks)]
        for chunk, depth in each_slab(k, self.products.rows.shape[1], slab):
            with k.scope():
                weights = self.weights(chunk, depth, 2)
                for (tile, count), (bank, wide) in product(rows_of, enumerate(wide_of)):
                    for block, weight in zip(waiting, weights, strict=True):
                        sums = block.cut(count, (tile, 1), (bank, 1), (0, wide))
                        row, column = (tile * PARTITIONS, count), (bank * BANK, wide)
                        emit_matmuls(k, sums, transposed, weight, chunk, row, column, depth)
        for (tile, count), left in product(rows_of, range(0, width, STRIP)):
            with k.scope():
                strip = (left, min(width - left, STRIP))
                made = common.made(count, strip[1])
                for number, block in enumerate(waiting):
                    for bank in range(left // BANK, -(-(left + strip[1]) // BANK)):
                        sums = block.cut(count, (tile, 1), (bank, 1), (0, wide_of[bank]))
                        place = (bank * BANK - left, wide_of[bank])
                        common.bring(number, made[number].cut(count, place), sums, (bank * BANK, wide_of[bank]))
                common.finish(made, (rows[0] + tile * PARTITIONS, count), strip)

    def weights(self, chunk: Affine, depth: int, buffers: int) -> list[Block]:
        found = []
        for factor in self.part.factors:
            block = self.k.tile(factor.dtype, PARTITIONS, chunks_of(depth), self.columns[1], buffers=buffers)
            load_matrix(self.k, block, factor.weight.cut((chunk * PARTITIONS, depth), self.columns))
            found.append(block)
        return found

    def common(self, buffers: int) -> "_OutputTiles":
        return _OutputTiles(self, [self._bias(factor.bias, buffers) for factor in self.part.factors])

    def _bias(self, bias: View | None, buffers: int) -> Block | None:
        """The bias row, copied to every partition."""
        if bias is None:
            return None
        lanes = min(self.products.rows.shape[0], PARTITIONS)
        block = self.k.tile(bias.dtype, lanes, self.columns[1], buffers=buffers)
        self.k.copy(block.whole, bias.cut(self.columns).broadcast((lanes, self.columns[1])).far())
        return block

    def write_empty_sums(self) -> None:
        k = self.k
        for left, width in k.spans(self.part.columns, BANK):
            with k.scope():
                common = replace(self, columns=(left, width)).common(2)
                for row, count in k.spans(self.products.rows.shape[0], PARTITIONS):
                    with k.scope():
                        made = common.made(count, width)
                        for block, bias in zip(made, common.biases, strict=True):
                            k.emit(Memset(engine=Engine.VECTOR, dst=block.whole, value=0.0))
                            if bias is not None:
                                k.emit(TensorCopy(engine=Engine.VECTOR, dst=block.whole, src=bias.cut(count)))
                        common.finish(made, (row, count), (0, width))


@dataclass(frozen=True)
class _OutputTiles:
    """Output tiles of some columns, with the biases that all rows share."""

    at: _Columns
    biases: Sequence[Block | None]

    def made(self, rows: int, width: int) -> list[Block]:
        """A tile for each result; with ranks, one for the partial result of each rank."""
        k, part = self.at.k, self.at.part
        shape = (part.ranks, width) if part.ranks > 1 else (width,)
        return [k.tile(factor.out, rows, *shape, buffers=2) for factor in part.factors]

    def bring(self, number: int, dst: Tile, sums: Tile, column: Span) -> None:
        bias = self.biases[number]
        if bias is None:
            self.at.k.emit(TensorCopy(engine=Engine.VECTOR, dst=dst, src=sums))
        else:
            right = bias.cut(dst.partitions, column)
            self.at.k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst, left=sums, right=right, op=Alu.ADD))

    def finish(self, made: Sequence[Block], row: Span, column: Span) -> None:
        """Run the epilogue. Rows are those of all ranks; after the reduce-scatter each rank continues with its own."""
        part, (start, count) = self.at.part, row
        whole = [block.whole for block in made]
        if part.ranks > 1:
            start, count = divided(start, part.ranks), count // part.ranks
            whole = [self._own(tile, column[1]) for tile in whole]
        tiles = {factor.result: tile for factor, tile in zip(part.factors, whole, strict=True)}
        columns = (self.at.columns[0] + column[0], column[1])
        part.epilogue.finish(tiles, (start + self.at.products.first, count), columns)

    def _own(self, of_all: Tile, width: int) -> Tile:
        k = self.at.k
        own = k.tile(of_all.dtype, of_all.partitions, width, buffers=2).whole
        k.emit(CollectiveReduceScatter(engine=Engine.COLLECTIVE, dst=own, src=of_all))
        return own


@dataclass(frozen=True)
class _LoadedColumns:
    """Some columns of an output group with their weights in SBUF."""

    at: _Columns
    common: _OutputTiles
    weights: Sequence[Block]

    def write(self, transposed: Block, rows: Span) -> None:
        k, ranks, sharing = self.at.k, self.at.part.ranks, self.at.part.sharing
        k.note = self.at.part.note
        for row, count in k.spans(rows[1], PARTITIONS * ranks):
            for strip in k.spans(self.at.columns[1], strip_width(ranks)):
                with k.scope():
                    made = self.common.made(count // ranks, strip[1])
                    for number, block in enumerate(made):
                        with k.loop(ranks) as rank:
                            place = (row + rank * (sharing.rows if sharing else 0), count // ranks)
                            self._multiply(number, block, rank, transposed, place, strip)
                    self.common.finish(made, (row + rows[0], count), strip)

    def _multiply(self, number: int, made: Block, rank: Affine, transposed: Block, row: Span, strip: Span) -> None:
        k, depth = self.at.k, self.at.products.rows.shape[1]
        for bank, some in k.spans(strip[1], BANK):
            with k.scope():
                column = (strip[0] + bank, some)
                sums, sharing = k.psum(row[1], some).whole, self.at.part.sharing
                emit_matmuls(k, sums, transposed, self.weights[number], Affine(), row, column, depth, sharing)
                dst = made.cut(row[1], *([(rank, 1)] if sharing else []), (bank, some))
                self.common.bring(number, dst, sums, column)


def emit_matmuls(
    k: Kernel,
    sums: Tile,
    transposed: Block,
    weight: Block,
    first: Affine,
    row: Span,
    column: Span,
    depth: int,
    sharing: RowSharding | None = None,
) -> None:
    """Emit the matmuls of some rows by some columns over a slab of the contraction axis that begins at chunk `first`.

    Accumulation in PSUM starts with chunk 0. With row sharding the rows are those of one rank, in several runs."""
    rows = (row[0], sharing.rows) if sharing else row
    for chunk, deep in each_chunk(k, depth):
        stationary = transposed.cut(deep, (first + chunk, 1), rows)
        if sharing:
            runs = Axis(row[1] // sharing.rows, transposed.row_stride(sharing.ranks * sharing.rows))
            stationary = replace(stationary, axes=(runs, stationary.axes[-1]))
        moving = weight.cut(deep, (chunk, 1), column)
        k.emit(Matmul(engine=Engine.TENSOR, dst=sums, stationary=stationary, moving=moving, accumulate=first + chunk))
