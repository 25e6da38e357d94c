"""Who goes next. Each engine has its stream and goes through it in order; the streams are tied by waits only.

Every order that respects the waits is legal and must give the same result, so the usual one is the least friendly that
we know of, others are drawn by chance, and the order in which the program is written is one of them too.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from nxpipe.emulator.core.bound import ENGINES, NUMBER, Bound
from nxpipe.emulator.core.faults import Deadlock
from nxpipe.emulator.errors import OptionsInvalid
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.program import Step, executed, only

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Due:
    """What an engine has to do next, and how far others must have come before: (engine, count)."""

    bound: Bound
    indices: Indices
    waits: tuple[tuple[int, int], ...]


class Streams:
    """All engines of a core, by number: what each has to do next, and how many instructions each has done."""

    def __init__(self, body: Sequence[Step], bound: Callable[[Instruction], Bound]) -> None:
        self._bound = bound
        self._rest = [executed(only(body, engine)) for engine in ENGINES]
        self.done = [0] * len(ENGINES)
        self.heads: list[Due | None] = [None] * len(ENGINES)
        for engine in range(len(ENGINES)):
            self._advance(engine)

    def may_go(self, engine: int) -> bool:
        due, done = self.heads[engine], self.done
        return due is not None and all(done[other] >= count for other, count in due.waits)

    def lacks(self, engine: int) -> list[tuple[int, int]]:
        """For whom an engine waits, and how far they must come."""
        due = self.heads[engine]
        return [wait for wait in due.waits if self.done[wait[0]] < wait[1]] if due else []

    def head(self, engine: int) -> Due:
        due = self.heads[engine]
        assert due is not None
        return due

    def finish(self, engine: int) -> None:
        self.done[engine] += 1
        self._advance(engine)

    @property
    def working(self) -> list[int]:
        return [engine for engine, due in enumerate(self.heads) if due is not None]

    def _advance(self, engine: int) -> None:
        step = next(self._rest[engine], None)
        if step is None:
            self.heads[engine] = None
            return
        instruction, indices = step
        bound = self._bound(instruction)
        counts = ((other, done.at(indices)) for other, done in bound.waits)
        self.heads[engine] = Due(bound, indices, tuple(wait for wait in counts if wait[1] > 0))

    def deadlock(self, describe: Callable[[Due], str]) -> Deadlock:
        waiting = [
            f"{describe(self.head(engine))} waits for {ENGINES[other]}>={count}, which has done {self.done[other]}"
            for engine in self.working
            for other, count in self.lacks(engine)
        ]
        return Deadlock("no engine can go on, and some have work left", waiting=waiting)


class Order(Protocol):
    def choose(self, streams: Streams) -> int | None:
        """The engine that carries out its next instruction now; None where none can."""


class Hostile:
    """Copies and collectives are put off until somebody waits for them and nothing else can be done: they read as late
    as they may, and land as late. The other engines run ahead of each other as far as they get, consumers first."""

    _EAGER: Final = tuple(NUMBER[each] for each in (Engine.GPSIMD, Engine.VECTOR, Engine.SCALAR, Engine.TENSOR))
    _LAZY: Final = tuple(NUMBER[each] for each in (Engine.COLLECTIVE, *reversed(DMA_QUEUES)))

    def __init__(self) -> None:
        self._running = self._EAGER[0]

    def choose(self, streams: Streams) -> int | None:
        for engine in (self._running, *self._EAGER):
            if streams.may_go(engine):
                self._running = engine
                return engine
        demanded = self._demanded(streams)
        for engine in (*(each for each in self._LAZY if each in demanded), *self._LAZY):
            if streams.may_go(engine):
                return engine
        return None

    def _demanded(self, streams: Streams) -> set[int]:
        """For whom the others wait, and for whom those wait."""
        asking = [engine for engine in self._EAGER if streams.heads[engine] is not None]
        demanded: set[int] = set()
        while asking:
            for other, _ in streams.lacks(asking.pop()):
                if other not in demanded:
                    demanded.add(other)
                    asking.append(other)
        return demanded


class Shuffled:
    """Any engine that may go, by chance."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)  # noqa: S311 - an order, not a secret

    def choose(self, streams: Streams) -> int | None:
        able = [engine for engine in range(len(ENGINES)) if streams.may_go(engine)]
        return self._random.choice(able) if able else None


class AsWritten:
    """In the order of the program."""

    def __init__(self, body: tuple[Step, ...]) -> None:
        self._turns = (NUMBER[instruction.engine] for instruction, _ in executed(body))

    def choose(self, streams: Streams) -> int | None:
        engine = next(self._turns, None)
        return engine if engine is not None and streams.may_go(engine) else None


def ordering(name: str, body: tuple[Step, ...], rank: int) -> Order:
    """`hostile`, `program`, or `random:SEED`."""
    kind, _, seed = name.partition(":")
    if kind == "random" and seed.isdigit():
        return Shuffled(f"{seed} of rank {rank}")
    if name == "hostile":
        return Hostile()
    if name == "program":
        return AsWritten(body)
    raise OptionsInvalid(f"there is no order {name!r} of engines; take hostile, program or random:SEED")
