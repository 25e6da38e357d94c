import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.pipeline.canary.documents import EvidenceInvalid, PlanInvalid
from nxpipe.pipeline.canary.evalues import interval
from nxpipe.pipeline.canary.evidence import Evidence, pooled
from nxpipe.pipeline.canary.explanation import explain, totals_after
from nxpipe.pipeline.canary.judge import Decision, Moment, Verdict, decide, judge
from nxpipe.pipeline.canary.metrics import METRICS, NO_REQUESTS, Arm, Batch
from nxpipe.pipeline.canary.plan import CanaryPlan, TrafficStep
from tests.canary.samples import PLAN, arm, errors_alone, judged_alone, minute, plan_with

HEALTHY = ((150, 1), (2850, 14))


def healthy(minutes: int) -> list[Batch]:
    return [minute(number, *HEALTHY) for number in range(minutes)]


def test_a_healthy_version_advances_after_the_shortest_time() -> None:
    assert judged_alone(healthy(4)).verdict.decision is Decision.CONTINUE
    assert judged_alone(healthy(5)).verdict.decision is Decision.ADVANCE


def test_a_broken_version_goes_back_in_its_first_minute() -> None:
    assert judged_alone([minute(0, (15, 8), (285, 1))]).verdict.decision is Decision.ROLL_BACK


def test_a_slow_version_goes_back() -> None:
    slow = Arm(150, 0, 150, (120, 90, 45, 30, 10, 4, 1))
    assert judged_alone([Batch(0, slow, arm(2850, 14))]).verdict.decision is Decision.ROLL_BACK


def test_a_slow_version_under_suspicion_does_not_advance() -> None:
    suspect = [
        Batch(entry.minute, replace(entry.canary, slower=(80, 44, 22, 13, 3, 1, 0)), entry.stable)
        for entry in healthy(5)
    ]
    verdict = judged_alone(suspect).verdict
    assert math.log(1 / PLAN.alpha) / 2 <= verdict.worse < math.log(1 / PLAN.alpha)
    assert verdict.better > math.log(1 / PLAN.beta)
    assert verdict.decision is Decision.CONTINUE


def test_without_traffic_nothing_is_learnt_and_a_person_is_asked() -> None:
    silent = [Batch(number, NO_REQUESTS, NO_REQUESTS) for number in range(60)]
    early, late = judged_alone(silent[:59]).verdict, judged_alone(silent).verdict
    assert (early.decision, late.decision) == (Decision.CONTINUE, Decision.UNDECIDED)
    assert late.worse == pytest.approx(0)
    assert late.better == pytest.approx(0)


def test_missing_minutes_are_no_evidence_but_time_goes_on() -> None:
    assert judged_alone([], at=60).verdict.decision is Decision.UNDECIDED
    gaps = [entry for entry in healthy(40) if entry.minute % 7 == 0]
    assert judged_alone(gaps, at=40).verdict.decision is Decision.ADVANCE


def test_the_shortest_time_is_one_of_evidence_and_not_of_the_clock() -> None:
    assert judged_alone(healthy(1), at=59).verdict.decision is Decision.CONTINUE
    assert judged_alone(healthy(4), at=59).verdict.decision is Decision.CONTINUE
    assert judged_alone(healthy(5), at=59).verdict.decision is Decision.ADVANCE


@pytest.mark.parametrize("wrong", [Batch(1, Arm(math.nan, 0), NO_REQUESTS), minute(0, *HEALTHY), minute(9, *HEALTHY)])
def test_a_minute_that_cannot_be_used_is_no_minute_of_the_shortest_time(wrong: Batch) -> None:
    """Not a number, one that was taken in before, and one of the future."""
    evidence, decisions = judged_alone(healthy(1)).evidence, []
    for clock in range(2, 9):
        judged = judge(PLAN, evidence, [wrong], Moment(0, 0, clock))
        evidence = judged.evidence
        decisions.append(judged.verdict.decision)
    assert set(decisions) == {Decision.CONTINUE}


def test_minutes_without_requests_of_the_canary_are_no_minutes_of_the_shortest_time() -> None:
    silent = [replace(entry, canary=NO_REQUESTS, stable=Arm(2850, 14)) for entry in healthy(30)[1:]]
    assert judged_alone([minute(0, (3000, 15), (57_000, 280)), *silent]).verdict.decision is Decision.CONTINUE


def test_a_canary_whose_requests_have_no_latency_stands_still_and_asks_a_person() -> None:
    def timed(share: float, minutes: int) -> Decision:
        canary = replace(arm(round(150 * share), 0), requests=150, errors=1)
        some = [replace(entry, canary=canary) for entry in healthy(minutes)]
        return judged_alone(some).verdict.decision

    assert [timed(share, 20) for share in (1.0, 0.9)] == [Decision.ADVANCE] * 2
    assert [timed(share, 20) for share in (0.75, 0.6)] == [Decision.CONTINUE] * 2
    assert timed(0.75, 60) is Decision.UNDECIDED


