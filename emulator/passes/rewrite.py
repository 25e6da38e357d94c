"""Rewriting of graphs: node by node into a new graph, in topological order."""

from collections.abc import Callable, Iterable

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.repeat import unroll

# From the new graph so far, an old node and its new operands to the new value that replaces the node's result.
Rebuild = Callable[[GraphBuilder, Node, tuple[Value, ...]], Value]


def rewrite(graph: Graph, rebuild: Rebuild) -> Graph:
    """A graph with the same interface, in which `rebuild` replaces each node; repeats are unrolled first."""
    graph = unroll(graph)
    builder = GraphBuilder()
    new = declare(builder, graph)
    for node in graph.nodes:
        new[node.result] = rebuild(builder, node, tuple(new[operand] for operand in node.operands))
    for name, value in graph.outputs.items():
        builder.output(name, new[value])
    return builder.build()


def declare(builder: GraphBuilder, graph: Graph) -> dict[Value, Value]:
    """Declare the inputs, parameters and constants of a graph in the builder; returns the map of old to new values."""
    new = {value: builder.input(name, value.type) for name, value in graph.inputs.items()}
    new |= {value: builder.parameter(name, value.type) for name, value in graph.parameters.items()}
    new |= {value: builder.constant(data, value.type.dtype) for value, data in graph.constants.items()}
    return new


def keep(builder: GraphBuilder, node: Node, operands: Iterable[Value]) -> Value:
    """Add the unchanged operator of a node on its new operands."""
    return builder.add(node.op, *operands, origin=node.origin)
