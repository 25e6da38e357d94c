"""Elementwise nodes that are better done later: what alone reads them waits for something else, and can do them as it
goes. So their results need not be stored in between."""

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.lower.elements import is_applicable, is_exact
from nxpipe.emulator.lower.lifetimes import UPDATES
from nxpipe.emulator.lower.places import Places
from nxpipe.emulator.lower.reading import Reading


class Waiting:
    """`nodes` are those put off, by their results."""

    def __init__(self, graph: Graph, places: Places, reading: Reading) -> None:
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
