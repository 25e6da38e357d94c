"""Totals of a program: instructions, time and bytes, by the iterations of the loops around each instruction.

`totals` counts what instructions move. `buffer_traffic` counts the distinct bytes of each buffer instead: a lower bound
on the traffic of any program for the same task.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nxpipe.emulator.hardware import CORES, CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.cost import cost, moved, share_of_dma
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Place, Tile
from nxpipe.emulator.isa.program import Buffer, Program, within
from nxpipe.emulator.isa.tensor import Matmul

HBM: Final = "hbm"


@dataclass
class Totals:
    """By engine and kind of instruction, and by memory. `ns` is the time in which an engine has none for another
    instruction; queues of DMA share their engines, which `dma_ns` is the time of if none ever idles. `ideal_cycles` are
    those that the program's multiplications would take on a tensor engine of which no row, column or cycle is idle."""

    written_down: Counter[tuple[str, str]] = field(default_factory=Counter)
    carried_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    ns: dict[str, float] = field(default_factory=dict)
    dma_ns: float = 0.0
    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    multiply_adds: int = 0
    tensor_cycles: float = 0.0
    ideal_cycles: float = 0.0

    @property
    def static(self) -> int:
        return self.written_down.total()

    @property
    def engines(self) -> Counter[str]:
        return _summed({engine: count} for (engine, _), count in self.carried_out.items())

    @property
    def kinds(self) -> Counter[str]:
        return _summed({kind: count} for (_, kind), count in self.carried_out.items())

    @property
    def utilisation(self) -> float | None:
        """Utilization of the tensor engine while it is busy; None without work."""
        return self.ideal_cycles / self.tensor_cycles if self.tensor_cycles else None

    def document(self) -> dict[str, object]:
        """For a report: everything, in an order that does not change."""
        return {
            "static_instructions": self.static,
            "instructions": self.carried_out.total(),
            "by_engine": dict(sorted(self.engines.items())),
            "by_kind": dict(sorted(self.kinds.items())),
            "busy_ns": {engine: round(ns, 1) for engine, ns in sorted(self.ns.items())},
            "bytes_read": dict(sorted(self.read.items())),
            "bytes_written": dict(sorted(self.written.items())),
            "multiply_adds": self.multiply_adds,
            "tensor_cycles": round(self.tensor_cycles, 1),
            "ideal_tensor_cycles": round(self.ideal_cycles, 1),
            "tensor_utilisation": None if self.utilisation is None else round(self.utilisation, 4),
        }


def totals(program: Program) -> Totals:
    core, found = CORES[program.core], Totals()
    for instruction, counts in within(program.body):
        _add(found, instruction, counts, core)
    return found


def _add(found: Totals, instruction: Instruction, counts: tuple[int, ...], core: CoreSpec) -> None:
    times = prod(counts)
    price = cost(instruction, core)
    engine = instruction.engine.value
    found.written_down[engine, instruction.name] += 1
    found.carried_out[engine, instruction.name] += times
    found.ns[engine] = found.ns.get(engine, 0.0) + times * price.ns
    if instruction.engine in DMA_QUEUES:
        found.dma_ns += times * price.ns * share_of_dma(instruction, core)
    for place in instruction.written():
        found.written[_level(place)] += times * moved(place)
    for place in instruction.read():
        found.read[_level(place)] += times * moved(place)
    if isinstance(instruction, Matmul):
        _add_products(found, instruction, times, core)
        # Those that do not add have been counted as if they read their sums.
        if instruction.reads_of_dst():
            found.read[_level(instruction.dst)] -= _first(instruction.accumulate, counts) * moved(instruction.dst)
    if price.cycles is not None and engine == "tensor":
        found.tensor_cycles += times * price.cycles


def _add_products(found: Totals, it: Matmul, times: int, core: CoreSpec) -> None:
    products = it.stationary.partitions * it.stationary.elements * it.moving.elements
    slow = core.fp32_cycle_factor if DType.FLOAT32 in (it.stationary.dtype, it.moving.dtype) else 1
    found.multiply_adds += times * products
    found.ideal_cycles += times * slow * products / (core.pe_rows * core.pe_cols)


def _first(accumulate: Affine, counts: tuple[int, ...]) -> int:
    """How often it is 0, and a matmul adds to nothing: in the first turn of all loops that it changes with. A number
    that counts otherwise than up from 0 counts as if it were above."""
    if accumulate.bounds(counts)[0] != 0 or accumulate.turns or accumulate.base:
        return prod(counts) if accumulate.bounds(counts)[1] <= 0 else 0
    taken = prod(counts[depth] for depth, _ in accumulate.terms)
    return prod(counts) // taken if taken else 0


def _summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    found = Counter[str]()
    for each in counts:
        found.update(each)
    return found


def _level(place: Place) -> str:
    return place.memory.value if isinstance(place, Tile) else HBM


_MOST_GRAINS: Final = 1 << 22  # of one buffer, that are looked at one by one


@dataclass(frozen=True, slots=True)
class BufferTraffic:
    """Distinct bytes of a buffer; bytes that the program itself has written before do not count as read."""

    read: int = 0
    written: int = 0


def buffer_traffic(program: Program) -> list[BufferTraffic]:
    """The traffic of each buffer. Rows that are indexed by number count at each read, up to all of them."""
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


def _touched(buffer: Buffer, uses: Sequence[_Use]) -> BufferTraffic:
    plain = [use for use in uses if use.run]
    grain = gcd(buffer.nbytes, *(number for use in plain for number in (use.start, use.run, *_strides(use))))
    grains = buffer.nbytes // grain if grain else 0
    if grains > _MOST_GRAINS or any(use.nbytes // grain > _MOST_GRAINS for use in plain):
        read, written = (_at_most(buffer, uses, writing) for writing in (False, True))
        return BufferTraffic(read, written)
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
    return BufferTraffic(min(read, buffer.nbytes), min(int(stored.sum()) * grain + scattered, buffer.nbytes))


def _strides(use: _Use) -> Iterable[int]:
    return (axis.stride for axis in use.axes)


def _at_most(buffer: Buffer, uses: Sequence[_Use], written: bool) -> int:
    """An upper bound, for buffers with too many grains to count: different uses count as disjoint."""
    return min(buffer.nbytes, sum(use.nbytes + use.by_number for use in set(uses) if use.written is written))
