"""Sums over ranks that are added to each other become one sum: a meeting of all ranks costs more than an addition.

Blocks that compute attention and MLP side by side, as GPT-J's and Falcon's do, so meet once instead of twice.
"""

from collections import Counter
from dataclasses import dataclass, replace

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Origin, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import AllReduce, Binary, Cast
from nxpipe.emulator.passes.clean import eliminate_dead_code
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.rewrite import keep, rewrite


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
