"""Operators that fold whole rows: a row lies along one partition, and 128 rows are worked on side by side.

Everything is float32 between the first reading and the last rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from emulator.graph import Node
from emulator.isa.instructions import (
    Activation,
    Alu,
    Engine,
    Function,
    Reciprocal,
    TensorReduce,
    TensorScalar,
    TensorTensor,
)
from emulator.isa.operands import Tile
from emulator.lower.buffers import on_device
from emulator.lower.kernel import PARTITIONS, Block, Kernel
from emulator.lower.lowering import Lowering, lowers
from emulator.lower.view import View
from emulator.ops import LayerNorm, RmsNorm, Softmax
from emulator.types import DType


@dataclass(frozen=True)
class Rows:
    """A piece of `count` rows, each `width` wide; its tiles live until the next piece."""

    k: Kernel
    count: int
    width: int

    def tile(self, dtype: DType = DType.FLOAT32) -> Tile:
        return self.k.tile(dtype, self.count, self.width, turns=2).whole

    def column(self) -> Tile:
        """One number for each row."""
        return self.k.tile(DType.FLOAT32, self.count, 1, turns=2).whole

    def scalar(
        self, dst: Tile, src: Tile, op: Alu, operand: float | Tile, then: tuple[Alu, float] | None = None
    ) -> Tile:
        op1, operand1 = then or (None, 0.0)
        self.k.emit(
            TensorScalar(engine=Engine.VECTOR, dst=dst, src=src, op0=op, operand0=operand, op1=op1, operand1=operand1)
        )
        return dst

    def tensor(self, dst: Tile, left: Tile, op: Alu, right: Tile) -> Tile:
        self.k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst, left=left, right=right, op=op))
        return dst

    def function(self, dst: Tile, src: Tile, function: Function, total: Tile | None = None) -> Tile:
        self.k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=src, function=function, total=total))
        return dst

    def root_of_inverse(self, squares: Tile, epsilon: float) -> Tile:
        """1 / sqrt(mean + epsilon), of sums over the width."""
        mean = self.scalar(self.column(), squares, Alu.MULTIPLY, 1 / self.width, (Alu.ADD, epsilon))
        root, inverse = self.function(self.column(), mean, Function.SQRT), self.column()
        self.k.emit(Reciprocal(engine=Engine.VECTOR, dst=inverse, src=root))
        return inverse


Work = Callable[[Rows, Tile, Tile, Sequence[Tile]], None]  # the piece, where to, what of, and rows for all of them


def write_rows(low: Lowering, node: Node, axes: int, shared: Sequence[View], work: Work) -> None:
    """`work` on each piece of rows along the last `axes` axes; `shared` are rows that all of them are combined with."""
    k, x = low.k, low.view(node.operands[0])
    width = prod(x.shape[x.rank - axes :])
    flat = low.packed(x).reshaped((x.elements // width if width else 0, width))
    assert flat is not None  # packed rows are a matrix
    ending = low.ending(node.result, width)
    with k.room():
        common = [_on_every_partition(k, low.packed(view), width, flat.shape[0]) for view in shared]
        for top, count in k.spans(flat.shape[0], PARTITIONS):
            with k.room():
                rows = Rows(k, count, width)
                source, made = rows.tile(flat.dtype), rows.tile(on_device(node.result.type.dtype))
                k.copy(source, flat.cut((top, count)).far())
                work(rows, made, source, [block.cut(count) for block in common])
                ending.store(made, (top, count), (0, width))


def _on_every_partition(k: Kernel, view: View, width: int, rows: int) -> Block:
    flat = view.reshaped((width,))
    assert flat is not None  # a packed row
    block = k.tile(view.dtype, min(rows, PARTITIONS), width)
    k.copy(block.whole, flat.broadcast((block.partitions, width)).far())
    return block


@lowers(LayerNorm)
def _layer_norm(low: Lowering, node: Node, op: LayerNorm) -> None:
    def work(rows: Rows, dst: Tile, src: Tile, affine: Sequence[Tile]) -> None:
        total, squares = rows.column(), rows.column()
        rows.function(rows.tile(), src, Function.COPY, total)
        mean = rows.scalar(rows.column(), total, Alu.MULTIPLY, 1 / rows.width)
        centred = rows.scalar(rows.tile(), src, Alu.SUBTRACT, mean)
        rows.function(rows.tile(), centred, Function.SQUARE, squares)
        _scaled(rows, dst, centred, rows.root_of_inverse(squares, op.epsilon), affine)

    write_rows(low, node, op.axes, [low.view(operand) for operand in node.operands[1:]], work)


@lowers(RmsNorm)
def _rms_norm(low: Lowering, node: Node, op: RmsNorm) -> None:
    def work(rows: Rows, dst: Tile, src: Tile, affine: Sequence[Tile]) -> None:
        squares = rows.column()
        rows.function(rows.tile(), src, Function.SQUARE, squares)
        _scaled(rows, dst, src, rows.root_of_inverse(squares, op.epsilon), affine)

    write_rows(low, node, op.axes, [low.view(operand) for operand in node.operands[1:]], work)


def _scaled(rows: Rows, dst: Tile, values: Tile, factor: Tile, affine: Sequence[Tile]) -> None:
    """Times a number for each row, then times one for each column, then plus one; rounded once."""
    steps = [(Alu.MULTIPLY, each) for each in affine[:1]] + [(Alu.ADD, each) for each in affine[1:]]
    made = rows.scalar(rows.tile() if steps else dst, values, Alu.MULTIPLY, factor)
    for number, (op, operand) in enumerate(steps, 1):
        made = rows.tensor(dst if number == len(steps) else rows.tile(), made, op, operand)


@lowers(Softmax)
def _softmax(low: Lowering, node: Node, op: Softmax) -> None:
    def work(rows: Rows, dst: Tile, src: Tile, _: Sequence[Tile]) -> None:
        highest, total = rows.column(), rows.column()
        rows.k.emit(TensorReduce(engine=Engine.VECTOR, dst=highest, src=src, op=Alu.MAXIMUM))
        shifted = rows.scalar(rows.tile(), src, Alu.SUBTRACT, highest)
        exponentials = rows.function(rows.tile(), shifted, Function.EXP, total)
        if op.log:
            logarithm = rows.function(rows.column(), total, Function.LOG)
            rows.scalar(dst, shifted, Alu.SUBTRACT, logarithm)
            return
        inverse = rows.column()
        rows.k.emit(Reciprocal(engine=Engine.VECTOR, dst=inverse, src=total))
        rows.scalar(dst, exponentials, Alu.MULTIPLY, inverse)

    write_rows(low, node, 1, [], work)
