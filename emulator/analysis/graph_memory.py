"""What a program takes of a core's memory, and what a core has: who fits where, without a weight being loaded.

This is told from graphs, before any program is written. Weights and states are those that the program will have. An
intermediate value is counted in HBM for as long as it lives, although the compiler will keep many in SBUF; and a few
copies that it will make to have elements in another order are not counted. `emulator.footprint` counts a program.
Views, and weights that are only cast on their way into an engine, take nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from nxpipe.emulator.hardware import CORES, Instance
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import TensorType
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

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
CODE_PER_PHYSICAL_CORE: Final = 96 * _MIB  # instructions and their rings, by the runtime's documentation

_VIEWS: Final = (Reshape, Broadcast, Slice, Transpose)
_UPDATES: Final = (SliceUpdate, IndexUpdate)
_IN_PLACE: Final = (Unary, Binary, Where, Cast)

Size: TypeAlias = Callable[[Value], int]  # bytes of a value on one rank


def capacity(target: Instance) -> int:
    """Bytes of HBM behind one logical core."""
    return target.device_memory_gib * _GIB // target.logical_cores


def code_bytes(target: Instance) -> int:
    """What programs themselves take on one logical core."""
    return CODE_PER_PHYSICAL_CORE * CORES[target.core].lnc_default


def room(target: Instance) -> int:
    """Bytes that one logical core has for what programs work on: weights, states and scratch."""
    return capacity(target) - code_bytes(target)


@dataclass(frozen=True)
class GraphMemory:
    """Bytes that all programs of a model together take on each logical core, at one tensor-parallel degree."""

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
        """With the code, whose size is the target's."""
        return self.data + code_bytes(target)


def footprints(
    programs: Sequence[Graph], degrees: Sequence[int], published: Mapping[str, str] | None = None
) -> tuple[list[GraphMemory], dict[int, str]]:
    """What each degree takes, by the published plan if there is one; and why the model cannot have a degree."""
    found, refused = [], {}
    several = programs if max(degrees, default=1) > 1 else ()
    divisions = {graph: divide(_first_iteration(graph), published) for graph in several}
    for degree in degrees:
        plans = {graph: division.plan(degree) for graph, division in divisions.items() if degree > 1}
        reasons = [str(plan.refusal) for plan in plans.values() if plan.refusal]
        if reasons:
            refused[degree] = reasons[0]
        else:
            sizes = {graph: _size_on_rank(graph, plans[graph]) if plans else _whole for graph in programs}
            most = worst(padding(graph, plan) for graph, plan in plans.items())
            found.append(replace(footprint(degree, sizes), padding=most))
    return found, refused


def footprint(degree: int, sizes: Mapping[Graph, Size]) -> GraphMemory:
    """Weights and state are shared by all programs; scratch is that of the largest, for one runs at a time."""
    weights: dict[str, int] = {}
    state: dict[str, int] = {}
    constants = interface = activations = 0
    for graph, size in sizes.items():
        weights |= {name: size(value) for name, value in graph.parameters.items()}
        state |= {name: max(state.get(name, 0), size(value)) for name, value in states(graph).items()}
        constants += sum(value.type.nbytes for value in graph.constants)
        interface = max(interface, _interface_bytes(graph))
        activations = max(activations, peak_bytes(graph, size))
    return GraphMemory(degree, sum(weights.values()), sum(state.values()), constants, interface, activations)


def _whole(value: Value) -> int:
    return value.type.nbytes


def _first_iteration(graph: Graph) -> Graph:
    """A graph without its repeats: how layers lie across ranks, the first tells for all."""
    inside = {value: first for repeat in graph.repeats for first, value in _counterparts(repeat.given)}
    later = {value for repeat in graph.repeats for row in repeat.given.values() for value in row[1:]}
    outputs = {name: inside.get(value, value) for name, value in graph.outputs.items() if value not in later}
    nodes = (replace(node, operands=tuple(inside.get(one, one) for one in node.operands)) for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes), outputs=outputs, repeats=())


def _size_on_rank(graph: Graph, plan: ShardPlan) -> Size:
    # What later iterations of a repeat take or give lies across ranks as its counterpart in the first does.
    alike = {
        value: first
        for repeat in graph.repeats
        for rows in (repeat.taken, repeat.given)
        for first, value in _counterparts(rows)
    }

    def size(value: Value) -> int:
        layout = plan.walk.layout(alike.get(value, value))
        shape = value.type.shape if layout is None else layout.local(value.type.shape, plan.degree)
        return TensorType(shape, value.type.dtype).nbytes

    return size


def _counterparts(rows: Mapping[Value, tuple[Value, ...]]) -> Iterator[tuple[Value, Value]]:
    for first, row in rows.items():
        yield from ((first, value) for value in row)


def states(graph: Graph) -> dict[str, Value]:
    """What is carried from one run to the next, by name: an input and an output that share one."""
    return {name: value for name, value in graph.inputs.items() if name in graph.outputs}


def _interface_bytes(graph: Graph) -> int:
    held = states(graph)
    ends = (*graph.inputs.items(), *graph.outputs.items())
    return sum(value.type.nbytes for name, value in ends if name not in held)


def peak_bytes(graph: Graph, size: Size = _whole) -> int:
    """The most that intermediate values take together, over the program's order."""
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
    """For each buffer, from when to when it is taken. A node reads at an even moment and may write at the next."""
    buffer = _buffers(graph)
    born: dict[Value, int] = {}
    for step, node in enumerate(graph.nodes):
        if buffer[node.result] == node.result:
            # An elementwise result may take the place of an operand that nobody reads any more.
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
    """What the next iteration needs lives until this one ends: results handed on, and values from before the run."""
    for repeat in graph.repeats:
        end = 2 * repeat.stop - 1
        body = graph.nodes[repeat.start : repeat.stop]
        inside = {node.result for node in body}
        yield from ((value, end) for value in repeat.carried.values())
        for node in body:
            yield from ((value, end) for value in node.operands if value not in inside and value not in repeat.carried)


def _buffers(graph: Graph) -> dict[Value, Value | None]:
    """The value in whose storage each value lies; None for what takes none of the scratch."""
    buffer: dict[Value, Value | None] = dict.fromkeys(_resident(graph))
    for repeat in graph.repeats:
        for row in repeat.given.values():
            buffer |= {value: value for value in row if value not in buffer}
    for node in graph.nodes:
        if node.result not in buffer:
            buffer[node.result] = _storage(node, buffer)
    return buffer


def _resident(graph: Graph) -> Iterator[Value]:
    """Weights, constants and the two ends of a program have storage of their own."""
    ends = set(graph.outputs.values())
    yield from (*graph.inputs.values(), *graph.parameters.values(), *graph.constants, *ends)
    for repeat in graph.repeats:
        yield from (value for value, row in repeat.given.items() if ends.intersection(row))


def _storage(node: Node, buffer: Mapping[Value, Value | None]) -> Value | None:
    """A view lies where its operand does; so does state that is updated, and a weight that is cast on its way in."""
    if not node.operands:
        return node.result
    source = buffer[node.operands[0]]
    shares = isinstance(node.op, _VIEWS) or (source is None and isinstance(node.op, (Cast, *_UPDATES)))
    return source if shares else node.result
