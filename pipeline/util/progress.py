"""Progress of transfers and calculations on stderr: a bar on a terminal, periodic lines elsewhere, or JSON lines."""

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
_TERMINAL_INTERVAL: Final = 0.1  # seconds, on a terminal
_LOG_INTERVAL: Final = 5.0  # seconds, in a log
_RATE_WINDOW: Final = 10.0  # seconds over which the rate is averaged

_Clock = Callable[[], float]

# Opens the progress of one object, by title and size; returns the callback for sent bytes.
Watch = Callable[[str, int], AbstractContextManager[Sent]]


class Progress:
    """The progress of a transfer, or of a calculation in another `unit`; `sent` may be called by one thread at a time.

    With `--json`, prints periodic lines `{"done": .., "total": .., "bytes_per_second": .., "seconds_left": ..}`. With
    `--quiet`, prints nothing.
    """

    def __init__(
        self, console: Console, title: str, total: int, clock: _Clock = time.monotonic, unit: str = "bytes"
    ) -> None:
        self._console = console
        self._title = for_terminal(title)
        self._total = total
        self._unit = unit
        self._clock = clock
        self._live = console.live
        self._interval = _TERMINAL_INTERVAL if self._live else _LOG_INTERVAL
        self._done = 0
        self._printed_at = clock()
        self._samples = deque([(self._printed_at, 0)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._console.clear_row()

    def sent(self, size: int) -> None:
        """Count sent bytes; a negative size subtracts the bytes of a failed attempt."""
        self._done += size
        now = self._clock()
        if now - self._printed_at >= self._interval and not self._console.quiet:
            self._printed_at = now
            self._print(now)

    def _print(self, now: float) -> None:
        self._samples.append((now, self._done))
        while len(self._samples) > 2 and now - self._samples[1][0] > _RATE_WINDOW:
            self._samples.popleft()
        began, before = self._samples[0]
        rate = max(self._done - before, 0) / (now - began)
        left = (self._total - self._done) / rate if rate else None
        if self._console.json:
            speed = {"bytes_per_second": round(rate)} if self._unit == "bytes" else {"unit": self._unit}
            figures = {"done": self._done, "total": self._total, **speed, "seconds_left": left}
            self._console.data_line(figures, err=True)
        elif self._live:
            filled = _BAR * min(self._done, self._total) // self._total if self._total else _BAR
            bar = f"  [{'#' * filled:{_BAR}}] "
            self._console.overwrite(_in_one_row(bar, self._text(rate, left)))
        else:
            self._console.say(f"  {self._text(rate, left)}")

    def _text(self, rate: float, left: float | None) -> str:
        # Retries may send more than the total.
        share = 100 * min(self._done, self._total) // self._total if self._total else 100
        time_left = "" if left is None else f", {_duration(left)} left"
        if self._unit != "bytes":
            return f"{self._title}: {share} % of {self._total} {self._unit}{time_left}"
        return f"{self._title}: {share} % of {human_bytes(self._total)}, {human_bytes(round(rate))}/s{time_left}"


@contextmanager
def watching(console: Console, title: str, total: int, unit: str = "bytes") -> Iterator[Sent]:
    with Progress(console, title, total, unit=unit) as progress:
        yield progress.sent


def _in_one_row(bar: str, text: str) -> str:
    """One terminal row, since wrapped rows cannot be rewritten: on a narrow terminal without the bar, and truncated."""
    width = shutil.get_terminal_size().columns - 1
    return bar + text if len(bar + text) <= width else f"  {text}"[:width]


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02} min"


Step: TypeAlias = Callable[[str], AbstractContextManager[None]]
