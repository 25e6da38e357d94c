"""States of a rollout, from records that the simulator writes with the judge of the Lambda function."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Final

from nxpipe.pipeline.canary.plan import CanaryPlan, Schedule, ShadowPhase
from nxpipe.pipeline.cli.rollout.simulate import sample_path
from nxpipe.pipeline.rollout.aws import RolloutExecution
from nxpipe.pipeline.rollout.course import Course, EvaluationRecord
from nxpipe.pipeline.rollout.input import RolloutCandidate, RolloutInput
from nxpipe.pipeline.rollout.simulate import TrafficModel, record_rollout
from nxpipe.pipeline.rollout.status import RolloutEnd, RolloutOutcome, Status, phase_of
from tests.canary.samples import plan_with

SHADOWED: Final = plan_with(shadow=ShadowPhase(10, 5, 60))
_AT: Final = datetime(2026, 7, 2, 12, tzinfo=UTC)


def sample(name: str) -> list[str]:
    return sample_path(name).read_text().splitlines()


@cache
def undecided() -> tuple[str, ...]:
    """A service of one request a second: a step's hour is too short."""
    return tuple(record_rollout(plan_with(), TrafficModel("steady", 1, 0.009, 0.013), 3))


@cache
def refused() -> tuple[str, ...]:
    return tuple(record_rollout(SHADOWED, TrafficModel("steady", 20, 0.002, 0.002, differs=0.05), 1))


def status_at(record: Sequence[str], evaluations: int | None = None, end: RolloutEnd | None = None) -> Status:
    """The status after so many evaluations of a record."""
    plan, *lines = (json.loads(line) for line in record)
    course = Course(CanaryPlan.from_json(plan)).after(EvaluationRecord(each, "") for each in lines[:evaluations])
    candidate = RolloutCandidate("acme/bert", "inf2", "0123456789ab" * 5, "production", 1)
    given = RolloutInput("blue", "green", candidate, course.plan, Schedule(), "me", "a test")
    state = "SUCCEEDED" if end else "RUNNING"
    run = RolloutExecution("arn:0123456789ab-green-1", state, _AT, None, given, {}, ("", ""))
    step = course.evaluations[-1].step
    share = 100 if step is None else course.plan.phases[step].weight
    if end:
        share = 100 if end is RolloutEnd.PROMOTED else 0
    weights = {"blue": 100 - share, "green": share}
    outcome = RolloutOutcome(end, course.evaluations[-1].reason) if end else None
    return Status("search", phase_of(run, weights, course), weights, run, outcome, None, course)
