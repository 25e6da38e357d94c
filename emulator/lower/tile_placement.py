"""Placement of tiles: addresses in SBUF and PSUM that let loads run ahead of their kernels, and DMA queues.

Kernels allocate their tiles from address 0 upwards. A load of one kernel would then wait for the last reader of the
kernel before it, since both use the same bytes. Here every tile moves to the bytes that have not been used for the
longest time, in the order of the text. The distance between two uses of a byte grows to the size of SBUF, and the
weights of the next kernels and layers are loaded while the current one computes: the semaphore waits follow from the
addresses alone.

Invariant: two tiles whose lives in the text overlap have no byte in common. Lives are those of the tiles' contents, so
placement cannot change a result. Promoted buffers keep their addresses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from nxpipe.emulator.hardware import CORES, CoreSpec
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Instruction
from nxpipe.emulator.isa.operands import Far, Memory
from nxpipe.emulator.isa.program import Buffer, Loop, Role, Step, text_length
from nxpipe.emulator.lower.engine_balance import balance_engines
from nxpipe.emulator.lower.loop_pipelining import pipeline_loops, with_offsets
from nxpipe.emulator.lower.records import ResidentProgram
from nxpipe.emulator.lower.sbuf_accesses import SbufAccesses, Span
from nxpipe.emulator.numerics import Array

_UNIT: Final = 64  # bytes of SBUF: the alignment of tiles
_PRELOADED: Final = frozenset({Role.PARAMETER, Role.CONSTANT, Role.STATE})  # what a load may read before its kernel


@dataclass(frozen=True)
class _Placed:
    """Bytes in each partition, and the text in which their content is live."""

    memory: Memory
    address: int
    nbytes: int
    live: Span

    def overlaps(self, other: "_Placed") -> bool:
        return (
            self.memory is other.memory
            and self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
            and self.live[0] <= other.live[1]
            and other.live[0] <= self.live[1]
        )


def schedule_kernels(resident: ResidentProgram) -> ResidentProgram:
    """Pipeline the kernels' loops, balance the engines, and give every tile a new address and every copy its DMA queue.

    If the additional buffers of pipelined loops do not fit, no loop is pipelined; if no placement fits, tiles keep
    their addresses."""
    return _placed(balance_engines(pipeline_loops(resident))) or _placed(balance_engines(resident)) or resident


def _placed(resident: ResidentProgram) -> ResidentProgram | None:
    core = CORES[resident.emitted.placed.target.core]
    allocations = resident.emitted.allocations
    accesses = SbufAccesses(resident.body, allocations)
    addresses: dict[int, int] = {}
    for memory in Memory:
        found = _Arena(core, memory, resident, accesses).place()
        if found is None:
            return None
        addresses |= found
    moves = {number: address - allocations[number].base for number, address in addresses.items()}
    body = tuple(_Queues(resident.buffers).steps([with_offsets(step, moves) for step in resident.body]))
    bases = {number: replace(allocations[number], base=address) for number, address in addresses.items()}
    emitted = replace(resident.emitted, allocations={**allocations, **bases})
    return replace(resident, emitted=emitted, body=body)


def overlapping(resident: ResidentProgram) -> Iterator[str]:
    """Pairs of tiles, or of a tile and a promoted buffer, that share bytes while both are live."""
    accesses = SbufAccesses(resident.body, resident.emitted.allocations)
    placed = [*_placed_tiles(resident, accesses).values(), *_placed_buffers(resident, accesses).values()]
    placed.sort(key=lambda one: (one.memory, one.address))
    for number, one in enumerate(placed):
        for other in placed[number + 1 :]:
            if other.memory is not one.memory or other.address >= one.address + one.nbytes:
                break
            if one.overlaps(other):
                yield f"{one} and {other} share bytes while both are live"


def _placed_tiles(resident: ResidentProgram, accesses: SbufAccesses) -> dict[int, _Placed]:
    allocations = resident.emitted.allocations
    return {
        number: _Placed(one.memory, one.base, one.nbytes, accesses.live(number))
        for number, one in allocations.items()
        if number in accesses.by_allocation
    }


def _placed_buffers(resident: ResidentProgram, accesses: SbufAccesses) -> dict[int, _Placed]:
    return {
        one.allocation: _Placed(Memory.SBUF, one.address, one.nbytes, accesses.live(one.allocation))
        for one in resident.residents
        if one.allocation in accesses.by_allocation
    }


class _Arena:
    """The bytes of one memory in units, with the positions in the text of their last use."""

    def __init__(self, core: CoreSpec, memory: Memory, resident: ResidentProgram, accesses: SbufAccesses) -> None:
        self._unit = _UNIT if memory is Memory.SBUF else core.psum_bank
        self._units = (core.sbuf_usable if memory is Memory.SBUF else core.psum) // self._unit
        tiles = _placed_tiles(resident, accesses)
        self._tiles = sorted(
            ((number, tile) for number, tile in tiles.items() if tile.memory is memory),
            key=lambda pair: (pair[1].live, pair[0]),
        )
        buffers = _placed_buffers(resident, accesses).values() if memory is Memory.SBUF else ()
        self._fixed = [(buffer.live, self._range(buffer.address, buffer.nbytes)) for buffer in buffers]
        self._loops = _outer_loops(resident.body)

    def place(self) -> dict[int, int] | None:
        """The address of each tile; None if some tile finds no space.

        In a loop, the first tiles of an iteration follow the last ones of the iteration before. The second round knows
        them from the first. If tiles all over SBUF leave no space for a large one, the lowest free bytes are taken."""
        length = max((tile.live[1] for _, tile in self._tiles), default=0) + 1
        first = self._round({}, length)
        return (first and self._round(first, length)) or self._round({}, length, lowest=True)

    def _round(self, before: Mapping[int, int], length: int, *, lowest: bool = False) -> dict[int, int] | None:
        used = np.full(self._units, -2 * length, np.int64)  # the end of the last use of each unit
        busy = np.full(self._units, -1, np.int64)  # the end of the life of what is in it
        addresses: dict[int, int] = {}
        loop: Span | None = None
        for number, tile in self._tiles:
            around = next((span for span in self._loops if span[0] <= tile.live[0] and tile.live[1] <= span[1]), None)
            if around != loop and around is not None:
                self._enter(used, around, before)
            loop = around
            size = -(-tile.nbytes // self._unit)
            start = self._oldest(used, busy, size, tile.live)
            if start is None:
                return None
            addresses[number] = start * self._unit
            busy[start : start + size] = tile.live[1]
            if not lowest:
                used[start : start + size] = tile.live[1]
        return addresses

    def _enter(self, used: Array, loop: Span, before: Mapping[int, int]) -> None:
        """At the start of a loop, the last iteration's tiles were used most recently."""
        length = loop[1] - loop[0] + 1
        for number, tile in self._tiles:
            if number in before and loop[0] <= tile.live[0] and tile.live[1] <= loop[1]:
                units = self._range(before[number], tile.nbytes)
                used[units] = np.maximum(used[units], tile.live[1] - length)

    def _oldest(self, used: Array, busy: Array, size: int, live: Span) -> int | None:
        """The first unit of the free range whose last use is the longest ago; the lowest one of several."""
        free = busy < live[0]
        for other, units in self._fixed:
            if other[0] <= live[1] and live[0] <= other[1]:
                free[units] = False
        if size > self._units:
            return None
        blocked = np.concatenate(([0], np.cumsum(~free)))
        possible = np.flatnonzero(blocked[size:] == blocked[:-size]) if size else np.arange(1)
        if not len(possible):
            return None
        latest = _sliding_maximum(used, size)[possible]
        return int(possible[np.argmin(latest)])

    def _range(self, address: int, nbytes: int) -> slice:
        return slice(address // self._unit, -(-(address + nbytes) // self._unit))


def _sliding_maximum(values: Array, size: int) -> Array:
    """The maximum of each `size` consecutive values, by doubling."""
    result, width = values, 1
    while width < size:
        step = min(width, size - width)
        result = np.maximum(result[:-step], result[step:])
        width += step
    return result


def _outer_loops(body: Sequence[Step]) -> list[Span]:
    """The text of each outermost loop."""
    spans, position = [], 0
    for step in body:
        length = text_length((step,))
        if isinstance(step, Loop):
            spans.append((position, position + length - 1))
        position += length
    return spans


class _Queues:
    """The DMA queue of each copy. A queue executes in order, so that a load behind a store would wait for the kernel
    that stores. Loads of parameters, constants and states have queues of their own. Those by row numbers take turns on
    all queues: software writes their descriptors, which takes longer than many transfers, and queues do it at once."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        half = len(DMA_QUEUES) // 2
        self._queues = {"loads": DMA_QUEUES[:half], "others": DMA_QUEUES[half:], "indexed": DMA_QUEUES}
        self._next = dict.fromkeys(self._queues, 0)

    def steps(self, body: Sequence[Step]) -> Iterator[Step]:
        for step in body:
            if isinstance(step, Loop):
                yield Loop(step.count, tuple(self.steps(step.body)))
            elif step.engine in DMA_QUEUES:
                yield self._queued(step)
            else:
                yield step

    def _queued(self, step: Instruction) -> Instruction:
        source = step.src if isinstance(step, DmaCopy) else None
        kind = "others"
        if isinstance(source, Far) and self._buffers[source.buffer].role in _PRELOADED:
            kind = "loads" if source.rows is None else "indexed"
        queues, number = self._queues[kind], self._next[kind]
        self._next[kind] = number + 1
        return step.with_fields(engine=queues[number % len(queues)])
