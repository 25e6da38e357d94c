"""Where words go: results to stdout, talk to stderr; colour only where a person looks."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import click


@dataclass
class Console:
    """How one invocation speaks. Options after any command may change it, so it is the one mutable thing."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def result(self, text: str) -> None:
        """Print what the command was asked for."""
        click.echo(text, color=_coloured(sys.stdout))

    def data(self, value: object) -> None:
        """Print a result for machines: one JSON document."""
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))

    def say(self, text: str) -> None:
        if not self.quiet:
            click.echo(text, err=True, color=_coloured(sys.stderr))

    def detail(self, text: str) -> None:
        if self.verbose:
            self.say(text)

    def complain(self, text: str) -> None:
        """An error is said even when quiet was asked for."""
        click.echo(click.style("Error: ", fg="red", bold=True) + text, err=True, color=_coloured(sys.stderr))

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Announce a piece of work and, when it is done, how long it took: one line, rewritten on a terminal."""
        live = sys.stderr.isatty() and not self.quiet
        if live:
            click.echo(f"  {title} ...", nl=False, err=True)
        started = time.monotonic()
        try:
            yield
        except BaseException:
            if live:
                click.echo("", err=True)
            raise
        if live:
            click.echo("\r\033[K", nl=False, err=True)
        self.say(f"  {title} {click.style(f'{time.monotonic() - started:.1f} s', dim=True)}")


def _coloured(stream: IO[str]) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain columns, two spaces apart; a cell may be coloured, and nothing follows the last one."""
    cells = [[click.style(title, bold=True) for title in header], *rows]
    widths = [max(len(click.unstyle(row[column])) for row in cells) for column in range(len(header))]
    return "\n".join("  ".join(map(_padded, row, widths)).rstrip() for row in cells)


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - len(click.unstyle(cell)))


def human_bytes(count: int) -> str:
    """A size as people read it: 437.9 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
