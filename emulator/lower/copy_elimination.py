"""Removal of copies inside SBUF: a reader takes its operand from where it is, a writer writes to where it belongs.

Kernels are emitted with every operand and result in HBM. Where `promote_to_sbuf` has moved a buffer to SBUF, the DMA
between the buffer and a kernel's tile moves elements within their partitions; an engine can access them in place. A DMA
costs its start, its transfer and two semaphores, so that nearly every such copy delays its kernel.

Two rewrites, with T the kernel's tile and B the promoted buffer:

- The copy B -> T is removed if nothing writes to B while T is live, and each reader of T can address the same elements
  in B.
- The copy T -> B is removed if no other instruction accesses B while T is live, and each reader and writer of T can
  address them in B.

In both cases an access pattern of T is composed with that of the copy. T's positions are digits of a mixed radix, one
digit for each axis of the copy; an axis of an access is composed if it moves a single digit, without carry. Every new
instruction is checked against the rules of the instruction set and must not cost more than the copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.constraints import InstructionContext
from nxpipe.emulator.isa.cost import cost
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.gpsimd import AffineSelect, IotaPattern
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.legality import violations
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.vector import TensorReduce
from nxpipe.emulator.lower.kernel import Allocation
from nxpipe.emulator.lower.records import ResidentProgram
from nxpipe.emulator.lower.sbuf_accesses import SbufAccesses, TileAccess, with_tiles

_BY_AXIS: Final = (AffineSelect, IotaPattern, TensorReduce)  # their results depend on which axes an operand has


def forward_copies(resident: ResidentProgram) -> ResidentProgram:
    """Remove the copies between promoted buffers and kernels' tiles whose accesses can be redirected."""
    forwarding = _Forwarding(resident)
    forwarding.run()
    return replace(resident, body=forwarding.accesses.body) if forwarding.removed else resident


class _Forwarding:
    def __init__(self, resident: ResidentProgram) -> None:
        target = resident.emitted.placed.target
        self._core, self._ranks, self._buffers = CORES[target.core], target.ranks, resident.buffers
        self._allocations = resident.emitted.allocations
        self.accesses = SbufAccesses(resident.body, self._allocations)
        self.removed = 0

    def run(self) -> None:
        for number in sorted(self._allocations):
            accesses = self.accesses.by_allocation.get(number, [])
            if not accesses or self._allocations[number].memory is not Memory.SBUF:
                continue
            writers = [access for access in accesses if access.writes]
            if all(self._from_buffer(access) for access in writers):
                self._redirect(number, writers, reading=True)
            elif stores := [access for access in accesses if not access.writes and self._to_buffer(access)]:
                self._redirect(number, stores[-1:], reading=False)

    def _from_buffer(self, access: TileAccess) -> bool:
        step = self.accesses.steps[access.position]
        return isinstance(step, DmaCopy) and isinstance(step.src, Tile) and step.src.allocation < 0

    def _to_buffer(self, access: TileAccess) -> bool:
        step = self.accesses.steps[access.position]
        return (
            isinstance(step, DmaCopy)
            and access.name == "src"
            and isinstance(step.dst, Tile)
            and step.dst.allocation < 0
        )

    def _redirect(self, number: int, copies: Sequence[TileAccess], *, reading: bool) -> None:
        """Redirect all accesses of a tile that are not the copies, and remove the copies."""
        allocation, positions = self._allocations[number], {access.position for access in copies}
        depth = self.accesses.depth(number)
        mappings = [self._mapping(access.position, allocation, depth, reading) for access in copies]
        found = [mapping for mapping in mappings if mapping]
        if len(found) < len(mappings) or _overlap(found) or self._is_disturbed(number, found, positions, reading):
            return
        changed: dict[int, dict[str, Tile]] = {}
        for access in self.accesses.by_allocation[number]:
            if access.position in positions:
                continue
            counts, step = self.accesses.counts(access.position), self.accesses.steps[access.position]
            may_split = not isinstance(step, _BY_AXIS)
            tiles = (mapping.redirected(access.tile, counts, may_split) for mapping in found)
            tile = next((tile for tile in tiles if tile), None)
            if tile is None:
                return
            changed.setdefault(access.position, {})[access.name] = tile
        steps = {position: self._changed(position, tiles) for position, tiles in changed.items()}
        if any(step is None for step in steps.values()) or self._costs_more(steps, positions):
            return
        for position, step in (*steps.items(), *((position, None) for position in positions)):
            self.accesses.replace(position, step)
        self.removed += len(positions)

    def _mapping(self, position: int, allocation: Allocation, depth: int, reading: bool) -> "_Mapping | None":
        copy = self.accesses.steps[position]
        assert isinstance(copy, DmaCopy)
        own, other = (copy.dst, copy.src) if reading else (copy.src, copy.dst)
        assert isinstance(own, Tile)
        assert isinstance(other, Tile)
        return _Mapping.of(own, other, allocation, depth, self.accesses.counts(position))

    def _is_disturbed(self, number: int, mappings: Sequence["_Mapping"], copies: set[int], reading: bool) -> bool:
        """True if an instruction accesses a promoted buffer while the tile is live, so that the order would matter."""
        first, last = self.accesses.live(number)
        return any(
            first <= access.position <= last and access.position not in copies and (access.writes or not reading)
            for mapping in mappings
            for access in self.accesses.by_allocation[mapping.buffer.allocation]
        )

    def _changed(self, position: int, tiles: dict[str, Tile]) -> Instruction | None:
        """The instruction with other tiles; None if that breaks a rule."""
        step = self.accesses.steps[position]
        assert step is not None
        new = with_tiles(step, tiles)
        context = InstructionContext(self._core, self._buffers, self._ranks, self.accesses.counts(position))
        return None if next(violations(new, context), None) else new

    def _costs_more(self, steps: dict[int, Instruction | None], copies: set[int]) -> bool:
        before = self._ns({position: self.accesses.steps[position] for position in (*steps, *copies)})
        return self._ns(steps) > before

    def _ns(self, steps: dict[int, Instruction | None]) -> float:
        total = 0.0
        for position, step in steps.items():
            assert step is not None
            price, times = cost(step, self._core), 1
            for count in self.accesses.counts(position):
                times *= count
            total += times * (price.ns + price.start_ns)
        return total


