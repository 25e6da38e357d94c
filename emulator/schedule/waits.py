"""Insertion of semaphore waits by dependence analysis, and elimination of redundant waits.

Engines run concurrently, each in program order. An engine's semaphore counts its completed instructions. Within loops
this count is affine in the loop indices. A wait is therefore an affine number too, and programs do not grow with the
number of iterations.

Two accesses of different engines are dependent if their places may overlap and one of them writes. The later
instruction then waits for the last execution of the earlier one before it. Invariant: a wait never exceeds the count of
instructions that precede it in program order. Program order is therefore always a possible execution, and no program
deadlocks.

The analysis may overestimate overlap, but never underestimates it. If the last conflicting iteration has no affine
number, the wait is for a later execution that has one. `insert_waits` adds the waits of all dependences;
`eliminate_redundant_waits` removes those that others imply.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
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
    """Add the waits of all dependences to a program; many of them are redundant."""
    instructions = InstructionIndex().walk(program.body)
    for accesses in _by_region(instructions, program):
        _Region(accesses).add_waits()
    return replace(program, body=tuple(_with_waits(program.body, iter(instructions))))


@dataclass(eq=False)
class _Access:
    """A read or write of one place by an instruction."""

    indexed: IndexedInstruction
    place: Place
    writes: bool

    @cached_property
    def rotation(self) -> RotatingOffset | None:
        """The rotation of a tile over its buffers, if there is exactly one."""
        rotations = self.place.offset.rotations
        return rotations[0] if len(rotations) == 1 else None

    @cached_property
    def rotating_depths(self) -> frozenset[int]:
        """The loop depths at which consecutive iterations, including those of inner loops, use consecutive buffers.

        The rotation's number must agree with the linear iteration number modulo the number of buffers."""
        return _rotating_depths(self.rotation, self.indexed.counts) if self.rotation else frozenset()

    @cached_property
    def span(self) -> tuple[int, int]:
        """The range of bytes or elements that it may access in the tile's first buffer."""
        return _span(self.place, replace(self.place.offset, rotations=()), self.indexed.counts)

    def hull(self, program: Program) -> tuple[int, int, int, int]:
        """The bounding box, in partitions and bytes, of its accesses in all iterations."""
        place, counts = self.place, self.indexed.counts
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


@lru_cache(maxsize=4096)
def _rotating_depths(rotation: RotatingOffset, counts: tuple[int, ...]) -> frozenset[int]:
    linear, depths = Affine(), set[int]()
    for depth, size in enumerate((1, *counts)):
        linear = linear * size + index(depth - 1) if depth else linear
        if not any(factor % rotation.count for _, factor in (linear + rotation.of * -1).terms):
            depths.add(depth)
    return frozenset(depths)


_MOST_PAIRS: Final = 1 << 18  # pairs of accesses that are compared at once


