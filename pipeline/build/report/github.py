"""Report of a build in GitHub Actions: a table in the step's summary, and an annotation for each reason of failures.

Texts of models and errors reach GitHub escaped: no markup in markdown, and no command to the runner.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from nxpipe.pipeline.build.jobs import CellStatus
from nxpipe.pipeline.build.report.summary import (
    BraceGroup,
    MissingGroup,
    brace_groups,
    counted,
    duration,
    missing_groups,
    published,
    tally,
)
from nxpipe.pipeline.build.state import CellResult, Results
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import sentence_of
from nxpipe.pipeline.util.text import for_markdown, human_bytes, plain, workflow_command

MOST: Final = 1024 * 1024 - 1024  # bytes of a step's summary; GitHub rejects a larger one
_ANNOTATIONS: Final = 10  # of a kind and step; GitHub drops the others
_SHOWN: Final = 2000  # characters of an error
_NAMES: Final = 10  # groups of cells named in one annotation
_OPEN: Final = 20  # rows of a table that is not folded
_HEADER: Final = "| | program | of | time | memory | |\n|---|---|---|--:|--:|---|\n"


def in_github(environ: Mapping[str, str]) -> bool:
    return environ.get("GITHUB_ACTIONS") == "true"


def append_summary(summary: Callable[[int], str], environ: Mapping[str, str]) -> Path | None:
    """Append `summary(limit)`, of at most `limit` bytes, to the step's summary; None if there is no such file, or if
    the text does not fit."""
    name = environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return None
    path = Path(name)
    limit = MOST - (path.stat().st_size if path.exists() else 0)
    text = summary(limit).encode("utf-8", "replace")
    if not 0 < len(text) <= limit:
        return None
    # Non-blocking: a pipe without a reader is an error.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666), "ab") as file:
        file.write(text)
    return path


def show_summary(console: Console, write: Callable[[], object]) -> None:
    """Call `write`; an error is printed and does not fail the build."""
    try:
        write()
    except OSError as error:
        console.say(f"  the summary of the step cannot be written: {sentence_of(error)}")


def write_summary(results: Results, environ: Mapping[str, str]) -> Path | None:
    return append_summary(lambda limit: step_summary(results, limit), environ)


def step_summary(results: Results, limit: int = MOST) -> str:
    """Markdown of at most `limit` bytes: missing cells first, then as many of the others as fit."""
    mark = "❌" if results.missing() else "✅"
    text = f"## {mark} nxpipe build\n\n{tally(results)}; {published(results)}; {duration(results.seconds)}\n\n"
    text += _table(list(_missing_rows(results)), limit - _size(text))
    text += _table(list(_rows(results)), limit - _size(text), fold="Published")
    return text if _size(text) <= limit else ""


def _table(rows: list[str], limit: int, fold: str = "") -> str:
    """A table of at most `limit` bytes; a long one with a `fold` is folded under that title."""
    is_folded = bool(fold) and len(rows) > _OPEN
    opening, closing = (f"<details><summary>{fold}</summary>\n\n", "\n</details>\n") if is_folded else ("", "")
    overhead = _size(opening + _HEADER + _more(len(rows)) + closing)
    shown = list(_fitting(rows, limit - overhead))
    if not rows or limit < overhead:
        return ""
    omitted = _more(len(rows) - len(shown)) if len(shown) < len(rows) else ""
    return f"{opening}{_HEADER}{''.join(shown)}\n{omitted}{closing}"


def annotations(results: Results) -> list[str]:
    """Workflow commands, one a line: an error for each reason of failures, one warning for all other missing cells."""
    missing = missing_groups(results)
    failed = [group for group in missing if group.reason.status is CellStatus.FAILED]
    others = [cells for group in missing[len(failed) :] for cells in group.groups]
    lines = [workflow_command("error", f"nxpipe build: {group.reason.name}", _error(group)) for group in failed]
    if len(lines) > _ANNOTATIONS:
        omitted = counted(len(lines) - _ANNOTATIONS + 1, "more reason")
        lines[_ANNOTATIONS - 1 :] = [
            workflow_command("error", "nxpipe build", f"{omitted}: see the summary of the step")
        ]
    if others:
        lines.append(
            workflow_command(
                "warning", "nxpipe build: not tried", f"Not tried, not retried or blocked: {_names(others)}"
            )
        )
    return lines


def _error(group: MissingGroup) -> str:
    return f"{group.reason.text[:_SHOWN]}\n{_names(group.groups)}\n{group.reason.remedy}"


def _names(groups: list[BraceGroup[CellResult]]) -> str:
    names = [f"{plain(cells.members[0].artifact.title)}, {cells.name}" for cells in groups[:_NAMES]]
    omitted = [f"{len(groups) - _NAMES} more"] if len(groups) > _NAMES else []
    return "; ".join(names + omitted)[: 2 * _SHOWN]


def _missing_rows(results: Results) -> Iterator[str]:
    for group in missing_groups(results):
        mark = "❌" if group.reason.status is CellStatus.FAILED else "⏸️"
        text = f"{for_markdown(group.reason.text[:_SHOWN])} <br> {for_markdown(group.reason.remedy)}"
        for cells in group.groups:
            yield _row(mark, cells, text)


def _rows(results: Results) -> Iterator[str]:
    present = [result for result in results.cells() if not result.status.is_missing]
    for cells in brace_groups(
        present, lambda result: result.cell.shape, lambda result: (result.artifact.key, result.status)
    ):
        yield _row("✅", cells, cells.members[0].status.value)


def _row(mark: str, cells: BraceGroup[CellResult], text: str) -> str:
    """The row of a group: the total of its cells' times, and the largest of their memories."""
    seconds = sum(cell.seconds for cell in cells.members)
    memory = max(cell.memory for cell in cells.members)
    figures = f"{duration(seconds) if seconds else ''} | {human_bytes(memory) if memory else ''}"
    program, title = for_markdown(cells.name), for_markdown(plain(cells.members[0].artifact.title))
    return f"| {mark} | {program} | {title} | {figures} | {text} |\n"


def _fitting(rows: list[str], limit: int) -> Iterator[str]:
    for row in rows:
        limit -= _size(row)
        if limit < 0:
            return
        yield row


def _more(number: int) -> str:
    return f"\n{counted(number, 'row')} did not fit; the build report has all.\n"


def _size(text: str) -> int:
    return len(text.encode())
