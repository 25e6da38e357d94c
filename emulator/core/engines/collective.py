"""Semantics of the collectives: each rank contributes its `src`, and its `dst` becomes a part of the whole.

A collective has two halves: `contribution` before the ranks meet, and the exchange of its record after. In between
`emulator.core.machine` runs the other ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np

from nxpipe.emulator.core.access import Bound
from nxpipe.emulator.core.arithmetic import combine, floats
from nxpipe.emulator.isa.collective import CollectiveAllGather, CollectiveAllReduce, CollectiveReduceScatter
from nxpipe.emulator.isa.instruction import Alu, Instruction
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.numerics import Array, Floats

Exchange = Callable[[Any, Bound, Sequence[Array], int], None]


def contribution(at: Bound) -> Array:
    """A copy of `src`, since other instructions may write there before all ranks have met. One row for each partition;
    a place in HBM is one row."""
    src = at.instruction.places["src"]
    return at.numbers("src").reshape(src.partitions if isinstance(src, Tile) else 1, -1).copy()


def all_reduce(instruction: CollectiveAllReduce, at: Bound, contributions: Sequence[Array], rank: int) -> None:
    at.put(_sum(instruction.op, contributions))


def reduce_scatter(instruction: CollectiveReduceScatter, at: Bound, contributions: Sequence[Array], rank: int) -> None:
    at.put(np.split(_sum(instruction.op, contributions), len(contributions), axis=-1)[rank])


def all_gather(_: CollectiveAllGather, at: Bound, contributions: Sequence[Array], rank: int) -> None:
    at.put(np.concatenate(contributions, axis=-1))


def _sum(op: Alu, contributions: Sequence[Array]) -> Floats:
    """From the first rank to the last, in float32: every rank computes the same bits."""
    return reduce(lambda total, more: combine(op, total, more), map(floats, contributions))


EXCHANGES: Final[Mapping[type[Instruction], Exchange]] = {
    CollectiveAllReduce: all_reduce,
    CollectiveReduceScatter: reduce_scatter,
    CollectiveAllGather: all_gather,
}
