"""What ranks do together: each brings what it holds, and each takes the same away."""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from emulator.core.alu import combine
from emulator.core.bound import Bound
from emulator.core.cells import floats
from emulator.isa.instructions import AllGather, AllReduce, Instruction
from emulator.numerics import Array

COLLECTIVES = (AllReduce, AllGather)


def bring(at: Bound) -> Array:
    """A copy: before all ranks have met, others may write."""
    return at.numbers("src").copy()


def take(instruction: Instruction, at: Bound, brought: Sequence[Array]) -> None:
    if isinstance(instruction, AllReduce):
        # From the first rank to the last, in float32, so that all of them have the same bits.
        at.put(reduce(lambda sums, more: combine(instruction.op, sums, more), map(floats, brought)))
    else:
        at.put(np.concatenate([each.reshape(-1) for each in brought]))
