"""Timeline: the latency of a program by event simulation of its engines and waits, without computing any data.

An instruction starts when its engine is free and its waits are satisfied, and takes its documented time. A DMA has a
start-up time; then it shares the core's DMA engines with the DMAs of other queues, first come, first served. Not
modelled, because it is undocumented: the latency of a semaphore between engines, and the extra cycles of a short
instruction that reads the result of the one before it on its engine.

An outermost loop, such as the loop over layers, is simulated until the engines' relative state recurs. The simulation
is deterministic in that state, so every later iteration repeats the interval in between, and the remaining iterations
are added at once. A program that has not ended after very many steps is given up.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from nxpipe.emulator.hardware import CORES, CoreSpec
from nxpipe.emulator.isa.cost import START_NS, cost, share_of_dma
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.program import Loop, Program, Step, counted, instructions, only

_ENGINES: Final = tuple(Engine)
_NUMBER: Final = {engine: number for number, engine in enumerate(_ENGINES)}
_PS: Final = 1000  # times are whole picoseconds, so that states compare exactly
_START: Final = round(START_NS * _PS)
_MOST_STEPS: Final = 5_000_000
_BEHIND: Final = -1  # the place of an engine that has completed everything


def latency_ns(program: Program) -> float | None:
    """Time from the first instruction of a legal program to the end of its last; None if simulating was given up."""
    end = _Timeline(program).run()
    return None if end is None else end / _PS


@dataclass(frozen=True, slots=True)
class _Task:
    """The timing of an instruction. `dma` is the time that it would occupy all DMA engines; `waits` are counts of other
    engines: a base, and a factor for each loop depth."""

    start: int
    takes: int
    dma: int
    waits: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, instruction: Instruction, core: CoreSpec) -> "_Task":
        price = cost(instruction, core)
        takes = round(price.ns * _PS)
        shared = share_of_dma(instruction, core) if instruction.engine in DMA_QUEUES else 0.0
        waits = tuple((_NUMBER[wait.engine], wait.done.base, wait.done.terms) for wait in instruction.waits)
        return cls(round(price.start_ns * _PS), takes, round(takes * shared), waits)


class _Stream:
    """The task sequence of one engine: the next task, the counts of other engines that it needs, the loops around."""

    def __init__(self, steps: Sequence[tuple[int, Step]], tasks: dict[int, _Task]) -> None:
        self._tasks = tasks
        self._rest = self._walk(steps)
        self.place = _BEHIND  # of the body's own steps, the one that the task is in
        self.indices: list[int] = []
        self.task: _Task | None = None
        self.needs: tuple[tuple[int, int], ...] = ()
        self.advance()

    def advance(self) -> None:
        self.task = next(self._rest, None)
        self._look()

    def skip(self, iterations: int) -> None:
        """Skip iterations of the outermost loop."""
        self.indices[0] += iterations
        self._look()

    def _look(self) -> None:
        at = self.indices
        waits = self.task.waits if self.task else ()
        self.needs = tuple(
            (engine, base + sum(at[depth] * factor for depth, factor in terms)) for engine, base, terms in waits
        )

    def _walk(self, steps: Sequence[tuple[int, Step]]) -> Iterator[_Task]:
        for place, step in steps:
            self.place = place
            yield from self._through(step, 0)
        self.place = _BEHIND

    def _through(self, step: Step, depth: int) -> Iterator[_Task]:
        if not isinstance(step, Loop):
            yield self._tasks[id(step)]
            return
        self.indices.append(0)
        while self.indices[depth] < step.count:
            for inner in step.body:
                yield from self._through(inner, depth + 1)
            self.indices[depth] += 1
        self.indices.pop()


class _Steady:
    """Steady state of an outermost loop: the iterations after which the engines' relative state recurs."""

    def __init__(self, place: int, loop: Loop) -> None:
        each = counted(loop.body)
        self.place, self.count = place, loop.count
        self.each = [each.get(engine, 0) for engine in _ENGINES]
        self.inside = [engine for engine, count in enumerate(self.each) if count]
        # True if each wait looks back equally far in every iteration, or always at one instruction, which is past by
        # the second iteration: then equal states have equal futures.
        self._is_regular = all(
            dict(wait.done.terms).get(0, 0) in (0, each.get(wait.engine, 0))
            for instruction in instructions(loop.body)
            for wait in instruction.waits
        )
        self._seen: dict[object, tuple[int, int]] = {}

    def first_seen(self, state: object, turn: int, now: int) -> tuple[int, int]:
        """The iteration in which a state was first seen, and the time."""
        return self._seen.setdefault(state, (turn, now))

    def repeatable(self, streams: Sequence[_Stream], done: Sequence[int]) -> int:
        """The number of iterations that certainly repeat the last ones: no engine leaves the loop during them, and no
        engine outside of it is released by one."""
        if not self._is_regular or any(streams[engine].place != self.place for engine in self.inside):
            return 0
        left = [self.count - 1 - streams[engine].indices[0] for engine in self.inside]
        unnoticed = [
            (count - done[engine] - 1) // self.each[engine]
            for stream, own in zip(streams, self.each, strict=True)
            if not own
            for engine, count in stream.needs
            if self.each[engine] and done[engine] < count
        ]
        return min(*left, *unnoticed, self.count)


