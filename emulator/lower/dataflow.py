"""Dataflow analysis of a graph: the readers of each value, and its last reader (liveness)."""

from collections.abc import Set
from typing import Final

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ops import (
    Bitcast,
    Broadcast,
    Cast,
    Flip,
    IndexUpdate,
    RankSlice,
    Reshape,
    ScatterAlong,
    Slice,
    SliceUpdate,
)
from nxpipe.emulator.ops import Transpose as Transposed


class ValueReaders:
    """The nodes that read each value.

    A repeat's body is a region of its own, as is each run of nodes between repeats. Nodes of one region run equally
    often; only such nodes can share a kernel.
    """

    def __init__(self, graph: Graph) -> None:
        self._readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for operand in node.operands:
                self._readers.setdefault(operand, []).append(node)
        self._required = _required(graph)
        self._regions = _regions(graph)

    def local_readers(self, value: Value) -> list[Node]:
        """The readers in the region that computes the value."""
        return self.readers_in_region_of(value, value)

    def readers_in_region_of(self, value: Value, result: Value) -> list[Node]:
        """The readers of a value in the region that computes `result`."""
        region = self._regions[result]
        return [node for node in self._readers.get(value, ()) if self._regions[node.result] == region]

    def only_reader(self, value: Value) -> Node | None:
        """The only reader of a value, if it is in the same region and the value is no output; otherwise None."""
        readers = self._readers.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self._required and self.local_readers(value) else None

    def is_needed(self, value: Value, done: Set[Value]) -> bool:
        """True if a node whose result is not in `done` reads the value from HBM."""
        readers = self._readers.get(value)
        return value in self._required or not readers or any(node.result not in done for node in readers)


def _required(graph: Graph) -> set[Value]:
    """Values that must be in HBM in addition to their readers: outputs, loop-carried values, values that cross the
    border of a repeat."""
    kept = set(graph.outputs.values())
    for repeat in graph.repeats:
        kept.update(repeat.carried, repeat.carried.values(), repeat.given)
        inside = {node.result for node in graph.nodes[repeat.start : repeat.stop]}
        after = graph.nodes[repeat.stop :]
        kept.update(operand for node in after for operand in node.operands if operand in inside)
        # A node before the loop must not join a kernel inside, where every iteration would compute it again.
        body = graph.nodes[repeat.start : repeat.stop]
        kept.update(operand for node in body for operand in node.operands if operand not in inside)
    return kept


def _regions(graph: Graph) -> dict[Value, int]:
    """The number of the region that computes each node's result: before, in, between or after repeats."""
    ends = [end for repeat in graph.repeats for end in (repeat.start, repeat.stop)]
    return {node.result: sum(end <= position for end in ends) for position, node in enumerate(graph.nodes)}


# Operators whose result may be a view of the operand's buffer.
_VIEWS = (Bitcast, Broadcast, Cast, Flip, RankSlice, Reshape, Slice, Transposed)
UPDATES: Final = (IndexUpdate, ScatterAlong, SliceUpdate)


class Liveness:
    """The last reader of each value. A value without later readers can be updated in place, as KV caches are.

    A value is live as long as it, or a result that may be a view of its buffer, has a reader. The analysis assumes that
    every operator in `_VIEWS` returns a view, so that it may overestimate live ranges but never underestimates them.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._position = {node.result: number for number, node in enumerate(graph.nodes)}
        self._producer = {node.result: node for node in graph.nodes}
        self._readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for operand in node.operands:
                self._readers.setdefault(operand, []).append(node)
        self._outputs = set(graph.outputs.values())
        self._fixed = set(self._outputs)  # values that stay live after their readers
        self._loop_of: dict[Value, int] = {}
        self._per_iteration: dict[Value, int] = {}  # values bound to another tensor in each iteration of a loop
        self._body_value: dict[Value, Value] = {}  # the value of the loop body for each value that enters or leaves it
        for number, repeat in enumerate(graph.repeats):
            self._fixed.update(repeat.carried, repeat.carried.values(), repeat.given)
            self._loop_of |= {node.result: number for node in graph.nodes[repeat.start : repeat.stop]}
            for first, later in repeat.taken.items():
                self._body_value |= dict.fromkeys(later, first)
                if not any(value in self._readers or value in self._outputs for value in later):
                    self._per_iteration[first] = number
            for value, row in repeat.given.items():
                self._body_value |= dict.fromkeys(row, value)

    def is_last(self, value: Value, node: Node) -> bool:
        """True if neither the value nor a view of it is read after this node."""
        position = self._position[node.result]
        pending, visited = [value], {value}
        while pending:
            alias = pending.pop()
            if alias in self._fixed or not self._is_local(alias, node):
                return False
            for reader in self._readers.get(alias, ()):
                if self._position[reader.result] > position:
                    return False
                if isinstance(reader.op, _VIEWS) and reader.operands[0] == alias and reader.result not in visited:
                    visited.add(reader.result)
                    pending.append(reader.result)
        return True

    def _is_local(self, value: Value, node: Node) -> bool:
        """True if the value is another tensor in each iteration of the node's loop, so that an update cannot reach the
        next iteration."""
        loop = self._loop_of.get(node.result)
        return loop is None or self._loop_of.get(value, self._per_iteration.get(value)) == loop

    def ends_in_place(self, value: Value, state: Value) -> bool:
        """True if only updates lead from a state to a value, and each update is the last reader of its operand."""
        current, start = self._body_value.get(value, value), self._body_value.get(state, state)
        while current != start:
            node = self._producer.get(current)
            if node is None or not isinstance(node.op, UPDATES) or not self.is_last(node.operands[0], node):
                return False
            current = node.operands[0]
        return True
