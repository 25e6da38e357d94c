"""Lookups that reach outside of their tables: what the compiler reports as an index out of bounds (NCC_EVRF031, 056).

A range is followed from what is known, such as constants, counted places and masks of zeros and ones, through
arithmetic to the lookups. Where anything unknown takes part, as a token's id does, nothing is claimed.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import (
    Binary,
    Broadcast,
    Cast,
    Cumulate,
    Flip,
    Gather,
    Index,
    Iota,
    Operator,
    Reshape,
    Slice,
    TakeAlong,
    Transpose,
)
from nxpipe.pipeline.check.graph_rules import group_layers, nodes_with_counts
from nxpipe.pipeline.compile.findings import POSITIONS, Finding

# What these give was in their first operand.
_SELECTING = (Broadcast, Cast, Flip, Gather, Index, Reshape, Slice, TakeAlong, Transpose)


class Range(NamedTuple):
    """The least and the greatest number that a tensor can hold."""

    low: int
    high: int


_BIT = Range(0, 1)


def lookups_outside(graph: Graph) -> Iterator[Finding]:
    """Every lookup that can ask for a row behind the end of its table, or in front of it."""
    yield from group_layers(_outside(graph, _ranges(graph)))


def _outside(graph: Graph, ranges: Mapping[Value, Range]) -> Iterator[Finding]:
    for node, times in nodes_with_counts(graph):
        for index, size, lowest in _lookups(node):
            found = ranges.get(index)
            if found is not None and (found.high >= size or found.low < lowest):
                worst = found.high if found.high >= size else found.low
                beyond = max(found.high - size + 1, lowest - found.low)
                yield Finding.at(
                    POSITIONS,
                    f"a table of {size} rows is asked for row {worst}",
                    f"pass --buckets shorter by {beyond}, or give the table more rows",
                    node.origin,
                    times,
                )


def _lookups(node: Node) -> Iterator[tuple[Value, int, int]]:
    """Index, length of the axis that it counts along, and the least index that is allowed."""
    if isinstance(node.op, Gather | TakeAlong):
        yield node.operands[1], node.operands[0].type.shape[node.op.axis], 0
    if isinstance(node.op, Index):  # which counts negative numbers from the end
        shape = node.operands[0].type.shape
        for axis, index in zip(node.op.axes, node.operands[1:], strict=True):
            yield index, shape[axis], -shape[axis]


def _ranges(graph: Graph) -> dict[Value, Range]:
    known = {
        value: Range(int(numbers.min()), int(numbers.max()))
        for value, numbers in graph.constants.items()
        if numbers.size and not value.type.dtype.is_float
    }
    known |= {value: _BIT for name, value in graph.inputs.items() if "mask" in name and not value.type.dtype.is_float}
    # What later iterations of a repeat compute with is not what the first does.
    carried = {value for repeat in graph.repeats for value in repeat.carried}
    for node in graph.nodes:
        if node.result.type.dtype is DType.BOOL:
            known[node.result] = _BIT
        elif not node.result.type.dtype.is_float:
            given = [None if operand in carried else known.get(operand) for operand in node.operands]
            found = _range(node.op, given, node)
            if found is not None:
                known[node.result] = found
    return known


def _range(op: Operator, given: list[Range | None], node: Node) -> Range | None:
    if isinstance(op, Iota):
        ends = (op.start, op.start + op.step * max(op.length - 1, 0))
        return Range(min(ends), max(ends))
    if not given or given[0] is None:
        return None
    if isinstance(op, _SELECTING):
        return given[0]
    if isinstance(op, Cumulate) and op.function == "cumsum":
        length = node.operands[0].type.shape[op.axis]
        low, high = given[0]
        return Range(min(low, length * low), max(high, length * high))
    if isinstance(op, Binary) and given[1] is not None:
        return _combined(op.function, given[0], given[1])
    return None


def _combined(function: str, a: Range, b: Range) -> Range | None:
    if function == "add":
        return Range(a.low + b.low, a.high + b.high)
    if function == "subtract":
        return Range(a.low - b.high, a.high - b.low)
    if function == "multiply":
        corners = [x * y for x in a for y in b]
        return Range(min(corners), max(corners))
    if function in ("minimum", "maximum"):
        pick = min if function == "minimum" else max
        return Range(pick(a.low, b.low), pick(a.high, b.high))
    return None
