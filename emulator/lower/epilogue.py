"""Elementwise nodes that are better done later: what alone reads them waits for something else, and can do them as it
goes. So their results need not be stored in between."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

from nxpipe.emulator.ir.graph import Graph, Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa import instructions as isa
from nxpipe.emulator.isa.instructions import Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.lower.dataflow import UPDATES, ValueReaders
from nxpipe.emulator.lower.elementwise_ops import apply, is_applicable, is_exact, temporaries
from nxpipe.emulator.lower.hbm_buffers import Placement
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lanes import repeated
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import AllReduce, Reshape


class DeferredNodes:
    """`nodes` are those put off, by their results."""

    def __init__(self, graph: Graph, places: Placement, reading: ValueReaders) -> None:
        self._graph = graph
        self._places = places
        self._reading = reading
        self._position = {node.result: position for position, node in enumerate(graph.nodes)}
        self.nodes: dict[Value, Node] = {}

    def puts_off(self, node: Node) -> bool:
        """What the node reads must be there, and must not be changed in between."""
        reader, views = self._reading.only(node.result), self._places.views
        if reader is None or node.result in self._places.homes or not (_is_work(node) and _is_work(reader)):
            return False
        alike = node.result.type.elements == reader.result.type.elements
        at_once = all(operand == node.result or operand in views for operand in reader.operands)
        if not alike or at_once or not all(operand in views for operand in node.operands):
            return False
        between = self._graph.nodes[self._position[node.result] : self._position[reader.result]]
        if any(isinstance(other.op, UPDATES) for other in between):
            return False
        self.nodes[node.result] = node
        return True


def _is_work(node: Node) -> bool:
    return is_applicable(node) and not is_exact(node)


_MOST: Final = 8  # nodes taken in: all their tiles are at hand at once


@dataclass(frozen=True)
class HbmOperand:
    """An operand that lies in HBM: its number among what is loaded."""

    number: int


@dataclass(frozen=True)
class ChainNode:
    """One node. An operand is a value made before it, one that is loaded, or a constant's number."""

    node: Node
    operands: tuple[Value | HbmOperand | float, ...]


@dataclass
class EpilogueFusion:
    """`shape` is that of the pieces' whole; `meets` says whether ranks had better add up a result of that shape while
    it is made."""

    shape: tuple[int, ...]
    places: Placement
    reading: ValueReaders
    meets: Callable[[Node, tuple[int, ...]], bool]
    waiting: Mapping[Value, Node]  # nodes that have been put off until now
    links: list[ChainNode] = field(default_factory=list)
    sources: list[View] = field(default_factory=list)
    known: dict[Value, Value] = field(default_factory=dict)  # a view of a tile is the value that the tile was made for

    def start(self, node: Node) -> bool:
        return self._take(node)

    def follow(self, value: Value) -> None:
        """From a value that is made here on: nodes in their order, for as long as there are any."""
        self.known[value] = value
        while len(self.links) < _MOST:
            ready = [node for value in self.known for node in self.reading.behind(value)]
            if not any(self._take(node) for node in ready if node.result not in self.known):
                return

    def combines(self, results: Sequence[Value]) -> bool:
        """Whether all of these meet in one node."""
        come = {result: {result} for result in results}
        for link in self.links:
            values = [each for each in link.operands if isinstance(each, Value)]
            come[link.node.result] = set().union(*(come.get(value, ()) for value in values))
        return any(len(each) == len(results) for each in come.values())

    def finished(self, read_here: Sequence[Node] = ()) -> tuple[set[Value], list[Value]]:
        """The results that nobody else has to make, and those of tiles that have to be stored, since others than these
        nodes read them."""
        done, needed = {*self.known, *(node.result for node in read_here)}, self.reading.is_needed
        while True:
            kept = {
                value for value, tile in self.known.items() if tile != value and value in done and needed(value, done)
            }
            if not kept:
                break
            done -= kept  # a view of what is stored is made in its own time
        return done, [value for value, tile in self.known.items() if tile == value and needed(value, done)]

    def _take(self, node: Node) -> bool:
        if self._is_view(node):
            if node.operands[0] not in self.known:
                return False
            self.known[node.result] = self.known[node.operands[0]]
            return True
        if isinstance(node.op, AllReduce):
            taken = self._adds_up(node)
        else:
            taken = is_applicable(node) and node.result.type.elements == prod(self.shape)
        return taken and self._link(node)

    def _is_view(self, node: Node) -> bool:
        """Whether its result is the same numbers: engines and DMA widen what they read by themselves."""
        return isinstance(node.op, Reshape) or (is_exact(node) and node.result not in self.places.homes)

    def _adds_up(self, node: Node) -> bool:
        """Ranks add where the tile lies, so that nobody else may want to see it before."""
        tile = self.known.get(node.operands[0])
        names = [value for value, known in self.known.items() if known == tile]
        return tile is not None and all(map(self.reading.only, names)) and self.meets(node, self.shape)

    def _link(self, node: Node) -> bool:
        absent = [each for each in node.operands if each not in self.known and each not in self.places.views]
        if not all(each in self.waiting for each in absent):
            return False
        if not all(each in self.known or self._take(self.waiting[each]) for each in absent):
            return False
        sources, operands = list(self.sources), []
        for operand in node.operands:
            found = self._operand(operand, node, sources)
            if found is None:
                return False
            operands.append(found)
        self.sources = sources
        self.links.append(ChainNode(node, tuple(operands)))
        self.known[node.result] = node.result
        return True

    def _operand(self, operand: Value, node: Node, sources: list[View]) -> Value | HbmOperand | float | None:
        whole = operand.type.elements == node.result.type.elements
        if operand in self.known:  # stretched by axes of size one at most
            return self.known[operand] if whole else None
        number = self.places.number(operand)
        if number is not None:
            return number
        view = self.places.views.get(operand)
        flat = view.broadcast(node.result.type.shape).reshaped(self.shape) if view else None
        if flat is None:
            return None
        if flat not in sources:
            sources.append(flat)
        return HbmOperand(sources.index(flat))


