"""Text of a graph for readers: one line for each node; a repeat shows its body once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nxpipe.emulator.ir.nodes import Node, Repeat, Value
from nxpipe.emulator.ir.repeat import series_of, taken_series
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Attribute, attributes

if TYPE_CHECKING:
    from nxpipe.emulator.ir.graph import Graph

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
