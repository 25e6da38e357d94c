"""The cost of padding: units of zeros are stored and multiplied like any others."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ops import Attention, Convolution, GroupedMatMul, Linear, MatMul
from nxpipe.emulator.ops.collective import Share, stretches
from nxpipe.emulator.passes.shard.layout import Layout, Split
from nxpipe.emulator.passes.shard.plan import ShardPlan


@dataclass(frozen=True)
class Padding:
    """The relative overhead of padding over all ranks: bytes of weights and states (`held`), multiply-adds (`work`)."""

    held: float
    work: float

    def __bool__(self) -> bool:
        return self.held > 0 or self.work > 0

    def __str__(self) -> str:
        return f"{self.work:.1%} more multiply-adds, {self.held:.1%} more bytes of weights and states"


NO_PADDING: Final = Padding(0.0, 0.0)


def worst(programs: Iterable[Padding]) -> Padding:
    """The largest padding of the programs of a model."""
    paddings = [NO_PADDING, *programs]
    return Padding(max(padding.held for padding in paddings), max(padding.work for padding in paddings))


def padding(graph: Graph, plan: ShardPlan) -> Padding:
    """The padding of a plan; `plan` may be that of the first iteration of the graph's repeats."""
    degree, layout = plan.degree, plan.propagation.layout
    counterparts = {later: first for first, later in _counterparts(graph)}
    tensors = (*graph.parameters.values(), *(graph.inputs[name] for name in graph.inputs.keys() & graph.outputs.keys()))
    stored = [(value.type.nbytes, layout(counterparts.get(value, value))) for value in tensors]
    return Padding(_overhead(stored, degree), _overhead(list(_products(graph, plan)), degree))


def _counterparts(graph: Graph) -> Iterator[tuple[Value, Value]]:
    for repeat in graph.repeats:
        for first, others in repeat.taken.items():
            yield from ((first, other) for other in others)


def _overhead(amounts: list[tuple[int, Layout]], degree: int) -> float:
    """The relative overhead of amounts that are divided by their layouts."""
    filled = padded = 0.0
    for amount, layout in amounts:
        real, zeros = (1.0 * degree, 0.0) if layout is None else _filled(layout, degree)
        filled += amount * real
        padded += amount * zeros
    return padded / filled if filled else 0.0


def _filled(layout: Split, degree: int) -> tuple[float, float]:
    """The elements on all ranks and the padding on all ranks, both relative to the tensor's size."""
    return _shares_filled(layout.shares(degree), degree)


@lru_cache(1 << 10)
def _shares_filled(shares: tuple[Share, ...], degree: int) -> tuple[float, float]:
    size = sum(share.size for share in shares)
    real = sum(stretch.size for rank in range(degree) for stretch in stretches(shares, rank, degree))
    return real / max(size, 1), (degree * sum(share.local for share in shares) - real) / max(size, 1)


def _products(graph: Graph, plan: ShardPlan) -> Iterator[tuple[int, Layout]]:
    """The multiply-adds of each node, with the layout by which they are divided."""
    times = [1] * len(graph.nodes)
    for repeat in graph.repeats:
        times[repeat.start : repeat.stop] = [repeat.count] * (repeat.stop - repeat.start)
    for node, count in zip(graph.nodes, times, strict=True):
        amount = _multiply_adds(node)
        if amount:
            layouts = (layout for layout in plan.propagation.node_shardings[node.result].operands if layout is not None)
            yield count * amount, next(layouts, None)


def _multiply_adds(node: Node) -> int:
    result, shapes = node.result.type.elements, [operand.type.shape for operand in node.operands]
    if isinstance(node.op, Attention):
        query, keys = node.operands[0].type.elements, shapes[1][-2]
        return (query + result) * keys
    if isinstance(node.op, Convolution):
        return result * prod(shapes[1][1:])
    return result * shapes[0][-1] if isinstance(node.op, Linear | MatMul | GroupedMatMul) else 0
