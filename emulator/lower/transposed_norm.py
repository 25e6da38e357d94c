"""Norms of few rows in transposed layout: the elements of a row are spread over all partitions.

A row kernel has one row on a partition, so that a few rows leave most lanes idle. Here the rows are transposed first,
128 elements at a time, which the matmuls that read the norm require anyway. All further instructions are on tiles
[128, chunks, rows]. A sum over a row is a sum over the chunks of each partition, followed by a matmul with ones, which
adds up the partitions and leaves the sum on each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.cost import ISSUE
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul, NcTranspose
from nxpipe.emulator.isa.vector import Memset, Reciprocal, TensorCopy, TensorReduce, TensorScalar, TensorTensor
from nxpipe.emulator.lower.epilogue import ElementwiseChain
from nxpipe.emulator.lower.grouping import HbmOperand
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.kernel_cost import KernelCost, load_cost
from nxpipe.emulator.lower.matmul.tiling import LoadRows, allocate_rows
from nxpipe.emulator.lower.transpose import transpose_block
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import AllReduce

_VECTOR_BLOCK: Final = 32  # rows and columns of one transpose on the vector engine
_MOST_CHUNKS: Final = PARTITIONS  # a scale or shift is transposed with one chunk on a partition


@dataclass(frozen=True)
class NormForm:
    """What a norm does with a row: subtract the mean first, or not; and the number added to the mean square."""

    centred: bool
    epsilon: float


@dataclass(frozen=True)
class TransposedNormRows:
    """Rows of a matmul: a norm of few rows with its elementwise chain, computed in transposed layout."""

    k: Kernel
    form: NormForm
    x: View  # [rows, width]
    shared: Sequence[View]  # scale and shift, [width]
    result: Value  # of the norm
    out: DType
    chain: ElementwiseChain
    tile: Value  # the value, among those of the chain, that the matmul reads
    dtype: DType  # of the matmul
    by_row: bool  # the rows are in SBUF, one on a partition; otherwise their chunks can be loaded as rows

    @property
    def is_possible(self) -> bool:
        """True if the rows fit the lanes, and all operands are numbers or rows that are broadcast to all rows."""
        rows, width = self.x.shape
        plain = not any(isinstance(link.node.op, AllReduce) for link in self.chain.links)
        broadcast = all(
            (not view.strides[0] or rows == 1) and view.strides[1] == 1 and view.dtype.itemsize > 1
            for view in self.chain.sources
        )
        wide = all(dtype.itemsize > 1 for dtype in (self.x.dtype, self.out, *(view.dtype for view in self.shared)))
        whole = 0 < rows <= PARTITIONS and width and not width % PARTITIONS and self._chunks <= _MOST_CHUNKS
        return bool(whole) and wide and plain and broadcast and not self.chain.homes

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.x.shape
        return rows, width

    @property
    def run(self) -> int:
        return 1

    @property
    def _chunks(self) -> int:
        return self.x.shape[1] // PARTITIONS

    @property
    def _vectors(self) -> list[View]:
        """Scale, shift, and the rows that the chain reads."""
        width = self.x.shape[1]
        rows = [replace(view, shape=(width,), strides=(1,)) for view in self.chain.sources]
        return [*self.shared, *rows]

    @property
    def resident_bytes(self) -> int:
        vectors = sum(2 * max(view.dtype.itemsize * self._chunks, ISSUE) for view in self._vectors)
        return vectors + PARTITIONS * DType.FLOAT32.itemsize + 256

    @property
    def transient_bytes(self) -> int:
        rows, width = self.x.shape
        elements = self._chunks * rows
        by_element = 2 * self.x.dtype.itemsize + (3 + len(self.shared)) * DType.FLOAT32.itemsize + self.chain.width
        return 2 * width * self.x.dtype.itemsize + elements * by_element + 16 * (4 * rows + 64)

    def pieces(self, x: View) -> View | None:
        """The chunks of rows as a matrix [rows * chunks, 128], if they can be transposed as its rows into one bank."""
        count = x.shape[0] * self._chunks
        whole = count <= PARTITIONS or not count % PARTITIONS
        fits = count * x.dtype.itemsize <= self.k.core.psum_bank
        return x.reshaped((count, PARTITIONS)) if whole and fits and not self.by_row else None

    def preparation(self, core: CoreSpec) -> KernelCost:
        return KernelCost()

    def block(self, height: int, buffers: int) -> Block:
        return allocate_rows(self.k, self, height, buffers)

    def work(self, core: CoreSpec, height: int) -> KernelCost:
        """Cost of `height` rows. An instruction with two operands in SBUF takes two cycles an element."""
        cycles = self._chunks * height
        passes = 3 + 2 * self.form.centred + 2 * len(self.shared) + 2 * len(self.chain.links)
        slow = core.fp32_cycle_factor
        by_chunk = self.pieces(self.x.cut((0, height))) is not None
        transposes = ceil(self._chunks * height / PARTITIONS) if by_chunk else self._chunks
        transpose = (slow if self.x.dtype is DType.FLOAT32 else 1) * max(height, ISSUE) * transposes
        sums = (1 + self.form.centred) * slow * max(height, ISSUE)
        load = load_cost(core, self.x.transposed((1, 0)), self._chunks, height)
        vector = passes * max(cycles, ISSUE) + 4 * max(8 * height, ISSUE)
        return load + KernelCost(tensor=(transpose + sums) / core.tensor_ghz, vector=vector / core.vector_ghz)

    def begin(self) -> LoadRows:
        ones = self.k.tile(DType.FLOAT32, PARTITIONS, PARTITIONS).whole
        self.k.emit(Memset(engine=Engine.GPSIMD, dst=ones, value=1.0))
        vectors = [self._load_vector(view) for view in self._vectors]

        def fill(transposed: Block, rows: Span) -> None:
            for top, count in self.k.spans(rows[1], PARTITIONS):
                with self.k.scope():
                    target = transposed.cut(PARTITIONS, (0, self._chunks), (top, count))
                    _Rows(self, ones, vectors, count).write(self.x.cut((top + rows[0], count)), target)

        return fill

    def _load_vector(self, view: View) -> Tile:
        """A row [width] as a tile [128, chunks]."""
        k, chunks = self.k, self._chunks
        block = k.tile(view.dtype, PARTITIONS, chunks, 1)
        with k.scope():
            loaded = k.tile(view.dtype, chunks, PARTITIONS)
            k.copy(loaded.whole, view.packed_as((chunks, PARTITIONS)).far())
            if k.core.nki_gen < 3:
                self._transpose_exactly(block, loaded)
            else:
                turned = k.tile(view.dtype, PARTITIONS, chunks, memory=Memory.PSUM)
                k.emit(NcTranspose(engine=Engine.TENSOR, dst=turned.whole, src=loaded.whole))
                k.emit(TensorCopy(engine=Engine.VECTOR, dst=block.whole, src=turned.whole))
        return block.whole

    def _transpose_exactly(self, block: Block, loaded: Block) -> None:
        """Transpose on the vector engine: the tensor engine of v2 makes NaN of infinities, such as those of a mask."""
        for chunk in range(0, self._chunks, _VECTOR_BLOCK):
            chunks = min(_VECTOR_BLOCK, self._chunks - chunk)
            for lane in range(0, PARTITIONS, _VECTOR_BLOCK):
                dst = block.cut((lane, _VECTOR_BLOCK), (chunk, chunks))
                src = loaded.cut((chunk, chunks), (lane, _VECTOR_BLOCK))
                self.k.emit(NcTranspose(engine=Engine.VECTOR, dst=dst, src=src))


@dataclass(frozen=True)
class _Rows:
    """Up to 128 rows being processed."""

    norm: TransposedNormRows
    ones: Tile
    vectors: Sequence[Tile]
    count: int

    @property
    def k(self) -> Kernel:
        return self.norm.k

    @property
    def _chunks(self) -> int:
        return self.norm.x.shape[1] // PARTITIONS

    def write(self, x: View, target: Tile) -> None:
        norm, width = self.norm, self.norm.x.shape[1]
        centred = self._transposed(x)
        if norm.form.centred:
            mean = self._column(self._totals(centred), Alu.MULTIPLY, 1 / width)
            centred = self._two(centred, Alu.SUBTRACT, self._by_row(mean), self._tile(DType.FLOAT32))
        squares = self._tile(DType.FLOAT32)
        self.k.emit(Activation(engine=Engine.SCALAR, dst=squares, src=centred, function=Function.SQUARE))
        mean = self._column(self._totals(squares), Alu.MULTIPLY, 1 / width, norm.form.epsilon)
        root = self.k.tile(DType.FLOAT32, PARTITIONS, self.count).whole
        self.k.emit(Activation(engine=Engine.SCALAR, dst=root, src=mean, function=Function.SQRT))
        inverse = self.k.tile(DType.FLOAT32, PARTITIONS, self.count).whole
        self.k.emit(Reciprocal(engine=Engine.VECTOR, dst=inverse, src=root))
        self._finish(self._scaled(centred, inverse, target), target)

    def _scaled(self, centred: Tile, inverse: Tile, target: Tile) -> Tile:
        """Multiply by 1 / sqrt(mean square) and the scale, add the shift. The last operation rounds."""
        norm, tile = self.norm, centred
        shared = [self._by_element(vector) for vector in self.vectors[: len(norm.shared)]]
        steps = [(Alu.MULTIPLY, self._by_row(inverse)), *zip((Alu.MULTIPLY, Alu.ADD), shared, strict=False)]
        for number, (op, operand) in enumerate(steps, start=1):
            if number < len(steps):
                dst = self._tile(DType.FLOAT32)
            else:
                dst = target if norm.tile == norm.result and norm.out is target.dtype else self._tile(norm.out)
            tile = self._two(tile, op, operand, dst)
        return tile

    def _finish(self, tile: Tile, target: Tile) -> None:
        """Apply the chain, and write its result for the matmul."""
        norm = self.norm
        vectors = self.vectors[len(norm.shared) :]
        resident = {HbmOperand(number): self._by_element(vector) for number, vector in enumerate(vectors)}
        computed = {norm.result: tile}
        direct = {norm.tile: target} if norm.tile.type.dtype.on_device is target.dtype else {}
        norm.chain.apply_to(self.k, (), computed, resident, direct)
        if computed[norm.tile] != target:
            self.k.emit(TensorCopy(engine=Engine.VECTOR, dst=target, src=computed[norm.tile]))

    def _transposed(self, x: View) -> Tile:
        """The rows as a tile [128, chunks, rows], in a PSUM bank if they fit: an operand in PSUM saves the vector
        engine a cycle an element."""
        k, chunks, dtype = self.k, self._chunks, x.dtype
        if (pieces := self.norm.pieces(x)) is not None:
            return self._transposed_pieces(pieces)
        fits = chunks * self.count * dtype.itemsize <= k.core.psum_bank
        memory = Memory.PSUM if fits else Memory.SBUF
        turned = k.tile(dtype, PARTITIONS, chunks, self.count, memory=memory)
        loaded = k.tile(dtype, self.count, chunks, PARTITIONS, buffers=2)
        k.copy(loaded.whole, x.far())
        if not fits:
            transpose_block(k, turned, loaded, Affine(), (0, self.count))
            return turned.whole
        with k.loop(chunks) as chunk:
            source = loaded.cut(self.count, (chunk, 1))
            k.emit(NcTranspose(engine=Engine.TENSOR, dst=turned.cut(PARTITIONS, (chunk, 1)), src=source))
        return turned.whole

    def _transposed_pieces(self, pieces: View) -> Tile:
        """The rows as a tile [128, chunks, rows], from their chunks as the rows of a transpose."""
        k, chunks, (count, _) = self.k, self._chunks, pieces.shape
        lanes = min(count, PARTITIONS)
        loaded = k.tile(pieces.dtype, lanes, count // lanes, PARTITIONS)
        blocks = pieces.reshaped((count // lanes, lanes, PARTITIONS))
        assert blocks is not None  # splitting an axis is always possible
        k.copy(loaded.whole, blocks.transposed((1, 0, 2)).far())
        turned = k.tile(pieces.dtype, PARTITIONS, count // lanes, lanes, memory=Memory.PSUM)
        with k.loop(count // lanes) as block:
            dst, src = turned.cut(PARTITIONS, (block, 1)), loaded.cut(lanes, (block, 1))
            k.emit(NcTranspose(engine=Engine.TENSOR, dst=dst, src=src))
        return replace(turned.whole, axes=(Axis(chunks, 1), Axis(self.count, chunks)))

    def _totals(self, tile: Tile) -> Tile:
        """The sum of each row's elements, on every partition, in PSUM."""
        k = self.k
        partial = k.tile(DType.FLOAT32, PARTITIONS, self.count).whole
        chunk_axis, row_axis = tile.axes
        by_row = replace(tile, axes=(row_axis, chunk_axis))
        k.emit(TensorReduce(engine=Engine.VECTOR, dst=partial, src=by_row, op=Alu.ADD))
        total = k.psum(PARTITIONS, self.count, buffers=1).whole
        k.emit(Matmul(engine=Engine.TENSOR, dst=total, stationary=self.ones, moving=partial))
        return total

    def _column(self, src: Tile, op: Alu, factor: float, summand: float | None = None) -> Tile:
        dst = self.k.tile(DType.FLOAT32, PARTITIONS, self.count).whole
        op1 = None if summand is None else Alu.ADD
        self.k.emit(
            TensorScalar(
                engine=Engine.VECTOR, dst=dst, src=src, op0=op, operand0=factor, op1=op1, operand1=summand or 0.0
            )
        )
        return dst

    def _two(self, left: Tile, op: Alu, right: Tile, dst: Tile) -> Tile:
        self.k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst, left=left, right=right, op=op))
        return dst

    def _tile(self, dtype: DType) -> Tile:
        return self.k.tile(dtype, PARTITIONS, self._chunks, self.count).whole

    def _by_row(self, column: Tile) -> Tile:
        """A number for each row, [128, rows], as an operand [128, chunks, rows]."""
        return replace(column, axes=(Axis(self._chunks, 0), Axis(self.count, 1)))

    def _by_element(self, vector: Tile) -> Tile:
        """A number for each element of a row, [128, chunks], as an operand [128, chunks, rows]."""
        return replace(vector, axes=(Axis(self._chunks, 1), Axis(self.count, 0)))
