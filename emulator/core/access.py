"""Accesses of instructions: access patterns as numpy views of a core's memories, checked for bounds and poison.

A `Window` is created once for each operand of an instruction and moved to its address in each iteration of the loops.
It is a strided view of the memory, so nothing is copied. A `Bound` is an instruction with the windows of its operands.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from nxpipe.emulator.core.arithmetic import decode, encode, floats, raw, signed
from nxpipe.emulator.core.faults import MalformedInstruction, OutOfBounds, SumNotBegun, Unwritten
from nxpipe.emulator.core.memory import Bytes, Memories, Storage
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Place, Tile, extent
from nxpipe.emulator.numerics import Array, Floats
from nxpipe.emulator.ops.base import require_indices

Starts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pattern:
    """The bytes of an access relative to its offset: runs of equal length from `low` up to `high`."""

    low: int
    high: int
    run: int
    outer: tuple[Axis, ...]  # axes of runs: in bytes, strides above 0
    rows: Starts | None = None  # offsets of indexed rows; each row contains all runs

    @property
    def is_solid(self) -> bool:
        return not self.outer and self.rows is None

    def starts(self) -> Starts:
        starts = np.array([self.low], np.int64) if self.rows is None else self.rows
        for axis in self.outer:
            starts = np.add.outer(np.arange(axis.size, dtype=np.int64) * axis.stride, starts).ravel()
        return np.sort(starts)


@lru_cache(maxsize=1 << 14)
def pattern(axes: tuple[Axis, ...], itemsize: int) -> Pattern:
    """The bytes of axes of elements; axes without gaps between their steps merge into longer runs."""
    low, high = extent(axes)
    run, outer = itemsize, []
    for axis in sorted((Axis(a.size, abs(a.stride) * itemsize) for a in axes if a.size > 1), key=lambda a: a.stride):
        if axis.stride <= run:
            run += (axis.size - 1) * axis.stride
        else:
            outer.append(axis)
    return Pattern(low * itemsize, (high + 1) * itemsize, run, tuple(outer))


@lru_cache(maxsize=1 << 14)
def touch(first: Pattern, second: Pattern, distance: int) -> bool:
    """True if two patterns share a byte; the second begins `distance` bytes after the first."""
    if first.low >= second.high + distance or second.low + distance >= first.high:
        return False
    if first.is_solid and second.is_solid:
        return True
    first_starts, second_starts = first.starts(), second.starts() + distance
    ended = np.searchsorted(first_starts, second_starts - first.run, side="right")
    begun = np.searchsorted(first_starts, second_starts + second.run, side="left")
    return bool((begun > ended).any())


class Window:
    """An operand in one core's memory. `locate` moves it to a loop iteration; `position` is its byte offset."""

    def __init__(self, place: Place, memories: Memories) -> None:
        self.place = place
        self._loads: Memories | None = None  # for operands in HBM: they record the tensors that the host loaded
        self.dtype = place.dtype
        size = place.dtype.itemsize
        self._cells, self._full = raw(place.dtype), int("01" * size, 16)
        if isinstance(place, Tile):
            self._bind_tile(place, memories)
        else:
            self._bind_hbm(place, memories)
        self.pattern = pattern(self._inner, size)
        self._fixed = None if place.offset.terms or place.offset.rotations else self._bounded(place.offset.base)
        self.position = self._fixed or 0
        self._known: set[int] = set()  # offsets whose bytes are written; no byte is poisoned again during a run

    def _bind_tile(self, tile: Tile, memories: Memories) -> None:
        self.storage: Storage = memories.on_chip[tile.memory]
        self._label, self._address = str(tile.memory), 0
        self.base, self._unit, self._limit = tile.start * self.storage.pitch, 1, memories.capacities[tile.memory]
        self.lanes = (tile.start, tile.start + tile.partitions)
        if not 0 <= tile.start < self.lanes[1] <= memories.core.partitions:
            raise OutOfBounds(f"uses partitions {tile.start} up to {self.lanes[1]} of {memories.core.partitions}")
        self._inner = tile.axes
        size = tile.dtype.itemsize
        merged = _merged(tile.axes)
        self.shape = (tile.partitions, *(axis.size for axis in merged))
        self._strides = (self.storage.pitch, *(axis.stride * size for axis in merged))
        self.flat = (tile.partitions, tile.elements)

    def _bind_hbm(self, far: Far, memories: Memories) -> None:
        buffer = memories.buffers[far.buffer]
        size = far.dtype.itemsize
        self.storage, self.base = memories.location(far.buffer)
        self._label, self._address = memories.labels[far.buffer], buffer.address
        self._unit, self._limit = size, buffer.nbytes
        self.lanes = (0, 1)
        self._inner = far.axes
        self.shape = tuple(axis.size for axis in far.axes)
        self._strides = tuple(axis.stride * size for axis in far.axes)
        self.flat = (self.shape[0] if self.shape else 1, prod(self.shape[1:]))
        self._loads = memories

    @property
    def origin(self) -> int:
        """The address of the current offset: in a partition, or in HBM."""
        return self._address + self.position

    def forget(self) -> None:
        """Discard the record of written offsets: a new run begins with poisoned memory."""
        self._known.clear()

    def locate(self, indices: tuple[int, ...]) -> None:
        if self._fixed is None:
            self.position = self._bounded(self.place.offset.at(indices))

    def bits(self) -> Array:
        """The elements as unsigned words; raises Unwritten if one was never written."""
        self._require_written()
        return self._view(self.storage.cells)

    def numbers(self) -> Array:
        """The elements as numbers, read-only: one row for each partition, or for each index of the first axis."""
        return decode(self.bits().reshape(self.flat), self.dtype)

    def put(self, numbers: Array) -> None:
        """Write results, rounded to the operand's type."""
        self.put_bits(encode(numbers, self.dtype))

    def put_bits(self, bits: Array) -> None:
        self._store(bits)
        if self.storage.begun is not None:
            self._view(self.storage.begun)[...] = 0

    def begin_sum(self, sums: Array) -> None:
        self._store(encode(sums, self.dtype))
        if self.storage.begun is not None:
            self._view(self.storage.begun)[...] = self._full

    def add_to_sum(self, more: Array) -> None:
        if self.storage.begun is None or self._view(self.storage.begun).min(initial=self._full) != self._full:
            raise SumNotBegun(f"accumulates to {self}, where no matmul has begun a sum")
        self._store(encode(self.numbers() + more, self.dtype))

    def _store(self, bits: Array) -> None:
        self._require_count(bits)
        self._view(self.storage.cells)[...] = bits.reshape(self.shape)
        if self.position not in self._known:
            self._view(self.storage.written)[...] = self._full
            self._known.add(self.position)

    def _require_count(self, bits: Array) -> None:
        if bits.size != prod(self.flat):
            raise MalformedInstruction(f"{bits.size} elements are written to {self}, which has {prod(self.flat)}")

    def _bounded(self, offset: int) -> int:
        position = offset * self._unit
        reach = self._reach()
        if position + reach.low < 0 or position + reach.high > self._limit:
            raise OutOfBounds(f"reaches from byte {position + reach.low} up to {position + reach.high} {self._where()}")
        return position

    def _reach(self) -> Pattern:
        return self.pattern

    def _where(self) -> str:
        if isinstance(self.place, Tile):
            return f"of a partition of {self._label}, which has {self._limit}"
        return f"of {self._label}, which has {self._limit}"

    def _view(self, cells: Bytes) -> Array:
        return np.ndarray(self.shape, self._cells, cells, self.base + self.position, self._strides)

    def _require_written(self) -> None:
        if self.position in self._known:
            return
        if not self._is_written():
            self._raise_unwritten()
        self._known.add(self.position)

    def _is_written(self) -> bool:
        low, high = self.position + self.pattern.low, self.position + self.pattern.high
        if (
            self._loads is not None
            and isinstance(self.place, Far)
            and self._loads.is_loaded(self.place.buffer, low, high)
        ):
            return True
        # Each byte of `written` is 0 or 1. A word as wide as an element equals `_full` (0x0101...) if all its bytes are
        # 1, and is less otherwise. One minimum over all words therefore proves that every byte was written.
        return bool(self._view(self.storage.written).min(initial=self._full) == self._full)

    def _raise_unwritten(self) -> None:
        missing = np.flatnonzero(self._view(self.storage.written).reshape(-1) != self._full)
        first = int(missing[0])
        raise Unwritten(f"reads {self}, where element {first} of {prod(self.flat)} was never written")

    def __str__(self) -> str:
        low, high = self.position + self.pattern.low, self.position + self.pattern.high
        if isinstance(self.place, Tile):
            return f"{self._label}[{self.lanes[0]}:{self.lanes[1]}, bytes {low}:{high}]"
        return f"{self._label}[bytes {low}:{high}]"


