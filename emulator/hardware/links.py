"""Links between the cores of an instance, and to its host: their rates, and what each execution takes beyond them."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from nxpipe.emulator.hardware.core import CORES
from nxpipe.emulator.hardware.instance import Instance

# All-reduce of 1 GB between the two cores of a chip in 18.93 ms (documented sample of nccom-test), of 272 GB/s.
_ON_CHIP_SHARE: Final = 52.8 / 272
_LINKS: Final = {"single": 1, "ring": 2, "torus2d_4x4": 4, "switched": 4}  # of a chip
_GIB: Final = 1.073741824

# One call of a compiled graph, measured on trn1 in a steady state: 94 us (kiln, docs/neuron-notes.md, SDK 2.32).
_CALL_NS: Final = 94_000.0
# Host memory in the memory pyramid of the NKI documentation: about 16 GB/s.
_COPY_GB_S: Final = 16.0

# An execution that holds a collective across chips takes this much longer, for any number, kind and size of its
# collectives; by the physical cores that take part. Measured with chained launches of a graph with one all-reduce of
# 32 KB, less the null graph (kiln, docs/neuron-notes.md, SDK 2.32: trn1; trn2 with logical cores of two). Between and
# beyond the points it is a straight line in the logarithm of the cores. Trn3 is not measured: it has Trn2's figures.
_FIXED_US: Final = {
    "v2": ((2, 0.0), (8, 2340.0), (16, 3660.0), (32, 4970.0)),
    "v3": ((4, 64.0), (8, 886.0), (16, 1400.0), (32, 1837.0), (64, 2409.0), (128, 2865.0)),
}
_FIXED_US["v4"] = _FIXED_US["v3"]


def near_gb_s(instance: Instance) -> float:
    """Between the cores of a chip, in proportion to the rate of their DMA engines."""
    core = CORES[instance.core]
    return _ON_CHIP_SHARE * core.dma_engines * core.dma_engine_peak_gb_s


def link_gb_s(instance: Instance) -> float:
    """One link of a chip."""
    of_chip = instance.neuronlink_per_chip
    if of_chip is None:
        return near_gb_s(instance)
    return of_chip.figure * (_GIB if of_chip.unit == "GiB/s" else 1.0) / _LINKS[instance.topology]


def host_ns(copied: float) -> float:
    """The host's call of a graph, and so many bytes of inputs and outputs copied between its memory and the device."""
    return _CALL_NS + copied / _COPY_GB_S


def collectives_ns(core: str, ranks: int) -> float:
    """The fixed cost of an execution that exchanges data between so many physical cores of a generation."""
    return 1e3 * max(_interpolated(_FIXED_US[core], ranks), 0.0) if ranks > 1 else 0.0


def _interpolated(points: Sequence[tuple[int, float]], cores: int) -> float:
    """Between the two nearest points, or on the line through the last two beyond them."""
    (low, least), (high, most) = next(
        (pair for pair in pairwise(points) if cores <= pair[1][0]), (points[-2], points[-1])
    )
    return least + (most - least) * math.log(cores / low) / math.log(high / low)
