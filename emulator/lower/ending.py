"""What becomes of a result while it is still in SBUF: the elementwise work that follows it, up to where it is stored.

A result that elementwise nodes read need not go to HBM in between. Each of those nodes still rounds to its own type, so
that nothing changes but the traffic; whatever somebody else reads is stored on the way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.collective import CollectiveAllReduce
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.lower.buffers import on_device
from nxpipe.emulator.lower.elements import apply, temporaries
from nxpipe.emulator.lower.following import Following, Link, Source
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lanes import repeated
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import AllReduce

_WIDEST_KEPT: Final = 16384  # bytes of a row that is kept for all pieces


@dataclass(frozen=True)
class Chain:
    """Nodes that are worked off piece by piece, all in one shape: what they load and what they store."""

    links: tuple[Link, ...]
    sources: tuple[View, ...]
    homes: tuple[tuple[Value, View], ...]
    kept: Mapping[Source, Block] = field(default_factory=dict)  # rows that all pieces are combined with

    @property
    def views(self) -> tuple[View, ...]:
        return (*(view for _, view in self.homes), *self.sources)

    @property
    def width(self) -> int:
        """Bytes that an element of a piece takes in SBUF, with everything in two turns, and room for temporaries."""
        nodes = [link.node for link in self.links if not isinstance(link.node.op, AllReduce)]
        made = sum(on_device(node.result.type.dtype).itemsize for node in nodes)
        loaded = sum(view.dtype.itemsize for number, view in enumerate(self.sources) if Source(number) not in self.kept)
        between = max(map(temporaries, nodes), default=0) * DType.FLOAT32.itemsize
        return 2 * (made + loaded) + between

    def carry(
        self, k: Kernel, pieces: Sequence[View], made: dict[Value, Tile], kept: Mapping[Source, Tile] | None = None
    ) -> None:
        """Through all nodes, with a piece of each view, from the tiles that are made already."""
        homes = {value: piece for (value, _), piece in zip(self.homes, pieces, strict=False)}
        loaded = dict(kept or {})
        for value, tile in made.items():
            if value in homes:
                k.copy(homes[value].far(), tile)
        shape = pieces[0].shape if pieces else next((tile.partitions, tile.elements) for tile in made.values())
        for link in self.links:
            for each in link.operands:
                if isinstance(each, Source) and each not in loaded:
                    loaded[each] = load(k, pieces[len(homes) + each.number])
            operands = [_operand(each, made, loaded) for each in link.operands]
            result = link.node.result
            made[result] = _result(k, link.node, operands, shape)
            if result in homes:
                k.copy(homes[result].far(), made[result])


def _operand(each: Value | Source | float, made: Mapping[Value, Tile], loaded: Mapping[Source, Tile]) -> Tile | float:
    if isinstance(each, Value):
        return made[each]
    return loaded[each] if isinstance(each, Source) else each


def _result(k: Kernel, node: Node, operands: Sequence[Tile | float], shape: tuple[int, ...]) -> Tile:
    if isinstance(node.op, AllReduce):
        (mine,) = operands
        assert isinstance(mine, Tile)  # numbers are no results, and only those are added up
        k.emit(CollectiveAllReduce(engine=Engine.COLLECTIVE, dst=mine, src=mine))
        return mine
    block = k.tile(on_device(node.result.type.dtype), *shape, turns=2)
    apply(k, node, block.whole, operands)
    return block.whole


def load(k: Kernel, piece: View) -> Tile:
    """A piece of rows; where all elements of a row are one and the same, it is brought once."""
    rows, width = piece.shape
    once = width > 1 and piece.strides[1] == 0
    block = k.tile(piece.dtype, rows, 1 if once else width, turns=2)
    k.copy(block.whole, (piece.cut((0, rows), (0, 1)) if once else piece).far())
    return repeated(block.whole, width) if once else block.whole


@dataclass(frozen=True)
class Ending:
    """All that follows a producer, whose result is seen as a matrix."""

    k: Kernel
    result: Value
    chain: Chain

    def store(self, tile: Tile, rows: Span, columns: Span) -> None:
        """Take a finished piece through the chain and to its place."""
        self.finish({self.result: tile}, rows, columns)

    def finish(self, tiles: Mapping[Value, Tile], rows: Span, columns: Span) -> Mapping[Value, Tile]:
        """Pieces of several results at once; and all tiles that are made of them."""
        pieces = [view.cut(rows, columns) for view in self.chain.views]
        kept = {source: block.cut(rows[1], columns) for source, block in self.chain.kept.items()}
        made = dict(tiles)
        self.chain.carry(self.k, pieces, made, kept)
        return made


def room_of(ending: Ending) -> int:
    """Bytes that each column of a piece takes on its way to where it is stored."""
    return ending.chain.width if ending.chain.links else 0


def chained(found: Following, homes: Sequence[tuple[Value, View]]) -> Chain:
    """With the stored views in the shape of the pieces."""
    flat = [(value, home.reshaped(found.shape)) for value, home in homes]
    return Chain(
        tuple(found.links),
        tuple(found.sources),
        tuple((value, view) for value, view in flat if view is not None),
    )


def kept_rows(k: Kernel, sources: Sequence[View]) -> dict[Source, Block]:
    """Of what is combined with each of many rows alike, a copy on every partition."""
    kept = {}
    for number, view in enumerate(sources):
        (rows, width), (down, _) = view.shape, view.strides
        if rows > PARTITIONS and not down and width * view.dtype.itemsize <= _WIDEST_KEPT:
            kept[Source(number)] = k.tile(view.dtype, PARTITIONS, width)
            k.copy(kept[Source(number)].whole, view.cut((0, PARTITIONS)).far())
    return kept
