"""A build in GitHub Actions: a table on the run's page, and a note on it for every reason that cells are missing.

Whatever a model or an error says reaches GitHub as text: in markdown nothing of it is markup, and no line of it is a
command to the runner.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from nxpipe.pipeline.build.report.folding import Fold, folds
from nxpipe.pipeline.build.report.reasons import Lack, missing
from nxpipe.pipeline.build.report.summary import published, tally
from nxpipe.pipeline.build.report.words import counted, duration, plain
from nxpipe.pipeline.build.results import CellResult, Results
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import sentence_of
from nxpipe.pipeline.util.escape import for_markdown, workflow_command
from nxpipe.pipeline.util.text import human_bytes

MOST: Final = 1024 * 1024 - 1024  # bytes of a step's summary; GitHub refuses a larger one whole
_ANNOTATIONS: Final = 10  # of a kind and step; GitHub drops the others
_SHOWN: Final = 2000  # characters of an error
_NAMES: Final = 10  # lots of cells named in one annotation
_OPEN: Final = 20  # rows of a table that is not folded away
_HEADER: Final = "| | program | of | time | memory | |\n|---|---|---|--:|--:|---|\n"


def in_github(environ: Mapping[str, str]) -> bool:
    return environ.get("GITHUB_ACTIONS") == "true"


def append_summary(summary: Callable[[int], str], environ: Mapping[str, str]) -> Path | None:
    """To the file that GitHub shows, of whose room `summary` is told; None where there is none, or no room in it."""
    name = environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return None
    path = Path(name)
    room = MOST - (path.stat().st_size if path.exists() else 0)
    text = summary(room).encode("utf-8", "replace")
    if not 0 < len(text) <= room:
        return None
    # A pipe without a reader is an error, and not waited for.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666), "ab") as file:
        file.write(text)
    return path


def show_summary(console: Console, write: Callable[[], object]) -> None:
    """What came of a build does not depend on whether its page can be written."""
    try:
        write()
    except OSError as error:
        console.say(f"  the summary of the step cannot be written: {sentence_of(error)}")


def write_summary(results: Results, environ: Mapping[str, str]) -> Path | None:
    return append_summary(lambda room: step_summary(results, room), environ)


def step_summary(results: Results, room: int = MOST) -> str:
    """Markdown of at most so many bytes: what is missing first, and as much of the rest as there is room for."""
    mark = "❌" if results.missing() else "✅"
    text = f"## {mark} nxpipe build\n\n{tally(results)}; {published(results)}; {duration(results.seconds)}\n\n"
    text += _table(list(_missing_rows(results)), room - _size(text))
    text += _table(list(_rows(results)), room - _size(text), fold="What is there")
    return text if _size(text) <= room else ""


def _table(rows: list[str], room: int, fold: str = "") -> str:
    """With a `fold`, a long one is shown to whoever clicks on that."""
    is_folded = bool(fold) and len(rows) > _OPEN
    opening, closing = (f"<details><summary>{fold}</summary>\n\n", "\n</details>\n") if is_folded else ("", "")
    around = _size(opening + _HEADER + _more(len(rows)) + closing)
    shown = list(_fitting(rows, room - around))
    if not rows or room < around:
        return ""
    more = _more(len(rows) - len(shown)) if len(shown) < len(rows) else ""
    return f"{opening}{_HEADER}{''.join(shown)}\n{more}{closing}"


def annotations(results: Results) -> list[str]:
    """Commands to the runner, each a line: an error for every reason of failures, one warning for all else."""
    lacks = missing(results)
    failed = [lack for lack in lacks if lack.reason.became == "failed"]
    rest = [lot for lack in lacks[len(failed) :] for lot in lack.lots]
    shown = [workflow_command("error", f"nxpipe build: {lack.reason.name}", _told(lack)) for lack in failed]
    if len(shown) > _ANNOTATIONS:
        more = counted(len(shown) - _ANNOTATIONS + 1, "more reason")
        shown[_ANNOTATIONS - 1 :] = [workflow_command("error", "nxpipe build", f"{more}: see the summary of the step")]
    if rest:
        shown.append(
            workflow_command("warning", "nxpipe build: not tried", f"Not tried, or waiting for others: {_names(rest)}")
        )
    return shown


def _told(lack: Lack) -> str:
    return f"{lack.reason.text[:_SHOWN]}\n{_names(lack.lots)}\n{lack.reason.way_out}"


def _names(lots: list[Fold[CellResult]]) -> str:
    named = [f"{plain(lot.members[0].artifact.title)}, {lot.name}" for lot in lots[:_NAMES]]
    beside = [f"{len(lots) - _NAMES} more"] if len(lots) > _NAMES else []
    return "; ".join(named + beside)[: 2 * _SHOWN]


def _missing_rows(results: Results) -> Iterator[str]:
    for lack in missing(results):
        mark = "❌" if lack.reason.became == "failed" else "⏸️"
        told = f"{for_markdown(lack.reason.text[:_SHOWN])} <br> {for_markdown(lack.reason.way_out)}"
        for lot in lack.lots:
            yield _row(mark, lot, told)


def _rows(results: Results) -> Iterator[str]:
    there = [one for one in results.cells() if not one.is_missing]
    for lot in folds(there, lambda one: one.cell.shape, lambda one: (one.artifact.key, one.fate)):
        yield _row("✅", lot, lot.members[0].fate)


def _row(mark: str, lot: Fold[CellResult], told: str) -> str:
    """Of cells that are told together, the time of all and the memory of the largest."""
    seconds = sum(one.seconds for one in lot.members)
    memory = max(one.memory for one in lot.members)
    figures = f"{duration(seconds) if seconds else ''} | {human_bytes(memory) if memory else ''}"
    program, title = for_markdown(lot.name), for_markdown(plain(lot.members[0].artifact.title))
    return f"| {mark} | {program} | {title} | {figures} | {told} |\n"


def _fitting(rows: list[str], room: int) -> Iterator[str]:
    for row in rows:
        room -= _size(row)
        if room < 0:
            return
        yield row


def _more(number: int) -> str:
    return f"\n{counted(number, 'row')} had no room here; the build report has all.\n"


def _size(text: str) -> int:
    return len(text.encode())
