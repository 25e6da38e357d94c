"""Fusion decisions: the nodes that share a kernel. This module emits no instructions.

Fusion saves HBM traffic, which bounds most models: a result that is consumed while it is in SBUF is neither stored nor
loaded again. Four patterns are fused:

- epilogue: elementwise nodes after a result, applied to its tiles before they are stored;
- shared rows: matmuls that read the same rows (queries, keys and values; gate and up), which are loaded and transposed
  once for all of them;
- consumers: matmuls that are the only readers of a norm's rows, which go from SBUF directly to the tensor engine;
- deferral: an elementwise node whose only reader still lacks another operand is moved to the reader's kernel, since it
  would have to be stored if it were fused with its own producer.

Fused nodes round to their own types, so that results do not depend on the grouping.
"""

from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.isa.operands import Memory
from nxpipe.emulator.lower.dataflow import UPDATES, ValueReaders
from nxpipe.emulator.lower.elementwise import is_applicable, is_exact
from nxpipe.emulator.lower.hbm_buffers import Placement
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel
from nxpipe.emulator.lower.kernel_cost import piecewise_is_cheaper
from nxpipe.emulator.lower.records import KernelGroup, PlacedGraph
from nxpipe.emulator.lower.transpose import chunks_of
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import AllGather, AllReduce, Cast, Linear, MatMul, ReduceScatter, Reshape

_MAX_NODES: Final = 8  # nodes in an epilogue: all their tiles are in SBUF at the same time


@dataclass(frozen=True)
class HbmOperand:
    """An operand that an epilogue loads from HBM: its index among the loaded views."""

    number: int


@dataclass(frozen=True)
class ChainNode:
    """A fused node. An operand is a value that the kernel has computed, an operand loaded from HBM, or a number."""

    node: Node
    operands: tuple[Value | HbmOperand | float, ...]


