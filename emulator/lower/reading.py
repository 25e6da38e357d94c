"""Who reads a value, and whether anybody but certain nodes does."""

from collections.abc import Set

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value


class Reading:
    def __init__(self, graph: Graph) -> None:
        self._readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for operand in node.operands:
                self._readers.setdefault(operand, []).append(node)
        self._kept = _kept(graph)
        self._stretches = _stretches(graph)

    def behind(self, value: Value) -> list[Node]:
        """The readers that are carried out as often as the value is made."""
        return self.beside(value, value)

    def beside(self, value: Value, result: Value) -> list[Node]:
        """The readers that are carried out as often as the result of a node is made."""
        stretch = self._stretches[result]
        return [node for node in self._readers.get(value, ()) if self._stretches[node.result] == stretch]

    def only(self, value: Value) -> Node | None:
        """The one node behind a value that reads it, if nobody else does."""
        reading = self._readers.get(value, [])
        return reading[0] if len(reading) == 1 and value not in self._kept and self.behind(value) else None

    def is_needed(self, value: Value, done: Set[Value]) -> bool:
        """Whether others than the makers of these results want to find a value in HBM."""
        reading = self._readers.get(value)
        return value in self._kept or not reading or any(node.result not in done for node in reading)


def _kept(graph: Graph) -> set[Value]:
    """The values that are needed beyond the nodes that read them."""
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
    """For each node's result which stretch of the program it is made in: before, in, between or behind repeats."""
    ends = [end for repeat in graph.repeats for end in (repeat.start, repeat.stop)]
    return {node.result: sum(end <= position for end in ends) for position, node in enumerate(graph.nodes)}
