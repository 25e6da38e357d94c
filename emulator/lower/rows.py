"""Operators that fold whole rows: a row lies along one partition, and 128 rows are worked on side by side.

Everything is float32 between the first reading and the last rounding. Rows that are wider than there is room pass by in
pieces, once for each number that is folded of them and once for the result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from emulator.graph import Node
from emulator.isa.instructions import (
    Activation,
    Alu,
    Engine,
    Function,
    Memset,
    Reciprocal,
    ScalarTensorTensor,
    TensorReduce,
    TensorScalar,
    TensorTensor,
)
from emulator.isa.operands import Memory, Tile
from emulator.lower.buffers import on_device
from emulator.lower.ending import Chain, Ending
from emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from emulator.lower.lowering import Lowering, lowers
from emulator.lower.products import as_rows, room_of
from emulator.lower.view import View
from emulator.ops import LayerNorm, RmsNorm, Softmax
from emulator.types import DType

_UNREAD = DType.BFLOAT16  # of results of which only the sum is wanted


@dataclass(frozen=True)
class Piece:
    """Some columns of up to 128 rows: where they begin, and what is there of them."""

    left: Span
    source: Tile
    shared: list[Tile]  # rows that all of them are combined with


@dataclass(frozen=True)
class Rows:
    """All rows, and how wide the pieces are that there is room for. `Folding` has 128 of them."""

    k: Kernel
    x: View  # [rows, width]
    shared: Sequence[View]
    ending: Ending
    out: DType
    piece: int
    turns: int

    @staticmethod
    def of(low: Lowering, x: View, shared: Sequence[View], ending: Ending, out: DType) -> "Rows":
        """In two turns if whole rows fit so, in one if they fit so; else in pieces."""
        width, left = x.shape[1], low.k.left(Memory.SBUF) - 4096
        for turns in (2, 1):
            each = turns * (x.dtype.itemsize + _UNREAD.itemsize + DType.FLOAT32.itemsize + out.itemsize)
            each += sum(view.dtype.itemsize for view in shared) + room_of(ending)
            if each * width <= left:
                return Rows(low.k, x, shared, ending, out, width, turns)
        each += sum(view.dtype.itemsize for view in shared)
        return Rows(low.k, x, shared, ending, out, max(left // each // 64 * 64, 64), 1)

    @property
    def is_whole(self) -> bool:
        return self.piece == self.x.shape[1]

    def write(self, work: Callable[["Folding"], None]) -> None:
        k = self.k
        if not self.x.elements:
            return
        with k.room():
            whole = [self.everywhere(view, (0, self.piece), 1) for view in self.shared] if self.is_whole else []
            for top, count in k.spans(self.x.shape[0], PARTITIONS):
                with k.room():
                    loaded = None
                    if self.is_whole:
                        loaded = Piece((0, self.piece), self.load((top, count), (0, self.piece)), _of(whole, count))
                    work(Folding(self, (top, count), loaded))

    def load(self, rows: Span, left: Span) -> Tile:
        tile = self.k.tile(self.x.dtype, rows[1], left[1], turns=self.turns).whole
        self.k.copy(tile, self.x.cut(rows, left).far())
        return tile

    def everywhere(self, view: View, left: Span, turns: int) -> Block:
        """A row on every partition."""
        lanes = min(self.x.shape[0], PARTITIONS)
        block = self.k.tile(view.dtype, lanes, left[1], turns=turns)
        self.k.copy(block.whole, view.cut(left).broadcast((lanes, left[1])).far())
        return block


def _of(blocks: Sequence[Block], count: int) -> list[Tile]:
    return [block.cut(count) for block in blocks]


@dataclass(frozen=True)
class Folding:
    """Up to 128 rows as they are folded."""

    rows: Rows
    span: Span
    loaded: Piece | None  # all of them, if there is room

    @property
    def k(self) -> Kernel:
        return self.rows.k

    @property
    def width(self) -> int:
        return self.rows.x.shape[1]

    def column(self) -> Tile:
        """One number for each row."""
        return self.k.tile(DType.FLOAT32, self.span[1], 1, turns=2).whole

    def tile(self, piece: Piece, dtype: DType = DType.FLOAT32) -> Tile:
        return self.k.tile(dtype, self.span[1], piece.left[1], turns=self.rows.turns).whole

    def fold(self, op: Alu, identity: float, function: Callable[[Piece, Tile], None]) -> Tile:
        """A number for each row, which the function finds of each piece."""
        folded = self.column()
        if self.loaded is not None:
            function(self.loaded, folded)
            return folded
        self.k.emit(Memset(engine=Engine.VECTOR, dst=folded, value=identity))
        for piece in self._pieces():
            more = self.column()
            function(piece, more)
            self.tensor(folded, folded, op, more)
        return folded

    def finish(self, function: Callable[[Piece, Tile], None]) -> None:
        """The function writes the result of each piece."""
        for piece in self._pieces() if self.loaded is None else [self.loaded]:
            made = self.tile(piece, self.rows.out)
            function(piece, made)
            self.rows.ending.store(made, self.span, piece.left)

    def _pieces(self) -> Iterator[Piece]:
        for left in self.k.spans(self.width, self.rows.piece):
            with self.k.room():
                shared = [self.rows.everywhere(view, left, 2) for view in self.rows.shared]
                yield Piece(left, self.rows.load(self.span, left), _of(shared, self.span[1]))

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
        """Over each row."""

        def add(piece: Piece, total: Tile) -> None:
            self.function(self.tile(piece, _UNREAD), piece.source, function, total, bias)

        return self.fold(Alu.ADD, 0.0, add)

    def reciprocal(self, column: Tile) -> Tile:
        inverse = self.column()
        self.k.emit(Reciprocal(engine=Engine.VECTOR, dst=inverse, src=column))
        return inverse

    def root_of_inverse(self, squares: Tile, epsilon: float) -> Tile:
        """1 / sqrt(mean + epsilon), of sums over the width."""
        mean = self.scalar(self.column(), squares, Alu.MULTIPLY, 1 / self.width, (Alu.ADD, epsilon))
        return self.reciprocal(self.function(self.column(), mean, Function.SQRT))


def _rows(low: Lowering, node: Node, axes: int) -> Rows:
    """Rows along the last `axes` axes of the first operand, with the others as rows for all of them."""
    x = low.view(node.operands[0])
    width = prod(x.shape[x.rank - axes :])
    flat = as_rows(low, x, x.elements // width if width else 0, width)
    shared = [low.packed(low.view(operand)).packed_as((width,)) for operand in node.operands[1:]]
    return Rows.of(low, flat, shared, low.ending(node.result, width), on_device(node.result.type.dtype))


@lowers(LayerNorm)
def _layer_norm(low: Lowering, node: Node, op: LayerNorm) -> None:
    def work(rows: Folding) -> None:
        mean = rows.scalar(rows.column(), rows.sum_of(Function.COPY), Alu.MULTIPLY, 1 / rows.width)
        negative = rows.scalar(rows.column(), mean, Alu.MULTIPLY, -1.0)
        inverse = rows.root_of_inverse(rows.sum_of(Function.SQUARE, negative), op.epsilon)

        def scale(piece: Piece, dst: Tile) -> None:
            between = rows.tile(piece) if piece.shared else dst
            rows.scalar(between, piece.source, Alu.SUBTRACT, mean, (Alu.MULTIPLY, inverse))
            _combine(rows, dst, between, piece.shared)

        rows.finish(scale)

    _rows(low, node, op.axes).write(work)


@lowers(RmsNorm)
def _rms_norm(low: Lowering, node: Node, op: RmsNorm) -> None:
    def work(rows: Folding) -> None:
        inverse = rows.root_of_inverse(rows.sum_of(Function.SQUARE), op.epsilon)

        def scale(piece: Piece, dst: Tile) -> None:
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

    _rows(low, node, op.axes).write(work)


def _combine(rows: Folding, dst: Tile, between: Tile, shared: Sequence[Tile]) -> None:
    """Times the first row, plus the second; rounded with the last."""
    for number, (op, row) in enumerate(zip((Alu.MULTIPLY, Alu.ADD), shared, strict=False), 1):
        rows.tensor(dst if number == len(shared) else between, between, op, row)


@lowers(Softmax)
def _softmax(low: Lowering, node: Node, op: Softmax) -> None:
    def work(rows: Folding) -> None:
        def find(piece: Piece, highest: Tile) -> None:
            rows.k.emit(TensorReduce(engine=Engine.VECTOR, dst=highest, src=piece.source, op=Alu.MAXIMUM))

        highest = rows.fold(Alu.MAXIMUM, -float("inf"), find)
        negative = rows.scalar(rows.column(), highest, Alu.MULTIPLY, -1.0)
        if op.log:
            logarithm = rows.function(rows.column(), rows.sum_of(Function.EXP, negative), Function.LOG)

            def subtract(piece: Piece, dst: Tile) -> None:
                rows.scalar(dst, piece.source, Alu.SUBTRACT, highest, (Alu.SUBTRACT, logarithm))

            rows.finish(subtract)
        else:
            _normalise(rows, negative)

    axis = node.result.type.rank - 1
    if op.axis == axis:
        _rows(low, node, 1).write(work)
    elif node.result.type.elements:
        _across(low, node, op.axis, work)
    else:
        low.home(node.result)


def _across(low: Lowering, node: Node, axis: int, work: Callable[[Folding], None]) -> None:
    """Along another axis than the last: what is strided for DMA on its way in is so on its way out too."""
    rank = node.result.type.rank
    order = (*(other for other in range(rank) if other != axis), axis)
    x, home = low.view(node.operands[0]).transposed(order), low.home(node.result).transposed(order)
    width = x.shape[-1]
    made = low.scratch(node.result.type.dtype, x.shape)
    flat = made.packed_as((made.elements // width, width))
    ending = Ending(low.k, node.result, Chain((), (), ((node.result, flat),)))
    Rows.of(low, as_rows(low, x, x.elements // width, width), (), ending, made.dtype).write(work)
    low.copy(home, made)


def _normalise(rows: Folding, negative: Tile) -> None:
    """Exponentials of whole rows are kept for the result; those of pieces are made anew."""
    kept: list[Tile] = []

    def exponentials(piece: Piece, total: Tile | None) -> Tile:
        return rows.function(rows.tile(piece), piece.source, Function.EXP, total, negative)

    def add(piece: Piece, total: Tile) -> None:
        kept.append(exponentials(piece, total))

    inverse = rows.reciprocal(rows.fold(Alu.ADD, 0.0, add))

    def scale(piece: Piece, dst: Tile) -> None:
        again = exponentials(piece, None) if rows.loaded is None else kept[0]
        rows.scalar(dst, again, Alu.MULTIPLY, inverse)

    rows.finish(scale)
