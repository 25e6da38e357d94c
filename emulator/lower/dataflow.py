"""Dataflow analysis of a graph: the readers of each value, and the last of them."""

from collections.abc import Set
from typing import Final

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.lower.elementwise import is_exact
from nxpipe.emulator.ops import (
    Bitcast,
    Broadcast,
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
    """The nodes that read each value, by the region of the program in which they run."""

    def __init__(self, graph: Graph) -> None:
        self._readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for operand in node.operands:
                self._readers.setdefault(operand, []).append(node)
        self._kept = _kept(graph)
        self._stretches = _stretches(graph)

    def behind(self, value: Value) -> list[Node]:
        """The readers that run as often as the value is computed."""
        return self.beside(value, value)

    def beside(self, value: Value, result: Value) -> list[Node]:
        """The readers of a value that run as often as another result is computed."""
        stretch = self._stretches[result]
        return [node for node in self._readers.get(value, ()) if self._stretches[node.result] == stretch]

    def only(self, value: Value) -> Node | None:
        """The one node that reads a value, if it runs as often and nothing else needs the value."""
        reading = self._readers.get(value, [])
        return reading[0] if len(reading) == 1 and value not in self._kept and self.behind(value) else None

    def is_needed(self, value: Value, done: Set[Value]) -> bool:
        """True if a node other than those that compute `done` reads the value from HBM."""
        reading = self._readers.get(value)
        return value in self._kept or not reading or any(node.result not in done for node in reading)


def _kept(graph: Graph) -> set[Value]:
    """Values that are needed beyond their readers: outputs, loop-carried values, values that cross a repeat's
    border."""
    kept = set(graph.outputs.values())
    for repeat in graph.repeats:
        kept.update(repeat.carried, repeat.carried.values(), repeat.given)
        inside = {node.result for node in graph.nodes[repeat.start : repeat.stop]}
        after = graph.nodes[repeat.stop :]
        kept.update(operand for node in after for operand in node.operands if operand in inside)
        # Nothing from before a loop ends inside of it: there it would be done anew in each turn.
        body = graph.nodes[repeat.start : repeat.stop]
        kept.update(operand for node in body for operand in node.operands if operand not in inside)
    return kept


def _stretches(graph: Graph) -> dict[Value, int]:
    """The region of the program in which each node's result is computed: before, in, between or after repeats."""
    ends = [end for repeat in graph.repeats for end in (repeat.start, repeat.stop)]
    return {node.result: sum(end <= position for end in ends) for position, node in enumerate(graph.nodes)}


_VIEWS = (Bitcast, Broadcast, Flip, RankSlice, Reshape, Slice, Transposed)  # these may be read where their operand lies
UPDATES: Final = (IndexUpdate, ScatterAlong, SliceUpdate)


class Liveness:
    """The last reader of each value. A value without later readers can be updated in place, as KV caches are."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._position = {node.result: number for number, node in enumerate(graph.nodes)}
        self._maker = {node.result: node for node in graph.nodes}
        self._readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for operand in node.operands:
                self._readers.setdefault(operand, []).append(node)
        self._outputs = set(graph.outputs.values())
        self._fixed = set(self._outputs)  # what is needed beyond the nodes that read it
        self._loop_of: dict[Value, int] = {}
        self._of_turns: dict[Value, int] = {}  # what stands for another tensor in each turn of a loop
        self._inside: dict[Value, Value] = {}  # what a value is called in the loop that it comes from or goes into
        for number, repeat in enumerate(graph.repeats):
            self._fixed.update(repeat.carried, repeat.carried.values(), repeat.given)
            self._loop_of |= {node.result: number for node in graph.nodes[repeat.start : repeat.stop]}
            for first, later in repeat.taken.items():
                self._inside |= dict.fromkeys(later, first)
                if not any(value in self._readers or value in self._outputs for value in later):
                    self._of_turns[first] = number
            for value, row in repeat.given.items():
                self._inside |= dict.fromkeys(row, value)

    def is_last(self, value: Value, node: Node) -> bool:
        """True if neither the value nor a view of it is read after this node."""
        at = self._position[node.result]
        waiting, seen = [value], {value}
        while waiting:
            each = waiting.pop()
            if each in self._fixed or not self._is_local(each, node):
                return False
            for reader in self._readers.get(each, ()):
                if self._position[reader.result] > at:
                    return False
                if (
                    (isinstance(reader.op, _VIEWS) or is_exact(reader))
                    and reader.operands[0] == each
                    and reader.result not in seen
                ):
                    seen.add(reader.result)
                    waiting.append(reader.result)
        return True

    def _is_local(self, value: Value, node: Node) -> bool:
        """True if each iteration of the loop around the node has a value of its own."""
        loop = self._loop_of.get(node.result)
        return loop is None or self._loop_of.get(value, self._of_turns.get(value)) == loop

    def ends_in_place(self, value: Value, state: Value) -> bool:
        """True if a value results from a state by updates alone, each of which is the last reader of its operand."""
        at, start = self._inside.get(value, value), self._inside.get(state, state)
        while at != start:
            node = self._maker.get(at)
            if node is None or not isinstance(node.op, UPDATES) or not self.is_last(node.operands[0], node):
                return False
            at = node.operands[0]
        return True
