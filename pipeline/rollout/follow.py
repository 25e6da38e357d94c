"""Display of a running rollout until it ends or needs a person."""

import math
import shutil
import time
from collections.abc import Callable
from typing import Final

from nxpipe.pipeline.rollout.render import status_line, status_page
from nxpipe.pipeline.rollout.status import Status
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.pipeline.util.escape import unstyled

_INTERVAL: Final = 5.0  # seconds between reads
_MAX_FAILURES: Final = 60  # consecutive failed reads: a network may fail and recover in hours of a rollout


def follow(console: Console, fleet: str, look: Callable[[], Status]) -> Status:
    """The final status. Ctrl-C ends the display, not the rollout."""
    shown = _Display(console)
    failed = 0
    try:
        while True:
            try:
                status, failed = look(), 0
            except AwsError as error:
                failed += 1
                if failed > _MAX_FAILURES:
                    raise
                shown.say(f"{error}; retrying")
            else:
                shown.show(status)
                if status.over or status.undecided:
                    return status
            time.sleep(_pause(status if not failed else None))
    except KeyboardInterrupt:
        console.say("", f"The rollout continues; follow it with: nxpipe rollout status {fleet} --wait")
        raise


def _pause(status: Status | None) -> float:
    """Half an evaluation interval, if that is shorter."""
    rollout = status.execution.input if status and status.execution else None
    return min(_INTERVAL, rollout.pace.poll / 2) if rollout else _INTERVAL


class _Display:
    """On a terminal the status replaces the previous one; elsewhere a line is printed when it changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.live
        self._rows = 0
        self._last = ""

    def show(self, status: Status) -> None:
        if self._live:
            text = status_page(status)
            self._erase()
            self._console.say(*text.split("\n"))
            self._rows = _rows(text)
        elif (line := status_line(status)) != self._last:
            self._console.say(line)
            self._last = line

    def say(self, text: str) -> None:
        self._rows = 0
        self._console.say(text)

    def _erase(self) -> None:
        if self._rows:
            self._console.clear_rows(self._rows)


def _rows(text: str) -> int:
    """The number of terminal rows: long lines wrap."""
    columns = shutil.get_terminal_size().columns
    return sum(max(1, math.ceil(len(unstyled(each)) / columns)) for each in text.split("\n"))
