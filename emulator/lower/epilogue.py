"""Epilogue fusion: elementwise nodes applied to a result's tiles in SBUF, before the tiles are stored to HBM.

Each fused node rounds to its own type, so that fusion changes HBM traffic and no result. An intermediate value that a
node outside of the kernel reads is stored as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Final

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.collective import CollectiveAllReduce
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Axis, Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.lower.elementwise import LOOKED_UP, apply, temporaries
from nxpipe.emulator.lower.grouping import ChainNode, EpilogueFusion, HbmOperand
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import AllReduce, Cast

_FUNCTIONS: Final = {**LOOKED_UP, "relu": Function.RELU}
SCALE, FUNCTION, ROUNDING = 0, 2, 3  # steps of one instruction, in order
NOWHERE: Final[Mapping[Value, Tile]] = MappingProxyType({})
_WIDEST_RESIDENT: Final = 16384  # bytes of the longest row that stays in SBUF for all tiles


@dataclass(frozen=True)
class ElementwiseChain:
    """Elementwise nodes that are applied tile by tile, with the views that they load and store."""

    links: tuple[ChainNode, ...]
    sources: tuple[View, ...]
    homes: tuple[tuple[Value, View], ...]
    resident: Mapping[HbmOperand, Block] = field(default_factory=dict)  # rows in SBUF that are broadcast to all tiles
    by_channel: bool = False  # tiles of [channels, batch, positions]
    casting: Engine = Engine.VECTOR  # of casts between float types
    kept: frozenset[Value] = frozenset()  # values that the kernel itself reads

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
        targets: Mapping[Value, Tile] = NOWHERE,
    ) -> None:
        """Apply all nodes to one tile and add their tiles to `computed`. `pieces` are the parts of the chain's views
        for this tile, `computed` the tiles computed so far, `targets` the tiles of values that have a place already."""
        homes = {value: piece for (value, _), piece in zip(self.homes, pieces, strict=False)}
        loaded, tiles = dict(resident or {}), dict[View, Tile]()
        for value, tile in computed.items():
            if value in homes:
                k.copy(homes[value].far(), tile)
        if pieces:
            shape = (pieces[0].shape[0], prod(pieces[0].shape[1:]))
        else:
            shape = next((tile.partitions, tile.elements) for tile in computed.values())
        for link in self.links:
            if link.node.result in computed:
                continue  # the instruction of the node before has cast it
            for operand in link.operands:
                if isinstance(operand, HbmOperand) and operand not in loaded:
                    loaded[operand] = load_tile(k, pieces[len(homes) + operand.number], tiles)
            operands = [_operand(operand, computed, loaded) for operand in link.operands]
            result = self.rounded(link)
            computed[result] = self._result(k, link.node, operands, shape, result, targets.get(result))
            if result in homes:
                k.copy(homes[result].far(), computed[result])

    def rounded(self, link: ChainNode) -> Value:
        """The value that the instructions of a node write: its result, or that of the cast that alone reads it, if it
        is the float32 result of a single instruction. float32 holds such a result before it is rounded."""
        result = link.node.result
        readers = [reader.node for reader in self.links if result in reader.operands]
        needed = result in self.kept or any(value == result for value, _ in self.homes)
        single = result.type.dtype is DType.FLOAT32 and is_single_instruction(link.node)
        if needed or not single or len(readers) != 1 or not isinstance(readers[0].op, Cast):
            return result
        return readers[0].result if readers[0].result.type.dtype.is_float else result

    def reads_sums(self, value: Value) -> bool:
        """True if the value can be read in PSUM: all its readers are nodes of a single vector or scalar instruction."""
        readers = [link.node for link in self.links if value in link.operands]
        needed = value in self.kept or any(stored == value for stored, _ in self.homes)
        return bool(readers) and not needed and all(map(is_single_instruction, readers))

    def _result(
        self,
        k: Kernel,
        node: Node,
        operands: Sequence[Tile | float],
        shape: tuple[int, ...],
        result: Value,
        target: Tile | None,
    ) -> Tile:
        """The tile of a node's result, or of the cast that alone reads it."""
        if isinstance(node.op, AllReduce):
            (tile,) = operands
            assert isinstance(tile, Tile)  # the operand of an all-reduce is a result, never a number
            k.emit(CollectiveAllReduce(engine=Engine.COLLECTIVE, dst=tile, src=tile))
            return tile
        dst = target or k.tile(result.type.dtype.on_device, *shape, buffers=2).whole
        if self.casting is Engine.SCALAR and _is_float_cast(node) and isinstance(operands[0], Tile):
            k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=operands[0], function=Function.COPY))
        else:
            apply(k, node, dst, operands)
        return dst


