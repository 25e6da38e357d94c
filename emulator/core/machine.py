"""Carries a program out: one core, or as many as there are ranks, which meet at the collectives.

What the host loads stays between runs, and so do states; the cores' own memories are fresh at the beginning of each.
"""

from collections.abc import Generator, Sequence

import numpy as np

from nxpipe.emulator.core.bound import Bound
from nxpipe.emulator.core.collective import COLLECTIVES, bring, take
from nxpipe.emulator.core.faults import MachineFault
from nxpipe.emulator.core.meanings import MEANINGS
from nxpipe.emulator.core.memory import Memories, Storage, require_readonly
from nxpipe.emulator.core.race import Races
from nxpipe.emulator.core.schedule import Due, Order, Streams, ordering
from nxpipe.emulator.core.statistics import Statistics, count
from nxpipe.emulator.errors import IndexOutOfRange
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Program, instructions
from nxpipe.emulator.isa.text import line
from nxpipe.emulator.numerics import Array, Draws, rounding_by_place


class Machine:
    """A legal program (`emulator.isa.limits`), loaded. `order` says which engine goes when several may: `hostile`,
    `program` or `random:SEED`. Without `check` nobody looks for races, which is faster; every other rule holds."""

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
        """An input, a state or a parameter, as the host knows it: to one rank, or to all."""
        for core in self._cores if rank is None else [self._cores[rank]]:
            core.memories.write(name, array)

    def read(self, name: str, rank: int = 0) -> Array:
        """An output or a state; floats of any type as float32."""
        return self._cores[rank].memories.read(name)

    def storage(self, number: int, rank: int) -> Storage:
        """Where a buffer of the program is on a rank; between runs it may `become` another."""
        return self._cores[rank].memories.lies(number)[0]

    def execute(self) -> Statistics:
        """One run on every core. What one of them amounted to: all carry out the same instructions."""
        # The engines follow IEEE 754 and never trap; and no order of theirs is the order of their draws.
        with np.errstate(all="ignore"), rounding_by_place() as draws:
            runs = [core.run(ordering(self._order, core.body, core.rank), draws) for core in self._cores]
            brought: list[Array] | None = None
            while (meeting := [_go_on(run, brought) for run in runs]) and meeting[0] is not None:
                brought = [each for each in meeting if each is not None]
        return self._cores[0].statistics()


_Run = Generator[Array, Sequence[Array], None]


def _go_on(run: _Run, brought: Sequence[Array] | None) -> Array | None:
    """Up to the next collective: what the rank brings there; None when the rank has done everything."""
    try:
        return next(run) if brought is None else run.send(brought)
    except StopIteration:
        return None


class _Core:
    """One rank's memories, and the program bound to them."""

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
        self.memories.freshen()
        everything = list(self._bound.values())
        for bound in everything:
            bound.forget()
        streams = Streams(self.body, lambda instruction: self._bound[id(instruction)])
        races = Races(self.memories, everything, self._describe) if self._check else None
        while (engine := order.choose(streams)) is not None:
            due = streams.head(engine)
            try:
                yield from self._carry_out(due, streams, races, draws)
            except MachineFault as fault:
                raise fault.at(self._describe(due.bound.instruction, due.indices)) from None
            except IndexOutOfRange as fault:
                where = self._describe(due.bound.instruction, due.indices)
                raise IndexOutOfRange(fault.index, fault.size, where) from None
            streams.finish(engine)
        if streams.working:
            raise streams.deadlock(lambda due: self._describe(due.bound.instruction, due.indices))

    def _carry_out(self, due: Due, streams: Streams, races: Races | None, draws: Draws | None) -> _Run:
        bound = due.bound
        bound.locate(due.indices)
        bound.times += 1
        if races is not None:
            races.begin(due, streams.working)
        for rows in bound.rows:
            rows.read_rows()
        if races is not None:
            races.note(bound, bound.indirect)
        brought = (yield bring(bound)) if isinstance(bound.instruction, COLLECTIVES) else None
        if draws is not None:
            draws.go_to((bound.engine, streams.done[bound.engine] + 1))
        if brought is not None:
            take(bound.instruction, bound, brought, self.rank)
        else:
            MEANINGS[type(bound.instruction)](bound.instruction, bound)
        if races is not None:
            races.end(bound)

    def statistics(self) -> Statistics:
        return count(self._bound.values())

    def _describe(self, instruction: Instruction, indices: tuple[int, ...]) -> str:
        """Its text and the turn of the loops; no waits, which are another matter."""
        shown = " ".join(line(instruction.after(), self.memories.labels).split())
        turn = f" with {', '.join(f'i{depth}={index}' for depth, index in enumerate(indices))}" if indices else ""
        rank = f" on rank {self.rank}" if self._program.ranks > 1 else ""
        note = self._program.notes[instruction.note] if instruction.note < len(self._program.notes) else ""
        return f"{shown}{turn}{rank}{f', at {note}' if note else ''}"
