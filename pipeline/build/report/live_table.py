"""Live table of a build on a terminal: progress, running jobs, last failures. The only module that imports rich."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nxpipe.pipeline.build.jobs import BuildEvent, CellStatus
from nxpipe.pipeline.build.report.summary import clock, counted, duration
from nxpipe.pipeline.build.state import BuildState, JobName
from nxpipe.pipeline.util.console import unguarded
from nxpipe.pipeline.util.text import plain

_COLOURS: Final = {
    CellStatus.CACHED: "cyan",
    CellStatus.BUILT: "green",
    CellStatus.RUNNING: "yellow",
    CellStatus.QUEUED: "",
    CellStatus.FAILED: "red",
}
_STEP_WIDTH: Final = 50  # least width of a terminal, in columns, for this part of the display
_WORKER_WIDTH: Final = 76
_TIME_LEFT_WIDTH: Final = 44
_OTHER_LINES: Final = 8  # lines besides those of running jobs and of failures


class TableView:
    """The table on the terminal, redrawn at fixed intervals and not on each event."""

    every = 0.25

    def __init__(self) -> None:
        # Texts of models and errors: no markup, no emoji codes, no highlighting.
        self._console = Console(file=unguarded(sys.stderr), markup=False, emoji=False, highlight=False)
        self._stderr = sys.stderr
        self._live: Live | None = None

    def show(self, event: BuildEvent, state: BuildState) -> None:
        if self._live is None:
            self._start()
            self.beat(state)

    def beat(self, state: BuildState) -> None:
        if self._live is not None:
            self._live.update(screen(state, *self._console.size), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            sys.stderr = self._stderr

    def _start(self) -> None:
        """Start the display on stderr; stdout is for results."""
        sys.stderr = Above(self._console, self._stderr)
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()
        # A killed process cannot restore the cursor, so it is never hidden.
        self._console.show_cursor(True)


class Above(FileProxy):
    """Proxy of stderr that prints other output above the table."""

    buffer = None  # else click would write to the bytes below it, past this proxy


def screen(state: BuildState, width: int, height: int) -> RenderableType:
    """The complete display: totals, running jobs, last failures."""
    failures = list(state.failures)[: max(height - _OTHER_LINES - 1, 0)]
    rows = max(height - _OTHER_LINES - len(failures), 1)
    parts = [_time(state, width), _bar(state), _counts(state), Text(), _running(state, width, rows)]
    if (omitted := len(state.running()) - rows) > 0:
        parts.append(Text(f"and {omitted:,} more", style="dim"))
    return Group(*parts, *([Text(), _failures(failures, width)] if failures else []))


def _time(state: BuildState, width: int) -> RenderableType:
    seconds = state.seconds_left()
    time = f"{clock(state.elapsed)} elapsed"
    if seconds and width >= _TIME_LEFT_WIDTH:
        time += f", about {duration(seconds)} left"
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    artifacts = f"{state.published} of {counted(len(state.plan.artifacts), 'artifact')} published"
    grid.add_row(Text(artifacts, style="bold"), Text(time, style="dim"))
    return grid


def _bar(state: BuildState) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_row(ProgressBar(total=state.cells, completed=state.done, complete_style="green", finished_style="green"))
    return grid


def _counts(state: BuildState) -> RenderableType:
    counts = state.counts().items()
    shown = [(status, count) for status, count in counts if count or status is not CellStatus.FAILED]
    parts = [Text(f"{count:,} {status.value}", style=_COLOURS[status] if count else "dim") for status, count in shown]
    return Text("  ", no_wrap=True, overflow="ellipsis").join(parts)


def _running(state: BuildState, width: int, rows: int) -> RenderableType:
    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("PROGRAM", no_wrap=True, overflow="ellipsis")
    table.add_column("OF", ratio=3)
    if width >= _WORKER_WIDTH:
        table.add_column("WORKER", no_wrap=True, overflow="ellipsis", max_width=18)
    if width >= _STEP_WIDTH:
        table.add_column("STEP", no_wrap=True, overflow="ellipsis", ratio=2)
    table.add_column("TIME", no_wrap=True, justify="right", min_width=4)
    for attempt in state.running()[:rows]:
        row: list[RenderableType] = [Text(attempt.job.program), BothEnds(attempt.job.title)]
        row += [Text(plain(attempt.worker), style="dim")] if width >= _WORKER_WIDTH else []
        row += [Text(attempt.step)] if width >= _STEP_WIDTH else []
        table.add_row(*row, Text(clock(state.elapsed - attempt.began)))
    return table


def _failures(failures: Sequence[tuple[JobName, str]], width: int) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column(no_wrap=True, style="red")
    grid.add_column(no_wrap=True, overflow="ellipsis")
    if width >= _WORKER_WIDTH:
        grid.add_column(ratio=2)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=3)
    for job, why in failures:
        title: list[RenderableType] = [BothEnds(job.title)] if width >= _WORKER_WIDTH else []
        grid.add_row("failed", Text(job.program), *title, Text(why))
    return grid


@dataclass(frozen=True)
class BothEnds:
    """A title in one line, cut in its middle: the model is at its beginning, target and degree are at its end."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, text = options.max_width, self.text
        if cell_len(text) > width:
            half = max(width - 1, 0) // 2
            text = f"{set_cell_size(text, width - 1 - half).rstrip()}\N{HORIZONTAL ELLIPSIS}{_end(text, half)}"
        yield Text(text, no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, cell_len(self.text))


def _end(text: str, width: int) -> str:
    """The longest end of at most `width` columns; a character may take two."""
    while cell_len(text) > width:
        text = text[1:]
    return text
