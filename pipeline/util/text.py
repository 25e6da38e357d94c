"""Text output: spelling suggestions, tables, sizes; and escaping, with one function per medium."""

import difflib
import html
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, TextIO
from unicodedata import category


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was meant, or None if none is similar: the same letters, a prefix of one word only, then the
    most similar."""
    by_folded = {_folded(name): name for name in known}
    wanted = _folded(word)
    if wanted in by_folded:
        return by_folded[wanted]
    begun = [folded for folded in by_folded if len(wanted) >= _SHORTEST and folded.startswith(wanted)]
    if len(begun) == 1:
        return by_folded[begun[0]]
    close = difflib.get_close_matches(wanted, by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


_SHORTEST: Final = 3  # letters of a prefix that is no accident


def _folded(word: str) -> str:
    """Without what people mix up: capitals, hyphens, underscores, blanks."""
    return re.sub(r"[\s_-]+", "-", word.casefold()).strip("-")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The clause "; did you mean X?" of an error message; empty if no known word is similar."""
    guess = nearest(word, known)
    return f"; did you mean {guess!r}?" if guess else ""


@dataclass(frozen=True)
class Column:
    """A column of a table. On a screen that is too narrow for all, those with the largest `drop` are left out first,
    and named below the table; those with 0 stay. The cells of a `whole` column are not wrapped."""

    title: str
    drop: int = 0
    whole: bool = False


def screen_width(stream: TextIO | None = None) -> int | None:
    """The columns of the screen that stdout or another stream is shown on: of the terminal, or of COLUMNS. None for a
    pipe or a file, where a row is one line."""
    stated, stream = os.environ.get("COLUMNS", ""), stream or sys.stdout
    if not (stated.isdecimal() and int(stated)) and (stream is None or not stream.isatty()):
        return None
    return max(shutil.get_terminal_size().columns, _NARROWEST_SCREEN)


def table(
    header: Sequence[str | Column], rows: Iterable[Sequence[str]], width: int | None = None, *, indent: str = ""
) -> str:
    """Columns two spaces apart, without trailing blanks; numbers are aligned to the right. Cells may have styles. A row
    of one cell, of a table with more columns, is a heading of the rows below it.

    A table that is wider than the screen is wrapped between words; then it loses the columns that may be dropped; then
    words are broken, at a separator if they have one. If nothing helps, each row becomes a list.
    """
    layout = _Layout([each if isinstance(each, Column) else Column(each) for each in header], rows)
    width = width or screen_width()
    lines = layout.lines(width and max(width - len(indent), 1))
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


_NARROWEST_SCREEN: Final = 20
_BREAKS_AFTER: Final = re.compile(r"(?<=[/@=,_.:-])(?=[^/@=,_.:-])")  # of long words
_LONGEST_WORD: Final = 32  # longer ones may be broken
_NARROWEST: Final = 8  # of a column whose words are broken
_SHORT_TEXT: Final = 16  # of texts that are not wrapped before columns are dropped
_PROSE: Final = 30  # columns that a long text gets before columns are dropped
_PROSE_LINES: Final = 4
_NUMBER: Final = re.compile(r"[-+~<>]?\$?\d[\d,]*(\.\d+)?(e[-+]?\d+)?( ?(%|[A-Za-z/]{1,5}))?")
_NO_NUMBER: Final = ("", "-")


