"""Wait insertion by dependence analysis, and elimination of the waits that others imply.

Engines run concurrently, each in its own order. An engine's semaphore counts the instructions that it has completed.
Within loops that count is affine in the loop indices, so that a wait is an affine number too, and the program does not
grow with the number of iterations.

Two accesses of different engines depend on each other if their places may overlap and one of them writes. The later
instruction then waits for the last time before it that the earlier one ran. Invariant: a wait never asks for more than
what precedes it in program order. Program order is therefore always a possible execution, and no program deadlocks.

The analysis may overestimate overlap, never underestimate it. Where the last conflicting iteration cannot be stated as
an affine number, the wait asks for a later one that can. Waits that others imply are removed by `redundant_waits`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice, pairwise
from typing import Final

import numpy as np

from nxpipe.emulator.isa.affine import Affine, RotatingOffset, index
from nxpipe.emulator.isa.instruction import Engine, Instruction, Wait
from nxpipe.emulator.isa.operands import Far, Place, Tile, extent
from nxpipe.emulator.isa.program import Loop, Program, Step, counted
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.schedule.timeline import IndexedInstruction, InstructionIndex, Iterations, form_of, plus, streams


def insert_waits(program: Program) -> Program:
    """The same program with the waits of all dependences; many of them are redundant."""
    everything = InstructionIndex().walk(program.body)
    for accesses in _by_region(everything, program):
        _Region(accesses).keep_order()
    return replace(program, body=tuple(_with_waits(program.body, iter(everything))))


@dataclass(eq=False)
class _Access:
    """An instruction's read or write of one place."""

    here: IndexedInstruction
    place: Place
    writes: bool

    @cached_property
    def turn(self) -> RotatingOffset | None:
        turns = self.place.offset.turns
        return turns[0] if len(turns) == 1 else None

    @cached_property
    def counts_on(self) -> frozenset[int]:
        """Depths of loops at which each iteration uses the next buffer of the tile, also when inner loops restart."""
        linear, found = Affine(), set[int]()
        for depth, size in enumerate((1, *self.here.counts)):
            linear = linear * size + index(depth - 1) if depth else linear
            if self.turn and not any(factor % self.turn.count for _, factor in (linear + self.turn.of * -1).terms):
                found.add(depth)
        return frozenset(found)

    @cached_property
    def span(self) -> tuple[int, int]:
        """The bytes that it may touch while the first buffer of the tile is used."""
        return _span(self.place, replace(self.place.offset, turns=()), self.here.counts)

    def hull(self, program: Program) -> tuple[int, int, int, int]:
        """The partitions and bytes that it may touch in any iteration."""
        place, counts = self.place, self.here.counts
        low, high = place.offset.bounds(counts)
        if isinstance(place, Tile):
            reach = place.reach
            return place.start, place.start + place.partitions, low + reach[0], high + reach[1]
        address = program.buffers[place.buffer].address
        if place.rows:
            return 0, 1, address, address + program.buffers[place.buffer].nbytes
        size = place.dtype.itemsize
        reach = extent(place.axes)
        return 0, 1, address + (low + reach[0]) * size, address + (high + reach[1] + 1) * size


class _Region:
    """All accesses to one memory.

    The number of pairs is quadratic. Candidates are found with array comparisons of bounding boxes, and pairs that
    share at most one loop, which is nearly all of a deep model, are reduced to the last access of each engine.
    """

    def __init__(self, accesses: Sequence[tuple[_Access, tuple[int, int, int, int]]]) -> None:
        self._accesses = [access for access, _ in accesses]
        self._hulls = np.array([hull for _, hull in accesses], np.int64)
        self._writes = np.array([access.writes for access in self._accesses])
        self._order = np.array([access.here.order for access in self._accesses])
        engines = list(Engine)
        self._engine = np.array([engines.index(access.here.instruction.engine) for access in self._accesses])
        # Loops by identity, so that how many two instructions share can be counted for all pairs at once.
        depth = max((len(access.here.loops) for access in self._accesses), default=0)
        self._paths = np.zeros((len(self._accesses), depth), np.int64)
        for number, access in enumerate(self._accesses):
            self._paths[number, : len(access.here.loops)] = [id(loop) for loop in access.here.loops]

    def keep_order(self) -> None:
        for number, later in enumerate(self._accesses):
            rivals = np.flatnonzero(self._rivals(number))
            if not len(rivals):
                continue
            common = self._common(number, rivals)
            for kind in (self._order[rivals] < later.here.order, self._order[rivals] >= later.here.order):
                self._far(later, rivals[kind & (common <= 1)], common[kind & (common <= 1)])
                for rival, shared in zip(rivals[kind & (common > 1)], common[kind & (common > 1)], strict=True):
                    _keep(later, self._accesses[rival], int(shared))

    def _rivals(self, number: int) -> Array:
        lane, last_lane, low, high = self._hulls[number]
        mask: Array = (self._hulls[:, 0] < last_lane) & (lane < self._hulls[:, 1])
        mask &= (self._hulls[:, 2] < high) & (low < self._hulls[:, 3])
        mask &= self._engine != self._engine[number]
        return mask if self._writes[number] else mask & self._writes

    def _common(self, number: int, rivals: Array) -> Array:
        same = (self._paths[rivals] == self._paths[number]) & (self._paths[number] != 0)
        common: Array = np.cumprod(same, axis=1).sum(axis=1)
        return common

    def _far(self, later: _Access, rivals: Array, common: Array) -> None:
        """Of each engine's accesses with as many common loops, the last in the text stands for all that are known only
        to overlap: an engine runs in order, so that its last instruction implies those before."""
        for shared in np.unique(common):
            alike = rivals[common == shared]
            plain = [each for each in alike if not shared or self._is_plain(later, self._accesses[each])]
            last: dict[int, int] = {}
            for each in sorted(plain, key=lambda each: self._order[each]):
                last[self._engine[each]] = each
            for each in sorted({*last.values(), *alike} - (set(plain) - set(last.values()))):
                _keep(later, self._accesses[each], int(shared))

    def _is_plain(self, one: _Access, other: _Access) -> bool:
        places = (one.place, other.place)
        return not any(place.offset.turns for place in places) and not all(
            place.offset.terms and place.offset.terms[0][0] == 0 for place in places
        )


