"""Who reads a value last: what nobody reads any more may be changed where it lies, as caches of keys and values are."""

from typing import Final

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.lower.elements import is_exact
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

_VIEWS = (Bitcast, Broadcast, Flip, RankSlice, Reshape, Slice, Transposed)  # these may be read where their operand lies
UPDATES: Final = (IndexUpdate, ScatterAlong, SliceUpdate)


class Lifetimes:
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
        """Whether neither the value nor a view of it is read after this node."""
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
        """Whether a turn of the loop around the node finds a value of its own."""
        loop = self._loop_of.get(node.result)
        return loop is None or self._loop_of.get(value, self._of_turns.get(value)) == loop

    def ends_in_place(self, value: Value, state: Value) -> bool:
        """Whether a value is what updates alone make of a state, each the last to read what was before."""
        at, start = self._inside.get(value, value), self._inside.get(state, state)
        while at != start:
            node = self._maker.get(at)
            if node is None or not isinstance(node.op, UPDATES) or not self.is_last(node.operands[0], node):
                return False
            at = node.operands[0]
        return True
