"""The program of one rank, from a plan: local shapes, and collectives where the plan needs them."""

from dataclasses import replace
from typing import TypeAlias

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
    Linear,
    MatMul,
    Operator,
    RankSlice,
    Reshape,
    Slice,
    SliceUpdate,
    Where,
)
from nxpipe.emulator.ops.collective import uneven
from nxpipe.emulator.passes.shard.collectives import divide_rows, merge_sums
from nxpipe.emulator.passes.shard.layout import Layout, Split
from nxpipe.emulator.passes.shard.plan import ShardPlan
from nxpipe.emulator.passes.shard.propagation import Verdict

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
        """An operand as a node wants it: as it lies, gathered, or a rank's own share of it."""
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