def test_a_person_can_put_off_the_end_of_a_step() -> None:
    result = judge(PLAN, Evidence(), [], Moment(0, 0, 60, extended=30))
    assert result.verdict.decision is Decision.CONTINUE


def test_without_any_error_enough_requests_prove_the_objective() -> None:
    clean = [errors_alone(number, (150, 0), (2850, 0)) for number in range(6)]
    assert judged_alone(clean).verdict.decision is Decision.ADVANCE


def test_when_everything_fails_in_both_versions_the_step_stands_still() -> None:
    down = [minute(number, (150, 150), (2850, 2850)) for number in range(30)]
    verdict = judged_alone(down).verdict
    assert (verdict.decision, verdict.minutes) == (Decision.FROZEN, 0)
    assert verdict.worse < 0.1


def test_a_step_that_stands_still_for_too_long_asks_a_person() -> None:
    down = [minute(number, (150, 15), (2850, 285)) for number in range(60)]
    assert judged_alone(down).verdict.decision is Decision.UNDECIDED


def test_when_only_the_canary_fails_everything_it_goes_back() -> None:
    assert judged_alone([errors_alone(0, (20, 20), (380, 0))]).verdict.decision is Decision.ROLL_BACK


@pytest.mark.parametrize("errors", [0, 250_000, 3_000_000, 50_000_000])
def test_a_billion_requests_have_a_verdict(errors: int) -> None:
    batches = [minute(number, (50_000_000, errors), (950_000_000, 4_750_000)) for number in range(5)]
    verdict = judged_alone(batches).verdict
    assert verdict.decision is (Decision.ROLL_BACK if errors > 250_000 else Decision.ADVANCE)
    assert math.isfinite(verdict.worse)


@pytest.mark.parametrize(
    ("canary", "why"),
    [
        (Arm(-5, 0), "negative"),
        (Arm(5, -1), "negative"),
        (Arm(5, 6), "more bad requests than requests"),
        (Arm(math.nan, 0), "no whole number"),
        (Arm(5, math.inf), "no whole number"),
        (Arm(5.5, 0), "no whole number"),
        (Arm(10**13, 0), "above"),
        (Arm(5, 0, 5, (1, 2, 0, 0, 0, 0, 0)), "above a higher latency"),
        (Arm(5, 0, 5, (6, 0, 0, 0, 0, 0, 0)), "more bad requests than requests"),
        (Arm(5, 0, 5, (1, 0)), "2 latencies"),
        (Arm(5, 0, 5, (1, 0, 0, 0, 0, 0, 0)), "latencies are missing"),
    ],
)
def test_of_impossible_counts_no_evidence_is_made(canary: Arm, why: str) -> None:
    judged = judged_alone([Batch(0, canary, Arm(95, 1))])
    assert judged.verdict.decision is Decision.CONTINUE
    assert judged.evidence.set_aside == 1
    assert why in judged.verdict.set_aside[0]
    assert judged.verdict.worse == pytest.approx(0)
    mended = judge(PLAN, judged.evidence, [minute(0, (15, 9), (285, 1))], Moment(0, 0, 1))
    assert mended.verdict.decision is Decision.ROLL_BACK


def test_counts_that_came_as_floats_are_counts() -> None:
    as_floats = Batch(0, Arm(15.0, 2.0), Arm(285.0, 1.0))
    assert judged_alone([as_floats]).evidence == judged_alone([errors_alone(0, (15, 2), (285, 1))]).evidence


def test_a_minute_is_taken_in_once() -> None:
    once = judged_alone([minute(0, (15, 2), (285, 1))])
    again = judge(PLAN, once.evidence, [minute(0, (15, 9), (285, 1))], Moment(0, 0, 1))
    assert again.evidence.steps == once.evidence.steps
    assert "taken in before" in again.verdict.set_aside[0]


def test_minutes_from_outside_the_rollout_are_put_aside() -> None:
    at = Moment(0, 10, 12)
    judged = judge(PLAN, Evidence(), [minute(9, *HEALTHY), minute(10, *HEALTHY), minute(12, *HEALTHY)], at)
    assert [said.partition(":")[2].strip() for said in judged.verdict.set_aside] == [
        "it is not over yet",
        "the rollout had not begun",
    ]
    assert judged.evidence.steps[0].requests == 150


