"""In which form weights lie on the device: what depends on a weight alone is done to it once, when it is loaded.

That is a cast, another order of axes, and a rank's piece of it. A weight whose only readers are linear layers, or
convolutions, lies with its inputs first, as the tensor engine wants it.
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
    """A parameter, or a value that the host makes of one, as it lies: `order` says which of the value's axes each axis
    that lies there is."""

    parameter: Value
    dtype: DType
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def seen(self, lies: View) -> View:
        """As the value's readers know it."""
        if not self.order:
            return lies
        back = tuple(self.order.index(axis) for axis in range(len(self.order)))
        return lies.transposed(back)


def stored_parameters(graph: Graph) -> Mapping[Value, StoredParameter]:
    """Of each parameter, and of what the host makes of it."""
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
    """Of which a rank loads a piece, by name, and which."""
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
