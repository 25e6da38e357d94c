"""Row kernel: operators that reduce whole rows to scalars and combine the rows with them (norms, softmax).

A row is on one partition, and 128 rows are processed in parallel. A row that fits SBUF is loaded once, and its result
is computed strip by strip. Wider rows are streamed in pieces, once per reduction and once for the result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.vector import Memset, Reciprocal, TensorScalar, TensorTensor
from nxpipe.emulator.lower.epilogue import Epilogue, epilogue_bytes
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.tiles import WIDEST
from nxpipe.emulator.lower.view import View

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

    def function(
        self, dst: Tile, src: Tile, function: Function, total: Tile | None = None, bias: float | Tile = 0.0
    ) -> Tile:
        self.k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=src, function=function, total=total, bias=bias))
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
