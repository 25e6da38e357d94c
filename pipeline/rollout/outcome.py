"""How a rollout ended."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from nxpipe.pipeline.rollout.machine import SUCCEEDED, Execution, Machine

_BEFORE_IT_BEGAN: Final = ("Refused", "Busy")  # states in which the machine fails without having moved anything


class End(StrEnum):
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"  # for whatever reason: all traffic is with the old version
    CAPACITY_BLOCKED = "capacity_blocked"
    REFUSED = "refused"  # it did not begin
    UNFINISHED = "unfinished"  # it died, and the watchdog is not done yet


@dataclass(frozen=True)
class Outcome:
    end: End
    reason: str


def outcome_of(machine: Machine, execution: Execution) -> Outcome | None:
    """Of the newest rollout, or of one that came to its own end; None while it is under way."""
    if execution.running:
        return None
    if execution.status == SUCCEEDED:
        said = execution.output
        ends = {End.PROMOTED.value: End.PROMOTED, End.CAPACITY_BLOCKED.value: End.CAPACITY_BLOCKED}
        return Outcome(ends.get(said["outcome"], End.ROLLED_BACK), _plain(said["reason"]))
    error, cause = execution.fault
    why = _plain(cause) or error or f"its execution was {execution.status.lower().replace('_', ' ')}"
    if execution.asked is None or machine.failed_in(execution.arn) in _BEFORE_IT_BEGAN:
        return Outcome(End.REFUSED, why)
    item = machine.record.read()
    if item.owner == execution.arn:
        return Outcome(End.UNFINISHED, why)
    return Outcome(End.PROMOTED if item.stable == execution.asked.new else End.ROLLED_BACK, why)


def _plain(cause: str) -> str:
    """A function's error comes as a document."""
    try:
        told = json.loads(cause)
    except ValueError:
        return cause
    return str(told["errorMessage"]) if isinstance(told, dict) and "errorMessage" in told else cause
