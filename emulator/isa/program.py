"""A program for one core: the buffers in HBM, and instructions in loops. All ranks run the same program.

The analyses at the end traverse a program without executing its loops: instruction counts, the progress of engines in
program order, the lifetimes of buffers.
"""

import re
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

TILE_ROWS: Final = 128  # rows of a tile of a parameter: one for each partition of SBUF
RANK: Final = "own rank"  # the input with a rank's own number, in programs that read it


class Role(StrEnum):
    INPUT = "input"
    OUTPUT = "output"
    STATE = "state"  # read and written in place, and kept from run to run
    PARAMETER = "parameter"
    CONSTANT = "constant"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Tensors of one type in HBM, row-major and consecutive. The same weight of all layers is one buffer, so that the
    loop over layers addresses each tensor by its index. `address` is that of the first tensor.

    A parameter may have its axes in another `order` than in the checkpoint; `shape` is the shape in HBM. The elements
    of a matrix, and of each matrix [rows, columns] of the last two axes of a larger tensor, may also be in tiles of
    `tile` columns (0: row-major). The rows up to the last multiple of 128 are then stored partition by partition:
    partition p has, tile after tile, the tile's columns of rows p, 128 + p, 256 + p, and so on. The remaining rows
    follow, row-major. The host arranges a parameter once, when the program is loaded."""

    role: Role
    names: tuple[str, ...]  # a constant has its digest, a scratch buffer its purpose
    dtype: DType
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()  # for each axis of `shape`, the axis of the named tensor; empty: unchanged
    address: int = 0
    tile: int = 0

    @property
    def host_shape(self) -> tuple[int, ...]:
        """The shape of one tensor with its axes in the host's order."""
        sizes = dict(zip(self.order or range(len(self.shape)), self.shape, strict=True))
        return tuple(sizes[axis] for axis in range(len(self.shape)))

    @property
    def elements(self) -> int:
        """Elements of one tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return len(self.names) * self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Loop:
    """A body that runs `count` times, in order on each engine; engines may be in different iterations."""

    count: int
    body: "tuple[Step, ...]"


Step = Instruction | Loop


_NOTE: Final = re.compile(r"(.*?) ?\((\w+)\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """What a note says: the module path (the source line if there is none), the source line, and the operator."""

    module: str
    source: str
    operator: str

    @classmethod
    def of(cls, note: str) -> "SourcePosition":
        """The position in a note; those of older programs have no operator."""
        noted = _NOTE.fullmatch(note)
        origin, operator = noted.groups() if noted else (note, "")
        module, _, source = origin.partition(" ")
        return cls(module, source, operator)


def note_of(origin: str, operator: str) -> str:
    """The note of a node: its module path and source line, and its operator in parentheses."""
    return f"{origin} ({operator})".lstrip()


@dataclass(frozen=True)
class Program:
    """A program for one core. `notes` are source positions in the user's model; `constants` are bytes by digest."""

    core: str  # v2, v3, v4
    ranks: int
    buffers: tuple[Buffer, ...]
    body: tuple[Step, ...]
    notes: tuple[str, ...] = ("",)
    constants: dict[str, bytes] = field(default_factory=dict, repr=False, compare=True)

    @property
    def hbm(self) -> int:
        """Bytes of HBM, up to the end of the last buffer."""
        return max((buffer.address + buffer.nbytes for buffer in self.buffers), default=0)


def instructions(body: tuple[Step, ...]) -> Iterator[Instruction]:
    """Each instruction of the text once, in order."""
    for step in body:
        if isinstance(step, Loop):
            yield from instructions(step.body)
        else:
            yield step


def counted(body: Sequence[Step]) -> Counter[Engine]:
    """The number of instructions that each engine executes."""
    totals = Counter[Engine]()
    for step in body:
        if isinstance(step, Loop):
            for engine, count in counted(step.body).items():
                totals[engine] += count * max(step.count, 0)
        else:
            totals[step.engine] += 1
    return totals


def executed(body: tuple[Step, ...], outer: tuple[int, ...] = ()) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
    """Each execution of an instruction, in program order, with the indices of the enclosing loops."""
    for step in body:
        if isinstance(step, Loop):
            for iteration in range(step.count):
                yield from executed(step.body, (*outer, iteration))
        else:
            yield step, outer


def only(body: Sequence[Step], engine: Engine) -> tuple[Step, ...]:
    """The instruction stream of one engine: the body without the instructions of other engines."""
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
    """The number of instructions of each engine before a point in program order, affine in the loop indices."""

    def __init__(self) -> None:
        self._done: dict[Engine, Affine] = {}
        self._enclosing: list[tuple[dict[Engine, Affine], int, PerIteration]] = []

    @property
    def loops(self) -> int:
        """The number of loops that enclose this point."""
        return len(self._enclosing)

    def done(self, engine: Engine) -> Affine:
        return self._done.get(engine, Affine())

    def step(self, engine: Engine) -> None:
        self._done[engine] = self.done(engine) + 1

    def enter(self, count: int, per_iteration: PerIteration) -> None:
        self._enclosing.append((dict(self._done), count, per_iteration))
        for engine, number in per_iteration.items():
            self._done[engine] = self.done(engine) + index(self.loops - 1) * number

    def leave(self) -> None:
        self._done, count, per_iteration = self._enclosing.pop()
        for engine, number in per_iteration.items():
            self._done[engine] = self.done(engine) + number * count


@dataclass(frozen=True)
class Lifetime:
    """A range of instruction numbers in the text, both ends included."""

    first: int
    last: int

    def overlaps(self, other: "Lifetime") -> bool:
        return self.first <= other.last and other.first <= self.last


def lifetimes(body: Sequence[Step]) -> dict[int, Lifetime]:
    """The live range of each used buffer. Uses both inside and outside a loop extend it over the whole loop."""
    uses: dict[int, list[tuple[int, tuple[tuple[int, int], ...]]]] = {}
    for position, (instruction, loops) in enumerate(_positions(body)):
        for buffer in _buffers_of(instruction):
            uses.setdefault(buffer, []).append((position, loops))
    ranges = {}
    for buffer, buffer_uses in uses.items():
        shared = set(buffer_uses[0][1]).intersection(*(loops for _, loops in buffer_uses))
        spans = [span for _, loops in buffer_uses for span in loops if span not in shared]
        points = [position for position, _ in buffer_uses]
        ranges[buffer] = Lifetime(
            min([*points, *(start for start, _ in spans)]), max([*points, *(stop - 1 for _, stop in spans)])
        )
    return ranges


def _positions(
    body: Sequence[Step], start: int = 0, loops: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[Instruction, tuple[tuple[int, int], ...]]]:
    """Each instruction with its enclosing loops, as ranges of instruction numbers (end excluded)."""
    for step in body:
        if isinstance(step, Loop):
            stop = start + text_length(step.body)
            yield from _positions(step.body, start, (*loops, (start, stop)))
            start = stop
        else:
            yield step, loops
            start += 1


def text_length(body: Sequence[Step]) -> int:
    """Instructions in the text of a body, each once."""
    return sum(text_length(step.body) if isinstance(step, Loop) else 1 for step in body)


def _buffers_of(instruction: Instruction) -> set[int]:
    return {place.buffer for place in instruction.places.values() if isinstance(place, Far)}


def within(body: tuple[Step, ...], counts: tuple[int, ...] = ()) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
    """Each instruction once, in the order of the text, with the counts of its enclosing loops."""
    for step in body:
        if isinstance(step, Loop):
            yield from within(step.body, (*counts, step.count))
        else:
            yield step, counts
