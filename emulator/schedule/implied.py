"""Waits that say nothing new: whoever is waited for, or the engine itself, has waited for the same or for more.

What an engine knows of the others after an instruction is a set of facts: that another engine has done at least so
many, an affine number, in some turns of the loops. Facts come from waits, from the instruction before on the same
engine, and from those that are waited for: each takes over what they knew. Every fact holds; that all are found is not
promised, so a wait is only left out where it is proved that the others imply it.

An instruction knows only of what comes before it in program order. So by induction in that order nobody knows less
without the waits that are left out, and all of them can go at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from typing import Final

import numpy as np

from nxpipe.emulator.isa.instruction import Engine, Instruction, Wait
from nxpipe.emulator.isa.program import Loop, Program, Step, counted
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.schedule.streams import Turns, form_of, plus, streams

_PASSES: Final = 2  # the first does not know yet what comes later in the text, of the turn before
_PIECES: Final = 8  # of the turns of one instruction, for each of which it is found whom it waits for
_ATTEMPTS: Final = 16  # at dividing turns until a fact for each is found
_AT_MOST: Final = 16  # facts about one engine
_NUMBER: Final = {engine: number for number, engine in enumerate(Engine)}


def without_implied(program: Program) -> Program:
    """The same program with fewer waits."""
    walk = _Walk(program.body)
    for _ in range(_PASSES):
        body = walk.through()
    return replace(program, body=body)


@dataclass(frozen=True, eq=False)
class _Facts:
    """Each row: that an engine has done at least so many, in these turns. What an engine knows is sorted by engine."""

    engines: Array
    forms: Array
    turns: Turns

    @staticmethod
    def of(wait: Wait, turns: Turns) -> "_Facts":
        form = form_of(wait.done, len(turns.low))
        return _Facts(np.array([_NUMBER[wait.engine]]), form[None], Turns(turns.low[None], turns.high[None]))

    def take(self, rows: Array | slice) -> "_Facts":
        return _Facts(self.engines[rows], self.forms[rows], Turns(self.turns.low[rows], self.turns.high[rows]))

    def carried(self, indices: Array, turns: Turns) -> "_Facts":
        """As seen from these turns of other loops: `indices` are the own loops' as affine numbers of theirs."""
        forms = self.forms[:, : len(indices)] @ indices
        forms[:, -1] += self.forms[:, -1]
        low, high = (np.repeat(bound[None], len(forms), 0) for bound in (turns.low, turns.high))
        least, most = turns.least(indices), turns.most(indices)
        holds = np.ones(len(forms), np.bool_)
        for loop in range(len(indices)):
            first, last = self.turns.low[:, loop], self.turns.high[:, loop]
            (others,) = indices[loop, :-1].nonzero()
            if len(others) == 1 and indices[loop, others[0]] == 1:
                other, base = others[0], indices[loop, -1]
                low[:, other] = np.maximum(low[:, other], first - base)
                high[:, other] = np.minimum(high[:, other], last - base)
            else:
                holds &= (first <= least[loop]) & (most[loop] <= last)
        return _Facts(self.engines, forms, Turns(low, high)).take(holds & (low <= high).all(1))

    def imply(self, claims: "_Facts", turns: Turns) -> Array:
        """Which claims are facts in all of these turns. Most are by one fact alone."""
        always = self.take(np.all((self.turns.low <= turns.low) & (turns.high <= self.turns.high), axis=1))
        enough = turns.least(always.forms - claims.forms[:, None]) >= 0
        implied: Array = np.any(enough & (always.engines == claims.engines[:, None]), axis=1)
        for row in np.flatnonzero(~implied):
            own = self.take(slice(*np.searchsorted(self.engines, claims.engines[row] + (0, 1))))
            implied[row] = own._imply_in_parts(claims.forms[row], turns)
        return implied

    def _imply_in_parts(self, form: Array, turns: Turns) -> bool:
        """One after the other, each fact accounts for some turns."""
        rest = [turns]
        for _ in range(_ATTEMPTS):
            while rest and rest[-1].reach(form)[1] <= 0:
                rest.pop()
            if not rest:
                return True
            here = rest.pop()
            both = Turns(np.maximum(self.turns.low, here.low), np.minimum(self.turns.high, here.high))
            enough = (both.low <= both.high).all(1) & (both.least(self.forms - form) >= 0)
            if not enough.any():
                return False
            widest = int(np.argmax(np.where(enough, (both.high - both.low + 1.0).prod(1), 0)))
            rest += here.without(Turns(both.low[widest], both.high[widest]))
        return False

    def by_engine(self) -> "_Facts":
        return self.take(np.argsort(self.engines, kind="stable"))

    def needed(self) -> "_Facts":
        """Without those that another one implies; of too many, those that hold in the most turns."""
        facts = self.take(self.turns.most(self.forms) > 0).by_engine()
        starts = [0, *(np.flatnonzero(np.diff(facts.engines)) + 1), len(facts.engines)]
        kept = np.ones(len(facts.engines), np.bool_)
        for start, end in pairwise(starts):
            if end - start > 1:
                kept[start:end] = _needed(facts.take(slice(start, end)))
        return facts.take(kept)


