"""A program for one core: what lies in HBM, and the instructions in loops. All ranks of a division run the same one."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instructions import Engine, Instruction

RANK: Final = "own rank"  # the input in which the host tells each rank its number, where a program asks for it


class Role(StrEnum):
    INPUT = "input"
    OUTPUT = "output"
    STATE = "state"  # read and written in place, and kept from run to run
    PARAMETER = "parameter"
    CONSTANT = "constant"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Tensors of one type in HBM, row by row, one tensor behind the other: a layer's weight of every layer is one
    buffer, so that the loop over layers finds each by its index. `address` is where the first one lies.

    A parameter may lie with its axes in another `order` than the checkpoint has them; `shape` is as it lies. The host
    brings it there once, when the program is loaded."""

    role: Role
    names: tuple[str, ...]  # of a constant, its digest; of scratch, what for
    dtype: DType
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()  # which axis of the named tensor each axis of `shape` is; empty: as it is there
    address: int = 0

    @property
    def elements(self) -> int:
        """Of one tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return len(self.names) * self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Loop:
    """Its body so many times, one after the other as seen by each engine; engines need not be in the same turn."""

    count: int
    body: "tuple[Step, ...]"


Step = Instruction | Loop


@dataclass(frozen=True)
class Program:
    """`sbuf` and `psum` are the bytes of each partition that it uses; `notes` the places in the model, by number."""

    core: str  # v2, v3, v4
    ranks: int
    buffers: tuple[Buffer, ...]
    body: tuple[Step, ...]
    notes: tuple[str, ...] = ("",)
    constants: dict[str, bytes] = field(default_factory=dict, repr=False, compare=True)

    @property
    def hbm(self) -> int:
        return max((buffer.address + buffer.nbytes for buffer in self.buffers), default=0)


def instructions(body: tuple[Step, ...]) -> Iterator[Instruction]:
    """Each once, however often it is carried out, in the order in which they stand."""
    for step in body:
        if isinstance(step, Loop):
            yield from instructions(step.body)
        else:
            yield step


def counted(body: Sequence[Step]) -> Counter[Engine]:
    """How many of each engine are carried out."""
    found = Counter[Engine]()
    for step in body:
        if isinstance(step, Loop):
            for engine, count in counted(step.body).items():
                found[engine] += count * max(step.count, 0)
        else:
            found[step.engine] += 1
    return found


def executed(body: tuple[Step, ...], outer: tuple[int, ...] = ()) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
    """Each as often as it is carried out, in program order, with the indices of the loops around it."""
    for step in body:
        if isinstance(step, Loop):
            for turn in range(step.count):
                yield from executed(step.body, (*outer, turn))
        else:
            yield step, outer


def only(body: Sequence[Step], engine: Engine) -> tuple[Step, ...]:
    """What one engine does of it."""
    steps: list[Step] = []
    for step in body:
        if not isinstance(step, Loop):
            if step.engine is engine:
                steps.append(step)
        elif own := only(step.body, engine):
            steps.append(Loop(step.count, own))
    return tuple(steps)
