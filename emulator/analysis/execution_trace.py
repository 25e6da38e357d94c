"""Execution trace of a program: what the predicted timeline executes when, and the critical path through it.

The timeline skips iterations that repeat an interval, so a trace is compressed: it has the instructions before a
repetition, one period of it, and those after. A `Repetition` at `at` stands for the period from `since` to `at`,
executed `times` more times. Times are whole picoseconds of compressed time; `ExecutionTrace.real` maps them to the
program's time, and `weighted` counts a period as often as it is executed, so all sums are exact.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from nxpipe.emulator.hardware import CORES, CoreSpec
from nxpipe.emulator.isa.cost import Cost, cost
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.program import Program, instructions
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.schedule.timeline import latency_ns

_PS: Final = 1000  # of a nanosecond
_PORT_USERS: Final = (Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)
ENGINES: Final = tuple(Engine)
DMA: Final = "dma"
LATENCY: Final = "dma latency"
RESOURCES: Final = (*(engine.value for engine in Engine if engine not in DMA_QUEUES), DMA, LATENCY)


@dataclass(frozen=True, slots=True)
class Event:
    """One execution of the instruction with this number in the text, in compressed time. `indices` are those of its
    loops, outermost first. From `transfers` on, a DMA moves bytes, or waits for DMA engines that other queues use."""

    number: int
    engine: Engine
    indices: tuple[int, ...]
    begin: int
    transfers: int
    end: int

    def parts(self, low: int, high: int) -> Iterator[tuple[str, int, int]]:
        """The resources that the event takes in a part of it, each with its interval."""
        if self.engine not in DMA_QUEUES:
            yield self.engine.value, low, high
            return
        for resource, begin, end in ((LATENCY, low, min(high, self.transfers)), (DMA, max(low, self.transfers), high)):
            if begin < end:
                yield resource, begin, end


@dataclass(frozen=True, slots=True)
class Repetition:
    """`times` further executions of the period from `since` to `at`, with `iterations` of the loop at `place` of the
    program's body. `inner` is the number of the first repetition inside the period; `real` the time in the program at
    which the repetitions begin, `elapsed` what they take."""

    place: int
    since: int
    at: int
    times: int
    iterations: int
    inner: int
    real: int
    elapsed: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the critical path: an event from `low` to `high`, on `times` executions of it."""

    event: int
    low: int
    high: int
    times: int


