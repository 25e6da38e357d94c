"""The graph: an SSA program over typed tensors, with its key, normal form and text form.

Inputs, parameters and outputs form the interface and have names. Other values have numbers, which are local to a graph.
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
    """A program over tensors, with its nodes in topological order.

    `parameters` are the model's weights by their names in the checkpoint; the graph has their types, not their data.
    `constants` are small tables of the model, whose data is part of the graph. `inputs`, `parameters` and `outputs`
    include those of each iteration of a repeat.
    """

    inputs: Mapping[str, Value]
    parameters: Mapping[str, Value]
    constants: Mapping[Value, Array] = field(repr=False)
    nodes: tuple[Node, ...]
    outputs: Mapping[str, Value]
    repeats: tuple[Repeat, ...] = ()

    def to_bytes(self) -> bytes:
        """The canonical bytes, including provenance; specified in `ir.encoding`, read by `ir.decoding`."""
        return encode(renumber(self))

    @cached_property
    def key(self) -> str:
        """The SHA-256 of the computation; independent of provenance, numbering, node order, dead code and repeats."""
        return hashlib.sha256(encode(normal_form(unroll(self)))).hexdigest()

    def __str__(self) -> str:
        return text(self)


def live_nodes(graph: Graph) -> Iterator[Node]:
    """The nodes that outputs depend on, in the depth-first postorder from the outputs.

    The graph must be unrolled, because repeats refer to positions of nodes.
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
    """The same computation without provenance and dead nodes, in canonical order, numbered from 0."""
    nodes = tuple(live_nodes(graph))
    used = dict.fromkeys(value for node in nodes for value in node.operands)
    used |= dict.fromkeys(graph.outputs.values())
    name_of = {value: name for name, value in graph.parameters.items()}
    parameters = {name_of[value]: value for value in used if value in name_of}
    constants = {value: graph.constants[value] for value in used if value in graph.constants}
    bare = tuple(replace(node, origin=NOWHERE) for node in nodes)
    return renumber(Graph(graph.inputs, parameters, constants, bare, graph.outputs))


def renumber(graph: Graph) -> Graph:
    """The same graph with values numbered in order of appearance: inputs, parameters, constants, nodes.

    The `given` values of a repeat follow its last node.
    """
    ordered = [*graph.inputs.values(), *graph.parameters.values(), *graph.constants]
    position = 0
    for repeat in graph.repeats:
        ordered += [node.result for node in graph.nodes[position : repeat.stop]]
        ordered += [value for row in repeat.given.values() for value in row]
        position = repeat.stop
    ordered += [node.result for node in graph.nodes[position:]]
    new = {value: Value(number, value.type) for number, value in enumerate(ordered)}
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
        given={new[value]: tuple(new[result] for result in results) for value, results in repeat.given.items()},
    )


# Attributes that the label and the type of a line already show.
_SHOWN_ELSEWHERE = ("dtype", "function", "out", "shape")


def text(graph: "Graph") -> str:
    """The text of a graph. Scalars are written inline; larger constants are listed first."""
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
    """The outputs. Outputs of a repeat, one for each iteration, are one entry if their names are a series."""
    names_of: dict[Value, list[str]] = {}
    for name, value in graph.outputs.items():
        names_of.setdefault(value, []).append(name)
    entries = {name: f"{name}={names[value]}" for name, value in graph.outputs.items()}
    for results in (results for repeat in graph.repeats for results in repeat.given.values()):
        if all(len(names_of.get(value, ())) == 1 for value in results):
            listed = [names_of[value][0] for value in results]
            series = series_of(listed)
            if series:
                entries[listed[0]] = f"{series.text(len(results))}={names[results[0]].removesuffix('.0')}"
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
        for value, results in repeat.given.items():
            names |= {result: f"{names[value]}.{iteration}" for iteration, result in enumerate(results)}
    return names


def _scalar(data: Array) -> str:
    # The shortest digits that identify the float32, not those of its float64 expansion.
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
