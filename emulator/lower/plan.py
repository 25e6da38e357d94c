"""How products of the same rows are cut into pieces: all ways that fit are costed by the machine's own rules, and the
cheapest is taken.

Either rows stay in SBUF, turned, while the weights pass by them block by block; or the weights stay, and rows pass by
them, once for each block of columns. Where the summed axis is long, a block may have a slab of it only, and the sums of
all rows that stay wait in PSUM.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from math import ceil, inf, lcm
from typing import Final, Protocol

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.collective import CollectiveReduceScatter
from nxpipe.emulator.isa.cost import ISSUE, cost
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.lower.kernel import PARTITIONS
from nxpipe.emulator.lower.sheets import WIDEST
from nxpipe.emulator.lower.turned import chunks_of, must_turn, room_to_turn
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.lower.work import Work, load_work, tile_of, turning_work

BANK: Final = 512  # float32 sums
STRIP: Final = WIDEST  # columns of a result that are finished at once; whole banks
_BANKS_OF_SUMS: Final = 6  # when they wait for slabs; the other two are for turning
_WIDTHS: Final = (4096, 2048, 1536, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_BLOCKS: Final = (1, 2, 3, 4, 6)
_ROUND: Final = 64  # columns
_HEIGHTS: Final = (8192, 4096, 2048, 1024, 512, 384, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_PASSING: Final = (512, 256, 128)  # rows at once where the weights stay
_SLABS: Final = (64, 32, 16, 8, 4, 2, 1)
_WRITTEN_NS: Final = 60  # what one more instruction of an engine costs that the formulas do not show: its start


class Rows(Protocol):
    """What is to be multiplied, wherever it comes from."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def run(self) -> int:
        """They come in runs of so many."""

    @property
    def kept(self) -> int:
        """Bytes of each partition that making them takes all the time."""

    @property
    def room(self) -> int:
        """Bytes that it takes beside, while they are made."""

    def begun(self, core: CoreSpec) -> Work:
        """What is made once, before any of them."""

    def work(self, core: CoreSpec, height: int) -> Work:
        """Of making so many, turned."""


@dataclass(frozen=True)
class Sizes:
    """Weights that are at hand at the same time, and what it takes beside them, in bytes."""

    weights: tuple[View, ...]  # [summed, columns], equally large
    dtype: DType  # in which they are multiplied
    by_column: int  # of each column of a block: what all rows have in common
    by_strip: int  # of each column of a strip: the results, and what follows them
    out: DType
    ranks: int = 1  # that add up their results, each its share of every run of rows

    @property
    def columns(self) -> int:
        return self.weights[0].shape[1]

    @property
    def chunks(self) -> int:
        return chunks_of(self.weights[0].shape[0])

    @property
    def widths(self) -> set[int]:
        """Of blocks: all columns in a few equal ones, or round numbers of them."""
        equal = {ceil(self.columns / (blocks * _ROUND)) * _ROUND for blocks in _BLOCKS}
        return {min(width, self.columns) for width in {*_WIDTHS, *equal}}

    @property
    def run(self) -> int:
        """Rows that are at hand at once, at least."""
        return PARTITIONS * self.ranks if self.ranks > 1 else 1

    @property
    def strip(self) -> int:
        return strip_of(self.ranks)

    def weight(self, slab: int, width: int) -> int:
        return len(self.weights) * slab * width * self.dtype.itemsize

    def beside(self, width: int) -> int:
        turning = room_to_turn(self.dtype) if any(map(must_turn, self.weights)) else 0
        return self.by_column * width + self.by_strip * min(width, self.strip) + turning


@dataclass(frozen=True, order=True)
class Piece:
    """Of the weights."""

    width: int  # columns that are at hand
    slab: int  # chunks of the summed axis that are


@dataclass(frozen=True)
class Cut:
    height: int  # rows that are at hand, turned
    pieces: tuple[Piece, ...]
    ns: float
    weights_stay: bool = False
    turns: int = 2  # of rows that pass by
    ahead: bool = False  # whether the next block of weights that stay comes while this one is worked on


