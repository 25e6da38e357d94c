"""Where narrow numbers may spoil an answer: risks to look at with `nxpipe verify`, not faults."""

from collections.abc import Iterator

import numpy as np

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Cast, LayerNorm, RmsNorm, Softmax
from nxpipe.emulator.passes import PassOptions
from nxpipe.pipeline.check.finding import FP8_RANGE, FP16_OVERFLOW, NARROW_COUNT, NARROW_SENSITIVE, Finding
from nxpipe.pipeline.check.lowered import each_node, grouped

_FP16_MOST = 65504
# Functions whose results leave the range of fp16 for inputs well inside it: exp(11.1) does already.
_GROWING = frozenset({"exp", "exp2", "expm1", "pow", "square", "cosh", "sinh"})
_SENSITIVE_FUNCTIONS = frozenset({"exp", "exp2", "log", "log2", "log1p", "expm1", "rsqrt", "reciprocal"})
_SENSITIVE = (LayerNorm, RmsNorm, Softmax)
_EXACT_INTEGERS = {DType.BFLOAT16: 1 << 8, DType.FLOAT16: 1 << 11}


def risks(graph: Graph, options: PassOptions) -> Iterator[Finding]:
    yield from grouped(_of_nodes(graph, options))
    yield from _of_constants(graph)


def _of_nodes(graph: Graph, options: PassOptions) -> Iterator[Finding]:
    narrow = {DType.BFLOAT16, DType.FLOAT16}
    for node, times in each_node(graph):
        reads = node.operands[0].type.dtype if node.operands else None
        kind, label = node.result.type.dtype, node.op.label
        if options.autocast == "all" and _sensitive(node) and reads in narrow:
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
    for node, times in each_node(graph):
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