@dataclass(frozen=True, eq=False)
class ExecutionTrace:
    """Events in the order of their begin, repetitions in the order of time, and the end of the last event."""

    program: Program
    text: tuple[Instruction, ...]
    events: tuple[Event, ...]
    repetitions: tuple[Repetition, ...]

    @cached_property
    def end(self) -> int:
        return max((event.end for event in self.events), default=0)

    @property
    def latency_ps(self) -> int:
        """The time of the program."""
        return self.end + sum(repetition.elapsed for repetition in self.repetitions)

    def instruction(self, event: Event) -> Instruction:
        return self.text[event.number]

    @cached_property
    def by_engine(self) -> dict[Engine, list[int]]:
        """The numbers of each engine's events, in order."""
        numbers: dict[Engine, list[int]] = {}
        for number, event in enumerate(self.events):
            numbers.setdefault(event.engine, []).append(number)
        return {engine: numbers[engine] for engine in ENGINES if engine in numbers}

    @cached_property
    def begins(self) -> Array:
        return np.array([event.begin for event in self.events], np.int64)

    @cached_property
    def ends(self) -> Array:
        return np.array([event.end for event in self.events], np.int64)

    # Time

    def real(self, time: int, *, after: bool = False) -> int:
        """The time in the program; `after`: of the execution after the repetitions that begin then."""
        passed = (r for r in self.repetitions if r.at < time or (after and r.at == time))
        return time + sum(repetition.elapsed for repetition in passed)

    @cached_property
    def cuts(self) -> dict[int, list[int]]:
        """The times at which periods repeat, each with the begins of the periods."""
        cuts: dict[int, list[int]] = {}
        for repetition in self.repetitions:
            cuts.setdefault(repetition.at, []).append(repetition.since)
        return cuts

    @cached_property
    def _clock(self) -> tuple[Array, Array, Array]:
        """The bounds of all periods; the weighted time at each; how often the time after each is executed."""
        bounds = sorted({0, self.end, *(time for r in self.repetitions for time in (r.since, r.at))})
        executed = [self._executions(low, 0, len(self.repetitions)) for low in bounds]
        steps = np.diff(np.array(bounds, np.int64)) * np.array(executed[:-1], np.int64)
        return np.array(bounds, np.int64), np.concatenate(([0], np.cumsum(steps))), np.array(executed, np.int64)

    @cached_property
    def _clock_lists(self) -> tuple[list[int], list[int], list[int]]:
        bounds, sums, executed = (column.tolist() for column in self._clock)
        return bounds, sums, executed

    def _executions(self, time: int, first: int, last: int) -> int:
        """How often the moment after a time is executed, by the repetitions of this range."""
        return 1 + sum(
            repetition.times * self._executions(time, repetition.inner, number)
            for number, repetition in enumerate(self.repetitions[first:last], start=first)
            if repetition.since <= time < repetition.at
        )

    def weighted(self, times: Array) -> Array:
        """The program's time up to each compressed time, with each moment as often as it is executed."""
        bounds, sums, executed = self._clock
        position = np.searchsorted(bounds, times, side="right") - 1
        result: Array = sums[position] + (times - bounds[position]) * executed[position]
        return result

    def weight(self, low: int, high: int) -> int:
        """The time that an interval takes, in all its executions."""
        return self._weighted(high) - self._weighted(low)

    def _weighted(self, time: int) -> int:
        bounds, sums, executed = self._clock_lists
        position = bisect_right(bounds, time) - 1
        return sums[position] + (time - bounds[position]) * executed[position]

    # Critical path

    @cached_property
    def _ended(self) -> dict[Engine, dict[int, int]]:
        """For each engine, the event that ends at a time."""
        ended: dict[Engine, dict[int, int]] = {}
        for engine, numbers in self.by_engine.items():
            ended[engine] = {}
            for number in numbers:
                ended[engine].setdefault(self.events[number].end, number)
        return ended

    def cause(self, number: int) -> int | None:
        """The event whose end let this one begin: the one before it on its engine, else one that it waited for, or that
        used a port of both. None for an event that begins with the program."""
        event = self.events[number]
        engines = (event.engine, *(wait.engine for wait in self.text[event.number].waits), *_PORT_USERS)
        ends = (self._ended.get(engine, {}).get(event.begin) for engine in engines)
        return next((cause for cause in ends if cause is not None and cause != number), None)

    def back(self, number: int, low: int) -> Iterator[tuple[int, int, int]]:
        """The critical path before an event, down to a time: events with the part of each on the path."""
        at: int | None = self.cause(number)
        high = self.events[number].begin
        while at is not None and high > low:
            begin = max(self.events[at].begin, low)
            yield at, begin, high
            at, high = self.cause(at), begin

    @cached_property
    def critical_path(self) -> tuple[Segment, ...]:
        """The events whose durations add up to the program's time, last first."""
        if not self.events:
            return ()
        last = int(np.argmax(self.ends))
        sums, _ = self._walk(last, self.end, 0, range(len(self.repetitions)), {})
        return tuple(Segment(*part, times) for part, times in sums.items())

    @cached_property
    def path_by_resource(self) -> dict[str, int]:
        """The parts of the critical path; their sum is the program's time."""
        shares = Counter[str]()
        for segment in self.critical_path:
            for resource, low, high in self.events[segment.event].parts(segment.low, segment.high):
                shares[resource] += segment.times * (high - low)
        return dict(shares)

    def _walk(
        self,
        number: int,
        high: int,
        low: int,
        within: range,
        known: dict[tuple[int, int], tuple[Counter[tuple[int, int, int]], int]],
    ) -> tuple[Counter[tuple[int, int, int]], int]:
        """The path from an event at `high` back to `low`, through the repetitions `within` it: parts of events, and the
        event at `low`."""
        parts = Counter[tuple[int, int, int]]()
        pending = list(within)
        while True:
            event = self.events[number]
            if pending and (repetition := self.repetitions[pending[-1]]).at >= event.begin:
                parts[number, repetition.at, high] += 1
                number = self._repeated(number, pending.pop(), parts, known)
                high = repetition.at
                continue
            begin = max(event.begin, low)
            parts[number, begin, high] += begin < high
            cause = self.cause(number) if begin > low else None
            if cause is None:
                return +parts, number
            number, high = cause, begin

    def _repeated(
        self,
        number: int,
        which: int,
        parts: Counter[tuple[int, int, int]],
        known: dict[tuple[int, int], tuple[Counter[tuple[int, int, int]], int]],
    ) -> int:
        """Add the path through all executions of a repetition, backwards from an event; returns the event at its begin.

        The path through one execution depends only on the engine that it enters from, so it is computed once for
        each."""
        repetition = self.repetitions[which]
        entries: list[int] = []  # until one recurs
        while number not in entries and len(entries) < repetition.times:
            if (which, number) not in known:
                inner = range(repetition.inner, which)
                path, first = self._walk(number, repetition.at, repetition.since, inner, known)
                known[which, number] = path, self._running(self.events[first].engine, repetition.at)
            entries.append(number)
            number = known[which, number][1]
        before = entries.index(number) if number in entries else len(entries)
        cycle = entries[before:]
        rounds, rest = divmod(repetition.times - before, len(cycle)) if cycle else (0, 0)
        for position, entry in enumerate(entries):
            times = 1 if position < before else rounds + (position - before < rest)
            for part, count in known[which, entry][0].items():
                parts[part] += count * times
        return cycle[rest] if cycle else number

    def _running(self, engine: Engine, time: int) -> int:
        """The event that an engine executes at a time; the state at both ends of a period is the same."""
        numbers = self.by_engine[engine]
        number = numbers[bisect_right(numbers, time, key=lambda each: self.events[each].begin) - 1]
        assert self.events[number].begin <= time < self.events[number].end, "a period ends in the state it began in"
        return number


