"""The graph: a small SSA program of typed tensors, its identity and its normal form.

Inputs, parameters and outputs are named, because they are the interface to the outside; the values between are
numbered, and the numbers mean nothing beyond one graph.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from nxpipe.emulator.ir.encoding import encode
from nxpipe.emulator.ir.nodes import NOWHERE, Node, Repeat, Value
from nxpipe.emulator.ir.printing import text
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.numerics import Array


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
        """The canonical bytes, provenance included; `ir.encoding` specifies them, `ir.decoding` reads them."""
        return encode(renumber(self))

    @cached_property
    def key(self) -> str:
        """The SHA-256 of the computation: without provenance, numbering, node order, dead code and repeats."""
        return hashlib.sha256(encode(normal_form(unroll(self)))).hexdigest()

    def __str__(self) -> str:
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