_WIDEST_KEPT: Final = 16384  # bytes of a row that is kept for all pieces


@dataclass(frozen=True)
class ElementwiseChain:
    """Nodes that are worked off piece by piece, all in one shape: what they load and what they store."""

    links: tuple[ChainNode, ...]
    sources: tuple[View, ...]
    homes: tuple[tuple[Value, View], ...]
    kept: Mapping[HbmOperand, Block] = field(default_factory=dict)  # rows that all pieces are combined with

    @property
    def views(self) -> tuple[View, ...]:
        return (*(view for _, view in self.homes), *self.sources)

    @property
    def width(self) -> int:
        """Bytes that an element of a piece takes in SBUF, with everything in two turns, and room for temporaries."""
        nodes = [link.node for link in self.links if not isinstance(link.node.op, AllReduce)]
        made = sum(node.result.type.dtype.on_device.itemsize for node in nodes)
        loaded = sum(
            view.dtype.itemsize for number, view in enumerate(self.sources) if HbmOperand(number) not in self.kept
        )
        between = max(map(temporaries, nodes), default=0) * DType.FLOAT32.itemsize
        return 2 * (made + loaded) + between

    def carry(
        self, k: Kernel, pieces: Sequence[View], made: dict[Value, Tile], kept: Mapping[HbmOperand, Tile] | None = None
    ) -> None:
        """Through all nodes, with a piece of each view, from the tiles that are made already."""
        homes = {value: piece for (value, _), piece in zip(self.homes, pieces, strict=False)}
        loaded = dict(kept or {})
        for value, tile in made.items():
            if value in homes:
                k.copy(homes[value].far(), tile)
        shape = pieces[0].shape if pieces else next((tile.partitions, tile.elements) for tile in made.values())
        for link in self.links:
            for each in link.operands:
                if isinstance(each, HbmOperand) and each not in loaded:
                    loaded[each] = load_tile(k, pieces[len(homes) + each.number])
            operands = [_operand(each, made, loaded) for each in link.operands]
            result = link.node.result
            made[result] = _result(k, link.node, operands, shape)
            if result in homes:
                k.copy(homes[result].far(), made[result])


def _operand(
    each: Value | HbmOperand | float, made: Mapping[Value, Tile], loaded: Mapping[HbmOperand, Tile]
) -> Tile | float:
    if isinstance(each, Value):
        return made[each]
    return loaded[each] if isinstance(each, HbmOperand) else each


def _result(k: Kernel, node: Node, operands: Sequence[Tile | float], shape: tuple[int, ...]) -> Tile:
    if isinstance(node.op, AllReduce):
        (mine,) = operands
        assert isinstance(mine, Tile)  # numbers are no results, and only those are added up
        k.emit(isa.AllReduce(engine=Engine.COLLECTIVE, dst=mine, src=mine))
        return mine
    block = k.tile(node.result.type.dtype.on_device, *shape, buffers=2)
    apply(k, node, block.whole, operands)
    return block.whole


def load_tile(k: Kernel, piece: View) -> Tile:
    """A piece of rows; where all elements of a row are one and the same, it is brought once."""
    rows, width = piece.shape
    once = width > 1 and piece.strides[1] == 0
    block = k.tile(piece.dtype, rows, 1 if once else width, buffers=2)
    k.copy(block.whole, (piece.cut((0, rows), (0, 1)) if once else piece).far())
    return repeated(block.whole, width) if once else block.whole


@dataclass(frozen=True)
class Epilogue:
    """All that follows a producer, whose result is seen as a matrix."""

    k: Kernel
    result: Value
    chain: ElementwiseChain

    def store(self, tile: Tile, rows: Span, columns: Span) -> None:
        """Take a finished piece through the chain and to its place."""
        self.finish({self.result: tile}, rows, columns)

    def finish(self, tiles: Mapping[Value, Tile], rows: Span, columns: Span) -> Mapping[Value, Tile]:
        """Pieces of several results at once; and all tiles that are made of them."""
        pieces = [view.cut(rows, columns) for view in self.chain.views]
        kept = {source: block.cut(rows[1], columns) for source, block in self.chain.kept.items()}
        made = dict(tiles)
        self.chain.carry(self.k, pieces, made, kept)
        return made


def epilogue_bytes(ending: Epilogue) -> int:
    """Bytes that each column of a piece takes on its way to where it is stored."""
    return ending.chain.width if ending.chain.links else 0


def chain_of(found: EpilogueFusion, homes: Sequence[tuple[Value, View]]) -> ElementwiseChain:
    """With the stored views in the shape of the pieces."""
    flat = [(value, home.reshaped(found.shape)) for value, home in homes]
    return ElementwiseChain(
        tuple(found.links),
        tuple(found.sources),
        tuple((value, view) for value, view in flat if view is not None),
    )


def broadcast_rows(k: Kernel, sources: Sequence[View]) -> dict[HbmOperand, Block]:
    """Of what is combined with each of many rows alike, a copy on every partition."""
    kept = {}
    for number, view in enumerate(sources):
        (rows, width), (down, _) = view.shape, view.strides
        if rows > PARTITIONS and not down and width * view.dtype.itemsize <= _WIDEST_KEPT:
            kept[HbmOperand(number)] = k.tile(view.dtype, PARTITIONS, width)
            k.copy(kept[HbmOperand(number)].whole, view.cut((0, PARTITIONS)).far())
    return kept
