"""Software pipelining: the first part of a loop's next iteration runs beside the second part of the current one.

Each engine executes its instructions in the order of the text. In the order in which a kernel is written, an engine
that waits for another one within an iteration cannot begin the next iteration meanwhile: the tensor engine, for
instance, multiplies queries by keys, waits for the softmax, and multiplies the probabilities by values. A loop over n
iterations of A, then B, becomes

    A(0);  n - 1 iterations of A(i + 1), then B(i);  B(n - 1)

A(i + 1) then precedes B(i) in the order of the text, so that no dependence from B(i) to A(i + 1) may exist: they access
different bytes, or only read. Tiles that A fills and B reads rotate over two buffers. The cut between A and B is the
one whose simulated timeline is the shortest, if any gains at all. The result has the same instructions, each executed
with the same operands as before.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any, Final

from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.isa.affine import Affine, index, rotating_offset
from nxpipe.emulator.isa.operands import Far, Place, Tile, extent
from nxpipe.emulator.isa.program import Loop, Program, Step, within
from nxpipe.emulator.lower.kernel import Allocation
from nxpipe.emulator.lower.kernel_cost import expected_ns
from nxpipe.emulator.lower.records import ResidentProgram
from nxpipe.emulator.lower.sbuf_accesses import tiles_of, with_tiles
from nxpipe.emulator.schedule.timeline import latency_ns
from nxpipe.emulator.schedule.waits import insert_waits

SIMULATED: Final = 8  # iterations of a loop in the comparison of cuts
_LEAST_SHARE: Final = 0.01  # of the program's expected time that a loop must take to be considered
_LEAST_GAIN: Final = 0.03
_LEAST_COUNT: Final = 3
_MOST_EXECUTED: Final = 4000  # instructions of a simulation


def pipeline_loops(resident: ResidentProgram) -> ResidentProgram:
    """Pipeline the loops of kernels, innermost first, where that is faster."""
    pipelining = _Pipelining(resident)
    body = tuple(pipelining.steps(resident.body, ()))
    if not pipelining.cuts:
        return resident
    emitted = replace(resident.emitted, allocations=pipelining.allocations)
    return replace(resident, emitted=emitted, body=body)


def simulated_ns(part: Program, counts: tuple[int, ...], allocations: Mapping[int, Allocation]) -> float:
    """The simulated time of a part of a program, within loops of these counts, with every tile at an address of its
    own."""
    moves, address = {}, 1 << 24
    for number in sorted(_allocations_of(part.body)):
        if number in allocations:
            moves[number] = Affine(address - allocations[number].base)
            address += allocations[number].nbytes
    body = tuple(with_offsets(step, moves) for step in part.body)
    for _ in counts:
        body = (Loop(1, body),)
    return latency_ns(insert_waits(replace(part, body=body))) or float("inf")


def sampled(loop: Loop) -> Loop | None:
    """A loop with as few iterations as its steady state needs; None if they are too long to simulate."""
    executed = sum(prod(inside) for _, inside in within(loop.body))
    iterations = min(loop.count, SIMULATED)
    return Loop(iterations, loop.body) if executed * iterations <= _MOST_EXECUTED else None


def is_repeat(loop: Loop, depth: int, allocations: Mapping[int, Allocation]) -> bool:
    """True for the loop of a repeat, at a depth, whose body is whole kernels; they depend on one another."""
    found = (allocations.get(number) for number in _allocations_of((loop,)))
    return any(one.outer > depth for one in found if one)


class _Pipelining:
    def __init__(self, resident: ResidentProgram) -> None:
        target = resident.emitted.placed.target
        self._core, self._ranks, self._buffers = target.core, target.ranks, resident.buffers
        self.allocations = dict(resident.emitted.allocations)
        self._least_ns = _LEAST_SHARE * expected_ns(resident.body, CORES[target.core])
        self.cuts = 0

    def steps(self, body: Sequence[Step], counts: tuple[int, ...]) -> Iterator[Step]:
        """The steps with pipelined loops, innermost first."""
        for step in body:
            if not isinstance(step, Loop):
                yield step
                continue
            loop = Loop(step.count, tuple(self.steps(step.body, (*counts, step.count))))
            yield from (loop,) if is_repeat(loop, len(counts), self.allocations) else self._pipelined(loop, counts)

    def _pipelined(self, loop: Loop, counts: tuple[int, ...]) -> tuple[Step, ...]:
        short = sampled(loop)
        if loop.count < _LEAST_COUNT or len(loop.body) < 2 or short is None:
            return (loop,)
        if prod(counts) * expected_ns((loop,), CORES[self._core]) < self._least_ns:
            return (loop,)
        best_ns = self._ns((short,), counts, self.allocations) * (1 - _LEAST_GAIN)
        best: _Cut | None = None
        for position in range(1, len(loop.body)):
            cut = _Cut(loop.body[:position], loop.body[position:], counts, self.allocations)
            if cut.is_legal(loop.count):
                ns = self._ns(cut.rotated(short.count), counts, self.allocations | cut.shared)
                if ns < best_ns:
                    best, best_ns = cut, ns
        if best is None:
            return (loop,)
        self.cuts += 1
        self.allocations = {**self.allocations, **best.shared}  # `best` keeps the former ones
        return best.rotated(loop.count, self.allocations)

    def _ns(self, steps: Sequence[Step], counts: tuple[int, ...], allocations: Mapping[int, Allocation]) -> float:
        return simulated_ns(Program(self._core, self._ranks, self._buffers, tuple(steps)), counts, allocations)


@dataclass(frozen=True)
class _Cut:
    """A loop's body in two parts. `shared` are the tiles that both access, with two buffers or more."""

    first: tuple[Step, ...]
    second: tuple[Step, ...]
    counts: tuple[int, ...]  # of the loops around
    allocations: Mapping[int, Allocation]

    @property
    def depth(self) -> int:
        return len(self.counts)

    @cached_property
    def _common(self) -> set[int]:
        numbers = _allocations_of(self.first) & _allocations_of(self.second)
        return {number for number in numbers if self._is_private(number)}

    def _is_private(self, number: int) -> bool:
        """True for a tile whose content lives in one iteration of the loop."""
        one = self.allocations.get(number)
        return one is not None and one.depth > self.depth

    def _alternates(self, tile: Tile) -> bool:
        """False for a tile of both parts that rotates, but not to the next buffer with each iteration of the loop."""
        if tile.allocation not in self._common or self.allocations[tile.allocation].buffers < 2:
            return True
        return all(
            rotation.of.depth <= self.depth + 1 and dict(rotation.of.terms).get(self.depth, 0) % rotation.count == 1
            for rotation in tile.offset.rotations
        )

    @cached_property
    def shared(self) -> dict[int, Allocation]:
        return {
            number: replace(one, buffers=max(one.buffers, 2), depth=self.depth)
            for number, one in self.allocations.items()
            if number in self._common
        }

    def is_legal(self, count: int) -> bool:
        """True if the first part of an iteration may precede the second part of the iteration before."""
        if not all(map(self._alternates, _tiles_of((*self.first, *self.second)))):
            return False
        counts = (*self.counts, count)
        ahead, behind = (list(_footprints(part, counts)) for part in (self.first, self.second))
        return not any(
            not self._is_private(one.memory) and one.conflicts(other)
            for one in ahead
            for other in behind
            if one.memory == other.memory
        )

    def rotated(self, count: int, allocations: dict[int, Allocation] | None = None) -> tuple[Step, ...]:
        """The three loops. Tiles of one part alone get allocations of their own outside of the main loop, which are
        added to `allocations`, if given."""
        linear = Affine()
        for level, size in enumerate((*self.counts, count)):
            linear = linear * size + index(level)
        doubled = {
            number: rotating_offset(linear, 2, one.step)
            for number, one in self.shared.items()
            if self.allocations[number].buffers < 2
        }
        first = tuple(with_offsets(step, doubled) for step in self.first)
        second = tuple(with_offsets(step, doubled) for step in self.second)
        ahead = tuple(_later(step, self.depth, 1) for step in first)
        last = tuple(_later(step, self.depth, count - 1) for step in second)
        if allocations is not None:
            first, last = (self._apart(part, allocations) for part in (first, last))
        return Loop(1, first), Loop(count - 1, (*ahead, *second)), Loop(1, last)

    def _apart(self, steps: tuple[Step, ...], allocations: dict[int, Allocation]) -> tuple[Step, ...]:
        own = {number for number in _allocations_of(steps) if self._is_private(number)} - self._common
        numbers = {}
        for number in sorted(own):
            numbers[number] = len(allocations) + 1
            allocations[numbers[number]] = self.allocations[number]
        return tuple(_renumbered(step, numbers) for step in steps)


