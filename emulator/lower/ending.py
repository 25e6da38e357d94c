"""What becomes of a result while it is still in SBUF: the elementwise work that follows it, up to where it is stored.

A result that elementwise nodes read need not go to HBM in between. Each of those nodes still rounds to its own type, so
that nothing changes but the traffic; whatever somebody else reads is stored on the way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

from emulator.graph import Node, Value
from emulator.isa.operands import Tile
from emulator.lower.buffers import on_device
from emulator.lower.elements import apply, is_applicable, temporaries
from emulator.lower.kernel import Kernel, Span
from emulator.lower.lanes import repeated
from emulator.lower.view import View
from emulator.ops import Reshape
from emulator.types import DType

_MOST: Final = 8  # nodes taken in: all their tiles are at hand at once


@dataclass(frozen=True)
class Source:
    """An operand that lies in HBM: its number among what is loaded."""

    number: int


@dataclass(frozen=True)
class Link:
    """One elementwise node. An operand is a value made before it, one that is loaded, or a constant's number."""

    node: Node
    operands: tuple[Value | Source | float, ...]


@dataclass(frozen=True)
class Chain:
    """Elementwise nodes that are worked off piece by piece, all in one shape: what they load and what they store."""

    links: tuple[Link, ...]
    sources: tuple[View, ...]
    homes: tuple[tuple[Value, View], ...]

    @property
    def views(self) -> tuple[View, ...]:
        return (*(view for _, view in self.homes), *self.sources)

    @property
    def width(self) -> int:
        """Bytes that an element of a piece takes in SBUF, with everything in two turns, and room for temporaries."""
        made = sum(on_device(link.node.result.type.dtype).itemsize for link in self.links)
        between = max(temporaries(link.node) for link in self.links) * DType.FLOAT32.itemsize
        return 2 * (made + sum(view.dtype.itemsize for view in self.sources)) + between

    def carry(self, k: Kernel, pieces: Sequence[View], made: dict[Value, Tile]) -> None:
        """Through all nodes, with a piece of each view, from the tiles that are made already."""
        homes = {value: piece for (value, _), piece in zip(self.homes, pieces, strict=False)}
        loaded: dict[Source, Tile] = {}
        for value, tile in made.items():
            if value in homes:
                k.copy(homes[value].far(), tile)
        for link in self.links:
            for each in link.operands:
                if isinstance(each, Source) and each not in loaded:
                    loaded[each] = load(k, pieces[len(homes) + each.number])
            rows, width = pieces[0].shape
            result = link.node.result
            block = k.tile(on_device(result.type.dtype), rows, width, turns=2)
            apply(k, link.node, block.whole, [_operand(each, made, loaded) for each in link.operands])
            made[result] = block.whole
            if result in homes:
                k.copy(homes[result].far(), block.whole)


def _operand(each: Value | Source | float, made: Mapping[Value, Tile], loaded: Mapping[Source, Tile]) -> Tile | float:
    if isinstance(each, Value):
        return made[each]
    return loaded[each] if isinstance(each, Source) else each


def load(k: Kernel, piece: View) -> Tile:
    """A piece of rows; where all elements of a row are one and the same, it is brought once."""
    rows, width = piece.shape
    once = width > 1 and piece.strides[1] == 0
    block = k.tile(piece.dtype, rows, 1 if once else width, turns=2)
    k.copy(block.whole, (piece.cut((0, rows), (0, 1)) if once else piece).far())
    return repeated(block.whole, width) if once else block.whole


@dataclass(frozen=True)
class Ending:
    """All that follows a producer, whose result is seen as a matrix."""

    k: Kernel
    result: Value
    chain: Chain

    def store(self, tile: Tile, rows: Span, columns: Span) -> None:
        """Take a finished piece through the chain and to its place."""
        self.chain.carry(self.k, [view.cut(rows, columns) for view in self.chain.views], {self.result: tile})


@dataclass
class Following:
    """Finds the elementwise nodes that can be worked off with a value, and what has to be stored of them.

    `shape` is that of the pieces' whole, `ready` the nodes that may come next, `view` says where a value lies if it
    lies anywhere yet, `number` what a constant is if it is one number."""

    shape: tuple[int, ...]
    ready: Callable[[Value], Sequence[Node]]
    view: Callable[[Value], View | None]
    number: Callable[[Value], float | None]
    links: list[Link] = field(default_factory=list)
    sources: list[View] = field(default_factory=list)
    known: dict[Value, Value] = field(default_factory=dict)  # a reshaped value is the tile that it was before
    taken: set[Value] = field(default_factory=set)

    def start(self, node: Node) -> bool:
        return self._take(node)

    def follow(self, value: Value) -> None:
        """From a value that is made here on: nodes in their order, for as long as there are any."""
        self.known[value] = value
        while len(self.links) < _MOST:
            ready = [node for value in self.known for node in self.ready(value) if node.result not in self.known]
            if not any(self._take(node) for node in ready):
                return

    def _take(self, node: Node) -> bool:
        if isinstance(node.op, Reshape):
            if node.operands[0] not in self.known:
                return False
            self.known[node.result] = self.known[node.operands[0]]
            return True
        if not is_applicable(node) or node.result.type.elements != prod(self.shape):
            return False
        sources, operands = list(self.sources), []
        for operand in node.operands:
            found = self._operand(operand, node, sources)
            if found is None:
                return False
            operands.append(found)
        self.sources = sources
        self.links.append(Link(node, tuple(operands)))
        self.known[node.result] = node.result
        return True

    def _operand(self, operand: Value, node: Node, sources: list[View]) -> Value | Source | float | None:
        whole = operand.type.elements == node.result.type.elements
        if operand in self.known:  # stretched by axes of size one at most
            return self.known[operand] if whole else None
        number = self.number(operand)
        if number is not None:
            return number
        view = self.view(operand)
        flat = view.broadcast(node.result.type.shape).reshaped(self.shape) if view else None
        if flat is None:
            return None
        if flat not in sources:
            sources.append(flat)
        return Source(sources.index(flat))

    def finished(self, needed: Callable[[Value, set[Value]], bool]) -> tuple[set[Value], list[Value]]:
        """The results that nobody else has to make, and those of tiles that have to be stored. `needed` says whether a
        value is read by others than nodes with such results."""
        done = set(self.known)
        while True:
            kept = {
                value for value, tile in self.known.items() if tile != value and value in done and needed(value, done)
            }
            if not kept:
                break
            done -= kept  # a view of what is stored is made in its own time
        return done, [value for value, tile in self.known.items() if tile == value and needed(value, done)]


def chained(found: Following, homes: Sequence[tuple[Value, View]]) -> Chain:
    """With the stored views in the shape of the pieces."""
    flat = [(value, home.reshaped(found.shape)) for value, home in homes]
    return Chain(
        tuple(found.links),
        tuple(found.sources),
        tuple((value, view) for value, view in flat if view is not None),
    )
