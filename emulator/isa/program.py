"""A program for one core: what lies in HBM, and the instructions in loops. All ranks of a division run the same one."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.operands import Far

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


PerTurn = Mapping[Engine, int]


class Progress:
    def __init__(self) -> None:
        self._done: dict[Engine, Affine] = {}
        self._around: list[tuple[dict[Engine, Affine], int, PerTurn]] = []

    @property
    def loops(self) -> int:
        """How many are around."""
        return len(self._around)

    def done(self, engine: Engine) -> Affine:
        return self._done.get(engine, Affine())

    def step(self, engine: Engine) -> None:
        self._done[engine] = self.done(engine) + 1

    def enter(self, count: int, each: PerTurn) -> None:
        self._around.append((dict(self._done), count, each))
        for engine, number in each.items():
            self._done[engine] = self.done(engine) + index(self.loops - 1) * number

    def leave(self) -> None:
        self._done, count, each = self._around.pop()
        for engine, number in each.items():
            self._done[engine] = self.done(engine) + number * count


@dataclass(frozen=True)
class Lifetime:
    """From one instruction of the text to another, both included."""

    first: int
    last: int

    def meets(self, other: "Lifetime") -> bool:
        return self.first <= other.last and other.first <= self.last


def lifetimes(body: Sequence[Step]) -> dict[int, Lifetime]:
    """Of each buffer that is used. One that is used inside a loop and outside of it lives as long as the loop."""
    uses: dict[int, list[tuple[int, tuple[tuple[int, int], ...]]]] = {}
    for position, (instruction, loops) in enumerate(_positions(body)):
        for buffer in _named(instruction):
            uses.setdefault(buffer, []).append((position, loops))
    found = {}
    for buffer, where in uses.items():
        shared = set(where[0][1]).intersection(*(loops for _, loops in where))
        spans = [span for _, loops in where for span in loops if span not in shared]
        points = [position for position, _ in where]
        found[buffer] = Lifetime(
            min([*points, *(start for start, _ in spans)]), max([*points, *(stop - 1 for _, stop in spans)])
        )
    return found


def _positions(
    body: Sequence[Step], start: int = 0, loops: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[Instruction, tuple[tuple[int, int], ...]]]:
    """Each instruction with the loops around it, as the numbers of their first instruction and of that behind them."""
    for step in body:
        if isinstance(step, Loop):
            stop = start + _length(step.body)
            yield from _positions(step.body, start, (*loops, (start, stop)))
            start = stop
        else:
            yield step, loops
            start += 1


def _length(body: Sequence[Step]) -> int:
    return sum(_length(step.body) if isinstance(step, Loop) else 1 for step in body)


def _named(instruction: Instruction) -> set[int]:
    return {place.buffer for place in instruction.places.values() if isinstance(place, Far)}


def within(body: tuple[Step, ...], counts: tuple[int, ...] = ()) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
    """Each instruction once, in the order of the text, with how often each loop around it runs."""
    for step in body:
        if isinstance(step, Loop):
            yield from within(step.body, (*counts, step.count))
        else:
            yield step, counts
