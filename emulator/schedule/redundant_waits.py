"""Elimination of redundant waits: those implied by the other waits of the program.

A fact about an engine at an instruction says that another engine has completed at least so many instructions, an affine
number, in some iterations of the loops. Facts are known from an instruction's waits, from the instruction before it on
the same engine, and transitively: waiting for an instruction teaches what its engine knew by then. This is the
happens-before relation of vector clocks, computed symbolically for all iterations at once.

Soundness: every fact that is derived holds. Completeness is not claimed, so a wait is removed only where facts prove
it. All such waits can be removed together: an instruction's facts depend only on instructions before it in program
order, so that by induction in that order every engine knows as much without the removed waits as with them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from typing import Final

import numpy as np

from nxpipe.emulator.isa.instruction import Engine, Instruction, Wait
from nxpipe.emulator.isa.program import Loop, Program, Step, counted
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.schedule.instruction_index import Iterations, form_of, plus, streams

_PASSES: Final = 2  # the first does not know yet what later text contributes from the iteration before
_PIECES: Final = 8  # boxes of one instruction's iterations in which the instruction that it waits for is looked up
_ATTEMPTS: Final = 16  # splits of a box until one fact proves each part
_AT_MOST: Final = 16  # facts kept about one engine; more are found rarely and cost quadratic time
_NUMBER: Final = {engine: number for number, engine in enumerate(Engine)}


def eliminate_redundant_waits(program: Program) -> Program:
    """The same program without the waits that others imply."""
    walk = _Walk(program.body)
    for _ in range(_PASSES):
        body = walk.through()
    return replace(program, body=body)


@dataclass(frozen=True, eq=False)
class _Facts:
    """Each row: an engine has completed at least so many instructions, in a box of iterations; sorted by engine."""

    engines: Array
    forms: Array
    box: Iterations

    @staticmethod
    def of(wait: Wait, box: Iterations) -> "_Facts":
        form = form_of(wait.done, len(box.low))
        return _Facts(np.array([_NUMBER[wait.engine]]), form[None], Iterations(box.low[None], box.high[None]))

    def take(self, rows: Array | slice) -> "_Facts":
        return _Facts(self.engines[rows], self.forms[rows], Iterations(self.box.low[rows], self.box.high[rows]))

    def carried(self, indices: Array, box: Iterations) -> "_Facts":
        """The facts as seen from iterations of other loops; `indices` are the own loops' indices as affine numbers of
        those. Facts that do not hold in all these iterations are dropped."""
        forms = self.forms[:, : len(indices)] @ indices
        forms[:, -1] += self.forms[:, -1]
        low, high = (np.repeat(bound[None], len(forms), 0) for bound in (box.low, box.high))
        least, most = box.least(indices), box.most(indices)
        holds = np.ones(len(forms), np.bool_)
        for loop in range(len(indices)):
            first, last = self.box.low[:, loop], self.box.high[:, loop]
            (others,) = indices[loop, :-1].nonzero()
            if len(others) == 1 and indices[loop, others[0]] == 1:
                other, base = others[0], indices[loop, -1]
                low[:, other] = np.maximum(low[:, other], first - base)
                high[:, other] = np.minimum(high[:, other], last - base)
            else:
                holds &= (first <= least[loop]) & (most[loop] <= last)
        return _Facts(self.engines, forms, Iterations(low, high)).take(holds & (low <= high).all(1))

    def imply(self, claims: "_Facts", box: Iterations) -> Array:
        """The claims that are proved in the whole box. Most are proved by a single fact."""
        always = self.take(np.all((self.box.low <= box.low) & (box.high <= self.box.high), axis=1))
        enough = box.least(always.forms - claims.forms[:, None]) >= 0
        implied: Array = np.any(enough & (always.engines == claims.engines[:, None]), axis=1)
        for row in np.flatnonzero(~implied):
            own = self.take(slice(*np.searchsorted(self.engines, claims.engines[row] + (0, 1))))
            implied[row] = own._imply_in_parts(claims.forms[row], box)
        return implied

    def _imply_in_parts(self, form: Array, box: Iterations) -> bool:
        """Cover the iterations with facts: each proves the claim in a box, and the rest is split into boxes."""
        rest = [box]
        for _ in range(_ATTEMPTS):
            while rest and rest[-1].reach(form)[1] <= 0:
                rest.pop()
            if not rest:
                return True
            here = rest.pop()
            both = Iterations(np.maximum(self.box.low, here.low), np.minimum(self.box.high, here.high))
            enough = (both.low <= both.high).all(1) & (both.least(self.forms - form) >= 0)
            if not enough.any():
                return False
            widest = int(np.argmax(np.where(enough, (both.high - both.low + 1.0).prod(1), 0)))
            rest += here.without(Iterations(both.low[widest], both.high[widest]))
        return False

    def by_engine(self) -> "_Facts":
        return self.take(np.argsort(self.engines, kind="stable"))

    def needed(self) -> "_Facts":
        """Drop facts that another one implies; of too many, keep those that hold in the most iterations."""
        facts = self.take(self.box.most(self.forms) > 0).by_engine()
        starts = [0, *(np.flatnonzero(np.diff(facts.engines)) + 1), len(facts.engines)]
        kept = np.ones(len(facts.engines), np.bool_)
        for start, end in pairwise(starts):
            if end - start > 1:
                kept[start:end] = _needed(facts.take(slice(start, end)))
        return facts.take(kept)


def _needed(facts: _Facts) -> Array:
    low, high = facts.box.low, facts.box.high
    inside = ((low[:, None] >= low) & (high[:, None] <= high)).all(2)
    less = Iterations(low[:, None], high[:, None]).least(facts.forms - facts.forms[:, None]) >= 0
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
        Iterations(
            np.concatenate([each.box.low for each in several]),
            np.concatenate([each.box.high for each in several]),
        ),
    )


class _Walk:
    """A pass over the program in program order, with the facts that each engine knows."""

    def __init__(self, body: tuple[Step, ...]) -> None:
        self._body = body
        self._depth = _depth(body)
        self._streams = streams(body, count())
        self._nothing = _Facts(
            np.zeros(0, np.int64),
            np.zeros((0, self._depth + 1), np.int64),
            Iterations(*np.zeros((2, 0, self._depth), np.int64)),
        )
        self._after: dict[int, _Facts] = {}  # by the order in the text
        self._at_end: dict[tuple[int, Engine], _Facts] = {}  # of a turn of a loop

    def through(self) -> tuple[Step, ...]:
        self._order = 0
        self._now = dict.fromkeys(Engine, self._nothing)
        self._loops = 0
        return self._walk(self._body, Iterations(*np.zeros((2, self._depth), np.int64)), 0)

    def _walk(self, body: Sequence[Step], box: Iterations, depth: int) -> tuple[Step, ...]:
        return tuple(
            self._loop(step, box, depth) if isinstance(step, Loop) else self._instruction(step, box) for step in body
        )

    def _loop(self, loop: Loop, outside: Iterations, depth: int) -> Loop:
        number, self._loops = self._loops, self._loops + 1
        inside = Iterations(outside.low, outside.high.copy())
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

    def _instruction(self, step: Instruction, box: Iterations) -> Instruction:
        known, order = self._now[step.engine], self._order
        claims = [_Facts.of(wait, box) for wait in step.waits]
        new = [row for row, implied in enumerate(known.imply(_joined([self._nothing, *claims]), box)) if not implied]
        gained = {row: _joined([claims[row], *self._taken_over(step.waits[row], box)]) for row in new}
        for row in new:
            others = _joined([known, *(facts for other, facts in gained.items() if other != row)])
            if others.by_engine().imply(claims[row], box).all():
                del gained[row]
        if gained:
            self._now[step.engine] = _joined([known, *gained.values()]).needed()
        self._after[order] = self._now[step.engine]
        self._order += 1
        return step.after(*(step.waits[row] for row in gained))

    def _taken_over(self, wait: Wait, box: Iterations) -> Iterator[_Facts]:
        """The facts that the awaited instruction's engine knew after it."""
        last = plus(form_of(wait.done, len(box.low)), -1)
        for found in islice(self._streams[wait.engine].find(last, box), _PIECES):
            if found.order in self._after:
                yield self._after[found.order].carried(found.indices, found.box)


def _depth(body: Sequence[Step]) -> int:
    return max((1 + _depth(step.body) for step in body if isinstance(step, Loop)), default=0)
