"""Rules about a compiled graph: what compiler and runtime refuse by their public documentation, and numeric risks."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from nxpipe.emulator.ir.graph import Graph, Node
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import ArgSort, Cast, IndexUpdate, LayerNorm, Pool, RmsNorm, ScatterAlong, Softmax
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
