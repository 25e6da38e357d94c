"""Reads one line of a program's text, from left to right: places, numbers that change with loops, names.

The text may come from anywhere. Whatever it says, the work is in proportion to its length: numbers and patterns are
bounded before anything is computed from them.
"""

import json
import re
from collections.abc import Mapping
from typing import Final, TypeVar

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, Turn
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile

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
_MOST_AXES: Final = 16  # of a pattern or shape: far more than is legal
_MOST_TERMS: Final = 64

_DTYPES: Final = {dtype.short: dtype for dtype in DType}
_MEMORIES: Final = {memory.value: memory for memory in Memory}

T = TypeVar("T")


class TextInvalid(CompileError):
    """A program's text cannot be read: where, and what was expected there."""

    def __init__(self, line: int, column: int, expected: str, found: str) -> None:
        self.line, self.column, self.expected = line, column, expected
        seen = f"found {found[:20]!r}" if found else "the line ends"
        super().__init__(f"line {line}, column {column}: expected {expected}, and {seen}")


class Scanner:
    """Where in a line the reading is; spaces in front of whatever comes next, and comments, do not count."""

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

    @property
    def sees_string(self) -> bool:
        return self.sees(_STRING)

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
        """In brackets."""
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
        """A sum of numbers, indices times numbers, and where they are allowed, turns."""
        base, terms, turns = 0, dict[int, int](), list[Turn]()
        for _ in range(_MOST_TERMS):
            factor = -1 if self.accept("-") else 1
            told = self.sees(_DIGITS)
            if told:
                factor *= int(self.take(_DIGITS, "a number")[0])
            if told and not self.accept("*"):
                base += factor
            elif turning and self.accept("("):
                turns.append(self._turn(factor))
            else:
                depth = int(self.take(_INDEX, "a number, or the index of a loop such as i0")[1])
                terms[depth] = terms.get(depth, 0) + factor
            if not self.accept("+") and not self.sees(_MINUS):
                return Affine(base, tuple(sorted((d, c) for d, c in terms.items() if c)), tuple(turns))
        raise self.wrong(f"a sum of at most {_MOST_TERMS} terms")

    def _turn(self, step: int) -> Turn:
        wrapped = self.accept("(")
        of = self.affine(turning=False)
        if wrapped:
            self.expect(")")
        self.expect("%")
        count = self.integer()
        if count < 1:
            raise self.wrong("at least one turn in front of this")
        self.expect(")")
        return Turn(step, count, of)

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
        told: list[tuple[int, int | None]] = []
        while self.accept("x") if told else self.sees(_INTEGER):
            if len(told) == _MOST_AXES:
                raise self.wrong(f"at most {_MOST_AXES} axes")
            size = self.integer("the size of an axis")
            told.append((size, self.integer("a stride") if self.accept("@") else None))
        axes: list[Axis] = []
        stride = 1
        for size, own in reversed(told):
            axes.append(Axis(size, stride if own is None else own))
            stride *= size
        return dtype, tuple(reversed(axes))

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._position)
        if found is not None:
            self._position = found.end()
