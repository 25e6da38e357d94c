"""The program of one rank, from a plan: local shapes, and collectives where the plan needs them.

Two rewrites then place the collectives better. `merge_sums`: two sums over ranks that are added become one, because an
all-reduce costs more than an addition; blocks that compute attention and MLP side by side, as GPT-J's and Falcon's do,
then need one all-reduce instead of two.

`divide_rows` (sequence parallelism): an all-reduce is a reduce-scatter and an all-gather. Where each row is processed
by itself after a sum, as in norms and residuals, each rank does that for its share of the rows between the two halves,
so that ranks neither hold nor process the whole residual stream. It applies only where every lane of a core has a row
of the share. A share consists of a few rows of every short run, so that products can be fed run by run.
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
from nxpipe.emulator.passes.shard.propagation import Verdict
from nxpipe.emulator.passes.simplify import eliminate_dead_code

_Attributes: TypeAlias = tuple[
    int, int, tuple[int, ...], tuple[int, ...], int, tuple[int, ...], tuple[int, ...]
]  # of a RankSlice, or an AllGather


def apply(graph: Graph, plan: ShardPlan) -> Graph:
    """The program that every rank runs. It takes whole weights, and slices off what is this rank's own.

    Inputs and outputs are whole on every rank, but for states, which stay where they are: each rank has its heads.
    """
    if plan.refusal is not None:
        raise plan.refusal
    return graph if plan.degree == 1 else _Sharder(graph, plan).graph()


class _Sharder:
    def __init__(self, graph: Graph, plan: ShardPlan) -> None:
        self._old = graph
        self._plan = plan
        self._degree = plan.degree
        self._walk = plan.walk
        self._builder = GraphBuilder()
        self._new: dict[Value, Value] = {}
        self._whole: dict[Value, Value] = {}
        self._moved: dict[tuple[Value, Layout], Value] = {}

    def graph(self) -> Graph:
        for name, value in self._old.inputs.items():
            self._new[value] = self._builder.input(name, self._plan.local(name, value.type))
        for name, value in self._old.parameters.items():
            self._whole[value] = self._builder.parameter(name, value.type)
        for value, data in self._old.constants.items():
            self._new[value] = self._builder.constant(data, value.type.dtype)
        for node in self._old.nodes:
            self._new[node.result] = self._localised(node, self._walk.verdicts[node.result])
        for name, value in self._old.outputs.items():
            keeps = self._real(self._walk.layout(self._old.inputs[name])) if name in self._old.inputs else None
            self._builder.output(name, self._moved_to(value, keeps, Origin(name)))
        return divide_rows(merge_sums(self._builder.build()), self._degree)

    def _real(self, layout: Layout) -> Layout:
        """At this degree, a cut that nothing can share leaves a tensor whole."""
        return layout if layout is not None and layout.is_divided(self._degree) else None

    def _slice(self, value: Value, layout: Split, origin: Origin) -> Value:
        return self._builder.add(RankSlice(*self._attributes(layout)), value, origin=origin)

    def _attributes(self, layout: Split) -> _Attributes:
        shares = layout.shares(self._degree)
        parts = tuple(share.parts for share in shares)
        return layout.axis, layout.outer, layout.sizes, parts, self._degree, *uneven(shares, self._degree)

    def _held(self, old: Value, origin: Origin) -> Value:
        """A value as a rank holds it. Weights are sliced where they are used first, so that layers stay alike."""
        if old in self._whole and old not in self._new:
            layout, whole = self._real(self._walk.layout(old)), self._whole[old]
            self._new[old] = self._slice(whole, layout, origin) if layout else whole
        return self._new[old]

    def _moved_to(self, old: Value, wanted: Layout, origin: Origin) -> Value:
        """An operand in the layout that a node needs: unchanged, gathered, or sliced to the rank's share."""
        wanted, current, value = self._real(wanted), self._real(self._walk.layout(old)), self._held(old, origin)
        if current is None and wanted is None:
            return value
        if current is not None and wanted is not None and current.matches(wanted):
            return value
        key = (old, wanted)
        if key not in self._moved:
            if current is not None:
                value = self._builder.add(AllGather(*self._attributes(current)), value, origin=origin)
            self._moved[key] = self._slice(value, wanted, origin) if wanted else value
        return self._moved[key]

    def _localised(self, node: Node, verdict: Verdict) -> Value:
        wanted = [self._real(layout) for layout in verdict.operands]
        operands = [self._moved_to(old, layout, node.origin) for old, layout in zip(node.operands, wanted, strict=True)]
        if verdict.reduced and any(wanted):
            return self._reduced(node, operands, wanted)
        return self._builder.add(self._local_op(node, verdict), *operands, origin=node.origin)

    def _local_op(self, node: Node, verdict: Verdict) -> Operator:
        """Operators that name shapes name local ones."""
        op, result = node.op, self._real(verdict.result)
        if isinstance(op, Reshape | Broadcast) and result is not None:
            return replace(op, shape=result.local(op.shape, self._degree))
        held = self._real(verdict.operands[0]) if verdict.operands else None
        if isinstance(op, Convolution) and held is not None:
            (share,) = held.shares(self._degree) if op.groups > 1 else (None,)
            return replace(op, groups=op.groups // share.parts) if share else op
        if isinstance(op, Slice | SliceUpdate) and held is not None:
            return self._local_window(op, held, node.operands[0])
        return op

    def _local_window(self, op: Slice | SliceUpdate, held: Split, operand: Value) -> Operator:
        """On the divided axis a window holds whole blocks, each shorter now."""
        axis, shares = held.axis, held.shares(self._degree)
        edges = [sum(held.sizes[:block]) for block in range(len(held.sizes) + 1)]
        local = [sum(share.local for share in shares[:block]) for block in range(len(edges))]
        start, stop = 0, held.local(operand.type.shape, self._degree)[axis]
        if (op.starts[axis], op.stops[axis]) != (0, operand.type.shape[axis]):
            start, stop = (local[edges.index(place)] for place in (op.starts[axis], op.stops[axis]))
        starts = (*op.starts[:axis], start, *op.starts[axis + 1 :])
        return replace(op, starts=starts, stops=(*op.stops[:axis], stop, *op.stops[axis + 1 :]))

    # Nodes whose results are added up among ranks.

    def _reduced(self, node: Node, operands: list[Value], wanted: list[Layout]) -> Value:
        if isinstance(node.op, Gather):
            return self._looked_up(node, operands, wanted[0])
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
        """Partial sums travel in float32, are rounded once when complete, and get the bias once."""
        x, weight, *bias = operands
        partial = self._builder.add(replace(op, out=DType.FLOAT32), x, weight, origin=node.origin)
        total = self._sum(partial, node.origin)
        for row in bias:
            if isinstance(op, Convolution):
                column = (*row.type.shape, *[1] * (total.type.rank - 2))
                row = self._builder.add(Reshape(column), row, origin=node.origin)
            total = self._builder.add(Binary("add"), total, row, origin=node.origin)
        return self._cast(total, node)

    def _looked_up(self, node: Node, operands: list[Value], layout: Layout) -> Value:
        """Each rank looks up the rows that it has, and contributes zeros for the others."""
        assert layout is not None
        table, indices = operands
        add, origin, dtype = self._builder.add, node.origin, indices.type.dtype
        rows, ranks = table.type.shape[0], self._degree
        firsts = self._builder.constant(np.arange(ranks) * rows, dtype)
        first = add(RankSlice(0, 1, (ranks,), (ranks,), ranks), firsts, origin=origin)
        local = add(Binary("subtract"), indices, first, origin=origin)
        low = add(Binary("greater_equal"), local, self._builder.scalar(0, dtype), origin=origin)
        high = add(Binary("less"), local, self._builder.scalar(rows, dtype), origin=origin)
        mine = add(Binary("and"), low, high, origin=origin)
        safe = add(Where(), mine, local, self._builder.scalar(0, dtype), origin=origin)
        found = add(Gather(0), table, safe, origin=origin)
        column = add(Reshape((*indices.type.shape, *[1] * (table.type.rank - 1))), mine, origin=origin)
        kept = add(Where(), column, found, self._builder.scalar(0.0, found.type.dtype), origin=origin)
        return self._sum(kept, origin)


@dataclass(frozen=True)
class _Terms:
    """The terms of a sum: partial sums of ranks, then terms that all ranks have, before and after a cast."""

    degree: int
    partial: tuple[Value, ...]
    before: tuple[Value, ...] = ()
    after: tuple[Value, ...] = ()


def merge_sums(graph: Graph) -> Graph:
    """Add the ranks' parts first wherever two or more sums over ranks are added and not read elsewhere."""
    return eliminate_dead_code(_Merging(graph).run(), PassOptions())


class _Merging:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._readers = Counter(operand for node in graph.nodes for operand in node.operands)
        self._readers.update(graph.outputs.values())
        self._terms: dict[Value, _Terms] = {}  # by values of the old graph, in values of the new

    def run(self) -> Graph:
        return rewrite(self._graph, self._rebuild)

    def _rebuild(self, builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
        terms = self._of(node, operands)
        if terms is None:
            return keep(builder, node, operands)
        self._terms[node.result] = terms
        meets = isinstance(node.op, Binary) and all(self._known(operand) for operand in node.operands)
        return _written(builder, terms, node.result.type.dtype, node.origin) if meets else keep(builder, node, operands)

    def _known(self, value: Value) -> _Terms | None:
        """The terms of a value that is needed for this one purpose."""
        return self._terms.get(value) if self._readers[value] == 1 else None

    def _of(self, node: Node, operands: tuple[Value, ...]) -> _Terms | None:
        if isinstance(node.op, AllReduce):
            return _Terms(node.op.degree, operands)
        if isinstance(node.op, Cast):
            terms = self._known(node.operands[0])
            first = node.operands[0].type.dtype is DType.FLOAT32 and node.result.type.dtype.is_float
            return replace(terms, before=(*terms.before, *terms.after), after=()) if terms and first else None
        if node.op == Binary("add"):
            return self._added(node, operands)
        return None

    def _added(self, node: Node, operands: tuple[Value, ...]) -> _Terms | None:
        sides = [self._known(operand) for operand in node.operands]
        if any(terms and operand.type != node.result.type for terms, operand in zip(sides, operands, strict=True)):
            return None
        left, right = sides
        if left and right:
            alike = {value.type for value in left.partial + right.partial}
            return _joined(left, right) if len(alike) == 1 else None
        for terms, other in ((left, operands[1]), (right, operands[0])):
            if terms:
                return replace(terms, after=(*terms.after, other))
        return None


def _joined(left: _Terms, right: _Terms) -> _Terms:
    partial, before = left.partial + right.partial, left.before + right.before
    return _Terms(left.degree, partial, before, left.after + right.after)


def _written(builder: GraphBuilder, terms: _Terms, dtype: DType, origin: Origin) -> Value:
    """Parts added on each rank, summed over ranks, and then the rest as it was."""

    def added(total: Value, others: tuple[Value, ...]) -> Value:
        for other in others:
            total = builder.add(Binary("add"), total, other, origin=origin)
        return total

    first, *rest = terms.partial
    total = builder.add(AllReduce(terms.degree), added(first, tuple(rest)), origin=origin)
    total = added(total, terms.before)
    if total.type.dtype is not dtype:
        total = builder.add(Cast(dtype), total, origin=origin)
    return added(total, terms.after)


_LANES: Final = 128  # rows that a core works on side by side
_ROWS: Final = 32  # of each rank in a run


def divide_rows(graph: Graph, degree: int) -> Graph:
    """Divide rows wherever ranks do not exchange more bytes by it. The graph has no repeats."""
    return _Dividing(graph, degree, _divided(graph, degree)).graph()


def _divided(graph: Graph, degree: int) -> set[Value]:
    """The values of which each rank has its share of the rows: all of those that hang together, or none."""
    regions: dict[Value, set[Value]] = {}
    for node in graph.nodes:
        if isinstance(node.op, AllReduce) and _goes_up(node.result, degree):
            regions[node.result] = {node.result}
        elif _is_by_row(node):
            joined = [regions[operand] for operand in node.operands if operand in regions and _alike(operand, node)]
            if joined:
                region = max(joined, key=len)
                region.update({node.result}, *joined)
                regions |= dict.fromkeys((value for each in (*joined, {node.result}) for value in each), region)
    distinct = {id(region): region for region in regions.values()}.values()
    return {value for region in distinct if _pays(graph, region) for value in region}


def _goes_up(value: Value, degree: int) -> bool:
    shape = value.type.shape
    return len(shape) > 1 and shape[-2] > 0 and shape[-2] % (_LANES * degree) == 0


def _is_by_row(node: Node) -> bool:
    """A share of its rows needs only that share of its operands' rows, or operands that are equal for all rows."""
    if isinstance(node.op, RmsNorm | LayerNorm):
        return node.op.axes == 1
    if not isinstance(node.op, Binary | Cast | Unary | Where) or node.result.type.rank < 2:
        return False
    rows = node.result.type.shape[-2]
    return all(_is_for_all(operand) or operand.type.shape[-2] == rows for operand in node.operands)


def _is_for_all(operand: Value) -> bool:
    return operand.type.rank < 2 or operand.type.shape[-2] == 1


def _alike(operand: Value, node: Node) -> bool:
    """A node's result has the rows of its operand."""
    return operand.type.shape[:-1] == node.result.type.shape[:-1]


def _pays(graph: Graph, region: set[Value]) -> bool:
    """Bytes that ranks exchange: a sum counts the bytes of its result, once to scatter and once to gather."""
    sums = [node.result for node in graph.nodes if node.result in region and isinstance(node.op, AllReduce)]
    gathered = sum(value.type.nbytes for value in _read_whole(graph, region))
    return len(sums) < len(region) and gathered <= sum(value.type.nbytes for value in sums)


def _read_whole(graph: Graph, divided: set[Value]) -> set[Value]:
    """The divided values of which some reader needs all rows."""
    readers = {operand for node in graph.nodes if node.result not in divided for operand in node.operands}
    return divided & (readers | set(graph.outputs.values()))


class _Dividing:
    def __init__(self, graph: Graph, degree: int, divided: set[Value]) -> None:
        self._graph = graph
        self._degree = degree
        self._divided = divided
        self._builder = GraphBuilder()
        self._new = declare(self._builder, graph)
        self._moved: dict[Value, Value] = {}  # what was whole, sliced; what was divided, gathered

    def graph(self) -> Graph:
        for node in self._graph.nodes:
            self._new[node.result] = self._rebuilt(node)
        for name, value in self._graph.outputs.items():
            self._builder.output(name, self._whole(value, Origin(name)))
        return self._builder.build()

    def _rebuilt(self, node: Node) -> Value:
        if node.result not in self._divided:
            return keep(self._builder, node, [self._whole(operand, node.origin) for operand in node.operands])
        if isinstance(node.op, AllReduce):
            op = ReduceScatter(*self._attributes(node.result))
            return self._builder.add(op, self._whole(node.operands[0], node.origin), origin=node.origin)
        return keep(self._builder, node, list(self._shares(node)))

    def _shares(self, node: Node) -> Iterator[Value]:
        for operand in node.operands:
            if operand in self._divided or _is_for_all(operand):
                yield self._new[operand]
            else:
                if operand not in self._moved:
                    op = RankSlice(*self._attributes(operand))
                    self._moved[operand] = self._builder.add(op, self._new[operand], origin=node.origin)
                yield self._moved[operand]

    def _whole(self, value: Value, origin: Origin) -> Value:
        if value not in self._divided:
            return self._new[value]
        if value not in self._moved:
            op = AllGather(*self._attributes(value))
            self._moved[value] = self._builder.add(op, self._new[value], origin=origin)
        return self._moved[value]

    def _attributes(self, value: Value) -> tuple[int, int, tuple[int, ...], tuple[int, ...], int]:
        axis, run = value.type.rank - 2, _ROWS * self._degree
        return axis, value.type.shape[axis] // run, (run,), (self._degree,), self._degree
