"""How a product is cut into pieces: all ways that fit are costed by the machine's own rules, and the cheapest is taken.

Rows stay in SBUF, turned, while the weight passes by them block by block; so more rows at once mean less traffic, and
wider blocks of the weight mean longer runs for DMA. Where the summed axis is long, a block has a slab of it only, and
the sums of all its rows wait in PSUM.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Final

from emulator.hardware import CoreSpec
from emulator.isa.affine import Affine
from emulator.isa.cycles import ISSUE, cost
from emulator.isa.instructions import DmaCopy, Engine
from emulator.isa.operands import Memory, Tile, contiguous
from emulator.lower.kernel import PARTITIONS
from emulator.lower.turned import chunks_of, must_turn, room_to_turn
from emulator.lower.view import View
from emulator.types import DType

BANK: Final = 512  # float32 sums
_BANKS_OF_SUMS: Final = 6  # when they wait for slabs; the other two are for turning
_WIDTHS: Final = (4096, 2048, 1536, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_HEIGHTS: Final = (8192, 4096, 2048, 1024, 512, 384, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_SLABS: Final = (64, 32, 16, 8, 4, 2, 1)
_WRITTEN_NS: Final = 60  # what one more instruction of an engine costs that the formulas do not show: its start


@dataclass(frozen=True)
class Pieces:
    height: int  # rows that are kept
    width: int  # columns of the weight that are at hand
    slab: int  # chunks of the summed axis that are


@dataclass(frozen=True)
class Sizes:
    """What is to be multiplied, and what it takes beside the operands, in bytes."""

    x: View  # [rows, summed]
    weight: View  # [summed, columns]
    by_column: int  # of each column of a piece of the result: the result itself, and what follows it

    @property
    def chunks(self) -> int:
        return chunks_of(self.x.shape[1])

    @property
    def turning(self) -> int:
        return max(room_to_turn(self.x.dtype), room_to_turn(self.weight.dtype))

    def room(self, pieces: Pieces) -> int:
        kept = self.chunks * pieces.height * self.x.dtype.itemsize
        weight = 2 * pieces.slab * pieces.width * self.weight.dtype.itemsize
        return kept + weight + self.by_column * pieces.width + self.turning + 1024


def turns_of(banks: int) -> int:
    """Of sums that wait for slabs: while some are brought away others can begin, if there are banks for both."""
    return 2 if 2 * banks <= _BANKS_OF_SUMS else 1


def best(core: CoreSpec, room: int, sizes: Sizes) -> Pieces:
    """The cheapest that fits; the least of all where none does, for the error to say what is missing."""
    fitting = [pieces for pieces in _candidates(sizes) if sizes.room(pieces) <= room]
    estimate = _Estimate(core, sizes)
    least = Pieces(1, 1, 1)
    return min(fitting, key=lambda each: (estimate.ns(each), -each.height, -each.width, -each.slab), default=least)


def _candidates(sizes: Sizes) -> Iterator[Pieces]:
    rows, columns = sizes.x.shape[0], sizes.weight.shape[1]
    heights = {min(height, ceil(rows / PARTITIONS) * PARTITIONS if rows > PARTITIONS else rows) for height in _HEIGHTS}
    for width in {min(width, columns) for width in _WIDTHS}:
        for height in heights:
            yield Pieces(height, width, sizes.chunks)
            if ceil(height / PARTITIONS) * ceil(width / BANK) <= _BANKS_OF_SUMS:
                yield from (Pieces(height, width, slab) for slab in _SLABS if slab < sizes.chunks)


class _Estimate:
    """DMA and the engines work beside each other, but nothing can begin before the first rows and weights are there."""

    def __init__(self, core: CoreSpec, sizes: Sizes) -> None:
        self._core, self._sizes = core, sizes
        self._weight = cache(lambda slab, width: _load_ns(core, sizes.weight, slab, width))
        self._kept = cache(lambda height: _load_ns(core, sizes.x.transposed((1, 0)), sizes.chunks, height))
        self._stored = cache(lambda width: _store_ns(core, sizes, width))

    def ns(self, pieces: Pieces) -> float:
        rows, columns = self._sizes.x.shape[0], self._sizes.weight.shape[1]
        groups, blocks = ceil(rows / pieces.height), ceil(columns / pieces.width)
        passes = groups * blocks * ceil(self._sizes.chunks / pieces.slab)
        weight, kept = self._weight(pieces.slab, pieces.width), self._kept(pieces.height)
        traffic = passes * weight + groups * kept + self._stored(pieces.width)
        return max(traffic, *self._work(pieces.width, groups, blocks)) + weight + kept + passes * _WRITTEN_NS

    def _work(self, width: int, groups: int, blocks: int) -> tuple[float, float]:
        """Of the tensor engine, and of the vector engine that brings away what it made."""
        core, sizes = self._core, self._sizes
        rows, columns = sizes.x.shape[0], sizes.weight.shape[1]
        tiles, slow = ceil(rows / PARTITIONS), core.fp32_cycle_factor if sizes.x.dtype is DType.FLOAT32 else 1
        whole, rest = divmod(width, BANK)
        made = tiles * blocks * (whole * BANK + (max(rest, ISSUE) if rest else 0))
        turned = 0
        if must_turn(sizes.x.transposed((1, 0))):
            turned += tiles * sizes.chunks * PARTITIONS
        if must_turn(sizes.weight):
            turned += groups * sizes.chunks * ceil(columns / PARTITIONS) * PARTITIONS
        return slow * (sizes.chunks * made + turned) / core.tensor_ghz, (turned + made) / core.vector_ghz


def _load_ns(core: CoreSpec, view: View, chunks: int, width: int) -> float:
    """A slab [chunks, width] of a matrix [summed, others]."""
    summed, others = min(view.shape[0], chunks * PARTITIONS), min(view.shape[1], width)
    piece = view.cut((0, summed), (0, others))
    ordered = piece.transposed((1, 0)) if must_turn(view) else piece
    lanes = min(ordered.shape[0], PARTITIONS)
    tile = _tile(view.dtype, lanes, ceil(ordered.shape[0] / lanes), ordered.shape[1])
    return cost(DmaCopy(engine=Engine.DMA0, dst=tile, src=ordered.far()), core).ns


def _store_ns(core: CoreSpec, sizes: Sizes, width: int) -> float:
    rows, columns = sizes.x.shape[0], sizes.weight.shape[1]
    lanes = min(rows, PARTITIONS)
    home = View(0, sizes.x.dtype, Affine(), (lanes, width), (columns, 1))
    one = DmaCopy(engine=Engine.DMA0, dst=home.far(), src=_tile(sizes.x.dtype, lanes, width))
    return cost(one, core).ns * ceil(rows / lanes) * ceil(columns / width)


def _tile(dtype: DType, lanes: int, *shape: int) -> Tile:
    return Tile(Memory.SBUF, dtype, 0, lanes, Affine(), contiguous(*shape))
