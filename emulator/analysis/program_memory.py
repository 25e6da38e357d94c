"""Program memory: the HBM that a program needs on one core, and the error for a program that exceeds the capacity."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from nxpipe.emulator.errors import OutOfMemory, TensorAllocation
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.cost import moved
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Buffer, Program, Role, SourcePosition, lifetimes, within


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes in HBM on one rank, by role. Scratch is the peak, because buffers with disjoint live ranges share
    addresses. `total` is slightly more than the sum, because buffers are aligned to DMA packets."""

    by_role: Mapping[Role, int]
    total: int

    def document(self) -> dict[str, int]:
        return {**{str(role): nbytes for role, nbytes in sorted(self.by_role.items())}, "total": self.total}


def footprint(program: Program) -> ProgramMemory:
    by_role = Counter(dict.fromkeys(Role, 0))
    for buffer in program.buffers:
        if buffer.role is not Role.SCRATCH:
            by_role[buffer.role] += buffer.nbytes
    scratch = [buffer for buffer in program.buffers if buffer.role is Role.SCRATCH]
    if scratch:
        end = max(buffer.address + buffer.nbytes for buffer in scratch)
        by_role[Role.SCRATCH] = end - min(buffer.address for buffer in scratch)
    return ProgramMemory(by_role, program.hbm)


def require_capacity(program: Program, capacity: int) -> None:
    """Raise OutOfMemory for a program that needs more than `capacity` bytes, the data capacity of a core."""
    if program.hbm > capacity:
        largest = sorted(_at_the_peak(program), key=lambda taken: (-taken.nbytes, taken.what))
        advice = _advice(program, capacity)
        raise OutOfMemory("the program", "HBM behind each core", program.hbm, capacity, largest, advice)


def _at_the_peak(program: Program) -> Iterator[TensorAllocation]:
    """The buffers at the peak: permanent buffers, and the scratch that is live then."""
    live, origins = _live_at_most(program), writers(program)
    for number, buffer in enumerate(program.buffers):
        if buffer.role is not Role.SCRATCH:
            yield TensorAllocation(f"{buffer.role} {_named(buffer)}", _shaped(buffer), buffer.nbytes)
        elif number in live:
            yield TensorAllocation(
                f"the output of {origins.get(number) or 'the program'}", _shaped(buffer), buffer.nbytes
            )


def _live_at_most(program: Program) -> set[int]:
    """The scratch buffers that are live at the peak."""
    scratch = {
        number: live_range
        for number, live_range in lifetimes(program.body).items()
        if program.buffers[number].role is Role.SCRATCH
    }
    live_sets = (
        {number for number, live_range in scratch.items() if live_range.first <= position <= live_range.last}
        for position in sorted({live_range.first for live_range in scratch.values()})
    )
    return max(live_sets, key=lambda live: sum(program.buffers[number].nbytes for number in live), default=set())


def writers(program: Program) -> dict[int, str]:
    """For each buffer that is written, the module whose instructions write most of it."""
    shares: dict[int, Counter[str]] = {}
    for instruction, counts in within(program.body):
        for place in instruction.written():
            if isinstance(place, Far):
                share = shares.setdefault(place.buffer, Counter())
                share[SourcePosition.of(program.notes[instruction.note]).module] += prod(counts) * moved(place)
    return {buffer: max(sorted(share), key=lambda name: share[name]) for buffer, share in shares.items()}


def _named(buffer: Buffer) -> str:
    return buffer.names[0] if len(buffer.names) == 1 else f"{buffer.names[0]} up to {buffer.names[-1]}"


def _shaped(buffer: Buffer) -> str:
    times = f"{len(buffer.names)} x " if len(buffer.names) > 1 else ""
    return f"{times}{TensorType(buffer.shape, buffer.dtype)}"


def _advice(program: Program, capacity: int) -> str:
    """The remedies, by the kind of buffer that needs most memory."""
    by_role = footprint(program).by_role
    remedies = []
    if by_role[Role.PARAMETER] > capacity // 2:
        remedies.append(f"divide the weights among more cores (--tp above {program.ranks})")
        if any(buffer.role is Role.PARAMETER and buffer.dtype is DType.FLOAT32 for buffer in program.buffers):
            remedies.append("cast them to bf16 (--autocast all)")
    if sum(nbytes for role, nbytes in by_role.items() if role is not Role.PARAMETER) > capacity // 4:
        remedies.append("make the batch or the longest bucket smaller")
    return ", ".join([*remedies, "or use an instance with more memory behind each core"])
