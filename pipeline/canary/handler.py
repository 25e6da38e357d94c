"""The judge as a function of AWS Lambda: a question in, an answer out, nothing kept and nobody called."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nxpipe.pipeline.canary.documents import digest_of
from nxpipe.pipeline.canary.record import record_of
from nxpipe.pipeline.canary.state import RolloutState, stored_document
from nxpipe.pipeline.canary.steps import Action, evaluate, preflight


def handle(event: Mapping[str, Any], _context: object) -> dict[str, Any]:
    """One of three questions: may the rollout open, a step begins, how does it look."""
    ((question, given),) = event.items()
    answers = {"opens": preflight, "begins": begins, "looks": looks}
    return answers[question](given)


def begins(given: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a step are in force."""
    course = RolloutState.from_text(given["carried"]).begin(given["step"], given["at"])
    return _answer(course, given["at"], Action.WATCH, f"step {given['step'] + 1} begins")


def looks(given: Mapping[str, Any]) -> dict[str, Any]:
    before, at = RolloutState.from_text(given["carried"]), given["at"]
    found = evaluate(before, given)
    course = found.course
    batches = [batch.as_json() for batch in found.taken]
    judged: dict[str, Any] = {"previous": before.previous, "verdict": None, "batches": batches}
    if found.judged:
        judged = record_of(before.plan, before.moment(at), found.taken, found.judged, before.previous)
    record = judged | {
        "execution": course.name,
        "number": course.looks,
        "at": at,
        "alarms": given["alarms"],
        "record": given["record"],
        "word": found.word,
        "reason": found.reason,
    }
    course = replace(course, previous=digest_of(record))
    return _answer(course, at, found.word, found.reason) | stored_document(course.name, course.looks, record)


def _answer(course: RolloutState, at: str, word: Action, reason: str) -> dict[str, Any]:
    return {
        "verdict": word.value,
        "reason": reason,
        "wait": course.pace.poll,
        "ask": course.question(at),
        "carried": course.text(),
    }
