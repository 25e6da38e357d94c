"""Orders of execution of a core's engines. Each engine executes its own stream in order; only waits order the streams.

Every order that respects the waits is legal and must give the same result. The default is the least favourable known
order (`Hostile`); the others are random orders and program order.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from nxpipe.emulator.core.access import ENGINES, NUMBER, Bound
from nxpipe.emulator.core.faults import Deadlock
from nxpipe.emulator.errors import OptionsInvalid
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.program import Step, executed, only

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Due:
    """The next instruction of an engine, and its waits in this iteration as (engine, count)."""

    bound: Bound
    indices: Indices
    waits: tuple[tuple[int, int], ...]


class Streams:
    """The instruction streams of a core's engines: the next instruction of each, and the number of completed ones."""

    def __init__(self, body: Sequence[Step], bound: Callable[[Instruction], Bound]) -> None:
        self._bound = bound
        self._remaining = [executed(only(body, engine)) for engine in ENGINES]
        self.done = [0] * len(ENGINES)
        self.heads: list[Due | None] = [None] * len(ENGINES)
        for engine in range(len(ENGINES)):
            self._advance(engine)

    def can_proceed(self, engine: int) -> bool:
        due, done = self.heads[engine], self.done
        return due is not None and all(done[other] >= count for other, count in due.waits)

    def unfulfilled_waits(self, engine: int) -> list[tuple[int, int]]:
        """The unfulfilled waits of an engine's next instruction."""
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
        step = next(self._remaining[engine], None)
        if step is None:
            self.heads[engine] = None
            return
        instruction, indices = step
        bound = self._bound(instruction)
        counts = ((other, done.at(indices)) for other, done in bound.waits)
        self.heads[engine] = Due(bound, indices, tuple(wait for wait in counts if wait[1] > 0))

    def deadlock(self, describe: Callable[[Due], str]) -> Deadlock:
        waiting = [
            f"{describe(self.head(engine))} waits for {ENGINES[other]}>={count}, which has completed {self.done[other]}"
            for engine in self.working
            for other, count in self.unfulfilled_waits(engine)
        ]
        return Deadlock("no engine can proceed, and some have instructions left", waiting=waiting)


class Order(Protocol):
    def choose(self, streams: Streams) -> int | None:
        """The engine that executes its next instruction now; None if no engine can proceed."""


class Hostile:
    """Copies and collectives run as late as the waits allow, the other engines as early as possible, consumers first.

    Most orders hide a missing wait, because a copy usually completes in time. Here a DMA or a collective runs only when
    no other engine can proceed, beginning with those that blocked engines wait for, directly or transitively. Its reads
    and writes are then as late as on a real queue. The other engines run ahead as far as their waits allow, in this
    order: GpSimd, vector, scalar, tensor. Readers of a result thus run before its writers, so that a consumer without a
    wait reads poison.
    """

    _EAGER: Final = tuple(NUMBER[engine] for engine in (Engine.GPSIMD, Engine.VECTOR, Engine.SCALAR, Engine.TENSOR))
    _LAZY: Final = tuple(NUMBER[engine] for engine in (Engine.COLLECTIVE, *reversed(DMA_QUEUES)))

    def __init__(self) -> None:
        self._running = self._EAGER[0]

    def choose(self, streams: Streams) -> int | None:
        for engine in (self._running, *self._EAGER):
            if streams.can_proceed(engine):
                self._running = engine
                return engine
        demanded = self._demanded(streams)
        for engine in (*(lazy for lazy in self._LAZY if lazy in demanded), *self._LAZY):
            if streams.can_proceed(engine):
                return engine
        return None

    def _demanded(self, streams: Streams) -> set[int]:
        """The engines that blocked engines wait for, directly or transitively."""
        blocked = [engine for engine in self._EAGER if streams.heads[engine] is not None]
        demanded: set[int] = set()
        while blocked:
            for other, _ in streams.unfulfilled_waits(blocked.pop()):
                if other not in demanded:
                    demanded.add(other)
                    blocked.append(other)
        return demanded


class Shuffled:
    """A random engine among those that can proceed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)  # noqa: S311 - an order, not a secret

    def choose(self, streams: Streams) -> int | None:
        ready = [engine for engine in range(len(ENGINES)) if streams.can_proceed(engine)]
        return self._random.choice(ready) if ready else None


class AsWritten:
    """The order of the program's text."""

    def __init__(self, body: tuple[Step, ...]) -> None:
        self._engines = (NUMBER[instruction.engine] for instruction, _ in executed(body))

    def choose(self, streams: Streams) -> int | None:
        engine = next(self._engines, None)
        return engine if engine is not None and streams.can_proceed(engine) else None


def ordering(name: str, body: tuple[Step, ...], rank: int) -> Order:
    """The order with this name: `hostile`, `program`, or `random:SEED`."""
    kind, _, seed = name.partition(":")
    if kind == "random" and seed.isdigit():
        return Shuffled(f"{seed} of rank {rank}")
    if name == "hostile":
        return Hostile()
    if name == "program":
        return AsWritten(body)
    raise OptionsInvalid(f"unknown order of engines {name!r}; use hostile, program or random:SEED")