def _is_float_cast(node: Node) -> bool:
    return isinstance(node.op, Cast) and node.operands[0].type.dtype.is_float and node.result.type.dtype.is_float


def is_single_instruction(node: Node) -> bool:
    return not isinstance(node.op, AllReduce) and temporaries(node) == 0


def _operand(
    operand: Value | HbmOperand | float, computed: Mapping[Value, Tile], loaded: Mapping[HbmOperand, Tile]
) -> Tile | float:
    if isinstance(operand, Value):
        return computed[operand]
    return loaded[operand] if isinstance(operand, HbmOperand) else operand


def load_tile(k: Kernel, piece: View, loaded: dict[View, Tile] | None = None) -> Tile:
    """Load a tile of rows. Elements that a free axis repeats (stride 0) are loaded once and read with stride 0. Those
    of a negative stride are loaded in ascending order and read backwards, or from the tile of another operand with the
    same elements, if `loaded` has one."""
    tiles = {} if loaded is None else loaded
    backwards = [axis for axis, stride in enumerate(piece.strides) if axis and stride < 0]
    start = sum((piece.shape[axis] - 1) * piece.strides[axis] for axis in backwards)
    strides = tuple(map(abs, piece.strides[1:]))
    upright = replace(piece, offset=piece.offset + start, strides=(piece.strides[0], *strides))
    if upright not in tiles:
        tiles[upright] = _load_upright(k, upright)
    tile, axes, back = tiles[upright], [], 0
    if not backwards:
        return tile
    for number, axis in enumerate(tile.axes, 1):
        back += (axis.size - 1) * axis.stride if number in backwards else 0
        axes.append(Axis(axis.size, -axis.stride) if number in backwards else axis)
    return replace(tile, offset=tile.offset + back * tile.dtype.itemsize, axes=tuple(axes))


def _load_upright(k: Kernel, piece: View) -> Tile:
    rows, *free = piece.shape
    sizes = [size if stride else 1 for size, stride in zip(free, piece.strides[1:], strict=True)]
    block = k.tile(piece.dtype, rows, *sizes, buffers=2)
    k.copy(block.whole, piece.cut((0, rows), *((0, size) for size in sizes)).far())
    if prod(sizes) == 1 < prod(free):
        return replace(block.whole, axes=(Axis(prod(free), 0),))
    axes = (
        Axis(size, axis.stride if stride else 0)
        for size, stride, axis in zip(free, piece.strides[1:], block.whole.axes, strict=True)
    )
    return replace(block.whole, axes=tuple(axes))


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


def chain_of(
    fusion: EpilogueFusion, homes: Sequence[tuple[Value, View]], kernel_readers: Sequence[Node] = ()
) -> ElementwiseChain:
    """The chain of a fusion; `homes` are the locations of stored values, reshaped to the shape of the tiles.
    `kernel_readers` are nodes of the kernel that read its tiles."""
    kept = {fusion.known[value] for node in kernel_readers for value in node.operands if value in fusion.known}
    views = [(value, fusion.arranged(home)) for value, home in homes]
    return ElementwiseChain(
        tuple(fusion.links),
        tuple(fusion.sources),
        tuple((value, view) for value, view in views if view is not None),
        by_channel=fusion.by_channel,
        kept=frozenset(kept),
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
