"""Who waits for whom: a program written as if nothing ran beside anything, made safe to run all at once.

An engine's semaphore is the number of instructions that it has done. Within loops that number is affine in their
indices, so a wait is an affine number too, and the program stays as small as it was.

Two accesses of different engines to places that may overlap, one of which writes, keep their program order: the later
instruction waits for the last time before it that the other one was carried out. A wait never asks for more than what
comes before it in program order, so program order itself is always a way to go on, and nothing can lock up.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from emulator.isa.affine import Affine, Turn, index
from emulator.isa.instructions import Engine, Instruction, Wait
from emulator.isa.operands import Far, Place, Tile, extent
from emulator.isa.program import Loop, Program, Step, counted
from emulator.numerics import Array


def synchronised(program: Program) -> Program:
    """The same program with waits on its instructions."""
    everything = _Numbering().walk(program.body)
    for accesses in _by_region(everything, program):
        _Region(accesses).keep_order()
    return replace(program, body=_with_waits(program.body, iter(everything), {}))


_AT_MOST: Final = 4  # waits of one instruction for one engine


@dataclass(eq=False, frozen=True)
class _Around:
    """A loop, and how many instructions of each engine one turn of it carries out."""

    count: int
    each: dict[Engine, int]


@dataclass(eq=False)
class _Here:
    """An instruction where it stands. `done` is the number of its engine's instructions with it, `before` of every
    engine's without it, both for any turn of the loops around."""

    instruction: Instruction
    order: int
    loops: tuple[_Around, ...]
    done: Affine
    before: dict[Engine, Affine]
    waits: dict[Engine, list[Affine]] = field(default_factory=lambda: defaultdict(list))

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(loop.count for loop in self.loops)

    def wait(self, engine: Engine, done: Affine) -> None:
        """Of two waits for an engine the one that asks for more is enough. Everything before is enough for any."""
        if done.bounds(self.counts)[1] < 1 or any(self._covers(known, done) for known in self.waits[engine]):
            return
        kept = [known for known in self.waits[engine] if not self._covers(done, known)]
        self.waits[engine] = [*kept, done]
        if len(self.waits[engine]) > _AT_MOST or not self._covers(self.before[engine], done):
            self.waits[engine] = [self.before[engine]]

    def _covers(self, more: Affine, less: Affine) -> bool:
        return (more + less * -1).bounds(self.counts)[0] >= 0


class _Numbering:
    """Gives every instruction its number, in the order of the text."""

    def __init__(self) -> None:
        self._totals: dict[Engine, Affine] = defaultdict(Affine)
        self._found: list[_Here] = []

    def walk(self, body: Sequence[Step], loops: tuple[_Around, ...] = ()) -> list[_Here]:
        for step in body:
            if isinstance(step, Loop):
                self._walk_loop(step, loops)
                continue
            before = defaultdict(Affine, self._totals)
            self._totals[step.engine] += 1
            self._found.append(_Here(step, len(self._found), loops, self._totals[step.engine], before))
        return self._found

    def _walk_loop(self, loop: Loop, loops: tuple[_Around, ...]) -> None:
        before, each = dict(self._totals), counted(loop.body)
        for engine, count in each.items():
            self._totals[engine] += index(len(loops)) * count
        self.walk(loop.body, (*loops, _Around(loop.count, each)))
        for engine, count in each.items():
            self._totals[engine] = before.get(engine, Affine()) + count * loop.count


@dataclass(eq=False)
class _Access:
    here: _Here
    place: Place
    writes: bool

    @property
    def turn(self) -> Turn | None:
        turns = self.place.offset.turns
        return turns[0] if len(turns) == 1 else None

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
    comes_first = earlier.here.order < later.here.order
    apart = _turns_apart(earlier, later, common, comes_first=comes_first)
    if comes_first and not apart:
        _wait(later.here, earlier.here, common, back=0)
    elif apart:
        _wait(later.here, earlier.here, common, back=apart)
    elif not comes_first:
        level = common
        while level and _apart_in_turns(earlier, later, level - 1):
            level -= 1
        if level:
            _wait(later.here, earlier.here, level, back=1)


