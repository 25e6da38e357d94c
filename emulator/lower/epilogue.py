"""Epilogue fusion: elementwise nodes applied to a result's tiles in SBUF, before the tiles are stored to HBM.

Each fused node rounds to its own type, so that fusion changes HBM traffic and no result. An intermediate value that a
node outside of the kernel reads is stored as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.collective import CollectiveAllReduce
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Axis, Tile
from nxpipe.emulator.isa.scalar import Function
from nxpipe.emulator.lower.elementwise import LOOKED_UP, apply, temporaries
from nxpipe.emulator.lower.grouping import ChainNode, EpilogueFusion, HbmOperand
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lanes import repeated
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import AllReduce, Cast

_FUNCTIONS: Final = {**LOOKED_UP, "relu": Function.RELU}
SCALE, FUNCTION, ROUNDING = 0, 2, 3  # steps of one instruction, in order
_WIDEST_RESIDENT: Final = 16384  # bytes of the longest row that stays in SBUF for all tiles


@dataclass(frozen=True)
class ElementwiseChain:
    """Elementwise nodes that are applied tile by tile, with the views that they load and store."""

    links: tuple[ChainNode, ...]
    sources: tuple[View, ...]
    homes: tuple[tuple[Value, View], ...]
    resident: Mapping[HbmOperand, Block] = field(default_factory=dict)  # rows in SBUF that are broadcast to all tiles
    by_channel: bool = False  # tiles of [channels, batch, positions]

    @property
    def views(self) -> tuple[View, ...]:
        return (*(view for _, view in self.homes), *self.sources)

    @property
    def width(self) -> int:
        """SBUF bytes per element of a tile: double-buffered results and loads, and temporaries."""
        nodes = [link.node for link in self.links if not isinstance(link.node.op, AllReduce)]
        results = sum(node.result.type.dtype.on_device.itemsize for node in nodes)
        loaded = sum(
            view.dtype.itemsize for number, view in enumerate(self.sources) if HbmOperand(number) not in self.resident
        )
        scratch = max(map(temporaries, nodes), default=0) * DType.FLOAT32.itemsize
        return 2 * (results + loaded) + scratch

    def apply_to(
        self,
        k: Kernel,
        pieces: Sequence[View],
        computed: dict[Value, Tile],
        resident: Mapping[HbmOperand, Tile] | None = None,
    ) -> None:
        """Apply all nodes to one tile and add their tiles to `computed`. `pieces` are the parts of the chain's views
        for this tile, `computed` the tiles computed so far."""
        homes = {value: piece for (value, _), piece in zip(self.homes, pieces, strict=False)}
        loaded = dict(resident or {})
        for value, tile in computed.items():
            if value in homes:
                k.copy(homes[value].far(), tile)
        shape = pieces[0].shape if pieces else next((tile.partitions, tile.elements) for tile in computed.values())
        for link in self.links:
            for operand in link.operands:
                if isinstance(operand, HbmOperand) and operand not in loaded:
                    loaded[operand] = load_tile(k, pieces[len(homes) + operand.number])
            operands = [_operand(operand, computed, loaded) for operand in link.operands]
            result = link.node.result
            computed[result] = _result(k, link.node, operands, shape)
            if result in homes:
                k.copy(homes[result].far(), computed[result])


def _operand(
    operand: Value | HbmOperand | float, computed: Mapping[Value, Tile], loaded: Mapping[HbmOperand, Tile]
) -> Tile | float:
    if isinstance(operand, Value):
        return computed[operand]
    return loaded[operand] if isinstance(operand, HbmOperand) else operand


def _result(k: Kernel, node: Node, operands: Sequence[Tile | float], shape: tuple[int, ...]) -> Tile:
    if isinstance(node.op, AllReduce):
        (tile,) = operands
        assert isinstance(tile, Tile)  # the operand of an all-reduce is a result, never a number
        k.emit(CollectiveAllReduce(engine=Engine.COLLECTIVE, dst=tile, src=tile))
        return tile
    block = k.tile(node.result.type.dtype.on_device, *shape, buffers=2)
    apply(k, node, block.whole, operands)
    return block.whole


def load_tile(k: Kernel, piece: View) -> Tile:
    """Load a tile of rows. What repeats the same element along the last axes (stride 0) is loaded as that element and
    read with stride 0."""
    rows, *shape = piece.shape
    kept = next((axis for axis in range(len(shape), 0, -1) if shape[axis - 1] > 1 and piece.strides[axis]), 0)
    width, times = prod(shape[:kept]), prod(shape[kept:])
    block = k.tile(piece.dtype, rows, width, buffers=2)
    k.copy(
        block.whole, piece.cut((0, rows), *((0, size if axis < kept else 1) for axis, size in enumerate(shape))).far()
    )
    if times == 1:
        return block.whole
    if width == 1:
        return repeated(block.whole, times)
    return replace(block.whole, axes=(Axis(width, 1), Axis(times, 0)))


@dataclass(frozen=True)
class Epilogue:
    """The elementwise chain after a kernel's result, which is treated as a matrix."""

    k: Kernel
    result: Value
    chain: ElementwiseChain

    def store(self, tile: Tile, rows: Span, columns: Span) -> None:
        """Apply the chain to a finished tile and store its results."""
        self.finish({self.result: tile}, rows, columns)

    def finish(self, tiles: Mapping[Value, Tile], rows: Span, columns: Span) -> Mapping[Value, Tile]:
        """Like `store`, for tiles of several results; returns all tiles that the chain computed."""
        pieces = [view.cut(rows, columns) for view in self.chain.views]
        resident = {source: block.cut(rows[1], columns) for source, block in self.chain.resident.items()}
        computed = dict(tiles)
        self.chain.apply_to(self.k, pieces, computed, resident)
        return computed