class _Region:
    """All accesses to one memory.

    The number of pairs is quadratic. Candidates are therefore found by array comparisons of bounding boxes, and pairs
    that share at most one loop, nearly all pairs of a deep model, are reduced to the last access of each engine.
    """

    def __init__(self, accesses: Sequence[tuple[_Access, tuple[int, int, int, int]]]) -> None:
        self._accesses = [access for access, _ in accesses]
        self._hulls = np.array([hull for _, hull in accesses], np.int64)
        self._writes = np.array([access.writes for access in self._accesses])
        self._order = np.array([access.indexed.order for access in self._accesses])
        numbers = {engine: number for number, engine in enumerate(Engine)}
        self._engine = np.array([numbers[access.indexed.instruction.engine] for access in self._accesses])
        offsets = [access.place.offset for access in self._accesses]
        self._rotates = np.array([bool(offset.rotations) for offset in offsets])
        self._moves = np.array([bool(offset.terms) and offset.terms[0][0] == 0 for offset in offsets])
        # The identities of each access's loops: the number of common loops is then computed for all pairs at once.
        depth = max((len(access.indexed.loops) for access in self._accesses), default=0)
        self._paths = np.zeros((len(self._accesses), depth), np.int64)
        for number, access in enumerate(self._accesses):
            self._paths[number, : len(access.indexed.loops)] = [id(loop) for loop in access.indexed.loops]

    def add_waits(self) -> None:
        """Add the waits that keep the program order of dependent accesses."""
        rows = max(_MOST_PAIRS // len(self._accesses), 1)
        for first in range(0, len(self._accesses), rows):
            for later, earlier, common in self._pairs(slice(first, first + rows)):
                _add_wait(self._accesses[later], self._accesses[earlier], common)

    def _pairs(self, rows: slice) -> Iterator[tuple[int, int, int]]:
        """The pairs of an access in these rows and an access that it waits for, with the number of their common loops:
        by access, first those that come before it in the text, by common loops and in the order of the text."""
        later, earlier = np.nonzero(self._conflicts(rows))
        later += rows.start
        same = (self._paths[earlier] == self._paths[later]) & (self._paths[later] != 0)
        common: Array = np.logical_and.accumulate(same, axis=1).sum(axis=1)
        follows, few = self._order[earlier] >= self._order[later], np.minimum(common, 2)
        chosen = np.lexsort((earlier, few, follows, later))
        # Of those of which only the overlap is known, the last one of each engine.
        overlap = (common == 0) | ((common == 1) & self._only_overlap_known(later, earlier))
        group = ((later * 2 + follows) * 2 + few) * len(Engine) + self._engine[earlier]
        by_group = np.flatnonzero(overlap)[np.lexsort((earlier[overlap], group[overlap]))]
        kept = ~overlap
        kept[by_group[np.append(np.diff(group[by_group]) != 0, [True])[: len(by_group)]]] = True
        chosen = chosen[kept[chosen]]
        yield from zip(later[chosen].tolist(), earlier[chosen].tolist(), common[chosen].tolist(), strict=True)

    def _conflicts(self, rows: slice) -> Array:
        """For some accesses, a mask of those that may conflict: other engine, overlapping box, one of them a write."""
        lane, last_lane, low, high = (column[:, None] for column in self._hulls[rows].T)
        mask: Array = (self._hulls[:, 0] < last_lane) & (lane < self._hulls[:, 1])
        mask &= (self._hulls[:, 2] < high) & (low < self._hulls[:, 3])
        mask &= self._engine != self._engine[rows, None]
        mask &= self._writes | self._writes[rows, None]
        return mask

    def _only_overlap_known(self, later: Array, earlier: Array) -> Array:
        """A mask of pairs in whose one common loop neither rotates, and not both move."""
        known: Array = ~(self._rotates[later] | self._rotates[earlier]) & ~(self._moves[later] & self._moves[earlier])
        return known


def _add_wait(later: _Access, earlier: _Access, common: int) -> None:
    """Make `later` wait for the last execution of `earlier` before it that may have accessed the same bytes.

    - Tiles that rotate together: the number of iterations since the buffer was last used is known.
    - `earlier` comes first in the text: its last execution in the current iteration of the common loops.
    - Otherwise: its execution in the previous iteration, of the innermost common loop whose iterations may overlap."""
    comes_first, engine = earlier.indexed.order < later.indexed.order, earlier.indexed.instruction.engine
    distances = _iterations_ago(earlier, later, common)
    if distances is not None:
        if distances:
            later.indexed.wait(engine, earlier.indexed.done_ago(common, min(distances)))
    elif comes_first:
        later.indexed.wait(engine, earlier.indexed.done_ago(common, 0))
    else:
        level = common
        while level and _disjoint_between_iterations(earlier, later, level - 1):
            level -= 1
        if level:
            later.indexed.wait(engine, earlier.indexed.done_ago(level, 1))


def _iterations_ago(earlier: _Access, later: _Access, common: int) -> set[int] | None:
    """For rotating tiles: the possible numbers of iterations, within one rotation, since `earlier` accessed the buffer
    that `later` accesses. None if the two accesses do not rotate together.

    With n buffers, iteration i uses buffer i modulo n in both accesses, so that each pair of buffers with overlapping
    spans gives a distance modulo n. The caller waits for the smallest distance, the most recent conflicting execution;
    older ones have completed by then, because an engine runs in order.
    """
    rotation, other_rotation = earlier.rotation, later.rotation
    if (
        rotation is None
        or other_rotation is None
        or rotation.count != other_rotation.count
        or not _comparable(earlier.place, later.place)
    ):
        return None
    if common not in earlier.rotating_depths or common not in later.rotating_depths:
        return None
    (earlier_low, earlier_high), (later_low, later_high) = earlier.span, later.span
    distances = {
        (other_buffer - other_rotation.of.base - buffer + rotation.of.base) % rotation.count
        for buffer in range(rotation.count)
        for other_buffer in range(rotation.count)
        if earlier_low + rotation.step * buffer < later_high + other_rotation.step * other_buffer
        and later_low + other_rotation.step * other_buffer < earlier_high + rotation.step * buffer
    }
    return (
        distances
        if earlier.indexed.order < later.indexed.order
        else {distance or rotation.count for distance in distances}
    )


def _comparable(first: Place, second: Place) -> bool:
    """True if both offsets have the same unit and the same origin."""
    if isinstance(first, Far) and isinstance(second, Far):
        return (first.buffer, first.dtype) == (second.buffer, second.dtype) and not first.rows and not second.rows
    return isinstance(first, Tile) and isinstance(second, Tile)


def _span(place: Place, offset: Affine, counts: Sequence[int]) -> tuple[int, int]:
    """The range of an access: bytes of a partition, or elements of a buffer."""
    low, high = offset.bounds(counts)
    if isinstance(place, Tile):
        return low + place.reach[0], high + place.reach[1]
    first, last = extent(place.axes)
    return low + first, high + last + 1


def _disjoint_between_iterations(earlier: _Access, later: _Access, depth: int) -> bool:
    """True if different iterations of the loop at a depth never access the same bytes: both places advance by the same
    step, and their combined range within an iteration is not longer than that step."""
    earlier_place, later_place = earlier.place, later.place
    if earlier_place.offset.rotations or later_place.offset.rotations or not _comparable(earlier_place, later_place):
        return False
    steps = [dict(place.offset.terms) for place in (earlier_place, later_place)]
    if any(steps[0].get(outer, 0) != steps[1].get(outer, 0) for outer in range(depth + 1)) or not steps[0].get(depth):
        return False
    ends = []
    for access, place in ((earlier, earlier_place), (later, later_place)):
        inner = Affine(place.offset.base, tuple(term for term in place.offset.terms if term[0] > depth))
        ends.append(_span(place, inner, access.indexed.counts))
    return max(high for _, high in ends) - min(low for low, _ in ends) <= abs(steps[0][depth])


def _by_region(
    instructions: Sequence[IndexedInstruction], program: Program
) -> Iterator[list[tuple[_Access, tuple[int, int, int, int]]]]:
    regions: dict[object, list[tuple[_Access, tuple[int, int, int, int]]]] = defaultdict(list)
    for instruction in instructions:
        for writes, places in ((True, instruction.instruction.written()), (False, instruction.instruction.read())):
            for place in places:
                access = _Access(instruction, place, writes)
                regions["hbm" if isinstance(place, Far) else place.memory].append((access, access.hull(program)))
    yield from regions.values()


def _with_waits(body: Sequence[Step], instructions: Iterator[IndexedInstruction]) -> Iterator[Step]:
    for step in body:
        if isinstance(step, Loop):
            yield Loop(step.count, tuple(_with_waits(step.body, instructions)))
        else:
            waits = next(instructions).waits
            yield step.after(*(Wait(engine, done) for engine in Engine for done in waits.get(engine, ())))


# Elimination of redundant waits. A wait is redundant if the engine already knows that the count has been reached. A
# fact states that an engine has completed at least a count of instructions, in a box of iterations. An engine learns
# facts from its own waits, and from the instruction that it waited for: the facts that the other engine knew after that
# instruction hold too (transitivity of happens-before). Facts only grow along an engine's instructions, since counts
# never decrease. A wait is removed only if other waits prove it, so that the order of the program is unchanged; a
# fact that is not found costs a redundant wait, never correctness.
_PASSES: Final = 2  # the first pass lacks the facts that later text contributes through the previous iteration
_PIECES: Final = 8  # boxes of an instruction's iterations in which the awaited instruction is searched
_ATTEMPTS: Final = 16  # splits of a box in the search for facts that prove a claim in each part
_AT_MOST: Final = 16  # facts kept per engine; more are rarely useful, and cost quadratic time
_NUMBER: Final = {engine: number for number, engine in enumerate(Engine)}


def eliminate_redundant_waits(program: Program) -> Program:
    """Remove the waits of a program that other waits imply."""
    walk = _Walk(program.body)
    for _ in range(_PASSES):
        body = walk.run()
    return replace(program, body=body)


@dataclass(frozen=True, eq=False)
class _Facts:
    """Facts, one per row and sorted by engine: the engine has completed at least `forms` instructions, in a box of
    iterations."""

    engines: Array
    forms: Array
    box: Iterations

    @staticmethod
    def of(wait: Wait, box: Iterations) -> "_Facts":
        form = form_of(wait.done, len(box.low))
        return _Facts(np.array([_NUMBER[wait.engine]]), form[None], Iterations(box.low[None], box.high[None]))

    def take(self, rows: Array | slice) -> "_Facts":
        return _Facts(self.engines[rows], self.forms[rows], Iterations(self.box.low[rows], self.box.high[rows]))

    def translated(self, indices: Array, box: Iterations) -> "_Facts":
        """The facts in terms of other loops. `indices` are the indices of these facts' loops as affine numbers of the
        other loops' indices. A fact's box is translated if an index differs from another by a constant; otherwise the
        fact is dropped unless it holds in all iterations of `box`."""
        forms = self.forms[:, : len(indices)] @ indices
        forms[:, -1] += self.forms[:, -1]
        low, high = (np.repeat(bound[None], len(forms), 0) for bound in (box.low, box.high))
        least, most = box.least(indices), box.most(indices)
        holds = np.ones(len(forms), np.bool_)
        for loop in range(len(indices)):
            first, last = self.box.low[:, loop], self.box.high[:, loop]
            (sources,) = indices[loop, :-1].nonzero()
            if len(sources) == 1 and indices[loop, sources[0]] == 1:
                source, base = sources[0], indices[loop, -1]
                low[:, source] = np.maximum(low[:, source], first - base)
                high[:, source] = np.minimum(high[:, source], last - base)
            else:
                holds &= (first <= least[loop]) & (most[loop] <= last)
        return _Facts(self.engines, forms, Iterations(low, high)).take(holds & (low <= high).all(1))

    def imply(self, claims: "_Facts", box: Iterations) -> Array:
        """A mask of the claims that the facts prove in the whole box. Most are proved by a single fact."""
        everywhere = self.take(np.all((self.box.low <= box.low) & (box.high <= self.box.high), axis=1))
        proves = box.least(everywhere.forms - claims.forms[:, None]) >= 0
        implied: Array = np.any(proves & (everywhere.engines == claims.engines[:, None]), axis=1)
        for row in np.flatnonzero(~implied):
            same_engine = self.take(slice(*np.searchsorted(self.engines, claims.engines[row] + (0, 1))))
            implied[row] = same_engine._imply_in_parts(claims.forms[row], box)
        return implied

    def _imply_in_parts(self, form: Array, box: Iterations) -> bool:
        """True if several facts together prove a claim. Each proves it in a box; the remaining iterations are split
        into boxes, until none is left or the attempts are used up."""
        remaining = [box]
        for _ in range(_ATTEMPTS):
            while remaining and remaining[-1].reach(form)[1] <= 0:
                remaining.pop()
            if not remaining:
                return True
            part = remaining.pop()
            overlap = Iterations(np.maximum(self.box.low, part.low), np.minimum(self.box.high, part.high))
            proves = (overlap.low <= overlap.high).all(1) & (overlap.least(self.forms - form) >= 0)
            if not proves.any():
                return False
            widest = int(np.argmax(np.where(proves, (overlap.high - overlap.low + 1.0).prod(1), 0)))
            remaining += part.without(Iterations(overlap.low[widest], overlap.high[widest]))
        return False

    def by_engine(self) -> "_Facts":
        return self.take(np.argsort(self.engines, kind="stable"))

    def without_implied(self) -> "_Facts":
        """Drop facts that others imply. Of too many facts, keep those that hold in the most iterations."""
        facts = self.take(self.box.most(self.forms) > 0).by_engine()
        starts = [0, *(np.flatnonzero(np.diff(facts.engines)) + 1), len(facts.engines)]
        is_needed = np.ones(len(facts.engines), np.bool_)
        for start, end in pairwise(starts):
            if end - start > 1:
                is_needed[start:end] = _not_implied(facts.take(slice(start, end)))
        return facts.take(is_needed)


def _not_implied(facts: _Facts) -> Array:
    """A mask of the facts about one engine that no other fact implies (larger box, greater count)."""
    low, high = facts.box.low, facts.box.high
    contained = ((low[:, None] >= low) & (high[:, None] <= high)).all(2)
    not_greater = Iterations(low[:, None], high[:, None]).least(facts.forms - facts.forms[:, None]) >= 0
    implied = contained & not_greater
    implied &= ~(implied.T & _later(len(low)))  # the first of equal facts is kept
    is_needed: Array = np.logical_not(implied.any(1))
    if is_needed.sum() > _AT_MOST:
        widest = np.argsort(np.where(is_needed, -(high - low + 1.0).prod(1), 1), kind="stable")
        is_needed[widest[_AT_MOST:]] = False
    return is_needed


@lru_cache(maxsize=1024)
def _later(size: int) -> Array:
    """A mask of pairs of facts of which the second one is the later, or the same."""
    return np.tri(size, dtype=np.bool_).T


def _joined(parts: Sequence[_Facts]) -> _Facts:
    return _Facts(
        np.concatenate([facts.engines for facts in parts]),
        np.concatenate([facts.forms for facts in parts]),
        Iterations(
            np.concatenate([facts.box.low for facts in parts]),
            np.concatenate([facts.box.high for facts in parts]),
        ),
    )


class _Walk:
    """Passes over a program in program order, with the facts that each engine knows."""

    def __init__(self, body: tuple[Step, ...]) -> None:
        self._body = body
        self._depth = _depth(body)
        self._streams = streams(body, count())
        self._nothing = _Facts(
            np.zeros(0, np.int64),
            np.zeros((0, self._depth + 1), np.int64),
            Iterations(*np.zeros((2, 0, self._depth), np.int64)),
        )
        self._after: dict[int, _Facts] = {}  # by the instruction's order in the program text
        self._after_iteration: dict[tuple[int, Engine], _Facts] = {}  # by loop: after an iteration

    def run(self) -> tuple[Step, ...]:
        self._order = 0
        self._known = dict.fromkeys(Engine, self._nothing)
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
        identity = np.eye(self._depth, self._depth + 1, dtype=np.int64)
        previous_iteration, last = identity[: depth + 1].copy(), identity[: depth + 1].copy()
        previous_iteration[depth, -1] = -1
        last[depth], last[depth, -1] = 0, loop.count - 1
        for engine in engines:
            self._known[engine] = self._known[engine].translated(identity[:depth], inside)
            if (number, engine) in self._after_iteration:
                previous = self._after_iteration[number, engine].translated(previous_iteration, inside)
                self._known[engine] = _joined([self._known[engine], previous]).without_implied()
        body = self._walk(loop.body, inside, depth + 1)
        for engine in engines:
            self._after_iteration[number, engine] = self._known[engine]
            self._known[engine] = self._known[engine].translated(last, outside)
        return Loop(loop.count, body)

    def _instruction(self, step: Instruction, box: Iterations) -> Instruction:
        kept = self._not_known(step, box) if step.waits else ()
        self._after[self._order] = self._known[step.engine]
        self._order += 1
        return step if len(kept) == len(step.waits) else step.after(*kept)

    def _not_known(self, step: Instruction, box: Iterations) -> list[Wait]:
        """The waits that neither the engine's facts nor the instruction's other waits imply; the engine learns them."""
        known, claims = self._known[step.engine], [_Facts.of(wait, box) for wait in step.waits]
        not_implied = [row for row, implied in enumerate(known.imply(_joined(claims), box)) if not implied]
        learned = {row: _joined([claims[row], *self._inherited(step.waits[row], box)]) for row in not_implied}
        for row in not_implied if len(not_implied) > 1 else ():
            other_facts = _joined([known, *(facts for other_row, facts in learned.items() if other_row != row)])
            if other_facts.by_engine().imply(claims[row], box).all():
                del learned[row]
        if learned:
            self._known[step.engine] = _joined([known, *learned.values()]).without_implied()
        return [step.waits[row] for row in learned]

    def _inherited(self, wait: Wait, box: Iterations) -> Iterator[_Facts]:
        """The facts that the awaited engine knew after the awaited instruction."""
        last = plus(form_of(wait.done, len(box.low)), -1)
        for found in islice(self._streams[wait.engine].find(last, box), _PIECES):
            if found.order in self._after:
                yield self._after[found.order].translated(found.indices, found.box)


def _depth(body: Sequence[Step]) -> int:
    return max((1 + _depth(step.body) for step in body if isinstance(step, Loop)), default=0)
