"""What it costs ranks to add up a result piece by piece in SBUF, and what it costs all at once in HBM."""

from math import ceil

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.collective import CollectiveAllReduce
from nxpipe.emulator.isa.cost import START_NS, cost
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.vector import TensorCopy
from nxpipe.emulator.lower.kernel import PARTITIONS
from nxpipe.emulator.lower.sheets import WIDEST


def pays_in_pieces(core: CoreSpec, rows: int, width: int, dtype: DType) -> bool:
    """Pieces begin one by one, and have no more lanes than there are rows, for what comes behind as well. The whole is
    stored and loaded once more, but uses all lanes then."""
    lanes, across = min(rows, PARTITIONS), min(width, WIDEST)
    pieces = ceil(rows / lanes) * ceil(width / across)
    near = _tile(dtype, lanes, across)
    far = Far(0, dtype, Affine(), (Axis(lanes, width), Axis(across, 1)))
    line = Far(0, dtype, Affine(), (Axis(rows * width, 1),))
    spread = _tile(dtype, PARTITIONS, ceil(rows * width / PARTITIONS))
    piece = START_NS + _meeting(core, near) + _rounding(core, near)
    copied = START_NS + pieces * cost(DmaCopy(engine=Engine.DMA0, dst=far, src=near), core).ns
    return pieces * piece <= START_NS + _meeting(core, line) + 2 * copied + _rounding(core, spread)


def _meeting(core: CoreSpec, place: Far | Tile) -> float:
    return cost(CollectiveAllReduce(engine=Engine.COLLECTIVE, dst=place, src=place), core).ns


def _rounding(core: CoreSpec, tile: Tile) -> float:
    return cost(TensorCopy(engine=Engine.VECTOR, dst=tile, src=tile), core).ns


def _tile(dtype: DType, lanes: int, width: int) -> Tile:
    return Tile(Memory.SBUF, dtype, 0, lanes, Affine(), contiguous(width))
