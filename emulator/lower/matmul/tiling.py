"""Tiling search for matmuls that read the same rows: every tiling that fits SBUF and PSUM is costed with the
documented cycle rules, and the cheapest is taken.

Two loop orders are searched. Activation-stationary: a group of rows stays in SBUF, transposed, while the weights stream
past it block by block. Weight-stationary: a block of weight columns stays and all rows stream past it, once for each
block. The first reads weights once per row group, the second reads rows once per column block, so that the better one
depends on the shapes. Where the contraction axis is long, a weight block may hold only a slab of it, with the partial
sums of all its rows in PSUM.

The search is exhaustive over a few widths, heights and slabs, powers of two and equal shares, instead of a model fitted
to measurements: costs are closed formulas, so that a search takes milliseconds and the result never depends on a
machine. Cost is that of the busiest of DMA, tensor and vector engine, since they overlap, plus the start, in which the
first rows and weights arrive and nothing overlaps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from math import ceil, inf, lcm
from typing import Final, Protocol

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.collective import CollectiveReduceScatter
from nxpipe.emulator.isa.cost import ISSUE, cost
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.lower.epilogue import Epilogue, epilogue_bytes
from nxpipe.emulator.lower.grouping import RowSharding
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.kernel_cost import KernelCost, load_cost, sbuf_tile, transpose_cost
from nxpipe.emulator.lower.matmul import tiling
from nxpipe.emulator.lower.tiles import WIDEST
from nxpipe.emulator.lower.transpose import chunks_of, load_matrix, must_transpose, transpose_bytes
from nxpipe.emulator.lower.view import View

BANK: Final = 512  # float32 sums
STRIP: Final = WIDEST  # columns of a result that pass through the epilogue at once; whole banks
_BANKS_OF_SUMS: Final = 6  # PSUM banks for partial sums over slabs; the other two are for transposes
_WIDTHS: Final = (4096, 2048, 1536, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_BLOCKS: Final = (1, 2, 3, 4, 6)
_ROUND: Final = 64  # columns
_HEIGHTS: Final = (8192, 4096, 2048, 1024, 512, 384, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_STREAMED: Final = (512, 256, 128)  # rows at once, weight-stationary
_SLABS: Final = (64, 32, 16, 8, 4, 2, 1)
_ISSUE_NS: Final = 60  # start of one more instruction on an engine, which the cycle formulas leave out


class RowSource(Protocol):
    """Costs of the rows of a matmul: from HBM, computed in SBUF, or gathered from other ranks."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def run(self) -> int:
        """Rows come in multiples of this number."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of each partition that the source holds for the whole kernel."""

    @property
    def transient_bytes(self) -> int:
        """Bytes of each partition that the source needs while it brings rows."""

    def begun(self, core: CoreSpec) -> KernelCost:
        """Cost before the first row."""

    def work(self, core: CoreSpec, height: int) -> KernelCost:
        """Cost of bringing so many rows, transposed, to SBUF."""


@dataclass(frozen=True)
class TileCosts:
    """Sizes of one output group: its weights, which are in SBUF together, and the bytes needed beside them."""

    weights: tuple[View, ...]  # [contraction, columns], of equal shape
    dtype: DType  # of the multiplication
    by_column: int  # bytes of each column of a block that all rows share: biases
    by_strip: int  # bytes of each column of a strip: results and epilogue
    out: DType
    ranks: int = 1  # that reduce-scatter their results, each a share of every run of rows

    @property
    def columns(self) -> int:
        return self.weights[0].shape[1]

    @property
    def chunks(self) -> int:
        return chunks_of(self.weights[0].shape[0])

    @property
    def widths(self) -> set[int]:
        """Block widths to try: all columns in a few equal blocks, and round numbers of columns."""
        equal = {ceil(self.columns / (blocks * _ROUND)) * _ROUND for blocks in _BLOCKS}
        return {min(width, self.columns) for width in {*_WIDTHS, *equal}}

    @property
    def run(self) -> int:
        """Least number of rows in SBUF."""
        return PARTITIONS * self.ranks if self.ranks > 1 else 1

    @property
    def strip(self) -> int:
        return strip_width(self.ranks)

    def weight(self, slab: int, width: int) -> int:
        return len(self.weights) * slab * width * self.dtype.itemsize

    def beside(self, width: int) -> int:
        turning = transpose_bytes(self.dtype) if any(map(must_transpose, self.weights)) else 0
        return self.by_column * width + self.by_strip * min(width, self.strip) + turning