class RowsWindow(Window):
    """An operand in HBM whose first axis is indexed by row numbers (indirect DMA)."""

    def __init__(self, place: Far, memories: Memories) -> None:
        if place.rows is None or not place.axes or place.axes[0].stride < 1:
            raise MalformedInstruction("row numbers need a first axis with a stride of at least 1")
        self.rows = Window(place.rows, memories)
        self._span = pattern(place.axes[1:], place.dtype.itemsize)
        super().__init__(place, memories)
        self._step = self._strides[0]
        self._numbers: Array = np.zeros(0, np.uint32)

    def _reach(self) -> Pattern:
        return self._span

    def locate(self, indices: tuple[int, ...]) -> None:
        super().locate(indices)
        self.rows.locate(indices)

    def read_rows(self) -> None:
        """Read the row numbers when the copy executes, and check their bounds."""
        numbers = signed(self.rows.numbers().reshape(-1))
        if len(numbers) != self.shape[0]:
            raise MalformedInstruction(f"{len(numbers)} row numbers for a first axis of size {self.shape[0]}")
        require_indices(numbers, self._count())
        self._numbers = numbers.astype(np.int64)
        starts = self._span.low + self._numbers * self._step
        self.pattern = Pattern(
            int(starts.min()),
            int(starts.max()) + self._span.high - self._span.low,
            self._span.run,
            self._span.outer,
            starts,
        )

    def _count(self) -> int:
        """The number of rows from the current position to the end of the buffer."""
        return (self._limit - self.position - self._span.high) // self._step + 1

    def _table(self, cells: Bytes) -> Array:
        shape = (self._count(), *self.shape[1:])
        return np.ndarray(shape, self._cells, cells, self.base + self.position, self._strides)

    def _view(self, cells: Bytes) -> Array:
        rows: Array = self._table(cells)[self._numbers]
        return rows

    def _require_written(self) -> None:
        if not self._is_written():
            self._raise_unwritten()

    def _store(self, bits: Array) -> None:
        self._require_count(bits)
        self._table(self.storage.cells)[self._numbers] = bits.reshape(self.shape)
        self._table(self.storage.written)[self._numbers] = self._full


