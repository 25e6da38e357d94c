"""Tiling search for matmuls that read the same rows: the cheapest tiling, by the documented cycle rules, that fits SBUF
and PSUM.

Two loop orders are searched. Activation-stationary: a group of rows stays in SBUF, transposed, while the weights stream
past it block by block. Weight-stationary: a block of weight columns stays in SBUF while all rows stream past it. The
first reads the weights once per row group, the second reads the rows once per column block, so that the better one
depends on the shapes. For a long contraction axis, a weight block may hold only a slab of it, with the partial sums of
all its rows in PSUM.

The search is exhaustive over a few widths, heights and slabs (powers of two and equal shares). Costs are closed
formulas, so that a search takes milliseconds and its result is the same on every machine. The cost of a tiling is the
time of the busiest of DMA, tensor and vector engine, which overlap, plus the start-up, in which the first rows and
weights are loaded and nothing overlaps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
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
from nxpipe.emulator.lower.kernel_cost import KernelCost, load_cost, sbuf_tile, traffic_ns, transpose_cost
from nxpipe.emulator.lower.matmul import tiling
from nxpipe.emulator.lower.tiles import WIDEST
from nxpipe.emulator.lower.transpose import chunks_of, load_matrix, must_transpose, transpose_bytes
from nxpipe.emulator.lower.view import TiledView, View

BANK: Final = 512  # float32 sums in a PSUM bank
STRIP: Final = WIDEST  # columns of a result in one tile of the epilogue; a multiple of BANK
_BANKS_OF_SUMS: Final = 6  # PSUM banks for partial sums over slabs; the other two are for transposes
_WIDTHS: Final = (4096, 2048, 1536, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_BLOCKS: Final = (1, 2, 3, 4, 6)  # equal blocks of columns
_ROUND: Final = 64  # columns
_HEIGHTS: Final = (8192, 4096, 2048, 1024, 512, 384, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_STREAMED: Final = (512, 256, 128)  # rows in SBUF, weight-stationary
_SLABS: Final = (64, 32, 16, 8, 4, 2, 1)
_ISSUE_NS: Final = 60  # start of an instruction on an engine, which the cycle formulas omit


class RowSource(Protocol):
    """The rows of a matmul, with the cost of their source: HBM, computation in SBUF, or an all-gather."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def run(self) -> int:
        """The granularity of loads: row counts are multiples of this number."""

    @property
    def resident_bytes(self) -> int:
        """Bytes per partition that the source occupies for the whole kernel."""

    @property
    def transient_bytes(self) -> int:
        """Bytes per partition that the source needs while it loads rows."""

    def preparation(self, core: CoreSpec) -> KernelCost:
        """Cost of the preparation before the first rows."""

    def work(self, core: CoreSpec, height: int) -> KernelCost:
        """Cost of loading `height` rows, transposed, to SBUF."""


@dataclass(frozen=True)
class TileCosts:
    """Sizes of one output group: its weights, which are in SBUF together, and the other bytes per column."""

    weights: tuple[View, ...]  # [contraction, columns], of equal shape
    dtype: DType  # of the multiplication
    by_column: int  # bytes per column of a block that all rows share: biases
    by_strip: int  # bytes per column of a strip: results and epilogue
    out: DType
    ranks: int = 1  # in a fused reduce-scatter of the results

    @property
    def columns(self) -> int:
        return self.weights[0].shape[1]

    @property
    def chunks(self) -> int:
        return chunks_of(self.weights[0].shape[0])

    @property
    def widths(self) -> set[int]:
        """Candidate block widths: a few equal blocks, and round numbers of columns."""
        equal = {ceil(self.columns / (blocks * _ROUND)) * _ROUND for blocks in _BLOCKS}
        widths = {min(width, self.columns) for width in {*_WIDTHS, *equal}}
        return set(filter(self._is_tiled, widths)) if self.tile else widths

    def _is_tiled(self, width: int) -> bool:
        """True if blocks of this width are whole tiles, or parts of one tile."""
        whole_tiles = self.strip % self.tile == 0 and (width % self.tile == 0 or width == self.columns)
        return width <= self.tile or whole_tiles

    @property
    def tile(self) -> int:
        """Columns of a stored tile; 0 if no weight is tiled."""
        return max(view.tile if isinstance(view, TiledView) else 0 for view in self.weights)

    @property
    def run(self) -> int:
        """The granularity of rows in SBUF."""
        return PARTITIONS * self.ranks if self.ranks > 1 else 1

    @property
    def strip(self) -> int:
        return strip_width(self.ranks)

    def weight(self, slab: int, width: int) -> int:
        return len(self.weights) * slab * width * self.dtype.itemsize

    def other_bytes(self, width: int) -> int:
        transposes = transpose_bytes(self.dtype) if any(map(must_transpose, self.weights)) else 0
        return self.by_column * width + self.by_strip * min(width, self.strip) + transposes


