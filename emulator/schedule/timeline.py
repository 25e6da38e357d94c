"""Instruction index, the sequence number of each instruction on its engine; and the timeline that it predicts.

`InstructionIndex` gives an instruction its number, an affine function of the loops around it. `streams` answers the
inverse question, which instruction of an engine has a number that is affine in the indices of other loops. That answer
may differ between iterations: in the first iteration of a loop, the instruction of one iteration ago stands before the
loop. Iterations are therefore handled as boxes, a range of each loop around, and a box is split where answers differ.
"""

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Final

import numpy as np

from nxpipe.emulator.hardware import CORES, CoreSpec
from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.cost import START_NS, cost, share_of_dma
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.program import Loop, Program, Step, counted, instructions, only
from nxpipe.emulator.numerics import Array

_MOST_WAITS: Final = 4  # waits of one instruction for one engine


@dataclass(eq=False, frozen=True)
class EnclosingLoop:
    """A loop, with the number of instructions of each engine in one iteration."""

    count: int
    each: dict[Engine, int]


@dataclass(eq=False)
class IndexedInstruction:
    """An instruction with its position and its waits. `done` counts its engine's instructions up to and including it,
    `before` those of every engine before it in program order; both are affine in the indices of `loops`."""

    instruction: Instruction
    order: int
    loops: tuple[EnclosingLoop, ...]
    done: Affine
    before: dict[Engine, Affine]
    waits: dict[Engine, list[Affine]] = field(default_factory=lambda: defaultdict(list))
    _ago: dict[tuple[int, int], Affine] = field(default_factory=dict)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(loop.count for loop in self.loops)

    def done_ago(self, common: int, iterations: int) -> Affine:
        """Its number so many iterations earlier of the innermost of `common` loops, at the end of all loops inside."""
        if (common, iterations) not in self._ago:
            done = self.done
            for depth in range(common, len(self.loops)):
                done = _at_last(done, depth, self.loops[depth].count)
            each = self.loops[common - 1].each[self.instruction.engine] if iterations else 0
            self._ago[common, iterations] = done + -iterations * each
        return self._ago[common, iterations]

    def wait(self, engine: Engine, done: Affine) -> None:
        """Add a wait. Of two waits for an engine the one that asks for more suffices. If there are too many that cannot
        be compared, one wait for everything before the instruction replaces them."""
        if (
            done in self.waits[engine]
            or done.bounds(self.counts)[1] < 1
            or any(self._covers(known, done) for known in self.waits[engine])
        ):
            return
        kept = [known for known in self.waits[engine] if not self._covers(done, known)]
        self.waits[engine] = [*kept, done]
        if len(self.waits[engine]) > _MOST_WAITS or not self._covers(self.before[engine], done):
            self.waits[engine] = [self.before[engine]]

    def _covers(self, more: Affine, less: Affine) -> bool:
        if more.terms == less.terms:
            return more.base >= less.base
        return (more + less * -1).bounds(self.counts)[0] >= 0


class InstructionIndex:
    """Numbers all instructions, in the order of the text."""

    def __init__(self) -> None:
        self._totals: dict[Engine, Affine] = defaultdict(Affine)
        self._found: list[IndexedInstruction] = []

    def walk(self, body: Sequence[Step], loops: tuple[EnclosingLoop, ...] = ()) -> list[IndexedInstruction]:
        for step in body:
            if isinstance(step, Loop):
                self._walk_loop(step, loops)
                continue
            before = defaultdict(Affine, self._totals)
            self._totals[step.engine] += 1
            self._found.append(IndexedInstruction(step, len(self._found), loops, self._totals[step.engine], before))
        return self._found

    def _walk_loop(self, loop: Loop, loops: tuple[EnclosingLoop, ...]) -> None:
        before, each = dict(self._totals), counted(loop.body)
        for engine, count in each.items():
            self._totals[engine] += index(len(loops)) * count
        self.walk(loop.body, (*loops, EnclosingLoop(loop.count, each)))
        for engine, count in each.items():
            self._totals[engine] = before.get(engine, Affine()) + count * loop.count


def _at_last(number: Affine, depth: int, count: int) -> Affine:
    coefficient = dict(number.terms).get(depth, 0)
    return replace(
        number,
        base=number.base + coefficient * (count - 1),
        terms=tuple(term for term in number.terms if term[0] != depth),
    )


