"""The assembler: from the text of `nxpipe.emulator.isa.text`, or of a test, to a program.

It checks the grammar but not legality, so that a test of `legality` can write an illegal program. The text may come
from a fuzzer: numbers and patterns are bounded before they are used, so that the work is proportional to the length of
the text.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Final, TypeVar

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.executable.code import INSTRUCTIONS
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, RotatingOffset
from nxpipe.emulator.isa.instruction import Alu, Engine, Instruction, Wait
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role, Step
from nxpipe.emulator.isa.scalar import Function
from nxpipe.emulator.isa.text import ARROW

_SPACE: Final = re.compile(r"[ \t]*(?:#.*)?")
_INTEGER: Final = re.compile(r"-?[0-9]{1,20}(?![0-9])")
_NUMBER: Final = re.compile(r"-?(?:inf|nan|[0-9]{1,25}(?:\.[0-9]{0,25})?(?:[eE][+-]?[0-9]{1,3})?)(?![0-9A-Za-z_.])")
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL: Final = re.compile(r"[A-Za-z0-9_.*~-]+")
_INDEX: Final = re.compile(r"i([0-9]{1,2})(?![0-9A-Za-z_])")
_STRING: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_DIGITS: Final = re.compile(r"[0-9]{1,20}(?![0-9])")
_MINUS: Final = re.compile(r"-")
_TILE: Final = re.compile(r"(?:sbuf|psum)[ \t]*\[")
_MOST_AXES: Final = 16  # axes of a pattern or shape: far more than is legal
_MOST_TERMS: Final = 64

_DTYPES: Final = {dtype.short: dtype for dtype in DType}
_MEMORIES: Final = {memory.value: memory for memory in Memory}

T = TypeVar("T")


class TextInvalid(CompileError):
    """The text of a program cannot be parsed; has the position and the expected syntax."""

    def __init__(self, line: int, column: int, expected: str, found: str) -> None:
        self.line, self.column, self.expected = line, column, expected
        seen = f"found {found[:20]!r}" if found else "the line ends"
        super().__init__(f"line {line}, column {column}: expected {expected}, and {seen}")


class Scanner:
    """A position in one line; leading spaces and comments are skipped."""

    def __init__(self, text: str, line: int, position: int = 0) -> None:
        self._text = text
        self._line = line
        self._position = position
        self._skip()

    @property
    def at_end(self) -> bool:
        return self._position == len(self._text)

    def wrong(self, expected: str) -> TextInvalid:
        return TextInvalid(self._line, self._position + 1, expected, self._text[self._position :])

    def end(self) -> None:
        if not self.at_end:
            raise self.wrong("the end of the line")

    def take(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        found = pattern.match(self._text, self._position)
        if found is None:
            raise self.wrong(expected)
        self._position = found.end()
        self._skip()
        return found

    def sees(self, pattern: re.Pattern[str]) -> bool:
        return pattern.match(self._text, self._position) is not None

    def accept(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._position):
            return False
        self._position += len(mark)
        self._skip()
        return True

    def expect(self, mark: str) -> None:
        if not self.accept(mark):
            raise self.wrong(f"'{mark}'")

    def word(self, expected: str) -> str:
        return self.take(_WORD, expected)[0]

    def label(self) -> str:
        return self.take(_LABEL, "a buffer's label")[0]

    def integer(self, expected: str = "a whole number of at most 20 digits") -> int:
        return int(self.take(_INTEGER, expected)[0])

    def number(self) -> float:
        return float(self.take(_NUMBER, "a number")[0])

    def string(self) -> str:
        here = self._position
        try:
            value = json.loads(self.take(_STRING, "a string in quotes")[0])
        except ValueError:
            self._position = here
            raise self.wrong("a string with the escapes of JSON") from None
        assert isinstance(value, str)
        return value

    def choice(self, known: Mapping[str, T], what: str) -> T:
        here, expected = self._position, f"{what}: {', '.join(known)}"
        word = self.word(expected)
        if word not in known:
            self._position = here
            raise self.wrong(expected)
        return known[word]

    def dtype(self) -> DType:
        return self.choice(_DTYPES, "a type")

    def integers(self) -> tuple[int, ...]:
        """Integers in brackets."""
        self.expect("[")
        found: list[int] = []
        while not self.accept("]"):
            if found:
                self.expect(",")
            if len(found) == _MOST_AXES:
                raise self.wrong(f"at most {_MOST_AXES} numbers")
            found.append(self.integer())
        return tuple(found)

    def affine(self, *, turning: bool = True) -> Affine:
        """A sum of numbers, multiples of indices, and rotating offsets where they are permitted."""
        base, terms, turns = 0, dict[int, int](), list[RotatingOffset]()
        for _ in range(_MOST_TERMS):
            factor = -1 if self.accept("-") else 1
            has_digits = self.sees(_DIGITS)
            if has_digits:
                factor *= int(self.take(_DIGITS, "a number")[0])
            if has_digits and not self.accept("*"):
                base += factor
            elif turning and self.accept("("):
                turns.append(self._turn(factor))
            else:
                depth = int(self.take(_INDEX, "a number, or the index of a loop such as i0")[1])
                terms[depth] = terms.get(depth, 0) + factor
            if not self.accept("+") and not self.sees(_MINUS):
                return Affine(base, tuple(sorted((d, c) for d, c in terms.items() if c)), tuple(turns))
        raise self.wrong(f"a sum of at most {_MOST_TERMS} terms")

    def _turn(self, step: int) -> RotatingOffset:
        wrapped = self.accept("(")
        of = self.affine(turning=False)
        if wrapped:
            self.expect(")")
        self.expect("%")
        count = self.integer()
        if count < 1:
            raise self.wrong("at least one turn in front of this")
        self.expect(")")
        return RotatingOffset(step, count, of)

    def place(self, labels: Mapping[str, int]) -> Place:
        here = self._position
        label = self.label()
        if label in _MEMORIES:
            return self._tile(Memory(label))
        if label not in labels:
            self._position = here
            raise self.wrong("sbuf, psum or the label of a buffer")
        self.expect("[")
        offset = self.affine()
        self.expect(":")
        dtype, axes = self._pattern()
        rows = None
        if self.accept(","):
            self.expect("rows")
            rows = self.tile()
        self.expect("]")
        return Far(labels[label], dtype, offset, axes, rows)

    def tile(self) -> Tile:
        return self._tile(self.choice(_MEMORIES, "a memory"))

    @property
    def sees_tile(self) -> bool:
        return self.sees(_TILE)

    def _tile(self, memory: Memory) -> Tile:
        self.expect("[")
        start = self.integer()
        self.expect(":")
        stop = self.integer()
        self.expect(",")
        offset = self.affine()
        self.expect(":")
        dtype, axes = self._pattern()
        self.expect("]")
        return Tile(memory, dtype, start, stop - start, offset, axes)

    def _pattern(self) -> tuple[DType, tuple[Axis, ...]]:
        dtype = self.dtype()
        result: list[tuple[int, int | None]] = []
        while self.accept("x") if result else self.sees(_INTEGER):
            if len(result) == _MOST_AXES:
                raise self.wrong(f"at most {_MOST_AXES} axes")
            size = self.integer("the size of an axis")
            result.append((size, self.integer("a stride") if self.accept("@") else None))
        axes: list[Axis] = []
        stride = 1
        for size, own in reversed(result):
            axes.append(Axis(size, stride if own is None else own))
            stride *= size
        return dtype, tuple(reversed(axes))

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._position)
        if found is not None:
            self._position = found.end()


_LONGEST: Final = 2**27  # characters of a text
_DEEPEST: Final = 32  # nested loops
_MOST_NAMES: Final = 65536  # bytes of all buffers together: a repeated number is short as text
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
    kind: {field.name: field for field in fields(kind) if field.name not in ("engine", "waits", "note")}
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
    """The state of the parser; `_bodies` are the bodies of the open loops, outermost (the program) first."""

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
        """A line outside of the body: a buffer, a note, the bytes of a constant."""
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
            raise scanner.wrong(f"an unused label before this one; {label[:60]!r} is taken")
        self._labels[label] = len(self._buffers)
        scanner.expect(":")
        dtype, shape = scanner.dtype(), scanner.integers()
        scanner.expect("at")
        address = scanner.integer()
        order = scanner.integers() if scanner.accept("order") else ()
        tile = scanner.integer() if scanner.accept("tile") else 0
        names = self._names(scanner) if scanner.accept("names") else (label,)
        self._buffers.append(Buffer(role, names, dtype, shape, order, address, tile))

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
        """Close the loops right of the margin."""
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
    missing = [name for name, operand in operands.items() if name not in given and operand.default is MISSING]
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
