"""Epilogues: elementwise work that is applied to a result's tiles while they are in SBUF, up to where it is stored.

Each fused node rounds to its own type, so that nothing changes but the traffic; a value that a node outside of the
kernel reads is stored on the way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.collective import CollectiveAllReduce
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.lower.elementwise import apply, temporaries
from nxpipe.emulator.lower.grouping import ChainNode, EpilogueFusion, HbmOperand
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lanes import repeated
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import AllReduce

_WIDEST_KEPT: Final = 16384  # bytes of a row that is kept for all pieces


@dataclass(frozen=True)
class ElementwiseChain:
    """Elementwise nodes that are applied tile by tile, with the views that they load and store."""

    links: tuple[ChainNode, ...]
    sources: tuple[View, ...]
    homes: tuple[tuple[Value, View], ...]
    kept: Mapping[HbmOperand, Block] = field(default_factory=dict)  # rows that all pieces are combined with

    @property
    def views(self) -> tuple[View, ...]:
        return (*(view for _, view in self.homes), *self.sources)

    @property
    def width(self) -> int:
        """Bytes of SBUF for each element of a tile: results and loads double buffered, and temporaries."""
        nodes = [link.node for link in self.links if not isinstance(link.node.op, AllReduce)]
        made = sum(node.result.type.dtype.on_device.itemsize for node in nodes)
        loaded = sum(
            view.dtype.itemsize for number, view in enumerate(self.sources) if HbmOperand(number) not in self.kept
        )
        between = max(map(temporaries, nodes), default=0) * DType.FLOAT32.itemsize
        return 2 * (made + loaded) + between

    def carry(
        self, k: Kernel, pieces: Sequence[View], made: dict[Value, Tile], kept: Mapping[HbmOperand, Tile] | None = None
    ) -> None:
        """Apply all nodes to one tile: `pieces` are its parts of the chain's views, `made` the tiles computed so
        far."""
        homes = {value: piece for (value, _), piece in zip(self.homes, pieces, strict=False)}
        loaded = dict(kept or {})
        for value, tile in made.items():
            if value in homes:
                k.copy(homes[value].far(), tile)
        shape = pieces[0].shape if pieces else next((tile.partitions, tile.elements) for tile in made.values())
        for link in self.links:
            for each in link.operands:
                if isinstance(each, HbmOperand) and each not in loaded:
                    loaded[each] = load_tile(k, pieces[len(homes) + each.number])
            operands = [_operand(each, made, loaded) for each in link.operands]
            result = link.node.result
            made[result] = _result(k, link.node, operands, shape)
            if result in homes:
                k.copy(homes[result].far(), made[result])


def _operand(
    each: Value | HbmOperand | float, made: Mapping[Value, Tile], loaded: Mapping[HbmOperand, Tile]
) -> Tile | float:
    if isinstance(each, Value):
        return made[each]
    return loaded[each] if isinstance(each, HbmOperand) else each


def _result(k: Kernel, node: Node, operands: Sequence[Tile | float], shape: tuple[int, ...]) -> Tile:
    if isinstance(node.op, AllReduce):
        (mine,) = operands
        assert isinstance(mine, Tile)  # numbers are no results, and only those are added up
        k.emit(CollectiveAllReduce(engine=Engine.COLLECTIVE, dst=mine, src=mine))
        return mine
    block = k.tile(node.result.type.dtype.on_device, *shape, buffers=2)
    apply(k, node, block.whole, operands)
    return block.whole


def load_tile(k: Kernel, piece: View) -> Tile:
    """Load a tile of rows. A row whose elements are all the same one is loaded as that element and read with stride
    0."""
    rows, width = piece.shape
    once = width > 1 and piece.strides[1] == 0
    block = k.tile(piece.dtype, rows, 1 if once else width, buffers=2)
    k.copy(block.whole, (piece.cut((0, rows), (0, 1)) if once else piece).far())
    return repeated(block.whole, width) if once else block.whole


@dataclass(frozen=True)
class Epilogue:
    """The chain behind a kernel's result, which is seen as a matrix."""

    k: Kernel
    result: Value
    chain: ElementwiseChain

    def store(self, tile: Tile, rows: Span, columns: Span) -> None:
        """Apply the chain to a finished tile and store what it yields."""
        self.finish({self.result: tile}, rows, columns)

    def finish(self, tiles: Mapping[Value, Tile], rows: Span, columns: Span) -> Mapping[Value, Tile]:
        """The same for tiles of several results; returns all tiles that the chain has computed."""
        pieces = [view.cut(rows, columns) for view in self.chain.views]
        kept = {source: block.cut(rows[1], columns) for source, block in self.chain.kept.items()}
        made = dict(tiles)
        self.chain.carry(self.k, pieces, made, kept)
        return made


def epilogue_bytes(epilogue: Epilogue) -> int:
    """Bytes of SBUF that each column of a tile takes in the epilogue."""
    return epilogue.chain.width if epilogue.chain.links else 0


def chain_of(found: EpilogueFusion, homes: Sequence[tuple[Value, View]]) -> ElementwiseChain:
    """The chain of a fusion, with the locations of stored values as views in the shape of the tiles."""
    flat = [(value, home.reshaped(found.shape)) for value, home in homes]
    return ElementwiseChain(
        tuple(found.links),
        tuple(found.sources),
        tuple((value, view) for value, view in flat if view is not None),
    )


def broadcast_rows(k: Kernel, sources: Sequence[View]) -> dict[HbmOperand, Block]:
    """Operands that are one row for all rows, loaded once to every partition."""
    kept = {}
    for number, view in enumerate(sources):
        (rows, width), (down, _) = view.shape, view.strides
        if rows > PARTITIONS and not down and width * view.dtype.itemsize <= _WIDEST_KEPT:
            kept[HbmOperand(number)] = k.tile(view.dtype, PARTITIONS, width)
            k.copy(kept[HbmOperand(number)].whole, view.cut((0, PARTITIONS)).far())
    return kept