def window(place: Place, memories: Memories) -> Window:
    if isinstance(place, Far):
        if not 0 <= place.buffer < len(memories.buffers):
            raise MalformedInstruction(f"buffer {place.buffer} does not exist; the program has {len(memories.buffers)}")
        if place.rows is not None:
            return RowsWindow(place, memories)
    return Window(place, memories)


def _merged(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The same elements in the same order with as few axes as possible, and at least one."""
    merged: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if merged and merged[-1].stride == axis.size * axis.stride:
            merged[-1] = Axis(merged[-1].size * axis.size, axis.stride)
        else:
            merged.append(axis)
    return tuple(merged) or (Axis(1, 1),)


ENGINES = tuple(Engine)
NUMBER = {engine: number for number, engine in enumerate(ENGINES)}


_WORDS = (DType.INT32, DType.UINT32, DType.INT64, DType.UINT64)


class Bound:
    """An instruction bound to the memories of one core."""

    def __init__(self, instruction: Instruction, memories: Memories) -> None:
        self.instruction = instruction
        self.core = memories.core
        self.engine = NUMBER[instruction.engine]
        self.waits = tuple((NUMBER[wait.engine], wait.done) for wait in instruction.waits)
        self.indices: tuple[int, ...] = ()
        self.times = 0
        self.added = 0  # executions in which a matmul accumulated
        self._windows = {name: window(place, memories) for name, place in instruction.places.items()}

    @cached_property
    def rows(self) -> tuple[RowsWindow, ...]:
        return tuple(window for window in self._windows.values() if isinstance(window, RowsWindow))

    @cached_property
    def direct(self) -> tuple[tuple[Window, bool], ...]:
        """Operands whose addresses depend on no row numbers, each with True if it is written."""
        row_numbers = tuple((window.rows, False) for window in self.rows)
        return row_numbers + tuple(access for access in self._accesses() if not isinstance(access[0], RowsWindow))

    @cached_property
    def indirect(self) -> tuple[tuple[Window, bool], ...]:
        """Operands whose addresses depend on row numbers, each with True if it is written."""
        return tuple(access for access in self._accesses() if isinstance(access[0], RowsWindow))

    def _accesses(self) -> Iterator[tuple[Window, bool]]:
        """All operands with True for a write. Read-modify-write counts as a write, which suffices to find races."""
        for name, window in self._windows.items():
            yield window, name in self.instruction.writes

    def forget(self) -> None:
        self.times = self.added = 0
        for window in (*self._windows.values(), *(indirect.rows for indirect in self.rows)):
            window.forget()

    def locate(self, indices: tuple[int, ...]) -> None:
        self.indices = indices
        for window in self._windows.values():
            window.locate(indices)

    def window(self, name: str) -> Window:
        return self._windows[name]

    def numbers(self, name: str) -> Array:
        """An operand, read-only: floats as float32, integers unchanged; one row for each partition."""
        return self._windows[name].numbers()

    def bits(self, name: str) -> Array:
        """An operand's elements as unsigned words, read-only; one row for each partition."""
        window = self._windows[name]
        return window.bits().reshape(window.flat)

    def floats(self, name: str) -> Floats:
        return floats(self._windows[name].numbers())

    def scalar(self, name: str) -> Array:
        """A scalar operand: one number, or a column with one number for each partition."""
        value = getattr(self.instruction, name)
        return self.floats(name) if isinstance(value, Tile) else np.asarray(value, np.float32)

    def put(self, numbers: Array, name: str = "dst") -> None:
        self._windows[name].put(numbers)


# The semantics of one instruction, bound to the memories of one core and located in one iteration of its loops.
Handler = Callable[[Any, Bound], None]


def move(src: Window, dst: Window) -> None:
    """Copy elements: bitwise between equal types or integers of equal width (32 or 64 bits), else through float32."""
    if same_bits(src.dtype, dst.dtype):
        dst.put_bits(src.bits())
    else:
        dst.put(floats(src.numbers()))


def same_bits(src: DType, dst: DType) -> bool:
    return src is dst or (src in _WORDS and dst in _WORDS and src.itemsize == dst.itemsize)
