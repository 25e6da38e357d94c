"""The executable (.nxe): a program and its interface as canonical bytes, specified in docs/reference/nxe.md.

The file has a table of sections with their offsets and digests. Weights are named, not included. Small constants are in
the file; `without_large_constants` removes the large ones, which are stored as blobs, and `with_constants` restores
them.
"""

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Final

from nxpipe.emulator.errors import ExecutableInvalid
from nxpipe.emulator.executable.code import read_code, write_code
from nxpipe.emulator.executable.field_codecs import Reader, SharedWriter, WordReader, Writer
from nxpipe.emulator.executable.tables import (
    Port,
    constant_sizes,
    read_buffers,
    read_constants,
    read_divisions,
    read_notes,
    read_ports,
    write_buffers,
    write_constants,
    write_divisions,
    write_notes,
    write_ports,
)
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.program import Program, Role, counted, instructions
from nxpipe.emulator.passes.shard import Sharding

MAGIC: Final = b"\x89NXE\r\n\x1a\n"
VERSION: Final = 3
LONGEST_FILE: Final = 32 << 20  # bytes
_HEAD: Final = struct.Struct("<8sII")
_ROW: Final = struct.Struct("<IQQ32s")


class Section(IntEnum):
    TOTALS = 1
    INTERFACE = 2
    BUFFERS = 3
    DIVISIONS = 4
    NOTES = 5
    CODE = 6
    CONSTANTS = 7

    @property
    def label(self) -> str:
        return self.name.lower()


BODY: Final = _HEAD.size + len(Section) * _ROW.size  # where the first section begins


def packed(sections: Mapping[Section, bytes]) -> bytes:
    rows, offset = [], BODY
    for section in Section:
        data = sections[section]
        rows.append(_ROW.pack(section, offset, len(data), hashlib.sha256(data).digest()))
        offset += len(data)
    if offset > LONGEST_FILE:
        raise ExecutableInvalid(LONGEST_FILE, _too_long(offset))
    return b"".join([_HEAD.pack(MAGIC, VERSION, len(Section)), *rows, *(sections[section] for section in Section)])


def unpacked(data: bytes) -> dict[Section, Reader]:
    """A reader for each section, after verification of the digests."""
    if len(data) > LONGEST_FILE:
        raise ExecutableInvalid(LONGEST_FILE, _too_long(len(data)))
    if not data.startswith(MAGIC):
        raise ExecutableInvalid(0, "the file has no executable header")
    if len(data) < BODY:
        raise ExecutableInvalid(len(data), f"the file ends before its table of sections does, at {BODY}")
    _, version, count = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ExecutableInvalid(8, f"the file has version {version}, and this reader supports {VERSION}; rebuild it")
    if count != len(Section):
        raise ExecutableInvalid(12, f"there are {count} sections, and version {VERSION} has {len(Section)}")
    readers, offset = {}, BODY
    for number, section in enumerate(Section):
        readers[section] = _section(data, _HEAD.size + number * _ROW.size, section, offset)
        offset += readers[section].left
    if offset != len(data):
        raise ExecutableInvalid(offset, f"{len(data) - offset} bytes follow the last section")
    return readers


def _section(data: bytes, row: int, section: Section, expected: int) -> Reader:
    kind, offset, size, digest = _ROW.unpack_from(data, row)
    if kind != section:
        raise ExecutableInvalid(row, f"section {kind} is at the position of section {section:d}, {section.label}")
    if offset != expected:
        raise ExecutableInvalid(
            row + 4, f"{section.label} has the offset {offset} in the table, and begins at {expected}"
        )
    if size > len(data) - offset:
        raise ExecutableInvalid(row + 12, f"{section.label} takes {size} bytes, and {len(data) - offset} are left")
    if hashlib.sha256(memoryview(data)[offset : offset + size]).digest() != digest:
        raise ExecutableInvalid(offset, f"{section.label} is damaged: its SHA-256 is not the one in the table")
    return Reader(data, offset, offset + size)


def _too_long(size: int) -> str:
    return f"the file takes {size} bytes or more, and {LONGEST_FILE} are allowed"


__all__ = ["Counts", "Executable", "Port", "from_bytes", "read", "to_bytes"]

LARGE_CONSTANT: Final = 64 << 10  # bytes; constants of this size or larger are blobs of their own


@dataclass(frozen=True)
class Counts:
    """The number of instructions in the text, and the number that each engine executes in one run."""

    instructions: int
    executed: Mapping[Engine, int]


