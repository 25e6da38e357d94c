"""Grouping: the decisions which nodes share a kernel. This module decides and emits nothing.

Fusing saves HBM traffic, which bounds most models: a result that is consumed while it is in SBUF is neither stored nor
loaded again. Four patterns are fused:

- epilogue: elementwise nodes behind a result, applied to its tiles before they are stored;
- shared rows: matmuls that read the same rows (queries, keys and values; gate and up), which are loaded and transposed
  once for all of them;
- consumers: matmuls that alone read the rows of a norm, which go from SBUF straight into the tensor engine;
- deferral: an elementwise node whose one reader still waits for another operand joins the reader's kernel later, since
  fused with its own producer it would have to be stored.

Fused nodes round to their own types, so that a program computes the same numbers however it is grouped.
"""

from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.isa.operands import Memory
from nxpipe.emulator.lower.dataflow import UPDATES, ValueReaders
from nxpipe.emulator.lower.elementwise import is_applicable, is_exact
from nxpipe.emulator.lower.hbm_buffers import Placement
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel
from nxpipe.emulator.lower.kernel_cost import piecewise_is_cheaper
from nxpipe.emulator.lower.records import KernelGroup, PlacedGraph
from nxpipe.emulator.lower.transpose import chunks_of
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import AllGather, AllReduce, Linear, MatMul, ReduceScatter, Reshape

_MOST: Final = 8  # nodes in an epilogue: the tiles of all of them are in SBUF at once


@dataclass(frozen=True)
class HbmOperand:
    """An operand that an epilogue loads from HBM: its number among the loaded views."""

    number: int


@dataclass(frozen=True)
class ChainNode:
    """A fused node. An operand is a value computed before it in the kernel, one loaded from HBM, or a number."""

    node: Node
    operands: tuple[Value | HbmOperand | float, ...]


@dataclass
class EpilogueFusion:
    """Nodes that can be applied to a kernel's results tile by tile, before they leave SBUF.

    `shape` is that of the whole result whose tiles the kernel computes. A node can join if its operands are results of
    the kernel, numbers, deferred nodes that can join too, or views in HBM with strides for this shape. `all_reduces`
    decides whether an all-reduce joins, tile by tile. The search is greedy in the order of the graph, and everything it
    adds keeps `known` closed: each value in it can be computed from what the kernel has.
    """

    shape: tuple[int, ...]
    places: Placement
    readers: ValueReaders
    all_reduces: Callable[[Node, tuple[int, ...]], bool]
    deferred: Mapping[Value, Node]
    links: list[ChainNode] = field(default_factory=list)
    sources: list[View] = field(default_factory=list)
    known: dict[Value, Value] = field(default_factory=dict)  # a value, and the value whose tile holds it

    def start(self, node: Node) -> bool:
        return self._take(node)

    def follow(self, value: Value) -> None:
        """Add the nodes behind a value that the kernel computes, in graph order, as long as one can join."""
        self.known[value] = value
        while len(self.links) < _MOST:
            ready = [node for value in self.known for node in self.readers.behind(value)]
            if not any(self._take(node) for node in ready if node.result not in self.known):
                return

    def combines(self, results: Sequence[Value]) -> bool:
        """True if one fused node depends on all of these results."""
        come = {result: {result} for result in results}
        for link in self.links:
            values = [each for each in link.operands if isinstance(each, Value)]
            come[link.node.result] = set().union(*(come.get(value, ()) for value in values))
        return any(len(each) == len(results) for each in come.values())

    def finished(self, read_here: Sequence[Node] = ()) -> tuple[set[Value], list[Value]]:
        """Values that no other kernel has to compute; and, of those, the tiles to store because a node outside of the
        kernel and of `read_here` reads them. A view of a stored tile is left to be a view of its own."""
        done, needed = {*self.known, *(node.result for node in read_here)}, self.readers.is_needed
        while True:
            kept = {
                value for value, tile in self.known.items() if tile != value and value in done and needed(value, done)
            }
            if not kept:
                break
            done -= kept
        return done, [value for value, tile in self.known.items() if tile == value and needed(value, done)]

    def _take(self, node: Node) -> bool:
        if self._is_view(node):
            if node.operands[0] not in self.known:
                return False
            self.known[node.result] = self.known[node.operands[0]]
            return True
        if isinstance(node.op, AllReduce):
            taken = self._all_reduces_tile(node)
        else:
            taken = is_applicable(node) and node.result.type.elements == prod(self.shape)
        return taken and self._link(node)

    def _is_view(self, node: Node) -> bool:
        """True if the result is the same numbers; engines and DMA widen exactly what they read."""
        return isinstance(node.op, Reshape) or (is_exact(node) and node.result not in self.places.homes)

    def _all_reduces_tile(self, node: Node) -> bool:
        """An all-reduce overwrites its tile, so no other node may read the tile before."""
        tile = self.known.get(node.operands[0])
        names = [value for value, known in self.known.items() if known == tile]
        return tile is not None and all(map(self.readers.only, names)) and self.all_reduces(node, self.shape)

    def _link(self, node: Node) -> bool:
        absent = [each for each in node.operands if each not in self.known and each not in self.places.views]
        if not all(each in self.deferred for each in absent):
            return False
        if not all(each in self.known or self._take(self.deferred[each]) for each in absent):
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
        if operand in self.known:  # a tile is not broadcast
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


