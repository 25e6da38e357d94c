"""Proof by symbolic execution that two programs compute the same in every order of engines and on every input.

Each byte of the memories has a symbolic name: a byte of the host, or an operation and the names of its operands. A
program is first shown to be ordered: of every two accesses to a byte, one of them a write, the later one knows that the
earlier one is done. Then every order gives the result of program order, and two ordered programs whose outputs have the
same names in program order are equivalent. Neither half uses anything of `emulator.core`, and both are conservative: an
indirect operand counts as its whole buffer, and an instruction that is not known to be elementwise depends on all that
it reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.collective import CollectiveAllReduce
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.operands import Far, Memory, Place, Tile
from nxpipe.emulator.isa.program import Program, Role, executed
from nxpipe.emulator.isa.scalar import Activation
from nxpipe.emulator.isa.tensor import NcTranspose
from nxpipe.emulator.isa.vector import Reciprocal, TensorCopy, TensorScalar, TensorTensor
from nxpipe.emulator.lower.kernel import PARTITIONS

Names = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.int64]  # one number for each byte
Turns = tuple[int, ...]

# Each element of the result depends on those at the same place, and on a column's in its partition.
_BY_ELEMENT = (DmaCopy, TensorCopy, TensorTensor, TensorScalar, Activation, Reciprocal, CollectiveAllReduce)
_WORDS = (DType.INT32, DType.UINT32)


def proof(before: "Walk", mutant: Program) -> str:
    """The reason why a program is equivalent to the walked one; empty if there is no proof."""
    after = Walk(mutant)
    if not after.in_order or before.outputs != after.outputs:
        return ""
    if before.instructions != after.instructions:
        return "equal expressions of all outputs"
    return (
        "other waits imply it"
        if before.knowledge == after.knowledge
        else "the accesses that it ordered do not conflict"
    )


@dataclass(frozen=True)
class _Stretch:
    """Bytes of one memory, in elements of one width."""

    memory: str
    size: int
    cells: Bytes  # [partitions or first axis, elements, bytes]


class Walk:
    """A symbolic execution of a program in program order."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._pitch = _reached(program)
        sizes = {name: PARTITIONS * pitch for name, pitch in self._pitch.items()} | {"hbm": program.hbm}
        self._names = {name: np.zeros(size, np.uint64) for name, size in sizes.items()}
        # For each byte, the last instruction of each engine that wrote or read it.
        self._last: dict[tuple[str, Engine, bool], npt.NDArray[np.int32]] = {}
        engines = {instruction.engine for instruction, _ in executed(program.body)}
        self._known = {engine: dict.fromkeys(Engine, 0) for engine in engines}
        self._then: dict[tuple[Engine, int], dict[Engine, int]] = {}
        self.instructions = [instruction.after() for instruction, _ in executed(program.body)]
        self.knowledge: list[dict[Engine, int]] = []
        self.in_order = True
        self._load()
        for instruction, turns in executed(program.body):
            self._carry_out(instruction, turns)

    @cached_property
    def outputs(self) -> list[bytes]:
        kept = (buffer for buffer in self._program.buffers if buffer.role in (Role.OUTPUT, Role.STATE))
        return [self._names["hbm"][it.address : it.address + it.nbytes].tobytes() for it in kept]

    def _load(self) -> None:
        for buffer in self._program.buffers:
            if buffer.role not in (Role.OUTPUT, Role.SCRATCH):
                span = slice(buffer.address, buffer.address + buffer.nbytes)
                self._names["hbm"][span] = _mixed(np.arange(buffer.nbytes, dtype=np.uint64), _digest(str(buffer)))

    def _carry_out(self, instruction: Instruction, turns: Turns) -> None:
        self._wait(instruction, turns)
        reads = [self._stretch(place, turns) for place in instruction.read()]
        writes = [self._stretch(place, turns) for place in instruction.written()]
        for stretch in reads:
            self._access(instruction.engine, stretch, writes=False)
        for stretch in writes:
            self._access(instruction.engine, stretch, writes=True)
        self._name(instruction, turns, reads, writes)
        self._finish(instruction.engine)

    # Knowledge of engines

    def _wait(self, instruction: Instruction, turns: Turns) -> None:
        mine = self._known[instruction.engine]
        for wait in instruction.waits:
            count = wait.done.at(turns)
            if count > mine[wait.engine]:
                for engine, known in self._then[wait.engine, count].items():
                    mine[engine] = max(mine[engine], known)
        self.knowledge.append(dict(mine))

    def _finish(self, engine: Engine) -> None:
        self._known[engine][engine] += 1
        self._then[engine, self._known[engine][engine]] = dict(self._known[engine])

    def _access(self, engine: Engine, stretch: _Stretch, *, writes: bool) -> None:
        known = self._known[engine]
        for (memory, other, wrote), last in self._last.items():
            if memory == stretch.memory and other is not engine and (writes or wrote):
                self.in_order &= bool((last[stretch.cells] <= known[other]).all())
        if (stretch.memory, engine, writes) not in self._last:
            self._last[stretch.memory, engine, writes] = np.zeros(len(self._names[stretch.memory]), np.int32)
        self._last[stretch.memory, engine, writes][stretch.cells] = known[engine] + 1

    # Data flow

    def _name(self, instruction: Instruction, turns: Turns, reads: list[_Stretch], writes: list[_Stretch]) -> None:
        is_plain = not any(isinstance(place, Far) and place.rows for place in instruction.places.values())
        if isinstance(instruction, DmaCopy) and is_plain and _same_bits(instruction):
            values = self._names[reads[0].memory][reads[0].cells]
            self._names[writes[0].memory][writes[0].cells] = values.reshape(writes[0].cells.shape)
            return
        meaning = _digest(_meaning(instruction, turns))
        for number, stretch in enumerate(writes):
            own = _mixed(np.arange(stretch.size, dtype=np.uint64), _digest(f"{meaning} {number}"))
            names = np.broadcast_to(own, stretch.cells.shape)
            by_element = is_plain and number == 0 and isinstance(instruction, _BY_ELEMENT)
            if by_element and all(_fits(entry, stretch) for entry in reads):
                for entry in reads:
                    names = _mixed(names + self._elements(entry).reshape(_shaped(entry, stretch)), meaning)
            else:
                everything = [self._elements(entry) for entry in (*reads, *([] if is_plain else [stretch]))]
                read = _digest(" ".join(f"{entry.shape} {_digest(entry.tobytes())}" for entry in everything))
                places = np.arange(stretch.cells.size, dtype=np.uint64).reshape(stretch.cells.shape)
                names = _mixed(places + names, read)
            self._names[stretch.memory][stretch.cells] = names

    def _elements(self, stretch: _Stretch) -> Names:
        """One name for all bytes of each element."""
        names = self._names[stretch.memory][stretch.cells]
        found = np.zeros(names.shape[:2], np.uint64)
        for byte in range(stretch.size):
            found = _mixed(found + names[:, :, byte], byte + 1)
        return found

    def _stretch(self, place: Place, turns: Turns) -> _Stretch:
        size = place.dtype.itemsize
        if isinstance(place, Tile):
            memory, pitch = str(place.memory), self._pitch[place.memory]
            base = place.offset.at(turns)
            first = (np.arange(place.partitions) + place.start) * pitch
            axes = [(axis.size, axis.stride * size) for axis in place.axes]
        else:
            buffer = self._program.buffers[place.buffer]
            memory, base = "hbm", buffer.address
            first, axes = np.zeros(1, np.int64), [(buffer.nbytes // size, size)]
            if not place.rows:
                base += place.offset.at(turns) * size
                steps = [(axis.size, axis.stride * size) for axis in place.axes] or [(1, size)]
                first, axes = np.arange(steps[0][0]) * steps[0][1], steps[1:]
        cells = first.astype(np.int64) + base
        for count, step in axes:
            cells = np.add.outer(cells, np.arange(count) * step)
        within = np.add.outer(cells.reshape(len(first), -1), np.arange(size))
        return _Stretch(memory, size, within)


def _reached(program: Program) -> dict[str, int]:
    """The end of the furthest access in a partition, in bytes."""
    reached = dict.fromkeys(map(str, Memory), 1)
    for instruction, turns in executed(program.body):
        for place in instruction.places.values():
            if isinstance(place, Tile):
                reached[place.memory] = max(reached[place.memory], place.offset.at(turns) + place.reach[1])
    return reached


def _meaning(instruction: Instruction, turns: Turns) -> str:
    """An instruction without operands' locations and waits; numbers with the current loop indices."""
    result: Iterator[object] = (
        _told(getattr(instruction, field.name), turns)
        for field in fields(instruction)
        if field.name not in ("engine", "waits", "note")
    )
    on = instruction.engine if isinstance(instruction, NcTranspose) else ""
    return f"{instruction.name} {on} {list(result)}"


def _told(value: object, turns: Turns) -> object:
    if isinstance(value, Affine):
        return value.at(turns)
    if isinstance(value, Tile):
        return value.dtype, value.partitions, [axis.size for axis in value.axes]
    if isinstance(value, Far):
        rows = value.rows and (value.offset.at(turns), value.axes)
        return value.dtype, [axis.size for axis in value.axes], rows
    return value


def _same_bits(copy: DmaCopy) -> bool:
    one, other = copy.src.dtype, copy.dst.dtype
    return one is other or (one in _WORDS and other in _WORDS)


def _fits(read: _Stretch, written: _Stretch) -> bool:
    lanes, elements, _ = read.cells.shape
    rows, columns, _ = written.cells.shape
    return (lanes, elements) == (rows, 1) or bool(lanes * elements == rows * columns)


def _shaped(read: _Stretch, written: _Stretch) -> tuple[int, int, int]:
    lanes, elements, _ = written.cells.shape
    return (lanes, 1, 1) if read.cells.shape[1] == 1 and read.cells.shape[0] == lanes else (lanes, elements, 1)


def _digest(what: str | bytes) -> int:
    return int.from_bytes(blake2b(what.encode() if isinstance(what, str) else what, digest_size=8).digest())


def _mixed(names: Names, salt: int) -> Names:
    """New names, different for each salt."""
    mixed = names + np.uint64(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0x9E3779B97F4A7C15)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed
