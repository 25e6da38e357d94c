"""Matmul kernel: matmuls that read the same rows, emitted together, so that the rows are loaded and transposed once.

`tiling` selects the loop order and the tile sizes. Matmuls whose results are operands of one elementwise node form an
output group: the same columns of all of them are in SBUF together, so that only the result of that node is stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, divided
from nxpipe.emulator.isa.collective import CollectiveReduceScatter
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.scalar import Activation, Function
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
    WeightOperand,
    cheapest_tiling,
    psum_buffers,
    strip_width,
)
from nxpipe.emulator.lower.transpose import chunks_of, each_chunk, each_slab, load_matrix, load_tiled
from nxpipe.emulator.lower.view import TiledView, View

_BANKS: Final = 3  # of sums that an epilogue reads in PSUM, twice; the other two are for transposes
_FACTORS: Final = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)  # of a bias that is added as a product


@dataclass(frozen=True)
class MatmulKernel:
    """One matmul kernel: rows times the weights of all output groups."""

    k: Kernel
    rows: LoadableRows
    groups: tuple[OutputGroup, ...]
    first: Affine | int = 0  # the row of the epilogues' views that corresponds to row 0

    def write(self) -> None:
        if not self.rows.shape[0]:
            return
        note = self.k.note
        if self.rows.shape[1]:
            for groups, tiling in self._plan:
                self.k.note = note
                replace(self, groups=groups)._write(tiling)
        else:
            for group in self.groups:
                _Columns(self, group, (0, group.columns)).write_empty_sums()
        self.k.note = note

    @property
    def ns(self) -> float:
        """Expected time in ns."""
        return sum(tiling.ns for _, tiling in self._plan)

    @cached_property
    def _plan(self) -> list[tuple[tuple[OutputGroup, ...], Tiling]]:
        """Output groups with their tilings: all groups in one kernel, or one kernel per group if that is cheaper.

        A common kernel loads rows once for all groups, but the groups share SBUF, so that their weight blocks are
        smaller.
        """
        groups = tuple(group for group in self.groups if group.columns)
        if not groups:
            return []
        core, budget = self.k.core, self.k.free_bytes(Memory.SBUF)
        together = cheapest_tiling(core, budget, self.rows, [group.sizes for group in groups])
        alone = (
            [cheapest_tiling(core, budget, self.rows, [group.sizes]) for group in groups]
            if len(groups) > 1
            else [together]
        )
        if sum(tiling.ns for tiling in alone) < together.ns:
            return [((group,), tiling) for group, tiling in zip(groups, alone, strict=True)]
        return [(groups, together)]

    def _write(self, tiling: Tiling) -> None:
        self.k.tilings.append(tiling)
        with self.k.scope():
            fill = self._with_note(self.rows.begin())
            if tiling.weight_stationary:
                self._weight_stationary(tiling, fill)
            else:
                self._activation_stationary(tiling, fill)

    def _with_note(self, fill: LoadRows) -> LoadRows:
        note = self.k.note

        def noted(transposed: Block, rows: Span) -> None:
            self.k.note = note
            fill(transposed, rows)

        return noted

    def _activation_stationary(self, tiling: Tiling, fill: LoadRows) -> None:
        """Rows stay in SBUF while the weight blocks of all groups stream past them."""
        k = self.k
        for rows in k.spans(self.rows.shape[0], tiling.height):
            with k.scope():
                transposed = self.rows.block(rows[1], 1)
                with k.scope():
                    fill(transposed, rows)
                for group, tile_shape in zip(self.groups, tiling.pieces, strict=True):
                    for columns in _column_blocks(self, group, tile_shape.width):
                        with k.scope():
                            columns.write(transposed, rows, tile_shape)

    def _weight_stationary(self, tiling: Tiling, fill: LoadRows) -> None:
        """Weights stay in SBUF while rows stream past them. Only a single output group may be cut into column
        blocks."""
        k, (first, *others) = self.k, self.groups
        for columns in _column_blocks(self, first, tiling.pieces[0].width):
            with k.scope():
                column_spans = [columns, *(_Columns(self, group, (0, group.columns)) for group in others)]
                loaded = [span.begin(1 + tiling.prefetch) for span in column_spans]
                for rows in k.spans(self.rows.shape[0], tiling.height):
                    with k.scope():
                        transposed = self.rows.block(rows[1], tiling.buffers)
                        with k.scope():
                            fill(transposed, rows)
                        for span in loaded:
                            span.write(transposed, rows)


def _column_blocks(kernel: MatmulKernel, group: OutputGroup, width: int) -> Iterator["_Columns"]:
    """Loops over blocks of a group's columns. Blocks that are narrower than a stored tile do not cross its border."""
    k, tile = kernel.k, group.sizes.tile
    if width >= tile:
        for columns in k.spans(group.columns, width):
            yield _Columns(kernel, group, columns)
        return
    for first, tile_width in k.spans(group.columns, tile):
        for left, size in k.spans(tile_width, width):
            yield _Columns(kernel, group, (left + first, size), (first, tile_width))