@dataclass(frozen=True, order=True)
class TileShape:
    """The shape of a weight block in SBUF."""

    width: int  # columns
    slab: int  # chunks of 128 elements of the contraction axis


@dataclass(frozen=True)
class Tiling:
    """Loop order and tile sizes of a matmul kernel, with the expected time."""

    height: int  # rows in SBUF, transposed
    pieces: tuple[TileShape, ...]  # by output group
    ns: float
    weight_stationary: bool = False
    buffers: int = 2  # of streamed rows: 2 is double buffering
    prefetch: bool = False  # the next stationary weight block is loaded while the current one is in use

    def __str__(self) -> str:
        order = "weight-stationary" if self.weight_stationary else "activation-stationary"
        blocks = ", ".join(f"{piece.slab * PARTITIONS} x {piece.width}" for piece in self.pieces)
        prefetch = ", prefetch" if self.prefetch else ""
        buffers = f", {self.buffers} row buffers{prefetch}" if self.weight_stationary else ""
        return f"{order}, {self.height} rows, weight blocks of {blocks}{buffers}, {self.ns:.0f} ns"


def strip_width(ranks: int) -> int:
    """Columns in one tile of the epilogue; fewer if the partial results of several ranks are in SBUF."""
    width = min(STRIP, 2 * STRIP // ranks)
    return width // BANK * BANK or width


def psum_buffers(banks: int) -> int:
    """Buffers of partial sums: two if the banks suffice, so that one is copied to SBUF while the other accumulates."""
    return 2 if 2 * banks <= _BANKS_OF_SUMS else 1


def cheapest_tiling(core: CoreSpec, budget: int, rows: RowSource, sizes: Sequence[TileCosts]) -> Tiling:
    """The cheapest tiling that fits; if none fits, the smallest one, whose allocation then raises OutOfMemory."""
    return _searched(core, budget - rows.resident_bytes - 1024, _RowCosts.of(core, rows, sizes), tuple(sizes))


@dataclass(frozen=True)
class _RowCosts:
    """All that the search needs to know about a source of rows."""

    shape: tuple[int, int]
    dtype: DType
    run: int  # the granularity of heights
    transient_bytes: int
    preparation: KernelCost
    loads: tuple[tuple[int, KernelCost], ...]  # of each candidate height

    @classmethod
    def of(cls, core: CoreSpec, rows: RowSource, sizes: Sequence[TileCosts]) -> "_RowCosts":
        runs = {rows.run, *(group.run for group in sizes)} - {1}
        run = lcm(PARTITIONS, *runs) if runs else 1
        tallest = _rounded_up(rows.shape[0])
        heights = sorted({*(min(size, tallest) for size in (*_HEIGHTS, run)), *_STREAMED, run})
        loads = tuple((height, rows.work(core, height)) for height in heights if not height % run)
        return cls(rows.shape, rows.dtype, run, rows.transient_bytes, rows.preparation(core), loads)


# Attempts to emit a program in less SBUF, and alternatives of one kernel, ask for the same searches again.
@lru_cache(maxsize=1024)
def _searched(core: CoreSpec, budget: int, rows: _RowCosts, sizes: tuple[TileCosts, ...]) -> Tiling:
    """Ties are broken by a total order on the fields, so that the result does not depend on the order of the search."""
    return min(
        _TilingSearch(core, budget, rows, sizes).all(),
        key=lambda candidate: (
            candidate.ns,
            -candidate.height,
            candidate.weight_stationary,
            -candidate.buffers,
            candidate.prefetch,
            candidate.pieces,
        ),
        default=Tiling(rows.run, (TileShape(1, 1),) * len(sizes), inf),
    )


@dataclass(frozen=True)
class _Width:
    """A candidate width of a group's weight blocks, with what does not depend on the number of rows in SBUF."""

    width: int
    slabs: tuple[tuple[TileShape, int, KernelCost], ...]  # the bytes of two blocks with all else, and a block's load
    banks: int  # PSUM banks of 128 rows
    blocks: int  # of a result's columns
    matmuls: KernelCost


class _TilingSearch:
    """All tilings of one kernel with their expected times. Costs of loads and matmuls recur often and are cached."""

    def __init__(self, core: CoreSpec, budget: int, rows: _RowCosts, sizes: Sequence[TileCosts]) -> None:
        self._core, self._budget, self._rows, self._sizes = core, budget, rows, sizes
        self._chunks = chunks_of(rows.shape[1])
        self._load_rows = dict(rows.loads)
        self._loads = cache(lambda number, slab, width: _load(core, sizes[number], slab, width))
        self._matmul_costs = cache(self._matmul_cost)
        self._transposes = [self._transpose_cost(group) for group in sizes]

    def all(self) -> Iterator[Tiling]:
        return chain(self._activation_stationary(), self._weight_stationary())

    def _activation_stationary(self) -> Iterator[Tiling]:
        rows = self._rows.shape[0]
        widths = [self._widths(number) for number in range(len(self._sizes))]
        for height in self._multiples_of_run(min(size, _rounded_up(rows)) for size in (*_HEIGHTS, self._rows.run)):
            free = self._budget - self._row_bytes(height)
            if self._rows.transient_bytes > free:
                continue
            options = [min(self._pieces(number, own, height, free), default=None) for number, own in enumerate(widths)]
            pieces = tuple(option[1] for option in options if option)
            if len(pieces) == len(options):
                load_rows = self._load_rows[height]
                costs = (self._group_cost(number, height, piece) for number, piece in enumerate(pieces))
                work = sum(costs, load_rows * ceil(rows / height))
                first = self._loads(0, pieces[0].slab, pieces[0].width).dma
                start_up = max(load_rows.dma, load_rows.links, self._rows.preparation.ns(self._core)) + first
                yield Tiling(height, pieces, work.ns(self._core) + start_up)

    def _multiples_of_run(self, heights: Iterable[int]) -> set[int]:
        return {height for height in heights if not height % self._rows.run}

    def _widths(self, number: int) -> list[_Width]:
        sizes = self._sizes[number]
        slabs = (sizes.chunks, *((slab for slab in _SLABS if slab < sizes.chunks) if sizes.ranks == 1 else ()))
        return [
            _Width(
                width,
                tuple(
                    (TileShape(width, slab), 2 * sizes.weight(slab, width) + other, self._loads(number, slab, width))
                    for slab in slabs
                ),
                ceil(width / BANK) * len(sizes.weights),
                ceil(sizes.columns / width),
                self._matmul_costs(number, width),
            )
            for width in sizes.widths
            for other in (sizes.other_bytes(width),)
        ]

    def _pieces(
        self, number: int, widths: Sequence[_Width], height: int, free: int
    ) -> Iterator[tuple[float, TileShape]]:
        """The weight blocks that fit beside rows of a height, each with its group's time: the `ns` of `_group_cost`,
        term by term, without an object for each of the very many candidates."""
        chunks, groups = self._sizes[number].chunks, ceil(self._rows.shape[0] / height)
        transposes, rows = self._transposes[number] * groups, ceil(height / PARTITIONS)
        for one in widths:
            matmuls, passes_of_width = one.matmuls, groups * one.blocks
            for piece, nbytes, load in one.slabs[: None if rows * one.banks <= _BANKS_OF_SUMS else 1]:
                if nbytes > free:
                    continue
                passes = passes_of_width * ceil(chunks / piece.slab)
                issue = passes * _ISSUE_NS
                busiest = max(
                    issue + (load.dma * passes + transposes.dma) + matmuls.dma,
                    issue + (load.tensor * passes + transposes.tensor) + matmuls.tensor,
                    issue + (load.vector * passes + transposes.vector) + matmuls.vector,
                    load.links * passes + transposes.links + matmuls.links,
                )
                yield busiest + traffic_ns(load.bytes * passes + transposes.bytes + matmuls.bytes, self._core), piece

    def _weight_stationary(self) -> Iterator[Tiling]:
        """Tilings with all weights in SBUF, or for a single output group with one block of columns after the other."""
        for width in {width for sizes in self._sizes for width in sizes.widths}:
            blocks = max(ceil(sizes.columns / width) for sizes in self._sizes)
            if blocks > 1 and len(self._sizes) > 1:
                continue
            pieces = tuple(TileShape(min(width, sizes.columns), sizes.chunks) for sizes in self._sizes)
            if any(piece.width not in sizes.widths for sizes, piece in zip(self._sizes, pieces, strict=True)):
                continue
            pairs = list(zip(self._sizes, pieces, strict=True))
            weights = sum(sizes.weight(sizes.chunks, piece.width) for sizes, piece in pairs)
            other_bytes = sum(sizes.other_bytes(piece.width) for sizes, piece in pairs)
            for prefetch in (False, True) if blocks > 1 else (False,):
                free = self._budget - weights * (1 + prefetch) - other_bytes - self._rows.transient_bytes
                for height, buffers in product(
                    self._multiples_of_run(_STREAMED) or {self._rows.run}, (2, 1) if self._rows.run > 1 else (2,)
                ):
                    if height < self._rows.shape[0] and buffers * self._row_bytes(height) <= free:
                        candidate = Tiling(height, pieces, inf, True, buffers, prefetch)
                        yield replace(candidate, ns=self._weight_stationary_ns(candidate, blocks))

    def _weight_stationary_ns(self, candidate: Tiling, blocks: int) -> float:
        """Expected time. Without prefetch, the load of the next weight block starts after the last rows of the current
        one; with a single row buffer, the load of the next rows starts after the current rows. Such loads overlap with
        nothing and are added to the time."""
        passes = ceil(self._rows.shape[0] / candidate.height) * blocks
        loads = [self._loads(number, piece.slab, piece.width) for number, piece in enumerate(candidate.pieces)]
        load_rows = self._load_rows[candidate.height]
        work = load_rows * passes
        for number, (load, piece) in enumerate(zip(loads, candidate.pieces, strict=True)):
            work += load * blocks + self._transposes[number] + self._matmul_costs(number, piece.width)
        first_load, row_stalls = (
            sum(load.dma for load in loads),
            passes * load_rows.ns(self._core) * (candidate.buffers == 1),
        )
        weight_stalls = 0.0 if candidate.prefetch else (blocks - 1) * first_load
        return work.ns(self._core) + max(first_load, self._rows.preparation.ns(self._core)) + weight_stalls + row_stalls

    def _group_cost(self, number: int, height: int, piece: TileShape) -> KernelCost:
        sizes = self._sizes[number]
        groups, blocks = ceil(self._rows.shape[0] / height), ceil(sizes.columns / piece.width)
        passes = groups * blocks * ceil(sizes.chunks / piece.slab)
        issue = KernelCost(passes * _ISSUE_NS, passes * _ISSUE_NS, passes * _ISSUE_NS)
        loading = self._loads(number, piece.slab, piece.width) * passes + self._transposes[number] * groups
        return issue + loading + self._matmul_costs(number, piece.width)

    def _transpose_cost(self, sizes: TileCosts) -> KernelCost:
        """Cost of transposing those weights of a group whose contraction axis is contiguous."""
        by_weight = transpose_cost(self._core, sizes.dtype, sizes.chunks, sizes.columns)
        return by_weight * sum(map(must_transpose, sizes.weights))

    def _matmul_cost(self, number: int, width: int) -> KernelCost:
        """Cost of the matmuls, of the copies from PSUM, and of storing the results."""
        core, sizes, rows = self._core, self._sizes[number], self._rows.shape[0]
        full_banks, tail = divmod(width, BANK)
        issued_columns = full_banks * BANK + (max(tail, ISSUE) if tail else 0)
        issued = len(sizes.weights) * ceil(rows / PARTITIONS) * ceil(sizes.columns / width) * issued_columns
        strip = min(width, sizes.strip)
        store = _store_ns(core, sizes, ceil(rows / sizes.ranks), strip)
        links = _reduce_scatter_ns(core, sizes, strip) * ceil(rows / sizes.run) * ceil(sizes.columns / strip)
        tensor, vector = self._cycle_factor * sizes.chunks * issued / core.tensor_ghz, issued / core.vector_ghz
        return KernelCost(store, tensor, vector, links=links if sizes.ranks > 1 else 0.0)

    @property
    def _cycle_factor(self) -> float:
        return self._core.fp32_cycle_factor if self._rows.dtype is DType.FLOAT32 else 1.0

    def _row_bytes(self, height: int) -> int:
        return self._chunks * height * self._rows.dtype.itemsize


def _rounded_up(rows: int) -> int:
    return ceil(rows / PARTITIONS) * PARTITIONS if rows > PARTITIONS else rows


def _load(core: CoreSpec, sizes: TileCosts, slab: int, width: int) -> KernelCost:
    return sum((load_cost(core, weight, slab, width) for weight in sizes.weights), KernelCost())


def _store_ns(core: CoreSpec, sizes: TileCosts, rows: int, width: int) -> float:
    partitions = min(rows, PARTITIONS)
    home = View(0, sizes.out, Affine(), (partitions, width), (sizes.columns, 1))
    copy = DmaCopy(engine=Engine.DMA0, dst=home.far(), src=sbuf_tile(sizes.out, partitions, width))
    return cost(copy, core).ns * ceil(rows / partitions) * ceil(sizes.columns / width)


def _reduce_scatter_ns(core: CoreSpec, sizes: TileCosts, width: int) -> float:
    share, partial = (sbuf_tile(sizes.out, PARTITIONS, ranks * width) for ranks in (1, sizes.ranks))
    return cost(CollectiveReduceScatter(engine=Engine.COLLECTIVE, dst=share, src=partial), core).ns


LoadRows = Callable[[Block, Span], None]  # writes a span of rows, transposed, into [128, chunks, rows]


class LoadableRows(tiling.RowSource, Protocol):
    """Rows that a matmul kernel can load, with the costs of `RowSource`."""

    def begin(self) -> LoadRows:
        """Load what all rows share, until the end of the enclosing scope; returns the function that loads rows."""

    def block(self, height: int, buffers: int) -> Block:
        """Allocate a tile for transposed rows."""


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
        return transpose_bytes(self.dtype) if self._must_transpose else 0

    def preparation(self, core: CoreSpec) -> KernelCost:
        return KernelCost()

    def block(self, height: int, buffers: int) -> Block:
        return allocate_rows(self.k, self, height, buffers)

    def work(self, core: CoreSpec, height: int) -> KernelCost:
        chunks = chunks_of(self.view.shape[1])
        loading = load_cost(core, self.view.transposed((1, 0)), chunks, height)
        return loading + transpose_cost(core, self.dtype, chunks, height) if self._must_transpose else loading

    def begin(self) -> LoadRows:
        return lambda transposed, rows: load_matrix(self.k, transposed, self.view.cut(rows).transposed((1, 0)))

    @property
    def _must_transpose(self) -> bool:
        return must_transpose(self.view.transposed((1, 0)))


def allocate_rows(k: Kernel, rows: tiling.RowSource, height: int, buffers: int) -> Block:
    return k.tile(rows.dtype, PARTITIONS, chunks_of(rows.shape[1]), height, buffers=buffers)


@dataclass(frozen=True)
class WeightOperand:
    """A weight with its bias, and the type of the result."""

    result: Value  # of the matmul, or of the reduce-scatter after it
    weight: View  # [summed, columns]
    bias: View | None
    dtype: DType
    out: DType


@dataclass(frozen=True)
class OutputGroup:
    """Weights whose results share an epilogue."""

    operands: tuple[WeightOperand, ...]
    epilogue: Epilogue
    note: int
    sharing: RowSharding | None = None  # of the fused reduce-scatter

    @property
    def ranks(self) -> int:
        return self.sharing.ranks if self.sharing else 1

    @property
    def columns(self) -> int:
        return self.operands[0].weight.shape[1]

    @property
    def sizes(self) -> TileCosts:
        biases = sum(operand.bias.dtype.itemsize for operand in self.operands if operand.bias)
        shares = self.ranks + 1 if self.sharing else 1
        results = sum(2 * operand.out.itemsize * shares for operand in self.operands)
        return TileCosts(
            tuple(operand.weight for operand in self.operands),
            max((operand.dtype for operand in self.operands), key=lambda dtype: dtype.itemsize),
            2 * biases,
            results + epilogue_bytes(self.epilogue),
            self.operands[0].out,
            self.ranks,
        )
