"""Memory use over time: the bytes of SBUF, PSUM and HBM that hold a value which is still read.

A byte of SBUF or PSUM is in use from the write of a value to its last read; the unit is a granule of 64 bytes in a
quarter of the partitions. HBM in use is the permanent buffers, and scratch buffers from first to last use. Times are
those of the execution trace, which is compressed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from nxpipe.emulator.analysis.execution_trace import ExecutionTrace
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.operands import Far, Memory, Tile
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.numerics import Array

HBM: Final = "hbm"
_GRANULE: Final = 64  # bytes: the alignment of tiles in SBUF
_QUARTERS: Final = 4
_MOST_EVENTS: Final = 400_000


@dataclass(frozen=True)
class Usage:
    """Bytes in use from each time on, up to the next, and the capacity; None for HBM, which depends on the target."""

    times: tuple[int, ...]
    nbytes: tuple[int, ...]
    capacity: int | None

    @property
    def peak(self) -> int:
        return max(self.nbytes, default=0)

    def most(self, low: int, high: int) -> int:
        """The largest use in an interval."""
        first, last = bisect_right(self.times, low), bisect_left(self.times, high)
        return max(self.nbytes[max(first - 1, 0) : max(first, last)], default=0)

    def points(self, trace: ExecutionTrace, count: int) -> list[tuple[int, int]]:
        """Points of the program's time, each with the largest use up to the next; while a period repeats, the largest
        of the period."""
        bounds = sorted({*np.linspace(0, trace.end, count + 1).astype(np.int64).tolist(), *trace.cuts})
        points = []
        for low, high in pairwise(bounds):
            points += [(trace.real(low), self.most(since, low)) for since in trace.cuts.get(low, ())]
            points.append((trace.real(low, after=True), self.most(low, high)))
        return points


@dataclass(frozen=True)
class MemoryUse:
    by_memory: dict[str, Usage]

    def document(self) -> dict[str, Any]:
        return {
            name: {"peak_bytes": usage.peak, "capacity_bytes": usage.capacity}
            for name, usage in sorted(self.by_memory.items())
        }


def memory_use(trace: ExecutionTrace) -> MemoryUse | None:
    """The use of each memory; None for a trace of too many events."""
    if len(trace.events) > _MOST_EVENTS:
        return None
    core = CORES[trace.program.core]
    size_of = {Memory.SBUF: core.sbuf, Memory.PSUM: core.psum}
    values = {memory: _Values(size, core.partitions) for memory, size in size_of.items()}
    tiles = [list(_tiles(instruction)) for instruction in trace.text]
    for event in trace.events:
        for tile, span, is_new in tiles[event.number]:
            start = tile.offset.at(event.indices)
            values[tile.memory].touch(tile, start + span[0], start + span[1], event.begin, event.end, is_new=is_new)
    by_memory = {
        memory.value: _usage(tracked.lives(), size_of[memory] * core.partitions) for memory, tracked in values.items()
    }
    return MemoryUse({**by_memory, HBM: _usage(_buffers(trace), None)})


def _tiles(instruction: Instruction) -> Iterator[tuple[Tile, tuple[int, int], bool]]:
    """The tiles that an instruction touches: bytes from their offset on, and whether it writes a new value there."""
    for name, place in instruction.places.items():
        if isinstance(place, Tile):
            yield place, place.reach, name in instruction.writes and name not in instruction.reads_of_dst()
        elif place.rows is not None:
            yield place.rows, place.rows.reach, False


class _Values:
    """The values in one memory: when each granule was written, and last touched; and all lives that have ended."""

    def __init__(self, size: int, partitions: int) -> None:
        self._rows = partitions // _QUARTERS
        self._born = np.full((_QUARTERS, -(-size // _GRANULE)), -1, np.int64)
        self._last = np.zeros_like(self._born)
        self._ended: list[tuple[Array, Array]] = []

    def touch(self, tile: Tile, low: int, high: int, begin: int, end: int, *, is_new: bool) -> None:
        """Use bytes from `low` to `high` of a tile's partitions from `begin` to `end`."""
        part = (
            slice(tile.start // self._rows, -(-(tile.start + tile.partitions) // self._rows)),
            slice(low // _GRANULE, -(-high // _GRANULE)),
        )
        born, last = self._born[part], self._last[part]
        if is_new:
            over = last < begin
            if over.any():
                lived = born[over] >= 0
                self._ended.append((born[over][lived], last[over][lived]))
                born[over] = begin
        np.maximum(last, end, out=last)
        born[born < 0] = begin

    def lives(self) -> Iterator[tuple[Array, Array, Array]]:
        """Begin, end and bytes of each life."""
        alive = self._born >= 0
        for born, last in (*self._ended, (self._born[alive], self._last[alive])):
            yield born, last, np.full(len(born), _GRANULE * self._rows, np.int64)


def _buffers(trace: ExecutionTrace) -> Iterator[tuple[Array, Array, Array]]:
    buffers, spans = trace.program.buffers, dict[int, tuple[int, int]]()
    for event in trace.events:
        for place in trace.instruction(event).places.values():
            if isinstance(place, Far):
                begin, end = spans.get(place.buffer, (event.begin, event.end))
                spans[place.buffer] = min(begin, event.begin), max(end, event.end)
    for number, buffer in enumerate(buffers):
        is_scratch = buffer.role is Role.SCRATCH
        begin, end = spans.get(number, (0, 0)) if is_scratch else (0, trace.end)
        yield np.array([begin], np.int64), np.array([end], np.int64), np.array([buffer.nbytes], np.int64)


def _usage(lives: Iterator[tuple[Array, Array, Array]], capacity: int | None) -> Usage:
    """The sum of all lives at each time at which it changes."""
    parts = list(lives)
    if not parts:
        return Usage((), (), capacity)
    begins, ends, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
    times, position = np.unique(np.concatenate((begins, ends)), return_inverse=True)
    changes = np.zeros(len(times), np.int64)
    np.add.at(changes, position, np.concatenate((sizes, -sizes)))
    return Usage(tuple(times.tolist()), tuple(np.cumsum(changes).tolist()), capacity)
