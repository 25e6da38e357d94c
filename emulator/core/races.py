"""Race detection: proof that the order of the engines did not matter in a run.

Every two accesses to the same bytes, one of them a write, must be ordered: by the stream of one engine or by waits.
Happens-before is tracked with vector clocks (Lamport; Mattern 1988): an engine knows how far the others have come only
from its waits, and a wait for an instruction takes over everything that its engine knew when it was done. Which
accesses are ordered therefore depends on the program alone (and on its row numbers) and not on the order of this run:
a run in any order finds a race if there is one.
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

Known = tuple[int, ...]  # vector clock: how many instructions of each engine are known to be done
Describe = Callable[[Instruction, tuple[int, ...]], str]
_NOTHING: Final[Known] = (0,) * len(ENGINES)


class Clocks:
    """Vector clocks: what each engine knows of the others now, and knew after its first, second ... instruction."""

    def __init__(self) -> None:
        self.now: list[Known] = [_NOTHING] * len(ENGINES)
        self._then: list[list[Known]] = [[] for _ in ENGINES]

    def wait(self, engine: int, other: int, count: int) -> None:
        mine = self.now[engine]
        if mine[other] < count:
            merged = list(map(max, mine, self._then[other][count - 1]))
            merged[other] = max(merged[other], count)
            self.now[engine] = tuple(merged)

    def done(self, engine: int) -> int:
        return len(self._then[engine])

    def finish(self, engine: int) -> None:
        self._then[engine].append(self.now[engine])


class Access(NamedTuple):
    engine: int
    number: int  # which of its engine's instructions, from 1
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

    Their bounding boxes (partitions x bytes) lie in one array, so that numpy discards all but the near ones at once.
    """

    def __init__(self, engines: frozenset[int]) -> None:
        self._engines = engines  # that ever access this memory
        self._boxes = np.zeros((4, 256), np.int64)
        self._found: list[Access | None] = []

    def meet(self, access: Access, known: Known) -> Access | None:
        """Record an access, and return one that it races with, if any.

        An ordered access that covers an older one replaces it: whatever races with the older access races with its
        successor too. The log thus stays as short as the bytes that are in use.
        """
        first, last, low, high = access.box
        boxes = self._boxes[:, : len(self._found)]
        near = (boxes[0] < last) & (boxes[1] > first) & (boxes[2] < high) & (boxes[3] > low)
        for place in near.nonzero()[0].tolist():
            other: Access | None = self._found[place]
            if other is None:
                continue
            if other.engine != access.engine and known[other.engine] < other.number:
                if (access.writes or other.writes) and touch(
                    access.pattern, other.pattern, other.origin - access.origin
                ):
                    return other
            elif (access.writes or not other.writes) and _covers(access, other):
                self._found[place] = None
                boxes[1, place] = boxes[0, place]  # an empty box overlaps nothing
        self._boxes[:, len(self._found)] = access.box
        self._found.append(access)
        return None

    @property
    def is_full(self) -> bool:
        return len(self._found) == self._boxes.shape[1]

    def forget(self, clocks: Clocks, working: Iterable[int]) -> None:
        """Drop the accesses that every engine with accesses to come already knows: nothing can race with them."""
        engines = [engine for engine in working if engine in self._engines]
        oldest = [
            min((clocks.now[each][of] for each in engines if each != of), default=1 << 62) for of in range(len(ENGINES))
        ]
        kept = [
            number
            for number, access in enumerate(self._found)
            if access is not None and access.number > oldest[access.engine]
        ]
        boxes = self._boxes[:, kept]
        self._boxes = np.zeros((4, max(256, 2 * len(kept))), np.int64)
        self._boxes[:, : len(kept)] = boxes
        self._found = [self._found[number] for number in kept]


def _covers(access: Access, other: Access) -> bool:
    (first, last, low, high), (start, stop, begin, end) = access.box, other.box
    if first > start or last < stop or low > begin or high < end:
        return False
    same = access.pattern is other.pattern and access.origin == other.origin
    return same or access.pattern.is_solid


class Races:
    """Race detection over the accesses of one run of one core."""

    def __init__(self, memories: Memories, everything: Sequence[Bound], describe: Describe) -> None:
        self._clocks = Clocks()
        self._shared = _overlapping(memories.buffers)
        self._describe = describe
        visitors: dict[object, set[int]] = {}
        written: set[object] = set()
        for bound in everything:
            for window, writes in (*bound.direct, *bound.indirect):
                visitors.setdefault(self._region(window), set()).add(bound.engine)
                if writes:
                    written.add(self._region(window))
        # Memory that is never written, or that one engine alone accesses, has no races.
        self._logs = {
            region: Log(frozenset(engines))
            for region, engines in visitors.items()
            if region in written and len(engines) > 1
        }

    def begin(self, due: Due, working: Sequence[int]) -> None:
        """An instruction's waits are fulfilled and its places located; `working` are the engines with work left."""
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
    """A group number for each buffer: buffers that overlap, directly or through others, share one."""
    groups, group, end = [0] * len(buffers), 0, 0
    for number in sorted(range(len(buffers)), key=lambda number: buffers[number].address):
        buffer = buffers[number]
        if buffer.address >= end:
            group += 1
        groups[number] = group
        end = max(end, buffer.address + buffer.nbytes)
    return groups
