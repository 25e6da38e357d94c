"""Simplification: constant folding, canonical forms, common subexpressions and dead code.

`canonicalise` gives each computation one form: no-ops vanish, and chains of moves become one move, so that equal
computations are equal nodes and later passes need fewer patterns.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from nxpipe.emulator.errors import IndexOutOfRange
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph, live_nodes
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.ops import Binary, Broadcast, Cast, Concat, Index, Operator, Reshape, Slice, Transpose
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
    """Compute equal nodes once; the origin of the first one stays."""
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


# A rule looks at an operation about to be added and answers with a value that already is its result, with a simpler
# operation to add instead, or with nothing.
Step = Value | Node | None
Rule = Callable[[GraphBuilder, Node], Step]


def canonicalise(graph: Graph, _: PassOptions) -> Graph:
    """Apply the rules to each node until none has anything to say; its operands are canonical already."""
    return rewrite(graph, _simplest)


def _simplest(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
    candidate = replace(node, operands=operands)
    while True:
        step = next((step for rule in RULES if (step := rule(builder, candidate)) is not None), None)
        if step is None:
            return keep(builder, candidate, candidate.operands)
        if isinstance(step, Value):
            return step
        candidate = step


def drop_idle_moves(builder: GraphBuilder, node: Node) -> Step:
    """A cast to the same type, a view of the same shape, a transposition of nothing."""
    idle = isinstance(node.op, Cast | Reshape | Broadcast | Slice | Concat) and len(node.operands) == 1
    if isinstance(node.op, Transpose):
        idle = node.op.order == tuple(range(node.result.type.rank))
    return node.operands[0] if idle and node.operands[0].type == node.result.type else None


def merge_moves(builder: GraphBuilder, node: Node) -> Step:
    """Two moves of one kind in a row are one."""
    first = builder.node_of(node.operands[0]) if node.operands else None
    if first is None or type(first.op) is not type(node.op):
        return None
    if isinstance(node.op, Reshape | Broadcast):
        return replace(node, operands=first.operands)
    if isinstance(node.op, Transpose) and isinstance(first.op, Transpose):
        order = tuple(first.op.order[axis] for axis in node.op.order)
        return replace(node, op=Transpose(order), operands=first.operands)
    return None


def transpose_of_units_is_reshape(builder: GraphBuilder, node: Node) -> Step:
    """A transpose of axes of size one moves no element."""
    if not isinstance(node.op, Transpose):
        return None
    moved = [axis for axis in node.op.order if node.operands[0].type.shape[axis] != 1]
    return replace(node, op=Reshape(node.result.type.shape)) if moved == sorted(moved) else None


def drop_neutral_scalars(builder: GraphBuilder, node: Node) -> Step:
    """x * 1, x and true, integer + 0. Adding zero to a float is kept: it turns -0 into 0."""
    if not isinstance(node.op, Binary):
        return None
    for kept, other in (node.operands, node.operands[::-1]):
        table = builder.table_of(other)
        if table is not None and not table.ndim and kept.type == node.result.type:
            neutral = _neutral(node.op.function, kept)
            if neutral is not None and table[()] == neutral:
                return kept
    return None


def _neutral(function: str, value: Value) -> object:
    if function == "add" and value.type.dtype.is_integer:
        return 0
    if function == "multiply" and not value.type.dtype.is_integer:
        return 1
    return True if function == "and" and not value.type.dtype.is_integer else None


def square_instead_of_power(builder: GraphBuilder, node: Node) -> Step:
    """The vector engine multiplies; powers are slow or missing."""
    if node.op != Binary("power"):
        return None
    base, exponent = node.operands
    table = builder.table_of(exponent)
    if table is None or table.ndim or table[()] != 2:
        return None
    return replace(node, op=Binary("multiply"), operands=(base, base))


def reshape_instead_of_trivial_index(builder: GraphBuilder, node: Node) -> Step:
    """Indices that enumerate each axis in order select every element unchanged; attention masks are built so."""
    if not isinstance(node.op, Index) or node.operands[0].type.elements != node.result.type.elements:
        return None
    x, *indices = node.operands
    if len(indices) != x.type.rank:
        return None
    rank = node.result.type.rank
    counted: list[int] = []
    for size, index in zip(x.type.shape, indices, strict=True):
        table = builder.table_of(index)
        if table is None or table.size != size or not np.array_equal(table.ravel(), np.arange(size)):
            return None
        counted += [rank - table.ndim + axis for axis, length in enumerate(table.shape) if length != 1]
    in_order = counted == sorted(set(counted))
    return replace(node, op=Reshape(node.result.type.shape), operands=(x,)) if in_order else None


def slice_instead_of_counted_index(builder: GraphBuilder, node: Node) -> Step:
    """Indices known to count evenly along one axis take a window, which needs no address computed."""
    if not isinstance(node.op, Index) or len(node.op.axes) != 1:
        return None
    x, axis = node.operands[0], node.op.axes[0]
    table = builder.table_of(node.operands[1])
    if table is None or table.ndim != 1 or not table.size:
        return None
    places = np.where(table < 0, table + x.type.shape[axis], table)
    step = int(places[1] - places[0]) if places.size > 1 else 1
    counted = step > 0 and np.array_equal(places, places[0] + step * np.arange(places.size))
    if not counted or places[0] < 0 or places[-1] >= x.type.shape[axis]:
        return None
    starts, stops, steps = [0] * x.type.rank, list(x.type.shape), [1] * x.type.rank
    starts[axis], stops[axis], steps[axis] = int(places[0]), int(places[-1]) + 1, step
    return replace(node, op=Slice(tuple(starts), tuple(stops), tuple(steps)), operands=(x,))


RULES: tuple[Rule, ...] = (
    drop_idle_moves,
    merge_moves,
    transpose_of_units_is_reshape,
    drop_neutral_scalars,
    square_instead_of_power,
    reshape_instead_of_trivial_index,
    slice_instead_of_counted_index,
)
