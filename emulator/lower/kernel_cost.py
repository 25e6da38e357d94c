"""Cost model of kernels, from the documented cycle rules: busy time per engine, and bytes of HBM traffic."""

from collections import defaultdict
from dataclasses import dataclass
from math import ceil, prod
from typing import Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.collective import CollectiveAllReduce, exchange, instance_for
from nxpipe.emulator.isa.cost import START_NS, cost, moved, share_of_dma
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.program import Step, within
from nxpipe.emulator.isa.vector import TensorCopy
from nxpipe.emulator.lower.kernel import PARTITIONS, Block
from nxpipe.emulator.lower.tiles import WIDEST
from nxpipe.emulator.lower.transpose import chunks_of, must_transpose, tiled_reads
from nxpipe.emulator.lower.view import TiledView, View

# The share of HBM time (bytes at full bandwidth) that is added to a kernel's time even if an engine is the bottleneck:
# the traffic costs energy, and delays transfers of other queues.
_TRAFFIC: Final = 0.5


@dataclass(frozen=True)
class KernelCost:
    """Busy time in ns of engines that run concurrently, and bytes between HBM and the core."""

    dma: float = 0.0
    tensor: float = 0.0
    vector: float = 0.0
    bytes: int = 0
    links: float = 0.0  # collectives between ranks

    def __add__(self, other: "KernelCost") -> "KernelCost":
        return KernelCost(
            self.dma + other.dma,
            self.tensor + other.tensor,
            self.vector + other.vector,
            self.bytes + other.bytes,
            self.links + other.links,
        )

    def __mul__(self, times: int) -> "KernelCost":
        return KernelCost(
            self.dma * times, self.tensor * times, self.vector * times, self.bytes * times, self.links * times
        )

    def ns(self, core: CoreSpec) -> float:
        """Expected time: the busiest engine, plus a share of the time of HBM traffic."""
        return max(self.dma, self.tensor, self.vector, self.links) + traffic_ns(self.bytes, core)


def traffic_ns(nbytes: int, core: CoreSpec) -> float:
    """The part of HBM traffic's time that counts."""
    return _TRAFFIC * (nbytes / (core.dma_engines * core.dma_engine_peak_gb_s))


def load_cost(core: CoreSpec, view: View, chunks: int, width: int) -> KernelCost:
    """Cost of loading a slab [chunks, width] of a matrix [contraction, others] to SBUF."""
    summed, others = min(view.shape[0], chunks * PARTITIONS), min(view.shape[1], width)
    nbytes = summed * others * view.dtype.itemsize
    if isinstance(view, TiledView):
        block = Block(Memory.SBUF, view.dtype, PARTITIONS, (chunks_of(summed), others), Affine())
        reads = tiled_reads(view, block, 0, summed, (0, others), (0, min(view.tile, view.shape[1])))
        copies = (DmaCopy(engine=Engine.DMA0, dst=dst, src=src) for dst, src in reads)
        return KernelCost(sum(cost(copy, core).ns for copy in copies), bytes=nbytes)
    slab = view.cut((0, summed), (0, others))
    ordered = slab.transposed((1, 0)) if must_transpose(view) else slab
    partitions = min(ordered.shape[0], PARTITIONS)
    tile = sbuf_tile(view.dtype, partitions, ceil(ordered.shape[0] / partitions), ordered.shape[1])
    copy = DmaCopy(engine=Engine.DMA0, dst=tile, src=ordered.far())
    return KernelCost(cost(copy, core).ns, bytes=nbytes)


def transpose_cost(core: CoreSpec, dtype: DType, chunks: int, width: int) -> KernelCost:
    """Cost of transposing a loaded slab [chunks, width] on the tensor engine."""
    transposed = ceil(width / PARTITIONS) * chunks * PARTITIONS
    slow = core.fp32_cycle_factor if dtype is DType.FLOAT32 else 1
    return KernelCost(0.0, slow * transposed / core.tensor_ghz, transposed / core.vector_ghz)


def sbuf_tile(dtype: DType, lanes: int, *shape: int) -> Tile:
    return Tile(Memory.SBUF, dtype, 0, lanes, Affine(), contiguous(*shape))


def piecewise_is_cheaper(core: CoreSpec, ranks: int, rows: int, width: int, dtype: DType) -> bool:
    """True if an all-reduce tile by tile in SBUF is faster than a single one of the whole result in HBM.

    Each tile's all-reduce has a start-up time and uses no more partitions than the tile has rows. An all-reduce in HBM
    needs an additional store and load, but has one start-up time and uses all partitions.
    """
    partitions, columns = min(rows, PARTITIONS), min(width, WIDEST)
    pieces = ceil(rows / partitions) * ceil(width / columns)
    tile = _tile(dtype, partitions, columns)
    hbm_tile = Far(0, dtype, Affine(), (Axis(partitions, width), Axis(columns, 1)))
    whole_hbm = Far(0, dtype, Affine(), (Axis(rows * width, 1),))
    whole_sbuf = _tile(dtype, PARTITIONS, ceil(rows * width / PARTITIONS))
    tile_ns = _all_reduce_ns(core, ranks, tile) + _copy_ns(core, tile)
    round_trip_ns = START_NS + pieces * cost(DmaCopy(engine=Engine.DMA0, dst=hbm_tile, src=tile), core).ns
    return pieces * tile_ns <= _all_reduce_ns(core, ranks, whole_hbm) + 2 * round_trip_ns + _copy_ns(core, whole_sbuf)


def _all_reduce_ns(core: CoreSpec, ranks: int, place: Far | Tile) -> float:
    """The latency of an all-reduce and the time of its bytes, over the links of the smallest instance."""
    reduced = CollectiveAllReduce(engine=Engine.COLLECTIVE, dst=place, src=place)
    exchanged = exchange(reduced, ranks, instance_for(core.name, ranks))
    return exchanged.start + max(exchanged.takes, cost(reduced, core).ns)


def _copy_ns(core: CoreSpec, tile: Tile) -> float:
    return cost(TensorCopy(engine=Engine.VECTOR, dst=tile, src=tile), core).ns


def _tile(dtype: DType, lanes: int, width: int) -> Tile:
    return Tile(Memory.SBUF, dtype, 0, lanes, Affine(), contiguous(width))


def expected_ns(body: tuple[Step, ...], core: CoreSpec) -> float:
    """Expected time of a program without waits. Modules are assumed to run one after the other, and all engines of a
    module concurrently, so that a module takes as long as its busiest engine, plus a share of the HBM traffic."""
    traffic = 0
    busy: dict[int, dict[Engine, float]] = defaultdict(lambda: defaultdict(float))
    for instruction, counts in within(body):
        times, engine = prod(counts), instruction.engine
        traffic += times * sum(moved(place) for place in instruction.places.values() if isinstance(place, Far))
        share = share_of_dma(instruction, core) if engine in DMA_QUEUES else 1.0
        engine = DMA_QUEUES[0] if engine in DMA_QUEUES else engine
        busy[instruction.note][engine] += times * cost(instruction, core).ns * share
    return sum(max(engines.values()) for engines in busy.values()) + KernelCost(bytes=traffic).ns(core)