@dataclass(frozen=True)
class _Digit:
    """An axis of a copy: its size, and the distance of its elements in the tile and in the buffer."""

    size: int
    own: int
    other: int


@dataclass(frozen=True)
class _Mapping:
    """The elements of a tile in a promoted buffer. `digits` descend by their distance in the tile."""

    tile: Tile  # the copy's side in the tile
    buffer: Tile
    allocation: Allocation
    depth: int  # loops in one iteration of which the content of the tile lives
    start: int  # the first copied element of the tile
    digits: tuple[_Digit, ...]
    offset: Affine  # of the buffer's side

    @staticmethod
    def of(own: Tile, other: Tile, allocation: Allocation, depth: int, counts: tuple[int, ...]) -> "_Mapping | None":
        """The mapping of a copy; None if it converts, moves elements to other partitions, or is not one to one. Loops
        within the tile's life become axes: what they copy is in the tile at the same time."""
        size = own.dtype.itemsize
        axes = _paired(own.axes, other.axes)
        relative = _relative(own, allocation)
        if own.dtype is not other.dtype or own.partitions != other.partitions or axes is None or relative is None:
            return None
        own_terms, other_terms = dict(relative.terms), dict(other.offset.terms)
        if any(level < depth for level in own_terms) or any(
            rotation.of.depth > depth for rotation in other.offset.rotations
        ):
            return None
        for level in range(depth, len(counts)):
            axes.append(_Digit(counts[level], own_terms.get(level, 0) // size, other_terms.pop(level, 0) // size))
        digits = sorted((digit for digit in axes if digit.size > 1), key=lambda digit: -digit.own)
        reach = 1
        for digit in reversed(digits):
            if digit.own < reach:
                return None
            reach = digit.own * (digit.size - 1) + reach
        terms = tuple(sorted((level, factor) for level, factor in other_terms.items() if factor))
        offset = replace(other.offset, terms=terms)
        return _Mapping(own, other, allocation, depth, relative.base // size, tuple(digits), offset)

    @property
    def span(self) -> tuple[int, int, int, int]:
        """The partitions and elements of the tile that the copy covers."""
        reach = sum(digit.own * (digit.size - 1) for digit in self.digits)
        first = self.tile.start
        return first, first + self.tile.partitions, self.start, self.start + reach + 1

    def redirected(self, tile: Tile, counts: tuple[int, ...], may_split: bool) -> Tile | None:
        """The elements of a part of the tile in the buffer; None if no access pattern reaches them."""
        size, relative = tile.dtype.itemsize, _relative(tile, self.allocation)
        lane = tile.start - self.tile.start
        if size != self.tile.dtype.itemsize or relative is None or relative.base % size:
            return None
        if lane < 0 or lane + tile.partitions > self.tile.partitions:
            return None
        walk = _Walk.at(self.digits, relative.base // size - self.start)
        if walk is None:
            return None
        terms = dict(self.offset.terms)
        for level, factor in relative.terms:
            if level < self.depth or factor % size:
                return None
            moved = walk.move(counts[level], factor // size, may_split=False)
            if moved is None:
                return None
            terms[level] = terms.get(level, 0) + moved[0].stride * size
        axes: list[Axis] = []
        for axis in tile.axes:
            moved = walk.move(axis.size, axis.stride, may_split)
            if moved is None:
                return None
            axes += moved
        offset = Affine(
            self.offset.base + walk.offset * size,
            tuple(sorted((level, factor) for level, factor in terms.items() if factor)),
            self.offset.rotations,
        )
        merged = _merged(axes) if may_split else tuple(axes)
        return replace(
            self.buffer,
            dtype=tile.dtype,
            start=self.buffer.start + lane,
            partitions=tile.partitions,
            offset=offset,
            axes=merged,
        )


@dataclass
class _Walk:
    """The movement of an access over the digits of a mapping: `used[i]` is the greatest value of digit i so far,
    `least[i]` the least."""

    digits: Sequence[_Digit]
    used: list[int]
    least: list[int]
    offset: int  # of the first element in the buffer

    @staticmethod
    def at(digits: Sequence[_Digit], position: int) -> "_Walk | None":
        """The walk that begins at a position of the tile; None if that element is not copied."""
        values, offset = [], 0
        for digit in digits:
            value = position // digit.own
            if not 0 <= value < digit.size:
                return None
            values.append(value)
            position -= value * digit.own
            offset += value * digit.other
        return None if position else _Walk(digits, values, list(values), offset)

    def move(self, count: int, stride: int, may_split: bool) -> list[Axis] | None:
        """The axes in the buffer of `count` steps of `stride` in the tile."""
        if count == 1 or not stride:
            return [Axis(count, 0 if count > 1 else 1)]
        for number, digit in enumerate(self.digits):
            if digit.own <= abs(stride) and not stride % digit.own:
                return self._move_digit(number, count, stride // digit.own, may_split)
        return None

    def _move_digit(self, number: int, count: int, step: int, may_split: bool) -> list[Axis] | None:
        digit = self.digits[number]
        if step < 0:
            self.least[number] += (count - 1) * step
            return [Axis(count, step * digit.other)] if self.least[number] >= 0 else None
        if self.used[number] + (count - 1) * step < digit.size:
            self.used[number] += (count - 1) * step
            return [Axis(count, step * digit.other)]
        inner, remainder = divmod(digit.size, step)
        carries = number and self.digits[number - 1].own == digit.own * digit.size
        if not may_split or not carries or self.used[number] or remainder or inner < 2 or count % inner:
            return None
        self.used[number] = digit.size - step
        outer = self._move_digit(number - 1, count // inner, 1, may_split)
        return outer and [*outer, Axis(inner, step * digit.other)]


def _relative(tile: Tile, allocation: Allocation) -> Affine | None:
    """The offset of a tile in its allocation, in bytes from the buffer in use; None if it rotates differently."""
    rotations = tile.offset.rotations
    if len(rotations) > 1 or any(
        (rotation.step, rotation.count) != (allocation.step, allocation.buffers) for rotation in rotations
    ):
        return None
    if allocation.buffers > 1 and not rotations:
        return None
    return Affine(tile.offset.base - allocation.base, tile.offset.terms)


def _paired(own: Sequence[Axis], other: Sequence[Axis]) -> list[_Digit] | None:
    """The axes of both sides of a copy, split so that both have the same sizes; None if they cannot be."""
    digits: list[_Digit] = []
    left, right = ([axis for axis in side if axis.size > 1] for side in (own, other))
    while left and right:
        one, two = left.pop(), right.pop()
        size = min(one.size, two.size)
        for axis, side in ((one, left), (two, right)):
            outer, remainder = divmod(axis.size, size)
            if remainder:
                return None
            if outer > 1:
                side.append(Axis(outer, axis.stride * size))
        if one.stride < 1:
            return None
        digits.append(_Digit(size, one.stride, two.stride))
    return digits


def _overlap(mappings: Sequence[_Mapping]) -> bool:
    """True if two copies may cover the same elements of the tile."""
    spans = [mapping.span for mapping in mappings]
    return any(
        lane < other_end and other_lane < end and low < other_high and other_low < high
        for number, (lane, end, low, high) in enumerate(spans)
        for other_lane, other_end, other_low, other_high in spans[number + 1 :]
    )


def _merged(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """The same elements in the same order, with as few axes as possible."""
    result: list[Axis] = []
    for axis in _without_ones(axes):
        if result and result[-1].stride == axis.size * axis.stride:
            result[-1] = Axis(result[-1].size * axis.size, axis.stride)
        else:
            result.append(axis)
    return tuple(result) or (Axis(1, 1),)


def _without_ones(axes: Sequence[Axis]) -> Iterator[Axis]:
    return (axis for axis in axes if axis.size > 1)