@dataclass
class EpilogueFusion:
    """Nodes that can be applied to a kernel's results tile by tile, before the tiles leave SBUF.

    `shape` is the shape of the whole result whose tiles the kernel computes; `swaps`: with the first two axes of the
    node's result swapped. A node can join if each operand is a
    result of the kernel, a number, a deferred node that can join too, or a view in HBM that strides can express in this
    shape. `all_reduces` decides for an all-reduce. The search is greedy in graph order. Invariant: every value in
    `known` can be computed from tiles in SBUF and views in HBM; each added node keeps it, so that the search may stop
    after any node.
    """

    shape: tuple[int, ...]
    places: Placement
    readers: ValueReaders
    all_reduces: Callable[[Node, tuple[int, ...]], bool]
    deferred: Mapping[Value, Node]
    links: list[ChainNode] = field(default_factory=list)
    sources: list[View] = field(default_factory=list)
    known: dict[Value, Value] = field(default_factory=dict)  # value: the value whose tile holds it
    swaps: bool = False
    by_channel: bool = False  # the shape is [channels, batch, positions]

    def arranged(self, view: View) -> View | None:
        """A view of a result's elements in the shape of the whole result; None if strides cannot express it."""
        if not self.swaps:
            return view.reshaped(self.shape)
        return view.transposed((1, 0, *range(2, view.rank))).reshaped(self.shape) if self._is_swapped(view) else None

    def _is_swapped(self, tensor: View | TensorType) -> bool:
        return tensor.shape[1::-1] == self.shape[:2]

    def start(self, node: Node) -> bool:
        """Add the first node; False if it cannot be lowered in this shape."""
        return self._take(node)

    def follow(self, value: Value) -> None:
        """Add the readers of a value that the kernel computes, and their readers, until no further node can join."""
        self.known[value] = value
        while len(self.links) < _MAX_NODES:
            ready = [node for value in self.known for node in self.readers.local_readers(value)]
            if not any(self._take(node) for node in ready if node.result not in self.known):
                return

    def combines(self, results: Sequence[Value]) -> bool:
        """True if one fused node depends on all of these results."""
        sources = {result: {result} for result in results}
        for link in self.links:
            values = [operand for operand in link.operands if isinstance(operand, Value)]
            sources[link.node.result] = set().union(*(sources.get(value, ()) for value in values))
        return any(len(reached) == len(results) for reached in sources.values())

    def finished(self, kernel_readers: Sequence[Node] = ()) -> tuple[set[Value], list[Value]]:
        """The values that no other kernel has to compute, and the tiles among them to store, because a node outside of
        the kernel and of `kernel_readers` reads them. A needed view of a tile is not one of these values: it becomes a
        view of the stored tile when its own node is lowered."""
        done, needed = {*self.known, *(node.result for node in kernel_readers)}, self.readers.is_needed
        while True:
            needed_views = {
                value for value, tile in self.known.items() if tile != value and value in done and needed(value, done)
            }
            if not needed_views:
                break
            done -= needed_views
        return done, [value for value, tile in self.known.items() if tile == value and needed(value, done)]

    def _take(self, node: Node) -> bool:
        if self._is_view(node):
            if node.operands[0] not in self.known:
                return False
            self.known[node.result] = self.known[node.operands[0]]
            return True
        if isinstance(node.op, AllReduce):
            can_join = self._all_reduces_tile(node)
        else:
            can_join = is_applicable(node) and self._has_shape(node.result)
        return can_join and self._link(node)

    def _has_shape(self, value: Value) -> bool:
        same_size = value.type.elements == prod(self.shape)
        return same_size and (not self.swaps or self._is_swapped(value.type))

    def _is_view(self, node: Node) -> bool:
        """True if the result has the operand's elements: a reshape, or an exact cast, which engines and DMA do as they
        read."""
        return isinstance(node.op, Reshape) or (is_exact(node) and node.result not in self.places.homes)

    def _all_reduces_tile(self, node: Node) -> bool:
        """True if an all-reduce can join. It overwrites its tile, so that no other node may read the tile."""
        tile = self.known.get(node.operands[0])
        aliases = [value for value, tile_value in self.known.items() if tile_value == tile]
        return tile is not None and all(map(self.readers.only_reader, aliases)) and self.all_reduces(node, self.shape)

    def _link(self, node: Node) -> bool:
        missing = [
            operand for operand in node.operands if operand not in self.known and operand not in self.places.views
        ]
        if not all(operand in self.deferred for operand in missing):
            return False
        if not all(operand in self.known or self._take(self.deferred[operand]) for operand in missing):
            return False
        sources, operands = list(self.sources), []
        for operand in node.operands:
            chain_operand = self._operand(operand, node, sources)
            if chain_operand is None:
                return False
            operands.append(chain_operand)
        self.sources = sources
        self.links.append(ChainNode(node, tuple(operands)))
        self.known[node.result] = node.result
        return True

    def _operand(self, operand: Value, node: Node, sources: list[View]) -> Value | HbmOperand | float | None:
        same_size = operand.type.elements == node.result.type.elements
        if operand in self.known:  # tiles cannot be broadcast
            return self.known[operand] if same_size else None
        number = self.places.number(operand)
        if number is not None:
            return number
        view = self.places.views.get(operand)
        flat = self.arranged(view.broadcast(node.result.type.shape)) if view else None
        if flat is None:
            return None
        if flat not in sources:
            sources.append(flat)
        return HbmOperand(sources.index(flat))


@dataclass(frozen=True)
class RowSharding:
    """Rows divided among ranks: each run of `ranks * rows` rows has `rows` consecutive rows of every rank."""

    ranks: int
    rows: int


@dataclass(frozen=True)
class Consumers:
    """The matmuls that read a value, directly or after an all-gather."""

    value: Value
    matmuls: Sequence[Node] = ()
    gather: Node | None = None
    sharding: RowSharding | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*([self.gather] if self.gather else []), *self.matmuls)


