"""Wait insertion: dependence analysis of a program in program order, and the semaphore waits that keep its order.

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

import numpy as np

from nxpipe.emulator.isa.affine import Affine, RotatingOffset, index
from nxpipe.emulator.isa.instruction import Engine, Wait
from nxpipe.emulator.isa.operands import Far, Place, Tile, extent
from nxpipe.emulator.isa.program import Loop, Program, Step
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.schedule.instruction_index import IndexedInstruction, InstructionIndex


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
        for depth, count in enumerate((1, *self.here.counts)):
            linear = linear * count + index(depth - 1) if depth else linear
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
