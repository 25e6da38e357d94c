"""Parameter layout: the transformation of weights that the host performs once, when it loads the program.

It consists of casts, a permutation of axes, a rank's slice, and an arrangement in tiles. A weight that only linear
layers or convolutions read is stored with its input axis first, because the tensor engine contracts over the partition
dimension. A matrix that only matmuls read is stored in tiles, so that what a partition of SBUF takes of a block of
columns is contiguous: DMA is slow if it moves the columns of each row separately.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.program import TILE_ROWS
from nxpipe.emulator.lower.view import TiledView, View
from nxpipe.emulator.ops import Cast, Convolution, Linear, MatMul, RankSlice

_TILE: Final = 512  # columns: the most that a matmul streams at a time, a bank of PSUM


@dataclass(frozen=True)
class StoredParameter:
    """The stored form of a parameter, or of a value that the host computes from one. `order[i]` is the axis of the
    value that stored axis i holds; an empty `order` keeps the axes."""

    parameter: Value
    dtype: DType
    shape: tuple[int, ...]
    order: tuple[int, ...]
    tile: int = 0  # columns; 0: row-major

    def view_of(self, stored: View) -> View:
        """The view of the value, in its own order of axes, from the view of the stored tensor. The view of a tiled
        matrix has its contraction axis first."""
        if self.tile:
            return TiledView(**vars(stored), tile=self.tile)
        if not self.order:
            return stored
        inverse = tuple(self.order.index(axis) for axis in range(len(self.order)))
        return stored.transposed(inverse)


def stored_parameters(graph: Graph) -> Mapping[Value, StoredParameter]:
    """The stored form of each parameter and of each value that the host computes from it."""
    readers, copied = _readers(graph), _copied(graph)
    stored: dict[Value, StoredParameter] = {}
    for value, nodes in host_work(graph).items():
        chain = [value, *(node.result for node in nodes)]
        last = chain[-1]
        order = _order(last, readers.get(last, []))
        tile = 0 if last in copied else _tile(last, readers.get(last, []))
        shape = tuple(last.type.shape[axis] for axis in order) if order else last.type.shape
        for member in chain:
            stored[member] = StoredParameter(value, last.type.dtype, shape, order, tile)
    return stored


def host_work(graph: Graph) -> Mapping[Value, tuple[Node, ...]]:
    """The casts and slices of each parameter that the host computes when it loads a program, in order."""
    readers, outputs = _readers(graph), set(graph.outputs.values())
    work: dict[Value, tuple[Node, ...]] = {}
    for value in graph.parameters.values():
        nodes: list[Node] = []
        last = value
        while (following := _host_work(last, readers, outputs)) is not None:
            nodes.append(following)
            last = following.result
        work[value] = tuple(nodes)
    return work


def _readers(graph: Graph) -> dict[Value, list[Node]]:
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for operand in node.operands:
            readers.setdefault(operand, []).append(node)
    return readers


def sliced_parameters(graph: Graph) -> Mapping[str, RankSlice]:
    """The slices, by parameter name, for parameters of which each rank loads a slice."""
    names = {value: name for name, value in graph.parameters.items()}
    stored = stored_parameters(graph)
    slices = (
        (node.op, node.result) for node in graph.nodes if isinstance(node.op, RankSlice) and node.result in stored
    )
    return {names[stored[result].parameter]: op for op, result in slices}


def _host_work(value: Value, readers: Mapping[Value, list[Node]], outputs: Set[Value]) -> Node | None:
    """The only reader of a value, if it is a cast or a slice that the host can compute; otherwise None."""
    value_readers = readers.get(value, [])
    if len(value_readers) != 1 or value in outputs or not isinstance(value_readers[0].op, Cast | RankSlice):
        return None
    if value_readers[0].result in outputs:
        return None
    return value_readers[0] if value_readers[0].operands[0] == value else None


def _copied(graph: Graph) -> set[Value]:
    """Values that are read as they are: outputs, and values that enter or leave a repeat."""
    at_repeats = (value for repeat in graph.repeats for value in (*repeat.carried, *repeat.given))
    return {*graph.outputs.values(), *at_repeats}


def _tile(value: Value, readers: Sequence[Node]) -> int:
    """The width of a weight's tiles, if all its readers are matmuls that contract over the same axis."""
    if not readers or value.type.rank != 2 or any(value in (node.operands[0], *node.operands[2:]) for node in readers):
        return 0
    kinds = {type(node.op) for node in readers}
    contraction = value.type.shape[1 if kinds == {Linear} else 0]
    return _TILE if kinds in ({Linear}, {MatMul}) and contraction >= 2 * TILE_ROWS else 0


def _order(value: Value, readers: list[Node]) -> tuple[int, ...]:
    """The order of stored axes that the readers of a weight prefer."""
    if readers and all(isinstance(node.op, Linear) and node.operands[1] == value for node in readers):
        return (1, 0)
    if readers and all(isinstance(node.op, Convolution) and node.operands[1] == value for node in readers):
        return (*range(1, value.type.rank), 0)
    return ()
