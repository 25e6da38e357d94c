"""The time of a program's execution on an instance, from the host's call to its outputs on the host.

Device time is the program's timeline plus what the runtime spends once for each execution that exchanges data between
chips. The host calls the program and copies its inputs and outputs; with two or more requests in flight this overlaps
with the device. Figures are documented or measured on hardware, with their source; none is fitted to a model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final

from nxpipe.emulator.hardware.instance import Instance
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.program import Program, Role, counted, within
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.schedule.timeline import latency_ns

# One call of a compiled graph, measured on trn1 in a steady state: 94 us (kiln, docs/neuron-notes.md, SDK 2.32).
CALL_NS: Final = 94_000.0
# Host memory in the memory pyramid of the NKI documentation: about 16 GB/s.
COPY_GB_S: Final = 16.0

# An execution that holds a collective across chips takes this much longer, for any number, kind and size of its
# collectives; by the physical cores that take part. Measured with chained launches of a graph with one all-reduce of
# 32 KB, less the null graph (kiln, docs/neuron-notes.md, SDK 2.32: trn1; trn2 with logical cores of two). Between and
# beyond the points it is a straight line in the logarithm of the cores. Trn3 is not measured: it has Trn2's figures.
_FIXED_US: Final = {
    "v2": ((2, 0.0), (8, 2340.0), (16, 3660.0), (32, 4970.0)),
    "v3": ((4, 64.0), (8, 886.0), (16, 1400.0), (32, 1837.0), (64, 2409.0), (128, 2865.0)),
}
_FIXED_US["v4"] = _FIXED_US["v3"]


@dataclass(frozen=True)
class Execution:
    """The times of one execution, in ns. `floor` is the least device time by HBM's rate and the peak of operations;
    `cycle` the time between two executions with the given number of requests in flight."""

    device: float
    host: float
    cycle: float
    floor: float


def execute(program: Program, instance: Instance, *, in_flight: float = 1, bytes_at_least: int = 0) -> Execution | None:
    """The execution of a program; None if its timeline is too long to simulate.

    `bytes_at_least` are the bytes of HBM that any program of the same task moves."""
    latency = latency_ns(program, instance=instance)
    if latency is None:
        return None
    floor = floor_ns(program, instance, bytes_at_least)
    device, host = max(latency + fixed_ns(program), floor), host_ns(program)
    return Execution(device, host, max(device, host, (device + host) / max(in_flight, 1)), floor)


def fixed_ns(program: Program) -> float:
    """What each execution takes beyond its instructions: the runtime's preparation of collectives."""
    exchanges = counted(program.body).get(Engine.COLLECTIVE, 0)
    return collectives_ns(program.core, program.ranks) if exchanges else 0.0


def collectives_ns(core: str, ranks: int) -> float:
    """The fixed cost of an execution that exchanges data between so many physical cores of a generation."""
    return 1e3 * max(_interpolated(_FIXED_US[core], ranks), 0.0) if ranks > 1 else 0.0


def host_ns(program: Program) -> float:
    """The call, and the copies of inputs and outputs between the host's memory and the device's."""
    copied = sum(buffer.nbytes for buffer in program.buffers if buffer.role in (Role.INPUT, Role.OUTPUT))
    return CALL_NS + copied / COPY_GB_S


def floor_ns(program: Program, instance: Instance, bytes_at_least: int) -> float:
    """No execution is faster: bytes over a core's share of HBM, or operations over its peak rate."""
    operations = 2 * sum(
        prod(counts) * step.stationary.partitions * step.stationary.elements * step.moving.elements
        for step, counts in within(program.body)
        if isinstance(step, Matmul)
    )
    peak = instance.tflops_bf16 / instance.cores * 1e3  # operations in a ns
    return max(bytes_at_least / (instance.device_memory_gb_s / instance.cores), operations / peak)


def _interpolated(points: Sequence[tuple[int, float]], cores: int) -> float:
    """Between the two nearest points, or on the line through the last two beyond them."""
    (low, least), (high, most) = next(
        (pair for pair in pairwise(points) if cores <= pair[1][0]), (points[-2], points[-1])
    )
    return least + (most - least) * math.log(cores / low) / math.log(high / low)
