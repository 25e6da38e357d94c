"""Operators that work on each element by itself."""

from typing import Final

from emulator.graph import Node
from emulator.isa.instructions import Alu, Engine, TensorCopy, TensorTensor
from emulator.lower.lowering import Lowering, NotLowered, lowers
from emulator.lower.sheets import sheets
from emulator.ops import Binary, Cast

_BINARY: Final = {
    "add": Alu.ADD,
    "subtract": Alu.SUBTRACT,
    "multiply": Alu.MULTIPLY,
    "maximum": Alu.MAXIMUM,
    "minimum": Alu.MINIMUM,
}


@lowers(Binary)
def _binary(low: Lowering, node: Node, op: Binary) -> None:
    if op.function not in _BINARY:
        raise NotLowered(f"there are no instructions for {op.function}")
    left, right = (low.view(operand).broadcast(node.result.type.shape) for operand in node.operands)
    home = low.home(node.result)
    for rows, width, (to, one, other) in sheets(low.k, [home, left, right]):
        with low.k.room():
            tiles = [low.k.tile(view.dtype, rows, width, turns=2) for view in (to, one, other)]
            low.k.copy(tiles[1].whole, one.far())
            low.k.copy(tiles[2].whole, other.far())
            low.k.emit(
                TensorTensor(
                    engine=Engine.VECTOR,
                    dst=tiles[0].whole,
                    left=tiles[1].whole,
                    right=tiles[2].whole,
                    op=_BINARY[op.function],
                )
            )
            low.k.copy(to.far(), tiles[0].whole)


@lowers(Cast)
def _cast(low: Lowering, node: Node, op: Cast) -> None:
    home = low.home(node.result)
    for rows, width, (to, source) in sheets(low.k, [home, low.view(node.operands[0])]):
        with low.k.room():
            given, made = (low.k.tile(view.dtype, rows, width, turns=2) for view in (source, to))
            low.k.copy(given.whole, source.far())
            low.k.emit(TensorCopy(engine=Engine.VECTOR, dst=made.whole, src=given.whole))
            low.k.copy(to.far(), made.whole)
