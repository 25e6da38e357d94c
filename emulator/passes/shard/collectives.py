"""Placement of collectives: fewer all-reduces, and work on shares of rows between them.

`merge_sums`: two sums over ranks that are added become one, because an all-reduce costs more than an addition. Blocks
that compute attention and MLP side by side, as GPT-J's and Falcon's do, then need one all-reduce instead of two.

`divide_rows` (sequence parallelism): an all-reduce is a reduce-scatter and an all-gather. Where each row is processed
by itself after a sum, as in norms and residuals, each rank does that for its share of the rows between the two halves,
so that ranks neither hold nor process the whole residual stream. It applies only where every lane of a core has a row
of the share. A share consists of a few rows of every short run, so that products can be fed run by run.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Origin, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import (
    AllGather,
    AllReduce,
    Binary,
    Cast,
    LayerNorm,
    RankSlice,
    ReduceScatter,
    RmsNorm,
    Unary,
    Where,
)
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.rewrite import declare, keep, rewrite
from nxpipe.emulator.passes.simplify import eliminate_dead_code


@dataclass(frozen=True)
class _Terms:
    """What a value is the sum of: partial sums of ranks, then terms that all ranks know, before and after a cast."""

    degree: int
    partial: tuple[Value, ...]
    before: tuple[Value, ...] = ()
    after: tuple[Value, ...] = ()


def merge_sums(graph: Graph) -> Graph:
    """Wherever two or more sums over ranks are added up, and read by nobody else, ranks add their parts first."""
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
    """Wherever ranks do not exchange more by it. The graph has no repeats."""
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
    """Whether a share of its rows needs that share of its operands' rows, or what is the same for all rows."""
    if isinstance(node.op, RmsNorm | LayerNorm):
        return node.op.axes == 1
    if not isinstance(node.op, Binary | Cast | Unary | Where) or node.result.type.rank < 2:
        return False
    rows = node.result.type.shape[-2]
    return all(_is_for_all(operand) or operand.type.shape[-2] == rows for operand in node.operands)


def _is_for_all(operand: Value) -> bool:
    return operand.type.rank < 2 or operand.type.shape[-2] == 1


def _alike(operand: Value, node: Node) -> bool:
    """Whether a node's result has the rows of its operand."""
    return operand.type.shape[:-1] == node.result.type.shape[:-1]


def _pays(graph: Graph, region: set[Value]) -> bool:
    """Bytes that ranks exchange: a sum is as many as its result, both to scatter and to gather it."""
    sums = [node.result for node in graph.nodes if node.result in region and isinstance(node.op, AllReduce)]
    gathered = sum(value.type.nbytes for value in _read_whole(graph, region))
    return len(sums) < len(region) and gathered <= sum(value.type.nbytes for value in sums)


def _read_whole(graph: Graph, divided: set[Value]) -> set[Value]:
    """Of values that are divided, those that somebody needs with all rows."""
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
