"""Data race detection with vector clocks: proof that the order of the engines does not affect the result of a run.

Two accesses to the same bytes, at least one of them a write, must be ordered by happens-before: both are in the stream
of one engine, or semaphore waits order them. Each engine has a vector clock (Lamport; Mattern 1988). Only waits advance
its entries for other engines: a wait for an instruction merges the clock that the other engine had when it completed
that instruction. Happens-before therefore depends on the program (and its row numbers) only, not on the order of the
run: a run in any order finds a race if the program has one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from nxpipe.emulator.core.access import ENGINES, Bound, Pattern, Window, touch
from nxpipe.emulator.core.faults import Race
from nxpipe.emulator.core.memory import Memories
from nxpipe.emulator.core.scheduler import Due
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Buffer

Known = tuple[int, ...]  # vector clock: the number of instructions of each engine that are known to be complete
Describe = Callable[[Instruction, tuple[int, ...]], str]
_NOTHING: Final[Known] = (0,) * len(ENGINES)


class Clocks:
    """The vector clock of each engine: the current one, and those after each of its completed instructions."""

    def __init__(self) -> None:
        self.now: list[Known] = [_NOTHING] * len(ENGINES)
        self._history: list[list[Known]] = [[] for _ in ENGINES]

    def wait(self, engine: int, other: int, count: int) -> None:
        clock = self.now[engine]
        if clock[other] < count:
            merged = list(map(max, clock, self._history[other][count - 1]))
            merged[other] = max(merged[other], count)
            self.now[engine] = tuple(merged)

    def done(self, engine: int) -> int:
        return len(self._history[engine])

    def finish(self, engine: int) -> None:
        self._history[engine].append(self.now[engine])


class Access(NamedTuple):
    """One execution of an access by an instruction, with the bytes that it covers."""

    engine: int
    number: int  # position in the stream of its engine, from 1
    lanes: tuple[int, int]
    origin: int
    pattern: Pattern
    writes: bool
    instruction: Instruction
    indices: tuple[int, ...]

    @property
    def box(self) -> tuple[int, int, int, int]:
        return (*self.lanes, self.origin + self.pattern.low, self.origin + self.pattern.high)


class Log:
    """Accesses to one memory that a later access may still race with.

    Their bounding boxes (partitions x bytes) are in one array, so that numpy selects the overlapping boxes at once.
    """

    def __init__(self, engines: frozenset[int]) -> None:
        self._engines = engines  # engines with accesses to this memory
        self._boxes = np.zeros((4, 256), np.int64)
        self._accesses: list[Access | None] = []

    def meet(self, access: Access, known: Known) -> Access | None:
        """Record an access; returns an earlier access that it races with, or None.

        An access that covers an older, ordered access replaces it: any later access that races with the older one also
        races with the newer one. The log is therefore bounded by the bytes in use.
        """
        first, last, low, high = access.box
        boxes = self._boxes[:, : len(self._accesses)]
        overlapping = (boxes[0] < last) & (boxes[1] > first) & (boxes[2] < high) & (boxes[3] > low)
        for position in overlapping.nonzero()[0].tolist():
            other: Access | None = self._accesses[position]
            if other is None:
                continue
            if other.engine != access.engine and known[other.engine] < other.number:
                if (access.writes or other.writes) and touch(
                    access.pattern, other.pattern, other.origin - access.origin
                ):
                    return other
            elif (access.writes or not other.writes) and _covers(access, other):
                self._accesses[position] = None
                boxes[1, position] = boxes[0, position]  # an empty box overlaps nothing
        self._boxes[:, len(self._accesses)] = access.box
        self._accesses.append(access)
        return None

    @property
    def is_full(self) -> bool:
        return len(self._accesses) == self._boxes.shape[1]

    def forget(self, clocks: Clocks, working: Iterable[int]) -> None:
        """Drop the accesses that the clock of every unfinished engine includes: nothing can race with them."""
        engines = [engine for engine in working if engine in self._engines]
        oldest = [
            min((clocks.now[engine][of] for engine in engines if engine != of), default=1 << 62)
            for of in range(len(ENGINES))
        ]
        remaining = [
            number
            for number, access in enumerate(self._accesses)
            if access is not None and access.number > oldest[access.engine]
        ]
        boxes = self._boxes[:, remaining]
        self._boxes = np.zeros((4, max(256, 2 * len(remaining))), np.int64)
        self._boxes[:, : len(remaining)] = boxes
        self._accesses = [self._accesses[number] for number in remaining]


def _covers(access: Access, other: Access) -> bool:
    (first, last, low, high), (start, stop, begin, end) = access.box, other.box
    if first > start or last < stop or low > begin or high < end:
        return False
    same = access.pattern is other.pattern and access.origin == other.origin
    return same or access.pattern.is_solid


class Races:
    """Race detection over the accesses of one run of one core."""

    def __init__(self, memories: Memories, instructions: Sequence[Bound], describe: Describe) -> None:
        self._clocks = Clocks()
        self._shared = _overlapping(memories.buffers)
        self._describe = describe
        engines_of: dict[object, set[int]] = {}
        written: set[object] = set()
        for bound in instructions:
            for window, writes in (*bound.direct, *bound.indirect):
                engines_of.setdefault(self._region(window), set()).add(bound.engine)
                if writes:
                    written.add(self._region(window))
        # Memory that is never written, or that only one engine accesses, has no races.
        self._logs = {
            region: Log(frozenset(engines))
            for region, engines in engines_of.items()
            if region in written and len(engines) > 1
        }

    def begin(self, due: Due, working: Sequence[int]) -> None:
        """Begin an instruction whose waits are fulfilled; `working` are the engines with instructions left."""
        for other, count in due.waits:
            self._clocks.wait(due.bound.engine, other, count)
        self._working = working
        self.note(due.bound, due.bound.direct)

    def note(self, bound: Bound, accesses: Sequence[tuple[Window, bool]]) -> None:
        engine = bound.engine
        known, number = self._clocks.now[engine], self._clocks.done(engine) + 1
        for window, writes in accesses:
            log = self._logs.get(self._region(window))
            if log is None:
                continue
            if log.is_full:
                log.forget(self._clocks, self._working)
            access = Access(
                *(engine, number, window.lanes, window.origin, window.pattern, writes),
                *(bound.instruction, bound.indices),
            )
            rival = log.meet(access, known)
            if rival is not None:
                other = self._describe(rival.instruction, rival.indices)
                raise Race(
                    f"{'writes' if writes else 'reads'} {window}, part of which is "
                    f"{'written' if rival.writes else 'read'} by ({other}), and no wait orders the two"
                )

    def end(self, bound: Bound) -> None:
        self._clocks.finish(bound.engine)

    def _region(self, window: Window) -> object:
        return self._shared[window.place.buffer] if isinstance(window.place, Far) else window.place.memory


def _overlapping(buffers: Sequence[Buffer]) -> list[int]:
    """A group number for each buffer; buffers that overlap, directly or transitively, have the same number."""
    groups, group, end = [0] * len(buffers), 0, 0
    for number in sorted(range(len(buffers)), key=lambda number: buffers[number].address):
        buffer = buffers[number]
        if buffer.address >= end:
            group += 1
        groups[number] = group
        end = max(end, buffer.address + buffer.nbytes)
    return groups
