"""What is left to do when a rollout has ended: the channel of one that has promoted, and the exit code."""

from typing import Final

from nxpipe.pipeline.rollout.context import RolloutContext
from nxpipe.pipeline.rollout.render import status_page
from nxpipe.pipeline.rollout.status import RolloutEnd, Status
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.console import Console

_CODES: Final = {
    RolloutEnd.PROMOTED: exit_codes.OK,
    RolloutEnd.ROLLED_BACK: exit_codes.ROLLED_BACK,
    RolloutEnd.CAPACITY_BLOCKED: exit_codes.CAPACITY_BLOCKED,
    RolloutEnd.REFUSED: exit_codes.ROLLOUT_REFUSED,
    RolloutEnd.UNFINISHED: exit_codes.ROLLED_BACK,
}


def finish(console: Console, one: RolloutContext, status: Status) -> int:
    """After it was waited for. Does what is left, says how it ended, and gives the exit code."""
    moved = move_fleet_channel(one, status)
    if console.json:
        console.data(status.as_json())
    else:
        console.page(status_page(status))
        if moved:
            console.say(f"Channel {one.fleet.channel} serves {moved} now.")
        if status.undecided:
            console.say(f"{_ask(one)}; then wait again with: nxpipe rollout status {one.fleet.name} --wait")
    return exit_code(status)


def exit_code(status: Status) -> int:
    if status.undecided:
        return exit_codes.UNDECIDED.number
    return (_CODES[status.outcome.end] if status.outcome else exit_codes.OK).number


def move_fleet_channel(one: RolloutContext, status: Status) -> str | None:
    """Moves the fleet's channel to what was promoted; what it then serves, if it did not before."""
    execution = status.execution
    if not _is_unsettled(one, status) or execution is None or execution.asked is None:
        return None
    candidate = execution.asked.candidate
    one.artifacts.settle(candidate, execution.name)
    return candidate.name


def pending_promotion(one: RolloutContext, status: Status) -> str | None:
    """For whoever only looks."""
    if not _is_unsettled(one, status):
        return None
    name = one.fleet.name
    return f"Channel {one.fleet.channel} does not serve it yet; move it with: nxpipe rollout status {name} --wait"


def _is_unsettled(one: RolloutContext, status: Status) -> bool:
    """The newest rollout has promoted, and nobody has moved the fleet's channel since it began."""
    asked = status.execution.asked if status.execution else None
    promoted = status.outcome is not None and status.outcome.end is RolloutEnd.PROMOTED
    return promoted and asked is not None and not one.artifacts.settled(asked.candidate)


def _ask(one: RolloutContext) -> str:
    name = one.fleet.name
    return f"Decide with: nxpipe rollout approve {name}, or nxpipe rollout abort {name}"
