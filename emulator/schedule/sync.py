"""Who waits for whom: a program written as if nothing ran beside anything, made safe to run all at once.

An engine's semaphore is the number of instructions that it has done. Within loops that number is affine in their
indices, so a wait is an affine number too, and the program stays as small as it was.

Two accesses of different engines to places that may overlap, one of which writes, keep their program order: the later
instruction waits for the last time before it that the other one was carried out. A wait never asks for more than what
comes before it in program order, so program order itself is always a way to go on, and nothing can lock up. In the end
those waits are left out that others imply.
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
from nxpipe.emulator.schedule.implied import without_implied
from nxpipe.emulator.schedule.numbering import Here, Numbering


def synchronised(program: Program) -> Program:
    """The same program with waits on its instructions."""
    everything = Numbering().walk(program.body)
    for accesses in _by_region(everything, program):
        _Region(accesses).keep_order()
    return without_implied(replace(program, body=tuple(_with_waits(program.body, iter(everything)))))


@dataclass(eq=False)
class _Access:
    here: Here
    place: Place
    writes: bool

    @cached_property
    def turn(self) -> RotatingOffset | None:
        turns = self.place.offset.turns
        return turns[0] if len(turns) == 1 else None

    @cached_property
    def counts_on(self) -> frozenset[int]:
        """In how many loops, from the outermost on, each turn takes the next place, also where an inner one begins
        anew."""
        linear, found = Affine(), set[int]()
        for depth, count in enumerate((1, *self.here.counts)):
            linear = linear * count + index(depth - 1) if depth else linear
            if self.turn and not any(factor % self.turn.count for _, factor in (linear + self.turn.of * -1).terms):
                found.add(depth)
        return frozenset(found)

    @cached_property
    def span(self) -> tuple[int, int]:
        """Where it may reach when it is the first place's turn."""
        return _span(self.place, replace(self.place.offset, turns=()), self.here.counts)

    def hull(self, program: Program) -> tuple[int, int, int, int]:
        """The lanes and bytes that it may touch, in any turn."""
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
    """Accesses to one memory, or to one buffer in HBM. What is far away in the text is looked at in bulk."""

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
        """Of each engine's accesses that share as many loops, the last one in the text stands for all of which no more
        is known than that they may overlap."""
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
    """`later` waits for the last time before it that `earlier` was carried out, where both may touch the same."""
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
    """For buffers that take turns in the common loops: how many turns ago `earlier` may have touched what `later` does,
    until all have had theirs. None where that cannot be said."""
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
    """Whether their offsets count the same thing from the same start."""
    if isinstance(one, Far) and isinstance(other, Far):
        return (one.buffer, one.dtype) == (other.buffer, other.dtype) and not one.rows and not other.rows
    return isinstance(one, Tile) and isinstance(other, Tile)


def _span(place: Place, offset: Affine, counts: Sequence[int]) -> tuple[int, int]:
    """From where to where it may reach, in bytes of a partition or in elements of a buffer."""
    low, high = offset.bounds(counts)
    if isinstance(place, Tile):
        return low + place.reach[0], high + place.reach[1]
    first, last = extent(place.axes)
    return low + first, high + last + 1


def _apart_in_turns(earlier: _Access, later: _Access, depth: int) -> bool:
    """Whether two different turns of the loop at this depth never touch the same, the loops around it being equal."""
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
    everything: Sequence[Here], program: Program
) -> Iterator[list[tuple[_Access, tuple[int, int, int, int]]]]:
    regions: dict[object, list[tuple[_Access, tuple[int, int, int, int]]]] = defaultdict(list)
    for here in everything:
        for writes, places in ((True, here.instruction.written()), (False, here.instruction.read())):
            for place in places:
                access = _Access(here, place, writes)
                regions["hbm" if isinstance(place, Far) else place.memory].append((access, access.hull(program)))
    yield from regions.values()


def _with_waits(body: Sequence[Step], everything: Iterator[Here]) -> Iterator[Step]:
    for step in body:
        if isinstance(step, Loop):
            yield Loop(step.count, tuple(_with_waits(step.body, everything)))
        else:
            waits = next(everything).waits
            yield step.after(*(Wait(engine, done) for engine in Engine for done in waits.get(engine, ())))
