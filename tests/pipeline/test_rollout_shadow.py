"""The shadow phase for people: the plan of nxpipe.toml, the status of a rollout, its table of evaluations."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nxpipe.pipeline.canary.documents import PlanInvalid
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.explanation import explain, totals_after
from nxpipe.pipeline.canary.judge import Moment, judge
from nxpipe.pipeline.canary.metrics import Arm, PairCounts
from nxpipe.pipeline.canary.plan import CanaryPlan, Schedule, ShadowPhase
from nxpipe.pipeline.canary.record import record_of
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.messages import ConfigInvalid
from nxpipe.pipeline.rollout.aws import RolloutExecution
from nxpipe.pipeline.rollout.course import Course, EvaluationRecord
from nxpipe.pipeline.rollout.input import RolloutCandidate, RolloutInput, plan_of
from nxpipe.pipeline.rollout.render import evaluation_table, status_line, status_page
from nxpipe.pipeline.rollout.status import Phase, Status
from tests.canary.samples import PLAN, plan_with

SHADOWED = plan_with(shadow=ShadowPhase(10, 5, 30))


def configured(folder: Path, text: str) -> CanaryPlan:
    (folder / "nxpipe.toml").write_text(f'[project]\nname = "demo"\n{text}')
    return plan_of(load_config(folder / "nxpipe.toml", {}).rollout)


def test_the_table_shadow_adds_the_phase_and_without_it_a_plan_has_no_such_field(tmp_path: Path) -> None:
    text = '[rollout.shadow]\npercent = 10.0\nbake_min = "5m"\nbake_max = "30m"\n'
    assert configured(tmp_path, text) == SHADOWED
    assert configured(tmp_path, "") == PLAN
    assert "shadow" not in PLAN.as_json()
    assert CanaryPlan.from_json(json.loads(json.dumps(SHADOWED.as_json()))) == SHADOWED
    assert CanaryPlan.from_json(PLAN.as_json()) == PLAN


@pytest.mark.parametrize(
    "wrong", ["percent = 0.0", "percent = 101.0", 'bake_min = "10m"\nbake_max = "5m"', 'bake_min = "1s"', "share = 5"]
)
def test_a_phase_that_makes_no_sense_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigInvalid):
        configured(tmp_path, f"[rollout.shadow]\n{wrong}\n")


@pytest.mark.parametrize("phase", [ShadowPhase(0, 1, 2), ShadowPhase(101, 1, 2), ShadowPhase(5, 3, 2)])
def test_a_plan_with_such_a_phase_is_refused_by_the_judge_too(phase: ShadowPhase) -> None:
    with pytest.raises(PlanInvalid, match="shadow"):
        plan_with(shadow=phase)


def rollout(counts: PairCounts | None, action: str = "continue") -> tuple[RolloutExecution, EvaluationRecord, Status]:
    """A rollout after one evaluation of its shadow phase."""
    batches = [] if counts is None else [counts.batch(3, Arm(5000, 20))]
    at = Moment(0, 0, 4)
    judged = judge(SHADOWED, Evidence(), batches, at)
    totals = totals_after((), Evidence(), judged.evidence, batches)
    reason = explain(SHADOWED, judged.evidence, totals, judged.verdict)
    moment = datetime(2027, 3, 2, 12, tzinfo=UTC)
    document: Mapping[str, Any] = record_of(SHADOWED, at, batches, judged, None) | {
        "number": 1,
        "at": moment.isoformat(),
        "word": action,
        "reason": reason,
    }
    candidate = RolloutCandidate("acme/bert", "inf2", "a" * 64, "production", 1)
    given = RolloutInput("blue", "green", candidate, SHADOWED, Schedule(), "me", "why")
    execution = RolloutExecution("arn:r1", "RUNNING", moment, None, given, {}, ("", ""))
    evaluation = EvaluationRecord(document, json.dumps(document))
    weights = {"blue": 100, "green": 0}
    status = Status("search", Phase.SHADOW, weights, execution, None, None, Course(SHADOWED).after([evaluation]))
    return execution, evaluation, status


def test_the_status_names_the_phase_and_its_own_times() -> None:
    _, _, status = rollout(PairCounts(600, 3, 2, 2))
    assert "shadow, 10 % of requests mirrored, minute 4 of 5 to 30" in status_page(status)
    assert "blue 100 %; shadow, 10 % of requests mirrored" in status_line(status)
    document = status.as_json()
    assert (document["phase"], document["step"], document["steps"]) == ("shadow", 0, [0, 5, 25, 50, 95])


def test_the_table_of_evaluations_shows_pairs_as_those_of_the_phase() -> None:
    execution, evaluation, _ = rollout(PairCounts(600, 30, 30, 0), "roll_back")
    (row,) = [line for line in evaluation_table(execution, [evaluation]).splitlines() if "2027-03-02" in line]
    assert "shadow" in row
    assert "30 of 600" in row
    assert "roll_back  Refused in the shadow phase after 4 min: 30 of 600 mirrored requests" in row


def test_a_phase_without_pairs_says_what_is_missing() -> None:
    _, evaluation, _ = rollout(None)
    assert "mirror no requests, or their agents publish no pairs" in evaluation.reason
