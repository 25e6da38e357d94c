"""The time left of a step: properties, and how often the range is right in simulated rollouts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.explanation import totals_after
from nxpipe.pipeline.canary.judge import Decision, Judgement, Moment, judge
from nxpipe.pipeline.canary.metrics import Arm, Batch, PairCounts
from nxpipe.pipeline.canary.plan import CanaryPlan, ShadowPhase
from nxpipe.pipeline.rollout.forecast import StepProgress, TimeLeft, progress_of
from nxpipe.pipeline.rollout.simulate import TrafficModel, foreseen
from tests.canary.samples import PLAN, errors_alone, plan_with


def progress(
    batches: list[Batch], rpm: float, plan: CanaryPlan = PLAN, decision: Decision | None = None
) -> tuple[StepProgress, Judgement]:
    judged = judge(plan, Evidence(), batches, Moment(0, 0, len(batches)))
    verdict = judged.verdict if decision is None else replace(judged.verdict, decision=decision)
    totals = totals_after((), Evidence(), judged.evidence, batches)
    return progress_of(plan, judged.evidence, totals, verdict, rpm), judged


COUNTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=6)


def minutes(counts: list[tuple[int, int]]) -> list[Batch]:
    return [errors_alone(at, (15, new), (285, old)) for at, (new, old) in enumerate(counts)]


def is_sooner(one: int | None, other: int | None) -> bool:
    return other is None or (one is not None and one <= other)


@given(counts=COUNTS, rpm=st.floats(10, 3000), factor=st.floats(1, 20))
@settings(max_examples=12)
def test_more_requests_a_minute_never_bring_a_decision_later(
    counts: list[tuple[int, int]], rpm: float, factor: float
) -> None:
    slow, fast = (progress(minutes(counts), rate)[0] for rate in (rpm, rpm * factor))
    for lower, higher in ((slow.until_advance, fast.until_advance), (slow.until_rollback, fast.until_rollback)):
        assert lower is not None
        assert higher is not None
        assert is_sooner(higher.earliest, lower.earliest)
        assert is_sooner(higher.latest, lower.latest)
        assert higher.chance >= lower.chance - 1e-9


@given(counts=COUNTS, rpm=st.floats(10, 3000))
@settings(max_examples=12)
def test_a_range_ascends_and_ends_within_the_step_and_not_before_it_may(
    counts: list[tuple[int, int]], rpm: float
) -> None:
    found, judged = progress(minutes(counts), rpm)
    assert found.limit == PLAN.bake_max - judged.verdict.minutes
    assert 0 <= found.regression <= 1
    assert 0 <= found.advance <= 1
    for left in (found.until_advance, found.until_rollback):
        assert left is not None
        assert 0 <= left.chance <= 1
        if left.latest is not None:
            assert left.earliest is not None
            assert 1 <= left.earliest <= left.latest <= found.limit
    assert found.until_advance is not None
    assert found.until_advance.earliest is None or found.until_advance.earliest >= found.bake


def test_a_version_that_fails_is_not_expected_to_advance_and_one_that_does_not_is() -> None:
    good, _ = progress([errors_alone(at, (150, 0), (2850, 14)) for at in range(3)], 3000)
    bad, _ = progress([errors_alone(at, (15, 5), (285, 1)) for at in range(1)], 30)
    assert good.until_advance is not None
    assert good.until_advance.latest is not None
    assert bad.until_advance is not None
    assert bad.until_advance.latest is None
    assert bad.until_rollback is not None
    assert bad.until_rollback.chance > 0.9


def test_without_requests_or_in_an_incident_the_time_is_unknown() -> None:
    nothing = [Batch(0, Arm(0, 0), Arm(0, 0))]
    assert progress(nothing, 0.0)[0].until_advance is None
    incident, _ = progress([errors_alone(0, (15, 0), (285, 0))], 300, decision=Decision.FROZEN)
    assert (incident.until_advance, incident.until_rollback) == (None, None)


def test_mirrored_pairs_that_agree_are_expected_to_end_the_shadow_phase() -> None:
    plan = plan_with(shadow=ShadowPhase(10, 5, 60))
    alike, _ = progress([PairCounts(120, 0, 0, 0).batch(at, Arm(1200, 2)) for at in range(3)], 1200, plan)
    differ, _ = progress([PairCounts(120, 4, 4, 0).batch(at, Arm(1200, 2)) for at in range(2)], 1200, plan)
    assert alike.until_advance is not None
    assert alike.until_advance.latest is not None
    assert differ.until_rollback is not None
    assert differ.until_rollback.chance > 0.6
    assert differ.until_advance is not None
    assert differ.until_advance.chance < 0.01


def test_an_outcome_before_within_and_after_a_range_() -> None:
    left = TimeLeft(0.9, 3, 5)
    assert [left.place_of(actual) for actual in (2, 3, 5, 6)] == ["earlier", "inside", "inside", "later"]
    assert TimeLeft(0.5, 3, None).place_of(60) == "inside"
    assert TimeLeft(0.05, None, None).place_of(60) == "unknown"


@pytest.mark.slow
@pytest.mark.parametrize(("rps", "error"), [(5, 0.005), (20, 0.005), (20, 0.001)])
def test_healthy_versions_advance_within_the_range_at_the_nominal_rate(rps: float, error: float) -> None:
    """The range holds 80 % of the times; 60 rollouts are a fifth of a step's times in doubt."""
    model = TrafficModel("steady", rps, error, error)
    found = [
        foresaw.until_advance.place_of(actual)
        for seed in range(60)
        for foresaw, decision, actual in foreseen(PLAN, model, seed)
        if decision is Decision.ADVANCE and foresaw.until_advance
    ]
    assert len(found) > 200
    assert found.count("inside") / len(found) > 0.75
    assert found.count("unknown") / len(found) < 0.05
