"""Instruction index: the sequence number of each instruction on its engine, in both directions.

`InstructionIndex` gives an instruction its number, an affine function of the loops around it. `streams` answers the
inverse question, which instruction of an engine has a number that is affine in the indices of other loops. That answer
may differ between iterations: in the first iteration of a loop, the instruction of one iteration ago stands before the
loop. Iterations are therefore handled as boxes, a range of each loop around, and a box is split where answers differ.
"""

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.program import Loop, Step, counted
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
