"""The judge as an AWS Lambda function. It has no permissions, keeps nothing and calls no service.

The event names one of three requests: `opens` (preflight), `begins` (a step's weights are in force), `looks` (an
evaluation). These names, and the fields of both documents, are those of the state machine's definition.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nxpipe.pipeline.canary.documents import digest_of
from nxpipe.pipeline.canary.record import record_of
from nxpipe.pipeline.canary.state import RolloutState, stored_document
from nxpipe.pipeline.canary.steps import Action, evaluate, preflight


def handle(event: Mapping[str, Any], _context: object) -> dict[str, Any]:
    """The response to one request of the state machine."""
    ((request, given),) = event.items()
    handlers = {"opens": preflight, "begins": begins, "looks": looks}
    return handlers[request](given)


def begins(given: Mapping[str, Any]) -> dict[str, Any]:
    """The start of a step, whose weights are in force."""
    state = RolloutState.from_text(given["carried"]).begin(given["step"], given["at"])
    return _answer(state, given["at"], Action.WATCH, f"step {given['step'] + 1} begins")


def looks(given: Mapping[str, Any]) -> dict[str, Any]:
    """One evaluation, with the record of its decision."""
    before, at = RolloutState.from_text(given["carried"]), given["at"]
    found = evaluate(before, given)
    state = found.state
    batches = [batch.as_json() for batch in found.taken]
    judged: dict[str, Any] = {"previous": before.previous, "verdict": None, "batches": batches}
    if found.judged:
        judged = record_of(before.plan, before.moment(at), found.taken, found.judged, before.previous)
    record = judged | {
        "execution": state.name,
        "number": state.looks,
        "at": at,
        "alarms": given["alarms"],
        "record": given["record"],
        "word": found.action,
        "reason": found.reason,
    }
    state = replace(state, previous=digest_of(record))
    return _answer(state, at, found.action, found.reason) | stored_document(state.name, state.looks, record)


def _answer(state: RolloutState, at: str, action: Action, reason: str) -> dict[str, Any]:
    return {
        "verdict": action.value,
        "reason": reason,
        "wait": state.pace.poll,
        "ask": state.question(at),
        "carried": state.text(),
    }
