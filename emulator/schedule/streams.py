"""Which instruction of an engine has a number, where the number is affine in the indices of other loops.

The answer may differ from turn to turn: in the first turn of a loop, what was done a turn ago was done before the loop.
Turns are taken in boxes, from one to another of each loop around.
"""

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.program import Loop, Step, counted
from nxpipe.emulator.numerics import Array


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