def _keep(later: _Access, earlier: _Access, common: int) -> None:
    """Make `later` wait for the last time before it that `earlier` ran and may have touched the same bytes."""
    comes_first, engine = earlier.here.order < later.here.order, earlier.here.instruction.engine
    ago = _turns_ago(earlier, later, common)
    if ago is not None:
        if ago:
            later.here.wait(engine, earlier.here.done_ago(common, min(ago)))
    elif comes_first:
        later.here.wait(engine, earlier.here.done_ago(common, 0))
    else:
        level = common
        while level and _apart_in_turns(earlier, later, level - 1):
            level -= 1
        if level:
            later.here.wait(engine, earlier.here.done_ago(level, 1))


def _turns_ago(earlier: _Access, later: _Access, common: int) -> set[int] | None:
    """For tiles with several buffers: how many iterations ago `earlier` may have touched the buffer that `later`
    touches, within one rotation of the buffers. None where the two do not rotate together."""
    one, other = earlier.turn, later.turn
    if one is None or other is None or one.count != other.count or not _comparable(earlier.place, later.place):
        return None
    if common not in earlier.counts_on or common not in later.counts_on:
        return None
    (low, high), (start, end) = earlier.span, later.span
    ago = {
        (second - other.of.base - first + one.of.base) % one.count
        for first in range(one.count)
        for second in range(one.count)
        if low + one.step * first < end + other.step * second and start + other.step * second < high + one.step * first
    }
    return ago if earlier.here.order < later.here.order else {turns or one.count for turns in ago}


def _comparable(one: Place, other: Place) -> bool:
    """True if both offsets have the same unit and origin."""
    if isinstance(one, Far) and isinstance(other, Far):
        return (one.buffer, one.dtype) == (other.buffer, other.dtype) and not one.rows and not other.rows
    return isinstance(one, Tile) and isinstance(other, Tile)


def _span(place: Place, offset: Affine, counts: Sequence[int]) -> tuple[int, int]:
    """The range that it may touch, in bytes of a partition or in elements of a buffer."""
    low, high = offset.bounds(counts)
    if isinstance(place, Tile):
        return low + place.reach[0], high + place.reach[1]
    first, last = extent(place.axes)
    return low + first, high + last + 1


def _apart_in_turns(earlier: _Access, later: _Access, depth: int) -> bool:
    """True if different iterations of the loop at this depth never touch the same bytes: both places move by the same
    step, and together they are no longer than it."""
    one, other = earlier.place, later.place
    if one.offset.turns or other.offset.turns or not _comparable(one, other):
        return False
    steps = [dict(place.offset.terms) for place in (one, other)]
    if any(steps[0].get(at, 0) != steps[1].get(at, 0) for at in range(depth + 1)) or not steps[0].get(depth):
        return False
    ends = []
    for access, place in ((earlier, one), (later, other)):
        inner = Affine(place.offset.base, tuple(term for term in place.offset.terms if term[0] > depth))
        ends.append(_span(place, inner, access.here.counts))
    return max(high for _, high in ends) - min(low for low, _ in ends) <= abs(steps[0][depth])


def _by_region(
    everything: Sequence[IndexedInstruction], program: Program
) -> Iterator[list[tuple[_Access, tuple[int, int, int, int]]]]:
    regions: dict[object, list[tuple[_Access, tuple[int, int, int, int]]]] = defaultdict(list)
    for here in everything:
        for writes, places in ((True, here.instruction.written()), (False, here.instruction.read())):
            for place in places:
                access = _Access(here, place, writes)
                regions["hbm" if isinstance(place, Far) else place.memory].append((access, access.hull(program)))
    yield from regions.values()


def _with_waits(body: Sequence[Step], everything: Iterator[IndexedInstruction]) -> Iterator[Step]:
    for step in body:
        if isinstance(step, Loop):
            yield Loop(step.count, tuple(_with_waits(step.body, everything)))
        else:
            waits = next(everything).waits
            yield step.after(*(Wait(engine, done) for engine in Engine for done in waits.get(engine, ())))


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
