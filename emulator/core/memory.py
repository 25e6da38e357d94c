"""The memories of one core: SBUF, PSUM and its part of HBM, each a row of bytes that knows which were written.

Fresh bytes are all ones: NaN, or -1. What the host loads stays from run to run, and so do states; everything else is
fresh again at the beginning of each run.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emulator.core.cells import decode, encode, raw
from emulator.core.faults import Malformed, Unwritten
from emulator.errors import ExecutionError, MissingTensor, WrongTensor
from emulator.hardware import CORES
from emulator.isa.operands import Memory, Tile
from emulator.isa.program import Buffer, Loop, Program, Role, Step
from emulator.isa.text import labelled
from emulator.numerics import Array
from emulator.types import DType, TensorType

Bytes = npt.NDArray[np.uint8]

FRESH = 0xFF
_LINE = 64  # partitions begin at multiples of this, as far as alignment goes
_LOADED = (Role.PARAMETER, Role.CONSTANT)
_KEPT = (Role.INPUT, Role.STATE, *_LOADED)


@dataclass(frozen=True, eq=False)
class Storage:
    """`pitch` bytes in each of its partitions. `written` and `begun` say of each byte, by 1, that somebody wrote it,
    and that it is part of a sum that a matmul has begun."""

    name: str
    pitch: int
    cells: Bytes
    written: Bytes
    begun: Bytes | None = None

    def freshen(self, low: int = 0, high: int | None = None) -> None:
        for bits, fresh in ((self.cells, FRESH), (self.written, 0), (self.begun, 0)):
            if bits is not None:
                bits[low:high] = fresh


def _on_chip(name: Memory, partitions: int, pitch: int) -> Storage:
    size = partitions * pitch
    begun = np.zeros(size, np.uint8) if name is Memory.PSUM else None
    return Storage(name, pitch, np.empty(size, np.uint8), np.zeros(size, np.uint8), begun)


class Memories:
    def __init__(self, program: Program) -> None:
        core = CORES[program.core]
        self.core = core
        self.buffers = program.buffers
        self.labels = labelled(program.buffers)
        self.rooms = {Memory.SBUF: core.sbuf, Memory.PSUM: core.psum}
        reached = _reached(program.body)
        self.on_chip = {
            # Of each partition as much as the program reaches; the rest would only have to be freshened.
            memory: _on_chip(memory, core.partitions, max(min(reached[memory], room), 1))
            for memory, room in self.rooms.items()
        }
        # Neither is touched before somebody writes: of weights, which are large, `written` never takes up room.
        self.hbm = Storage("hbm", program.hbm, np.empty(program.hbm, np.uint8), np.zeros(program.hbm, np.uint8))
        self._loaded = [np.zeros(len(buffer.names), np.bool_) for buffer in program.buffers]
        for buffer in program.buffers:
            if buffer.role not in _LOADED:
                self.hbm.freshen(buffer.address, buffer.address + buffer.nbytes)
        self._load_constants(program.constants)

    def freshen(self) -> None:
        """What no run finds as an earlier one left it."""
        for storage in self.on_chip.values():
            storage.freshen()
        for buffer in self.buffers:
            if buffer.role not in _KEPT:
                self.hbm.freshen(buffer.address, buffer.address + buffer.nbytes)

    def is_loaded(self, number: int, low: int, high: int) -> bool:
        """Whether these bytes of a buffer belong to weights that were all loaded; of everything else account is kept
        byte by byte."""
        buffer = self.buffers[number]
        size = max(buffer.elements * buffer.dtype.itemsize, 1)
        return buffer.role in _LOADED and bool(self._loaded[number][low // size : (high - 1) // size + 1].all())

    def write(self, name: str, array: Array) -> None:
        """A tensor from the host, with its axes in the order in which the host knows them."""
        for number, index in self._named(name, Role.INPUT, Role.STATE, Role.PARAMETER):
            buffer = self.buffers[number]
            array = np.asarray(array)
            _require_fit(name, buffer, array)
            lying = array.transpose(buffer.order) if buffer.order else array
            self._put(number, index, _as_bits(name, buffer, lying))

    def read(self, name: str) -> Array:
        """What lies there; floats as float32, whatever their type."""
        number, index = next(iter(self._named(name, Role.OUTPUT, Role.STATE, Role.INPUT, Role.PARAMETER)))
        buffer = self.buffers[number]
        low, high = self._span(number, index)
        loaded = self.is_loaded(number, low - buffer.address, high - buffer.address)
        if not loaded and not self.hbm.written[low:high].all():
            first = int(np.argmin(self.hbm.written[low:high])) // buffer.dtype.itemsize
            at = [int(place) for place in np.unravel_index(first, buffer.shape)]
            raise Unwritten(f"the {buffer.role} {name!r} is read, and nobody has written its element {at}")
        # A copy: the memory goes on changing.
        bits = self.hbm.cells[low:high].copy().view(raw(buffer.dtype)).reshape(buffer.shape)
        numbers = decode(bits, buffer.dtype)
        return numbers.transpose(np.argsort(buffer.order)) if buffer.order else numbers

    def _load_constants(self, constants: Mapping[str, bytes]) -> None:
        for number, buffer in enumerate(self.buffers):
            if buffer.role is not Role.CONSTANT:
                continue
            for index, digest in enumerate(buffer.names):
                if digest not in constants:
                    raise MissingTensor("constant", digest, str(TensorType(buffer.shape, buffer.dtype)))
                size = buffer.elements * buffer.dtype.itemsize
                if len(constants[digest]) != size:
                    raise WrongTensor("constant", digest, f"{size} bytes", f"{len(constants[digest])} bytes")
                self._put(number, index, np.frombuffer(constants[digest], np.uint8))

    def _put(self, number: int, index: int, bits: Array) -> None:
        low, high = self._span(number, index)
        self.hbm.cells[low:high].view(bits.dtype).reshape(bits.shape)[...] = bits
        self._loaded[number][index] = True
        if self.buffers[number].role not in _LOADED:
            self.hbm.written[low:high] = 1

    def _span(self, number: int, index: int) -> tuple[int, int]:
        buffer = self.buffers[number]
        size = buffer.elements * buffer.dtype.itemsize
        return buffer.address + index * size, buffer.address + (index + 1) * size

    def _named(self, name: str, *roles: Role) -> Iterator[tuple[int, int]]:
        """Every place of the first of these roles in which something has this name."""
        for role in roles:
            found = [
                (number, buffer.names.index(name))
                for number, buffer in enumerate(self.buffers)
                if buffer.role is role and name in buffer.names
            ]
            if found:
                yield from found
                return
        known = sorted({each for buffer in self.buffers if buffer.role in roles for each in buffer.names})
        listed = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
        raise ExecutionError(f"the program has no {' or '.join(roles)} {name!r}; it has {listed or 'none'}")


def _reached(body: Sequence[Step], counts: tuple[int, ...] = ()) -> Counter[Memory]:
    """How many bytes of a partition lie before the end of the furthest access."""
    reached = Counter[Memory]()
    for step in body:
        if isinstance(step, Loop):
            reached |= _reached(step.body, (*counts, step.count)) if step.count > 0 else Counter()
            continue
        for place in (*step.written(), *step.read()):
            if isinstance(place, Tile):
                end = place.offset.bounds(counts)[1] + place.reach[1]
                reached[place.memory] = max(reached[place.memory], -(-end // _LINE) * _LINE)
    return reached


def require_readonly(program: Program, written: Iterable[int]) -> None:
    """Weights are loaded once, and are the same in every run."""
    for number in written:
        buffer = program.buffers[number]
        if buffer.role in _LOADED:
            raise Malformed(f"the program writes to the {buffer.role} {buffer.names[0]!r}")


def _require_fit(name: str, buffer: Buffer, array: Array) -> None:
    shape = [0] * len(buffer.shape)
    for lying, own in enumerate(buffer.order or range(len(shape))):
        shape[own] = buffer.shape[lying]
    floats = array.dtype.kind not in "biu"
    if array.shape != tuple(shape) or floats != buffer.dtype.is_float:
        declared = str(TensorType(tuple(shape), buffer.dtype))
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
