"""Finds the line of every key in a TOML document, which `tomllib` does not tell.

The text must be valid TOML: it is read only after `tomllib` has accepted it, so nothing is checked twice here.
"""

import re
import tomllib
from bisect import bisect_left

from nxpipe.pipeline.config.faults import KeyPath

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
_STRING = re.compile(
    r'''"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}|'{3}(?:[^']|'{1,2}(?!'))*'{3,5}|"(?:[^"\\]|\\.)*"|'[^']*\'''', re.DOTALL
)
_SCALAR = re.compile(r"[^,\]}#\n]+")


def locate(text: str) -> dict[KeyPath, int]:
    """The line on which each key, table and array item of a valid document stands."""
    scan = _Scan(text)
    table: KeyPath = ()
    while not scan.ended():
        table = scan.statement(table)
    return scan.lines


class _Scan:
    """A position in the text, and the lines of the keys behind it."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._at = 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._arrays: dict[KeyPath, int] = {}  # how many [[headers]] each array of tables has had so far

    def ended(self) -> bool:
        self._skip_blank()
        return self._at >= len(self._text)

    def statement(self, table: KeyPath) -> KeyPath:
        """Read one header or one `key = value`; return the table that the next statement belongs to."""
        line = self._line()
        if self._take("[["):
            return self._array_header(line)
        if self._take("["):
            return self._header(line)
        self._pair(table)
        return table

    def _array_header(self, line: int) -> KeyPath:
        *parents, last = self._keys()
        self._take("]]")
        array = (*self._enter(parents, line), last)
        index = self._arrays.get(array, 0)
        self._arrays[array] = index + 1
        self.lines.setdefault(array, line)
        self.lines[*array, index] = line
        return (*array, index)

    def _header(self, line: int) -> KeyPath:
        *parents, last = self._keys()
        self._take("]")
        table = (*self._enter(parents, line), last)
        self.lines[table] = line  # even if a subtable implied it earlier: this is where its own keys begin
        return table

    def _enter(self, parents: list[str], line: int) -> KeyPath:
        """The path of a header's parents; inside an array of tables that is its newest table."""
        path: KeyPath = ()
        for key in parents:
            path = (*path, key)
            self.lines.setdefault(path, line)
            if path in self._arrays:
                path = (*path, self._arrays[path] - 1)
        return path

    def _pair(self, table: KeyPath) -> None:
        line, path = self._line(), table
        for key in self._keys():
            path = (*path, key)
            self.lines.setdefault(path, line)
        self._take("=")
        self._skip_blank()
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        if self._take("["):
            index = 0
            while not self._take("]"):
                self.lines[*path, index] = self._line()
                self._value((*path, index))
                self._take(",")
                index += 1
        elif self._take("{"):
            while not self._take("}"):
                self._pair(path)
                self._take(",")
        else:
            value = _STRING.match(self._text, self._at) or _SCALAR.match(self._text, self._at)
            assert value is not None, "only text that tomllib accepts is located"
            self._at = value.end()

    def _keys(self) -> list[str]:
        """A dotted key, taken apart; quoted parts are read by `tomllib` itself, escapes and all."""
        keys: list[str] = []
        while not keys or self._take("."):
            self._skip_blank()
            word = _KEY.match(self._text, self._at)
            assert word is not None, "only text that tomllib accepts is located"
            self._at = word.end()
            quoted = word[0][0] in "\"'"
            keys.append(tomllib.loads(f"key = {word[0]}")["key"] if quoted else word[0])
        return keys

    def _take(self, token: str) -> bool:
        """Step over blanks and `token`, if it comes next."""
        self._skip_blank()
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True

    def _skip_blank(self) -> None:
        blank = _BLANK.match(self._text, self._at)
        assert blank is not None, "the pattern matches nothing as well"
        self._at = blank.end()

    def _line(self) -> int:
        return bisect_left(self._newlines, self._at) + 1