def epilogue_bytes(epilogue: Epilogue) -> int:
    """SBUF bytes per column of a tile in the epilogue."""
    return epilogue.chain.width if epilogue.chain.links else 0


def chain_of(fusion: EpilogueFusion, homes: Sequence[tuple[Value, View]]) -> ElementwiseChain:
    """The chain of a fusion; `homes` are the locations of stored values, reshaped to the shape of the tiles."""
    views = [(value, fusion.arranged(home)) for value, home in homes]
    return ElementwiseChain(
        tuple(fusion.links),
        tuple(fusion.sources),
        tuple((value, view) for value, view in views if view is not None),
        by_channel=fusion.by_channel,
    )


def broadcast_rows(k: Kernel, sources: Sequence[View]) -> dict[HbmOperand, Block]:
    """Load operands that broadcast one row to all rows, once and to every partition."""
    resident = {}
    for number, view in enumerate(sources):
        (rows, width), (row_stride, _) = view.shape, view.strides
        if rows > PARTITIONS and not row_stride and width * view.dtype.itemsize <= _WIDEST_RESIDENT:
            resident[HbmOperand(number)] = k.tile(view.dtype, PARTITIONS, width)
            k.copy(resident[HbmOperand(number)].whole, view.cut((0, PARTITIONS)).far())
    return resident


@dataclass(frozen=True)
class RowAffine:
    """The first nodes of an epilogue, as one instruction of the scalar engine: `function(sums * scale + shift)` with a
    scale and a shift for each row, as batch norms have them. All results but the last are in float32, so that one
    rounding remains."""

    value: Value  # what the instruction computes
    epilogue: Epilogue  # the nodes that remain
    scale: View | None = None
    shift: View | None = None
    function: Function = Function.COPY

    @property
    def dtype(self) -> DType:
        return self.value.type.dtype.on_device

    @classmethod
    def of(cls, epilogue: Epilogue, stage: int) -> "RowAffine":
        """Take nodes from the epilogue as long as the instruction can compute them, from `stage` on: the SCALE, a
        shift, the FUNCTION, the ROUNDING. Behind a bias of its own, only a function is left."""
        found = cls(epilogue.result, epilogue)
        while (step := found._next()) is not None:
            link, other = step
            column = found._column(other)
            name = link.node.op.label
            if stage <= SCALE and name == "multiply" and column is not None:
                stage, found = SCALE + 1, replace(found, scale=column)
            elif stage < FUNCTION and name == "add" and column is not None:
                stage, found = FUNCTION, replace(found, shift=column)
            elif stage <= FUNCTION and name in _FUNCTIONS and other is None:
                stage, found = ROUNDING, replace(found, function=_FUNCTIONS[name])
            elif stage <= ROUNDING and isinstance(link.node.op, Cast) and link.node.result.type.dtype.is_float:
                stage = ROUNDING + 1
            else:
                break
            found = replace(found, value=link.node.result, epilogue=found._without(link))
        return found

    def _next(self) -> tuple[ChainNode, Value | HbmOperand | float | None] | None:
        """The only node that reads the value, with its other operand; None if the value must be a tile itself."""
        chain = self.epilogue.chain
        readers = [link for link in chain.links if self.value in link.operands]
        stored = any(value == self.value for value, _ in chain.homes)
        if len(readers) != 1 or stored or self.value.type.dtype is not DType.FLOAT32 or readers[0] != chain.links[0]:
            return None
        others = [operand for operand in readers[0].operands if operand != self.value]
        if len(others) != len(readers[0].operands) - 1 or len(others) > 1:
            return None
        return readers[0], others[0] if others else None

    def _column(self, operand: Value | HbmOperand | float | None) -> View | None:
        """A number for each row; None for any other operand."""
        if not isinstance(operand, HbmOperand):
            return None
        view = self.epilogue.chain.sources[operand.number]
        inner = zip(view.shape[1:], view.strides[1:], strict=True)
        if view.dtype is not DType.FLOAT32 or any(stride for size, stride in inner if size > 1):
            return None
        return replace(view, shape=view.shape[:1], strides=view.strides[:1])

    def _without(self, link: ChainNode) -> Epilogue:
        """The epilogue without its first node, and without operands that no other node reads."""
        chain = self.epilogue.chain
        links = [other for other in chain.links if other is not link]
        used = sorted(
            {operand.number for other in links for operand in other.operands if isinstance(operand, HbmOperand)}
        )
        numbers = {HbmOperand(old): HbmOperand(new) for new, old in enumerate(used)}
        renumbered = [
            replace(
                other,
                operands=tuple(
                    numbers[operand] if isinstance(operand, HbmOperand) else operand for operand in other.operands
                ),
            )
            for other in links
        ]
        sources = tuple(chain.sources[number] for number in used)
        return replace(self.epilogue, chain=replace(chain, links=tuple(renumbered), sources=sources))
