"""Layer norm, RMS norm and softmax. Their rows go to HBM, or directly to the matmuls that read them.

All arithmetic between the first load and the final rounding is float32. Rows that only matmuls read need not be stored,
but a weight-stationary matmul recomputes them for each block of columns. The cheaper variant is selected by cost.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, prod
from typing import Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.cost import moved
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.scalar import Function
from nxpipe.emulator.isa.vector import ScalarTensorTensor, TensorReduce
from nxpipe.emulator.lower.epilogue import ElementwiseChain, Epilogue
from nxpipe.emulator.lower.grouping import Consumers
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Span
from nxpipe.emulator.lower.kernel_cost import KernelCost, load_cost, transpose_cost
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.kernel import MatmulKernel
from nxpipe.emulator.lower.matmul.linear import GatheredRows, as_matrix, output_groups, write_gathered_matmuls
from nxpipe.emulator.lower.matmul.tiling import HbmRows, LoadRows, OutputGroup, allocate_rows
from nxpipe.emulator.lower.matmul.tiling import LoadableRows as Sources
from nxpipe.emulator.lower.row_kernel import RowBlock, RowKernel, RowPiece, tile_columns
from nxpipe.emulator.lower.transpose import chunks_of, transpose_tile
from nxpipe.emulator.lower.view import View, whole
from nxpipe.emulator.ops import LayerNorm, RmsNorm, Softmax

_PASSES: Final = 2  # passes of the vector engine over a row, without the epilogue


def write_row_kernel(
    low: Lowering, node: Node, axes: int, fold: Callable[[RowBlock], None], kept_bytes: int = 0
) -> None:
    """Emit a row kernel over the last `axes` axes of the first operand. The other operands are rows (scale, shift) that
    are broadcast to all rows."""
    x = low.stored_view(node.operands[0])
    width = prod(x.shape[x.rank - axes :])
    flat = as_matrix(low, x, x.elements // width if width else 0, width)
    shared = [low.packed(low.view(operand)).packed_as((width,)) for operand in node.operands[1:]]
    fusion = low.groups.epilogue(node.result, width)
    consumers = low.groups.consumers(fusion, node.result, width)
    epilogue = low.fuse_epilogue(fusion, node.result, consumers.nodes)
    rows = RowKernel.of(low.k, flat, shared, epilogue, node.result.type.dtype.on_device, fold, kept_bytes)
    if consumers.matmuls:
        _write_with_matmuls(low, rows, fusion.known[consumers.value], consumers)
    else:
        rows.write()


def _write_with_matmuls(low: Lowering, rows: RowKernel, tile: Value, consumers: Consumers) -> None:
    """Emit a row kernel with the matmuls that read its rows: fused, or after the rows are stored to HBM if that is
    cheaper or SBUF lacks space for both."""
    k, dtype = low.k, consumers.value.type.dtype.on_device
    location, groups = low.places.views.get(tile), _consumer_groups(low, rows, consumers.matmuls)
    flat = whole(0, tile.type.dtype.on_device, rows.x.shape)
    store = KernelCost(bytes=0 if location else moved(flat.far()))
    storing = ComputedRows(rows, tile, dtype).compute_cost(k.core, rows.x.shape[0]) + store
    stored = [MatmulKernel(k, source, groups).ns for source in _row_sources(low, HbmRows(k, flat, dtype), consumers)]
    stored_ns = min(stored, default=inf) + storing.ns(k.core)
    computed = [ComputedRows(variant, tile, dtype) for variant in rows.narrower()]
    sources = [source for rows_source in computed for source in _row_sources(low, rows_source, consumers)]
    fused = min((MatmulKernel(k, source, groups) for source in sources), key=lambda kernel: kernel.ns, default=None)
    if fused is not None and fused.ns <= stored_ns and tile.type.dtype.itemsize > 1:  # bytes cannot be transposed
        fused.write()
        return
    flat = as_matrix(low, location or low.scratch(tile.type.dtype, rows.x.shape), *rows.x.shape)
    rows.write(None if location else _store_rows(low, tile, flat))
    if consumers.sharding:
        write_gathered_matmuls(low, flat, dtype, groups, consumers.sharding)
    else:
        MatmulKernel(k, HbmRows(k, flat, dtype), groups).write()


def _row_sources(low: Lowering, own: Sources, consumers: Consumers) -> list[Sources]:
    """The row sources of the matmuls: the rank's own rows, or all ranks' rows if SBUF has space to gather them."""
    if not consumers.sharding:
        return [own]
    gathered = GatheredRows(low.k, own, consumers.sharding)
    return [gathered] if gathered.fits else []


def _consumer_groups(low: Lowering, rows: RowKernel, readers: Sequence[Node]) -> tuple[OutputGroup, ...]:
    """Output groups of the matmuls. Their epilogues must not read results that the row kernel stores, because the fused
    kernel may read rows before they are stored; those results are hidden while groups form."""
    views = low.places.views
    stored = {value: views.pop(value) for value, _ in rows.epilogue.chain.homes}
    groups = output_groups(low, readers)
    views |= stored
    return groups


def _store_rows(low: Lowering, tile: Value, view: View) -> Callable[[Mapping[Value, Tile], Span, Span], None]:
    return lambda tiles, row, left: low.k.copy(view.cut(row, left).far(), tiles[tile])


@dataclass(frozen=True)
class ComputedRows:
    """Rows of a matmul that a row kernel computes in SBUF."""

    source: RowKernel
    tile: Value  # the value, among those that the row kernel computes, that the matmul reads
    dtype: DType

    @property
    def shape(self) -> tuple[int, int]:
        rows, summed = self.source.x.shape
        return rows, summed

    @property
    def run(self) -> int:
        return 1

    @property
    def resident_bytes(self) -> int:
        return self.source.resident_bytes

    @property
    def transient_bytes(self) -> int:
        return self.source.transient_bytes

    def preparation(self, core: CoreSpec) -> KernelCost:
        return KernelCost()

    def block(self, height: int, buffers: int) -> Block:
        return allocate_rows(self.source.k, self, height, buffers)

    def work(self, core: CoreSpec, height: int) -> KernelCost:
        return self.compute_cost(core, height) + transpose_cost(
            core, self.tile.type.dtype, chunks_of(self.shape[1]), height
        )

    def compute_cost(self, core: CoreSpec, height: int) -> KernelCost:
        """Cost of computing `height` rows, without their transpose."""
        x, chain = self.source.x, self.source.epilogue.chain
        load = load_cost(core, x.transposed((1, 0)), chunks_of(x.shape[1]), height)
        elements = x.shape[1] * ceil(height / PARTITIONS) * (_PASSES + len(chain.links))
        stored_bytes = sum(view.dtype.itemsize for view in chain.views) * height * x.shape[1]
        return load + KernelCost(vector=elements / core.vector_ghz, bytes=stored_bytes)

    def begin(self) -> LoadRows:
        shared = self.source.begin()

        def fill(transposed: Block, rows: Span) -> None:
            def consume(tiles: Mapping[Value, Tile], row: Span, left: Span) -> None:
                transpose_tile(self.source.k, transposed, tiles[self.tile], left[0], row)

            self.source.compute_rows(rows, shared, consume)

        return fill


@lowers(LayerNorm)
def _layer_norm(low: Lowering, node: Node, op: LayerNorm) -> None:
    def work(rows: RowBlock) -> None:
        mean = rows.scalar(rows.column(), rows.sum_of(Function.COPY), Alu.MULTIPLY, 1 / rows.width)
        negative = rows.scalar(rows.column(), mean, Alu.MULTIPLY, -1.0)
        inverse = rows.inverse_root(rows.sum_of(Function.SQUARE, negative), op.epsilon)

        def scale(piece: RowPiece, dst: Tile) -> None:
            between = rows.tile(piece) if piece.shared else dst
            rows.scalar(between, piece.source, Alu.SUBTRACT, mean, (Alu.MULTIPLY, inverse))
            _combine(rows, dst, between, piece.shared)

        rows.finish(scale)

    write_row_kernel(low, node, op.axes, work)


@lowers(RmsNorm)
def _rms_norm(low: Lowering, node: Node, op: RmsNorm) -> None:
    def work(rows: RowBlock) -> None:
        inverse = rows.inverse_root(rows.sum_of(Function.SQUARE), op.epsilon)

        def scale(piece: RowPiece, dst: Tile) -> None:
            if not piece.shared:
                rows.scalar(dst, piece.source, Alu.MULTIPLY, inverse)
                return
            rows.k.emit(
                ScalarTensorTensor(
                    engine=Engine.VECTOR,
                    dst=dst,
                    src=piece.source,
                    op0=Alu.MULTIPLY,
                    operand0=inverse,
                    op1=Alu.MULTIPLY,
                    right=piece.shared[0],
                )
            )

        rows.finish(scale)

    write_row_kernel(low, node, op.axes, work)


def _combine(rows: RowBlock, dst: Tile, intermediate: Tile, shared: Sequence[Tile]) -> None:
    """Multiply by the first shared row, add the second. The last operation rounds to the type of `dst`."""
    for number, (op, row) in enumerate(zip((Alu.MULTIPLY, Alu.ADD), shared, strict=False), 1):
        rows.tensor(dst if number == len(shared) else intermediate, intermediate, op, row)


@lowers(Softmax)
def _softmax(low: Lowering, node: Node, op: Softmax) -> None:
    def work(rows: RowBlock) -> None:
        def find(piece: RowPiece, highest: Tile) -> None:
            rows.k.emit(TensorReduce(engine=Engine.VECTOR, dst=highest, src=piece.source, op=Alu.MAXIMUM))

        highest = rows.fold(Alu.MAXIMUM, -float("inf"), find)
        negative = rows.scalar(rows.column(), highest, Alu.MULTIPLY, -1.0)
        if op.log:
            logarithm = rows.function(rows.column(), rows.sum_of(Function.EXP, negative), Function.LOG)

            def subtract(piece: RowPiece, dst: Tile) -> None:
                rows.scalar(dst, piece.source, Alu.SUBTRACT, highest, (Alu.SUBTRACT, logarithm))

            rows.finish(subtract)
        else:
            _divide_by_sum(rows, negative)

    axis = node.result.type.rank - 1
    if op.axis == axis:
        write_row_kernel(low, node, 1, work, DType.FLOAT32.itemsize)
    elif node.result.type.elements:
        _softmax_on_axis(low, node, op.axis, work)
    else:
        low.home(node.result)


def _softmax_on_axis(low: Lowering, node: Node, axis: int, work: Callable[[RowBlock], None]) -> None:
    """Softmax along an axis other than the last: rows are loaded with strides, the result is written contiguously to
    scratch and copied to its strided location."""
    rank = node.result.type.rank
    order = (*(other for other in range(rank) if other != axis), axis)
    x, home = low.stored_view(node.operands[0]).transposed(order), low.home(node.result).transposed(order)
    width = x.shape[-1]
    contiguous = low.scratch(node.result.type.dtype, x.shape)
    target = contiguous.packed_as((contiguous.elements // width, width))
    epilogue = Epilogue(low.k, node.result, ElementwiseChain((), (), ((node.result, target),)))
    flat = as_matrix(low, x, x.elements // width, width)
    RowKernel.of(low.k, flat, (), epilogue, contiguous.dtype, work, DType.FLOAT32.itemsize).write()
    low.copy(home, contiguous)


def _divide_by_sum(rows: RowBlock, negative: Tile) -> None:
    """Divide by the sum of exponentials. Exponentials of whole rows stay in SBUF; those of pieces are recomputed."""
    whole_row_exponentials: list[Tile] = []

    def exponentials(piece: RowPiece, total: Tile | None) -> Tile:
        return rows.function(rows.tile(piece), piece.source, Function.EXP, total, negative)

    def add(piece: RowPiece, total: Tile) -> None:
        whole_row_exponentials.append(exponentials(piece, total))

    inverse = rows.reciprocal(rows.fold(Alu.ADD, 0.0, add))

    def scale(piece: RowPiece, dst: Tile) -> None:
        values = (
            exponentials(piece, None) if rows.loaded is None else tile_columns(whole_row_exponentials[0], piece.left)
        )
        rows.scalar(dst, values, Alu.MULTIPLY, inverse)

    rows.finish(scale)