@dataclass(frozen=True)
class _Columns:
    """A span of columns of an output group."""

    kernel: MatmulKernel
    group: OutputGroup
    columns: Span
    tile: Span | None = None  # the stored tile in which the columns lie, if they are narrower

    @property
    def k(self) -> Kernel:
        return self.kernel.k

    def begin(self, buffers: int) -> "_LoadedColumns":
        """Load the weights, over the whole contraction axis, and the biases."""
        self.k.note = self.group.note
        return _LoadedColumns(self, self.outputs(buffers), self.weights(Affine(), self.kernel.rows.shape[1], buffers))

    def write(self, transposed: Block, rows: Span, tile_shape: TileShape) -> None:
        self.k.note = self.group.note
        if tile_shape.slab < chunks_of(self.kernel.rows.shape[1]):
            self._write_in_slabs(transposed, rows, tile_shape.slab)
        else:
            self.begin(2).write(transposed, rows)

    def _write_in_slabs(self, transposed: Block, rows: Span, slab: int) -> None:
        """Multiply slab by slab of the contraction axis. All partial sums stay in PSUM until the last slab (one
        accumulation group each). The tiling search limits their number, so that the loop over them is unrolled."""
        k, height, width = self.k, rows[1], self.columns[1]
        tiles, banks, outputs = chunks_of(height), -(-width // BANK), self.outputs(2)
        buffers = psum_buffers(len(self.group.operands) * tiles * banks)
        partial_sums = [
            k.psum(min(height, PARTITIONS), tiles, banks, BANK, buffers=buffers) for _ in self.group.operands
        ]
        row_tiles = [(tile, min(height - tile * PARTITIONS, PARTITIONS)) for tile in range(tiles)]
        bank_widths = [min(width - bank * BANK, BANK) for bank in range(banks)]
        for chunk, depth in each_slab(k, self.kernel.rows.shape[1], slab):
            with k.scope():
                weights = self.weights(chunk, depth, 2)
                for (tile, count), (bank, bank_width) in product(row_tiles, enumerate(bank_widths)):
                    for block, weight in zip(partial_sums, weights, strict=True):
                        sums = block.cut(count, (tile, 1), (bank, 1), (0, bank_width))
                        row, column = (tile * PARTITIONS, count), (bank * BANK, bank_width)
                        emit_matmuls(k, sums, transposed, weight, chunk, row, column, depth)
        for (tile, count), left in product(row_tiles, range(0, width, STRIP)):
            with k.scope():
                strip = (left, min(width - left, STRIP))
                out_tiles = outputs.allocate(count, strip[1])
                for number, block in enumerate(partial_sums):
                    for bank in range(left // BANK, -(-(left + strip[1]) // BANK)):
                        sums = block.cut(count, (tile, 1), (bank, 1), (0, bank_widths[bank]))
                        columns = (bank * BANK - left, bank_widths[bank])
                        outputs.copy_from_psum(
                            number, out_tiles[number].cut(count, columns), sums, (bank * BANK, bank_widths[bank])
                        )
                outputs.finish(out_tiles, (rows[0] + tile * PARTITIONS, count), strip)

    def weights(self, chunk: Affine, depth: int, buffers: int) -> list[Block]:
        inside = self.tile or self.columns
        return [
            load_weight(self.k, operand, (chunk, depth), self.columns, inside, buffers)
            for operand in self.group.operands
        ]

    def outputs(self, buffers: int) -> "_OutputTiles":
        biases = [operand.bias for operand in self.group.operands]
        ones = {bias.dtype: self._ones(bias.dtype) for bias in biases if bias and self._is_product(bias)}
        return _OutputTiles(self, [self._bias(bias, buffers) for bias in biases], ones)

    def _ones(self, dtype: DType) -> Block:
        block = self.k.tile(dtype, 1, min(self.kernel.rows.shape[0], PARTITIONS))
        self.k.emit(Memset(engine=Engine.VECTOR, dst=block.whole, value=1.0))
        return block

    def _bias(self, bias: View | None, buffers: int) -> Block | None:
        """Load the bias row to one partition, if it is added as a product, or else to every partition."""
        if bias is None:
            return None
        lanes = 1 if self._is_product(bias) else min(self.kernel.rows.shape[0], PARTITIONS)
        block = self.k.tile(bias.dtype, lanes, self.columns[1], buffers=buffers)
        self.k.copy(block.whole, bias.cut(self.columns).broadcast((lanes, self.columns[1])).far())
        return block

    def _is_product(self, bias: View) -> bool:
        """True if adding the bias on the tensor engine, as the product of ones and its row, takes less time than
        loading the row to every partition."""
        core, (rows, summed) = self.k.core, self.kernel.rows.shape
        if bias.dtype not in _FACTORS or not summed:
            return False
        slow = core.fp32_cycle_factor if bias.dtype is DType.FLOAT32 else 1
        load = min(rows, PARTITIONS) * bias.dtype.itemsize / (core.dma_engines * core.dma_engine_peak_gb_s)
        return chunks_of(rows) * slow / core.tensor_ghz < load

    def write_empty_sums(self) -> None:
        """Write the results of an empty contraction axis: zeros plus the bias."""
        k = self.k
        for left, width in k.spans(self.group.columns, BANK):
            with k.scope():
                outputs = replace(self, columns=(left, width)).outputs(2)
                for row, count in k.spans(self.kernel.rows.shape[0], PARTITIONS):
                    with k.scope():
                        out_tiles = outputs.allocate(count, width)
                        for block, bias in zip(out_tiles, outputs.biases, strict=True):
                            k.emit(Memset(engine=Engine.VECTOR, dst=block.whole, value=0.0))
                            if bias is not None:
                                k.emit(TensorCopy(engine=Engine.VECTOR, dst=block.whole, src=bias.cut(count)))
                        outputs.finish(out_tiles, (row, count), (0, width))


@dataclass(frozen=True)
class _OutputTiles:
    """The output tiles of a span of columns, with the biases that all rows share."""

    span: _Columns
    biases: Sequence[Block | None]
    ones: Mapping[DType, Block]  # a row of ones for each type of the biases that are added as products

    def allocate(self, rows: int, width: int) -> list[Block]:
        """Allocate a tile for each result; for a reduce-scatter, with the partial results for every rank."""
        k, group = self.span.k, self.span.group
        shape = (group.ranks, width) if group.ranks > 1 else (width,)
        return [k.tile(operand.out, rows, *shape, buffers=2) for operand in group.operands]

    def copy_from_psum(self, number: int, dst: Tile, sums: Tile, column: Span) -> None:
        bias, k = self.biases[number], self.span.k
        if bias is None or bias.dtype in self.ones:
            self.add_product(number, sums, column)
            k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=sums, function=Function.COPY))
        else:
            right = bias.cut(dst.partitions, column)
            k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst, left=sums, right=right, op=Alu.ADD))

    def add_product(self, number: int, sums: Tile, column: Span) -> None:
        """Add the bias to the sums of a bank as the last product, ones times its row."""
        bias = self.biases[number]
        if bias is not None and bias.dtype in self.ones:
            ones, row = self.ones[bias.dtype].cut(1, (0, sums.partitions)), bias.cut(1, column)
            last = Matmul(engine=Engine.TENSOR, dst=sums, stationary=ones, moving=row, accumulate=Affine(1))
            self.span.k.emit(last)

    @property
    def in_psum(self) -> bool:
        """True if the epilogue reads the sums of a single result in PSUM."""
        group = self.span.group
        (operand, *others), (bias, *_) = group.operands, self.biases
        is_sum = operand.out is DType.FLOAT32 and (bias is None or bias.dtype in self.ones)
        return not others and not group.sharing and is_sum and group.epilogue.chain.reads_sums(operand.result)

    def finish(self, blocks: Sequence[Block], row: Span, column: Span) -> None:
        """Run the epilogue. `row` covers all ranks' rows; after the reduce-scatter each rank continues with its
        share."""
        group, (start, count) = self.span.group, row
        shares = [block.whole for block in blocks]
        if group.ranks > 1:
            start, count = divided(start, group.ranks), count // group.ranks
            shares = [self._reduce_scatter(tile, column[1]) for tile in shares]
        tiles = {operand.result: tile for operand, tile in zip(group.operands, shares, strict=True)}
        columns = (self.span.columns[0] + column[0], column[1])
        group.epilogue.finish(tiles, (start + self.span.kernel.first, count), columns)

    def _reduce_scatter(self, partial: Tile, width: int) -> Tile:
        k = self.span.k
        share = k.tile(partial.dtype, partial.partitions, width, buffers=2).whole
        k.emit(CollectiveReduceScatter(engine=Engine.COLLECTIVE, dst=share, src=partial))
        return share


