"""One look at a step: what the judge says of the counts, and what comes of it with alarms and people beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from nxpipe.pipeline.canary.counts import Batch
from nxpipe.pipeline.canary.course import Course
from nxpipe.pipeline.canary.explain import explain
from nxpipe.pipeline.canary.judge import Judged, judge
from nxpipe.pipeline.canary.metrics import batches, complete
from nxpipe.pipeline.canary.opening import Alarms
from nxpipe.pipeline.canary.verdict import Decision, Verdict

LOOKS_HERE: Final = 250  # of one execution: some 35 events each with one retry in it, of 25,000 that a history may have


class Word(StrEnum):
    """What the machine does next."""

    CONTINUE = "continue"  # wait, and look again
    WATCH = "watch"  # the same, in a new execution
    ASK = "ask"  # tell people that one of them is awaited, then look again
    ADVANCE = "advance"
    ROLL_BACK = "roll_back"


class Signal(StrEnum):
    """What a person asks of the step."""

    APPROVE = "approve"
    PAUSE = "pause"
    ABORT = "abort"


@dataclass(frozen=True)
class Look:
    """The course after it, and how it came to that."""

    course: Course
    taken: list[Batch]
    judged: Judged | None  # by the judge, unless all steps are over
    word: Word
    reason: str


def look(course: Course, seen: Mapping[str, Any]) -> Look:
    at = seen["at"]
    minutes = course.settled(at) if complete(seen["metrics"]) else range(0)
    taken, opened = batches(seen["metrics"], minutes, course.plan.latencies, course.pace.period, course.opened)
    course, judged = replace(course, opened=opened), None
    if course.over:
        course = replace(course, alone=course.alone + (each for each in taken if each.minute >= course.begun))
    else:
        judged = judge(course.plan, course.evidence, taken, course.moment(at))
        course = replace(course, evidence=judged.evidence)
    course = replace(
        course,
        due=minutes.stop if minutes else course.due,
        looks=course.looks + 1,
        looks_here=course.looks_here + 1,
    )
    sounding = Alarms.of(seen["alarms"]).sounding(course.alarms)
    verdict = None if judged is None else judged.verdict
    word, reason = _word(course, verdict, sounding, _signal(seen["record"]), course.minute(at))
    if word is Word.ASK:
        course = replace(course, asked=course.minute(at))
    if word is not Word.CONTINUE:
        course = replace(course, looks_here=0)
    return Look(course, taken, judged, word, reason)


def _signal(record: Mapping[str, Any]) -> Signal | None:
    """An item as DynamoDB writes it. What is no signal is none, for nothing can be told to whoever wrote it."""
    said = record.get("Item", {}).get("signal", {}).get("S")
    return Signal(said) if said in set(Signal) else None


def _word(
    course: Course, verdict: Verdict | None, sounding: list[str], signal: Signal | None, minute: int
) -> tuple[Word, str]:
    """Whatever speaks against the new version counts before whatever speaks for it."""
    if signal is Signal.ABORT:
        return Word.ROLL_BACK, "a person ended it"
    if sounding:
        return Word.ROLL_BACK, f"the alarm {sounding[0]} sounds"
    word, reason = _of_the_end(course, minute) if verdict is None else _of_the_verdict(course, verdict, signal, minute)
    if word is Word.ADVANCE and signal is Signal.PAUSE:
        word, reason = Word.CONTINUE, "it could go on, but a person has paused it"
    if word is Word.CONTINUE and course.looks_here >= LOOKS_HERE:
        word = Word.WATCH
    return word, reason


def _of_the_end(course: Course, minute: int) -> tuple[Word, str]:
    alone, gone = course.alone, minute - course.begun
    if alone.fails(course.plan):
        failed = f"{alone.errors} of {alone.requests} requests failed since it serves alone"
        return Word.ROLL_BACK, f"the new version fails more than {course.plan.objective:.3g} of its requests: {failed}"
    if gone >= course.pace.final:
        return Word.ADVANCE, f"all traffic has gone well for {gone} minutes"
    return Word.CONTINUE, f"all traffic goes to the new version, for {max(0, gone)} of {course.pace.final} minutes"


def _of_the_verdict(course: Course, verdict: Verdict, signal: Signal | None, minute: int) -> tuple[Word, str]:
    words = {Decision.ROLL_BACK: Word.ROLL_BACK, Decision.ADVANCE: Word.ADVANCE}
    if word := words.get(verdict.decision):
        return word, explain(course.plan, course.evidence, verdict)
    if verdict.decision is not Decision.UNDECIDED:
        return Word.CONTINUE, f"{verdict.decision.value}, after {verdict.minutes} minutes"
    if signal is Signal.APPROVE:
        return Word.ADVANCE, "undecided, and a person approved it"
    if course.asked is None:
        return Word.ASK, f"Approve it, or abort it: {explain(course.plan, course.evidence, verdict)}"
    if minute - course.asked >= course.pace.patience:
        return Word.ROLL_BACK, f"undecided, and nobody answered for {minute - course.asked} minutes"
    return Word.CONTINUE, "undecided: a person is awaited"
