"""The memories of one core: SBUF, PSUM and its part of HBM, with a map of the written bytes.

Memory is poisoned at the start: every byte is 0xFF, which is NaN in every float type and -1 in every integer type. The
map of written bytes turns a read of unwritten memory into an error. Inputs, weights and states stay from run to run;
everything else is poisoned again before each run, so that no result depends on an earlier run. Scratch buffers in HBM
share one storage, because they may overlap; any other buffer has its own storage, so that programs loaded side by side
can share weights and states.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from nxpipe.emulator.core.arithmetic import decode, encode, raw
from nxpipe.emulator.core.faults import MalformedInstruction, Unwritten
from nxpipe.emulator.errors import ExecutionError, MissingTensor, WrongTensor
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.isa.program import TILE_ROWS, Buffer, Loop, Program, Role, Step
from nxpipe.emulator.isa.text import labelled
from nxpipe.emulator.numerics import Array

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

_POISON = 0xFF
_LINE = 64  # bytes; partitions begin at multiples of it, for aligned access
_LOADED = (Role.PARAMETER, Role.CONSTANT)
_KEPT = (Role.INPUT, Role.STATE, *_LOADED)


@dataclass(eq=False)
class Storage:
    """Bytes of one memory or buffer, `pitch` in each partition, allocated at the first access. `written` has 1 for each
    written byte; `begun` has 1 for each byte of a sum that a matmul has begun. `loaded` is true for each tensor of a
    buffer that the host has loaded, for which `written` is not needed."""

    name: str
    pitch: int
    size: int
    begun: Bytes | None = None
    loaded: Flags | None = None

    @cached_property
    def cells(self) -> Bytes:
        return np.zeros(self.size, np.uint8)

    @cached_property
    def written(self) -> Bytes:
        return np.zeros(self.size, np.uint8)

    def alias(self, other: "Storage") -> None:
        """Share the bytes of another storage, all of whose tensors the host has loaded."""
        self.cells, self.loaded = other.cells, other.loaded

    def poison(self, low: int = 0, high: int | None = None) -> None:
        for cells, value in ((self.cells, _POISON), (self.written, 0), (self.begun, 0)):
            if cells is not None:
                cells[low:high] = value


def in_hbm(size: int, loaded: Flags | None = None) -> Storage:
    return Storage("hbm", size, size, loaded=loaded)


def _on_chip(name: Memory, partitions: int, pitch: int) -> Storage:
    size = partitions * pitch
    return Storage(name, pitch, size, np.zeros(size, np.uint8) if name is Memory.PSUM else None)


class Memories:
    """SBUF, PSUM and the HBM buffers of one core, sized for one program."""

    def __init__(self, program: Program) -> None:
        core = CORES[program.core]
        self.core = core
        self.buffers = program.buffers
        self.labels = labelled(program.buffers)
        self.capacities = {Memory.SBUF: core.sbuf, Memory.PSUM: core.psum}
        reached = _extents(program.body)
        self.on_chip = {
            # Allocate only the part of each partition that the program accesses: poisoning more costs time.
            memory: _on_chip(memory, core.partitions, max(min(reached[memory], capacity), 1))
            for memory, capacity in self.capacities.items()
        }
        scratch = [buffer for buffer in program.buffers if buffer.role is Role.SCRATCH]
        self._low = min((buffer.address for buffer in scratch), default=0)
        self._scratch = in_hbm(max((buffer.address + buffer.nbytes for buffer in scratch), default=0) - self._low)
        self._hbm = [
            self._scratch
            if buffer.role is Role.SCRATCH
            else in_hbm(buffer.nbytes, np.zeros(len(buffer.names), np.bool_))
            for buffer in program.buffers
        ]
        self._load_constants(program.constants)

    def location(self, number: int) -> tuple[Storage, int]:
        """The storage of a buffer, and the byte at which the buffer begins in it."""
        buffer = self.buffers[number]
        return self._hbm[number], buffer.address - self._low if buffer.role is Role.SCRATCH else 0

    def poison(self) -> None:
        """Poison all memory that a run must not inherit from an earlier run."""
        for storage in self.on_chip.values():
            storage.poison()
        for number, buffer in enumerate(self.buffers):
            if buffer.role not in _KEPT:
                storage, base = self.location(number)
                storage.poison(base, base + buffer.nbytes)

    def is_loaded(self, number: int, low: int, high: int) -> bool:
        """True if these bytes of a buffer belong to tensors that the host has loaded."""
        loaded, size = self._hbm[number].loaded, max(_size(self.buffers[number]), 1)
        return loaded is not None and bool(loaded[low // size : (high - 1) // size + 1].all())

    def write(self, name: str, array: Array) -> None:
        """Write a tensor whose axes are in the host's order."""
        for number, index in self._named(name, Role.INPUT, Role.STATE, Role.PARAMETER):
            put(self._hbm[number], self.buffers[number], index, array)

    def read(self, name: str) -> Array:
        """Read a tensor; floats of any type are returned as float32."""
        number, index = next(iter(self._named(name, Role.OUTPUT, Role.STATE, Role.INPUT, Role.PARAMETER)))
        buffer = self.buffers[number]
        storage, low = self._hbm[number], index * _size(buffer)
        high = low + _size(buffer)
        if not self.is_loaded(number, low, high) and not storage.written[low:high].all():
            first = int(np.argmin(storage.written[low:high])) // buffer.dtype.itemsize
            at = [int(index) for index in np.unravel_index(first, buffer.shape)]
            raise Unwritten(f"the {buffer.role} {name!r} is read, but its element {at} was never written")
        return get(storage, buffer, index)

    def _load_constants(self, constants: Mapping[str, bytes]) -> None:
        for number, buffer in enumerate(self.buffers):
            if buffer.role is not Role.CONSTANT:
                continue
            for digest in buffer.names:
                if digest not in constants:
                    raise MissingTensor("constant", digest, str(TensorType(buffer.shape, buffer.dtype)))
                if len(constants[digest]) != _size(buffer):
                    raise WrongTensor("constant", digest, f"{_size(buffer)} bytes", f"{len(constants[digest])} bytes")
            # Constants are read-only, so a single constant needs no copy.
            storage = self._hbm[number]
            storage.cells = np.frombuffer(b"".join(constants[digest] for digest in buffer.names), np.uint8)
            storage.loaded = np.ones(len(buffer.names), np.bool_)

    def _named(self, name: str, *roles: Role) -> Iterator[tuple[int, int]]:
        """(buffer, index) of every tensor with this name, in the first of these roles that has the name."""
        for role in roles:
            matches = [
                (number, buffer.names.index(name))
                for number, buffer in enumerate(self.buffers)
                if buffer.role is role and name in buffer.names
            ]
            if matches:
                yield from matches
                return
        known = sorted({tensor for buffer in self.buffers if buffer.role in roles for tensor in buffer.names})
        listed = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
        raise ExecutionError(f"the program has no {' or '.join(roles)} {name!r}; it has {listed or 'none'}")


