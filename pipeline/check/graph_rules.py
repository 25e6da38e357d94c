"""Rules about a compiled graph: documented limits of compiler and runtime, lookups out of range, numeric risks."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import (
    Binary,
    Broadcast,
    Cast,
    Cumulate,
    Flip,
    Gather,
    Index,
    IndexUpdate,
    Iota,
    LayerNorm,
    Operator,
    Reshape,
    RmsNorm,
    ScatterAlong,
    Slice,
    Softmax,
    TakeAlong,
    Transpose,
)
from nxpipe.pipeline.compile.findings import (
    EMPTY_TENSOR,
    FP8_KIND,
    FP8_RANGE,
    FP16_OVERFLOW,
    LARGE_TENSOR,
    NARROW_COUNT,
    NARROW_SENSITIVE,
    OPERAND_TYPE,
    POSITIONS,
    Finding,
)


def nodes_with_counts(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Each stored node with its execution count: nodes of a repeat are stored once."""
    times = [1] * len(graph.nodes)
    for repeat in graph.repeats:
        times[repeat.start : repeat.stop] = [repeat.count] * (repeat.stop - repeat.start)
    return zip(graph.nodes, times, strict=True)


def group_layers(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that differ only in the layer number, and add up their counts."""
    groups: dict[Finding, int] = {}
    for finding in findings:
        group = replace(finding, module=re.sub(r"(?<=\.)\d+(?=\.|$)", "*", finding.module), count=1)
        groups[group] = groups.get(group, 0) + finding.count
    return [replace(finding, count=count) for finding, count in groups.items()]


_LARGEST_TENSOR = 4 << 30


def limits(graph: Graph, target: str) -> Iterator[Finding]:
    """Sizes, types and operators that the compiler or the runtime refuses or changes."""
    yield from _sizes(graph)
    yield from _narrow_floats(graph, target)
    yield from group_layers(_refused_nodes(graph))


def _interface(graph: Graph) -> dict[str, TensorType]:
    """The named tensors in the device's memory."""
    return {name: value.type for side in (graph.parameters, graph.inputs) for name, value in side.items()}


def _sizes(graph: Graph) -> Iterator[Finding]:
    for name, kind in _interface(graph).items():
        if kind.nbytes > _LARGEST_TENSOR:
            yield Finding(
                LARGE_TENSOR,
                f"{name} is {kind}: {kind.nbytes / 2**30:.1f} GiB in one tensor",
                "split it by tensor parallelism, or use a runtime that supports tensors above 4 GB",
                module=name,
            )
        if kind.elements == 0:
            yield Finding(
                EMPTY_TENSOR, f"{name} is {kind}, which has no elements", "correct the sizes in config.json", name
            )


def _narrow_floats(graph: Graph, target: str) -> Iterator[Finding]:
    """Tensors in the E4M3 format that the target's generation lacks."""
    if target == "trn3":
        return
    for name, kind in _interface(graph).items():
        if kind.dtype is DType.FLOAT8_E4M3FN:
            yield Finding(
                FP8_KIND,
                f"{name} is {kind}, a format that {target} does not have (NCC_EVRF051)",
                "compile for trn3, or store it as float8_e4m3, whose maximum is 240",
                module=name,
            )


def _refused_nodes(graph: Graph) -> Iterator[Finding]:
    """Products of integers at computed places. Other operators whose opcode the compiler refuses, such as orders of
    integers and dilated windows, are composed of other opcodes (docs/reference/hlo.md)."""
    for node, times in nodes_with_counts(graph):
        if isinstance(node.op, IndexUpdate | ScatterAlong) and node.op.combine == "multiply":
            kind = node.operands[0].type.dtype
            if kind.is_integer:
                message = f"{node.op.label} that multiplies {kind} (NCC_EVRF016)"
                yield Finding.at(OPERAND_TYPE, message, "multiply in fp32 and cast back", node.origin, times)


_FP16_MAX = 65504
# Functions whose results exceed fp16 for moderate inputs: exp(11.1) does.
_GROWING = frozenset({"exp", "exp2", "expm1", "pow", "square", "cosh", "sinh"})
_SENSITIVE_FUNCTIONS = frozenset({"exp", "exp2", "log", "log2", "log1p", "expm1", "rsqrt", "reciprocal"})
_SENSITIVE = (LayerNorm, RmsNorm, Softmax)
_EXACT_INTEGERS = {DType.BFLOAT16: 1 << 8, DType.FLOAT16: 1 << 11}


def risks(graph: Graph, autocast: str) -> Iterator[Finding]:
    """Uses of narrow types that may degrade outputs: risks to examine with `nxpipe verify`, not faults."""
    yield from group_layers(_node_risks(graph, autocast))
    yield from _constant_risks(graph)


def _node_risks(graph: Graph, autocast: str) -> Iterator[Finding]:
    narrow = {DType.BFLOAT16, DType.FLOAT16}
    for node, times in nodes_with_counts(graph):
        reads = node.operands[0].type.dtype if node.operands else None
        kind, label = node.result.type.dtype, node.op.label
        if autocast == "all" and _sensitive(node) and reads in narrow:
            yield Finding.at(
                NARROW_SENSITIVE,
                f"autocast all casts the operands of {label} to {reads}",
                "compare with --autocast matmult, which keeps it in fp32",
                node.origin,
                times,
            )
        if kind is DType.FLOAT16 and (label in _GROWING or _is_square(node)):
            operation = "a square" if _is_square(node) else label
            advice = "keep it in fp32 or bf16, or make the values smaller first"
            yield Finding.at(FP16_OVERFLOW, f"{operation} in fp16 overflows above 65504", advice, node.origin, times)
        if isinstance(node.op, Cast) and kind.value.startswith("float8"):
            advice = "scale the operands into the range, or cast to bf16"
            yield Finding.at(FP8_RANGE, f"an operand is cast to {kind} without a scale", advice, node.origin, times)


def _sensitive(node: Node) -> bool:
    return isinstance(node.op, _SENSITIVE) or node.op.label in _SENSITIVE_FUNCTIONS


def _is_square(node: Node) -> bool:
    return node.op.label == "multiply" and node.operands[0] == node.operands[1]


def _constant_risks(graph: Graph) -> Iterator[Finding]:
    for value, numbers in graph.constants.items():
        largest = float(np.abs(numbers.astype(np.float64)).max(initial=0.0))
        if value.type.dtype is DType.FLOAT16 and largest >= _FP16_MAX:
            position = "infinite" if np.isinf(largest) else "at the maximum of the range"
            yield Finding(
                FP16_OVERFLOW,
                f"a constant of shape {list(value.type.shape)} is {position} in fp16, like a mask written for fp32",
                "softmax of a fully masked row is NaN; use -1e4 in masks, or bf16",
            )
    constants = graph.constants
    for node, times in nodes_with_counts(graph):
        exact = _EXACT_INTEGERS.get(node.result.type.dtype)
        source = node.operands[0] if node.operands else None
        if not isinstance(node.op, Cast) or exact is None or source not in constants or source is None:
            continue
        if source.type.dtype.is_integer and np.abs(constants[source]).max(initial=0) > exact:
            yield Finding.at(
                NARROW_COUNT,
                f"integers above {exact} are cast to {node.result.type.dtype}",
                "compute positions in fp32 and cast the result",
                node.origin,
                times,
            )


# Operators whose results contain only elements of their first operand.
_SELECTING = (Broadcast, Cast, Flip, Gather, Index, Reshape, Slice, TakeAlong, Transpose)


class Range(NamedTuple):
    """The least and the greatest number that a tensor can hold."""

    low: int
    high: int


_BIT = Range(0, 1)


def lookups_outside(graph: Graph) -> Iterator[Finding]:
    """Lookups whose index can be outside of their table."""
    yield from group_layers(_out_of_range(graph, _ranges(graph)))


def _out_of_range(graph: Graph, ranges: Mapping[Value, Range]) -> Iterator[Finding]:
    for node, times in nodes_with_counts(graph):
        for index, size, lowest in _table_lookups(node):
            index_range = ranges.get(index)
            if index_range is not None and (index_range.high >= size or index_range.low < lowest):
                worst = index_range.high if index_range.high >= size else index_range.low
                beyond = max(index_range.high - size + 1, lowest - index_range.low)
                yield Finding.at(
                    POSITIONS,
                    f"a lookup reads row {worst} of a table with {size} rows",
                    f"pass --buckets shorter by {beyond}, or enlarge the table",
                    node.origin,
                    times,
                )


def _table_lookups(node: Node) -> Iterator[tuple[Value, int, int]]:
    """The index tensors of a lookup, each with the length of its axis and the least valid index."""
    if isinstance(node.op, Gather | TakeAlong):
        yield node.operands[1], node.operands[0].type.shape[node.op.axis], 0
    if isinstance(node.op, Index):  # negative indices count from the end
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
    # Carried values differ between the iterations of a repeat, so their ranges are unknown.
    carried = {value for repeat in graph.repeats for value in repeat.carried}
    for node in graph.nodes:
        if node.result.type.dtype is DType.BOOL:
            known[node.result] = _BIT
        elif not node.result.type.dtype.is_float:
            operand_ranges = [None if operand in carried else known.get(operand) for operand in node.operands]
            result_range = _range(node.op, operand_ranges, node)
            if result_range is not None:
                known[node.result] = result_range
    return known


def _range(op: Operator, operands: list[Range | None], node: Node) -> Range | None:
    if isinstance(op, Iota):
        ends = (op.start, op.start + op.step * max(op.length - 1, 0))
        return Range(min(ends), max(ends))
    if not operands or operands[0] is None:
        return None
    if isinstance(op, _SELECTING):
        return operands[0]
    if isinstance(op, Cumulate) and op.function == "cumsum":
        length = node.operands[0].type.shape[op.axis]
        low, high = operands[0]
        return Range(min(low, length * low), max(high, length * high))
    if isinstance(op, Binary) and operands[1] is not None:
        return _combined(op.function, operands[0], operands[1])
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