class _Timeline:
    def __init__(self, program: Program) -> None:
        core = CORES[program.core]
        tasks = {id(each): _Task.of(each, core) for each in instructions(program.body)}
        self._loops = {
            place: _Steady(place, step)
            for place, step in enumerate(program.body)
            if isinstance(step, Loop) and counted(step.body)
        }
        self._streams = [
            _Stream([(place, own) for place, step in enumerate(program.body) for own in only((step,), engine)], tasks)
            for engine in _ENGINES
        ]
        self._done = [0] * len(_ENGINES)
        self._waiting: list[set[int]] = [set() for _ in _ENGINES]  # engines that wait for each engine
        self._ends: list[tuple[int, int]] = []  # completion times of busy engines
        self._now = 0
        self._dma = 0  # time until which the DMA engines are busy

    def run(self) -> int | None:
        self._begin(range(len(_ENGINES)))
        for _ in range(_MOST_STEPS):
            if not self._ends:
                break
            self._now = self._ends[0][0]
            ended, turned = self._end()
            self._begin(sorted(ended.union(*(self._freed(engine) for engine in ended))))
            for loop in turned:
                self._leave_out(loop)
        return None if self._ends else self._now

    def _end(self) -> tuple[set[int], list[_Steady]]:
        """The engines that complete an instruction now, and the loops of which that ends an iteration."""
        ended, turned = set[int](), list[_Steady]()
        while self._ends and self._ends[0][0] == self._now:
            _, engine = heappop(self._ends)
            ended.add(engine)
            self._done[engine] += 1
            stream = self._streams[engine]
            place, turn = stream.place, stream.indices[:1]
            stream.advance()
            if stream.place == place and stream.indices[:1] != turn and self._loops[place].inside[0] == engine:
                turned.append(self._loops[place])
        return ended, turned

    def _freed(self, engine: int) -> set[int]:
        """The engines that waited for this one."""
        freed, self._waiting[engine] = self._waiting[engine], set()
        return freed

    def _begin(self, engines: Iterable[int]) -> None:
        """Start what can start now; of several DMAs that of the first queue is served first."""
        for engine in engines:
            stream = self._streams[engine]
            lacking = next((other for other, count in stream.needs if self._done[other] < count), None)
            if lacking is not None:
                self._waiting[lacking].add(engine)
            elif stream.task is not None:
                heappush(self._ends, (self._until(stream.task), engine))

    def _until(self, task: _Task) -> int:
        begin = self._now + task.start
        if task.dma:
            self._dma = max(self._dma, begin) + task.dma
        return max(begin + task.takes, self._dma if task.dma else 0)

    def _leave_out(self, loop: _Steady) -> None:
        """Advance over the iterations that repeat an interval seen before."""
        turn = self._streams[loop.inside[0]].indices[0]
        state = (
            tuple(done - turn * each for done, each in zip(self._done, loop.each, strict=True)),
            tuple(sorted((end - self._now, engine) for end, engine in self._ends)),
            max(self._dma - self._now, _START),
        )
        before, then = loop.first_seen(state, turn, self._now)
        times = loop.repeatable(self._streams, self._done) // (turn - before) if before < turn else 0
        if times <= 0:
            return
        iterations, later = times * (turn - before), times * (self._now - then)
        self._now, self._dma = self._now + later, self._dma + later
        self._ends = [(end + later, engine) for end, engine in self._ends]
        for engine in loop.inside:
            self._done[engine] += iterations * loop.each[engine]
            self._streams[engine].skip(iterations)