class _Layout:
    """The widths of a table's columns for a screen."""

    def __init__(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        self._columns = columns
        self._titles = [column.title.upper() for column in columns]
        self._all = [[shown(cell) for cell in row] for row in rows]
        self._rows = [row for row in self._all if not self._is_heading(row)]
        numbers = range(len(columns))
        cells = [[unstyled(row[number]) for row in self._rows] for number in numbers]
        self._numeric = [is_numeric(column) for column in cells]
        self._natural = [max(map(len, (self._titles[number], *cells[number]))) for number in numbers]
        self._words = [self._longest_word(number) for number in numbers]
        self._readable = [
            max(word, _readable(max(map(len, column), default=0)))
            for word, column in zip(self._words, cells, strict=True)
        ]

    def lines(self, width: int | None) -> list[str]:
        kept = list(range(len(self._columns)))
        if width is None:
            return self._table(kept, self._natural)
        dropped: list[int] = []
        while kept and _total([self._readable[number] for number in kept]) > width:
            last = max(kept, key=lambda number: (self._columns[number].drop, number))
            if not self._columns[last].drop:
                break
            kept.remove(last)
            dropped.append(last)
        widths = self._fitted(kept, width)
        lines = self._lists(kept, width) if widths is None else self._table(kept, widths, width)
        if dropped:
            names = ", ".join(self._columns[number].title.strip() for number in sorted(dropped))
            note = f"Not shown in {width} columns: {names}. A wider terminal or --json has them."
            lines += [style(line, dim=True) for line in folded(note, width)]
        return lines

    def _longest_word(self, number: int) -> int:
        """The width at which no word is broken. Numbers stay beside their units, and styled cells whole."""
        if self._is_whole(number):
            return max([*(len(unstyled(row[number])) for row in self._rows), *map(len, self._titles[number].split())])
        cells = (self._titles[number], *(row[number] for row in self._rows))
        return max((len(_indent(cell)) + len(word) for cell in cells for word in cell.split()), default=0)

    def _fitted(self, kept: Sequence[int], width: int) -> list[int] | None:
        """The widths of all columns; the widest are wrapped first. None if not even broken words fit."""
        widths = list(self._natural)
        long, pieces = (
            [word if self._is_whole(number) else min(word, limit) for number, word in enumerate(self._words)]
            for limit in (_LONGEST_WORD, _NARROWEST)
        )
        for least in (self._readable, self._words, long, pieces):
            while _total([widths[number] for number in kept]) > width:
                wide = [number for number in kept if widths[number] > least[number]]
                if not wide:
                    break
                widths[max(wide, key=widths.__getitem__)] -= 1
        return widths if _total([widths[number] for number in kept]) <= width else None

    def _is_whole(self, number: int) -> bool:
        """True if the cells of a column cannot be broken: numbers, whole cells, and texts with styles."""
        return (
            self._numeric[number]
            or self._columns[number].whole
            or any(row[number] != unstyled(row[number]) for row in self._rows)
        )

    def _is_heading(self, row: Sequence[str]) -> bool:
        return len(row) == 1 < len(self._columns)

    def _table(self, kept: Sequence[int], widths: Sequence[int], width: int | None = None) -> list[str]:
        titles = self._wrapped(self._titles, kept, widths)
        lines = [[style(cell, bold=True) if cell else "" for cell in line] for line in titles]
        texts = ["  ".join(self._aligned(line, kept, widths)).rstrip() for line in lines] if self._rows else []
        for row in self._all:
            if self._is_heading(row):
                texts += row if width is None else folded(row[0], width, "  ")
            else:
                wrapped = self._wrapped(row, kept, widths)
                texts += ["  ".join(self._aligned(line, kept, widths)).rstrip() for line in wrapped]
        return texts

    def _wrapped(self, row: Sequence[str], kept: Sequence[int], widths: Sequence[int]) -> Iterator[list[str]]:
        cells = [_cell_lines(row[number], widths[number]) for number in kept]
        yield from (list(line) for line in zip_longest(*cells, fillvalue=""))

    def _aligned(self, line: Sequence[str], kept: Sequence[int], widths: Sequence[int]) -> Iterator[str]:
        for cell, number in zip(line, kept, strict=True):
            blanks = " " * (widths[number] - len(unstyled(cell)))
            yield blanks + cell if self._numeric[number] else cell + blanks

    def _lists(self, kept: Sequence[int], width: int) -> list[str]:
        lines: list[str] = []
        for row in self._all:
            lines += [""] if lines else []
            if self._is_heading(row):
                lines += folded(row[0], width, "  ")
                continue
            for number in kept:
                title = self._titles[number]
                first, *others = folded(f"{title}  {unstyled(row[number])}", width, "  ")
                lines += [style(title, bold=True) + first.removeprefix(title), *others]
        return lines


def _indent(cell: str) -> str:
    return cell[: len(cell) - len(cell.lstrip(" "))]


def _cell_lines(cell: str, width: int) -> list[str]:
    return [cell] if len(unstyled(cell)) <= width else folded(cell, width, _indent(cell))


def _readable(longest: int) -> int:
    """The width of a column in which texts are easy to read."""
    return longest if longest <= _SHORT_TEXT else max(_SHORT_TEXT, min(-(-longest // _PROSE_LINES), _PROSE))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * max(len(widths) - 1, 0)


def is_numeric(cells: Sequence[str]) -> bool:
    return any(cells) and all(cell in _NO_NUMBER or _NUMBER.fullmatch(cell) for cell in cells)


def folded(text: str, width: int, indent: str = "") -> list[str]:
    """A text, which may have styles, in lines of at most `width` columns, wrapped between words. The lines after the
    first begin with `indent`. A word that is longer than a line is broken, at a separator if it has one."""
    words = text.lstrip(" ")
    lines, line, is_empty = [], text[: len(text) - len(words)], True
    for word in words.split(" "):
        joined = line + word if is_empty else f"{line} {word}"
        if len(unstyled(joined)) > width and not is_empty:
            lines.append(line.rstrip())
            joined = indent + word
        if len(unstyled(joined)) > width and joined == unstyled(joined):
            *whole, joined = _pieces(joined, width, indent)
            lines += whole
        line, is_empty = joined, False
    return [*lines, line.rstrip()]


def page_width(default: int = 80, most: int = 200) -> int:
    """Columns of a page of text: those of the screen, from 60 to `most`; `default` where there is none."""
    return min(max(screen_width() or default, 60), most)


def paragraph(text: str, width: int, *, first: str = "", others: str = "") -> list[str]:
    """A text without styles in lines of at most `width` columns, each with its indentation. A number stays with its
    unit."""
    joined = first + _UNIT.sub("\u00a0", text)  # `folded` breaks at blanks only
    return [line.replace("\u00a0", " ") for line in folded(joined, width, others)]


_UNIT: Final = re.compile(r"(?<=\d) (?=(?:%|min|h|s|ms)(?!\w))")


def _pieces(word: str, width: int, indent: str) -> list[str]:
    """The lines of one long word."""
    lines, line = [], ""
    for piece in _BREAKS_AFTER.split(word):
        if line.strip() and len(line + piece) > width:
            lines.append(line)
            line = indent
        line += piece
        while len(line) > width:
            lines.append(line[:width])
            line = indent + line[width:]
    return [*lines, line]


_STATE_COLOURS: Final = {"ok": "green", "fails": "red", "unknown": "yellow"}


def state_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table of the checks or steps of a report, whose first column is the state."""
    return table(header, [(style(state, fg=_STATE_COLOURS[state]), *cells) for state, *cells in rows])


def duration_text(seconds: float) -> str:
    """A duration in its two largest units: 3.2 s, 4 min 05 s, 2 h 10 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    if seconds < 86400:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{seconds // 86400:.0f} d {seconds % 86400 // 3600:.0f} h"


def human_bytes(count: int) -> str:
    """A size in decimal units: 437.9 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


# The mark of styles set by `style`. It is random in every process, so untrusted text cannot contain it.
_MARK: Final = f"\x1b{os.urandom(8).hex()}"
_STYLE: Final = re.compile(re.escape(_MARK) + r"\[([0-9;]*)m")
_RESET: Final = 0

_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
# The runner of GitHub Actions reads a line as a command if it begins with `::` after any blanks, or contains `##[`.
_COMMAND: Final = re.compile(r"^(\s*):(?=:)")
_OLD_COMMAND: Final = "##["
_MARKUP: Final = re.compile(r"""[\\`*_\[\]#|~:@/.$&<>"']""")
_NO_WIDTH: Final = "&#8203;"
_CONTROLS: Final = frozenset({"Cc", "Cf", "Cs"})  # C0, C1 and DEL; bidirectional and invisible; lone surrogates


def for_terminal(text: str) -> str:
    """One line for a terminal: unprintable characters, line breaks and tabs become escapes."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def for_log(line: str) -> str:
    """One line of output that GitHub Actions does not read as a workflow command."""
    line = for_terminal(line).replace(_OLD_COMMAND, r"#\x23[")
    return _COMMAND.sub(r"\1\\x3a", line)


def for_html(text: str) -> str:
    """HTML content or attribute value. Line breaks and tabs stay as white space."""
    return html.escape(_without_controls(text, "\n\t"), quote=True)


def for_markdown(text: str) -> str:
    """Markdown text without HTML, markup, links or GitHub mentions."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};{_NO_WIDTH if match[0] == '@' else ''}", for_terminal(text))


def workflow_command(name: str, title: str, message: str) -> str:
    """A workflow command of GitHub Actions; title and message cannot contain another one."""
    data = _workflow_data(message)
    return f"::{name} title={_workflow_data(title).replace(':', '%3A').replace(',', '%2C')}::{data}"


def for_json(value: object, indent: int | None = None, *, ascii_only: bool = False) -> str:
    """A JSON document without control characters or workflow commands; it parses to the same value."""
    return for_json_text(json.dumps(value, indent=indent, ensure_ascii=ascii_only))


def for_json_text(document: str) -> str:
    """`for_json` for a JSON text from another source; escapes in its strings keep their value."""
    if not document.replace("\n", "").isprintable():
        document = "".join(
            character if character.isprintable() or character == "\n" else _json_escape(character)
            for character in document
        )
    return document.replace(_OLD_COMMAND, r"#\u0023[")


def style(text: str, fg: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    """The text with a style mark, which `line_for` converts to terminal codes. Styles may be nested."""
    codes = [code for code, enabled in ((1, bold), (2, dim)) if enabled]
    codes += [_COLOURS[fg]] if fg else []
    return f"{_MARK}[{';'.join(map(str, codes))}m{shown(text)}{_MARK}[{_RESET}m" if codes else shown(text)


def shown(text: str) -> str:
    """`for_terminal` for text that may contain style marks, which stay."""
    if text.isprintable():
        return text
    parts = _STYLE.split(text)  # text, codes, text, codes, ..., text
    parts[::2] = map(for_terminal, parts[::2])
    parts[1::2] = (f"{_MARK}[{codes}m" for codes in parts[1::2])
    return "".join(parts)


def unstyled(text: str) -> str:
    return _STYLE.sub("", text)


def line_for(text: str, *, coloured: bool) -> str:
    """The escaped line, with terminal codes for its style marks or without."""
    line = for_log(unstyled(text))
    if coloured and _STYLE.search(text) and line == for_terminal(unstyled(text)):
        line = _STYLE.sub(lambda match: f"\x1b[{match[1]}m", shown(text))
    return line


_COLOURS: Final = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}


def _without_controls(text: str, kept: str) -> str:
    """The text with control, bidirectional and invisible characters as escapes."""
    if text.isprintable():
        return text
    return "".join(
        _escape(character) if category(character) in _CONTROLS and character not in kept else character
        for character in text
    )


def _escape(character: str) -> str:
    number = ord(character)
    if number > 0xFFFF:
        return f"\\U{number:08x}"
    return _SHORT.get(character) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")


def _json_escape(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) > 0x7F else f"\\u{ord(character):04x}"


def _workflow_data(text: str) -> str:
    """Percent-encode line breaks: the runner decodes %0A after it has parsed the command."""
    printable = _without_controls(text, "\r\n").replace(_OLD_COMMAND, r"#\x23[")
    return printable.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def plain(text: str) -> str:
    """A text from a model or an error as one line without control characters."""
    return for_log(" ".join(text.split()))
