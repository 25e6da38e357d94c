"""Where words go: results to stdout, talk to stderr; colour only where a person looks."""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import click

from nxpipe.pipeline.util.escape import for_json, for_json_text, for_log, line_for, style

_CLEARED = "\r\033[K"  # the row of the terminal that the cursor is in


@dataclass
class Console:
    """How one invocation speaks. Options after any command may change it, so it is the one mutable thing.

    Each argument is a line, and stays one: what cannot be printed in it, line breaks too, leaves as an escape. Nothing
    else in `pipeline` writes to stdout or stderr of a command, and no text has a colour but by `style`.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def result(self, *lines: str) -> None:
        """Print what the command was asked for."""
        _write(lines, sys.stdout)

    def page(self, text: str) -> None:
        """Print what has lines of our own, such as a table: what others wrote in it was escaped when it came in."""
        _write(text.split("\n"), sys.stdout)

    def data(self, value: object) -> None:
        """Print a result for machines: one JSON document."""
        _write_raw(for_json(value, 2, ascii_only=not _has_all_characters(sys.stdout)), sys.stdout)

    def data_line(self, value: object, *, err: bool = False) -> None:
        """A JSON document in a line, of which a program reads many."""
        stream = sys.stderr if err else sys.stdout
        _write_raw(for_json(value, ascii_only=not _has_all_characters(stream)), stream)

    def data_text(self, document: str) -> None:
        """JSON that was written elsewhere, in the very words that it has."""
        _write_raw(for_json_text(document), sys.stdout)

    def say(self, *lines: str) -> None:
        if not self.quiet:
            _write(lines, sys.stderr)

    def detail(self, *lines: str) -> None:
        if self.verbose:
            self.say(*lines)

    def complain(self, first: str, *further: str) -> None:
        """An error is said even when quiet was asked for."""
        _write([style("Error: ", fg="red", bold=True) + first, *further], sys.stderr)

    def trace(self, text: str) -> None:
        """A traceback or the log of a worker, line by line."""
        _write(text.rstrip("\n").split("\n"), sys.stderr)

    def command(self, line: str) -> None:
        """To the runner of GitHub Actions, as `escape.workflow_command` makes it."""
        _write_raw(line, sys.stderr)

    @property
    def live(self) -> bool:
        """Whether a row of stderr can be written over."""
        return _is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb" and not self.quiet and not self.json

    def overwrite(self, line: str) -> None:
        """Put it into the row of the terminal that the cursor is in."""
        _write_raw(f"\r{_as_line(line, sys.stderr)}\033[K", sys.stderr, end="")

    def clear_row(self) -> None:
        _write_raw(_CLEARED, sys.stderr, end="")

    def clear_rows(self, count: int) -> None:
        """What the last rows said, to say it anew."""
        _write_raw(f"\033[{count}A\033[J", sys.stderr, end="")

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Announce a piece of work and, when it is done, how long it took: one line, rewritten on a terminal."""
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


class Guarded:
    """stdout or stderr as libraries see it: their warnings and tracebacks hold names out of models, too."""

    def __init__(self, stream: TextIO) -> None:
        self.own = stream  # ours alone: what is written there was escaped

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


def own(stream: TextIO) -> TextIO:
    return stream.own if isinstance(stream, Guarded) else stream


def _write(lines: Sequence[str], stream: TextIO | None) -> None:
    if stream is not None:
        _write_raw("\n".join(_as_line(line, stream) for line in lines), stream)


def _write_raw(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """Python has no stream where a process was started with a closed one; what would go there is for nobody."""
    if stream is not None:
        click.echo(text + end, file=own(stream), nl=False, color=True)


def _as_line(line: str, stream: TextIO) -> str:
    return line_for(line, coloured=_coloured(stream))


def _has_all_characters(stream: TextIO | None) -> bool:
    return stream is None or (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
