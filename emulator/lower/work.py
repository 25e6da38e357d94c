"""What kernels cost, by the machine's own rules: the time of each engine, and the bytes that HBM moves."""

from dataclasses import dataclass
from math import ceil
from typing import Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.cost import cost
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Memory, Tile, contiguous
from nxpipe.emulator.lower.kernel import PARTITIONS
from nxpipe.emulator.lower.turned import must_turn
from nxpipe.emulator.lower.view import View

# Of the time that bytes take at HBM's full rate: counted even where engines take longer, since the energy is spent, and
# what other queues have under way has to wait.
_TRAFFIC: Final = 0.5


@dataclass(frozen=True)
class Work:
    """Nanoseconds that engines work beside each other, and bytes between HBM and the core."""

    dma: float = 0.0
    tensor: float = 0.0
    vector: float = 0.0
    bytes: int = 0
    links: float = 0.0  # of ranks that meet

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.dma + other.dma,
            self.tensor + other.tensor,
            self.vector + other.vector,
            self.bytes + other.bytes,
            self.links + other.links,
        )

    def __mul__(self, times: int) -> "Work":
        return Work(self.dma * times, self.tensor * times, self.vector * times, self.bytes * times, self.links * times)

    def ns(self, core: CoreSpec) -> float:
        traffic = self.bytes / (core.dma_engines * core.dma_engine_peak_gb_s)
        return max(self.dma, self.tensor, self.vector, self.links) + _TRAFFIC * traffic


def load_work(core: CoreSpec, view: View, chunks: int, width: int) -> Work:
    """Of a slab [chunks, width] of a matrix [summed, others], up to where it lies in SBUF."""
    summed, others = min(view.shape[0], chunks * PARTITIONS), min(view.shape[1], width)
    piece = view.cut((0, summed), (0, others))
    ordered = piece.transposed((1, 0)) if must_turn(view) else piece
    lanes = min(ordered.shape[0], PARTITIONS)
    tile = tile_of(view.dtype, lanes, ceil(ordered.shape[0] / lanes), ordered.shape[1])
    copy = DmaCopy(engine=Engine.DMA0, dst=tile, src=ordered.far())
    return Work(cost(copy, core).ns, bytes=summed * others * view.dtype.itemsize)


def turning_work(core: CoreSpec, dtype: DType, chunks: int, width: int) -> Work:
    """Of turning it on the tensor engine."""
    turned = ceil(width / PARTITIONS) * chunks * PARTITIONS
    slow = core.fp32_cycle_factor if dtype is DType.FLOAT32 else 1
    return Work(0.0, slow * turned / core.tensor_ghz, turned / core.vector_ghz)


def tile_of(dtype: DType, lanes: int, *shape: int) -> Tile:
    return Tile(Memory.SBUF, dtype, 0, lanes, Affine(), contiguous(*shape))
