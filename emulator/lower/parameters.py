"""Parameter layout: the transformation of weights that the host performs once, when it loads the program.

It consists of casts, a permutation of axes, a rank's slice, and an arrangement in tiles. A weight that only linear
layers or convolutions read is stored with its input axis first, because the tensor engine contracts over the partition
dimension. A matrix that only matmuls read is stored in tiles, so that what a partition of SBUF takes of a block of
columns is contiguous: DMA is slow if it moves the columns of each row separately. So is each
matrix of grouped and batched matmuls.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType, TensorType, promote
from nxpipe.emulator.isa.program import TILE_ROWS
from nxpipe.emulator.lower.view import TiledView, View
from nxpipe.emulator.ops import Cast, Convolution, GroupedMatMul, Linear, MatMul, RankSlice, Transpose

_TILE: Final = 512  # columns: the most that a matmul streams at a time, a bank of PSUM


@dataclass(frozen=True)
class StoredParameter:
    """A stored form of a parameter. `order[i]` is the axis of the value that stored axis i holds; an empty `order`
    keeps the axes."""

    parameter: Value
    dtype: DType
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
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


@dataclass(frozen=True)
class StoredForms:
    """The stored forms of a parameter, or of a value that the host computes from one: the form that strides can
    express, if any node needs it, and the tiled form that matmuls read."""

    strided: StoredParameter | None = None
    tiled: StoredParameter | None = None

    @property
    def all(self) -> tuple[StoredParameter, ...]:
        return tuple(form for form in (self.strided, self.tiled) if form)


def stored_parameters(graph: Graph) -> Mapping[Value, StoredForms]:
    """The stored forms of each parameter and of each value that the host computes from it. There is one for each
    combination of type and layout that nodes read: a table of embeddings that the last layer reads as well is stored
    as rows, and in tiles of the type in which it is multiplied."""
    readers, copied = _readers(graph), _copied(graph)
    stored: dict[Value, StoredForms] = {}
    for parameter in graph.parameters.values():
        steps = [_Step(parameter)]
        for step in steps:
            following = [] if step.value in copied else step.following(readers, copied)
            steps += following
            prepared = {next_step.value for next_step in following}
            others = [node for node in readers.get(step.value, []) if node.result not in prepared]
            is_read = others or not prepared
            stored[step.value] = _forms(parameter, step, others, copied) if is_read else StoredForms()
    return stored


@dataclass(frozen=True)
class _Step:
    """A parameter, or a value that the host computes from it. `rounded`: a cast before it has rounded the numbers, so
    that another one would not give what a single cast from the parameter's type gives. `shared`: another node reads
    the parameter or a value between, so that a rank cannot load a slice alone. `order`: the parameter's axes in the
    order of the value's, if they are transposed."""

    value: Value
    rounded: bool = False
    shared: bool = False
    order: tuple[int, ...] = ()

    def following(self, readers: Mapping[Value, Sequence[Node]], copied: Set[Value]) -> list["_Step"]:
        """The values that the host computes from this one. It transposes what only grouped and batched matmuls read."""
        nodes = readers.get(self.value, [])
        shared = self.shared or len(nodes) > 1
        steps = []
        for node in nodes:
            if node.result in copied or node.operands[0] != self.value:
                continue
            if isinstance(node.op, RankSlice) and not shared and not self.order:
                steps.append(_Step(node.result, self.rounded, shared))
            if isinstance(node.op, Cast) and not self.rounded and self.value.type.dtype.is_float:
                exact = _holds(node.result.type.dtype, self.value.type.dtype)
                steps += [_Step(node.result, not exact, shared, self.order)] if node.result.type.dtype.is_float else []
            if isinstance(node.op, Transpose) and not self.order and self._are_matrices(node.result, readers, copied):
                steps.append(_Step(node.result, self.rounded, shared, node.op.order))
        return steps

    def _are_matrices(self, value: Value, readers: Mapping[Value, Sequence[Node]], copied: Set[Value]) -> bool:
        """True if only such matmuls read the value, as their matrices, directly or after the host's cast."""
        nodes = readers.get(value, [])
        casts = [node for node in nodes if isinstance(node.op, Cast)]
        by_host = not self.rounded and value.type.dtype.is_float
        return (
            all(_is_matrices(value, node) for node in nodes if node not in casts)
            and all(by_host and cast.result.type.dtype.is_float and cast.result not in copied for cast in casts)
            and all(_is_matrices(cast.result, node) for cast in casts for node in readers.get(cast.result, []))
        )


def _holds(wide: DType, narrow: DType) -> bool:
    return promote(TensorType((), wide), TensorType((), narrow)) is wide


def _forms(parameter: Value, step: _Step, readers: Sequence[Node], copied: Set[Value]) -> StoredForms:
    value = step.value
    if step.order or (readers and value not in copied and all(_is_matrices(value, node) for node in readers)):
        shape, dtype = value.type.shape, value.type.dtype
        return StoredForms(tiled=StoredParameter(parameter, dtype, shape, step.order, _TILE))
    matmuls = [node for node in readers if isinstance(node.op, Linear | MatMul) and _is_weight(value, node)]
    kind = type(matmuls[0].op) if matmuls else Linear
    matmuls = [node for node in matmuls if type(node.op) is kind]
    others = [node for node in readers if node not in matmuls]
    order: tuple[int, ...] = (1, 0) if kind is Linear else ()
    tiled, dtype = None, value.type.dtype
    if matmuls and _stored_shape(value, order)[0] >= 2 * TILE_ROWS:
        tiled = StoredParameter(parameter, dtype, _stored_shape(value, order), order, _TILE)
        if not others and value not in copied:
            return StoredForms(tiled=tiled)
        order = _order(value, others)
    else:
        order = _order(value, readers)
    return StoredForms(StoredParameter(parameter, dtype, _stored_shape(value, order), order), tiled)


def _is_matrices(value: Value, node: Node) -> bool:
    """True if the node is a grouped matmul with these matrices, or a matmul of as many batches."""
    others = (*node.operands[:1], *node.operands[2:])
    if not isinstance(node.op, GroupedMatMul | MatMul) or node.operands[1] != value or value in others:
        return False
    batches = value.type.rank == 3 and node.result.type.shape[:-2] == value.type.shape[:1] != (1,)
    return isinstance(node.op, GroupedMatMul) or batches


def _is_weight(value: Value, node: Node) -> bool:
    """True if a matmul multiplies all rows by this matrix."""
    return value.type.rank == 2 and node.operands[1] == value not in (node.operands[0], *node.operands[2:])


def _stored_shape(value: Value, order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value.type.shape[axis] for axis in order) if order else value.type.shape


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
    slices: dict[str, RankSlice] = {}
    origin = dict(names)
    for node in graph.nodes:
        if node.result in stored:
            name = origin[node.result] = origin[node.operands[0]]
            if isinstance(node.op, RankSlice):
                slices[name] = node.op
    return slices


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


def _order(value: Value, readers: Sequence[Node]) -> tuple[int, ...]:
    """The order of stored axes that the readers of a weight prefer."""
    if readers and all(isinstance(node.op, Linear) and node.operands[1] == value for node in readers):
        return (1, 0)
    if readers and all(isinstance(node.op, Convolution) and node.operands[1] == value for node in readers):
        return (*range(1, value.type.rank), 0)
    return ()
