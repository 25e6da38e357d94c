"""What compiler and runtime refuse or change about a graph that lowers, by their public documentation."""

from collections.abc import Iterator

import numpy as np

from emulator.graph import Graph
from emulator.ops import ArgSort, IndexUpdate
from emulator.types import DType, TensorType
from pipeline.check.finding import EMPTY_TENSOR, INT64, LARGE_TENSOR, OPERAND_TYPE, Finding
from pipeline.check.lowered import each_node, grouped

_LARGEST_TENSOR = 4 << 30
_INT32 = np.iinfo(np.int32)


def limits(graph: Graph) -> Iterator[Finding]:
    yield from _sizes(graph)
    yield from _wide_integers(graph)
    yield from grouped(_refused_types(graph))


def _sizes(graph: Graph) -> Iterator[Finding]:
    named: dict[str, TensorType] = {name: value.type for name, value in graph.parameters.items()}
    named |= {name: value.type for name, value in graph.inputs.items()}
    for name, kind in named.items():
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


def _wide_integers(graph: Graph) -> Iterator[Finding]:
    for value, numbers in graph.constants.items():
        if value.type.dtype is DType.INT64 and numbers.size:
            worst = max(int(numbers.max()), int(numbers.min()), key=abs)
            if not _INT32.min <= worst <= _INT32.max:
                yield Finding(
                    INT64,
                    f"the constant {worst} needs 64 bits, and the compiler keeps integers in 32",
                    "keep such a number in fp32, or below 2**31",
                )


def _refused_types(graph: Graph) -> Iterator[Finding]:
    for node, times in each_node(graph):
        kind = node.operands[0].type.dtype if node.operands else None
        if kind is None or kind.is_float:
            continue
        if isinstance(node.op, ArgSort):
            advice = "sort the keys as fp32 (NCC_EVRF013)"
        elif isinstance(node.op, IndexUpdate) and node.op.accumulate:
            advice = "accumulate in fp32 and cast the sums (NCC_EVRF016)"
        else:
            continue
        yield Finding.at(OPERAND_TYPE, f"{node.op.label} on {kind} may be refused", advice, node.origin, times)
