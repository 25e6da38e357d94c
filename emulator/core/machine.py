"""The emulated machine: one core for each rank of a program, with execution statistics.

Weights, inputs and states stay in HBM between runs; SBUF, PSUM and scratch are poisoned before each run. Each rank is a
generator that yields its contribution to a collective. The ranks run one after the other up to the same collective, so
no threads are needed.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from nxpipe.emulator.core.access import Bound
from nxpipe.emulator.core.engines import EXCHANGES, HANDLERS, contribution
from nxpipe.emulator.core.faults import MachineFault
from nxpipe.emulator.core.memory import Memories, Storage, require_readonly
from nxpipe.emulator.core.races import Races
from nxpipe.emulator.core.scheduler import Due, Order, Streams, ordering
from nxpipe.emulator.errors import IndexOutOfRange
from nxpipe.emulator.isa.cost import moved
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.operands import Far, Place
from nxpipe.emulator.isa.program import Program, instructions
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.text import line
from nxpipe.emulator.numerics import Array, Draws, rounding_by_place


@dataclass(frozen=True)
class Statistics:
    """Counts of one core: executed instructions by name and by engine, bytes read and written by memory. A byte that an
    access pattern reads several times counts each time."""

    instructions: Mapping[str, int] = field(default_factory=dict)
    engines: Mapping[Engine, int] = field(default_factory=dict)
    read: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "Statistics") -> "Statistics":
        """The counts of both runs together."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return Statistics(*(dict(Counter(mine) + Counter(others)) for mine, others in pairs))

    def document(self) -> dict[str, object]:
        """The counts as a JSON document, in a stable order."""
        return {
            "instructions": sum(self.engines.values()),
            "by_engine": dict(sorted(self.engines.items())),
            "by_kind": dict(sorted(self.instructions.items())),
            "bytes_read": dict(sorted(self.read.items())),
            "bytes_written": dict(sorted(self.written.items())),
        }


def count(bindings: Iterable[Bound]) -> Statistics:
    """Statistics from the number of executions of each instruction."""
    names, engines, read, written = Counter[str](), Counter[Engine](), Counter[str](), Counter[str]()
    for bound in bindings:
        instruction = bound.instruction
        names[instruction.name] += bound.times
        engines[instruction.engine] += bound.times
        for place in instruction.read():
            # A matmul reads `dst` only when it accumulates.
            times = bound.added if isinstance(instruction, Matmul) and place is instruction.dst else bound.times
            read[_memory(place)] += times * moved(place)
        for place in instruction.written():
            written[_memory(place)] += bound.times * moved(place)
    return Statistics(dict(+names), dict(+engines), dict(+read), dict(+written))


def _memory(place: Place) -> str:
    return "hbm" if isinstance(place, Far) else place.memory.value


class Machine:
    """A loaded program, which must be legal (`emulator.isa.legality`). `order` selects the next engine among those that
    can proceed: `hostile`, `program` or `random:SEED`. `check=False` turns off race detection, which is faster; all
    other checks remain."""

    def __init__(self, program: Program, *, order: str = "hostile", check: bool = True) -> None:
        self._order = order
        self._cores = [_Core(program, rank, check=check) for rank in range(program.ranks)]
        require_readonly(
            program,
            (
                place.buffer
                for instruction in instructions(program.body)
                for place in instruction.written()
                if isinstance(place, Far)
            ),
        )

    @property
    def ranks(self) -> int:
        return len(self._cores)

    def write(self, name: str, array: Array, rank: int | None = None) -> None:
        """Write an input, state or parameter in the host's layout to one rank, or to all."""
        for core in self._cores if rank is None else [self._cores[rank]]:
            core.memories.write(name, array)

    def read(self, name: str, rank: int = 0) -> Array:
        """Read an output or a state; floats of any type are returned as float32."""
        return self._cores[rank].memories.read(name)

    def storage(self, number: int, rank: int) -> Storage:
        """The storage of a buffer on a rank; between runs it may be made an `alias` of another."""
        return self._cores[rank].memories.location(number)[0]

    def execute(self) -> Statistics:
        """Run the program once on every core. The statistics are those of one core: all cores execute the same
        instructions."""
        # The engines follow IEEE 754 and never trap. Random draws (stochastic rounding) are seeded by an instruction's
        # position in the stream of its engine, so they do not depend on the order of the engines.
        with np.errstate(all="ignore"), rounding_by_place() as draws:
            runs = [core.run(ordering(self._order, core.body, core.rank), draws) for core in self._cores]
            contributions: list[Array] | None = None
            while (arrived := [_resume(run, contributions) for run in runs]) and arrived[0] is not None:
                contributions = [array for array in arrived if array is not None]
        return self._cores[0].statistics()


