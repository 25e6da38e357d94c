"""The SPMD program from a sharding plan: local shapes, and collectives where the plan requires them.

Two rewrites then optimize the collectives. `merge_sums` merges the all-reduces of two partial sums that are added,
because an all-reduce costs more than an addition. Blocks with parallel attention and MLP (GPT-J, Falcon) then need one
all-reduce instead of two.

`divide_rows` (sequence parallelism) replaces an all-reduce by a reduce-scatter and an all-gather. The operators between
them that process each row independently, such as norms and residuals, run on each rank's share of the rows, so that no
rank stores or processes the whole residual stream. It applies only if every lane of a core has a row of the share. A
share has a few rows of every short run of rows, so that a matrix product can be fed run by run.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Origin, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import (
    AllGather,
    AllReduce,
    Binary,
    Broadcast,
    Cast,
    Convolution,
    Gather,
    GroupedMatMul,
    LayerNorm,
    Linear,
    MatMul,
    Operator,
    RankSlice,
    ReduceScatter,
    Reshape,
    RmsNorm,
    Slice,
    SliceUpdate,
    Unary,
    Where,
)
from nxpipe.emulator.ops.collective import uneven
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.rewrite import declare, keep, rewrite
from nxpipe.emulator.passes.shard.layout import Layout, Split
from nxpipe.emulator.passes.shard.plan import ShardPlan
from nxpipe.emulator.passes.shard.propagation import NodeSharding
from nxpipe.emulator.passes.simplify import eliminate_dead_code

_Attributes: TypeAlias = tuple[
    int, int, tuple[int, ...], tuple[int, ...], int, tuple[int, ...], tuple[int, ...]
]  # attributes of a RankSlice or an AllGather


def apply(graph: Graph, plan: ShardPlan) -> Graph:
    """The program of every rank. It takes whole weights and slices the rank's share.

    Inputs and outputs are whole on every rank. States stay sharded: each rank has the states of its heads.
    """
    if plan.refusal is not None:
        raise plan.refusal
    return graph if plan.degree == 1 else _Sharder(graph, plan).graph()


class _Sharder:
    """Builds the program of every rank from a graph and a plan."""

    def __init__(self, graph: Graph, plan: ShardPlan) -> None:
        self._old = graph
        self._plan = plan
        self._degree = plan.degree
        self._propagation = plan.propagation
        self._builder = GraphBuilder()
        self._new: dict[Value, Value] = {}
        self._whole: dict[Value, Value] = {}
        self._relaid: dict[tuple[Value, Layout], Value] = {}

    def graph(self) -> Graph:
        for name, value in self._old.inputs.items():
            self._new[value] = self._builder.input(name, self._plan.local(name, value.type))
        for name, value in self._old.parameters.items():
            self._whole[value] = self._builder.parameter(name, value.type)
        for value, data in self._old.constants.items():
            self._new[value] = self._builder.constant(data, value.type.dtype)
        for node in self._old.nodes:
            self._new[node.result] = self._local_node(node, self._propagation.node_shardings[node.result])
        for name, value in self._old.outputs.items():
            state_layout = (
                self._at_degree(self._propagation.layout(self._old.inputs[name])) if name in self._old.inputs else None
            )
            self._builder.output(name, self._in_layout(value, state_layout, Origin(name)))
        return divide_rows(merge_sums(self._builder.build()), self._degree)

    def _at_degree(self, layout: Layout) -> Layout:
        """The layout at this degree; None if it leaves the tensor whole."""
        return layout if layout is not None and layout.is_divided(self._degree) else None

    def _slice(self, value: Value, layout: Split, origin: Origin) -> Value:
        return self._builder.add(RankSlice(*self._attributes(layout)), value, origin=origin)

    def _attributes(self, layout: Split) -> _Attributes:
        shares = layout.shares(self._degree)
        parts = tuple(share.parts for share in shares)
        return layout.axis, layout.outer, layout.sizes, parts, self._degree, *uneven(shares, self._degree)

    def _local_value(self, old: Value, origin: Origin) -> Value:
        """The local value on a rank. Weights are sliced at their first use, so that all layers have the same nodes."""
        if old in self._whole and old not in self._new:
            layout, whole = self._at_degree(self._propagation.layout(old)), self._whole[old]
            self._new[old] = self._slice(whole, layout, origin) if layout else whole
        return self._new[old]

    def _in_layout(self, old: Value, required: Layout, origin: Origin) -> Value:
        """An operand in the layout that a node requires: unchanged, gathered, or sliced to the rank's share."""
        required, current, value = (
            self._at_degree(required),
            self._at_degree(self._propagation.layout(old)),
            self._local_value(old, origin),
        )
        if current is None and required is None:
            return value
        if current is not None and required is not None and current.matches(required):
            return value
        key = (old, required)
        if key not in self._relaid:
            if current is not None:
                value = self._builder.add(AllGather(*self._attributes(current)), value, origin=origin)
            self._relaid[key] = self._slice(value, required, origin) if required else value
        return self._relaid[key]

    def _local_node(self, node: Node, node_sharding: NodeSharding) -> Value:
        required = [self._at_degree(layout) for layout in node_sharding.operands]
        operands = [
            self._in_layout(old, layout, node.origin) for old, layout in zip(node.operands, required, strict=True)
        ]
        if node_sharding.reduced and any(required):
            return self._reduced(node, operands, required)
        return self._builder.add(self._local_op(node, node_sharding), *operands, origin=node.origin)

    def _local_op(self, node: Node, node_sharding: NodeSharding) -> Operator:
        """The operator with local shapes in its attributes."""
        op, result = node.op, self._at_degree(node_sharding.result)
        if isinstance(op, Reshape | Broadcast) and result is not None:
            return replace(op, shape=result.local(op.shape, self._degree))
        layout = self._at_degree(node_sharding.operands[0]) if node_sharding.operands else None
        if isinstance(op, Convolution) and layout is not None:
            (share,) = layout.shares(self._degree) if op.groups > 1 else (None,)
            return replace(op, groups=op.groups // share.parts) if share else op
        if isinstance(op, Slice | SliceUpdate) and layout is not None:
            return self._local_window(op, layout, node.operands[0])
        return op

    def _local_window(self, op: Slice | SliceUpdate, layout: Split, operand: Value) -> Operator:
        """A slice or its update on the divided axis, which consists of whole blocks, with local block lengths."""
        axis, shares = layout.axis, layout.shares(self._degree)
        edges = [sum(layout.sizes[:block]) for block in range(len(layout.sizes) + 1)]
        local = [sum(share.local for share in shares[:block]) for block in range(len(edges))]
        start, stop = 0, layout.local(operand.type.shape, self._degree)[axis]
        if (op.starts[axis], op.stops[axis]) != (0, operand.type.shape[axis]):
            start, stop = (local[edges.index(position)] for position in (op.starts[axis], op.stops[axis]))
        starts = (*op.starts[:axis], start, *op.starts[axis + 1 :])
        return replace(op, starts=starts, stops=(*op.stops[:axis], stop, *op.stops[axis + 1 :]))

    # Nodes whose results are partial sums.

    def _reduced(self, node: Node, operands: list[Value], layouts: list[Layout]) -> Value:
        if isinstance(node.op, Gather):
            return self._sharded_gather(node, operands, layouts[0])
        if isinstance(node.op, Linear | Convolution):
            return self._row_product(node, node.op, operands)
        op = replace(node.op, out=DType.FLOAT32) if isinstance(node.op, MatMul | GroupedMatMul) else node.op
        total = self._sum(self._builder.add(op, *operands, origin=node.origin), node.origin)
        return self._cast(total, node)

    def _sum(self, value: Value, origin: Origin) -> Value:
        return self._builder.add(AllReduce(self._degree), value, origin=origin)

    def _cast(self, value: Value, node: Node) -> Value:
        dtype = node.result.type.dtype
        return value if value.type.dtype is dtype else self._builder.add(Cast(dtype), value, origin=node.origin)

    def _row_product(self, node: Node, op: Linear | Convolution, operands: list[Value]) -> Value:
        """A row-parallel product: sums are reduced in float32, get the bias once, and are rounded once."""
        x, weight, *bias = operands
        partial = self._builder.add(replace(op, out=DType.FLOAT32), x, weight, origin=node.origin)
        total = self._sum(partial, node.origin)
        for row in bias:
            if isinstance(op, Convolution):
                column = (*row.type.shape, *[1] * (total.type.rank - 2))
                row = self._builder.add(Reshape(column), row, origin=node.origin)
            total = self._builder.add(Binary("add"), total, row, origin=node.origin)
        return self._cast(total, node)

    def _sharded_gather(self, node: Node, operands: list[Value], layout: Layout) -> Value:
        """A vocabulary-parallel embedding: each rank looks up the rows of its shard; other rows contribute zeros."""
        assert layout is not None
        table, indices = operands
        add, origin, dtype = self._builder.add, node.origin, indices.type.dtype
        rows, ranks = table.type.shape[0], self._degree
        first_rows = self._builder.constant(np.arange(ranks) * rows, dtype)
        first = add(RankSlice(0, 1, (ranks,), (ranks,), ranks), first_rows, origin=origin)
        local = add(Binary("subtract"), indices, first, origin=origin)
        low = add(Binary("greater_equal"), local, self._builder.scalar(0, dtype), origin=origin)
        high = add(Binary("less"), local, self._builder.scalar(rows, dtype), origin=origin)
        is_local = add(Binary("and"), low, high, origin=origin)
        safe = add(Where(), is_local, local, self._builder.scalar(0, dtype), origin=origin)
        rows_found = add(Gather(0), table, safe, origin=origin)
        column = add(Reshape((*indices.type.shape, *[1] * (table.type.rank - 1))), is_local, origin=origin)
        masked = add(Where(), column, rows_found, self._builder.scalar(0.0, rows_found.type.dtype), origin=origin)
        return self._sum(masked, origin)


@dataclass(frozen=True)
class _Terms:
    """The terms of a sum: partial sums of ranks, and terms that are whole on all ranks, before and after a cast."""

    degree: int
    partial: tuple[Value, ...]
    before: tuple[Value, ...] = ()
    after: tuple[Value, ...] = ()


def merge_sums(graph: Graph) -> Graph:
    """Merge all-reduces whose results are added and not read elsewhere: add the partial sums first."""
    return eliminate_dead_code(_SumMerger(graph).run(), PassOptions())


class _SumMerger:
    """The rewrite of `merge_sums`."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._readers = Counter(operand for node in graph.nodes for operand in node.operands)
        self._readers.update(graph.outputs.values())
        self._terms: dict[Value, _Terms] = {}  # keys: values of the old graph; terms: values of the new graph

    def run(self) -> Graph:
        return rewrite(self._graph, self._rebuild)

    def _rebuild(self, builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
        terms = self._terms_of(node, operands)
        if terms is None:
            return keep(builder, node, operands)
        self._terms[node.result] = terms
        merges = isinstance(node.op, Binary) and all(self._single_use_terms(operand) for operand in node.operands)
        return (
            _merged_sum(builder, terms, node.result.type.dtype, node.origin)
            if merges
            else keep(builder, node, operands)
        )

    def _single_use_terms(self, value: Value) -> _Terms | None:
        """The terms of a value with a single reader."""
        return self._terms.get(value) if self._readers[value] == 1 else None

    def _terms_of(self, node: Node, operands: tuple[Value, ...]) -> _Terms | None:
        if isinstance(node.op, AllReduce):
            return _Terms(node.op.degree, operands)
        if isinstance(node.op, Cast):
            terms = self._single_use_terms(node.operands[0])
            first = node.operands[0].type.dtype is DType.FLOAT32 and node.result.type.dtype.is_float
            return replace(terms, before=(*terms.before, *terms.after), after=()) if terms and first else None
        if node.op == Binary("add"):
            return self._added_terms(node, operands)
        return None

    def _added_terms(self, node: Node, operands: tuple[Value, ...]) -> _Terms | None:
        sides = [self._single_use_terms(operand) for operand in node.operands]
        if any(terms and operand.type != node.result.type for terms, operand in zip(sides, operands, strict=True)):
            return None
        left, right = sides
        if left and right:
            types = {value.type for value in left.partial + right.partial}
            return _combined(left, right) if len(types) == 1 else None
        for terms, other in ((left, operands[1]), (right, operands[0])):
            if terms:
                return replace(terms, after=(*terms.after, other))
        return None


def _combined(left: _Terms, right: _Terms) -> _Terms:
    partial, before = left.partial + right.partial, left.before + right.before
    return _Terms(left.degree, partial, before, left.after + right.after)


def _merged_sum(builder: GraphBuilder, terms: _Terms, dtype: DType, origin: Origin) -> Value:
    """The partial sums added on each rank, one all-reduce, then the other terms."""

    def added(total: Value, others: tuple[Value, ...]) -> Value:
        for other in others:
            total = builder.add(Binary("add"), total, other, origin=origin)
        return total

    first, *others = terms.partial
    total = builder.add(AllReduce(terms.degree), added(first, tuple(others)), origin=origin)
    total = added(total, terms.before)
    if total.type.dtype is not dtype:
        total = builder.add(Cast(dtype), total, origin=origin)
    return added(total, terms.after)


_LANES: Final = 128  # rows that a core processes in parallel
_MOST_ROWS: Final = 32  # rows of each rank in a run
_SHORTEST_RUN: Final = 512  # rows of all ranks in a run of fewer rows each: every run is one more exchange


def divide_rows(graph: Graph, degree: int) -> Graph:
    """Divide rows among ranks where this does not increase the bytes that ranks exchange. The graph has no repeats."""
    return _RowDivision(graph, degree, _row_divided(graph, degree)).graph()


def _row_divided(graph: Graph, degree: int) -> set[Value]:
    """The values whose rows are divided among ranks: all values of a connected region, or none."""
    regions: dict[Value, set[Value]] = {}
    for node in graph.nodes:
        if isinstance(node.op, AllReduce) and _rows_of_run(node.result, degree):
            regions[node.result] = {node.result}
        elif _is_row_wise(node):
            connected = [
                regions[operand] for operand in node.operands if operand in regions and _has_same_rows(operand, node)
            ]
            if connected:
                region = max(connected, key=len)
                region.update({node.result}, *connected)
                regions |= dict.fromkeys(
                    (value for members in (*connected, {node.result}) for value in members), region
                )
    distinct = {id(region): region for region in regions.values()}.values()
    return {value for region in distinct if _saves_traffic(graph, region) for value in region}


def _rows_of_run(value: Value, degree: int) -> int:
    """The rows of each rank in a run; 0 if the rows cannot be divided, or leave lanes without one.

    It is a power of two, so that a run fills the tiles of a matrix product.
    """
    rows = value.type.shape[-2] if value.type.rank > 1 else 0
    share = rows // degree
    if rows % degree or share < _LANES:
        return 0
    rows_of_run = min(share & -share, _MOST_ROWS)
    return rows_of_run if rows_of_run == _MOST_ROWS or rows_of_run * degree >= _SHORTEST_RUN else 0


def _is_row_wise(node: Node) -> bool:
    """True if a node computes each row from the same row of its operands, or from operands without rows."""
    if isinstance(node.op, RmsNorm | LayerNorm):
        return node.op.axes == 1
    if not isinstance(node.op, Binary | Cast | Unary | Where) or node.result.type.rank < 2:
        return False
    rows = node.result.type.shape[-2]
    return all(_is_row_invariant(operand) or operand.type.shape[-2] == rows for operand in node.operands)


def _is_row_invariant(operand: Value) -> bool:
    return operand.type.rank < 2 or operand.type.shape[-2] == 1


def _has_same_rows(operand: Value, node: Node) -> bool:
    """True if a node's result has the rows of its operand."""
    return operand.type.shape[:-1] == node.result.type.shape[:-1]


def _saves_traffic(graph: Graph, region: set[Value]) -> bool:
    """True if dividing a region does not increase traffic: its gathered bytes are at most those of its all-reduces."""
    sums = [node.result for node in graph.nodes if node.result in region and isinstance(node.op, AllReduce)]
    gathered = sum(value.type.nbytes for value in _read_whole(graph, region))
    return len(sums) < len(region) and gathered <= sum(value.type.nbytes for value in sums)


def _read_whole(graph: Graph, divided: set[Value]) -> set[Value]:
    """The divided values that a reader outside the region needs whole."""
    readers = {operand for node in graph.nodes if node.result not in divided for operand in node.operands}
    return divided & (readers | set(graph.outputs.values()))


class _RowDivision:
    """The rewrite of `divide_rows`."""

    def __init__(self, graph: Graph, degree: int, divided: set[Value]) -> None:
        self._graph = graph
        self._degree = degree
        self._row_divided = divided
        self._builder = GraphBuilder()
        self._new = declare(self._builder, graph)
        self._relaid: dict[Value, Value] = {}  # slices of whole values, and gathers of divided values

    def graph(self) -> Graph:
        for node in self._graph.nodes:
            self._new[node.result] = self._rebuilt(node)
        for name, value in self._graph.outputs.items():
            self._builder.output(name, self._whole(value, Origin(name)))
        return self._builder.build()

    def _rebuilt(self, node: Node) -> Value:
        if node.result not in self._row_divided:
            return keep(self._builder, node, [self._whole(operand, node.origin) for operand in node.operands])
        if isinstance(node.op, AllReduce):
            op = ReduceScatter(*self._attributes(node.result))
            return self._builder.add(op, self._whole(node.operands[0], node.origin), origin=node.origin)
        return keep(self._builder, node, list(self._shares(node)))

    def _shares(self, node: Node) -> Iterator[Value]:
        for operand in node.operands:
            if operand in self._row_divided or _is_row_invariant(operand):
                yield self._new[operand]
            else:
                if operand not in self._relaid:
                    op = RankSlice(*self._attributes(operand))
                    self._relaid[operand] = self._builder.add(op, self._new[operand], origin=node.origin)
                yield self._relaid[operand]

    def _whole(self, value: Value, origin: Origin) -> Value:
        if value not in self._row_divided:
            return self._new[value]
        if value not in self._relaid:
            op = AllGather(*self._attributes(value))
            self._relaid[value] = self._builder.add(op, self._new[value], origin=origin)
        return self._relaid[value]

    def _attributes(self, value: Value) -> tuple[int, int, tuple[int, ...], tuple[int, ...], int]:
        axis, run = value.type.rank - 2, _rows_of_run(value, self._degree) * self._degree
        return axis, value.type.shape[axis] // run, (run,), (self._degree,), self._degree
