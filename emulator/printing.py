"""A graph as text: one line a node, as a compiler engineer would like to read it."""

from collections.abc import Iterator

from emulator.graph import Graph, Node, Value
from emulator.numerics import Array
from emulator.ops.base import Attribute, attributes

# The line's label and type say these.
_TOLD_ALREADY = ("dtype", "function", "out", "shape")


def text(graph: Graph) -> str:
    """The whole graph; scalars stand where they are used, larger constants are listed first."""
    names = _names(graph)
    inputs = ", ".join(f"{name}: {value.type}" for name, value in graph.inputs.items())
    outputs = ", ".join(f"{name}={names[value]}" for name, value in graph.outputs.items())
    constants = [f"  {names[value]}: {value.type} = constant" for value in graph.constants if value.type.rank]
    nodes = list(_node_lines(graph, names))
    return "\n".join([f"graph({inputs})", *constants, *nodes, f"return {outputs}"])


def _names(graph: Graph) -> dict[Value, str]:
    names = {value: name for name, value in graph.inputs.items()}
    names |= {value: f"w:{name}" for name, value in graph.parameters.items()}
    tables = [value for value in graph.constants if value.type.rank]
    names |= {value: f"c{number}" for number, value in enumerate(tables)}
    names |= {value: _scalar(data) for value, data in graph.constants.items() if not value.type.rank}
    names |= {node.result: f"%{number}" for number, node in enumerate(graph.nodes)}
    return names


def _scalar(data: Array) -> str:
    # The shortest digits that name this very float32, not its float64 expansion.
    return str(data[()])


def _node_lines(graph: Graph, names: dict[Value, str]) -> Iterator[str]:
    for node in graph.nodes:
        line = f"  {names[node.result]}: {node.result.type} = {node.op.label}({', '.join(_arguments(node, names))})"
        yield f"{line}  # {node.origin}" if str(node.origin) else line


def _arguments(node: Node, names: dict[Value, str]) -> Iterator[str]:
    yield from (names[operand] for operand in node.operands)
    for name, attribute in attributes(node.op).items():
        if name not in _TOLD_ALREADY:
            yield f"{name}={_attribute(attribute)}"


def _attribute(attribute: Attribute) -> str:
    return f"[{','.join(map(str, attribute))}]" if isinstance(attribute, tuple) else str(attribute)
