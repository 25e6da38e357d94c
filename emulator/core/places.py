"""Places as arrays: what an access pattern says once and for all, and where it lies in a turn of the loops.

A window is made once for each place of an instruction. It is told the indices of the loops, and is then a view of the
memory: strides are numpy's own, so nothing is copied to look at it.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from nxpipe.emulator.core.cells import decode, encode, raw, signed
from nxpipe.emulator.core.faults import Malformed, OutOfBounds, SumNotBegun, Unwritten
from nxpipe.emulator.core.memory import Bytes, Memories, Storage
from nxpipe.emulator.isa.operands import Axis, Far, Place, Tile, extent
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import require_indices

Starts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which bytes are touched, seen from the offset: runs of equal length, `low` being the first byte and `high` the
    one behind the last."""

    low: int
    high: int
    run: int
    outer: tuple[Axis, ...]  # of runs: in bytes, strides above 0
    rows: Starts | None = None  # further starts, of which each has all of the runs

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
    """Axes that leave no gap between neighbours only make runs longer."""
    low, high = extent(axes)
    run, outer = itemsize, []
    for axis in sorted((Axis(a.size, abs(a.stride) * itemsize) for a in axes if a.size > 1), key=lambda a: a.stride):
        if axis.stride <= run:
            run += (axis.size - 1) * axis.stride
        else:
            outer.append(axis)
    return Pattern(low * itemsize, (high + 1) * itemsize, run, tuple(outer))


@lru_cache(maxsize=1 << 14)
def touch(one: Pattern, other: Pattern, ahead: int) -> bool:
    """Whether two patterns have a byte in common, the other one's offset being so many bytes ahead."""
    if one.low >= other.high + ahead or other.low + ahead >= one.high:
        return False
    if one.is_solid and other.is_solid:
        return True
    mine, others = one.starts(), other.starts() + ahead
    before = np.searchsorted(mine, others - one.run, side="right")
    behind = np.searchsorted(mine, others + other.run, side="left")
    return bool((behind > before).any())