def strip_of(ranks: int) -> int:
    """Columns that are finished at once: where the parts of all ranks have to be at hand, fewer."""
    return min(STRIP, 2 * STRIP // ranks)


def turns_of(banks: int) -> int:
    """Of sums that wait for slabs: while some are brought away others can begin, if there are banks for both."""
    return 2 if 2 * banks <= _BANKS_OF_SUMS else 1


def best(core: CoreSpec, room: int, rows: Rows, sizes: Sequence[Sizes]) -> Cut:
    """The cheapest that fits; the least of all where none does, for the error to say what is missing."""
    cuts = _Cuts(core, room - rows.kept - 1024, rows, sizes)
    least = Cut(cuts.run, (Piece(1, 1),) * len(sizes), inf)
    return min(
        cuts.all(),
        key=lambda cut: (cut.ns, -cut.height, cut.weights_stay, -cut.turns, cut.ahead, cut.pieces),
        default=least,
    )


class _Cuts:
    """DMA and the engines work beside each other, but nothing can begin before the first rows and weights are there."""

    def __init__(self, core: CoreSpec, room: int, rows: Rows, sizes: Sequence[Sizes]) -> None:
        self._core, self._room, self._rows, self._sizes = core, room, rows, sizes
        self._chunks = chunks_of(rows.shape[1])
        runs = {rows.run, *(each.run for each in sizes)} - {1}
        self.run = lcm(PARTITIONS, *runs) if runs else 1
        self._begun = rows.begun(core)
        self._loads = cache(lambda number, slab, width: _load(core, sizes[number], slab, width))
        self._multiplied = cache(self._multiplying)

    def all(self) -> Iterator[Cut]:
        return chain(self._rows_stay(), self._weights_stay())

    def _rows_stay(self) -> Iterator[Cut]:
        rows = self._rows.shape[0]
        for height in self._in_runs(min(each, _up(rows)) for each in (*_HEIGHTS, self.run)):
            left = self._room - self._turned(height)
            if self._rows.room > left:
                continue
            options = [
                [(self._part(number, height, piece), piece) for piece in self._pieces(sizes, height, left)]
                for number, sizes in enumerate(self._sizes)
            ]
            if all(options):
                chosen = [min(each, key=lambda one: (one[0].ns(self._core), one[1])) for each in options]
                making = self._rows.work(self._core, height)
                work = sum((work for work, _ in chosen), making * ceil(rows / height))
                first = self._loads(0, chosen[0][1].slab, chosen[0][1].width).dma
                begin = max(making.dma, making.links, self._begun.ns(self._core)) + first
                yield Cut(height, tuple(piece for _, piece in chosen), work.ns(self._core) + begin)

    def _in_runs(self, heights: Iterable[int]) -> set[int]:
        return {height for height in heights if not height % self.run}

    def _pieces(self, sizes: Sizes, height: int, left: int) -> Iterator[Piece]:
        for width in sizes.widths:
            banks = ceil(height / PARTITIONS) * ceil(width / BANK) * len(sizes.weights)
            in_slabs = banks <= _BANKS_OF_SUMS and sizes.ranks == 1
            for slab in (sizes.chunks, *(slab for slab in _SLABS if slab < sizes.chunks and in_slabs)):
                if 2 * sizes.weight(slab, width) + sizes.beside(width) <= left:
                    yield Piece(width, slab)

    def _weights_stay(self) -> Iterator[Cut]:
        """All of them, or one block of columns after the other where only one is wanted at a time."""
        for width in {width for sizes in self._sizes for width in sizes.widths}:
            blocks = max(ceil(sizes.columns / width) for sizes in self._sizes)
            if blocks > 1 and len(self._sizes) > 1:
                continue
            pieces = tuple(Piece(min(width, sizes.columns), sizes.chunks) for sizes in self._sizes)
            pairs = list(zip(self._sizes, pieces, strict=True))
            weights = sum(sizes.weight(sizes.chunks, piece.width) for sizes, piece in pairs)
            beside = sum(sizes.beside(piece.width) for sizes, piece in pairs)
            for ahead in (False, True) if blocks > 1 and self._rows.run > 1 else (False,):
                left = self._room - weights * (1 + ahead) - beside - self._rows.room
                for height, turns in product(self._in_runs(_PASSING) or {self.run}, (2, 1) if self.run > 1 else (2,)):
                    if height < self._rows.shape[0] and turns * self._turned(height) <= left:
                        cut = Cut(height, pieces, inf, True, turns, ahead)
                        yield replace(cut, ns=self._passing(cut, blocks))

    def _passing(self, cut: Cut, blocks: int) -> float:
        """The next block of weights can only come when the last rows are done with this one, and the next rows too,
        unless there is room for both."""
        passes = ceil(self._rows.shape[0] / cut.height) * blocks
        loads = [self._loads(number, piece.slab, piece.width) for number, piece in enumerate(cut.pieces)]
        making = self._rows.work(self._core, cut.height)
        work = making * passes
        for number, (load, piece) in enumerate(zip(loads, cut.pieces, strict=True)):
            work += load * blocks + self._turning(number) + self._multiplied(number, piece.width)
        first, waiting = sum(load.dma for load in loads), passes * making.ns(self._core) * (cut.turns == 1)
        later = 0.0 if cut.ahead else (blocks - 1) * first
        return work.ns(self._core) + max(first, self._begun.ns(self._core)) + later + waiting

    def _part(self, number: int, height: int, piece: Piece) -> Work:
        sizes = self._sizes[number]
        groups, blocks = ceil(self._rows.shape[0] / height), ceil(sizes.columns / piece.width)
        passes = groups * blocks * ceil(sizes.chunks / piece.slab)
        begun = Work(passes * _WRITTEN_NS, passes * _WRITTEN_NS, passes * _WRITTEN_NS)
        loading = self._loads(number, piece.slab, piece.width) * passes + self._turning(number) * groups
        return begun + loading + self._multiplied(number, piece.width)

    def _turning(self, number: int) -> Work:
        """The weights that do not lie as they are wanted."""
        sizes = self._sizes[number]
        each = turning_work(self._core, sizes.dtype, sizes.chunks, sizes.columns)
        return each * sum(map(must_turn, sizes.weights))

    def _multiplying(self, number: int, width: int) -> Work:
        """Multiplying, bringing the sums away, and storing them."""
        core, sizes, rows = self._core, self._sizes[number], self._rows.shape[0]
        whole, rest = divmod(width, BANK)
        each = whole * BANK + (max(rest, ISSUE) if rest else 0)
        made = len(sizes.weights) * ceil(rows / PARTITIONS) * ceil(sizes.columns / width) * each
        strip = min(width, sizes.strip)
        store = _store_ns(core, sizes, ceil(rows / sizes.ranks), strip)
        links = _meeting_ns(core, sizes, strip) * ceil(rows / sizes.run) * ceil(sizes.columns / strip)
        tensor, vector = self._slow * sizes.chunks * made / core.tensor_ghz, made / core.vector_ghz
        return Work(store, tensor, vector, links=links if sizes.ranks > 1 else 0.0)

    @property
    def _slow(self) -> float:
        return self._core.fp32_cycle_factor if self._rows.dtype is DType.FLOAT32 else 1.0

    def _turned(self, height: int) -> int:
        return self._chunks * height * self._rows.dtype.itemsize


def _up(rows: int) -> int:
    return ceil(rows / PARTITIONS) * PARTITIONS if rows > PARTITIONS else rows


def _load(core: CoreSpec, sizes: Sizes, slab: int, width: int) -> Work:
    return sum((load_work(core, weight, slab, width) for weight in sizes.weights), Work())


def _store_ns(core: CoreSpec, sizes: Sizes, rows: int, width: int) -> float:
    lanes = min(rows, PARTITIONS)
    home = View(0, sizes.out, Affine(), (lanes, width), (sizes.columns, 1))
    one = DmaCopy(engine=Engine.DMA0, dst=home.far(), src=tile_of(sizes.out, lanes, width))
    return cost(one, core).ns * ceil(rows / lanes) * ceil(sizes.columns / width)


def _meeting_ns(core: CoreSpec, sizes: Sizes, width: int) -> float:
    own, all_ = (tile_of(sizes.out, PARTITIONS, ranks * width) for ranks in (1, sizes.ranks))
    return cost(CollectiveReduceScatter(engine=Engine.COLLECTIVE, dst=own, src=all_), core).ns
