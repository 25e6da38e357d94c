"""Rules about a compiled graph: what compiler and runtime refuse by their public documentation, and numeric risks."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import (
    ArgSort,
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
    Pool,
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
    INTEGER_ORDER,
    LARGE_TENSOR,
    NARROW_COUNT,
    NARROW_SENSITIVE,
    OPERAND_TYPE,
    POSITIONS,
    WINDOW,
    Finding,
    Rule,
)


def nodes_with_counts(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Each stored node, and how often it runs: nodes of a repeat are stored once."""
    times = [1] * len(graph.nodes)
    for repeat in graph.repeats:
        times[repeat.start : repeat.stop] = [repeat.count] * (repeat.stop - repeat.start)
    return zip(graph.nodes, times, strict=True)


def group_layers(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that differ in the layer number alone, and count them."""
    groups: dict[Finding, int] = {}
    for finding in findings:
        one = replace(finding, module=re.sub(r"(?<=\.)\d+(?=\.|$)", "*", finding.module), count=1)
        groups[one] = groups.get(one, 0) + finding.count
    return [replace(finding, count=count) for finding, count in groups.items()]


_LARGEST_TENSOR = 4 << 30


def limits(graph: Graph, target: str) -> Iterator[Finding]:
    """Sizes, types and operators that the compiler or the runtime refuses or changes."""
    yield from _sizes(graph)
    yield from _narrow_floats(graph, target)
    yield from group_layers(_refused(graph))


def _interface(graph: Graph) -> dict[str, TensorType]:
    """The named tensors in the device's memory."""
    return {name: value.type for side in (graph.parameters, graph.inputs) for name, value in side.items()}


def _sizes(graph: Graph) -> Iterator[Finding]:
    for name, kind in _interface(graph).items():
        if kind.nbytes > _LARGEST_TENSOR:
            yield Finding(
                LARGE_TENSOR,
                f"{name} is {kind}: {kind.nbytes / 2**30:.1f} GiB in one tensor",
                "split it by tensor parallelism, or use a runtime that takes tensors above 4 GB",
                module=name,
            )
        if kind.elements == 0:
            yield Finding(
                EMPTY_TENSOR, f"{name} is {kind}, which has no elements", "correct the sizes in config.json", name
            )


def _narrow_floats(graph: Graph, target: str) -> Iterator[Finding]:
    """Which of the two E4M3 formats there is depends on the generation."""
    if target == "trn3":
        return
    for name, kind in _interface(graph).items():
        if kind.dtype is DType.FLOAT8_E4M3FN:
            yield Finding(
                FP8_KIND,
                f"{name} is {kind}, a format that {target} does not have (NCC_EVRF051)",
                "compile for trn3, or store it as float8_e4m3, which ends at 240",
                module=name,
            )


def _refused(graph: Graph) -> Iterator[Finding]:
    for node, times in nodes_with_counts(graph):
        for rule, message, advice in _refusals(node):
            yield Finding.at(rule, message, advice, node.origin, times)


def _refusals(node: Node) -> Iterator[tuple[Rule, str, str]]:
    kind = node.operands[0].type.dtype if node.operands else DType.FLOAT32
    if isinstance(node.op, IndexUpdate | ScatterAlong) and node.op.combine and not kind.is_float:
        yield OPERAND_TYPE, f"{node.op.label} that combines {kind} (NCC_EVRF016)", "combine in fp32 and cast the result"
    if isinstance(node.op, ArgSort) and not kind.is_float:
        yield (
            INTEGER_ORDER,
            f"{node.op.label} on {kind}: the compiler refuses a top-k on integers (NCC_EVRF013)",
            "sort the keys as fp32, which is exact below 2**24",
        )
    if isinstance(node.op, Pool) and max(node.op.dilation) > 1:
        yield (
            WINDOW,
            f"{node.op.label} over windows with holes of {max(node.op.dilation) - 1} (NCC_EVRF018)",
            "take every n-th place with a slice first, or pool without dilation",
        )


_FP16_MOST = 65504
# Functions whose results leave the range of fp16 for inputs well inside it: exp(11.1) does already.
_GROWING = frozenset({"exp", "exp2", "expm1", "pow", "square", "cosh", "sinh"})
_SENSITIVE_FUNCTIONS = frozenset({"exp", "exp2", "log", "log2", "log1p", "expm1", "rsqrt", "reciprocal"})
_SENSITIVE = (LayerNorm, RmsNorm, Softmax)
_EXACT_INTEGERS = {DType.BFLOAT16: 1 << 8, DType.FLOAT16: 1 << 11}


def risks(graph: Graph, autocast: str) -> Iterator[Finding]:
    """Narrow types that may spoil an answer: risks to look at with `nxpipe verify`, not faults."""
    yield from group_layers(_of_nodes(graph, autocast))
    yield from _of_constants(graph)


def _of_nodes(graph: Graph, autocast: str) -> Iterator[Finding]:
    narrow = {DType.BFLOAT16, DType.FLOAT16}
    for node, times in nodes_with_counts(graph):
        reads = node.operands[0].type.dtype if node.operands else None
        kind, label = node.result.type.dtype, node.op.label
        if autocast == "all" and _sensitive(node) and reads in narrow:
            yield Finding.at(
                NARROW_SENSITIVE,
                f"autocast all feeds {label} with {reads}",
                "compare with --autocast matmult, which leaves it in fp32",
                node.origin,
                times,
            )
        if kind is DType.FLOAT16 and (label in _GROWING or _squares(node)):
            what = "a square" if _squares(node) else label
            advice = "keep it in fp32 or bf16, or make the values smaller first"
            yield Finding.at(FP16_OVERFLOW, f"{what} in fp16 overflows early", advice, node.origin, times)
        if isinstance(node.op, Cast) and kind.value.startswith("float8"):
            advice = "scale the operands into the range, or cast to bf16"
            yield Finding.at(FP8_RANGE, f"an operand is cast to {kind} without a scale", advice, node.origin, times)


def _sensitive(node: Node) -> bool:
    return isinstance(node.op, _SENSITIVE) or node.op.label in _SENSITIVE_FUNCTIONS


def _squares(node: Node) -> bool:
    return node.op.label == "multiply" and node.operands[0] == node.operands[1]


def _of_constants(graph: Graph) -> Iterator[Finding]:
    for value, numbers in graph.constants.items():
        largest = float(np.abs(numbers.astype(np.float64)).max(initial=0.0))
        if value.type.dtype is DType.FLOAT16 and largest >= _FP16_MOST:
            what = "infinite" if np.isinf(largest) else "at the end of the range"
            yield Finding(
                FP16_OVERFLOW,
                f"a constant of shape {list(value.type.shape)} is {what} in fp16, as masks made for fp32 are",
                "a row that is masked whole becomes NaN; use -1e4 in masks, or bf16",
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
                    f"row {worst} is read from a table of {size} rows",
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
