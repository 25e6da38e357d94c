"""The order in which engines proceed. Each engine executes its own stream in order; only waits tie the streams.

Every order that respects the waits is legal and must give the same result. The default is the least favourable order
that we know (`Hostile`); others are random, and the order in which the program is written is one of them too.
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
    """The instruction streams of a core's engines, by number: the head of each, and how many instructions are done."""

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
        return Deadlock("no engine can proceed, and some have instructions left", waiting=waiting)


class Order(Protocol):
    def choose(self, streams: Streams) -> int | None:
        """The engine that executes its next instruction now; None where none can."""


class Hostile:
    """Copies and collectives run as late as the waits allow, the other engines as early as they can, consumers first.

    A missing wait is a bug that most orders hide: a copy usually lands in time. So a DMA or a collective runs only when
    no other engine can proceed, and first one that the blocked engines wait for, directly or through others; its reads
    and its writes are then as late as a real queue could make them. The other engines run ahead of each other
    as far as their waits let them, in the order GpSimd, vector, scalar, tensor: readers of a result before its writers,
    so that a consumer that does not wait reads poison.
    """

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
        """The engines that the blocked ones wait for, directly or through others."""
        blocked = [engine for engine in self._EAGER if streams.heads[engine] is not None]
        demanded: set[int] = set()
        while blocked:
            for other, _ in streams.lacks(blocked.pop()):
                if other not in demanded:
                    demanded.add(other)
                    blocked.append(other)
        return demanded


class Shuffled:
    """A random engine among those that may proceed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)  # noqa: S311 - an order, not a secret

    def choose(self, streams: Streams) -> int | None:
        ready = [engine for engine in range(len(ENGINES)) if streams.may_go(engine)]
        return self._random.choice(ready) if ready else None


class AsWritten:
    """The order of the program's text."""

    def __init__(self, body: tuple[Step, ...]) -> None:
        self._engines = (NUMBER[instruction.engine] for instruction, _ in executed(body))

    def choose(self, streams: Streams) -> int | None:
        engine = next(self._engines, None)
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
    raise OptionsInvalid(f"there is no order {name!r} of engines; use hostile, program or random:SEED")