_Run = Generator[Array, Sequence[Array], None]


def _resume(run: _Run, contributions: Sequence[Array] | None) -> Array | None:
    """Run a rank up to its next collective; returns its contribution, or None at the end of the program."""
    try:
        return next(run) if contributions is None else run.send(contributions)
    except StopIteration:
        return None


class _Core:
    """One rank: its memories, and the program bound to them."""

    def __init__(self, program: Program, rank: int, *, check: bool) -> None:
        self.rank, self.body = rank, program.body
        self.memories = Memories(program)
        self._program, self._check = program, check
        self._bound: dict[int, Bound] = {}
        for instruction in instructions(program.body):
            self._bound[id(instruction)] = self._bind(instruction)

    def _bind(self, instruction: Instruction) -> Bound:
        try:
            return Bound(instruction, self.memories)
        except MachineFault as fault:
            raise fault.at(self._describe(instruction, ())) from None

    def run(self, order: Order, draws: Draws | None) -> _Run:
        self.memories.poison()
        bindings = list(self._bound.values())
        for bound in bindings:
            bound.forget()
        streams = Streams(self.body, lambda instruction: self._bound[id(instruction)])
        races = Races(self.memories, bindings, self._describe) if self._check else None
        while (engine := order.choose(streams)) is not None:
            due = streams.head(engine)
            try:
                yield from self._execute(due, streams, races, draws)
            except MachineFault as fault:
                raise fault.at(self._describe(due.bound.instruction, due.indices)) from None
            except IndexOutOfRange as fault:
                where = self._describe(due.bound.instruction, due.indices)
                raise IndexOutOfRange(fault.index, fault.size, where) from None
            streams.finish(engine)
        if streams.working:
            raise streams.deadlock(lambda due: self._describe(due.bound.instruction, due.indices))

    def _execute(self, due: Due, streams: Streams, races: Races | None, draws: Draws | None) -> _Run:
        bound = due.bound
        # Row numbers are operands too: they are read and checked for races first; only then are the rows that they
        # select known and checked.
        bound.locate(due.indices)
        bound.times += 1
        if races is not None:
            races.begin(due, streams.working)
        for rows in bound.rows:
            rows.read_rows()
        if races is not None:
            races.note(bound, bound.indirect)
        exchange = EXCHANGES.get(type(bound.instruction))
        contributions = (yield contribution(bound)) if exchange else []
        if draws is not None:
            draws.go_to((bound.engine, streams.done[bound.engine] + 1))
        if exchange:
            exchange(bound.instruction, bound, contributions, self.rank)
        else:
            HANDLERS[type(bound.instruction)](bound.instruction, bound)
        if races is not None:
            races.end(bound)

    def statistics(self) -> Statistics:
        return count(self._bound.values())

    def _describe(self, instruction: Instruction, indices: tuple[int, ...]) -> str:
        """An instruction's text without waits, with its loop iteration, rank and source position."""
        text = " ".join(line(instruction.after(), self.memories.labels).split())
        iteration = f" with {', '.join(f'i{depth}={index}' for depth, index in enumerate(indices))}" if indices else ""
        rank = f" on rank {self.rank}" if self._program.ranks > 1 else ""
        note = self._program.notes[instruction.note] if instruction.note < len(self._program.notes) else ""
        return f"{text}{iteration}{rank}{f', at {note}' if note else ''}"
