"""TOML documents: reading with a remedy for each syntax error, and the line of every key, which `tomllib` omits."""

import re
import tomllib
from bisect import bisect_left
from pathlib import Path
from typing import Any, Final, NoReturn

from nxpipe.pipeline.config.messages import ConfigInvalid, Fault, NoConfiguration, shown
from nxpipe.pipeline.config.schema import KeyPath
from nxpipe.pipeline.util.files import DocumentInvalid, read_file, toml_of

_SIZE_LIMIT: Final = 1 << 20  # bytes: more than any real file, few enough to parse quickly
_SMALLEST_DOCUMENT: Final = (
    'at least the table [project] with a name, such as name = "search"; `nxpipe init` writes a whole file'
)
_BYTE_ORDER_MARKS: Final = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_POSITION: Final = r" \((?:at line ([0-9]+), column ([0-9]+)|at end of document)\)$"

# nxpipe.toml may be a link to any file, even one with secrets: a fault quotes a line only if the file has the header of
# a table of nxpipe.toml.
_OWN_TABLE: Final = re.compile(
    r"^[ \t]*\[{1,2}[ \t]*(?:project|store|models|fleets|endpoints|network|rollout|build|verify|channels|signing)\b",
    re.MULTILINE,
)

# The messages of `tomllib`, and the remedy for each.
_REMEDIES: Final = (
    ("Cannot overwrite a value", "each key only once in a table"),
    ("Cannot declare", "each [table] only once; one more item of a list is headed [[table]]"),
    (
        "Cannot mutate immutable namespace",
        "no further keys for a table that is written in braces or as a list in brackets",
    ),
    ("Cannot redefine namespace", "no second definition of a table that dotted keys define"),
    ("Duplicate inline table key", "each key only once in a table"),
    ("Invalid value", "a value: text in quotes; numbers, true and false without quotes"),
    ("Expected '=' after a key", "a line of the form key = value, and quotes around a key with unusual characters"),
    ("Expected newline or end of document", "one key = value on each line"),
    ("Unterminated string", "a closing quote at the end of the text"),
    ("Unescaped '\\' in a string", "\\\\ for a backslash, or single quotes around text with backslashes"),
    ("Unclosed array", "a comma between two items, and ] at the end of the list"),
    ("Unclosed inline table", "a comma between two keys, and } at the end of the table"),
    ("Illegal character '\\n'", "a closing quote on the same line"),
    ("Illegal character", "printable characters, or \\uXXXX in double quotes"),
    ("Invalid date or datetime", "a valid calendar date"),
)


def read_document(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of the file and the document in it, or `ConfigInvalid`."""
    text = _decode(path, _bytes(path))
    try:
        document = toml_of(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigInvalid([_syntax_fault(path, text, str(error))]) from error
    except DocumentInvalid as error:
        _refuse(path, error.lineno, str(error), "no more than a few levels, and numbers that fit in 64 bits")
    if not document:
        _refuse(path, None, "no settings", _SMALLEST_DOCUMENT)
    return text, document


def _bytes(path: Path) -> bytes:
    try:
        return read_file(path, limit=_SIZE_LIMIT)
    except DocumentInvalid as error:
        _refuse(path, None, str(error), "a configuration within that size")
    except FileNotFoundError:
        raise ConfigInvalid([NoConfiguration(str(path), None, "", "no such file", "the configuration")]) from None
    except IsADirectoryError:
        _refuse(path, None, "a folder", f"a file; for a file in that folder, pass --config {path / 'nxpipe.toml'}")
    except OSError as error:
        _refuse(path, None, f"a file that cannot be read ({error.strerror})", "a file that this user may read")


def _decode(path: Path, data: bytes) -> str:
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            _refuse(path, 1, f"a byte order mark of {encoding}", "UTF-8 without a byte order mark")
    try:
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        _refuse(path, line, f"the byte 0x{data[error.start]:02x}, which is not UTF-8 here", "text in UTF-8")


def _syntax_fault(path: Path, text: str, message: str) -> Fault:
    position = re.search(_POSITION, message)
    lines = text.split("\n")
    line = int(position[1]) if position and position[1] else len(text.rstrip().split("\n"))
    reason = message[: position.start()] if position else message
    remedy = next((text for words, text in _REMEDIES if reason.startswith(words)), f"valid TOML ({reason})")
    if not _OWN_TABLE.search(text):
        return Fault(str(path), line, "", "no table of nxpipe.toml", f"a file with the table [project], and {remedy}")
    return Fault(str(path), line, "", shown(lines[line - 1].strip()), remedy)


def _refuse(path: Path, line: int | None, found: str, allowed: str) -> NoReturn:
    raise ConfigInvalid([Fault(str(path), line, "", found, allowed)])


_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
_STRING = re.compile(
    r'''"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}|'{3}(?:[^']|'{1,2}(?!'))*'{3,5}|"(?:[^"\\]|\\.)*"|'[^']*\'''', re.DOTALL
)
_SCALAR = re.compile(r"[^,\]}#\n]+")


def locate(text: str) -> dict[KeyPath, int]:
    """The line of each key, table and array item. The text must be valid TOML; the scan does not check it."""
    scan = _Scan(text)
    table: KeyPath = ()
    while not scan.ended():
        table = scan.statement(table)
    return scan.lines


class _Scan:
    """A scan position in the text, and the lines of the keys before it."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._at = 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._arrays: dict[KeyPath, int] = {}  # the number of [[headers]] of each array of tables so far

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
        self.lines[table] = line  # overrides the line of a subtable's header, which implied the table earlier
        return table

    def _enter(self, parents: list[str], line: int) -> KeyPath:
        """The path of a header's parents; a parent that is an array of tables stands for its last table."""
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
            assert value is not None, "the text is valid TOML"
            self._at = value.end()

    def _keys(self) -> list[str]:
        """The parts of a dotted key; `tomllib` reads quoted parts, with their escapes."""
        keys: list[str] = []
        while not keys or self._take("."):
            self._skip_blank()
            word = _KEY.match(self._text, self._at)
            assert word is not None, "the text is valid TOML"
            self._at = word.end()
            quoted = word[0][0] in "\"'"
            keys.append(tomllib.loads(f"key = {word[0]}")["key"] if quoted else word[0])
        return keys

    def _take(self, token: str) -> bool:
        """Skip blanks, then `token` if it is next; return True if it was."""
        self._skip_blank()
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True

    def _skip_blank(self) -> None:
        blank = _BLANK.match(self._text, self._at)
        assert blank is not None, "the pattern also matches the empty string"
        self._at = blank.end()

    def _line(self) -> int:
        return bisect_left(self._newlines, self._at) + 1