@dataclass(frozen=True, order=True)
class TileShape:
    """The block of a weight that is in SBUF at a time."""

    width: int  # columns
    slab: int  # chunks of 128 elements of the contraction axis


@dataclass(frozen=True)
class Tiling:
    """How a matmul kernel cuts its work, with its expected time."""

    height: int  # rows in SBUF, transposed
    pieces: tuple[TileShape, ...]  # one for each output group
    ns: float
    weight_stationary: bool = False
    buffers: int = 2  # of streamed rows: 2 is double buffering
    prefetch: bool = False  # the next block of stationary weights arrives while this one is in use

    def __str__(self) -> str:
        order = "weight-stationary" if self.weight_stationary else "activation-stationary"
        blocks = ", ".join(f"{piece.slab * PARTITIONS} x {piece.width}" for piece in self.pieces)
        prefetch = ", prefetch" if self.prefetch else ""
        buffers = f", {self.buffers} row buffers{prefetch}" if self.weight_stationary else ""
        return f"{order}, {self.height} rows, weight blocks of {blocks}{buffers}, {self.ns:.0f} ns"


def strip_width(ranks: int) -> int:
    """Columns that pass through the epilogue at once; fewer where the partial results of all ranks are in SBUF."""
    return min(STRIP, 2 * STRIP // ranks)


def psum_buffers(banks: int) -> int:
    """Buffers of partial sums: two, so that some are copied out while others accumulate, if the banks suffice."""
    return 2 if 2 * banks <= _BANKS_OF_SUMS else 1


def cheapest_tiling(core: CoreSpec, budget: int, rows: RowSource, sizes: Sequence[TileCosts]) -> Tiling:
    """The cheapest tiling that fits; where none fits, the smallest one, whose allocation then fails with the numbers.

    Ties are broken by a total order on the fields, so that the choice never depends on the order of the search.
    """
    cuts = _TilingSearch(core, budget - rows.resident_bytes - 1024, rows, sizes)
    least = Tiling(cuts.run, (TileShape(1, 1),) * len(sizes), inf)
    return min(
        cuts.all(),
        key=lambda cut: (cut.ns, -cut.height, cut.weight_stationary, -cut.buffers, cut.prefetch, cut.pieces),
        default=least,
    )


class _TilingSearch:
    """All tilings of one kernel with their times. Costs of loads and multiplications are cached: they recur often."""

    def __init__(self, core: CoreSpec, budget: int, rows: RowSource, sizes: Sequence[TileCosts]) -> None:
        self._core, self._budget, self._rows, self._sizes = core, budget, rows, sizes
        self._chunks = chunks_of(rows.shape[1])
        runs = {rows.run, *(each.run for each in sizes)} - {1}
        self.run = lcm(PARTITIONS, *runs) if runs else 1
        self._begun = rows.begun(core)
        self._loads = cache(lambda number, slab, width: _load(core, sizes[number], slab, width))
        self._multiplied = cache(self._multiplying)

    def all(self) -> Iterator[Tiling]:
        return chain(self._activation_stationary(), self._weight_stationary())

    def _activation_stationary(self) -> Iterator[Tiling]:
        rows = self._rows.shape[0]
        for height in self._multiples_of_run(min(each, _rounded_up(rows)) for each in (*_HEIGHTS, self.run)):
            left = self._budget - self._row_bytes(height)
            if self._rows.transient_bytes > left:
                continue
            options = [
                [(self._group_cost(number, height, piece), piece) for piece in self._pieces(sizes, height, left)]
                for number, sizes in enumerate(self._sizes)
            ]
            if all(options):
                chosen = [min(each, key=lambda pair: (pair[0].ns(self._core), pair[1])) for each in options]
                making = self._rows.work(self._core, height)
                work = sum((work for work, _ in chosen), making * ceil(rows / height))
                first = self._loads(0, chosen[0][1].slab, chosen[0][1].width).dma
                begin = max(making.dma, making.links, self._begun.ns(self._core)) + first
                yield Tiling(height, tuple(piece for _, piece in chosen), work.ns(self._core) + begin)

    def _multiples_of_run(self, heights: Iterable[int]) -> set[int]:
        return {height for height in heights if not height % self.run}

    def _pieces(self, sizes: TileCosts, height: int, left: int) -> Iterator[TileShape]:
        for width in sizes.widths:
            banks = ceil(height / PARTITIONS) * ceil(width / BANK) * len(sizes.weights)
            in_slabs = banks <= _BANKS_OF_SUMS and sizes.ranks == 1
            for slab in (sizes.chunks, *(slab for slab in _SLABS if slab < sizes.chunks and in_slabs)):
                if 2 * sizes.weight(slab, width) + sizes.beside(width) <= left:
                    yield TileShape(width, slab)

    def _weight_stationary(self) -> Iterator[Tiling]:
        """All weights at once; or, for a single output group, one block of columns after the other."""
        for width in {width for sizes in self._sizes for width in sizes.widths}:
            blocks = max(ceil(sizes.columns / width) for sizes in self._sizes)
            if blocks > 1 and len(self._sizes) > 1:
                continue
            pieces = tuple(TileShape(min(width, sizes.columns), sizes.chunks) for sizes in self._sizes)
            pairs = list(zip(self._sizes, pieces, strict=True))
            weights = sum(sizes.weight(sizes.chunks, piece.width) for sizes, piece in pairs)
            beside = sum(sizes.beside(piece.width) for sizes, piece in pairs)
            for prefetch in (False, True) if blocks > 1 and self._rows.run > 1 else (False,):
                left = self._budget - weights * (1 + prefetch) - beside - self._rows.transient_bytes
                for height, buffers in product(
                    self._multiples_of_run(_STREAMED) or {self.run}, (2, 1) if self.run > 1 else (2,)
                ):
                    if height < self._rows.shape[0] and buffers * self._row_bytes(height) <= left:
                        cut = Tiling(height, pieces, inf, True, buffers, prefetch)
                        yield replace(cut, ns=self._weight_stationary_ns(cut, blocks))

    def _weight_stationary_ns(self, cut: Tiling, blocks: int) -> float:
        """Without prefetch the next weight block waits for the last rows of this one, and with a single row buffer
        the next rows wait for these: such loads overlap with nothing and are added to the time."""
        passes = ceil(self._rows.shape[0] / cut.height) * blocks
        loads = [self._loads(number, piece.slab, piece.width) for number, piece in enumerate(cut.pieces)]
        making = self._rows.work(self._core, cut.height)
        work = making * passes
        for number, (load, piece) in enumerate(zip(loads, cut.pieces, strict=True)):
            work += load * blocks + self._transposing(number) + self._multiplied(number, piece.width)
        first, waiting = sum(load.dma for load in loads), passes * making.ns(self._core) * (cut.buffers == 1)
        later = 0.0 if cut.prefetch else (blocks - 1) * first
        return work.ns(self._core) + max(first, self._begun.ns(self._core)) + later + waiting

    def _group_cost(self, number: int, height: int, piece: TileShape) -> KernelCost:
        sizes = self._sizes[number]
        groups, blocks = ceil(self._rows.shape[0] / height), ceil(sizes.columns / piece.width)
        passes = groups * blocks * ceil(sizes.chunks / piece.slab)
        begun = KernelCost(passes * _ISSUE_NS, passes * _ISSUE_NS, passes * _ISSUE_NS)
        loading = self._loads(number, piece.slab, piece.width) * passes + self._transposing(number) * groups
        return begun + loading + self._multiplied(number, piece.width)

    def _transposing(self, number: int) -> KernelCost:
        """Cost of transposing the weights whose contraction axis is contiguous."""
        sizes = self._sizes[number]
        each = transpose_cost(self._core, sizes.dtype, sizes.chunks, sizes.columns)
        return each * sum(map(must_transpose, sizes.weights))

    def _multiplying(self, number: int, width: int) -> KernelCost:
        """Cost of the matmuls, of copying sums from PSUM, and of storing the results."""
        core, sizes, rows = self._core, self._sizes[number], self._rows.shape[0]
        whole, rest = divmod(width, BANK)
        each = whole * BANK + (max(rest, ISSUE) if rest else 0)
        made = len(sizes.weights) * ceil(rows / PARTITIONS) * ceil(sizes.columns / width) * each
        strip = min(width, sizes.strip)
        store = _store_ns(core, sizes, ceil(rows / sizes.ranks), strip)
        links = _reduce_scatter_ns(core, sizes, strip) * ceil(rows / sizes.run) * ceil(sizes.columns / strip)
        tensor, vector = self._slow * sizes.chunks * made / core.tensor_ghz, made / core.vector_ghz
        return KernelCost(store, tensor, vector, links=links if sizes.ranks > 1 else 0.0)

    @property
    def _slow(self) -> float:
        return self._core.fp32_cycle_factor if self._rows.dtype is DType.FLOAT32 else 1.0

    def _row_bytes(self, height: int) -> int:
        return self._chunks * height * self._rows.dtype.itemsize


def _rounded_up(rows: int) -> int:
    return ceil(rows / PARTITIONS) * PARTITIONS if rows > PARTITIONS else rows


def _load(core: CoreSpec, sizes: TileCosts, slab: int, width: int) -> KernelCost:
    return sum((load_cost(core, weight, slab, width) for weight in sizes.weights), KernelCost())


def _store_ns(core: CoreSpec, sizes: TileCosts, rows: int, width: int) -> float:
    lanes = min(rows, PARTITIONS)
    home = View(0, sizes.out, Affine(), (lanes, width), (sizes.columns, 1))
    one = DmaCopy(engine=Engine.DMA0, dst=home.far(), src=sbuf_tile(sizes.out, lanes, width))
    return cost(one, core).ns * ceil(rows / lanes) * ceil(sizes.columns / width)


def _reduce_scatter_ns(core: CoreSpec, sizes: TileCosts, width: int) -> float:
    own, all_ = (sbuf_tile(sizes.out, PARTITIONS, ranks * width) for ranks in (1, sizes.ranks))
    return cost(CollectiveReduceScatter(engine=Engine.COLLECTIVE, dst=own, src=all_), core).ns


LoadRows = Callable[[Block, Span], None]  # writes some rows, transposed, into [128, chunks, rows]


class LoadableRows(tiling.RowSource, Protocol):
    """Rows that a matmul kernel can load; `RowSource` states what that costs."""

    def begin(self) -> LoadRows:
        """Load what all rows need, until the end of the scope around; returns the function that loads some of them."""

    def block(self, height: int, buffers: int) -> Block:
        """Allocate space for transposed rows."""


@dataclass(frozen=True)
class HbmRows:
    """Rows in HBM."""

    k: Kernel
    view: View  # [rows, summed]
    dtype: DType

    @property
    def shape(self) -> tuple[int, int]:
        rows, summed = self.view.shape
        return rows, summed

    @property
    def run(self) -> int:
        return 1

    @property
    def resident_bytes(self) -> int:
        return 0

    @property
    def transient_bytes(self) -> int:
        return transpose_bytes(self.dtype) if self._must_turn else 0

    def begun(self, core: CoreSpec) -> KernelCost:
        return KernelCost()

    def block(self, height: int, buffers: int) -> Block:
        return allocate_rows(self.k, self, height, buffers)

    def work(self, core: CoreSpec, height: int) -> KernelCost:
        chunks = chunks_of(self.view.shape[1])
        loading = load_cost(core, self.view.transposed((1, 0)), chunks, height)
        return loading + transpose_cost(core, self.dtype, chunks, height) if self._must_turn else loading

    def begin(self) -> LoadRows:
        return lambda transposed, rows: load_matrix(self.k, transposed, self.view.cut(rows).transposed((1, 0)))

    @property
    def _must_turn(self) -> bool:
        return must_transpose(self.view.transposed((1, 0)))


def allocate_rows(k: Kernel, rows: tiling.RowSource, height: int, buffers: int) -> Block:
    return k.tile(rows.dtype, PARTITIONS, chunks_of(rows.shape[1]), height, buffers=buffers)


@dataclass(frozen=True)
class WeightOperand:
    """A weight with its bias, and the type to which the sums are rounded."""

    result: Value  # or what ranks make of it together
    weight: View  # [summed, columns]
    bias: View | None
    dtype: DType
    out: DType


@dataclass(frozen=True)
class OutputGroup:
    """Weights whose results meet in one epilogue."""

    factors: tuple[WeightOperand, ...]
    epilogue: Epilogue
    note: int
    sharing: RowSharding | None = None  # of ranks that add up the results

    @property
    def ranks(self) -> int:
        return self.sharing.ranks if self.sharing else 1

    @property
    def columns(self) -> int:
        return self.factors[0].weight.shape[1]

    @property
    def sizes(self) -> TileCosts:
        biases = sum(factor.bias.dtype.itemsize for factor in self.factors if factor.bias)
        shares = self.ranks + 1 if self.sharing else 1
        results = sum(2 * factor.out.itemsize * shares for factor in self.factors)
        return TileCosts(
            tuple(factor.weight for factor in self.factors),
            max((factor.dtype for factor in self.factors), key=lambda dtype: dtype.itemsize),
            2 * biases,
            results + epilogue_bytes(self.epilogue),
            self.factors[0].out,
            self.ranks,
        )