@dataclass(frozen=True)
class RowSharding:
    """Rows divided among ranks: of each run of rows, every rank has so many."""

    ranks: int
    rows: int


@dataclass(frozen=True)
class Consumers:
    """The matmuls that read a value, directly or after ranks have gathered it."""

    value: Value
    matmuls: Sequence[Node] = ()
    gather: Node | None = None
    sharding: RowSharding | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*([self.gather] if self.gather else []), *self.matmuls)


class KernelGrouping:
    """Decides, kernel by kernel in graph order, which nodes join the kernel of the node that is lowered next.

    It reads where values are (`places`) and how much SBUF is free (`kernel`); both change as kernels are emitted.
    """

    def __init__(self, placed: PlacedGraph, places: Placement, kernel: Kernel) -> None:
        self._graph = placed.target.graph
        self._ranks = placed.target.ranks
        self._places = places
        self._kernel = kernel
        self._readers = ValueReaders(self._graph)
        self._position = {node.result: position for position, node in enumerate(self._graph.nodes)}
        self._deferred: dict[Value, Node] = {}
        self._done: set[Value] = set()  # results that the kernel of another node computes
        self._fused: list[Value] = []  # by the kernel that is being emitted

    def is_due(self, node: Node) -> bool:
        """False if the host computes the node when it loads parameters, or another node's kernel has fused it."""
        return node.result not in self._places.stored and node.result not in self._done

    def fuse(self, results: Collection[Value]) -> None:
        """These results are computed by the kernel that is being emitted."""
        self._done.update(results)
        self._fused.extend(results)

    def recorded(self, node: Node) -> KernelGroup:
        """The record of the kernel that has just been emitted for a node."""
        own = self._position[node.result]
        positions = sorted({self._position[result] for result in self._fused} - {own})
        before = bisect(positions, own)
        fused = [self._graph.nodes[position] for position in positions]
        group = KernelGroup(node, tuple(fused[before:]), tuple(fused[:before]), tuple(self._kernel.tilings))
        self._fused.clear()
        self._kernel.tilings.clear()
        return group

    def only_reader(self, value: Value) -> Node | None:
        """The one node that reads a value, if the value needs no location for any other."""
        return None if value in self._places.homes else self._readers.only(value)

    def is_needed(self, value: Value, readers: Sequence[Node]) -> bool:
        """True if other nodes than these read a value from HBM."""
        return value in self._places.homes or self._readers.is_needed(value, {node.result for node in readers})

    # Deferral

    def defers(self, node: Node) -> bool:
        """Defer an elementwise node to the kernel of its one reader, if that still lacks another operand.

        Until then the operands of the node must stay as they are, so no update in place may stand between the two.
        """
        reader, views = self._readers.only(node.result), self._places.views
        if reader is None or node.result in self._places.homes or not (_computes(node) and _computes(reader)):
            return False
        alike = node.result.type.elements == reader.result.type.elements
        ready = all(operand == node.result or operand in views for operand in reader.operands)
        if not alike or ready or not all(operand in views for operand in node.operands):
            return False
        between = self._graph.nodes[self._position[node.result] : self._position[reader.result]]
        if any(isinstance(other.op, UPDATES) for other in between):
            return False
        self._deferred[node.result] = node
        return True

    # Epilogues

    def epilogue(self, result: Value, width: int) -> EpilogueFusion:
        """The epilogue of a node whose result is computed as a matrix with rows of this width."""
        found = self.no_epilogue(result, width)
        found.follow(result)
        return found

    def no_epilogue(self, result: Value, width: int) -> EpilogueFusion:
        """An epilogue without nodes yet, of results that are matrices with rows of this width."""
        return self._fusion((result.type.elements // width if width else 0, width))

    def elementwise(self, node: Node) -> EpilogueFusion | None:
        """An elementwise node with its epilogue; None if it cannot be lowered."""
        found = self._fusion(node.result.type.shape)
        if not found.start(node):
            return None
        found.follow(node.result)
        return found

    def _fusion(self, shape: tuple[int, ...]) -> EpilogueFusion:
        return EpilogueFusion(shape, self._places, self._readers, self._all_reduces, self._deferred)

    def _all_reduces(self, node: Node, shape: tuple[int, ...]) -> bool:
        """Ranks add up a result tile by tile where that is cheaper than once for the whole in HBM."""
        rows, width = prod(shape[:-1]), shape[-1] if shape else 1
        degree = node.op.degree if isinstance(node.op, AllReduce) else 0
        dtype = node.result.type.dtype.on_device
        return (
            degree == self._ranks and rows * width > 0 and piecewise_is_cheaper(self._kernel.core, rows, width, dtype)
        )

    # Matmuls

    def matmuls_of(self, rows: Value, result: Value) -> list[Node]:
        """Matmuls of these rows with one weight each, that can be emitted with the node of the result: each runs as
        often as that node, and its other operands are in HBM."""
        return [
            node
            for node in self._readers.beside(rows, result)
            if self.is_due(node)
            and all(operand == rows or operand in self._places.views for operand in node.operands)
            and has_one_weight(node)
            and node.operands[0] == rows
            and rows not in node.operands[1:]
        ]

    def common_epilogue(self, nodes: Sequence[Node]) -> EpilogueFusion | None:
        """The epilogue of several matmuls, if their results are equally wide and meet in one of its nodes."""
        if len({node.result.type.shape[-1] for node in nodes}) > 1:
            return None
        found = self.no_epilogue(nodes[0].result, nodes[0].result.type.shape[-1])
        for node in nodes:
            found.follow(node.result)
        return found if found.combines([node.result for node in nodes]) else None

    def reduce_scatter_of(self, node: Node) -> Node | None:
        """The reduce-scatter of a matmul's partial results, if it can run on the tiles as they are computed: a run of
        all ranks' rows has to fit in half of SBUF, which leaves the other half for weights and epilogue."""
        found = self.only_reader(node.result)
        if found is None or not isinstance(found.op, ReduceScatter) or self.row_sharding(found) is None:
            return None
        x = node.operands[0].type
        nbytes = chunks_of(x.shape[-1]) * PARTITIONS * self._ranks * x.dtype.on_device.itemsize
        return found if 0 < 2 * nbytes <= self._kernel.left(Memory.SBUF) else None

    def row_sharding(self, node: Node) -> RowSharding | None:
        """The row sharding of a collective, if ranks share rows in even runs that fill whole sets of partitions."""
        op = node.op
        if not isinstance(op, AllGather | ReduceScatter) or op.degree != self._ranks:
            return None
        if op.axis != node.result.type.rank - 2:
            return None
        even = op.parts == (op.degree,) and not op.slots
        fills = op.local > 0 == PARTITIONS % op.local == op.outer * op.local % PARTITIONS
        return RowSharding(op.degree, op.local) if even and fills else None

    def gathered_matmuls(self, gather: Node, result: Value) -> list[Node]:
        """The matmuls of what ranks gather that can be emitted with the node of the result, if they are all its
        readers. Those whose results are scattered again must scatter them in the same runs of rows."""
        sharding = self.row_sharding(gather) if isinstance(gather.op, AllGather) else None
        if sharding is None:
            return []
        readers = self.matmuls_of(gather.result, result)
        sums = [found for reader in readers if (found := self.reduce_scatter_of(reader)) is not None]
        alike = all(self.row_sharding(found) == sharding for found in sums)
        return readers if alike and not self.is_needed(gather.result, readers) else []

    def consumers(self, epilogue: EpilogueFusion, result: Value, width: int) -> Consumers:
        """Of the rows that a kernel computes, those which most matmuls read, with these matmuls."""
        values = [value for value in epilogue.known if value.type.shape[-1:] == (width,)]
        return max(
            (each for value in values for each in self._consumers(value, result)),
            key=lambda each: len(each.matmuls),
            default=Consumers(result),
        )

    def _consumers(self, value: Value, result: Value) -> Iterator[Consumers]:
        yield Consumers(value, self.matmuls_of(value, result))
        gather = self.only_reader(value)
        matmuls = self.gathered_matmuls(gather, result) if gather else []
        if gather and matmuls:
            yield Consumers(value, matmuls, gather, self.row_sharding(gather))


def has_one_weight(node: Node) -> bool:
    """True for a matmul that multiplies all rows by the same matrix."""
    if isinstance(node.op, Linear):
        return True
    return isinstance(node.op, MatMul) and all(size == 1 for size in node.operands[1].type.shape[:-2])


def _computes(node: Node) -> bool:
    return is_applicable(node) and not is_exact(node)