def with_offsets(step: Step, offsets: Mapping[int, Affine] | Mapping[int, int]) -> Step:
    """A step with offsets added to the tiles of some allocations."""
    return _changed(step, lambda tile: tile.at(tile.offset + offsets[tile.allocation]), offsets)


def _renumbered(step: Step, numbers: Mapping[int, int]) -> Step:
    return _changed(step, lambda tile: replace(tile, allocation=numbers[tile.allocation]), numbers)


def _changed(step: Step, change: Callable[[Tile], Tile], allocations: Container[int]) -> Step:
    if isinstance(step, Loop):
        return Loop(step.count, tuple(_changed(inner, change, allocations) for inner in step.body))
    tiles = {name: change(tile) for name, tile, _ in tiles_of(step) if tile.allocation in allocations}
    return with_tiles(step, tiles) if tiles else step


def _later(step: Step, depth: int, iterations: int) -> Step:
    """A step with the index of the loop at a depth increased."""
    if isinstance(step, Loop):
        return Loop(step.count, tuple(_later(inner, depth, iterations) for inner in step.body))
    changes: dict[str, Any] = {}
    for field in fields(step):
        value = getattr(step, field.name)
        if isinstance(value, Affine):
            changes[field.name] = _increased(value, depth, iterations)
        elif isinstance(value, Tile | Far):
            changes[field.name] = _place_later(value, depth, iterations)
    return step.with_fields(**changes)


