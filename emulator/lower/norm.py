"""Norms and softmax, and the row kernel that emits them: it reduces rows to scalars and combines the rows with these.

A row is on one partition, and 128 rows are processed in parallel. A row that fits SBUF is loaded once, and its result
is computed strip by strip. Wider rows are streamed in pieces, once per reduction and once for the result.
Arithmetic up to the final rounding is float32. Rows that only matmuls read are stored, or recomputed if cheaper.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf, prod
from typing import Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine
from nxpipe.emulator.isa.cost import moved
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.vector import Memset, Reciprocal, ScalarTensorTensor, TensorReduce, TensorScalar, TensorTensor
from nxpipe.emulator.lower.epilogue import ElementwiseChain, Epilogue, epilogue_bytes
from nxpipe.emulator.lower.grouping import Consumers
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.kernel_cost import KernelCost, load_cost, transpose_cost
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.chain import MatmulPlan
from nxpipe.emulator.lower.matmul.linear import (
    GatheredMatmuls,
    GatheredRows,
    as_matrix,
    matmul_plan,
    output_groups,
    write_gathered_matmuls,
)
from nxpipe.emulator.lower.matmul.tiling import HbmRows, LoadRows, allocate_rows
from nxpipe.emulator.lower.matmul.tiling import LoadableRows as Sources
from nxpipe.emulator.lower.tiles import WIDEST
from nxpipe.emulator.lower.transpose import chunks_of, transpose_tile
from nxpipe.emulator.lower.transposed_norm import NormForm, TransposedNormRows
from nxpipe.emulator.lower.view import View, whole
from nxpipe.emulator.ops import Cast, LayerNorm, RmsNorm, Softmax

_UNUSED_TYPE: Final = DType.BFLOAT16  # type of the elementwise result of an instruction of which only the sum is used
_STRIPS: Final = (WIDEST, WIDEST // 2, WIDEST // 4)

# Consumes the tiles computed from a strip. Arguments: tiles by value, rows (relative to the first of this call),
# columns.
ConsumeStrip = Callable[[Mapping[Value, Tile], Span, Span], None]


@dataclass(frozen=True)
class RowPiece:
    """A span of columns of up to 128 rows in SBUF."""

    left: Span
    source: Tile
    shared: Sequence[Tile]  # rows that are broadcast to all rows: scale and shift

    def cut(self, left: Span) -> "RowPiece":
        return RowPiece(left, tile_columns(self.source, left), [tile_columns(tile, left) for tile in self.shared])


def tile_columns(tile: Tile, left: Span) -> Tile:
    """A span of columns of a tile of contiguous rows."""
    start, count = left
    return replace(tile, offset=tile.offset + affine(start) * tile.dtype.itemsize, axes=(Axis(count, 1),))


@dataclass(frozen=True)
class RowKernel:
    """A kernel over all rows of an operator, with its tile sizes. A `RowBlock` processes 128 of the rows."""

    k: Kernel
    x: View  # [rows, width]
    shared: Sequence[View]
    epilogue: Epilogue
    out: DType
    fold: Callable[["RowBlock"], None]
    kept_bytes: int  # bytes per element that the reductions keep in SBUF
    piece: int  # columns in SBUF at a time
    strip: int  # columns of the result in one tile
    buffers: int = 2

    @staticmethod
    def of(
        k: Kernel,
        x: View,
        shared: Sequence[View],
        epilogue: Epilogue,
        out: DType,
        fold: Callable[["RowBlock"], None],
        kept_bytes: int = 0,
    ) -> "RowKernel":
        """The kernel with the largest tiles that fit: double-buffered whole rows, else single-buffered, with the widest
        strips; else pieces of rows."""
        width, free = x.shape[1], k.free_bytes(Memory.SBUF) - 4096
        whole = RowKernel(k, x, shared, epilogue, out, fold, kept_bytes, width, width)
        for buffers, strip in product((2, 1), (width, *_STRIPS)):
            candidate = replace(whole, strip=min(strip, width), buffers=buffers)
            if candidate.resident_bytes + candidate.transient_bytes <= free:
                return candidate
        single = replace(whole, buffers=1)
        piece = free // (single._column_bytes + single._strip_bytes + 2 * single._shared_bytes)
        piece = max(piece // 64 * 64, 64)
        return replace(single, piece=piece, strip=piece)

    def narrower(self) -> Iterator["RowKernel"]:
        """Variants with whole rows that leave SBUF for fused matmuls. Their strips are multiples of 128 columns."""
        if self.is_whole:
            for buffers, strip in ((self.buffers, self.strip), (2, _STRIPS[1]), (1, _STRIPS[-1])):
                if buffers <= self.buffers and strip <= self.strip and (strip % PARTITIONS == 0 or strip == self.piece):
                    yield replace(self, buffers=buffers, strip=strip)

    @property
    def is_whole(self) -> bool:
        return self.piece == self.x.shape[1]

    @property
    def resident_bytes(self) -> int:
        """Bytes per partition of the rows that are broadcast to all rows."""
        return self._shared_bytes * self.x.shape[1]

    @property
    def transient_bytes(self) -> int:
        """Bytes per partition of the rows being processed."""
        return self._column_bytes * self.x.shape[1] + self._strip_bytes * self.strip

    @property
    def _shared_bytes(self) -> int:
        return sum(view.dtype.itemsize for view in self.shared)

    @property
    def _column_bytes(self) -> int:
        return self.buffers * (self.x.dtype.itemsize + self.kept_bytes) + _UNUSED_TYPE.itemsize

    @property
    def _strip_bytes(self) -> int:
        return self.buffers * (DType.FLOAT32.itemsize + self.out.itemsize) + epilogue_bytes(self.epilogue)

    def write(self, consume: ConsumeStrip | None = None) -> None:
        with self.k.scope():
            self.compute_rows((0, self.x.shape[0]), self.begin(), consume)

    def begin(self) -> list[Block]:
        """Load the rows that are broadcast to all rows."""
        return [self.broadcast_row(view, (0, self.piece), 1) for view in self.shared] if self.is_whole else []

    def compute_rows(self, rows: Span, shared_blocks: Sequence[Block], consume: ConsumeStrip | None = None) -> None:
        """Compute a span of rows; `consume` consumes each strip of the result."""
        if not self.x.elements:
            return
        for top, count in self.k.spans(rows[1], PARTITIONS):
            with self.k.scope():
                loaded, span = None, (top + rows[0], count)
                if self.is_whole:
                    shared = [block.cut(count) for block in shared_blocks]
                    loaded = RowPiece((0, self.piece), self.load(span, (0, self.piece)), shared)
                self.fold(RowBlock(self, span, top, loaded, consume))

    def load(self, rows: Span, left: Span) -> Tile:
        tile = self.k.tile(self.x.dtype, rows[1], left[1], buffers=self.buffers).whole
        self.k.copy(tile, self.x.cut(rows, left).far())
        return tile

    def broadcast_row(self, view: View, left: Span, buffers: int) -> Block:
        """Load a row to every partition (partition broadcast)."""
        lanes = min(self.x.shape[0], PARTITIONS)
        block = self.k.tile(view.dtype, lanes, left[1], buffers=buffers)
        self.k.copy(block.whole, view.cut(left).broadcast((lanes, left[1])).far())
        return block


@dataclass(frozen=True)
class RowBlock:
    """Up to 128 rows being processed."""

    rows: RowKernel
    span: Span
    first: Affine  # row number relative to the first row of the call
    loaded: RowPiece | None  # the whole rows, if they fit SBUF
    consume: ConsumeStrip | None

    @property
    def k(self) -> Kernel:
        return self.rows.k

    @property
    def width(self) -> int:
        return self.rows.x.shape[1]

    def column(self) -> Tile:
        """Allocate a tile with one number per row."""
        return self.k.tile(DType.FLOAT32, self.span[1], 1, buffers=2).whole

    def tile(self, piece: RowPiece, dtype: DType = DType.FLOAT32) -> Tile:
        return self.k.tile(dtype, self.span[1], piece.left[1], buffers=self.rows.buffers).whole

    def fold(self, op: Alu, identity: float, function: Callable[[RowPiece, Tile], None]) -> Tile:
        """Reduce each row to a number; `function` reduces one piece."""
        folded = self.column()
        if self.loaded is not None:
            function(self.loaded, folded)
            return folded
        self.k.emit(Memset(engine=Engine.VECTOR, dst=folded, value=identity))
        for piece in self._pieces():
            piece_value = self.column()
            function(piece, piece_value)
            self.tensor(folded, folded, op, piece_value)
        return folded

    def finish(self, function: Callable[[RowPiece, Tile], None]) -> None:
        """Compute the result strip by strip with `function`, and apply the epilogue."""
        for piece in self._pieces() if self.loaded is None else self._strips(self.loaded):
            result = self.tile(piece, self.rows.out)
            function(piece, result)
            tiles = self.rows.epilogue.finish({self.rows.epilogue.result: result}, self.span, piece.left)
            if self.consume is not None:
                self.consume(tiles, (self.first, self.span[1]), piece.left)

    def _strips(self, whole: RowPiece) -> Iterator[RowPiece]:
        for left in self.k.spans(self.width, self.rows.strip):
            with self.k.scope():
                yield whole.cut(left)

    def _pieces(self) -> Iterator[RowPiece]:
        for left in self.k.spans(self.width, self.rows.piece):
            with self.k.scope():
                shared = [self.rows.broadcast_row(view, left, 2) for view in self.rows.shared]
                yield RowPiece(left, self.rows.load(self.span, left), [block.cut(self.span[1]) for block in shared])

    # Instructions

    def scalar(
        self, dst: Tile, src: Tile, op: Alu, operand: float | Tile, then: tuple[Alu, float | Tile] | None = None
    ) -> Tile:
        op1, operand1 = then or (None, 0.0)
        self.k.emit(
            TensorScalar(engine=Engine.VECTOR, dst=dst, src=src, op0=op, operand0=operand, op1=op1, operand1=operand1)
        )
        return dst

    def tensor(self, dst: Tile, left: Tile, op: Alu, right: Tile) -> Tile:
        self.k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst, left=left, right=right, op=op))
        return dst

    def mixed(self, dst: Tile, src: Tile, first: tuple[Alu, Tile], second: tuple[Alu, Tile]) -> Tile:
        """`(src op column) op tensor` in one pass."""
        (op0, operand0), (op1, right) = first, second
        self.k.emit(
            ScalarTensorTensor(engine=Engine.VECTOR, dst=dst, src=src, op0=op0, operand0=operand0, op1=op1, right=right)
        )
        return dst

    def function(
        self,
        dst: Tile,
        src: Tile,
        function: Function,
        total: Tile | None = None,
        bias: float | Tile = 0.0,
        scale: float | Tile = 1.0,
    ) -> Tile:
        self.k.emit(
            Activation(engine=Engine.SCALAR, dst=dst, src=src, function=function, total=total, bias=bias, scale=scale)
        )
        return dst

    def sum_of(self, function: Function, bias: float | Tile = 0.0) -> Tile:
        """Sum a function of the elements over each row (total of an activation)."""

        def add(piece: RowPiece, total: Tile) -> None:
            with self.k.scope():
                unread = self.k.tile(_UNUSED_TYPE, self.span[1], piece.left[1]).whole
                self.function(unread, piece.source, function, total, bias)

        return self.fold(Alu.ADD, 0.0, add)

    def reciprocal(self, column: Tile) -> Tile:
        inverse = self.column()
        self.k.emit(Reciprocal(engine=Engine.VECTOR, dst=inverse, src=column))
        return inverse

    def inverse_root(self, squares: Tile, epsilon: float) -> Tile:
        """1 / sqrt(mean + epsilon), from the sums of squares over the width."""
        mean = self.scalar(self.column(), squares, Alu.MULTIPLY, 1 / self.width, (Alu.ADD, epsilon))
        return self.reciprocal(self.function(self.column(), mean, Function.SQRT))


_PASSES: Final = 2  # passes of the vector engine over a row, without the epilogue


def write_row_kernel(
    low: Lowering,
    node: Node,
    axes: int,
    fold: Callable[[RowBlock], None],
    kept_bytes: int = 0,
    form: NormForm | None = None,
) -> None:
    """Emit a row kernel over the last `axes` axes of the first operand. The other operands are rows (scale, shift) that
    are broadcast to all rows. A norm has a `form`."""
    x = low.stored_view(node.operands[0])
    width = prod(x.shape[x.rank - axes :])
    flat = as_matrix(low, x, x.elements // width if width else 0, width)
    shared = [low.packed(low.view(operand)).packed_as((width,)) for operand in node.operands[1:]]
    fusion = low.groups.epilogue(node.result, width)
    consumers = low.groups.consumers(fusion, node.result, width)
    tile = fusion.known[consumers.value] if consumers.matmuls else None
    epilogue, out = _without_cast(low.fuse_epilogue(fusion, node.result, consumers.nodes), tile)
    epilogue = replace(epilogue, chain=replace(epilogue.chain, casting=Engine.SCALAR))
    rows = RowKernel.of(low.k, flat, shared, epilogue, out, fold, kept_bytes)
    if tile is not None:
        _write_with_matmuls(low, rows, tile, consumers, form)
    else:
        rows.write()


def _without_cast(epilogue: Epilogue, tile: Value | None) -> tuple[Epilogue, DType]:
    """The epilogue and the type of the result. If only a cast to another float type reads the result, it is written in
    that type at once, which rounds as the cast does."""
    result, chain = epilogue.result, epilogue.chain
    readers = [link for link in chain.links if result in link.operands]
    needed = result == tile or any(value == result for value, _ in chain.homes)
    dtype = result.type.dtype.on_device
    if len(readers) != 1 or needed or not isinstance(readers[0].node.op, Cast) or dtype is not DType.FLOAT32:
        return epilogue, dtype
    cast = readers[0].node.result
    if not cast.type.dtype.is_float:
        return epilogue, dtype
    links = tuple(link for link in chain.links if link is not readers[0])
    return replace(epilogue, result=cast, chain=replace(chain, links=links)), cast.type.dtype.on_device


def _write_with_matmuls(
    low: Lowering, rows: RowKernel, tile: Value, consumers: Consumers, form: NormForm | None
) -> None:
    """Emit a row kernel with the matmuls that read its rows: fused, or after the rows are stored to HBM if that is
    cheaper or SBUF lacks space for both."""
    k, dtype = low.k, consumers.value.type.dtype.on_device
    location, plan = low.places.views.get(tile), _consumer_plan(low, rows, consumers)
    flat = whole(0, tile.type.dtype.on_device, rows.x.shape)
    store = KernelCost(bytes=0 if location else moved(flat.far()))
    storing = ComputedRows(rows, tile, dtype).compute_cost(k.core, rows.x.shape[0]) + store
    own = HbmRows(k, flat, dtype)
    if consumers.sharding:
        stored_ns = GatheredMatmuls(k, own, plan.groups, consumers.sharding).ns
    else:
        stored_ns = plan.kernel(own).ns
    stored_ns += storing.ns(k.core)
    computed = [ComputedRows(variant, tile, dtype) for variant in rows.narrower()]
    sources = [source for rows_source in computed for source in _row_sources(low, rows_source, consumers)]
    if form is not None and not consumers.sharding:
        result, chain = rows.epilogue.result, rows.epilogue.chain
        by_row = low.is_by_row(rows.x)
        transposed = TransposedNormRows(k, form, rows.x, rows.shared, result, rows.out, chain, tile, dtype, by_row)
        sources += [transposed] if transposed.is_possible else []
    fitting = [kernel for source in sources if (kernel := plan.kernel(source)).ns < inf]
    fused = min(fitting, key=lambda kernel: kernel.ns, default=None)
    if fused is not None and fused.ns <= stored_ns and tile.type.dtype.itemsize > 1:  # bytes cannot be transposed
        fused.write()
        return
    flat = as_matrix(low, location or low.scratch(tile.type.dtype, rows.x.shape), *rows.x.shape)
    rows.write(None if location else _store_rows(low, tile, flat))
    if consumers.sharding:
        write_gathered_matmuls(low, flat, dtype, plan.groups, consumers.sharding)
    else:
        plan.kernel(HbmRows(k, flat, dtype)).write()


def _row_sources(low: Lowering, own: Sources, consumers: Consumers) -> list[Sources]:
    """The row sources of the matmuls: the rank's own rows, or all ranks' rows if SBUF has space to gather them."""
    if not consumers.sharding:
        return [own]
    gathered = GatheredRows(low.k, own, consumers.sharding)
    return [gathered] if gathered.fits else []


def _consumer_plan(low: Lowering, rows: RowKernel, consumers: Consumers) -> MatmulPlan:
    """The plan of the matmuls. Their epilogues must not read results that the row kernel stores, because the fused
    kernel may read rows before they are stored; those results are hidden while groups form."""
    views = low.places.views
    stored = {value: views.pop(value) for value, _ in rows.epilogue.chain.homes}
    if consumers.sharding:
        plan = MatmulPlan(low.k, output_groups(low, consumers.matmuls))
    else:
        plan = matmul_plan(low, consumers.matmuls, stored)
    views |= stored
    return plan


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
                transpose_tile(self.source.k, transposed, tiles[self.tile], left[0], row, Engine.SCALAR)

            self.source.compute_rows(rows, shared, consume)

        return fill


@lowers(LayerNorm)
def _layer_norm(low: Lowering, node: Node, op: LayerNorm) -> None:
    def work(rows: RowBlock) -> None:
        mean = rows.scalar(rows.column(), rows.sum_of(Function.COPY), Alu.MULTIPLY, 1 / rows.width)
        negative = rows.scalar(rows.column(), mean, Alu.MULTIPLY, -1.0)
        inverse = rows.inverse_root(rows.sum_of(Function.SQUARE, negative), op.epsilon)

        def scale(piece: RowPiece, dst: Tile) -> None:
            if len(piece.shared) == 2:  # ((x - mean) * scale) * inverse + shift: two passes instead of three
                between = rows.tile(piece)
                rows.mixed(between, piece.source, (Alu.SUBTRACT, mean), (Alu.MULTIPLY, piece.shared[0]))
                rows.mixed(dst, between, (Alu.MULTIPLY, inverse), (Alu.ADD, piece.shared[1]))
                return
            between = rows.tile(piece) if piece.shared else dst
            rows.scalar(between, piece.source, Alu.SUBTRACT, mean, (Alu.MULTIPLY, inverse))
            if piece.shared:
                rows.tensor(dst, between, Alu.MULTIPLY, piece.shared[0])

        rows.finish(scale)

    write_row_kernel(low, node, op.axes, work, form=NormForm(True, op.epsilon))


@lowers(RmsNorm)
def _rms_norm(low: Lowering, node: Node, op: RmsNorm) -> None:
    def work(rows: RowBlock) -> None:
        inverse = rows.inverse_root(rows.sum_of(Function.SQUARE), op.epsilon)

        def scale(piece: RowPiece, dst: Tile) -> None:
            if piece.shared:
                rows.mixed(dst, piece.source, (Alu.MULTIPLY, inverse), (Alu.MULTIPLY, piece.shared[0]))
            else:
                rows.function(dst, piece.source, Function.COPY, scale=inverse)

        rows.finish(scale)

    write_row_kernel(low, node, op.axes, work, form=NormForm(False, op.epsilon))


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