@dataclass(frozen=True)
class _LoadedColumns:
    """A span of columns of an output group with its weights in SBUF."""

    span: _Columns
    outputs: _OutputTiles
    weights: Sequence[Block]

    def write(self, transposed: Block, rows: Span) -> None:
        k, ranks, sharing = self.span.k, self.span.group.ranks, self.span.group.sharing
        k.note = self.span.group.note
        in_psum = self.outputs.in_psum
        for row, count in k.spans(rows[1], PARTITIONS * ranks):
            for strip in k.spans(self.span.columns[1], _BANKS * BANK if in_psum else strip_width(ranks)):
                with k.scope():
                    if in_psum:
                        sums = self._sums(transposed, (row, count), strip)
                        self.outputs.finish([sums], (row + rows[0], count), strip)
                        continue
                    out_tiles = self.outputs.allocate(count // ranks, strip[1])
                    for number, block in enumerate(out_tiles):
                        with k.loop(ranks) as rank:
                            rank_rows = (row + rank * (sharing.rows if sharing else 0), count // ranks)
                            self._multiply(number, block, rank, transposed, rank_rows, strip)
                    self.outputs.finish(out_tiles, (row + rows[0], count), strip)

    def _sums(self, transposed: Block, row: Span, strip: Span) -> Block:
        """The sums of a strip of columns, with the bias, in as many banks of PSUM as they take."""
        k, depth = self.span.k, self.span.kernel.rows.shape[1]
        block = k.psum(row[1], strip[1])
        for bank, width in k.spans(strip[1], BANK):
            column = (strip[0] + bank, width)
            sums = block.cut(row[1], (bank, width))
            emit_matmuls(k, sums, transposed, self.weights[0], Affine(), row, column, depth)
            self.outputs.add_product(0, sums, column)
        return block

    def _multiply(self, number: int, out_tile: Block, rank: Affine, transposed: Block, row: Span, strip: Span) -> None:
        k, depth = self.span.k, self.span.kernel.rows.shape[1]
        for bank, bank_width in k.spans(strip[1], BANK):
            with k.scope():
                column = (strip[0] + bank, bank_width)
                sums, sharing = k.psum(row[1], bank_width).whole, self.span.group.sharing
                emit_matmuls(k, sums, transposed, self.weights[number], Affine(), row, column, depth, sharing)
                dst = out_tile.cut(row[1], *([(rank, 1)] if sharing else []), (bank, bank_width))
                self.outputs.copy_from_psum(number, dst, sums, column)


def load_weight(
    k: Kernel, operand: WeightOperand, rows: tuple[Affine, int], columns: Span, inside: Span, buffers: int
) -> Block:
    """Load a slab, given as first chunk and number of rows, of a block of columns; `inside` as in `TiledView.loads`."""
    if isinstance(operand.weight, TiledView):
        return load_tiled(k, operand.weight, rows, columns, inside, buffers)
    chunk, depth = rows
    block = k.tile(operand.dtype, PARTITIONS, chunks_of(depth), columns[1], buffers=buffers)
    load_matrix(k, block, operand.weight.cut((chunk * PARTITIONS, depth), columns))
    return block


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
    """Emit the matmuls of a span of rows and a span of columns over a slab of the contraction axis from chunk `first`.

    Chunk 0 starts the accumulation in PSUM, later chunks add to it. With row sharding, `row` selects the rows of one
    rank, which lie in several runs."""
    rows = (row[0], sharing.rows) if sharing else row
    for chunk, chunk_depth in each_chunk(k, depth):
        stationary = transposed.cut(chunk_depth, (first + chunk, 1), rows)
        if sharing:
            runs = Axis(row[1] // sharing.rows, transposed.row_stride(sharing.ranks * sharing.rows))
            stationary = replace(stationary, axes=(runs, stationary.axes[-1]))
        moving = weight.cut(chunk_depth, (chunk, 1), column)
        k.emit(Matmul(engine=Engine.TENSOR, dst=sums, stationary=stationary, moving=moving, accumulate=first + chunk))
