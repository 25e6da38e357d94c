"""Cost of padding: units of zeros are stored and multiplied like any others."""

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
    """The relative excess over all ranks: of weights and states held, and of multiply-adds."""

    held: float
    work: float

    def __bool__(self) -> bool:
        return self.held > 0 or self.work > 0

    def __str__(self) -> str:
        return f"{self.work:.1%} more multiply-adds, {self.held:.1%} more bytes of weights and states"


NO_PADDING: Final = Padding(0.0, 0.0)


def worst(several: Iterable[Padding]) -> Padding:
    """The worst padding of the programs of one model."""
    found = [NO_PADDING, *several]
    return Padding(max(one.held for one in found), max(one.work for one in found))


def padding(graph: Graph, plan: ShardPlan) -> Padding:
    """The padding of a plan of this graph, or of its first layers."""
    degree, layout = plan.degree, plan.walk.layout
    alike = {later: first for first, later in _counterparts(graph)}
    tensors = (*graph.parameters.values(), *(graph.inputs[name] for name in graph.inputs.keys() & graph.outputs.keys()))
    held = [(value.type.nbytes, layout(alike.get(value, value))) for value in tensors]
    return Padding(_surplus(held, degree), _surplus(list(_products(graph, plan)), degree))


def _counterparts(graph: Graph) -> Iterator[tuple[Value, Value]]:
    for repeat in graph.repeats:
        for first, others in repeat.taken.items():
            yield from ((first, other) for other in others)


def _surplus(amounts: list[tuple[int, Layout]], degree: int) -> float:
    """The relative padding of these amounts, each divided by its layout."""
    filled = padded = 0.0
    for amount, layout in amounts:
        real, zeros = (1.0 * degree, 0.0) if layout is None else _filled(layout, degree)
        filled += amount * real
        padded += amount * zeros
    return padded / filled if filled else 0.0


def _filled(layout: Split, degree: int) -> tuple[float, float]:
    """Copies of a tensor's elements on all ranks together, and the padding beside them."""
    return _shares_filled(layout.shares(degree), degree)


@lru_cache(1 << 10)
def _shares_filled(shares: tuple[Share, ...], degree: int) -> tuple[float, float]:
    size = sum(share.size for share in shares)
    real = sum(one.size for rank in range(degree) for one in stretches(shares, rank, degree))
    return real / max(size, 1), (degree * sum(share.local for share in shares) - real) / max(size, 1)


def _products(graph: Graph, plan: ShardPlan) -> Iterator[tuple[int, Layout]]:
    """The multiply-adds of each node, and how it is divided."""
    times = [1] * len(graph.nodes)
    for repeat in graph.repeats:
        times[repeat.start : repeat.stop] = [repeat.count] * (repeat.stop - repeat.start)
    for node, often in zip(graph.nodes, times, strict=True):
        amount = _multiply_adds(node)
        if amount:
            divided = (layout for layout in plan.walk.verdicts[node.result].operands if layout is not None)
            yield often * amount, next(divided, None)


def _multiply_adds(node: Node) -> int:
    result, shapes = node.result.type.elements, [operand.type.shape for operand in node.operands]
    if isinstance(node.op, Attention):
        query, keys = node.operands[0].type.elements, shapes[1][-2]
        return (query + result) * keys
    if isinstance(node.op, Convolution):
        return result * prod(shapes[1][1:])
    return result * shapes[0][-1] if isinstance(node.op, Linear | MatMul | GroupedMatMul) else 0
