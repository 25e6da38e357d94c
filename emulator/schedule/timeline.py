"""Instruction index, the sequence number of each instruction on its engine; and the predicted timeline of a program.

`InstructionIndex` maps an instruction to its number, an affine function of the indices of its enclosing loops.
`streams` is the inverse map: it finds the instruction of an engine whose number is a given affine function of the
indices of other loops. The result may differ between iterations; in the first iteration of a loop, for example, the
instruction of the previous iteration is before the loop. Sets of iterations are represented as boxes, a range of
indices of each loop, and a box is split where results differ.

The timeline simulates the engines' queues and semaphore waits with the documented instruction times, the DMA engines
that all queues share (`dma_engines.py`), the memory ports that engines of v2 share, and collectives over the links of
an instance. It skips the iterations of a loop in a steady state.
"""

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Final, Protocol

import numpy as np

from nxpipe.emulator.hardware import CORES, CoreSpec
from nxpipe.emulator.hardware.instance import Instance
from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.collective import exchange, instance_for
from nxpipe.emulator.isa.cost import START_NS, Cost, cost, share_of_dma
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.isa.program import Loop, Program, Step, counted, instructions, only
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.schedule.dma_engines import UNITS, DmaEngines

_MOST_WAITS: Final = 4  # waits of an instruction for one engine


@dataclass(eq=False, frozen=True)
class EnclosingLoop:
    """A loop, with the number of instructions per engine in one iteration."""

    count: int
    by_iteration: dict[Engine, int]


@dataclass(eq=False)
class IndexedInstruction:
    """An instruction with its position and its waits.

    `done` is the number of its engine's instructions up to and including it, `before` the number of each engine's
    instructions before it in program order. Both are affine in the indices of `loops`."""

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
        """The instruction's number `iterations` iterations earlier of the innermost of the first `common` loops, in the
        last iteration of all loops within."""
        if (common, iterations) not in self._ago:
            done = self.done
            for depth in range(common, len(self.loops)):
                done = _at_last(done, depth, self.loops[depth].count)
            by_iteration = self.loops[common - 1].by_iteration[self.instruction.engine] if iterations else 0
            self._ago[common, iterations] = done + -iterations * by_iteration
        return self._ago[common, iterations]

    def wait(self, engine: Engine, done: Affine) -> None:
        """Add a wait until an engine has completed `done` instructions.

        Of two comparable waits for an engine, only the one with the greater count is kept. If too many are not
        comparable, or one exceeds the count in program order, a single wait for everything before the instruction
        replaces them; that count keeps program order a possible execution."""
        if (
            done in self.waits[engine]
            or done.bounds(self.counts)[1] < 1
            or any(self._covers(other, done) for other in self.waits[engine])
        ):
            return
        incomparable = [other for other in self.waits[engine] if not self._covers(done, other)]
        self.waits[engine] = [*incomparable, done]
        if len(self.waits[engine]) > _MOST_WAITS or not self._covers(self.before[engine], done):
            self.waits[engine] = [self.before[engine]]

    def _covers(self, more: Affine, less: Affine) -> bool:
        """True if `more` is at least `less` in every iteration."""
        if more.terms == less.terms:
            return more.base >= less.base
        return (more + less * -1).bounds(self.counts)[0] >= 0


class InstructionIndex:
    """Numbers all instructions, in the order of the program text (loop bodies once)."""

    def __init__(self) -> None:
        self._totals: dict[Engine, Affine] = defaultdict(Affine)
        self._instructions: list[IndexedInstruction] = []

    def walk(self, body: Sequence[Step], loops: tuple[EnclosingLoop, ...] = ()) -> list[IndexedInstruction]:
        for step in body:
            if isinstance(step, Loop):
                self._walk_loop(step, loops)
                continue
            before = defaultdict(Affine, self._totals)
            self._totals[step.engine] += 1
            self._instructions.append(
                IndexedInstruction(step, len(self._instructions), loops, self._totals[step.engine], before)
            )
        return self._instructions

    def _walk_loop(self, loop: Loop, loops: tuple[EnclosingLoop, ...]) -> None:
        before, by_iteration = dict(self._totals), counted(loop.body)
        for engine, count in by_iteration.items():
            self._totals[engine] += index(len(loops)) * count
        self.walk(loop.body, (*loops, EnclosingLoop(loop.count, by_iteration)))
        for engine, count in by_iteration.items():
            self._totals[engine] = before.get(engine, Affine()) + count * loop.count