def _needed(facts: _Facts) -> Array:
    low, high = facts.turns.low, facts.turns.high
    inside = ((low[:, None] >= low) & (high[:, None] <= high)).all(2)
    less = Turns(low[:, None], high[:, None]).least(facts.forms - facts.forms[:, None]) >= 0
    worse = inside & less
    worse &= ~(worse.T & np.tri(len(low), dtype=np.bool_).T)  # of equal ones the first stays
    kept: Array = np.logical_not(worse.any(1))
    if kept.sum() > _AT_MOST:
        widest = np.argsort(np.where(kept, -(high - low + 1.0).prod(1), 1), kind="stable")
        kept[widest[_AT_MOST:]] = False
    return kept


def _joined(several: Sequence[_Facts]) -> _Facts:
    return _Facts(
        np.concatenate([each.engines for each in several]),
        np.concatenate([each.forms for each in several]),
        Turns(
            np.concatenate([each.turns.low for each in several]), np.concatenate([each.turns.high for each in several])
        ),
    )


class _Walk:
    """Through the text, with what each engine knows."""

    def __init__(self, body: tuple[Step, ...]) -> None:
        self._body = body
        self._depth = _depth(body)
        self._streams = streams(body, count())
        self._nothing = _Facts(
            np.zeros(0, np.int64),
            np.zeros((0, self._depth + 1), np.int64),
            Turns(*np.zeros((2, 0, self._depth), np.int64)),
        )
        self._after: dict[int, _Facts] = {}  # by the order in the text
        self._at_end: dict[tuple[int, Engine], _Facts] = {}  # of a turn of a loop

    def through(self) -> tuple[Step, ...]:
        self._order = 0
        self._now = dict.fromkeys(Engine, self._nothing)
        self._loops = 0
        return self._walk(self._body, Turns(*np.zeros((2, self._depth), np.int64)), 0)

    def _walk(self, body: Sequence[Step], turns: Turns, depth: int) -> tuple[Step, ...]:
        return tuple(
            self._loop(step, turns, depth) if isinstance(step, Loop) else self._instruction(step, turns)
            for step in body
        )

    def _loop(self, loop: Loop, outside: Turns, depth: int) -> Loop:
        number, self._loops = self._loops, self._loops + 1
        inside = Turns(outside.low, outside.high.copy())
        inside.high[depth] = loop.count - 1
        engines = counted(loop.body)
        same = np.eye(self._depth, self._depth + 1, dtype=np.int64)
        a_turn_ago, last = same[: depth + 1].copy(), same[: depth + 1].copy()
        a_turn_ago[depth, -1] = -1
        last[depth], last[depth, -1] = 0, loop.count - 1
        for engine in engines:
            self._now[engine] = self._now[engine].carried(same[:depth], inside)
            if (number, engine) in self._at_end:
                later = self._at_end[number, engine].carried(a_turn_ago, inside)
                self._now[engine] = _joined([self._now[engine], later]).needed()
        body = self._walk(loop.body, inside, depth + 1)
        for engine in engines:
            self._at_end[number, engine] = self._now[engine]
            self._now[engine] = self._now[engine].carried(last, outside)
        return Loop(loop.count, body)

    def _instruction(self, step: Instruction, turns: Turns) -> Instruction:
        known, order = self._now[step.engine], self._order
        claims = [_Facts.of(wait, turns) for wait in step.waits]
        new = [row for row, implied in enumerate(known.imply(_joined([self._nothing, *claims]), turns)) if not implied]
        gained = {row: _joined([claims[row], *self._taken_over(step.waits[row], turns)]) for row in new}
        for row in new:
            others = _joined([known, *(facts for other, facts in gained.items() if other != row)])
            if others.by_engine().imply(claims[row], turns).all():
                del gained[row]
        if gained:
            self._now[step.engine] = _joined([known, *gained.values()]).needed()
        self._after[order] = self._now[step.engine]
        self._order += 1
        return step.after(*(step.waits[row] for row in gained))

    def _taken_over(self, wait: Wait, turns: Turns) -> Iterator[_Facts]:
        """What the one that is waited for knew."""
        last = plus(form_of(wait.done, len(turns.low)), -1)
        for found in islice(self._streams[wait.engine].find(last, turns), _PIECES):
            if found.order in self._after:
                yield self._after[found.order].carried(found.indices, found.turns)


def _depth(body: Sequence[Step]) -> int:
    return max((1 + _depth(step.body) for step in body if isinstance(step, Loop)), default=0)
