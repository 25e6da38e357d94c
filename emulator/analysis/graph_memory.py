"""Graph memory: an estimate of a model's memory on a NeuronCore, from graphs without weights, and a core's capacity.

Weights and states are exact; a weight that matmuls and other nodes read is stored twice. Each intermediate value counts
in HBM for its whole live range, although the compiler keeps many in SBUF; a few layout copies are not counted. Views,
and weights that are only cast when they are loaded, need no memory. `analysis.program_memory` measures a compiled
program.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from nxpipe.emulator.hardware import Instance
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.lower.parameters import stored_parameters
from nxpipe.emulator.ops import (
    Binary,
    Broadcast,
    Cast,
    IndexUpdate,
    Reshape,
    Slice,
    SliceUpdate,
    Transpose,
    Unary,
    Where,
)
from nxpipe.emulator.passes.shard import NO_PADDING, Padding, ShardPlan, divide, padding, worst

_VIEWS: Final = (Reshape, Broadcast, Slice, Transpose)
_UPDATES: Final = (SliceUpdate, IndexUpdate)
_IN_PLACE: Final = (Unary, Binary, Where, Cast)

Size: TypeAlias = Callable[[Value], int]  # bytes of a value on one rank


def capacity(target: Instance) -> int:
    """Bytes of HBM behind one logical core."""
    return target.core_memory


def code_bytes(target: Instance) -> int:
    """Bytes that programs' code takes on one logical core."""
    return target.core_code


def data_capacity(target: Instance) -> int:
    """Bytes of HBM on one logical core for programs' data: weights, states and scratch."""
    return capacity(target) - code_bytes(target)


@dataclass(frozen=True)
class GraphMemory:
    """Bytes that all programs of a model together need on each logical core, at one tensor-parallel degree."""

    degree: int
    weights: int
    state: int
    constants: int
    interface: int
    activations: int
    padding: Padding = NO_PADDING

    @property
    def data(self) -> int:
        return self.weights + self.state + self.constants + self.interface + self.activations

    def on(self, target: Instance) -> int:
        """Total bytes including code, whose size depends on the target."""
        return self.data + code_bytes(target)


def footprints(
    programs: Sequence[Graph], degrees: Sequence[int], published: Mapping[str, str] | None = None
) -> tuple[list[GraphMemory], dict[int, str]]:
    """The memory at each possible degree, and the reason for each impossible degree."""
    estimates, impossible = [], {}
    divided = programs if max(degrees, default=1) > 1 else ()
    divisions = {graph: divide(_first_iteration(graph), published) for graph in divided}
    for degree in degrees:
        plans = {graph: division.plan(degree) for graph, division in divisions.items() if degree > 1}
        reasons = [str(plan.refusal) for plan in plans.values() if plan.refusal]
        if reasons:
            impossible[degree] = reasons[0]
        else:
            sizes = {graph: _size_on_rank(graph, plans[graph]) if plans else _whole for graph in programs}
            largest_padding = worst(padding(graph, plan) for graph, plan in plans.items())
            estimates.append(replace(footprint(degree, sizes), padding=largest_padding))
    return estimates, impossible


def footprint(degree: int, sizes: Mapping[Graph, Size]) -> GraphMemory:
    """The memory of several programs: shared weights and states, and the scratch of the largest program, because only
    one program runs at a time."""
    weights: dict[str, int] = {}
    state: dict[str, int] = {}
    constants = interface = activations = 0
    for graph, size in sizes.items():
        weights |= {name: size(value) for name, value in graph.parameters.items()}
        stored = stored_parameters(graph)
        twice = {name: value for name, value in graph.parameters.items() if len(stored[value].all) > 1}
        weights |= {f"{name} in tiles": size(value) for name, value in twice.items()}
        state |= {name: max(state.get(name, 0), size(value)) for name, value in states(graph).items()}
        constants += sum(value.type.nbytes for value in graph.constants)
        interface = max(interface, _interface_bytes(graph))
        activations = max(activations, peak_bytes(graph, size))
    return GraphMemory(degree, sum(weights.values()), sum(state.values()), constants, interface, activations)


def _whole(value: Value) -> int:
    return value.type.nbytes


def _first_iteration(graph: Graph) -> Graph:
    """The graph of the first iteration of each repeat: all layers are sharded like the first."""
    inside = {value: first for repeat in graph.repeats for first, value in _counterparts(repeat.given)}
    later = {value for repeat in graph.repeats for row in repeat.given.values() for value in row[1:]}
    outputs = {name: inside.get(value, value) for name, value in graph.outputs.items() if value not in later}
    nodes = (replace(node, operands=tuple(inside.get(value, value) for value in node.operands)) for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes), outputs=outputs, repeats=())


