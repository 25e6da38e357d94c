"""Program memory: the HBM that a program takes on one core, and the refusal of a program that exceeds it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from nxpipe.emulator.errors import OutOfMemory, TensorAllocation
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.cost import moved
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Buffer, Program, Role, lifetimes, within


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes in HBM on one rank, by purpose. Scratch is at its peak, because buffers with disjoint lives share
    addresses. `total` is a little more than the sum, because buffers begin at whole DMA packets."""

    by_role: Mapping[Role, int]
    total: int

    def document(self) -> dict[str, int]:
        return {**{str(role): nbytes for role, nbytes in sorted(self.by_role.items())}, "total": self.total}


def footprint(program: Program) -> ProgramMemory:
    taken = Counter(dict.fromkeys(Role, 0))
    for buffer in program.buffers:
        if buffer.role is not Role.SCRATCH:
            taken[buffer.role] += buffer.nbytes
    scratch = [buffer for buffer in program.buffers if buffer.role is Role.SCRATCH]
    if scratch:
        end = max(buffer.address + buffer.nbytes for buffer in scratch)
        taken[Role.SCRATCH] = end - min(buffer.address for buffer in scratch)
    return ProgramMemory(taken, program.hbm)


def require_room(program: Program, room: int) -> None:
    """Raise OutOfMemory for a program that takes more than `room` bytes, which a core has for programs' data."""
    if program.hbm > room:
        largest = sorted(_at_the_peak(program), key=lambda taken: (-taken.nbytes, taken.what))
        raise OutOfMemory("the program", "HBM behind each core", program.hbm, room, largest, _advice(program, room))


def _at_the_peak(program: Program) -> Iterator[TensorAllocation]:
    """Permanent buffers, and the scratch that is live at its peak."""
    live, origins = _live_at_most(program), writers(program)
    for number, buffer in enumerate(program.buffers):
        if buffer.role is not Role.SCRATCH:
            yield TensorAllocation(f"{buffer.role} {_named(buffer)}", _shaped(buffer), buffer.nbytes)
        elif number in live:
            yield TensorAllocation(
                f"the output of {origins.get(number) or 'the program'}", _shaped(buffer), buffer.nbytes
            )


def _live_at_most(program: Program) -> set[int]:
    """The scratch that is live at the peak."""
    scratch = {
        number: life for number, life in lifetimes(program.body).items() if program.buffers[number].role is Role.SCRATCH
    }
    moments = (
        {number for number, life in scratch.items() if life.first <= start <= life.last}
        for start in sorted({life.first for life in scratch.values()})
    )
    return max(moments, key=lambda live: sum(program.buffers[number].nbytes for number in live), default=set())


def writers(program: Program) -> dict[int, str]:
    """For each buffer that is written, the module whose instructions write most of it."""
    shares: dict[int, Counter[str]] = {}
    for instruction, counts in within(program.body):
        for place in instruction.written():
            if isinstance(place, Far):
                share = shares.setdefault(place.buffer, Counter())
                share[_module(program.notes[instruction.note])] += prod(counts) * moved(place)
    return {buffer: max(sorted(share), key=lambda name: share[name]) for buffer, share in shares.items()}


def _module(note: str) -> str:
    """The module of a place in the model; the source line where there is none."""
    return note.partition(" ")[0]


def _named(buffer: Buffer) -> str:
    return buffer.names[0] if len(buffer.names) == 1 else f"{buffer.names[0]} up to {buffer.names[-1]}"


def _shaped(buffer: Buffer) -> str:
    times = f"{len(buffer.names)} x " if len(buffer.names) > 1 else ""
    return f"{times}{TensorType(buffer.shape, buffer.dtype)}"


def _advice(program: Program, room: int) -> str:
    """The remedy, by the kind of buffer that takes most."""
    taken = footprint(program).by_role
    ways = []
    if taken[Role.PARAMETER] > room // 2:
        ways.append(f"divide the weights among more cores (--tp above {program.ranks})")
        if any(buffer.role is Role.PARAMETER and buffer.dtype is DType.FLOAT32 for buffer in program.buffers):
            ways.append("cast them to bf16 (--autocast all)")
    if sum(nbytes for role, nbytes in taken.items() if role is not Role.PARAMETER) > room // 4:
        ways.append("make the batch or the longest bucket smaller")
    return ", ".join([*ways, "or take an instance with more memory behind each core"])