@dataclass(frozen=True, eq=False)
class Iterations:
    """Boxes of iterations: the first and the last index of each loop around; one box, or a row for each of several."""

    low: Array
    high: Array

    def least(self, forms: Array) -> Array:
        """The least value of affine numbers in these iterations, row by row."""
        factors = forms[..., :-1]
        lowest: Array = np.minimum(factors * self.low, factors * self.high).sum(-1) + forms[..., -1]
        return lowest

    def most(self, forms: Array) -> Array:
        return -self.least(-forms)

    def reach(self, form: Array) -> tuple[int, int]:
        """The least and the greatest value of one affine number; faster than for many."""
        *factors, base = form.tolist()
        ends = [(a * b, a * c) for a, b, c in zip(factors, self.low.tolist(), self.high.tolist(), strict=True) if a]
        return base + sum(map(min, ends)), base + sum(map(max, ends))

    def within(self, loop: int, low: int, high: int) -> "Iterations":
        """The iterations in this range of one loop."""
        lows, highs = self.low.copy(), self.high.copy()
        lows[loop], highs[loop] = max(lows[loop], low), min(highs[loop], high)
        return Iterations(lows, highs)

    def without(self, other: "Iterations") -> Iterator["Iterations"]:
        """The iterations outside of another box, which lies inside, as disjoint boxes."""
        rest = self
        ends = zip(*(each.tolist() for each in (self.low, other.low, other.high, self.high)), strict=True)
        for loop, (low, first, last, high) in enumerate(ends):
            if low < first:
                yield rest.within(loop, low, first - 1)
            if last < high:
                yield rest.within(loop, last + 1, high)
            rest = rest.within(loop, first, last)

    def divided(self, form: Array, border: int) -> tuple["Iterations", "Iterations"] | None:
        """Split in two along one loop, so that a number that crosses the border does not cross it in one part."""
        least, most = self.reach(form)
        for loop in np.argsort(-np.abs(form[:-1] * (self.high - self.low))).tolist():
            factor, low, high = int(form[loop]), int(self.low[loop]), int(self.high[loop])
            own = sorted((factor * low, factor * high))
            # Where even the least of the rest is beyond the border, or even the most of it is not.
            for first in (border - (least - own[0]), border - (most - own[1])) if factor else ():
                cut = -(-first // factor) if factor > 0 else first // factor + 1
                if low < cut <= high:
                    return self.within(loop, low, cut - 1), self.within(loop, cut, high)
        return None


@dataclass(frozen=True, eq=False)
class _Leaf:
    order: int  # in the text


@dataclass(frozen=True, eq=False)
class Stream:
    """The instructions of one engine in a body: each item with the number of instructions before it."""

    starts: tuple[int, ...]
    items: tuple["_Leaf | _Inner", ...]

    def find(self, number: Array, box: Iterations, indices: tuple[Array, ...] = ()) -> Iterator["Found"]:
        """Find the instructions that have this number, counted from 0; each with the iterations in which it does."""
        least, most = box.reach(number)
        at = bisect(self.starts, most) - 1
        if at < 0:
            return
        if least < self.starts[at]:
            for part in box.divided(number, self.starts[at]) or ():
                yield from self.find(number, part, indices)
            return
        item, inside = self.items[at], plus(number, -self.starts[at])
        if isinstance(item, _Leaf):
            yield Found(item.order, np.array(indices).reshape(len(indices), len(number)), box)
        else:
            yield from item.find(inside, box, indices)


@dataclass(frozen=True, eq=False)
class _Inner:
    each: int
    body: Stream

    def find(self, number: Array, box: Iterations, indices: tuple[Array, ...]) -> Iterator["Found"]:
        index = -((self.each - 2 * number) // (2 * self.each))  # to the nearest
        index[-1] = 0
        inside = number - index * self.each
        least, most = box.reach(inside)
        last = most // self.each
        if least < last * self.each:
            for part in box.divided(inside, last * self.each) or ():
                yield from self.find(number, part, indices)
            return
        yield from self.body.find(plus(inside, -last * self.each), box, (*indices, plus(index, last)))


@dataclass(frozen=True, eq=False)
class Found:
    """An instruction, with the indices of its loops as affine numbers of other loops, valid in some iterations."""

    order: int
    indices: Array
    box: Iterations


def streams(body: Sequence[Step], order: Iterator[int]) -> dict[Engine, Stream]:
    """The instructions of each engine."""
    starts, items = defaultdict[Engine, list[int]](list), defaultdict[Engine, list[_Leaf | _Inner]](list)
    total = Counter[Engine]()
    for step in body:
        own: Mapping[Engine, _Leaf | _Inner]
        if isinstance(step, Loop):
            each, inside = counted(step.body), streams(step.body, order)
            own = {engine: _Inner(often, inside[engine]) for engine, often in each.items() if often}
        else:
            own = {step.engine: _Leaf(next(order))}
        for engine, item in own.items():
            starts[engine].append(total[engine])
            items[engine].append(item)
        total += counted((step,))
    return {engine: Stream(tuple(starts[engine]), tuple(items[engine])) for engine in items}


def form_of(number: Affine, depth: int) -> Array:
    """An affine number as a row: the coefficient of each loop's index, then the base."""
    assert not number.turns, "only places rotate over buffers"
    form = np.zeros(depth + 1, np.int64)
    for loop, factor in number.terms:
        form[loop] = factor
    form[-1] = number.base
    return form


def plus(form: Array, number: int) -> Array:
    more = form.copy()
    more[-1] += number
    return more


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