def _extents(body: Sequence[Step], counts: tuple[int, ...] = ()) -> Counter[Memory]:
    """The end of the last accessed byte in a partition of each memory, over all iterations of the loops."""
    reached = Counter[Memory]()
    for step in body:
        if isinstance(step, Loop):
            reached |= _extents(step.body, (*counts, step.count)) if step.count > 0 else Counter()
            continue
        for place in (*step.written(), *step.read()):
            if isinstance(place, Tile):
                end = place.offset.bounds(counts)[1] + place.reach[1]
                reached[place.memory] = max(reached[place.memory], -(-end // _LINE) * _LINE)
    return reached


def require_readonly(program: Program, written: Iterable[int]) -> None:
    """Raise MalformedInstruction for a program that writes to weights or constants: they are loaded only once."""
    for number in written:
        buffer = program.buffers[number]
        if buffer.role in _LOADED:
            raise MalformedInstruction(f"the program writes to the {buffer.role} {buffer.names[0]!r}")


def put(storage: Storage, buffer: Buffer, index: int, array: Array) -> None:
    """Write one tensor of a buffer, with its axes in the host's order."""
    name, array = buffer.names[index], np.asarray(array)
    _require_fit(name, buffer, array)
    bits = _as_bits(name, buffer, array.transpose(buffer.order) if buffer.order else array)
    cells = storage.cells[index * _size(buffer) : (index + 1) * _size(buffer)].view(bits.dtype)
    for part, span in _parts(cells, buffer):
        part[...] = bits[span].reshape(part.shape)
    if storage.loaded is not None:
        storage.loaded[index] = True


def get(storage: Storage, buffer: Buffer, index: int) -> Array:
    """A copy of one tensor of a buffer; floats of any type as float32."""
    cells = storage.cells[index * _size(buffer) : (index + 1) * _size(buffer)].view(raw(buffer.dtype))
    bits = np.empty(buffer.shape, cells.dtype)
    for part, span in _parts(cells, buffer):
        bits[span] = part.reshape(bits[span].shape)
    numbers = decode(bits, buffer.dtype)
    return numbers.transpose(np.argsort(buffer.order)) if buffer.order else numbers


def _parts(cells: Array, buffer: Buffer) -> Iterator[tuple[Array, tuple[slice, ...]]]:
    """The parts in which a tensor is stored: a view of the cells of each, and the span of the tensor that it holds. The
    span's elements, in order, have the shape of the view; `Buffer` describes tiles."""
    if not buffer.tile:
        yield cells.reshape(buffer.shape), ()
        return
    *outer, rows, columns = buffer.shape
    matrices, every = prod(outer), (slice(None),) * len(outer)
    chunks, tiles = rows // TILE_ROWS, columns // buffer.tile
    folded, wide = chunks * TILE_ROWS, tiles * buffer.tile
    stored = cells.reshape(matrices, rows * columns)
    lanes = stored[:, : folded * columns].reshape(matrices, TILE_ROWS, chunks * columns)
    in_tiles = lanes[..., : chunks * wide].reshape(matrices, TILE_ROWS, tiles, chunks, buffer.tile)
    yield in_tiles.transpose(0, 3, 1, 2, 4), (*every, slice(folded), slice(wide))
    last = lanes[..., chunks * wide :].reshape(matrices, TILE_ROWS, chunks, columns - wide)
    yield last.transpose(0, 2, 1, 3), (*every, slice(folded), slice(wide, None))
    rest = stored[:, folded * columns :].reshape(matrices, rows - folded, columns)
    yield rest, (*every, slice(folded, None), slice(None))


def _size(buffer: Buffer) -> int:
    """Bytes of one tensor."""
    return buffer.elements * buffer.dtype.itemsize


def _require_fit(name: str, buffer: Buffer, array: Array) -> None:
    floats = array.dtype.kind not in "biu"
    if array.shape != buffer.host_shape or floats != buffer.dtype.is_float:
        declared = str(TensorType(buffer.host_shape, buffer.dtype))
        raise WrongTensor(buffer.role, name, declared, f"{array.dtype}{list(array.shape)}")


def _as_bits(name: str, buffer: Buffer, array: Array) -> Array:
    dtype = buffer.dtype
    if array.dtype == dtype.stored and dtype is not DType.TFLOAT32:
        return np.ascontiguousarray(array).view(raw(dtype))
    if dtype.is_integer and array.size:
        limits, low, high = np.iinfo(dtype.value), int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise WrongTensor(buffer.role, name, str(TensorType(buffer.shape, dtype)), f"from {low} to {high}")
    return np.ascontiguousarray(encode(array, dtype))
