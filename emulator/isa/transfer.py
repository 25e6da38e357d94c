"""How long moving data takes: the DMA rules of docs/isa.md."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, prod
from typing import Final

from nxpipe.emulator.hardware import DMA_TRANSFER, CoreSpec
from nxpipe.emulator.isa.instructions import DmaTranspose, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Place, Tile

START_NS: Final = DMA_TRANSFER.semaphore_to_start_ns
_FIRST: Final = 2  # 1 % and 3 % are too coarse: 64 B would take less time than 32 B
TRANSPOSING: Final = 0.9  # of the rate of a copy


def moved(place: Place) -> int:
    """Bytes that an instruction reads or writes there; what it reads again and again counts each time."""
    lanes = place.partitions if isinstance(place, Tile) else 1
    return lanes * place.elements * place.dtype.itemsize


def transfer_ns(instruction: Instruction, core: CoreSpec) -> float:
    return _size(instruction) / (_engines(instruction, core) * core.dma_engine_peak_gb_s * _share(instruction))


def share_of_dma(instruction: Instruction, core: CoreSpec) -> float:
    """Of the core's DMA engines, those that move it."""
    return _engines(instruction, core) / core.dma_engines


def _engines(instruction: Instruction, core: CoreSpec) -> int:
    lanes = max((place.partitions for place in instruction.places.values() if isinstance(place, Tile)), default=0)
    wanted = lanes / DMA_TRANSFER.partitions_per_engine if lanes else _size(instruction) / DMA_TRANSFER.packet_bytes
    return min(core.dma_engines, max(ceil(wanted), 1))


def _size(instruction: Instruction) -> int:
    return max(moved(place) for place in instruction.places.values())


def _share(instruction: Instruction) -> float:
    """Of the engines' peak. A transpose changes the order by itself: what it writes is what counts."""
    if isinstance(instruction, DmaTranspose):
        return TRANSPOSING * _efficiency(_run(instruction.dst))
    return _efficiency(min(_run(place) for place in instruction.places.values()))


def stretch(axes: Sequence[Axis]) -> int:
    """Elements that lie one behind the other, from the last axis outwards."""
    length = 1
    for axis in reversed(axes):
        if axis.stride != length and axis.size > 1:
            break
        length *= axis.size
    return length


def is_dense(axes: Sequence[Axis]) -> bool:
    return stretch(axes) == prod(axis.size for axis in axes)


def _run(place: Place) -> int:
    """Bytes that lie one behind the other; rows that go by number are anywhere."""
    axes = place.axes[1:] if isinstance(place, Far) and place.rows is not None else place.axes
    return stretch(axes) * place.dtype.itemsize


def _efficiency(run: int) -> float:
    """Read off the figure; where its points are too coarse, in proportion."""
    points = DMA_TRANSFER.efficiency[_FIRST:]
    if run <= points[0][0]:
        return points[0][1] * run / points[0][0]
    for (low, least), (high, most) in pairwise(points):
        if run <= high:
            return least + (most - least) * (run - low) / (high - low)
    return points[-1][1]