class Window:
    """A place in one core's memory. `locate` moves it to where it is in a turn of the loops; `here` is how many bytes
    behind its base that is."""

    def __init__(self, place: Place, memories: Memories) -> None:
        self.place = place
        self._loads: Memories | None = None  # where whole tensors are kept account of
        self.dtype = place.dtype
        size = place.dtype.itemsize
        self._cells, self._full = raw(place.dtype), int("01" * size, 16)
        if isinstance(place, Tile):
            self._lie_on_chip(place, memories)
        else:
            self._lie_in_hbm(place, memories)
        self.pattern = pattern(self._inner, size)
        self._fixed = None if place.offset.terms or place.offset.turns else self._bounded(place.offset.base)
        self.here = self._fixed or 0
        self._known: set[int] = set()  # where all was found written; nothing becomes unwritten during a run

    def _lie_on_chip(self, tile: Tile, memories: Memories) -> None:
        self.storage: Storage = memories.on_chip[tile.memory]
        self._label, self._address = str(tile.memory), 0
        self.base, self._unit, self._room = tile.start * self.storage.pitch, 1, memories.rooms[tile.memory]
        self.lanes = (tile.start, tile.start + tile.partitions)
        if not 0 <= tile.start < self.lanes[1] <= memories.core.partitions:
            raise OutOfBounds(f"it uses partitions {tile.start} up to {self.lanes[1]} of {memories.core.partitions}")
        self._inner = tile.axes
        size = tile.dtype.itemsize
        merged = _merged(tile.axes)
        self.shape = (tile.partitions, *(axis.size for axis in merged))
        self._strides = (self.storage.pitch, *(axis.stride * size for axis in merged))
        self.flat = (tile.partitions, tile.elements)

    def _lie_in_hbm(self, far: Far, memories: Memories) -> None:
        buffer = memories.buffers[far.buffer]
        size = far.dtype.itemsize
        self.storage, self.base = memories.lies(far.buffer)
        self._label, self._address = memories.labels[far.buffer], buffer.address
        self._unit, self._room = size, buffer.nbytes
        self.lanes = (0, 1)
        self._inner = far.axes
        self.shape = tuple(axis.size for axis in far.axes)
        self._strides = tuple(axis.stride * size for axis in far.axes)
        self.flat = (self.shape[0] if self.shape else 1, prod(self.shape[1:]))
        self._loads = memories

    @property
    def origin(self) -> int:
        """Where its offset is: seen from the beginning of the partition, or of HBM."""
        return self._address + self.here

    def forget(self) -> None:
        """A new run begins, with fresh memory."""
        self._known.clear()

    def locate(self, indices: tuple[int, ...]) -> None:
        if self._fixed is None:
            self.here = self._bounded(self.place.offset.at(indices))

    def bits(self) -> Array:
        """Its elements as they are, which somebody must have written."""
        self._require_written()
        return self._view(self.storage.cells)

    def numbers(self) -> Array:
        """As many rows as there are partitions, or as the first axis is long; not to be written to."""
        return decode(self.bits().reshape(self.flat), self.dtype)

    def put(self, numbers: Array) -> None:
        """Round results, and write them."""
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
            raise SumNotBegun(f"it adds to {self}, where no matmul has begun a sum")
        self._store(encode(self.numbers() + more, self.dtype))

    def _store(self, bits: Array) -> None:
        self._require_count(bits)
        self._view(self.storage.cells)[...] = bits.reshape(self.shape)
        if self.here not in self._known:
            self._view(self.storage.written)[...] = self._full
            self._known.add(self.here)

    def _require_count(self, bits: Array) -> None:
        if bits.size != prod(self.flat):
            raise Malformed(f"{bits.size} elements come to {self}, a place of {prod(self.flat)}")

    def _bounded(self, offset: int) -> int:
        here = offset * self._unit
        reach = self._reach()
        if here + reach.low < 0 or here + reach.high > self._room:
            raise OutOfBounds(f"it reaches from byte {here + reach.low} up to {here + reach.high} {self._where()}")
        return here

    def _reach(self) -> Pattern:
        return self.pattern

    def _where(self) -> str:
        if isinstance(self.place, Tile):
            return f"of a partition of {self._label}, which has {self._room}"
        return f"of {self._label}, which has {self._room}"

    def _view(self, cells: Bytes) -> Array:
        return np.ndarray(self.shape, self._cells, cells, self.base + self.here, self._strides)

    def _require_written(self) -> None:
        if self.here in self._known:
            return
        if not self._is_written():
            self._raise_unwritten()
        self._known.add(self.here)

    def _is_written(self) -> bool:
        low, high = self.here + self.pattern.low, self.here + self.pattern.high
        if (
            self._loads is not None
            and isinstance(self.place, Far)
            and self._loads.is_loaded(self.place.buffer, low, high)
        ):
            return True
        # No byte of `written` is above 1, so the least of several together is the whole of them or less.
        return bool(self._view(self.storage.written).min(initial=self._full) == self._full)

    def _raise_unwritten(self) -> None:
        missing = np.flatnonzero(self._view(self.storage.written).reshape(-1) != self._full)
        first = int(missing[0])
        raise Unwritten(f"it reads {self}, where nobody has written element {first} of {prod(self.flat)}")

    def __str__(self) -> str:
        low, high = self.here + self.pattern.low, self.here + self.pattern.high
        if isinstance(self.place, Tile):
            return f"{self._label}[{self.lanes[0]}:{self.lanes[1]}, bytes {low}:{high}]"
        return f"{self._label}[bytes {low}:{high}]"


class RowsWindow(Window):
    """A place in HBM whose first axis goes by row numbers."""

    def __init__(self, place: Far, memories: Memories) -> None:
        if place.rows is None or not place.axes or place.axes[0].stride < 1:
            raise Malformed("row numbers need a first axis with a stride of at least 1")
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
        """Row numbers are read when the copy is carried out, and bounded then."""
        numbers = signed(self.rows.numbers().reshape(-1))
        if len(numbers) != self.shape[0]:
            raise Malformed(f"{len(numbers)} row numbers come to a first axis of {self.shape[0]}")
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
        """How many rows the buffer has, from here on."""
        return (self._room - self.here - self._span.high) // self._step + 1

    def _table(self, cells: Bytes) -> Array:
        shape = (self._count(), *self.shape[1:])
        return np.ndarray(shape, self._cells, cells, self.base + self.here, self._strides)

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
            raise Malformed(f"there is no buffer {place.buffer}; the program has {len(memories.buffers)}")
        if place.rows is not None:
            return RowsWindow(place, memories)
    return Window(place, memories)


def _merged(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The same elements in the same order by as few axes as can be, and at least one."""
    merged: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if merged and merged[-1].stride == axis.size * axis.stride:
            merged[-1] = Axis(merged[-1].size * axis.size, axis.stride)
        else:
            merged.append(axis)
    return tuple(merged) or (Axis(1, 1),)
