"""Simplification: constant folding, canonical forms, common subexpressions and dead code.

`canonicalise` gives each computation one form: no-ops are removed, and chains of data movement operators are merged, so
that equal computations are equal nodes and later passes need fewer patterns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from nxpipe.emulator.errors import IndexOutOfRange
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph, live_nodes
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import (
    Attention,
    Binary,
    Broadcast,
    Cast,
    Concat,
    Gather,
    Index,
    Operator,
    Reshape,
    Slice,
    Transpose,
    Unary,
    Where,
)
from nxpipe.emulator.ops.portable import compute
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.rewrite import keep, rewrite

# A folded result is stored in every executable, so it must be small relative to the model's weights; rotary tables of
# usual lengths are. Integer and boolean results have no rounding, so folding them gains no accuracy and only small ones
# are folded: the square mask of a long sequence is computed at run time.
LARGEST_FOLDED_CONSTANT = 16 * 2**20
_LARGEST_FOLDED_MASK = 2**18


def eliminate_dead_code(graph: Graph, _: PassOptions) -> Graph:
    """Remove nodes, parameters and constants that no output depends on. Inputs stay: they are the interface."""
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
    """Compute equal nodes once; the result has the origin of the first."""
    seen: dict[tuple[Operator, tuple[Value, ...]], Value] = {}

    def rebuild(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
        key = (node.op, operands)
        if key not in seen:
            seen[key] = keep(builder, node, operands)
        return seen[key]

    return rewrite(graph, rebuild)


def fold_constants(graph: Graph, _: PassOptions) -> Graph:
    """Replace nodes that depend on constants only by their results, if the result is small."""

    def rebuild(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
        tables = [builder.table_of(operand) for operand in operands]
        known = [table for table in tables if table is not None]
        if len(known) < len(tables) or not _is_foldable_size(node.result.type):
            return keep(builder, node, operands)
        try:
            with np.errstate(all="ignore"):
                result = compute(node.op, *known)
        except IndexOutOfRange:  # reported by the run, if it executes the node
            return keep(builder, node, operands)
        return builder.constant(result, node.result.type.dtype)

    return rewrite(graph, rebuild)


def _is_foldable_size(result: TensorType) -> bool:
    return result.nbytes <= (LARGEST_FOLDED_CONSTANT if result.dtype.is_float else _LARGEST_FOLDED_MASK)


_FOLLOWED = 8  # elementwise nodes after a result


def advance_parameter_arithmetic(graph: Graph, _: PassOptions) -> Graph:
    """Move nodes that depend on parameters and constants only before the node with whose result an elementwise node
    combines theirs. The scale and the shift of a batch norm, for instance, are then known when the convolution's
    result is, so that the back end can apply them to its tiles."""
    graph = unroll(graph)
    known = {*graph.parameters.values(), *graph.constants}
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        if node.operands and known.issuperset(node.operands):
            known.add(node.result)
        for operand in node.operands:
            readers.setdefault(operand, []).append(node)
    nodes = {node.result: node for node in graph.nodes}
    ordered: dict[Value, Node] = {}
    for node in graph.nodes:
        combined = [] if node.result in known else _combined_with(node.result, readers)
        for value in (*(value for value in combined if value in known), node.result):
            _add_with_operands(value, nodes, ordered)
    return replace(graph, nodes=tuple(ordered.values()))


def _add_with_operands(value: Value, nodes: Mapping[Value, Node], ordered: dict[Value, Node]) -> None:
    """Add the node of a value, after those of its operands, unless they have been added."""
    if value in nodes and value not in ordered:
        for operand in nodes[value].operands:
            _add_with_operands(operand, nodes, ordered)
        ordered[value] = nodes[value]


def _combined_with(result: Value, readers: Mapping[Value, Sequence[Node]]) -> list[Value]:
    """The other operands of the elementwise nodes that follow a result."""
    pending, followed = [result], 0
    found: list[Value] = []
    while pending and followed < _FOLLOWED:
        for node in readers.get(pending.pop(), ()):
            if isinstance(node.op, Binary | Unary | Cast | Where) and node.result.type.shape == result.type.shape:
                found += node.operands
                pending.append(node.result)
                followed += 1
    return found


# A rule receives a node before it is added. It returns an existing value that equals the result, a simpler node to add
# instead, or None.
Step = Value | Node | None
Rule = Callable[[GraphBuilder, Node], Step]


def canonicalise(graph: Graph, _: PassOptions) -> Graph:
    """Apply the rules to each node until none matches; its operands are already canonical."""
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


def drop_no_ops(builder: GraphBuilder, node: Node) -> Step:
    """Remove casts to the same type, views of the same shape, and identity transpositions."""
    idle = isinstance(node.op, Cast | Reshape | Broadcast | Slice | Concat) and len(node.operands) == 1
    if isinstance(node.op, Transpose):
        idle = node.op.order == tuple(range(node.result.type.rank))
    return node.operands[0] if idle and node.operands[0].type == node.result.type else None


def merge_moves(builder: GraphBuilder, node: Node) -> Step:
    """Merge two consecutive reshapes, broadcasts or transpositions."""
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
    """Replace a transposition that only moves axes of size 1 by a reshape."""
    if not isinstance(node.op, Transpose):
        return None
    moved = [axis for axis in node.op.order if node.operands[0].type.shape[axis] != 1]
    return replace(node, op=Reshape(node.result.type.shape)) if moved == sorted(moved) else None


def narrow_before_moving(builder: GraphBuilder, node: Node) -> Step:
    """Cast to a narrower float before a reshape or transposition, not after it: fewer bytes are moved, and the node
    before them can round its result itself."""
    source = node.operands[0] if isinstance(node.op, Cast) else None
    moves: list[Node] = []
    while source is not None and (first := builder.node_of(source)) and isinstance(first.op, Reshape | Transpose):
        moves.append(first)
        source = first.operands[0]
    if source is None or not moves:
        return None
    wide, narrow = source.type.dtype, node.result.type.dtype
    if not (wide.is_float and narrow.is_float and narrow.itemsize < wide.itemsize):
        return None
    value = builder.add(node.op, source, origin=node.origin)
    for move in reversed(moves):
        value = builder.add(move.op, value, origin=move.origin)
    return value


def drop_neutral_constants(builder: GraphBuilder, node: Node) -> Step:
    """Remove x * 1, `x and true`, integer + 0. Adding 0 to a float is kept, because it turns -0 into 0. Where the
    constant has more axes than x, or longer ones, x is repeated along them, which a view does."""
    if not isinstance(node.op, Binary):
        return None
    for operand, other in (node.operands, node.operands[::-1]):
        table = builder.table_of(other)
        if table is not None and table.size and operand.type.dtype is node.result.type.dtype:
            neutral = _neutral(node.op.function, operand)
            if neutral is not None and (table == neutral).all():
                shape = node.result.type.shape
                same = operand.type.shape == shape
                return operand if same else replace(node, op=Broadcast(shape), operands=(operand,))
    return None


def drop_mask_without_effect(builder: GraphBuilder, node: Node) -> Step:
    """Remove the mask of an attention if it is true everywhere."""
    if not isinstance(node.op, Attention) or len(node.operands) < 4:
        return None
    *matrices, mask = node.operands
    while (first := builder.node_of(mask)) is not None and isinstance(first.op, Broadcast | Reshape | Transpose):
        (mask,) = first.operands
    table = builder.table_of(mask)
    if table is None or mask.type.dtype is not DType.BOOL or not table.all():
        return None
    return replace(node, operands=tuple(matrices))


def _neutral(function: str, value: Value) -> object:
    if function == "add" and value.type.dtype.is_integer:
        return 0
    if function == "multiply" and not value.type.dtype.is_integer:
        return 1
    return True if function == "and" and not value.type.dtype.is_integer else None


def square_instead_of_power(builder: GraphBuilder, node: Node) -> Step:
    """Replace x ** 2 by x * x: the vector engine multiplies; powers are slow or not supported."""
    if node.op != Binary("power"):
        return None
    base, exponent = node.operands
    table = builder.table_of(exponent)
    if table is None or table.ndim or table[()] != 2:
        return None
    return replace(node, op=Binary("multiply"), operands=(base, base))


def reshape_instead_of_trivial_index(builder: GraphBuilder, node: Node) -> Step:
    """Replace an index that selects every element in order by a reshape; attention masks are often built so."""
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
    """Replace an index with evenly spaced constants along one axis by a slice, which computes no addresses."""
    if not isinstance(node.op, Index) or len(node.op.axes) != 1:
        return None
    x, axis = node.operands[0], node.op.axes[0]
    table = builder.table_of(node.operands[1])
    if table is None or table.ndim != 1 or not table.size:
        return None
    positions = np.where(table < 0, table + x.type.shape[axis], table)
    step = int(positions[1] - positions[0]) if positions.size > 1 else 1
    evenly_spaced = step > 0 and np.array_equal(positions, positions[0] + step * np.arange(positions.size))
    if not evenly_spaced or positions[0] < 0 or positions[-1] >= x.type.shape[axis]:
        return None
    starts, stops, steps = [0] * x.type.rank, list(x.type.shape), [1] * x.type.rank
    starts[axis], stops[axis], steps[axis] = int(positions[0]), int(positions[-1]) + 1, step
    return replace(node, op=Slice(tuple(starts), tuple(stops), tuple(steps)), operands=(x,))


def slice_instead_of_counted_gather(builder: GraphBuilder, node: Node) -> Step:
    """Replace a gather of evenly spaced constant indices by a slice, and of one repeated index by a broadcast slice:
    embeddings of consecutive positions, and of a single token type, need no indirect access."""
    if not isinstance(node.op, Gather):
        return None
    x, axis, result = node.operands[0], node.op.axis, node.result.type.shape
    table = builder.table_of(node.operands[1])
    if table is None or not table.size:
        return None
    positions = table.ravel()
    first, last = int(positions[0]), int(positions[-1])
    step = int(positions[1]) - first if positions.size > 1 else 1
    is_spaced = np.array_equal(positions, first + step * np.arange(positions.size))
    if not is_spaced or step < 0 or first < 0 or last >= x.type.shape[axis]:
        return None
    starts, stops, steps = [0] * x.type.rank, list(x.type.shape), [1] * x.type.rank
    starts[axis], stops[axis], steps[axis] = first, last + 1, max(step, 1)
    rows = builder.add(Slice(tuple(starts), tuple(stops), tuple(steps)), x, origin=node.origin)
    if step:
        return replace(node, op=Reshape(result), operands=(rows,))
    one = (*result[:axis], *(1,) * table.ndim, *result[axis + table.ndim :])
    return replace(node, op=Broadcast(result), operands=(builder.add(Reshape(one), rows, origin=node.origin),))


RULES: tuple[Rule, ...] = (
    drop_no_ops,
    merge_moves,
    transpose_of_units_is_reshape,
    narrow_before_moving,
    drop_neutral_constants,
    drop_mask_without_effect,
    square_instead_of_power,
    reshape_instead_of_trivial_index,
    slice_instead_of_counted_index,
    slice_instead_of_counted_gather,
)
