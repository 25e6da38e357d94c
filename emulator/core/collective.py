"""What ranks do together: each brings what it holds, and each takes away what is made of all of it."""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from nxpipe.emulator.core.alu import combine
from nxpipe.emulator.core.bound import Bound
from nxpipe.emulator.core.cells import floats
from nxpipe.emulator.isa.collective import AllGather, AllReduce, ReduceScatter
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.numerics import Array

COLLECTIVES = (AllReduce, ReduceScatter, AllGather)


def bring(at: Bound) -> Array:
    """A copy: before all ranks have met, others may write. A row for each partition; what lies in HBM is one row."""
    src = at.instruction.places["src"]
    return at.numbers("src").reshape(src.partitions if isinstance(src, Tile) else 1, -1).copy()


def take(instruction: Instruction, at: Bound, brought: Sequence[Array], rank: int) -> None:
    if isinstance(instruction, AllReduce | ReduceScatter):
        # From the first rank to the last, in float32, so that all of them have the same bits.
        total = reduce(lambda sums, more: combine(instruction.op, sums, more), map(floats, brought))
        at.put(total if isinstance(instruction, AllReduce) else np.split(total, len(brought), axis=-1)[rank])
    else:
        at.put(np.concatenate(brought, axis=-1))
