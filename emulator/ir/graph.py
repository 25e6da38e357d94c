"""The graph: a small SSA program of typed tensors, its identity and its normal form.

Inputs, parameters and outputs are named, because they are the interface to the outside; the values between are
numbered, and the numbers mean nothing beyond one graph.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from nxpipe.emulator.ir.encoding import encode
from nxpipe.emulator.ir.nodes import NOWHERE, Node, Repeat, Value
from nxpipe.emulator.ir.repeat import series_of, taken_series, unroll
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Attribute, attributes


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


# Attributes that the line's label and type show already.
_SHOWN_ELSEWHERE = ("dtype", "function", "out", "shape")


def text(graph: "Graph") -> str:
    """The whole graph; scalars are written where they are used, larger constants are listed first."""
    names = _names(graph)
    constants = [f"  {names[value]}: {value.type} = constant" for value in graph.constants if value.type.rank]
    nodes = list(_node_lines(graph, names))
    return "\n".join([f"graph({_inputs(graph)})", *constants, *nodes, f"return {_outputs(graph, names)}"])


def _inputs(graph: "Graph") -> str:
    named = {value: name for name, value in graph.inputs.items()}
    hidden: set[Value] = set()
    for repeat in graph.repeats:
        for first, series in taken_series(graph, repeat).items():
            if first in named:
                named[first] = series.text(repeat.count)
                hidden.update(repeat.taken[first])
    return ", ".join(f"{name}: {value.type}" for value, name in named.items() if value not in hidden)


def _outputs(graph: "Graph", names: Mapping[Value, str]) -> str:
    """Outputs that a repeat gives, one for each iteration, are one entry if their names are a series."""
    called: dict[Value, list[str]] = {}
    for name, value in graph.outputs.items():
        called.setdefault(value, []).append(name)
    entries = {name: f"{name}={names[value]}" for name, value in graph.outputs.items()}
    for each in (each for repeat in graph.repeats for each in repeat.given.values()):
        if all(len(called.get(value, ())) == 1 for value in each):
            listed = [called[value][0] for value in each]
            series = series_of(listed)
            if series:
                entries[listed[0]] = f"{series.text(len(each))}={names[each[0]].removesuffix('.0')}"
                for name in listed[1:]:
                    del entries[name]
    return ", ".join(entries.values())


def _names(graph: "Graph") -> dict[Value, str]:
    names = {value: name for name, value in graph.inputs.items()}
    names |= {value: f"w:{name}" for name, value in graph.parameters.items()}
    tables = [value for value in graph.constants if value.type.rank]
    names |= {value: f"c{number}" for number, value in enumerate(tables)}
    names |= {value: _scalar(data) for value, data in graph.constants.items() if not value.type.rank}
    names |= {node.result: f"%{number}" for number, node in enumerate(graph.nodes)}
    for repeat in graph.repeats:
        for value, each in repeat.given.items():
            names |= {one: f"{names[value]}.{iteration}" for iteration, one in enumerate(each)}
    return names


def _scalar(data: Array) -> str:
    # The shortest digits that name this very float32, not its float64 expansion.
    return str(data[()])


def _node_lines(graph: "Graph", names: Mapping[Value, str]) -> Iterator[str]:
    position = 0
    for repeat in graph.repeats:
        yield from _lines(graph.nodes[position : repeat.start], names, "  ")
        yield f"  repeat {repeat.count} times{_carried(repeat, names)}:"
        taken = {value: series.text(repeat.count) for value, series in taken_series(graph, repeat).items()}
        weights = {value: f"w:{name}" if names[value].startswith("w:") else name for value, name in taken.items()}
        yield from _lines(graph.nodes[repeat.start : repeat.stop], {**names, **weights}, "    ")
        position = repeat.stop
    yield from _lines(graph.nodes[position:], names, "  ")


def _carried(repeat: Repeat, names: Mapping[Value, str]) -> str:
    carried = ", ".join(f"{names[entry]} becomes {names[leaving]}" for entry, leaving in repeat.carried.items())
    return f", {carried}" if carried else ""


def _lines(nodes: Sequence[Node], names: Mapping[Value, str], margin: str) -> Iterator[str]:
    for node in nodes:
        arguments = ", ".join(_arguments(node, names))
        line = f"{margin}{names[node.result]}: {node.result.type} = {node.op.label}({arguments})"
        yield f"{line}  # {node.origin}" if str(node.origin) else line


def _arguments(node: Node, names: Mapping[Value, str]) -> Iterator[str]:
    yield from (names[operand] for operand in node.operands)
    for name, attribute in attributes(node.op).items():
        if name not in _SHOWN_ELSEWHERE:
            yield f"{name}={_attribute(attribute)}"


def _attribute(attribute: Attribute) -> str:
    return f"[{','.join(map(str, attribute))}]" if isinstance(attribute, tuple) else str(attribute)
