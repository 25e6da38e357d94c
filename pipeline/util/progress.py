"""Progress of transfers on stderr: a bar on a terminal, periodic lines elsewhere, JSON lines with --json."""

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Final, Self, TypeAlias

from nxpipe.artifact_store.backends.protocol import Sent
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import for_terminal, human_bytes

_BAR: Final = 24  # characters
_SHOWN_EVERY: Final = 0.1  # seconds, on a terminal
_SAID_EVERY: Final = 5.0  # seconds, in a log
_REMEMBERED: Final = 10.0  # seconds over which the rate is taken

_Clock = Callable[[], float]

# Opens the progress of one object, by title and size; gives the callback for sent bytes.
Watch = Callable[[str, int], AbstractContextManager[Sent]]


class Progress:
    """The progress of one transfer; `sent` may be called by one thread at a time.

    With `--json`, prints periodic lines `{"done": .., "total": .., "bytes_per_second": .., "seconds_left": ..}`. With
    `--quiet`, prints nothing.
    """

    def __init__(self, console: Console, title: str, total: int, clock: _Clock = time.monotonic) -> None:
        self._console = console
        self._title = for_terminal(title)
        self._total = total
        self._clock = clock
        self._live = console.live
        self._every = _SHOWN_EVERY if self._live else _SAID_EVERY
        self._done = 0
        self._spoke = clock()
        self._seen = deque([(self._spoke, 0)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._console.clear_row()

    def sent(self, size: int) -> None:
        """Count sent bytes; a negative size takes back bytes of a failed attempt."""
        self._done += size
        now = self._clock()
        if now - self._spoke >= self._every and not self._console.quiet:
            self._spoke = now
            self._say(now)

    def _say(self, now: float) -> None:
        self._seen.append((now, self._done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _REMEMBERED:
            self._seen.popleft()
        began, before = self._seen[0]
        rate = max(self._done - before, 0) / (now - began)
        left = (self._total - self._done) / rate if rate else None
        if self._console.json:
            figures = {"done": self._done, "total": self._total, "bytes_per_second": round(rate), "seconds_left": left}
            self._console.data_line(figures, err=True)
        elif self._live:
            filled = _BAR * min(self._done, self._total) // self._total if self._total else _BAR
            bar = f"  [{'#' * filled:{_BAR}}] "
            self._console.overwrite(_in_one_row(bar, self._words(rate, left)))
        else:
            self._console.say(f"  {self._words(rate, left)}")

    def _words(self, rate: float, left: float | None) -> str:
        # Retries may send more than the total.
        share = 100 * min(self._done, self._total) // self._total if self._total else 100
        time_left = "" if left is None else f", {_duration(left)} left"
        return f"{self._title}: {share} % of {human_bytes(self._total)}, {human_bytes(round(rate))}/s{time_left}"


@contextmanager
def watching(console: Console, title: str, total: int) -> Iterator[Sent]:
    with Progress(console, title, total) as progress:
        yield progress.sent


def _in_one_row(bar: str, words: str) -> str:
    """One terminal row, because wrapped rows cannot be rewritten: without the bar on a narrow terminal, truncated."""
    room = shutil.get_terminal_size().columns - 1
    return bar + words if len(bar + words) <= room else f"  {words}"[:room]


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02} min"


Step: TypeAlias = Callable[[str], AbstractContextManager[None]]