def record(program: Program, price: Callable[[Instruction, CoreSpec], Cost] = cost) -> ExecutionTrace | None:
    """The trace of a legal program; None if its timeline exceeds the step limit."""
    text, core = tuple(instructions(program.body)), CORES[program.core]
    starts = [round(price(instruction, core).start_ns * _PS) for instruction in text]
    recorder = _Recorder({id(instruction): number for number, instruction in enumerate(text)}, starts)
    if latency_ns(program, recorder, price) is None:
        return None
    return ExecutionTrace(program, text, tuple(recorder.events), tuple(recorder.repetitions))


@dataclass(eq=False)
class _Recorder:
    """The observer that compresses time."""

    numbers: dict[int, int]
    starts: Sequence[int]  # the start-up of each instruction
    events: list[Event] = field(default_factory=list)
    repetitions: list[Repetition] = field(default_factory=list)
    passed: int = 0  # what all repetitions took so far

    def executed(self, instruction: Instruction, indices: Sequence[int], begin: int, end: int) -> None:
        number, begin, end = self.numbers[id(instruction)], begin - self.passed, end - self.passed
        transfers = min(begin + self.starts[number], end)
        self.events.append(Event(number, instruction.engine, tuple(indices), begin, transfers, end))

    def skipped(self, place: int, since: int, now: int, repetitions: int, iterations: int) -> None:
        before = [each for each in self.repetitions if each.real + each.elapsed <= since]
        period = since - sum(each.elapsed for each in before)
        elapsed = repetitions * (now - since)
        compressed = now - self.passed
        self.repetitions.append(
            Repetition(place, period, compressed, repetitions, iterations, len(before), now, elapsed)
        )
        self.passed += elapsed


def nanoseconds(ps: float) -> float:
    return ps / _PS
