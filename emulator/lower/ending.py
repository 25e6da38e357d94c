"""What becomes of a result while it is still in SBUF: the elementwise work that follows it, up to where it is stored.

A result that one elementwise node alone reads need not go to HBM in between. Each node of such a chain still rounds to
its own type, so that nothing changes but the traffic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from emulator.graph import Node, Value
from emulator.isa.operands import Tile
from emulator.lower.buffers import on_device
from emulator.lower.elements import apply, is_applicable
from emulator.lower.kernel import Block, Kernel, Span
from emulator.lower.view import View
from emulator.ops import Reshape


@dataclass(frozen=True)
class Link:
    """One elementwise node of a chain; an operand is None where the chain itself goes in."""

    node: Node
    operands: tuple[View | None, ...]


@dataclass(frozen=True)
class Ending:
    """All that follows a producer, whose result is seen as a matrix."""

    k: Kernel
    links: tuple[Link, ...]
    home: View

    def store(self, tile: Tile, rows: Span, columns: Span) -> None:
        """Take a finished piece through the chain and to its place."""
        for link in self.links:
            operands = [tile if view is None else self._load(view.cut(rows, columns)) for view in link.operands]
            made = self.k.tile(on_device(link.node.result.type.dtype), rows[1], columns[1], turns=2)
            apply(self.k, link.node, made.whole, operands)
            tile = made.whole
        self.k.copy(self.home.cut(rows, columns).far(), tile)

    def _load(self, view: View) -> Tile:
        block: Block = self.k.tile(view.dtype, *view.shape, turns=2)
        self.k.copy(block.whole, view.far())
        return block.whole


def follow(
    result: Value, readers: dict[Value, list[Node]], kept: set[Value], known: dict[Value, View], width: int
) -> tuple[Value, tuple[Link, ...], list[Node]]:
    """The chain behind a value whose rows are `width` wide: where it ends, its links, and all nodes that it takes in.

    `kept` are values that somebody needs in HBM, `known` those that lie there already.
    """
    links: list[Link] = []
    taken: list[Node] = []
    at = result
    while at not in kept and len(readers.get(at, ())) == 1:
        node = readers[at][0]
        if isinstance(node.op, Reshape) and _rows(node.result, width) is not None:
            taken.append(node)
            at = node.result
            continue
        link = _link(node, at, known, width)
        if link is None:
            break
        links.append(link)
        taken.append(node)
        at = node.result
    while taken and isinstance(taken[-1].op, Reshape):  # a view of what is stored does as well
        at = taken.pop().operands[0]
    return at, tuple(links), taken


def _link(node: Node, chain: Value, known: dict[Value, View], width: int) -> Link | None:
    if not is_applicable(node) or node.result.type.shape != chain.type.shape:
        return None
    operands: list[View | None] = []
    for operand in node.operands:
        if operand == chain:
            operands.append(None)
            continue
        view = known.get(operand)
        flat = view.broadcast(chain.type.shape).reshaped(_rows(chain, width) or ()) if view else None
        if flat is None:
            return None
        operands.append(flat)
    return Link(node, tuple(operands))


def _rows(value: Value, width: int) -> tuple[int, int] | None:
    """As a matrix of this width, where its last axis is that wide."""
    shape: Sequence[int] = value.type.shape
    return (prod(shape[:-1]), width) if shape and shape[-1] == width else None
