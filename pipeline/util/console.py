"""The console of a command: results on stdout, progress and errors on stderr, colour on terminals only."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from nxpipe.pipeline.util.exit_codes import ExitCode
from nxpipe.pipeline.util.text import (
    folded,
    for_json,
    for_json_text,
    for_log,
    line_for,
    screen_width,
    shown,
    style,
    unstyled,
)

_CLEARED = "\r\033[K"  # clears the terminal row of the cursor


@dataclass
class Console:
    """The output of one invocation. Mutable, because --json, --quiet and --verbose may follow the command.

    Each argument is one line: unprintable characters, including line breaks, are printed as escapes. No other code in
    `pipeline` writes to the stdout or stderr of a command, and only `style` sets colours.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def result(self, *lines: str) -> None:
        """Print the result of the command."""
        _write(lines, sys.stdout)

    def page(self, text: str) -> None:
        """Print text of several lines, such as a table; untrusted text in it must be escaped already."""
        _write(text.split("\n"), sys.stdout)

    def stream(self, text: str) -> None:
        """Print a part of a text as it comes; line breaks stay, other unprintable characters become escapes."""
        _write_raw("\n".join(map(for_log, text.split("\n"))), sys.stdout, end="")

    def data(self, value: object) -> None:
        """Print the result as one JSON document."""
        _write_raw(for_json(value, 2, ascii_only=not _has_all_characters(sys.stdout)), sys.stdout)

    def data_line(self, value: object, *, err: bool = False) -> None:
        """Print one JSON document per line."""
        stream = sys.stderr if err else sys.stdout
        _write_raw(for_json(value, ascii_only=not _has_all_characters(stream)), stream)

    def data_text(self, document: str) -> None:
        """Print a stored JSON document, byte for byte."""
        _write_raw(for_json_text(document), sys.stdout)

    def say(self, *lines: str) -> None:
        """Print to stderr, unless --quiet."""
        if not self.quiet:
            _write(lines, sys.stderr)

    def detail(self, *lines: str) -> None:
        if self.verbose:
            self.say(*lines)

    def complain(self, first: str, *further: str, code: ExitCode | None = None, see: str | None = None) -> None:
        """Print an error, even with --quiet. With --json, an error that ends the command with `code` is one document on
        one line. `see` is the command whose help explains it."""
        if self.json and code is not None:
            self.data_line({"error": _error_document(code, (first, *further), see)}, err=True)
            return
        first = f"{first} (see {see})" if see else first
        _write([style("Error: ", fg="red", bold=True) + first, *further], sys.stderr)

    def trace(self, text: str) -> None:
        """Print a traceback or a worker's log, line by line."""
        _write(text.rstrip("\n").split("\n"), sys.stderr)

    def command(self, line: str) -> None:
        """Print a workflow command for the runner of GitHub Actions, from `escape.workflow_command`."""
        _write_raw(line, sys.stderr)

    @property
    def live(self) -> bool:
        """True if stderr is a terminal whose rows can be rewritten."""
        return _is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb" and not self.quiet and not self.json

    def overwrite(self, line: str) -> None:
        """Replace the terminal row of the cursor."""
        _write_raw(f"\r{_as_line(line, sys.stderr)}\033[K", sys.stderr, end="")

    def clear_row(self) -> None:
        _write_raw(_CLEARED, sys.stderr, end="")

    def clear_rows(self, count: int) -> None:
        """Clear the last rows, to print them again."""
        _write_raw(f"\033[{count}A\033[J", sys.stderr, end="")

    @contextmanager
    def screen(self) -> Iterator[Callable[[Sequence[str]], None]]:
        """A screen that is drawn again and again; at the end the terminal shows what it showed before.

        The drawn lines must fit the terminal.
        """

        def draw(lines: Sequence[str]) -> None:
            rows = "\n".join(f"{_as_line(line, sys.stderr)}\033[K" for line in lines)
            _write_raw(f"\033[H{rows}\033[J", sys.stderr, end="")

        _write_raw("\033[?1049h\033[?25l", sys.stderr, end="")  # the alternate screen, without a cursor
        try:
            yield draw
        finally:
            _write_raw("\033[?25h\033[?1049l", sys.stderr, end="")

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Print the title of a step and its duration at the end: one line, rewritten on a terminal."""
        live = _is_terminal(sys.stderr) and not self.quiet
        if live:
            _write_raw(_as_line(f"  {title} ...", sys.stderr), sys.stderr, end="")
        started = time.monotonic()
        try:
            yield
        except BaseException:
            if live:
                _write_raw("", sys.stderr)
            raise
        if live:
            self.clear_row()
        self.say(f"  {title} {style(f'{time.monotonic() - started:.1f} s', dim=True)}")


def _error_document(code: ExitCode, lines: Sequence[str], see: str | None) -> dict[str, object]:
    """The error document of docs/reference/exit-codes.md."""
    hint = f"See `{see}`; nothing was changed." if see else code.remedy
    document = {"exit_code": code.number, "name": code.name, "message": lines[0], "hint": hint}
    return document | ({"details": list(lines[1:])} if len(lines) > 1 else {})


def reported_error(line: str) -> str | None:
    """The message of an error that a command printed as this line of stderr, with --json or without; None for another
    line."""
    if line.startswith("Error: "):
        return line.removeprefix("Error: ")
    try:
        document = json.loads(line)
    except ValueError:
        return None
    error = document.get("error") if isinstance(document, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else None


class Guarded:
    """stdout or stderr for libraries: escapes their warnings and tracebacks, which may quote names of models."""

    def __init__(self, stream: TextIO) -> None:
        self.own = stream  # for the console only, which escapes its text itself

    def write(self, text: str) -> int:
        self.own.write("\n".join(map(for_log, text.split("\n"))))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def guard_streams() -> None:
    for name in ("stdout", "stderr"):
        setattr(sys, name, Guarded(getattr(sys, name)))


def unguarded(stream: TextIO) -> TextIO:
    """The stream inside a guard, for text that is escaped already."""
    return stream.own if isinstance(stream, Guarded) else stream


def _write(lines: Sequence[str], stream: TextIO | None) -> None:
    if stream is not None:
        width = screen_width(stream)
        rows = [row for line in lines for row in (_rows(line, width) if width else [line])]
        _write_raw("\n".join(_as_line(row, stream) for row in rows), stream)


def _rows(line: str, width: int) -> list[str]:
    """A line as rows of a screen, wrapped between words; further rows are indented by two."""
    line = shown(line)
    start = line[: len(line) - len(line.lstrip(" "))]
    return [line] if len(unstyled(line)) <= width else folded(line, width, start + "  ")


def _write_raw(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """Write and flush; the stream is None if the process was started with it closed."""
    if stream is not None:
        inner = unguarded(stream)
        inner.write(text + end)
        inner.flush()


def _as_line(line: str, stream: TextIO) -> str:
    return line_for(line, coloured=_coloured(stream))


def _has_all_characters(stream: TextIO | None) -> bool:
    return stream is None or (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
