"""The assembler: reads what `text` writes, and any program that a person writes in the same way.

It says what stands where, not whether that is legal: a program for a test of `limits` has to be writable.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Final

from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instructions import INSTRUCTIONS, Alu, Engine, Function, Instruction, Wait
from nxpipe.emulator.isa.operands import Far, Place, Tile
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role, Step
from nxpipe.emulator.isa.scan import Scanner, TextInvalid
from nxpipe.emulator.isa.text import ARROW

_LONGEST: Final = 2**27  # characters
_DEEPEST: Final = 32  # loops around an instruction
_MOST_NAMES: Final = 65536  # of all buffers together: a run of numbers is short as text
_MARGIN: Final = re.compile(r" *")
_KEY: Final = re.compile(r"([a-z_0-9]+)=")
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})+")
_RUN: Final = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})(?:/([0-9]{1,9}))?(?![0-9])")

_ENGINES: Final = {engine.value: engine for engine in Engine}
_ROLES: Final = {role.value: role for role in Role}
_ALUS: Final = {op.value: op for op in Alu}
_FUNCTIONS: Final = {function.value: function for function in Function}
_TRUTHS: Final = {"true": True, "false": False}
_ENTRIES: Final[Mapping[str, Role | str]] = {**_ROLES, "note": "note", "notes": "notes", "bytes": "bytes"}
_OPERANDS: Final[Mapping[type[Instruction], Mapping[str, Field[Any]]]] = {
    kind: {each.name: each for each in fields(kind) if each.name not in ("engine", "waits", "note")}
    for kind in INSTRUCTIONS.values()
}
_IN_BODY: Final = re.compile(rf"(?:loop|at|{'|'.join(_ENGINES)})(?![A-Za-z0-9_])")


def program(text: str) -> Program:
    if len(text) > _LONGEST:
        raise TextInvalid(1, 1, f"at most {_LONGEST} characters", f"{len(text)} characters")
    reader = _Reader()
    for number, line in enumerate(text.split("\n"), 1):
        margin = _MARGIN.match(line)
        assert margin is not None
        scanner = Scanner(line, number, margin.end())
        if not scanner.at_end:
            reader.line(scanner, margin.end())
    return reader.program()


class _Reader:
    """What has been read so far. `_bodies` are those of the loops that are still open, the program's own first."""

    def __init__(self) -> None:
        self._core = ""
        self._ranks = 1
        self._buffers: list[Buffer] = []
        self._labels: dict[str, int] = {}
        self._names_left = _MOST_NAMES
        self._bodies: list[list[Step]] = [[]]
        self._counts: list[int] = []
        self._note = 0
        self._notes: list[str] | None = []
        self._constants: dict[str, list[bytes]] = {}

    def line(self, scanner: Scanner, margin: int) -> None:
        if not self._core:
            self._head(scanner)
        elif scanner.sees(_IN_BODY):
            self._end_loops(scanner, margin)
            self._step(scanner)
        elif margin:
            raise scanner.wrong("an engine, 'loop' or 'at'")
        else:
            self._entry(scanner)
        scanner.end()

    def program(self) -> Program:
        if not self._core:
            raise TextInvalid(1, 1, "'core'", "")
        while self._counts:
            self._end_loop()
        return Program(
            core=self._core,
            ranks=self._ranks,
            buffers=tuple(self._buffers),
            body=tuple(self._bodies[0]),
            notes=() if self._notes is None else tuple(self._notes) or ("",),
            constants={digest: b"".join(parts) for digest, parts in self._constants.items()},
        )

    def _head(self, scanner: Scanner) -> None:
        scanner.expect("core")
        self._core = scanner.word("a generation")
        scanner.expect(",")
        scanner.expect("ranks")
        self._ranks = scanner.integer()

    def _entry(self, scanner: Scanner) -> None:
        """What stands around the instructions: a buffer, a note, the bytes of a constant."""
        word = scanner.choice(_ENTRIES, "a line that begins with")
        if isinstance(word, Role):
            self._buffer(scanner, word)
        elif word == "bytes":
            parts = self._constants.setdefault(scanner.string(), [])
            parts.append(b"" if scanner.at_end else bytes.fromhex(scanner.take(_HEX, "pairs of hexadecimal digits")[0]))
        elif word == "notes":
            scanner.expect("none")
            self._notes = None
        else:
            self._add_note(scanner)

    def _add_note(self, scanner: Scanner) -> None:
        self._notes = self._notes or []
        if scanner.accept("0"):
            following = 0
        else:
            self._notes = self._notes or [""]
            following = len(self._notes)
            scanner.expect(str(following))
        if following != len(self._notes):
            raise scanner.wrong("one note of each number")
        self._notes.append(scanner.string())

    def _buffer(self, scanner: Scanner, role: Role) -> None:
        label = scanner.label()
        if label in self._labels or label in ("sbuf", "psum"):
            raise scanner.wrong(f"another label than {label[:60]!r} in front of this, which is taken")
        self._labels[label] = len(self._buffers)
        scanner.expect(":")
        dtype, shape = scanner.dtype(), scanner.integers()
        scanner.expect("at")
        address = scanner.integer()
        order = scanner.integers() if scanner.accept("order") else ()
        names = self._names(scanner) if scanner.accept("names") else (label,)
        self._buffers.append(Buffer(role, names, dtype, shape, order, address))

    def _names(self, scanner: Scanner) -> tuple[str, ...]:
        names = [] if scanner.at_end else [scanner.string()]
        run = None if scanner.at_end or scanner.accept(",") else scanner.take(_RUN, "',', or a run such as 0..31")
        if run is not None:
            first, last, step = int(run[1]), int(run[2]), int(run[3] or 1)
            counted = range(first, last + 1, max(step, 1))
            if not 1 <= len(counted) <= self._names_left:
                raise scanner.wrong(f"a run of 1 to {self._names_left} names in front of this")
            prefix, suffix = names[0], scanner.string()
            names = [f"{prefix}{number}{suffix}" for number in counted]
        elif not scanner.at_end:
            names.append(scanner.string())
            while scanner.accept(","):
                names.append(scanner.string())
        self._names_left -= len(names) if run is not None else 0
        return tuple(names)

    def _end_loops(self, scanner: Scanner, margin: int) -> None:
        """Those that the line is not inside of."""
        depth, odd = divmod(margin, 2)
        if odd or depth > len(self._counts):
            raise scanner.wrong(f"at most {2 * len(self._counts)} spaces in front, and two for each loop")
        while len(self._counts) > depth:
            self._end_loop()

    def _end_loop(self) -> None:
        body = tuple(self._bodies.pop())
        self._bodies[-1].append(Loop(self._counts.pop(), body))

    def _step(self, scanner: Scanner) -> None:
        if scanner.accept("loop"):
            depth = len(self._counts)
            if depth == _DEEPEST:
                raise scanner.wrong(f"at most {_DEEPEST} loops inside of each other")
            scanner.expect(f"i{depth}")
            scanner.expect("<")
            self._counts.append(scanner.integer())
            scanner.expect(":")
            self._bodies.append([])
        elif scanner.accept("at"):
            self._note = scanner.integer()
        else:
            engine = scanner.choice(_ENGINES, "an engine")
            self._bodies[-1].append(_instruction(scanner, engine, self._labels, self._note))


