"""Dead code, repeated code, and code whose result is known already."""

import numpy as np

from nxpipe.emulator.errors import IndexOutOfRange
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph, live_nodes
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.ops import Operator
from nxpipe.emulator.ops.portable import compute
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.rewrite import keep, rewrite

# A folded result travels in every executable, so it must be small beside the model's weights: rotary tables of usual
# lengths are. Masks and positions are the same to the bit whenever they are computed, so only small ones travel; the
# square mask of a long sequence is computed where it is used.
LARGEST_FOLDED_CONSTANT = 16 * 2**20
_LARGEST_FOLDED_MASK = 2**18


def eliminate_dead_code(graph: Graph, _: PassOptions) -> Graph:
    """Drop what no output depends on. Inputs stay: they are the interface."""
    graph = unroll(graph)
    live = {node.result for node in live_nodes(graph)}
    nodes = tuple(node for node in graph.nodes if node.result in live)
    used = {operand for node in nodes for operand in node.operands} | set(graph.outputs.values())
    return Graph(
        graph.inputs,
        {name: value for name, value in graph.parameters.items() if value in used},
        {value: data for value, data in graph.constants.items() if value in used},
        nodes,
        graph.outputs,
    )


def eliminate_common_subexpressions(graph: Graph, _: PassOptions) -> Graph:
    """Compute once what is asked for twice; the first asker's origin stays."""
    seen: dict[tuple[Operator, tuple[Value, ...]], Value] = {}

    def rebuild(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
        question = (node.op, operands)
        if question not in seen:
            seen[question] = keep(builder, node, operands)
        return seen[question]

    return rewrite(graph, rebuild)


def fold_constants(graph: Graph, _: PassOptions) -> Graph:
    """Replace by their results the nodes that depend on constants only, as long as a result is small."""

    def rebuild(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
        tables = [builder.table_of(operand) for operand in operands]
        known = [table for table in tables if table is not None]
        if len(known) < len(tables) or not _worth_its_room(node.result.type):
            return keep(builder, node, operands)
        try:
            with np.errstate(all="ignore"):
                result = compute(node.op, *known)
        except IndexOutOfRange:  # a fault of the run that reaches it, if one does
            return keep(builder, node, operands)
        return builder.constant(result, node.result.type.dtype)

    return rewrite(graph, rebuild)


def _worth_its_room(result: TensorType) -> bool:
    return result.nbytes <= (LARGEST_FOLDED_CONSTANT if result.dtype.is_float else _LARGEST_FOLDED_MASK)
