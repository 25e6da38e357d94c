"""Lowering of elementwise operators with their epilogues, tile by tile."""

from typing import Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.isa.operands import Memory
from nxpipe.emulator.lower.elementwise import is_exact
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.tiles import WIDEST, each_tile
from nxpipe.emulator.ops import Binary, Cast, Unary, Where
from nxpipe.emulator.ops.base import Operator

_STEP: Final = 64  # elements by which pieces become narrower


@lowers(Binary, Cast, Unary, Where)
def _elementwise(low: Lowering, node: Node, op: Operator) -> None:
    if is_exact(node):
        low.alias(node.result, low.stored_view(node.operands[0]))
        return
    chain = low.chain(node)
    widest = low.k.left(Memory.SBUF) // chain.width // _STEP * _STEP
    by_row = low.goes_by_row(chain)
    for _, _, pieces in each_tile(low.k, chain.views, max(min(widest, WIDEST), _STEP), by_row):
        with low.k.scope():
            chain.carry(low.k, pieces, {})
