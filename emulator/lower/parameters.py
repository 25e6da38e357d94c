"""Parameter layout: the work on weights that the host does once, when it loads the program.

That is a cast, another order of axes, and a rank's slice. A weight that only linear layers or convolutions read is
stored with its input axis first, because the tensor engine contracts over partitions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import Cast, Convolution, Linear, RankSlice


@dataclass(frozen=True)
class StoredParameter:
    """The stored form of a parameter, or of a value that the host computes of one. `order` names for each stored axis
    the axis of the value."""

    parameter: Value
    dtype: DType
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def seen(self, lies: View) -> View:
        """The view of the value in its own order of axes."""
        if not self.order:
            return lies
        back = tuple(self.order.index(axis) for axis in range(len(self.order)))
        return lies.transposed(back)


def stored_parameters(graph: Graph) -> Mapping[Value, StoredParameter]:
    """The stored form of each parameter and of each value that the host computes of it."""
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for operand in node.operands:
            readers.setdefault(operand, []).append(node)
    found: dict[Value, StoredParameter] = {}
    for value in graph.parameters.values():
        chain = [value]
        while (following := _host_work(chain[-1], readers, graph)) is not None:
            chain.append(following.result)
        last = chain[-1]
        order = _order(last, readers.get(last, []))
        shape = tuple(last.type.shape[axis] for axis in order) if order else last.type.shape
        for each in chain:
            found[each] = StoredParameter(value, last.type.dtype, shape, order)
    return found


def sliced_parameters(graph: Graph) -> Mapping[str, RankSlice]:
    """The parameters of which each rank loads a slice, by name."""
    names = {value: name for name, value in graph.parameters.items()}
    stored = stored_parameters(graph)
    slices = (
        (node.op, node.result) for node in graph.nodes if isinstance(node.op, RankSlice) and node.result in stored
    )
    return {names[stored[result].parameter]: op for op, result in slices}


def _host_work(value: Value, readers: Mapping[Value, list[Node]], graph: Graph) -> Node | None:
    """The one reader of a value, if the host can do its work."""
    reading = readers.get(value, [])
    if len(reading) != 1 or value in graph.outputs.values() or not isinstance(reading[0].op, Cast | RankSlice):
        return None
    if reading[0].result in graph.outputs.values():
        return None
    return reading[0] if reading[0].operands[0] == value else None


def _order(value: Value, reading: list[Node]) -> tuple[int, ...]:
    if reading and all(isinstance(node.op, Linear) and node.operands[1] == value for node in reading):
        return (1, 0)
    if reading and all(isinstance(node.op, Convolution) and node.operands[1] == value for node in reading):
        return (*range(1, value.type.rank), 0)
    return ()
