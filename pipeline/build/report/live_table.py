"""A build on a terminal: how far it is, who works on what, and what failed last. The one file that imports rich."""

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

from nxpipe.pipeline.build.jobs import Event
from nxpipe.pipeline.build.report.text import clock, counted, duration
from nxpipe.pipeline.build.state import Lot, Named, Standing
from nxpipe.pipeline.util.console import own

_COLOURS: Final[dict[Lot, str]] = {
    "found": "cyan",
    "built": "green",
    "running": "yellow",
    "waiting": "",
    "failed": "red",
}
_ROOM_FOR_STEP: Final = 50  # columns of a terminal from which on there is room for one more of ours
_ROOM_FOR_WORKER: Final = 76
_ROOM_FOR_TIME_LEFT: Final = 44
_AROUND: Final = 8  # lines besides those of what runs and of what failed


class LiveTable:
    """Drawn anew on the beat, however many events there are in between."""

    every = 0.25

    def __init__(self) -> None:
        # Texts are strangers': no markup, no emoji codes, no guesses at what to highlight.
        self._console = Console(file=own(sys.stderr), markup=False, emoji=False, highlight=False)
        self._stderr = sys.stderr
        self._live: Live | None = None

    def heard(self, event: Event, standing: Standing) -> None:
        if self._live is None:
            self._start()
            self.beat(standing)

    def beat(self, standing: Standing) -> None:
        if self._live is not None:
            self._live.update(screen(standing, *self._console.size), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            sys.stderr = self._stderr

    def _start(self) -> None:
        """Results on stdout are none of its business."""
        sys.stderr = Above(self._console, self._stderr)
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()
        # Who is killed cannot give the cursor back, so it is never taken away.
        self._console.show_cursor(True)


class Above(FileProxy):
    """What others say on stderr appears above the table. click would look for bytes behind it and go past us."""

    buffer = None


def screen(standing: Standing, width: int, height: int) -> RenderableType:
    """Everything that is shown at one moment."""
    failures = list(standing.failures)[: max(height - _AROUND - 1, 0)]
    room = max(height - _AROUND - len(failures), 1)
    parts = [_time(standing, width), _bar(standing), _counts(standing), Text(), _running(standing, width, room)]
    if (more := len(standing.running()) - room) > 0:
        parts.append(Text(f"and {more:,} more", style="dim"))
    return Group(*parts, *([Text(), _failures(failures, width)] if failures else []))


def _time(standing: Standing, width: int) -> RenderableType:
    left = standing.seconds_left()
    time = f"{clock(standing.elapsed)} elapsed"
    if left and width >= _ROOM_FOR_TIME_LEFT:
        time += f", about {duration(left)} left"
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    artifacts = f"{standing.published} of {counted(standing.artifacts, 'artifact')} published"
    grid.add_row(Text(artifacts, style="bold"), Text(time, style="dim"))
    return grid


def _bar(standing: Standing) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_row(
        ProgressBar(total=standing.cells, completed=standing.done, complete_style="green", finished_style="green")
    )
    return grid


def _counts(standing: Standing) -> RenderableType:
    shown = [(lot, count) for lot, count in standing.counts().items() if count or lot != "failed"]
    parts = [Text(f"{count:,} {lot}", style=_COLOURS.get(lot, "") if count else "dim") for lot, count in shown]
    return Text("  ", no_wrap=True, overflow="ellipsis").join(parts)


def _running(standing: Standing, width: int, room: int) -> RenderableType:
    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("PROGRAM", no_wrap=True, overflow="ellipsis")
    table.add_column("OF", ratio=3)
    if width >= _ROOM_FOR_WORKER:
        table.add_column("WORKER", no_wrap=True, overflow="ellipsis", max_width=18)
    if width >= _ROOM_FOR_STEP:
        table.add_column("STEP", no_wrap=True, overflow="ellipsis", ratio=2)
    table.add_column("TIME", no_wrap=True, justify="right", min_width=4)
    for one in standing.running()[:room]:
        row: list[RenderableType] = [Text(one.item.program), BothEnds(one.item.title)]
        row += [Text(one.worker, style="dim")] if width >= _ROOM_FOR_WORKER else []
        row += [Text(one.step)] if width >= _ROOM_FOR_STEP else []
        table.add_row(*row, Text(clock(standing.since(one))))
    return table


def _failures(failures: Sequence[tuple[Named, str]], width: int) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column(no_wrap=True, style="red")
    grid.add_column(no_wrap=True, overflow="ellipsis")
    if width >= _ROOM_FOR_WORKER:
        grid.add_column(ratio=2)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=3)
    for named, why in failures:
        title: list[RenderableType] = [BothEnds(named.title)] if width >= _ROOM_FOR_WORKER else []
        grid.add_row("failed", Text(named.program), *title, Text(why))
    return grid


@dataclass(frozen=True)
class BothEnds:
    """A title in one line: the model stands at its beginning, and what tells two of its artifacts apart at its end."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room, text = options.max_width, self.text
        if cell_len(text) > room:
            half = max(room - 1, 0) // 2
            text = f"{set_cell_size(text, room - 1 - half).rstrip()}\N{HORIZONTAL ELLIPSIS}{_end(text, half)}"
        yield Text(text, no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, cell_len(self.text))


def _end(text: str, room: int) -> str:
    """As much of the end as has room: a character may take two columns."""
    while cell_len(text) > room:
        text = text[1:]
    return text