@dataclass(frozen=True)
class Executable:
    """A program with its interface. `divisions` is the sharding of each buffer that holds a rank's part of its tensors;
    other buffers hold whole tensors."""

    program: Program
    ports: tuple[Port, ...] = ()
    divisions: Mapping[int, Sharding] = field(default_factory=dict)

    @property
    def counts(self) -> Counts:
        body = self.program.body
        return Counts(sum(1 for _ in instructions(body)), dict(sorted(counted(body).items())))

    def of_role(self, role: Role) -> dict[str, Port]:
        return {port.name: port for port in self.ports if port.role is role}

    def pieces(self, role: Role) -> dict[str, Sharding]:
        """The sharding of each divided tensor with this role, by name."""
        buffers = self.program.buffers
        divided = ((buffers[number], piece) for number, piece in self.divisions.items())
        return {name: piece for buffer, piece in divided if buffer.role is role for name in buffer.names}

    @property
    def absent_constants(self) -> tuple[str, ...]:
        """The digests of the constants that must be added (`with_constants`) before the program can be loaded."""
        return tuple(sorted(constant_sizes(self.program.buffers).keys() - self.program.constants.keys()))

    def without_large_constants(self) -> "tuple[Executable, dict[str, bytes]]":
        """The executable without large constants, and these constants by digest; both are stored."""
        constants = self.program.constants
        large = {digest: data for digest, data in constants.items() if len(data) >= LARGE_CONSTANT}
        small = {digest: data for digest, data in constants.items() if digest not in large}
        return replace(self, program=replace(self.program, constants=small)), large

    def with_constants(self, constants: Mapping[str, bytes]) -> "Executable":
        """The executable with these constants added. Their digests are not verified; `from_bytes` verifies them."""
        return replace(self, program=replace(self.program, constants={**self.program.constants, **constants}))


def to_bytes(executable: Executable) -> bytes:
    """The executable as canonical bytes; raises ExecutableInvalid if the program exceeds a limit of the format."""
    program = executable.program
    return packed(
        {
            Section.TOTALS: _write_totals(executable.counts),
            Section.INTERFACE: write_ports(executable.ports),
            Section.BUFFERS: write_buffers(program.core, program.ranks, program.buffers),
            Section.DIVISIONS: write_divisions(executable.divisions),
            Section.NOTES: write_notes(program.notes),
            Section.CODE: write_code(program.body),
            Section.CONSTANTS: write_constants(program.constants),
        }
    )


def from_bytes(data: bytes) -> Executable:
    """The executable from untrusted bytes; raises ExecutableInvalid. The work is at most linear in the length."""
    sections = unpacked(data)
    totals = _read_totals(sections[Section.TOTALS])
    core, ranks, buffers = read_buffers(sections[Section.BUFFERS])
    notes = read_notes(sections[Section.NOTES])
    body = read_code(sections[Section.CODE], len(buffers), len(notes))
    constants = read_constants(sections[Section.CONSTANTS], buffers)
    divisions = read_divisions(sections[Section.DIVISIONS], ranks, buffers)
    interface = sections[Section.INTERFACE].at
    ports = read_ports(sections[Section.INTERFACE])
    executable = Executable(Program(core, ranks, buffers, body, notes, constants), ports, divisions)
    if executable.counts != totals:
        raise ExecutableInvalid(BODY, "the totals are not those of the code")
    _require_port_buffers(executable, interface)
    _require_canonical(executable, data)
    return executable


def read(path: Path) -> Executable:
    """The executable in a file; reads at most the largest legal size."""
    with path.open("rb") as file:
        return from_bytes(file.read(LONGEST_FILE + 1))


def _require_port_buffers(executable: Executable, at: int) -> None:
    """Check that each port has a buffer with its name, role and type."""
    buffers = executable.program.buffers
    numbers = {(entry.role, name): number for number, entry in enumerate(buffers) for name in entry.names}
    for port in executable.ports:
        if (port.role, port.name) not in numbers:
            raise ExecutableInvalid(at, f"there is no buffer for the {port.role} {port.name[:40]!r}")
        number = numbers[port.role, port.name]
        buffer = buffers[number]
        local = _on_rank(port.type, executable.divisions.get(number))
        if local is None or local.shape != buffer.shape or local.dtype.on_device is not buffer.dtype or buffer.order:
            raise ExecutableInvalid(at, f"buffer {number} does not have the type {port.type} of {port.name[:40]!r}")


def _on_rank(whole: TensorType, piece: Sharding | None) -> TensorType | None:
    if piece is None:
        return whole
    divided = piece.axis < whole.rank and whole.shape[piece.axis] == sum(piece.sizes)
    return piece.local(whole) if divided else None


def _require_canonical(executable: Executable, data: bytes) -> None:
    canonical = to_bytes(executable)
    if canonical != data:
        # The digests in the table differ if any section does, so report the first differing byte after the table.
        ends = range(BODY + 1, len(canonical) + 1)
        at = BODY + bisect_left(ends, True, key=lambda end: not data.startswith(canonical[BODY:end], BODY))
        raise ExecutableInvalid(at, "the bytes are not the canonical form of this executable")


def _write_totals(counts: Counts) -> bytes:
    out = Writer()
    words = SharedWriter(out)
    out.number(counts.instructions)
    out.number(len(counts.executed))
    for engine, number in counts.executed.items():
        words.text(engine)
        out.number(number)
    return bytes(out.data)


def _read_totals(source: Reader) -> Counts:
    words = WordReader(source)
    count = source.number()
    engines = source.count("engines", len(Engine))
    counts = Counts(count, {words.word(Engine): source.number() for _ in range(engines)})
    source.end()
    return counts