def _wait(later: _Here, earlier: _Here, common: int, back: int) -> None:
    """For `earlier` as it was `back` turns ago of the last of so many common loops, and at the end of all loops inside
    of those."""
    engine, done = earlier.instruction.engine, earlier.done
    for depth in range(common, len(earlier.loops)):
        done = _at_last(done, depth, earlier.loops[depth].count)
    if back:
        done = done + -back * earlier.loops[common - 1].each[engine]
    later.wait(engine, done)


def _at_last(number: Affine, depth: int, count: int) -> Affine:
    coefficient = dict(number.terms).get(depth, 0)
    return number + index(depth) * -coefficient + coefficient * (count - 1)


def _turns_apart(earlier: _Access, later: _Access, common: int, *, comes_first: bool) -> int | None:
    """For buffers that take turns in the innermost common loop: after how many turns `later` meets what `earlier` had.
    None where nothing is known."""
    one, other = earlier.turn, later.turn
    if one is None or other is None or (one.count, one.step) != (other.count, other.step):
        return None
    if not _comparable(earlier.place, later.place):
        return None
    ahead = other.of + one.of * -1
    if ahead.terms or ahead.turns or one.of.depth != common or not _within_one_step(earlier, later, one.step):
        return None
    turns = -ahead.base % one.count
    return turns if turns or comes_first else one.count


def _comparable(one: Place, other: Place) -> bool:
    """Whether their offsets count the same thing from the same start."""
    if isinstance(one, Far) and isinstance(other, Far):
        return (one.buffer, one.dtype) == (other.buffer, other.dtype) and not one.rows and not other.rows
    return isinstance(one, Tile) and isinstance(other, Tile)


def _within_one_step(earlier: _Access, later: _Access, step: int) -> bool:
    """Whether both stay inside of one buffer of those that take turns, the same one when their turn is the same."""
    spans = []
    for access in (earlier, later):
        place = access.place
        plain = replace(place.offset, turns=())
        low, high = plain.bounds(access.here.counts)
        if isinstance(place, Tile):
            reach = place.reach
        else:
            ends = extent(place.axes)
            reach = (ends[0], ends[1] + 1)
        spans.append((low + reach[0], high + reach[1]))
    return max(high for _, high in spans) - min(low for low, _ in spans) <= abs(step)


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
        low, high = inner.bounds(access.here.counts)
        reach = place.reach if isinstance(place, Tile) else (extent(place.axes)[0], extent(place.axes)[1] + 1)
        ends.append((low + reach[0], high + reach[1]))
    return max(high for _, high in ends) - min(low for low, _ in ends) <= abs(steps[0][depth])


def _by_region(
    everything: Sequence[_Here], program: Program
) -> Iterator[list[tuple[_Access, tuple[int, int, int, int]]]]:
    regions: dict[object, list[tuple[_Access, tuple[int, int, int, int]]]] = defaultdict(list)
    for here in everything:
        for writes, places in ((True, here.instruction.written()), (False, here.instruction.read())):
            for place in places:
                access = _Access(here, place, writes)
                regions["hbm" if isinstance(place, Far) else place.memory].append((access, access.hull(program)))
    yield from regions.values()


_Known = dict[tuple[Engine, Engine], tuple[Affine, ...]]  # for how many of whom somebody has waited


def _with_waits(body: Sequence[Step], everything: Iterator[_Here], known: _Known) -> tuple[Step, ...]:
    """What an engine has waited for once it need not wait for again in the same turn of the same loops."""
    steps: list[Step] = []
    for step in body:
        if isinstance(step, Loop):
            steps.append(Loop(step.count, _with_waits(step.body, everything, dict(known))))
        else:
            here = next(everything)
            steps.append(step.after(*_new(here, known)))
    return tuple(steps)


def _new(here: _Here, known: _Known) -> Iterator[Wait]:
    for engine in Engine:
        pair = (here.instruction.engine, engine)
        for done in here.waits.get(engine, ()):
            waited = known.get(pair, ())
            if not any((before + done * -1).bounds(here.counts)[0] >= 0 for before in waited):
                known[pair] = (*waited[-_AT_MOST:], done)
                yield Wait(engine, done)
