"""The cost of an instruction by the documented rules: cycles of its engine, or the time of a DMA.

Each instruction class states its own `cycles`; this module converts them to time and has the rule for DMA transfers.
The formulas are those of docs/reference/isa.md, which gives their sources. No constant here is fitted to a model:
figures that no document gives are calibrated in `emulator.schedule`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from typing import Final

from nxpipe.emulator.hardware import DMA_TRANSFER, CoreSpec
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Place, Tile

ISSUE: Final = 64  # minimum cycles between two instructions of the vector or scalar engine
GPSIMD_START: Final = 150  # cycles
START_NS: Final = DMA_TRANSFER.semaphore_to_start_ns
# A descriptor that software writes, measured on trn1 (kiln, docs/neuron-notes.md): 19,312 rows of 7083 B in 1.6 ms, of
# which 0.5 ms are the bytes. Of v3 only direct addressing is documented for hardware; v4 is not documented.
DESCRIPTOR_NS: Final = 57.0
_FIRST: Final = 2  # the points of 1 % and 3 % are too coarse: 64 B would take less time than 32 B


@dataclass(frozen=True, slots=True)
class Cost:
    """The busy time of an engine. A DMA has no cycles; its start time overlaps with other queues."""

    ns: float
    cycles: float | None = None
    start_ns: float = 0.0


def cost(instruction: Instruction, core: CoreSpec) -> Cost:
    ghz = _clock(instruction.engine, core)
    if ghz is None:
        return Cost(transfer_ns(instruction, core), None, _start_ns(instruction, core))
    cycles = instruction.cycles(core)
    return Cost(cycles / ghz, cycles)


def _clock(engine: Engine, core: CoreSpec) -> float | None:
    match engine:
        case Engine.TENSOR:
            return core.tensor_ghz
        case Engine.VECTOR:
            return core.vector_ghz
        case Engine.SCALAR:
            return core.scalar_ghz
        case Engine.GPSIMD:
            return core.gpsimd_ghz
    return None


def _start_ns(instruction: Instruction, core: CoreSpec) -> float:
    """The time until a DMA moves bytes. Software writes a descriptor for each row that is indexed; from v3 on hardware
    writes those of other copies within a core, if the types are equal."""
    places = tuple(instruction.places.values())
    rows = [place.axes[0].size for place in places if isinstance(place, Far) and place.rows is not None]
    if rows:
        return START_NS + max(rows) * DESCRIPTOR_NS
    generated = instruction.engine in DMA_QUEUES and len({place.dtype for place in places}) == 1
    return core.dma_hw_dge_ns if generated and core.dma_hw_dge_ns else START_NS


def moved(place: Place) -> int:
    """Bytes read or written at an operand; bytes that the access pattern repeats count each time."""
    lanes = place.partitions if isinstance(place, Tile) else 1
    return lanes * place.elements * place.dtype.itemsize


def transfer_ns(instruction: Instruction, core: CoreSpec, least_run: int = 0) -> float:
    """The time of a transfer; `least_run` as if its contiguous runs had at least so many bytes."""
    rate = instruction.dma_rate * _efficiency(max(run_bytes(instruction), least_run))
    return transfer_bytes(instruction) / (_engines(instruction, core) * core.dma_engine_peak_gb_s * rate)


def share_of_dma(instruction: Instruction, core: CoreSpec) -> float:
    """The share of the core's DMA engines that the transfer uses."""
    return _engines(instruction, core) / core.dma_engines


def _engines(instruction: Instruction, core: CoreSpec) -> int:
    lanes = max((place.partitions for place in instruction.places.values() if isinstance(place, Tile)), default=0)
    needed = (
        lanes / DMA_TRANSFER.partitions_per_engine if lanes else transfer_bytes(instruction) / DMA_TRANSFER.packet_bytes
    )
    return min(core.dma_engines, max(ceil(needed), 1))


def transfer_bytes(instruction: Instruction) -> int:
    return max(moved(place) for place in instruction.places.values())


def run_bytes(instruction: Instruction) -> int:
    """The shortest contiguous run of bytes of a transfer, which limits the share of the engines' peak rate."""
    limiting = instruction.dma_limited_by
    return min(_run(place) for name, place in instruction.places.items() if not limiting or name in limiting)


def stretch(axes: Sequence[Axis]) -> int:
    """The length of a contiguous run in elements, counted from the last axis outwards."""
    length = 1
    for axis in reversed(axes):
        if axis.stride != length and axis.size > 1:
            break
        length *= axis.size
    return length


def is_dense(axes: Sequence[Axis]) -> bool:
    return stretch(axes) == prod(axis.size for axis in axes)


def _run(place: Place) -> int:
    """The length of a contiguous run in bytes. Indexed rows may be anywhere, so their axis does not count."""
    axes = place.axes[1:] if isinstance(place, Far) and place.rows is not None else place.axes
    return stretch(axes) * place.dtype.itemsize


def _efficiency(run: int) -> float:
    """Interpolate between the points of the published figure; in proportion below the first useful point."""
    points = DMA_TRANSFER.efficiency[_FIRST:]
    if run <= points[0][0]:
        return points[0][1] * run / points[0][0]
    for (low, least), (high, most) in pairwise(points):
        if run <= high:
            return least + (most - least) * (run - low) / (high - low)
    return points[-1][1]