counts = st.integers(0, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
history = st.lists(st.tuples(counts, counts), min_size=2, max_size=12)


@settings(max_examples=20)
@given(history, st.randoms(use_true_random=False), st.integers(1, 11))
def test_the_order_of_late_minutes_does_not_matter(
    drawn: list[tuple[tuple[int, int], tuple[int, int]]], chance: random.Random, cut: int
) -> None:
    batches = [minute(number, *value) for number, value in enumerate(drawn)]
    first, second = Moment(0, 0, len(batches)), Moment(1, min(cut, len(batches)), len(batches))
    by_time = [entry for entry in batches if entry.minute < second.begun]
    after = [entry for entry in batches if entry.minute >= second.begun]
    one_by_one = judge(PLAN, judge(PLAN, Evidence(), by_time, first).evidence, [], second).evidence
    chance.shuffle(after)
    for batch in after:
        one_by_one = judge(PLAN, one_by_one, [batch], second).evidence
    chance.shuffle(batches)
    late = judge(PLAN, judge(PLAN, Evidence(), [], first).evidence, [], second).evidence
    for batch in batches:
        late = judge(PLAN, late, [batch], second).evidence
    assert late == one_by_one


@settings(max_examples=20)
@given(history)
def test_evidence_and_verdicts_survive_json_bit_for_bit(drawn: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    judged = judged_alone([minute(number, *value) for number, value in enumerate(drawn)])
    evidence = Evidence.from_json(json.loads(json.dumps(judged.evidence.as_json())))
    verdict = Verdict.from_json(json.loads(json.dumps(judged.verdict.as_json())))
    assert (evidence, verdict) == (judged.evidence, judged.verdict)
    assert evidence.digest == judged.evidence.digest


def test_regions_add_their_curves() -> None:
    one, other = healthy(6), [minute(number, (40, 0), (760, 4)) for number in range(6)]
    together = pooled([judged_alone(one).evidence, judged_alone(other).evidence])
    as_one = judged_alone([*one, *(replace(entry, minute=entry.minute + 6) for entry in other)]).evidence
    assert together.steps == as_one.steps
    assert decide(PLAN, together, Moment(0, 0, 6)).decision is Decision.ADVANCE


def test_regions_at_different_steps_cannot_be_pooled() -> None:
    ahead = judge(PLAN, judged_alone(healthy(5)).evidence, [], Moment(1, 5, 6)).evidence
    with pytest.raises(EvidenceInvalid, match="different steps"):
        pooled([ahead, judged_alone(healthy(5)).evidence])


def test_a_step_cannot_be_left_out() -> None:
    with pytest.raises(EvidenceInvalid, match="in order"):
        judge(PLAN, Evidence(), [], Moment(1, 0, 5))
    with pytest.raises(EvidenceInvalid, match="before the previous step"):
        judge(PLAN, judged_alone(healthy(5)).evidence, [], Moment(1, 0, 6))


def test_what_speaks_for_a_version_begins_anew_with_each_step() -> None:
    judged = judged_alone(healthy(30))
    later = judge(PLAN, judged.evidence, [], Moment(1, 30, 31)).verdict
    assert later.better == pytest.approx(0)


def test_the_interval_of_the_ratio_closes_in_on_it() -> None:
    fourfold = [errors_alone(number, (1500, 30), (28500, 142)) for number in range(40)]
    low, high = interval(PLAN, judged_alone(fourfold).evidence.steps, 0)
    assert low < 4.06 < high
    assert (low, high) == (3.0, 8.0)
    assert interval(PLAN, judged_alone([], at=1).evidence.steps, 0) == (0.0, math.inf)


def test_a_verdict_is_explained_in_words_and_numbers() -> None:
    plan = plan_with(latencies=(0.1, 0.2, 0.3, 0.4, 0.8, 1.0, 1.28))
    batches = [minute(0, (15, 8), (285, 1))]
    judged = judged_alone(batches, plan)
    totals = totals_after((), Evidence(), judged.evidence, batches)
    sentence, *figures = explain(plan, judged.evidence, totals, judged.verdict).split("\n")
    assert sentence == (
        "Rolled back at 5 % after 1 min: 8 of 15 requests failed against 1 of 285 of the stable version; "
        "confidence more than 1,000,000:1, threshold 100:1."
    )
    assert "100 to 1 rolls back" in "\n".join(figures)
    assert any("slower than p95, 400 ms: odds ratio" in line for line in figures)
    assert any("errors: odds ratio above" in line for line in figures)


@pytest.mark.parametrize(
    "broken",
    [
        {"steps": ()},
        {"steps": (TrafficStep(50, 2.0),)},
        {"steps": (TrafficStep(100, 1.0),)},
        {"bake_max": 1},
        {"alpha": 0.0},
        {"objective": 1.0},
        {"margin": 0.9},
        {"bursts": (0.1,)},
        {"bursts": (math.nan,) * len(METRICS)},
        {"latencies": (1.0, 2.0)},
        {"latencies": (7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)},
    ],
)
def test_a_plan_that_nobody_can_follow_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(PlanInvalid, match="invalid rollout plan"):
        replace(PLAN, **broken)  # type: ignore[arg-type]


def test_a_plan_survives_json() -> None:
    plan = plan_with((10, 100), latencies=(0.1, 0.2, 0.3, 0.4, 0.8, 1.0, 1.28), bursts=(0.3, *[0.0] * 7))
    again = CanaryPlan.from_json(json.loads(json.dumps(plan.as_json())))
    assert again == plan
    assert again.digest == plan.digest
    with pytest.raises(PlanInvalid, match="invalid rollout plan"):
        CanaryPlan.from_json({"steps": []})
