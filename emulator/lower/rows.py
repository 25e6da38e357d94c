"""Operators that fold whole rows. Everything is float32 between the first reading and the last rounding."""

from collections.abc import Callable, Sequence

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.scalar import Function
from nxpipe.emulator.isa.vector import ScalarTensorTensor, TensorReduce
from nxpipe.emulator.lower.ending import Chain, Ending
from nxpipe.emulator.lower.folding import Folding, Piece, Rows, columns_of
from nxpipe.emulator.lower.fused import write_rows
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.products import as_rows
from nxpipe.emulator.ops import LayerNorm, RmsNorm, Softmax


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

    write_rows(low, node, op.axes, work)


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

    write_rows(low, node, op.axes, work)


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
        write_rows(low, node, 1, work, DType.FLOAT32.itemsize)
    elif node.result.type.elements:
        _across(low, node, op.axis, work)
    else:
        low.home(node.result)


def _across(low: Lowering, node: Node, axis: int, work: Callable[[Folding], None]) -> None:
    """Along another axis than the last: what is strided for DMA on its way in is so on its way out too."""
    rank = node.result.type.rank
    order = (*(other for other in range(rank) if other != axis), axis)
    x, home = low.lying(node.operands[0]).transposed(order), low.home(node.result).transposed(order)
    width = x.shape[-1]
    made = low.scratch(node.result.type.dtype, x.shape)
    target = made.packed_as((made.elements // width, width))
    ending = Ending(low.k, node.result, Chain((), (), ((node.result, target),)))
    flat = as_rows(low, x, x.elements // width, width)
    Rows.of(low.k, flat, (), ending, made.dtype, work, DType.FLOAT32.itemsize).write()
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
        again = exponentials(piece, None) if rows.loaded is None else columns_of(kept[0], piece.left)
        rows.scalar(dst, again, Alu.MULTIPLY, inverse)

    rows.finish(scale)
