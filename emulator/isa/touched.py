"""Which bytes of a buffer a program reads and writes, each counted once however often: what no program of the same task
could do without moving."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nxpipe.emulator.isa.instructions import Instruction
from nxpipe.emulator.isa.operands import Axis, Far
from nxpipe.emulator.isa.program import Buffer, Program
from nxpipe.emulator.isa.totals import within

_MOST_GRAINS: Final = 1 << 22  # of one buffer, that are looked at one by one


@dataclass(frozen=True, slots=True)
class Touched:
    """Bytes. Those that the program itself has written before do not count as read."""

    read: int = 0
    written: int = 0


def touched(program: Program) -> list[Touched]:
    """For each buffer. Rows that go by number count as often as they are asked for, up to all that there are."""
    uses: list[list[_Use]] = [[] for _ in program.buffers]
    for instruction, counts in within(program.body):
        for far, written in _ends(instruction):
            if all(counts) and far.elements:
                uses[far.buffer].append(_use(far, counts, written))
    return [_touched(buffer, found) for buffer, found in zip(program.buffers, uses, strict=True)]


@dataclass(frozen=True, slots=True)
class _Use:
    """The `run` bytes at `start`, and again along each axis; of rows that go by number, how many bytes."""

    written: bool
    start: int = 0
    run: int = 0
    axes: tuple[Axis, ...] = ()
    by_number: int = 0

    @property
    def nbytes(self) -> int:
        return self.run * prod(axis.size for axis in self.axes)

    def grains(self, grain: int) -> NDArray[Any]:
        found = np.arange(self.start // grain, (self.start + self.run) // grain)
        for axis in self.axes:
            steps = np.arange(axis.size) * (axis.stride // grain)
            found = (steps[:, None] + found).ravel()
        return found


def _ends(instruction: Instruction) -> Iterator[tuple[Far, bool]]:
    yield from ((place, False) for place in instruction.read() if isinstance(place, Far))
    yield from ((place, True) for place in instruction.written() if isinstance(place, Far))


def _use(far: Far, counts: Sequence[int], written: bool) -> _Use:
    """Loops around it are axes like its own."""
    size = far.dtype.itemsize
    if far.rows is not None:
        each = prod(axis.size for axis in far.axes if axis.stride)
        return _Use(written, by_number=each * prod(counts) * size)
    axes = [*far.axes, *(Axis(counts[depth], step) for depth, step in far.offset.terms)]
    axes += [Axis(turn.count, turn.step) for turn in far.offset.turns]
    start = far.offset.base + sum((axis.size - 1) * min(axis.stride, 0) for axis in axes)
    run = 1
    apart: list[Axis] = []
    for stride, count in sorted((abs(axis.stride), axis.size) for axis in axes if axis.stride and axis.size > 1):
        if stride <= run and not apart:
            run += (count - 1) * stride
        else:
            apart.append(Axis(count, stride * size))
    return _Use(written, start * size, run * size, tuple(apart))


def _touched(buffer: Buffer, uses: Sequence[_Use]) -> Touched:
    plain = [use for use in uses if use.run]
    grain = gcd(buffer.nbytes, *(number for use in plain for number in (use.start, use.run, *_strides(use))))
    grains = buffer.nbytes // grain if grain else 0
    if grains > _MOST_GRAINS or any(use.nbytes // grain > _MOST_GRAINS for use in plain):
        read, written = (_at_most(buffer, uses, writing) for writing in (False, True))
        return Touched(read, written)
    fresh, stored = np.zeros(grains, bool), np.zeros(grains, bool)
    scattered = known = 0  # bytes written by number, and those of them that were there to be read
    for use in uses:
        if use.written:
            scattered += use.by_number
            stored[use.grains(grain)] = True
        elif use.run:
            at = use.grains(grain)
            fresh[at] |= ~stored[at]
            known = scattered
    gathered = sum(use.by_number for use in uses if not use.written)
    read = max(int(fresh.sum()) * grain - known, 0) + gathered
    return Touched(min(read, buffer.nbytes), min(int(stored.sum()) * grain + scattered, buffer.nbytes))


def _strides(use: _Use) -> Iterable[int]:
    return (axis.stride for axis in use.axes)


def _at_most(buffer: Buffer, uses: Sequence[_Use], written: bool) -> int:
    """Where it takes too many grains to say: uses that differ count as if they touched nothing in common."""
    return min(buffer.nbytes, sum(use.nbytes + use.by_number for use in set(uses) if use.written is written))
