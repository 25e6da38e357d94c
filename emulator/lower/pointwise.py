"""Operators that work on each element by itself, and whatever such work follows them."""

from emulator.graph import Node
from emulator.lower.buffers import on_device
from emulator.lower.elements import apply
from emulator.lower.lowering import Lowering, lowers
from emulator.lower.sheets import sheets
from emulator.ops import Binary, Cast, Unary, Where
from emulator.ops.base import Operator


@lowers(Binary, Cast, Unary, Where)
def _elementwise(low: Lowering, node: Node, op: Operator) -> None:
    operands = [low.view(operand).broadcast(node.result.type.shape) for operand in node.operands]
    home = low.home(node.result)
    for rows, width, (to, *parts) in sheets(low.k, [home, *operands]):
        with low.k.room():
            tiles = []
            for part in parts:
                tile = low.k.tile(part.dtype, rows, width, turns=2)
                low.k.copy(tile.whole, part.far())
                tiles.append(tile.whole)
            made = low.k.tile(on_device(node.result.type.dtype), rows, width, turns=2)
            apply(low.k, node, made.whole, tiles)
            low.k.copy(to.far(), made.whole)