def _size_on_rank(graph: Graph, plan: ShardPlan) -> Size:
    # Parameters and results of later iterations have the layout of their counterparts in the first iteration.
    counterparts = {
        value: first
        for repeat in graph.repeats
        for rows in (repeat.taken, repeat.given)
        for first, value in _counterparts(rows)
    }

    def size(value: Value) -> int:
        layout = plan.propagation.layout(counterparts.get(value, value))
        shape = value.type.shape if layout is None else layout.local(value.type.shape, plan.degree)
        return TensorType(shape, value.type.dtype).nbytes

    return size


def _counterparts(rows: Mapping[Value, tuple[Value, ...]]) -> Iterator[tuple[Value, Value]]:
    for first, row in rows.items():
        yield from ((first, value) for value in row)


def states(graph: Graph) -> dict[str, Value]:
    """The states: inputs with the name of an output, whose values are carried from one run to the next."""
    return {name: value for name, value in graph.inputs.items() if name in graph.outputs}


def _interface_bytes(graph: Graph) -> int:
    state_names = states(graph)
    interface = (*graph.inputs.items(), *graph.outputs.items())
    return sum(value.type.nbytes for name, value in interface if name not in state_names)


def peak_bytes(graph: Graph, size: Size = _whole) -> int:
    """The peak of live intermediate values in program order."""
    changes: dict[int, int] = {}
    for value, (first, last) in _lifetimes(graph).items():
        changes[first] = changes.get(first, 0) + size(value)
        changes[last + 1] = changes.get(last + 1, 0) - size(value)
    live = most = 0
    for _, change in sorted(changes.items()):
        live += change
        most = max(most, live)
    return most


def _lifetimes(graph: Graph) -> dict[Value, tuple[int, int]]:
    """The live range of each buffer. A node reads at an even time and may write at the next, odd time."""
    buffer = _buffers(graph)
    born: dict[Value, int] = {}
    for step, node in enumerate(graph.nodes):
        if buffer[node.result] == node.result:
            # An elementwise result may reuse the buffer of an operand that has no later reader.
            born[node.result] = 2 * step + isinstance(node.op, _IN_PLACE)
    for repeat in graph.repeats:
        born |= {value: 2 * repeat.stop - 1 for row in repeat.given.values() for value in row if buffer[value] == value}
    last = dict(born)
    for step, node in enumerate(graph.nodes):
        for operand in node.operands:
            if (owner := buffer[operand]) is not None:
                last[owner] = max(last[owner], 2 * step)
    for value, moment in _kept_by_repeats(graph):
        if (owner := buffer[value]) is not None:
            last[owner] = max(last[owner], moment)
    return {value: (first, last[value]) for value, first in born.items()}


def _kept_by_repeats(graph: Graph) -> Iterator[tuple[Value, int]]:
    """Values that are live until the end of an iteration because the next one reads them: loop-carried values, and
    values from before the repeat, each with that time."""
    for repeat in graph.repeats:
        end = 2 * repeat.stop - 1
        body = graph.nodes[repeat.start : repeat.stop]
        inside = {node.result for node in body}
        yield from ((value, end) for value in repeat.carried.values())
        for node in body:
            yield from ((value, end) for value in node.operands if value not in inside and value not in repeat.carried)


def _buffers(graph: Graph) -> dict[Value, Value | None]:
    """The value whose storage each value shares; None for a value without scratch."""
    buffer: dict[Value, Value | None] = dict.fromkeys(_resident(graph))
    for repeat in graph.repeats:
        for row in repeat.given.values():
            buffer |= {value: value for value in row if value not in buffer}
    for node in graph.nodes:
        if node.result not in buffer:
            buffer[node.result] = _storage(node, buffer)
    return buffer


def _resident(graph: Graph) -> Iterator[Value]:
    """Values with storage outside scratch: weights, constants and the interface of a program."""
    ends = set(graph.outputs.values())
    yield from (*graph.inputs.values(), *graph.parameters.values(), *graph.constants, *ends)
    for repeat in graph.repeats:
        yield from (value for value, row in repeat.given.items() if ends.intersection(row))


def _storage(node: Node, buffer: Mapping[Value, Value | None]) -> Value | None:
    """The storage of a result. Views, updated states and weights cast on load share their operand's storage."""
    if not node.operands:
        return node.result
    source = buffer[node.operands[0]]
    shares = isinstance(node.op, _VIEWS) or (source is None and isinstance(node.op, (Cast, *_UPDATES)))
    return source if shares else node.result
