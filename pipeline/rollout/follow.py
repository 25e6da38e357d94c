"""Following a rollout to its end, and the end itself: promotion of the fleet's channel, and the exit code.

The channel moves only after the state machine has promoted, by whichever command is there to see it: `rollout start
--wait`, `rollout status --wait`, or the next start. Until then the channels of both environments keep instances right.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from nxpipe.pipeline.rollout.context import RolloutContext
from nxpipe.pipeline.rollout.render import state_of, status_line, status_page, watch_frame
from nxpipe.pipeline.rollout.status import RolloutEnd, Status
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.pipeline.util.text import page_width, style

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
        console.page(status_page(status, page_width()))
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


def follow(console: Console, fleet: str, read_status: Callable[[], Status], *, option: str = "--wait") -> Status:
    """The final status; with `--watch` an undecided step is no end. Ctrl-C ends the display, not the rollout."""
    failed = 0
    try:
        with _display(console) as shown:
            while True:
                try:
                    status, failed = read_status(), 0
                except AwsError as error:
                    failed += 1
                    if failed > _MAX_FAILURES:
                        raise
                    shown.problem(f"{error}; retrying")
                else:
                    shown.show(status)
                    if status.over or (status.undecided and option == "--wait"):
                        return status
                time.sleep(_pause(status if not failed else None))
    except KeyboardInterrupt:
        console.say("", f"The rollout continues; follow it with: nxpipe rollout status {fleet} {option}")
        raise


def _pause(status: Status | None) -> float:
    """Half an evaluation interval, if that is shorter."""
    rollout = status.execution.input if status and status.execution else None
    return min(_INTERVAL, rollout.pace.poll / 2) if rollout else _INTERVAL


class _Display(Protocol):
    def show(self, status: Status) -> None: ...

    def problem(self, text: str) -> None: ...


@contextmanager
def _display(console: Console) -> Iterator[_Display]:
    """One changing screen on a terminal; elsewhere lines."""
    if not console.live:
        yield StatusLog(console)
        return
    with console.screen() as draw:
        yield _Screen(draw)


class _Screen:
    def __init__(self, draw: Callable[[Sequence[str]], None]) -> None:
        self._draw = draw
        self._status: Status | None = None

    def show(self, status: Status) -> None:
        self._status = status
        self._draw(watch_frame(status, *shutil.get_terminal_size()))

    def problem(self, text: str) -> None:
        size = shutil.get_terminal_size()
        frame = watch_frame(self._status, *size) if self._status else []
        self._draw([*frame[: max(0, size.lines - 2)], style(text[: size.columns - 1], fg="yellow")])


# Shorter than the ten minutes after which some CI services end a job without output.
HEARTBEAT: Final = 300.0  # seconds


class StatusLog:
    """A line when the traffic, the phase or the kind of verdict has changed, and one now and then that says how far the
    evidence is."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last: tuple[object, ...] | None = None
        self._at = clock()

    def show(self, status: Status) -> None:
        state, now = state_of(status), self._clock()
        if state != self._last or now - self._at >= HEARTBEAT:
            self._console.say(status_line(status))
            self._last, self._at = state, now

    def problem(self, text: str) -> None:
        self._console.say(text)
