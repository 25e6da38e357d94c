"""Cost model of kernels by the documented cycle rules: the time of each engine, and the bytes that HBM moves."""

from collections import defaultdict
from dataclasses import dataclass
from math import ceil, prod
from typing import Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.collective import CollectiveAllReduce
from nxpipe.emulator.isa.cost import START_NS, cost, moved, share_of_dma
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.program import Step, within
from nxpipe.emulator.isa.vector import TensorCopy
from nxpipe.emulator.lower.kernel import PARTITIONS
from nxpipe.emulator.lower.tiles import WIDEST
from nxpipe.emulator.lower.transpose import must_transpose
from nxpipe.emulator.lower.view import View

# Of the time that bytes take at HBM's full rate: counted even where engines take longer, since the energy is spent, and
# what other queues have under way has to wait.
_TRAFFIC: Final = 0.5


@dataclass(frozen=True)
class KernelCost:
    """Nanoseconds of engines that run concurrently, and bytes between HBM and the core."""

    dma: float = 0.0
    tensor: float = 0.0
    vector: float = 0.0
    bytes: int = 0
    links: float = 0.0  # of ranks that meet

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
        traffic = self.bytes / (core.dma_engines * core.dma_engine_peak_gb_s)
        return max(self.dma, self.tensor, self.vector, self.links) + _TRAFFIC * traffic


def load_cost(core: CoreSpec, view: View, chunks: int, width: int) -> KernelCost:
    """Cost of loading a slab [chunks, width] of a matrix [contraction, others] to SBUF."""
    summed, others = min(view.shape[0], chunks * PARTITIONS), min(view.shape[1], width)
    piece = view.cut((0, summed), (0, others))
    ordered = piece.transposed((1, 0)) if must_transpose(view) else piece
    lanes = min(ordered.shape[0], PARTITIONS)
    tile = sbuf_tile(view.dtype, lanes, ceil(ordered.shape[0] / lanes), ordered.shape[1])
    copy = DmaCopy(engine=Engine.DMA0, dst=tile, src=ordered.far())
    return KernelCost(cost(copy, core).ns, bytes=summed * others * view.dtype.itemsize)


def transpose_cost(core: CoreSpec, dtype: DType, chunks: int, width: int) -> KernelCost:
    """Cost of transposing it on the tensor engine."""
    transposed = ceil(width / PARTITIONS) * chunks * PARTITIONS
    slow = core.fp32_cycle_factor if dtype is DType.FLOAT32 else 1
    return KernelCost(0.0, slow * transposed / core.tensor_ghz, transposed / core.vector_ghz)


def sbuf_tile(dtype: DType, lanes: int, *shape: int) -> Tile:
    return Tile(Memory.SBUF, dtype, 0, lanes, Affine(), contiguous(*shape))


def piecewise_is_cheaper(core: CoreSpec, rows: int, width: int, dtype: DType) -> bool:
    """True if ranks add up a result faster tile by tile in SBUF than once for the whole in HBM.

    Each tile's exchange has a start-up time and uses no more lanes than there are rows. The whole is stored and loaded
    once more, but is exchanged at once and then uses all lanes.
    """
    lanes, across = min(rows, PARTITIONS), min(width, WIDEST)
    pieces = ceil(rows / lanes) * ceil(width / across)
    near = _tile(dtype, lanes, across)
    far = Far(0, dtype, Affine(), (Axis(lanes, width), Axis(across, 1)))
    line = Far(0, dtype, Affine(), (Axis(rows * width, 1),))
    spread = _tile(dtype, PARTITIONS, ceil(rows * width / PARTITIONS))
    piece = START_NS + _all_reduce_ns(core, near) + _copy_ns(core, near)
    copied = START_NS + pieces * cost(DmaCopy(engine=Engine.DMA0, dst=far, src=near), core).ns
    return pieces * piece <= START_NS + _all_reduce_ns(core, line) + 2 * copied + _copy_ns(core, spread)


def _all_reduce_ns(core: CoreSpec, place: Far | Tile) -> float:
    return cost(CollectiveAllReduce(engine=Engine.COLLECTIVE, dst=place, src=place), core).ns


def _copy_ns(core: CoreSpec, tile: Tile) -> float:
    return cost(TensorCopy(engine=Engine.VECTOR, dst=tile, src=tile), core).ns


def _tile(dtype: DType, lanes: int, width: int) -> Tile:
    return Tile(Memory.SBUF, dtype, 0, lanes, Affine(), contiguous(width))


def expected_ns(body: tuple[Step, ...], core: CoreSpec) -> float:
    """Time that a program without waits is expected to take: modules run one after the other, and within each module
    all engines run at once, so that the busiest engine determines it."""
    traffic = 0
    busy: dict[int, dict[Engine, float]] = defaultdict(lambda: defaultdict(float))
    for instruction, counts in within(body):
        times, engine = prod(counts), instruction.engine
        traffic += times * sum(moved(place) for place in instruction.places.values() if isinstance(place, Far))
        share = share_of_dma(instruction, core) if engine in DMA_QUEUES else 1.0
        engine = DMA_QUEUES[0] if engine in DMA_QUEUES else engine
        busy[instruction.note][engine] += times * cost(instruction, core).ns * share
    return sum(max(engines.values()) for engines in busy.values()) + KernelCost(bytes=traffic).ns(core)
