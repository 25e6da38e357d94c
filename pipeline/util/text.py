"""Text output: spelling suggestions, tables, sizes; and escaping, with one function per medium."""

import difflib
import html
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import Final
from unicodedata import category


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most similar known word, or None if none is similar."""
    by_folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The clause "; did you mean X?" of an error message; empty if no known word is similar."""
    guess = nearest(word, known)
    return f"; did you mean {guess!r}?" if guess else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, without trailing blanks; cells may have styles."""
    cells = [[style(title, bold=True) for title in header], *([shown(cell) for cell in row] for row in rows)]
    widths = [max(len(unstyled(row[column])) for row in cells) for column in range(len(header))]
    return "\n".join("  ".join(map(_padded, row, widths)).rstrip() for row in cells)


def wrapped_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """A table of at most `width` columns: cells without styles are wrapped, the widest ones first.

    Words are broken only if the columns would be too wide otherwise.
    """
    cells = [[shown(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(unstyled(row[column])) for row in cells) for column in range(len(header))]
    available = max(width - 2 * (len(widths) - 1), _NARROWEST * len(widths))
    words = [_longest_word(row[column] for row in cells) for column in range(len(header))]
    while sum(widths) > available:
        roomy = [column for column, word in enumerate(words) if widths[column] > min(word, _LONGEST_WORD)]
        widest = max(roomy or range(len(widths)), key=widths.__getitem__)
        widths[widest] -= 1
    lines = [line for row in rows for line in _lines(row, widths)]
    return table(header, lines)


_NARROWEST: Final = 8  # of a column
_LONGEST_WORD: Final = 32  # longer ones are broken


_STATE_COLOURS: Final = {"ok": "green", "fails": "red", "unknown": "yellow"}


def state_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table of the checks or steps of a report, whose first column is the state.

    On a terminal wide texts are wrapped; elsewhere a row is one line.
    """
    coloured = [(style(state, fg=_STATE_COLOURS[state]), *cells) for state, *cells in rows]
    if sys.stdout.isatty():
        return wrapped_table(header, coloured, shutil.get_terminal_size().columns)
    return table(header, coloured)


def _longest_word(cells: Iterable[str]) -> int:
    return max((len(word) for cell in cells for word in unstyled(cell).split()), default=0)


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[list[str]]:
    wrapped = [
        [cell] if len(unstyled(cell)) <= width else wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(row, widths, strict=True)
    ]
    return [list(line) for line in zip_longest(*wrapped, fillvalue="")]


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - len(unstyled(cell)))


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
