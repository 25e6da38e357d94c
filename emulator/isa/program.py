"""A program for one core: the buffers in HBM, and instructions in loops. All ranks run the same program.

Below the records are walks over a program's body that never run its loops: instruction counts, the progress of engines
in program order, the lifetimes of buffers.
"""

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

RANK: Final = "own rank"  # the input in which the host gives each rank its number, in programs that read it


class Role(StrEnum):
    INPUT = "input"
    OUTPUT = "output"
    STATE = "state"  # read and written in place, and kept from run to run
    PARAMETER = "parameter"
    CONSTANT = "constant"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Tensors of one type in HBM, row-major, one after the other: the same weight of every layer is one buffer, so that
    the loop over layers addresses each by its index. `address` is that of the first one.

    A parameter may have its axes in another `order` than in the checkpoint; `shape` is that in HBM. The host transposes
    it once, when the program is loaded."""

    role: Role
    names: tuple[str, ...]  # of a constant, its digest; of scratch, its use
    dtype: DType
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()  # the axis of the named tensor for each axis of `shape`; empty: unchanged
    address: int = 0

    @property
    def elements(self) -> int:
        """Elements of one tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return len(self.names) * self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Loop:
    """A body that runs `count` times, in order for each engine; engines need not be in the same iteration."""

    count: int
    body: "tuple[Step, ...]"


Step = Instruction | Loop


@dataclass(frozen=True)
class Program:
    """`notes` are places in the user's model, by number; `constants` are bytes by their digest."""

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
    """Each instruction of the text once, in order."""
    for step in body:
        if isinstance(step, Loop):
            yield from instructions(step.body)
        else:
            yield step


def counted(body: Sequence[Step]) -> Counter[Engine]:
    """The number of executed instructions of each engine."""
    found = Counter[Engine]()
    for step in body:
        if isinstance(step, Loop):
            for engine, count in counted(step.body).items():
                found[engine] += count * max(step.count, 0)
        else:
            found[step.engine] += 1
    return found


def executed(body: tuple[Step, ...], outer: tuple[int, ...] = ()) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
    """Each execution of an instruction, in program order, with the indices of the loops around it."""
    for step in body:
        if isinstance(step, Loop):
            for iteration in range(step.count):
                yield from executed(step.body, (*outer, iteration))
        else:
            yield step, outer


def only(body: Sequence[Step], engine: Engine) -> tuple[Step, ...]:
    """The body without the instructions of other engines: the stream of one engine."""
    steps: list[Step] = []
    for step in body:
        if not isinstance(step, Loop):
            if step.engine is engine:
                steps.append(step)
        elif own := only(step.body, engine):
            steps.append(Loop(step.count, own))
    return tuple(steps)


PerIteration = Mapping[Engine, int]


class Progress:
    """The number of instructions that each engine has done before a point in program order, affine in loop indices."""

    def __init__(self) -> None:
        self._done: dict[Engine, Affine] = {}
        self._around: list[tuple[dict[Engine, Affine], int, PerIteration]] = []

    @property
    def loops(self) -> int:
        """The number of loops around this point."""
        return len(self._around)

    def done(self, engine: Engine) -> Affine:
        return self._done.get(engine, Affine())

    def step(self, engine: Engine) -> None:
        self._done[engine] = self.done(engine) + 1

    def enter(self, count: int, each: PerIteration) -> None:
        self._around.append((dict(self._done), count, each))
        for engine, number in each.items():
            self._done[engine] = self.done(engine) + index(self.loops - 1) * number

    def leave(self) -> None:
        self._done, count, each = self._around.pop()
        for engine, number in each.items():
            self._done[engine] = self.done(engine) + number * count


@dataclass(frozen=True)
class Lifetime:
    """A range of instructions of the text, both ends included."""

    first: int
    last: int

    def meets(self, other: "Lifetime") -> bool:
        return self.first <= other.last and other.first <= self.last


def lifetimes(body: Sequence[Step]) -> dict[int, Lifetime]:
    """The lifetime of each buffer that is used (liveness). A use inside a loop and one outside of it cover the loop."""
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
    """Each instruction with the loops around it, as ranges of instruction numbers (end excluded)."""
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
