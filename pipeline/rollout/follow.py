"""Staying with a rollout until it ends, or until it needs a person."""

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

_EVERY: Final = 5.0  # seconds between looks
_PATIENCE: Final = 60  # looks in a row that may fail: a network goes and comes back in hours of a rollout


def follow(console: Console, fleet: str, look: Callable[[], Status]) -> Status:
    """Ctrl-C ends the looking and nothing else."""
    shown = _Shown(console)
    failed = 0
    try:
        while True:
            try:
                status, failed = look(), 0
            except AwsError as error:
                failed += 1
                if failed > _PATIENCE:
                    raise
                shown.say(f"{error}; still looking")
            else:
                shown.show(status)
                if status.over or status.undecided:
                    return status
            time.sleep(_pause(status if not failed else None))
    except KeyboardInterrupt:
        console.say("", f"The rollout goes on; come back to it with: nxpipe rollout status {fleet} --wait")
        raise


def _pause(status: Status | None) -> float:
    """As often as something can have changed."""
    asked = status.execution.asked if status and status.execution else None
    return min(_EVERY, asked.pace.poll / 2) if asked else _EVERY


class _Shown:
    """On a terminal the picture is drawn over the last one; elsewhere a line is said when it differs."""

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
        elif (said := status_line(status)) != self._last:
            self._console.say(said)
            self._last = said

    def say(self, text: str) -> None:
        self._rows = 0
        self._console.say(text)

    def _erase(self) -> None:
        if self._rows:
            self._console.clear_rows(self._rows)


def _rows(text: str) -> int:
    """How many rows of the terminal it takes: what is too long is wrapped."""
    columns = shutil.get_terminal_size().columns
    return sum(max(1, math.ceil(len(unstyled(each)) / columns)) for each in text.split("\n"))