def _at_last(number: Affine, depth: int, count: int) -> Affine:
    """The affine number in the last iteration of the loop at a depth."""
    coefficient = dict(number.terms).get(depth, 0)
    return replace(
        number,
        base=number.base + coefficient * (count - 1),
        terms=tuple(term for term in number.terms if term[0] != depth),
    )


@dataclass(frozen=True, eq=False)
class Iterations:
    """A box of iterations, given by the first and last index of each enclosing loop; or an array of boxes, one per
    row."""

    low: Array
    high: Array

    def least(self, forms: Array) -> Array:
        """The minimum of affine numbers over the iterations, row by row."""
        factors = forms[..., :-1]
        lowest: Array = np.minimum(factors * self.low, factors * self.high).sum(-1) + forms[..., -1]
        return lowest

    def most(self, forms: Array) -> Array:
        return -self.least(-forms)

    def reach(self, form: Array) -> tuple[int, int]:
        """The minimum and maximum of a single affine number; faster than `least` and `most`."""
        *factors, base = form.tolist()
        ends = [(a * b, a * c) for a, b, c in zip(factors, self.low.tolist(), self.high.tolist(), strict=True) if a]
        return base + sum(map(min, ends)), base + sum(map(max, ends))

    def within(self, loop: int, low: int, high: int) -> "Iterations":
        """The iterations within a range of one loop's indices."""
        lows, highs = self.low.copy(), self.high.copy()
        lows[loop], highs[loop] = max(lows[loop], low), min(highs[loop], high)
        return Iterations(lows, highs)

    def without(self, other: "Iterations") -> Iterator["Iterations"]:
        """The iterations outside of `other`, a box within this one, as disjoint boxes."""
        remaining = self
        ends = zip(*(bound.tolist() for bound in (self.low, other.low, other.high, self.high)), strict=True)
        for loop, (low, first, last, high) in enumerate(ends):
            if low < first:
                yield remaining.within(loop, low, first - 1)
            if last < high:
                yield remaining.within(loop, last + 1, high)
            remaining = remaining.within(loop, first, last)

    def split_at(self, form: Array, border: int) -> tuple["Iterations", "Iterations"] | None:
        """Split the box in two along one loop, so that in one part an affine number is entirely below, or entirely at
        or above, `border`. None if no loop allows it. Each split decides one part, so that repeated splits
        terminate."""
        least, most = self.reach(form)
        for loop in np.argsort(-np.abs(form[:-1] * (self.high - self.low))).tolist():
            factor, low, high = int(form[loop]), int(self.low[loop]), int(self.high[loop])
            own_range = sorted((factor * low, factor * high))
            # The index from which on the number is at or above the border for the other loops' minimum, or maximum.
            for first in (border - (least - own_range[0]), border - (most - own_range[1])) if factor else ():
                cut = -(-first // factor) if factor > 0 else first // factor + 1
                if low < cut <= high:
                    return self.within(loop, low, cut - 1), self.within(loop, cut, high)
        return None


@dataclass(frozen=True, eq=False)
class _Leaf:
    order: int  # in the program text


@dataclass(frozen=True, eq=False)
class Stream:
    """The instructions of one engine in a loop body: items, and the number of instructions before each."""

    starts: tuple[int, ...]
    items: tuple["_Leaf | _Inner", ...]

    def find(self, number: Array, box: Iterations, indices: tuple[Array, ...] = ()) -> Iterator["Occurrence"]:
        """Find the instructions with a number, counted from 0; each with the iterations in which it has that number."""
        least, most = box.reach(number)
        position = bisect(self.starts, most) - 1
        if position < 0:
            return
        if least < self.starts[position]:
            for half in box.split_at(number, self.starts[position]) or ():
                yield from self.find(number, half, indices)
            return
        item, inside = self.items[position], plus(number, -self.starts[position])
        if isinstance(item, _Leaf):
            yield Occurrence(item.order, np.array(indices).reshape(len(indices), len(number)), box)
        else:
            yield from item.find(inside, box, indices)


@dataclass(frozen=True, eq=False)
class _Inner:
    """A nested loop of a stream, with its number of instructions per iteration."""

    by_iteration: int
    body: Stream

    def find(self, number: Array, box: Iterations, indices: tuple[Array, ...]) -> Iterator["Occurrence"]:
        # number = index * by_iteration + inside. Coefficients are divided to nearest, which keeps `inside` small, so
        # that few splits of the box suffice until it is within one iteration.
        index = -((self.by_iteration - 2 * number) // (2 * self.by_iteration))
        index[-1] = 0
        inside = number - index * self.by_iteration
        least, most = box.reach(inside)
        last = most // self.by_iteration
        if least < last * self.by_iteration:
            for half in box.split_at(inside, last * self.by_iteration) or ():
                yield from self.find(number, half, indices)
            return
        yield from self.body.find(plus(inside, -last * self.by_iteration), box, (*indices, plus(index, last)))


@dataclass(frozen=True, eq=False)
class Occurrence:
    """An instruction, with the indices of its loops as affine numbers of other loops' indices, valid in a box."""

    order: int
    indices: Array
    box: Iterations


def streams(body: Sequence[Step], order: Iterator[int]) -> dict[Engine, Stream]:
    """The instructions of each engine in a body; `order` numbers instructions in the program text."""
    starts, items = defaultdict[Engine, list[int]](list), defaultdict[Engine, list[_Leaf | _Inner]](list)
    total = Counter[Engine]()
    for step in body:
        by_engine: Mapping[Engine, _Leaf | _Inner]
        if isinstance(step, Loop):
            counts, inside = counted(step.body), streams(step.body, order)
            by_engine = {engine: _Inner(count, inside[engine]) for engine, count in counts.items() if count}
        else:
            by_engine = {step.engine: _Leaf(next(order))}
        for engine, item in by_engine.items():
            starts[engine].append(total[engine])
            items[engine].append(item)
        total += counted((step,))
    return {engine: Stream(tuple(starts[engine]), tuple(items[engine])) for engine in items}


def form_of(number: Affine, depth: int) -> Array:
    """An affine number as an array: the coefficient of each loop's index, then the base."""
    assert not number.rotations, "only places rotate over buffers"
    form = np.zeros(depth + 1, np.int64)
    for loop, factor in number.terms:
        form[loop] = factor
    form[-1] = number.base
    return form


def plus(form: Array, number: int) -> Array:
    result = form.copy()
    result[-1] += number
    return result


_ENGINES: Final = tuple(Engine)
_NUMBER: Final = {engine: number for number, engine in enumerate(_ENGINES)}
PS: Final = 1000  # times are whole picoseconds, so that states compare exactly
START_PS: Final = round(START_NS * PS)
_MOST_STEPS: Final = 5_000_000
_FINISHED: Final = -1  # the position of an engine that has completed its stream


class Observer(Protocol):
    """Receives what the simulation decides; times are in ps."""

    def executed(self, instruction: Instruction, indices: Sequence[int], begin: int, end: int) -> None:
        """An instruction in one iteration of its loops, when it ends. It begins when its waits are satisfied and no
        other engine uses its ports: the time includes the start of a DMA, and waiting for DMA engines."""

    def skipped(self, place: int, since: int, now: int, repetitions: int, iterations: int) -> None:
        """The interval from `since` to `now` repeats so often, with so many iterations of the loop at a place of the
        program's body; the simulation continues after them."""


def latency_ns(
    program: Program,
    observer: Observer | None = None,
    price: Callable[[Instruction, CoreSpec], Cost] = cost,
    instance: Instance | None = None,
) -> float | None:
    """Time from the start of a legal program to the end of its last instruction; None if the simulation exceeds its
    step limit. `price` replaces the documented costs, to ask what another cost would change. Without an instance, the
    smallest one that has the program's ranks."""
    end = _Timeline(program, observer, price, instance or instance_for(program.core, program.ranks)).run()
    return None if end is None else end / PS


@dataclass(frozen=True, slots=True)
class _Task:
    """The timing of an instruction, in ps. `width` is the share of the DMA engines of a transfer, 0 for others. `ports`
    has the numbers of the shared ports that it uses. `waits` has an engine, a base count, and (loop depth, coefficient)
    pairs per wait."""

    instruction: Instruction
    start: int
    takes: int
    width: int
    ports: tuple[int, ...]
    waits: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, instruction: Instruction, core: CoreSpec, priced: Cost, ranks: int, instance: Instance) -> "_Task":
        takes, start, width = priced.ns, priced.start_ns, 0.0
        if instruction.engine in DMA_QUEUES:
            width = share_of_dma(instruction, core)
        elif instruction.engine is Engine.COLLECTIVE and ranks > 1 and takes:
            over_links = exchange(instruction, ranks, instance)
            width = share_of_dma(instruction, core) * takes / max(takes, over_links.takes)
            takes, start = max(takes, over_links.takes), max(start, over_links.start)
        return cls(
            instruction,
            round(start * PS),
            round(takes * PS),
            max(round(width * UNITS), 1) if width else 0,
            tuple(_ports(instruction, core)),
            tuple((_NUMBER[wait.engine], wait.done.base, wait.done.terms) for wait in instruction.waits),
        )


_SBUF_PORT, _PSUM_PORT = 0, 1


def _ports(instruction: Instruction, core: CoreSpec) -> Iterator[int]:
    """The shared ports that an instruction occupies: of vector and GpSimd to SBUF, of vector and scalar to PSUM."""
    memories = {place.memory for place in instruction.places.values() if isinstance(place, Tile)}
    if (
        core.vector_gpsimd_share_sbuf_port
        and instruction.engine in (Engine.VECTOR, Engine.GPSIMD)
        and Memory.SBUF in memories
    ):
        yield _SBUF_PORT
    if (
        core.vector_scalar_share_psum_port
        and instruction.engine in (Engine.VECTOR, Engine.SCALAR)
        and Memory.PSUM in memories
    ):
        yield _PSUM_PORT


class _Stream:
    """The task sequence of one engine: the next task, the counts of other engines that it waits for, and the indices of
    its loops."""

    def __init__(self, steps: Sequence[tuple[int, Step]], tasks: dict[int, _Task]) -> None:
        self._tasks = tasks
        self._remaining = self._walk(steps)
        self.place = _FINISHED  # the step of the program's body that contains the task
        self.indices: list[int] = []
        self.task: _Task | None = None
        self.needs: tuple[tuple[int, int], ...] = ()
        self.advance()

    def advance(self) -> None:
        self.task = next(self._remaining, None)
        self._update_waits()

    def skip(self, iterations: int) -> None:
        """Skip iterations of the current outermost loop."""
        self.indices[0] += iterations
        self._update_waits()

    def _update_waits(self) -> None:
        indices, waits = self.indices, self.task.waits if self.task else ()
        self.needs = tuple(
            [
                (engine, base + sum([indices[depth] * factor for depth, factor in terms]) if terms else base)
                for engine, base, terms in waits
            ]
        )

    def _walk(self, steps: Sequence[tuple[int, Step]]) -> Iterator[_Task]:
        for place, step in steps:
            self.place = place
            yield from self._through((step,), 0)
        self.place = _FINISHED

    def _through(self, body: Sequence[Step], depth: int) -> Iterator[_Task]:
        for step in body:
            if not isinstance(step, Loop):
                yield self._tasks[id(step)]
                continue
            self.indices.append(0)
            while self.indices[depth] < step.count:
                yield from self._through(step.body, depth + 1)
                self.indices[depth] += 1
            self.indices.pop()


class _Steady:
    """Steady-state detection for an outermost loop.

    The state of the engines relative to an iteration (completed instructions, remaining times) determines the future.
    If a state recurs, the iterations between repeat exactly, and the simulation skips as many repetitions as are
    certain.
    """

    def __init__(self, place: int, loop: Loop) -> None:
        counts = counted(loop.body)
        self.place, self.count = place, loop.count
        self.by_iteration = [counts.get(engine, 0) for engine in _ENGINES]
        self.inside = [engine for engine, count in enumerate(self.by_iteration) if count]
        # True if each wait refers to a fixed number of iterations ago, or to a fixed instruction, which has completed
        # by the second iteration. Only then do equal relative states have equal futures.
        self._is_regular = all(
            dict(wait.done.terms).get(0, 0) in (0, counts.get(wait.engine, 0))
            for instruction in instructions(loop.body)
            for wait in instruction.waits
        )
        self._seen: dict[object, tuple[int, int]] = {}

    def first_seen(self, state: object, iteration: int, now: int) -> tuple[int, int]:
        """The iteration and the time at which a state first occurred."""
        return self._seen.setdefault(state, (iteration, now))

    def repeatable(self, streams: Sequence[_Stream], done: Sequence[int]) -> int:
        """The number of further iterations that certainly repeat: no engine leaves the loop during them, and none of
        them completes a wait of an engine outside of the loop."""
        if not self._is_regular or any(streams[engine].place != self.place for engine in self.inside):
            return 0
        remaining = [self.count - 1 - streams[engine].indices[0] for engine in self.inside]
        before_release = [
            (count - done[engine] - 1) // self.by_iteration[engine]
            for stream, by_iteration in zip(streams, self.by_iteration, strict=True)
            if not by_iteration
            for engine, count in stream.needs
            if self.by_iteration[engine] and done[engine] < count
        ]
        return min(*remaining, *before_release, self.count)


class _Timeline:
    """A discrete-event simulation of one program; times are in ps."""

    def __init__(
        self,
        program: Program,
        observer: Observer | None = None,
        price: Callable[[Instruction, CoreSpec], Cost] = cost,
        instance: Instance | None = None,
    ) -> None:
        core = CORES[program.core]
        instance = instance or instance_for(program.core, program.ranks)
        tasks = {
            id(instruction): _Task.of(instruction, core, price(instruction, core), program.ranks, instance)
            for instruction in instructions(program.body)
        }
        self._observer = observer
        self._loops = {
            place: _Steady(place, step)
            for place, step in enumerate(program.body)
            if isinstance(step, Loop) and counted(step.body)
        }
        self._streams = [
            _Stream(
                [(place, own_step) for place, step in enumerate(program.body) for own_step in only((step,), engine)],
                tasks,
            )
            for engine in _ENGINES
        ]
        self._done = [0] * len(_ENGINES)
        self._waiting: list[set[int]] = [set() for _ in _ENGINES]  # engines that wait for each engine
        # The times at which busy engines complete an instruction, or begin a transfer.
        self._ends: list[tuple[int, int]] = []
        self._began = [0] * len(_ENGINES)
        self._starting: set[int] = set()  # engines that are starting a DMA
        self._ports = [0, 0]  # until when each shared port is used
        self._dma = DmaEngines()
        self._now = 0

    def run(self) -> int | None:
        self._start(range(len(_ENGINES)))
        for _ in range(_MOST_STEPS):
            own, transferred = self._ends[0][0] if self._ends else None, self._dma.next
            now = transferred if own is None or (transferred is not None and transferred < own) else own
            if now is None:
                return self._now
            self._now = now
            completed, iterated = self._complete()
            self._start(sorted(completed.union(*[self._release(engine) for engine in completed])))
            for loop in iterated:
                self._skip_repetitions(loop)
        return None

    def _complete(self) -> tuple[set[int], list[_Steady]]:
        """Complete the instructions that end now; returns their engines, and the loops whose iteration ends."""
        completed = set(self._dma.end(self._now)) if self._dma.next == self._now else set[int]()
        while self._ends and self._ends[0][0] == self._now:
            _, engine = heappop(self._ends)
            if engine in self._starting and (task := self._streams[engine].task) and task.takes:
                self._starting.discard(engine)
                self._dma.begin(engine, self._now, task.takes, task.width)
            else:
                self._starting.discard(engine)
                completed.add(engine)
        iterated = [loop for engine in sorted(completed) if (loop := self._completed(engine))]
        return completed, iterated

    def _completed(self, engine: int) -> _Steady | None:
        """Complete an engine's instruction; returns the loop whose first engine ends an iteration by it."""
        stream = self._streams[engine]
        self._done[engine] += 1
        if self._observer and stream.task:
            self._observer.executed(stream.task.instruction, stream.indices, self._began[engine], self._now)
        place, indices = stream.place, stream.indices
        iteration = indices[0] if indices else _FINISHED
        stream.advance()
        ends_iteration = indices and stream.place == place and indices[0] != iteration
        return self._loops[place] if ends_iteration and self._loops[place].inside[0] == engine else None

    def _release(self, engine: int) -> set[int]:
        """Release the engines that wait for an engine."""
        if freed := self._waiting[engine]:
            self._waiting[engine] = set()
        return freed

    def _start(self, engines: Iterable[int]) -> None:
        """Start the next instructions of engines whose waits are satisfied. Of engines that want a port at the same
        time, the first gets it."""
        for engine in engines:
            stream = self._streams[engine]
            for awaited, count in stream.needs:
                if self._done[awaited] < count:
                    self._waiting[awaited].add(engine)
                    break
            else:
                if stream.task is not None:
                    self._began[engine] = self._now
                    heappush(self._ends, (self._until(engine, stream.task), engine))

    def _until(self, engine: int, task: _Task) -> int:
        """The time at which an instruction ends, or a transfer begins to move bytes."""
        if task.width:
            self._starting.add(engine)
            return self._now + task.start
        begin = max(self._now, *(self._ports[port] for port in task.ports)) if task.ports else self._now
        self._began[engine] = begin
        end = begin + task.start + task.takes
        for port in task.ports:
            self._ports[port] = end
        return end

    def _skip_repetitions(self, loop: _Steady) -> None:
        """Skip the iterations that repeat a known interval."""
        iteration = self._streams[loop.inside[0]].indices[0]
        state = (
            tuple(
                done - iteration * by_iteration
                for done, by_iteration in zip(self._done, loop.by_iteration, strict=True)
            ),
            tuple(sorted((end - self._now, engine) for end, engine in self._ends)),
            tuple(max(until - self._now, 0) for until in self._ports),
            self._dma.state(self._now),
        )
        first_iteration, first_time = loop.first_seen(state, iteration, self._now)
        repetitions = (
            loop.repeatable(self._streams, self._done) // (iteration - first_iteration)
            if first_iteration < iteration
            else 0
        )
        if repetitions <= 0:
            return
        iterations, elapsed = repetitions * (iteration - first_iteration), repetitions * (self._now - first_time)
        if self._observer:
            self._observer.skipped(loop.place, first_time, self._now, repetitions, iterations)
        self._now += elapsed
        self._dma.shift(elapsed)
        self._ends = [(end + elapsed, engine) for end, engine in self._ends]
        self._ports = [until + elapsed for until in self._ports]
        self._began = [began + elapsed for began in self._began]
        for engine in loop.inside:
            self._done[engine] += iterations * loop.by_iteration[engine]
            self._streams[engine].skip(iterations)
