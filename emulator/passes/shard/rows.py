"""Where what follows a sum over ranks works on each row by itself, each rank does that for its share of the rows.

A sum is a meeting twice over: each rank adds up its share, and all take what the others made. Norms and residuals
between two products are done on shares, and only what products read is taken from all, so that ranks neither keep the
whole of the residual stream nor work on it. All lanes of a core are to have a row of its share: few rows stay as they
are. A share is a few rows of every short run, so that what products read can be exchanged run by run.
"""

from collections.abc import Iterator
from typing import Final

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Origin, Value
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
from nxpipe.emulator.passes.rewrite import declare, keep

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