def _instruction(scanner: Scanner, engine: Engine, labels: Mapping[str, int], note: int) -> Instruction:
    kind = scanner.choice(INSTRUCTIONS, "an instruction")
    operands = _OPERANDS[kind]
    given: dict[str, Any] = {"dst": _read(scanner, operands["dst"], labels)}
    scanner.expect(ARROW)
    while True:
        key = scanner.take(_KEY, "an operand")[1] if scanner.sees(_KEY) else "src"
        if key not in operands or key in given:
            raise scanner.wrong(f"the value of one of {', '.join(name for name in operands if name not in given)}")
        given[key] = _read(scanner, operands[key], labels)
        if not scanner.accept(","):
            break
    missing = [name for name, each in operands.items() if name not in given and each.default is MISSING]
    if missing:
        raise scanner.wrong(f"also {', '.join(f'{name}=' for name in missing)}")
    return kind(engine=engine, waits=_waits(scanner), note=note, **given)


def _waits(scanner: Scanner) -> tuple[Wait, ...]:
    waits: list[Wait] = []
    if scanner.accept("after"):
        while not waits or scanner.accept(","):
            engine = scanner.choice(_ENGINES, "an engine")
            scanner.expect(">=")
            waits.append(Wait(engine, scanner.affine()))
    return tuple(waits)


def _read(scanner: Scanner, operand: Field[Any], labels: Mapping[str, int]) -> object:
    if operand.type == Place:
        return scanner.place(labels)
    if operand.type == Far:
        if scanner.sees_tile:
            raise scanner.wrong("a place in a buffer")
        return scanner.place(labels)
    return _READERS[operand.type](scanner)


_READERS: Final[Mapping[object, Callable[[Scanner], object]]] = {
    Tile: Scanner.tile,
    Tile | None: Scanner.tile,
    float: Scanner.number,
    float | Tile: lambda scanner: scanner.tile() if scanner.sees_tile else scanner.number(),
    int: Scanner.integer,
    tuple[int, ...]: Scanner.integers,
    Affine: Scanner.affine,
    bool: lambda scanner: scanner.choice(_TRUTHS, "true or false"),
    Alu: lambda scanner: scanner.choice(_ALUS, "an operator"),
    Alu | None: lambda scanner: scanner.choice(_ALUS, "an operator"),
    Function: lambda scanner: scanner.choice(_FUNCTIONS, "a function"),
}
