"""The executable: a program and how to call it, as canonical bytes. docs/reference/nxe.md is the specification of
the file.

Code only: weights are named, not held. Of constants those that the program carries are in the file; large ones are left
out by `without_large_constants`, kept by their digests like any blob, and given back by `with_constants`.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from nxpipe.emulator.errors import ExecutableInvalid
from nxpipe.emulator.executable.code import read_code, write_code
from nxpipe.emulator.executable.container import BODY, LONGEST_FILE, Section, packed, unpacked
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

__all__ = ["Counts", "Executable", "Port", "from_bytes", "read", "to_bytes"]

LARGE_CONSTANT: Final = 64 << 10  # bytes; from here on, sharing is worth a blob of its own


@dataclass(frozen=True)
class Counts:
    """What the code amounts to: instructions in its text, and how many each engine carries out in one run."""

    instructions: int
    carried_out: Mapping[Engine, int]


@dataclass(frozen=True)
class Executable:
    """`divisions`: for each buffer that holds a rank's piece of its tensors, which piece; others are whole."""

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
        """By name which piece a rank has of each tensor that is divided."""
        buffers = self.program.buffers
        divided = ((buffers[number], piece) for number, piece in self.divisions.items())
        return {name: piece for buffer, piece in divided if buffer.role is role for name in buffer.names}

    @property
    def absent_constants(self) -> tuple[str, ...]:
        """The digests of those that must be given before it can be loaded."""
        return tuple(sorted(constant_sizes(self.program.buffers).keys() - self.program.constants.keys()))

    def without_large_constants(self) -> "tuple[Executable, dict[str, bytes]]":
        """The executable as it is stored, and the constants to be stored beside it, by digest."""
        held = self.program.constants
        large = {digest: data for digest, data in held.items() if len(data) >= LARGE_CONSTANT}
        small = {digest: data for digest, data in held.items() if digest not in large}
        return replace(self, program=replace(self.program, constants=small)), large

    def with_constants(self, constants: Mapping[str, bytes]) -> "Executable":
        """Together with these; `from_bytes` of what comes of it would check them."""
        return replace(self, program=replace(self.program, constants={**self.program.constants, **constants}))


def to_bytes(executable: Executable) -> bytes:
    """The executable as canonical bytes; ExecutableInvalid where its form has no room for what the program holds."""
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
    """The executable that these bytes are. Hostile bytes cost no more than their length, and end in
    ExecutableInvalid."""
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
    _require_places(executable, interface)
    _require_canonical(executable, data)
    return executable


def read(path: Path) -> Executable:
    """The executable in a file, of which no more is read than one may have."""
    with path.open("rb") as file:
        return from_bytes(file.read(LONGEST_FILE + 1))


def _require_places(executable: Executable, at: int) -> None:
    """Each port has a buffer of its name, role and type."""
    buffers = executable.program.buffers
    places = {(it.role, name): number for number, it in enumerate(buffers) for name in it.names}
    for port in executable.ports:
        if (port.role, port.name) not in places:
            raise ExecutableInvalid(at, f"no buffer holds the {port.role} {port.name[:40]!r}")
        number = places[port.role, port.name]
        buffer = buffers[number]
        own = _on_rank(port.type, executable.divisions.get(number))
        if own is None or own.shape != buffer.shape or own.dtype.on_device is not buffer.dtype or buffer.order:
            raise ExecutableInvalid(at, f"buffer {number} does not hold a {port.type} as {port.name[:40]!r} is one")


def _on_rank(whole: TensorType, piece: Sharding | None) -> TensorType | None:
    if piece is None:
        return whole
    divided = piece.axis < whole.rank and whole.shape[piece.axis] == sum(piece.sizes)
    return piece.local(whole) if divided else None


def _require_canonical(executable: Executable, data: bytes) -> None:
    again = to_bytes(executable)
    if again != data:
        # The table's digests differ wherever anything does; what is wrong is the first byte behind it.
        ends = range(BODY + 1, len(again) + 1)
        at = BODY + bisect_left(ends, True, key=lambda end: not data.startswith(again[BODY:end], BODY))
        raise ExecutableInvalid(at, "the same executable has another spelling, and only that one is allowed")


def _write_totals(counts: Counts) -> bytes:
    out = Writer()
    words = SharedWriter(out)
    out.number(counts.instructions)
    out.number(len(counts.carried_out))
    for engine, number in counts.carried_out.items():
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