def _place_later(place: Place, depth: int, iterations: int) -> Place:
    offset = _increased(place.offset, depth, iterations)
    if isinstance(place, Far) and place.rows is not None:
        rows = _place_later(place.rows, depth, iterations)
        assert isinstance(rows, Tile)
        return replace(place, offset=offset, rows=rows)
    return replace(place, offset=offset)


def _increased(value: Affine, depth: int, iterations: int) -> Affine:
    rotations = tuple(replace(rotation, of=_increased(rotation.of, depth, iterations)) for rotation in value.rotations)
    return Affine(value.base + iterations * dict(value.terms).get(depth, 0), value.terms, rotations)


def _tiles_of(steps: Sequence[Step]) -> Iterator[Tile]:
    return (tile for step, _ in within(tuple(steps)) for _, tile, _ in tiles_of(step))


def _allocations_of(steps: Sequence[Step]) -> set[int]:
    return {tile.allocation for tile in _tiles_of(steps)}


@dataclass(frozen=True)
class _Footprint:
    """What an access may touch in one iteration of a loop: bytes of some lanes, or elements of a buffer, which advance
    by `step` with each iteration. An access to rotating bytes, or by row numbers, may touch all."""

    memory: int  # of a tile the allocation; of a buffer in HBM a number below all allocations
    writes: bool
    lanes: range
    low: int
    high: int
    step: int | None

    def conflicts(self, before: "_Footprint") -> bool:
        """True if the access may touch what another touches in the iteration before, and one of them writes."""
        if not (self.writes or before.writes):
            return False
        if self.lanes.stop <= before.lanes.start or before.lanes.stop <= self.lanes.start:
            return False
        if self.step is None or self.step != before.step:
            return True
        return self.low + self.step < before.high and before.low < self.high + self.step


def _footprints(steps: Sequence[Step], counts: tuple[int, ...]) -> Iterator[_Footprint]:
    """The footprints of all accesses in a part of the body of the innermost of some loops."""
    depth = len(counts) - 1
    for step, inside in within(tuple(steps), counts):
        for writes, places in ((True, step.written()), (False, step.read())):
            for place in places:
                yield _footprint(place, writes, depth, inside)


def _footprint(place: Place, writes: bool, depth: int, counts: tuple[int, ...]) -> _Footprint:
    if isinstance(place, Far):
        memory, lanes, reach = -1 - (1 << 32) - place.buffer, range(1), extent(place.axes)
        reach = (reach[0], reach[1] + 1)
    else:
        memory, lanes, reach = place.allocation, range(place.start, place.start + place.partitions), place.reach
    inner = Affine(place.offset.base, tuple(term for term in place.offset.terms if term[0] > depth))
    low, high = inner.bounds(counts)
    indirect = isinstance(place, Far) and place.rows is not None
    fixed = None if place.offset.rotations or indirect else dict(place.offset.terms).get(depth, 0)
    return _Footprint(memory, writes, lanes, low + reach[0], high + reach[1], fixed)
