"""Following a rollout to its end, and the end itself: promotion of the fleet's channel, and the exit code.

The channel moves only after the state machine has promoted, by whichever command is there to see it: `rollout start
--wait`, `rollout status --wait`, or the next start. Until then the channels of both environments keep instances right.
"""

import math
import shutil
import time
from collections.abc import Callable
from typing import Final

from nxpipe.pipeline.rollout.context import RolloutContext
from nxpipe.pipeline.rollout.render import status_line, status_page
from nxpipe.pipeline.rollout.status import RolloutEnd, Status
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.pipeline.util.text import unstyled

_CODES: Final = {
    RolloutEnd.PROMOTED: exit_codes.OK,
    RolloutEnd.ROLLED_BACK: exit_codes.ROLLED_BACK,
    RolloutEnd.CAPACITY_BLOCKED: exit_codes.CAPACITY_BLOCKED,
    RolloutEnd.REFUSED: exit_codes.ROLLOUT_REFUSED,
    RolloutEnd.UNFINISHED: exit_codes.ROLLED_BACK,
}


def finish(console: Console, context: RolloutContext, status: Status) -> int:
    """Completes a rollout that was waited for, prints its end, and returns the exit code."""
    moved = move_fleet_channel(context, status)
    if console.json:
        console.data(status.as_json())
    else:
        console.page(status_page(status))
        if moved:
            console.say(f"Channel {context.fleet.channel} now serves {moved}.")
        if status.undecided:
            console.say(
                f"{_decision_hint(context)}; then wait again with: nxpipe rollout status {context.fleet.name} --wait"
            )
    return exit_code(status)


def exit_code(status: Status) -> int:
    if status.undecided:
        return exit_codes.UNDECIDED.number
    return (_CODES[status.outcome.end] if status.outcome else exit_codes.OK).number


def move_fleet_channel(context: RolloutContext, status: Status) -> str | None:
    """Promotes the candidate of a promoted rollout to the fleet's channel; its name, or None if nothing changed."""
    execution = status.execution
    if not _is_promotion_pending(context, status) or execution is None or execution.input is None:
        return None
    candidate = execution.input.candidate
    context.artifacts.promote_candidate(candidate, execution.name, execution.input.waiver)
    return candidate.name


def pending_promotion(context: RolloutContext, status: Status) -> str | None:
    """A hint for commands that change nothing."""
    if not _is_promotion_pending(context, status):
        return None
    name = context.fleet.name
    return (
        f"Channel {context.fleet.channel} does not serve it yet; promote it with: nxpipe rollout status {name} --wait"
    )


def _is_promotion_pending(context: RolloutContext, status: Status) -> bool:
    """True if the last rollout has promoted and the fleet's channel was not moved since it started."""
    rollout = status.execution.input if status.execution else None
    promoted = status.outcome is not None and status.outcome.end is RolloutEnd.PROMOTED
    return promoted and rollout is not None and not context.artifacts.is_promoted(rollout.candidate)


def _decision_hint(context: RolloutContext) -> str:
    name = context.fleet.name
    return f"Decide with: nxpipe rollout approve {name}, or nxpipe rollout abort {name}"


_INTERVAL: Final = 5.0  # seconds between reads
_MAX_FAILURES: Final = 60  # consecutive failed reads: a network may fail and recover in hours of a rollout


def follow(console: Console, fleet: str, read_status: Callable[[], Status]) -> Status:
    """The final status. Ctrl-C ends the display, not the rollout."""
    shown = _Display(console)
    failed = 0
    try:
        while True:
            try:
                status, failed = read_status(), 0
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
    return sum(max(1, math.ceil(len(unstyled(line)) / columns)) for line in text.split("\n"))
