"""The intermediate representation: one small SSA graph of typed tensors.

A node applies an operator to values and defines exactly one value, so nodes and the values they define are the same
list read twice. Inputs, parameters and outputs go by name, because they are the interface to the outside; everything
between is numbered, and the numbers mean nothing beyond one graph.

Layers that repeat are stored once: a repeat marks a run of nodes as executed several times. A reader who overlooks the
marks sees a sound graph, that of the first iteration; one who counts or executes reads `emulator.repeat.unroll(graph)`.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Operator

__all__ = [
    "NOWHERE",
    "Graph",
    "Node",
    "Origin",
    "Repeat",
    "TensorType",
    "Value",
    "live_nodes",
    "normal_form",
    "renumber",
]


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor in a graph, defined once."""

    id: int
    type: TensorType


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in the user's model a node came from. It explains, and never takes part in any identity."""

    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.module, self.source) if part)


NOWHERE = Origin()


@dataclass(frozen=True, slots=True)
class Node:
    """An operator, what it is applied to, and the value that comes of it."""

    result: Value
    op: Operator
    operands: tuple[Value, ...]
    origin: Origin = NOWHERE


@dataclass(frozen=True, eq=False, slots=True)
class Repeat:
    """Nodes `start` up to `stop` run `count` times. They are written as the first iteration runs them.

    `carried`: a value from before the run, and the one computed inside that stands in its place from the second
    iteration on. `taken`: a parameter or an input of the first iteration, and its counterparts in the later ones.
    `given`: a value computed inside, and names for what it was in each iteration. Seen from after the run, a value
    computed inside is what the last iteration made of it.
    """

    start: int
    stop: int
    count: int
    carried: Mapping[Value, Value]
    taken: Mapping[Value, tuple[Value, ...]]
    given: Mapping[Value, tuple[Value, ...]]


@dataclass(frozen=True, eq=False)
class Graph:
    """A program over tensors: nodes in an order in which they can run.

    `parameters` are the model's weights by their names in its checkpoint; the graph knows their types, never their
    numbers. `constants` are small tables that the model computes for itself, and their numbers are part of the graph.
    `inputs`, `parameters` and `outputs` name everything, those of each iteration of a repeat too.
    """

    inputs: Mapping[str, Value]
    parameters: Mapping[str, Value]
    constants: Mapping[Value, Array] = field(repr=False)
    nodes: tuple[Node, ...]
    outputs: Mapping[str, Value]
    repeats: tuple[Repeat, ...] = ()

    def to_bytes(self) -> bytes:
        """The canonical bytes, provenance included; docs in `emulator.encoding`."""
        from nxpipe.emulator.ir.encoding import encode

        return encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> "Graph":
        """The graph that `to_bytes` wrote; anything else is GraphInvalid."""
        from nxpipe.emulator.ir.encoding import decode

        return decode(data)

    @cached_property
    def key(self) -> str:
        """The SHA-256 of what this graph computes: free of provenance, numbering, node order, dead code and repeats."""
        from nxpipe.emulator.ir.encoding import encode
        from nxpipe.emulator.ir.repeat import unroll

        return hashlib.sha256(encode(normal_form(unroll(self)))).hexdigest()

    def __str__(self) -> str:
        from nxpipe.emulator.ir.printing import text

        return text(self)


def live_nodes(graph: Graph) -> Iterator[Node]:
    """The nodes that outputs depend on, each after its operands, in the one order that the outputs dictate.

    For unrolled graphs: a repeat fixes the place of its nodes.
    """
    defined_by = {node.result: node for node in graph.nodes}
    seen: set[Value] = set()
    stack: list[tuple[Value, bool]] = [(value, False) for value in reversed(list(graph.outputs.values()))]
    while stack:
        value, operands_done = stack.pop()
        node = defined_by.get(value)
        if node is None or (value in seen and not operands_done):
            continue
        if operands_done:
            yield node
            continue
        seen.add(value)
        stack.append((value, True))
        stack.extend((operand, False) for operand in reversed(node.operands))


def normal_form(graph: Graph) -> Graph:
    """The same computation without provenance, with live nodes only, in canonical order, numbered from zero."""
    nodes = tuple(live_nodes(graph))
    used = dict.fromkeys(value for node in nodes for value in node.operands)
    used |= dict.fromkeys(graph.outputs.values())
    name_of = {value: name for name, value in graph.parameters.items()}
    parameters = {name_of[value]: value for value in used if value in name_of}
    constants = {value: graph.constants[value] for value in used if value in graph.constants}
    bare = tuple(replace(node, origin=NOWHERE) for node in nodes)
    return renumber(Graph(graph.inputs, parameters, constants, bare, graph.outputs))


def renumber(graph: Graph) -> Graph:
    """The same graph, its values numbered in order of appearance: inputs, parameters, constants, nodes.

    What a repeat gives appears right after its last node.
    """
    appearing = [*graph.inputs.values(), *graph.parameters.values(), *graph.constants]
    position = 0
    for repeat in graph.repeats:
        appearing += [node.result for node in graph.nodes[position : repeat.stop]]
        appearing += [value for row in repeat.given.values() for value in row]
        position = repeat.stop
    appearing += [node.result for node in graph.nodes[position:]]
    new = {value: Value(number, value.type) for number, value in enumerate(appearing)}
    return Graph(
        {name: new[value] for name, value in graph.inputs.items()},
        {name: new[value] for name, value in graph.parameters.items()},
        {new[value]: data for value, data in graph.constants.items()},
        tuple(
            Node(new[node.result], node.op, tuple(new[operand] for operand in node.operands), node.origin)
            for node in graph.nodes
        ),
        {name: new[value] for name, value in graph.outputs.items()},
        tuple(_renumber_repeat(repeat, new) for repeat in graph.repeats),
    )


def _renumber_repeat(repeat: Repeat, new: Mapping[Value, Value]) -> Repeat:
    return replace(
        repeat,
        carried={new[entry]: new[leaving] for entry, leaving in repeat.carried.items()},
        taken={new[first]: tuple(new[value] for value in later) for first, later in repeat.taken.items()},
        given={new[value]: tuple(new[one] for one in each) for value, each in repeat.given.items()},
    )
