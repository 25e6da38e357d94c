"""The time of a program's execution on an instance, from the host's call to its outputs on the host.

Device time is the program's timeline plus what the runtime spends once for each execution that exchanges data between
chips. The host calls the program and copies its inputs and outputs; with two or more requests in flight this overlaps
with the device. Figures are documented or measured on hardware, with their source; none is fitted to a model.
"""

from dataclasses import dataclass
from math import prod

from nxpipe.emulator.hardware.instance import Instance
from nxpipe.emulator.hardware.links import collectives_ns, host_ns
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.program import Program, Role, counted, within
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.schedule.timeline import latency_ns


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
    device, host = max(latency + fixed_ns(program), floor), host_ns(copied(program))
    return Execution(device, host, max(device, host, (device + host) / max(in_flight, 1)), floor)


def fixed_ns(program: Program) -> float:
    """What each execution takes beyond its instructions: the runtime's preparation of collectives."""
    exchanges = counted(program.body).get(Engine.COLLECTIVE, 0)
    return collectives_ns(program.core, program.ranks) if exchanges else 0.0


def copied(program: Program) -> int:
    """Bytes of inputs and outputs, which are copied between the host's memory and the device's."""
    return sum(buffer.nbytes for buffer in program.buffers if buffer.role in (Role.INPUT, Role.OUTPUT))


def floor_ns(program: Program, instance: Instance, bytes_at_least: int) -> float:
    """No execution is faster: bytes over a core's share of HBM, or operations over its peak rate."""
    operations = 2 * sum(
        prod(counts) * step.stationary.partitions * step.stationary.elements * step.moving.elements
        for step, counts in within(program.body)
        if isinstance(step, Matmul)
    )
    peak = instance.tflops_bf16 / instance.cores * 1e3  # operations in a ns
    return max(bytes_at_least / (instance.device_memory_gb_s / instance.cores), operations / peak)