class KernelGrouping:
    """Decides, kernel by kernel in graph order, which nodes join the kernel of the node that is lowered next.

    Decisions depend on the location of values (`places`) and on free SBUF (`kernel`), which change as kernels are
    emitted.
    """

    def __init__(self, placed: PlacedGraph, places: Placement, kernel: Kernel) -> None:
        self._graph = placed.target.graph
        self._ranks = placed.target.ranks
        self._places = places
        self._kernel = kernel
        self._readers = ValueReaders(self._graph)
        self._position = {node.result: position for position, node in enumerate(self._graph.nodes)}
        self._deferred: dict[Value, Node] = {}
        self._done: set[Value] = set()  # results computed by the kernel of another node
        self._fused: list[Value] = []  # results fused into the current kernel

    def is_due(self, node: Node) -> bool:
        """False if the host computes the node when it loads parameters, or if another node's kernel includes it."""
        return node.result not in self._places.stored and node.result not in self._done

    def fuse(self, results: Collection[Value]) -> None:
        """Mark results as computed by the kernel that is being emitted."""
        self._done.update(results)
        self._fused.extend(results)

    def close_record(self, node: Node) -> KernelGroup:
        """Close the record of the kernel that has been emitted for a node."""
        position_of_node = self._position[node.result]
        positions = sorted({self._position[result] for result in self._fused} - {position_of_node})
        before = bisect(positions, position_of_node)
        fused = [self._graph.nodes[position] for position in positions]
        group = KernelGroup(node, tuple(fused[before:]), tuple(fused[:before]), tuple(self._kernel.tilings))
        self._fused.clear()
        self._kernel.tilings.clear()
        return group

    def only_reader(self, value: Value) -> Node | None:
        """The only reader of a value that needs no location in HBM; otherwise None."""
        return None if value in self._places.homes else self._readers.only_reader(value)

    def is_needed(self, value: Value, readers: Sequence[Node]) -> bool:
        """True if a node other than `readers` reads a value from HBM."""
        return value in self._places.homes or self._readers.is_needed(value, {node.result for node in readers})

    # Deferral

    def defers(self, node: Node) -> bool:
        """Defer an elementwise node to the kernel of its only reader, if the reader still lacks another operand.

        The node then reads its operands later. This is correct only if they are unchanged by then, so that no update in
        place may stand between the two nodes.
        """
        reader, views = self._readers.only_reader(node.result), self._places.views
        if reader is None or node.result in self._places.homes or not (_computes(node) and _computes(reader)):
            return False
        same_size = node.result.type.elements == reader.result.type.elements
        ready = all(operand == node.result or operand in views for operand in reader.operands)
        if not same_size or ready or not all(operand in views for operand in node.operands):
            return False
        between = self._graph.nodes[self._position[node.result] : self._position[reader.result]]
        if any(isinstance(later.op, UPDATES) for later in between):
            return False
        self._deferred[node.result] = node
        return True

    # Epilogues

    def epilogue(self, result: Value, width: int) -> EpilogueFusion:
        """The epilogue of a node whose result is computed as a matrix with rows of `width` elements."""
        fusion = self.no_epilogue(result, width)
        fusion.follow(result)
        return fusion

    def channel_epilogue(self, result: Value) -> EpilogueFusion:
        """The epilogue of a node whose result [batch, channels, position ...] is computed channel by channel, as
        [channels, batch, positions]."""
        fusion = self._by_channel(result)
        fusion.follow(result)
        return fusion

    def _by_channel(self, result: Value) -> EpilogueFusion:
        batch, channels, *places = result.type.shape
        fusion = self._fusion((channels, batch, prod(places)))
        fusion.by_channel = True
        fusion.swaps = batch > 1
        return fusion

    def no_epilogue(self, result: Value, width: int) -> EpilogueFusion:
        """An empty epilogue for results that are matrices with rows of `width` elements."""
        return self._fusion((result.type.elements // width if width else 0, width))

    def elementwise(self, node: Node, by_channel: bool = False) -> EpilogueFusion | None:
        """An elementwise node with its epilogue; None if it cannot be lowered. Operands that have no view by channel,
        such as a result that ranks have gathered, are read in the order of the shape."""
        fusion = self._by_channel(node.result) if by_channel else self._fusion(node.result.type.shape)
        if not fusion.start(node):
            return self.elementwise(node) if by_channel else None
        fusion.follow(node.result)
        return fusion

    def _fusion(self, shape: tuple[int, ...]) -> EpilogueFusion:
        return EpilogueFusion(shape, self._places, self._readers, self._all_reduces, self._deferred)

    def _all_reduces(self, node: Node, shape: tuple[int, ...]) -> bool:
        """True if an all-reduce tile by tile is cheaper than a single one of the whole result in HBM."""
        rows, width = prod(shape[:-1]), shape[-1] if shape else 1
        degree = node.op.degree if isinstance(node.op, AllReduce) else 0
        dtype = node.result.type.dtype.on_device
        return (
            degree == self._ranks
            and rows * width > 0
            and piecewise_is_cheaper(self._kernel.core, self._ranks, rows, width, dtype)
        )

    # Matmuls

    def matmuls_of(self, rows: Value, result: Value) -> list[Node]:
        """Matmuls of `rows` with one weight each that can share the kernel of `result`: they are in the same region,
        and their other operands are in HBM."""
        return [
            node
            for node in self._readers.readers_in_region_of(rows, result)
            if self.is_due(node)
            and all(operand == rows or operand in self._places.views for operand in node.operands)
            and has_one_weight(node)
            and node.operands[0] == rows
            and rows not in node.operands[1:]
        ]

    def is_cast_by_matmuls(self, node: Node) -> bool:
        """True for a cast to a shorter float type whose result only matmuls read, as rows: DMA rounds as it loads them.
        One-byte types are not, because their rows are loaded in another type to be transposed."""
        source, target = node.operands[0].type.dtype, node.result.type.dtype
        shortens = source.is_float and target.is_float and source.itemsize > target.itemsize > 1
        if not (isinstance(node.op, Cast) and shortens) or node.result in self._places.homes:
            return False
        matmuls = self.matmuls_of(node.result, node.result)
        return bool(matmuls) and not self.is_needed(node.result, matmuls)

    def common_epilogue(self, nodes: Sequence[Node]) -> EpilogueFusion | None:
        """The epilogue of several matmuls, if their results have equal width and one fused node depends on all of
        them."""
        if len({node.result.type.shape[-1] for node in nodes}) > 1:
            return None
        fusion = self.no_epilogue(nodes[0].result, nodes[0].result.type.shape[-1])
        for node in nodes:
            fusion.follow(node.result)
        return fusion if fusion.combines([node.result for node in nodes]) else None

    def reduce_scatter_of(self, node: Node) -> Node | None:
        """The reduce-scatter of a matmul's partial results, if it can run tile by tile: a run of all ranks' rows must
        fit half of SBUF, which leaves the other half for weights and epilogue."""
        scatter = self.only_reader(node.result)
        if scatter is None or not isinstance(scatter.op, ReduceScatter) or self.row_sharding(scatter) is None:
            return None
        x = node.operands[0].type
        nbytes = chunks_of(x.shape[-1]) * PARTITIONS * self._ranks * x.dtype.on_device.itemsize
        return scatter if 0 < 2 * nbytes <= self._kernel.free_bytes(Memory.SBUF) else None

    def row_sharding(self, node: Node) -> RowSharding | None:
        """The row sharding of a collective, if ranks have equal shares of rows that fill whole sets of 128
        partitions."""
        op = node.op
        if not isinstance(op, AllGather | ReduceScatter) or op.degree != self._ranks:
            return None
        if op.axis != node.result.type.rank - 2:
            return None
        even = op.parts == (op.degree,) and not op.slots
        fills = op.local > 0 == PARTITIONS % op.local == op.outer * op.local % PARTITIONS
        return RowSharding(op.degree, op.local) if even and fills else None

    def gathered_matmuls(self, gather: Node, result: Value) -> list[Node]:
        """The matmuls that read an all-gather's result, if it has no other readers and they can share the kernel of
        `result`. A reduce-scatter of their results must use the same row sharding."""
        sharding = self.row_sharding(gather) if isinstance(gather.op, AllGather) else None
        if sharding is None:
            return []
        readers = self.matmuls_of(gather.result, result)
        scatters = [scatter for reader in readers if (scatter := self.reduce_scatter_of(reader)) is not None]
        same_sharding = all(self.row_sharding(scatter) == sharding for scatter in scatters)
        return readers if same_sharding and not self.is_needed(gather.result, readers) else []

    def consumers(self, epilogue: EpilogueFusion, result: Value, width: int) -> Consumers:
        """The value among a kernel's rows that most matmuls read, with these matmuls."""
        values = [value for value in epilogue.known if value.type.shape[-1:] == (width,)]
        return max(
            (candidate for value in values for candidate in self._consumers(value, result)),
            key=lambda candidate: len(candidate.matmuls),
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
