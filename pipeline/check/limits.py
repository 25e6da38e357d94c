"""What compiler and runtime refuse or change about a graph that lowers, by their public documentation."""

from collections.abc import Iterator

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import ArgSort, IndexUpdate, Pool, ScatterAlong
from nxpipe.emulator.passes import PassOptions
from nxpipe.pipeline.check.finding import (
    EMPTY_TENSOR,
    FP8_KIND,
    INTEGER_ORDER,
    LARGE_TENSOR,
    OPERAND_TYPE,
    WINDOW,
    Finding,
    Rule,
)
from nxpipe.pipeline.check.lowered import each_node, grouped

_LARGEST_TENSOR = 4 << 30


def limits(graph: Graph, options: PassOptions) -> Iterator[Finding]:
    yield from _sizes(graph)
    yield from _narrow_floats(graph, options)
    yield from grouped(_refused(graph))


def _interface(graph: Graph) -> dict[str, TensorType]:
    """What lies in the device's memory under a name."""
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


def _narrow_floats(graph: Graph, options: PassOptions) -> Iterator[Finding]:
    """Which of the two E4M3 formats there is depends on the generation."""
    if options.target == "trn3":
        return
    for name, kind in _interface(graph).items():
        if kind.dtype is DType.FLOAT8_E4M3FN:
            yield Finding(
                FP8_KIND,
                f"{name} is {kind}, a format that {options.target} does not have (NCC_EVRF051)",
                "compile for trn3, or store it as float8_e4m3, which ends at 240",
                module=name,
            )


def _refused(graph: Graph) -> Iterator[Finding]:
    for node, times in each_node(graph):
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
