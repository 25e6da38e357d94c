"""Rewriting of graphs: node by node into a new graph, from values that are already new."""

from collections.abc import Callable, Iterable

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.repeat import unroll

# Given the new graph so far, an old node and its new operands: the new value that stands for the node's result.
Rebuild = Callable[[GraphBuilder, Node, tuple[Value, ...]], Value]


def rewrite(graph: Graph, rebuild: Rebuild) -> Graph:
    """A graph with the same interface whose nodes are what `rebuild` makes of the old ones, repeats written out."""
    graph = unroll(graph)
    builder = GraphBuilder()
    new = declare(builder, graph)
    for node in graph.nodes:
        new[node.result] = rebuild(builder, node, tuple(new[operand] for operand in node.operands))
    for name, value in graph.outputs.items():
        builder.output(name, new[value])
    return builder.build()


def declare(builder: GraphBuilder, graph: Graph) -> dict[Value, Value]:
    """Repeat everything that a graph starts from; the answer maps its values to the new ones."""
    new = {value: builder.input(name, value.type) for name, value in graph.inputs.items()}
    new |= {value: builder.parameter(name, value.type) for name, value in graph.parameters.items()}
    new |= {value: builder.constant(data, value.type.dtype) for value, data in graph.constants.items()}
    return new


def keep(builder: GraphBuilder, node: Node, operands: Iterable[Value]) -> Value:
    """The node as it was, on its new operands."""
    return builder.add(node.op, *operands, origin=node.origin)
