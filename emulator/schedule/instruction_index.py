"""The numbers of instructions: the how manieth of its engine each one is, in any turn of the loops around it."""

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.instructions import Engine, Instruction
from nxpipe.emulator.isa.program import Loop, Step, counted
from nxpipe.emulator.numerics import Array

_AT_MOST: Final = 4  # waits of one instruction for one engine


@dataclass(eq=False, frozen=True)
class Around:
    """A loop, and how many instructions of each engine one turn of it carries out."""

    count: int
    each: dict[Engine, int]


@dataclass(eq=False)
class Here:
    """An instruction where it stands. `done` is the number of its engine's instructions with it, `before` of every
    engine's without it, both for any turn of the loops around."""

    instruction: Instruction
    order: int
    loops: tuple[Around, ...]
    done: Affine
    before: dict[Engine, Affine]
    waits: dict[Engine, list[Affine]] = field(default_factory=lambda: defaultdict(list))
    _ago: dict[tuple[int, int], Affine] = field(default_factory=dict)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(loop.count for loop in self.loops)

    def done_ago(self, common: int, turns: int) -> Affine:
        """Its number so many turns ago of the last of the first `common` loops, at the end of all loops inside."""
        if (common, turns) not in self._ago:
            done = self.done
            for depth in range(common, len(self.loops)):
                done = _at_last(done, depth, self.loops[depth].count)
            each = self.loops[common - 1].each[self.instruction.engine] if turns else 0
            self._ago[common, turns] = done + -turns * each
        return self._ago[common, turns]

    def wait(self, engine: Engine, done: Affine) -> None:
        """Of two waits for an engine the one that asks for more is enough. Everything before is enough for any."""
        if (
            done in self.waits[engine]
            or done.bounds(self.counts)[1] < 1
            or any(self._covers(known, done) for known in self.waits[engine])
        ):
            return
        kept = [known for known in self.waits[engine] if not self._covers(done, known)]
        self.waits[engine] = [*kept, done]
        if len(self.waits[engine]) > _AT_MOST or not self._covers(self.before[engine], done):
            self.waits[engine] = [self.before[engine]]

    def _covers(self, more: Affine, less: Affine) -> bool:
        if more.terms == less.terms:
            return more.base >= less.base
        return (more + less * -1).bounds(self.counts)[0] >= 0


class Numbering:
    """Gives every instruction its number, in the order of the text."""

    def __init__(self) -> None:
        self._totals: dict[Engine, Affine] = defaultdict(Affine)
        self._found: list[Here] = []

    def walk(self, body: Sequence[Step], loops: tuple[Around, ...] = ()) -> list[Here]:
        for step in body:
            if isinstance(step, Loop):
                self._walk_loop(step, loops)
                continue
            before = defaultdict(Affine, self._totals)
            self._totals[step.engine] += 1
            self._found.append(Here(step, len(self._found), loops, self._totals[step.engine], before))
        return self._found

    def _walk_loop(self, loop: Loop, loops: tuple[Around, ...]) -> None:
        before, each = dict(self._totals), counted(loop.body)
        for engine, count in each.items():
            self._totals[engine] += index(len(loops)) * count
        self.walk(loop.body, (*loops, Around(loop.count, each)))
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
class Turns:
    """Of each loop around, from which turn to which: one box, or a row for each of several."""

    low: Array
    high: Array

    def least(self, forms: Array) -> Array:
        """Of affine numbers in these turns, row by row."""
        factors = forms[..., :-1]
        lowest: Array = np.minimum(factors * self.low, factors * self.high).sum(-1) + forms[..., -1]
        return lowest

    def most(self, forms: Array) -> Array:
        return -self.least(-forms)

    def reach(self, form: Array) -> tuple[int, int]:
        """The least and the most of one number; faster than for many."""
        *factors, base = form.tolist()
        ends = [(a * b, a * c) for a, b, c in zip(factors, self.low.tolist(), self.high.tolist(), strict=True) if a]
        return base + sum(map(min, ends)), base + sum(map(max, ends))

    def within(self, loop: int, low: int, high: int) -> "Turns":
        """Only these of one loop's."""
        lows, highs = self.low.copy(), self.high.copy()
        lows[loop], highs[loop] = max(lows[loop], low), min(highs[loop], high)
        return Turns(lows, highs)

    def without(self, other: "Turns") -> Iterator["Turns"]:
        """In boxes that do not meet; the other one lies inside."""
        rest = self
        ends = zip(*(each.tolist() for each in (self.low, other.low, other.high, self.high)), strict=True)
        for loop, (low, first, last, high) in enumerate(ends):
            if low < first:
                yield rest.within(loop, low, first - 1)
            if last < high:
                yield rest.within(loop, last + 1, high)
            rest = rest.within(loop, first, last)

    def divided(self, form: Array, border: int) -> tuple["Turns", "Turns"] | None:
        """In two along one loop, so that in one part a number that reaches across the border does not."""
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
    """What one engine does, in a body: each item with how many come before it."""

    starts: tuple[int, ...]
    items: tuple["_Leaf | _Inner", ...]

    def find(self, number: Array, turns: Turns, indices: tuple[Array, ...] = ()) -> Iterator["Found"]:
        """Which instruction has this number, counted from 0, in some turns after the other."""
        least, most = turns.reach(number)
        at = bisect(self.starts, most) - 1
        if at < 0:
            return
        if least < self.starts[at]:
            for part in turns.divided(number, self.starts[at]) or ():
                yield from self.find(number, part, indices)
            return
        item, inside = self.items[at], plus(number, -self.starts[at])
        if isinstance(item, _Leaf):
            yield Found(item.order, np.array(indices).reshape(len(indices), len(number)), turns)
        else:
            yield from item.find(inside, turns, indices)


@dataclass(frozen=True, eq=False)
class _Inner:
    each: int
    body: Stream

    def find(self, number: Array, turns: Turns, indices: tuple[Array, ...]) -> Iterator["Found"]:
        index = -((self.each - 2 * number) // (2 * self.each))  # to the nearest
        index[-1] = 0
        inside = number - index * self.each
        least, most = turns.reach(inside)
        last = most // self.each
        if least < last * self.each:
            for part in turns.divided(inside, last * self.each) or ():
                yield from self.find(number, part, indices)
            return
        yield from self.body.find(plus(inside, -last * self.each), turns, (*indices, plus(index, last)))


@dataclass(frozen=True, eq=False)
class Found:
    """An instruction, with the turns of its loops as affine numbers of other loops in some of their turns."""

    order: int
    indices: Array
    turns: Turns


def streams(body: Sequence[Step], order: Iterator[int]) -> dict[Engine, Stream]:
    """What each engine does of it."""
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
    """A row: the coefficient of each loop's index, and the base."""
    assert not number.turns, "only places take turns"
    form = np.zeros(depth + 1, np.int64)
    for loop, factor in number.terms:
        form[loop] = factor
    form[-1] = number.base
    return form


def plus(form: Array, number: int) -> Array:
    more = form.copy()
    more[-1] += number
    return more
