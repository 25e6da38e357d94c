"""Whole rollouts: the simulator compared with the planner, and the commands."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.pipeline.canary.judge import Decision
from nxpipe.pipeline.canary.plan import ShadowPhase
from nxpipe.pipeline.config import Rollout
from nxpipe.pipeline.rollout.input import plan_of
from nxpipe.pipeline.rollout.planner import (
    LOG_THRESHOLDS,
    POWER,
    Defect,
    Service,
    Slowness,
    against,
    best_chance,
    in_favour,
    minutes_until,
    prospects,
)
from nxpipe.pipeline.rollout.simulate import (
    Scenario,
    SimulatedTraffic,
    SimulationSummary,
    TrafficModel,
    median_minutes,
    simulate,
    upper_limit,
)
from tests.canary.samples import PLAN, plan_with
from tests.pipeline.in_process import InProcess
from tests.pipeline.in_process import nxpipe as here

pytestmark = pytest.mark.sample(12)

__all__ = ["here"]
BASE = 0.005
SHADOWED = plan_with(shadow=ShadowPhase(25, 5, 60))


def world(
    scenario: Scenario = "steady", rps: float = 5, error: float = BASE, slowness: Slowness | None = None
) -> TrafficModel:
    return TrafficModel(scenario, rps, BASE, error, slowness or Slowness())


def rates(summary: SimulationSummary) -> dict[Decision, float]:
    return {entry: len(summary.ended(entry)) / len(summary.outcomes) for entry in Decision}


def test_a_seed_is_a_rollout_whatever_the_number_of_processes() -> None:
    one, two = (simulate(PLAN, world(error=0.05), 60, 7, processes=count) for count in (1, 2))
    assert one == two
    assert simulate(PLAN, world(error=0.05), 60, 8) != one


@pytest.mark.parametrize("scenario", ["steady", "incident", "bursty"])
def test_healthy_versions_are_promoted(scenario: Scenario) -> None:
    ended = rates(simulate(PLAN, world(scenario), 15, 3))
    assert ended[Decision.ROLL_BACK] == 0
    assert ended[Decision.ADVANCE] >= 0.8


@pytest.mark.parametrize("differs", [0.05, 0.5])
def test_a_version_that_answers_otherwise_goes_back_from_the_shadow_phase(differs: float) -> None:
    summary = simulate(SHADOWED, TrafficModel("steady", 20, BASE, BASE, differs=differs), 20, 3)
    assert {(outcome.decision, outcome.step) for outcome in summary.outcomes} == {(Decision.ROLL_BACK, 0)}


def test_equal_versions_pass_the_shadow_phase_and_are_promoted() -> None:
    summary = simulate(SHADOWED, TrafficModel("steady", 50, BASE, BASE), 15, 3)
    assert rates(summary)[Decision.ROLL_BACK] == 0
    assert rates(summary)[Decision.ADVANCE] >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["steady", "incident"])
def test_of_a_thousand_equal_versions_no_more_than_alpha_are_refused_in_shadow(scenario: Scenario) -> None:
    summary = simulate(SHADOWED, TrafficModel(scenario, 20, BASE, BASE), 1000, 3)
    assert sum(outcome.step == 0 for outcome in summary.rolled_back) <= 1000 * SHADOWED.alpha
    assert upper_limit(len(summary.rolled_back), 1000) <= 2 * SHADOWED.alpha


def test_a_broken_version_goes_back_with_the_first_minute() -> None:
    summary = simulate(PLAN, world(error=0.5), 40, 3)
    assert {outcome.decision for outcome in summary.outcomes} == {Decision.ROLL_BACK}
    assert median_minutes(summary.outcomes) == 1


def test_a_version_that_does_not_answer_goes_back_with_the_first_minute(here: InProcess) -> None:
    given = ("rollout", "simulate", "--rps", "50", "--base-error", "0.005", "--canary-unanswered", "0.3")
    document = json.loads(here(*given, "--rollouts", "20", "--json").out)
    assert (document["rolled_back"], document["false_rollback_rate"], document["median_minutes"]) == (20, None, 1)


@pytest.mark.slow
def test_of_a_thousand_versions_that_leave_a_third_unanswered_all_but_ten_go_back() -> None:
    summary = simulate(PLAN, TrafficModel("steady", 5, BASE, BASE, unanswered=0.3), 1000, 3)
    assert len(summary.rolled_back) >= 990
    assert sum(outcome.minutes <= 12 for outcome in summary.rolled_back) >= 990


def test_a_version_with_twice_the_errors_is_not_promoted() -> None:
    assert rates(simulate(PLAN, world(error=0.01), 15, 3))[Decision.ADVANCE] == 0


def test_a_late_canary_goes_back_after_it_has_begun_to_fail() -> None:
    summary = simulate(PLAN, world("late", rps=50, error=0.02), 10, 3)
    assert {(outcome.decision, outcome.step) for outcome in summary.outcomes} == {(Decision.ROLL_BACK, 2)}
    assert max(outcome.minutes for outcome in summary.outcomes) <= 20


def test_counts_are_drawn_at_the_rates_that_were_asked_for() -> None:
    slow = Slowness(scale=1.2)
    traffic = SimulatedTraffic(world(rps=100, error=0.05, slowness=slow), np.random.default_rng(1))
    batches = [batch for batch, _ in zip(traffic.minutes(0, 25), range(200), strict=False)]
    canary = sum(entry.canary.requests for entry in batches)
    everything = canary + sum(entry.stable.requests for entry in batches)
    assert everything / 200 == pytest.approx(6000, rel=0.01)
    assert canary / everything == pytest.approx(0.25, rel=0.01)
    assert sum(entry.canary.errors for entry in batches) / canary == pytest.approx(0.05, rel=0.03)
    slower = [sum(entry.canary.slower[at] for entry in batches) / canary for at in range(len(LOG_THRESHOLDS))]
    assert slower == pytest.approx(slow.slower(), rel=0.15)


@pytest.mark.parametrize(("scale", "tail"), [(1.2, 1.0), (1.0, 1.5), (1.1, 1.3)])
def test_p99_rises_by_what_was_asked_for(scale: float, tail: float) -> None:
    p99 = LOG_THRESHOLDS[4]
    assert Slowness(scale, tail).before(p99 + math.log(scale * tail)) == pytest.approx(p99)


@pytest.mark.parametrize(
    ("fault", "rps"),
    [
        (Defect("x 4", 0.02), 5),
        (Defect("x 2", 0.01), 50),
        (Defect("p99", BASE, Slowness(scale=1.2)), 5),
        (Defect("tail", BASE, Slowness(tail=1.5)), 5),
    ],
    ids=str,
)
def test_the_planner_foresees_what_the_simulator_finds(fault: Defect, rps: float) -> None:
    """A step that never ends for the better shows how often, and when, a fault is found within the hour."""
    held = plan_with(bake_min=60)
    summary = simulate(held, world(rps=rps, error=fault.error, slowness=fault.slowness), 40, 5)
    found = sorted(outcome.minutes if outcome.step == 0 else 1000 for outcome in summary.outcomes)
    bets = against(held, Service(rps, BASE), fault, 0, 5)
    assert sum(entry <= 60 for entry in found) / 40 == pytest.approx(best_chance(bets, 60), abs=0.22)
    assert minutes_until(bets) == pytest.approx(found[20], rel=0.35, abs=2)


def test_the_planner_foresees_when_a_healthy_version_advances() -> None:
    expected = sum(minutes_until(in_favour(PLAN, Service(5, BASE), step)) or math.inf for step in range(4))
    summary = simulate(PLAN, world(), 40, 5)
    median = sorted(outcome.minutes for outcome in summary.outcomes)[20]
    assert expected == pytest.approx(median, rel=0.2)


@given(rps=st.floats(0.3, 200), base=st.floats(0.0003, 0.06))
@settings(max_examples=8)
def test_the_smallest_rate_that_is_found_is_the_first_of_all_that_are_tried(rps: float, base: float) -> None:
    plan, service = plan_with((25, 100)), Service(rps, base)
    detectable_error = prospects(plan, service)[0].detectable_error
    rates = [rate for tenths in range(11, 1001) if (rate := base * tenths / 10) <= 0.5]
    found = (
        rate for rate in rates if best_chance(against(plan, service, Defect("", rate), 0, 25), plan.bake_max) >= POWER
    )
    assert detectable_error == next(found, None)


@pytest.mark.parametrize(
    ("events", "trials", "limit"), [(0, 100, 0.0295), (0, 10_000, 0.0003), (5, 100, 0.1023), (3, 3, 1)]
)
def test_upper_limits_are_those_of_the_tables(events: int, trials: int, limit: float) -> None:
    assert upper_limit(events, trials) == pytest.approx(limit, rel=0.01)


def test_a_configuration_becomes_a_plan() -> None:
    rules = Rollout.model_validate({"steps": [10, 100], "bake_min": "90s", "margin": 1.1, "bursts": 0.4})
    plan = plan_of(rules)
    assert [step.share for step in plan.steps] == [10, 100]
    assert (plan.bake_min, plan.bake_max, plan.objective, plan.margin) == (2, 60, 0.01, 1.1)
    assert plan.bursts[:2] == (0.4, 0.0)


def test_the_plan_says_what_cannot_be_detected_and_what_to_do_instead(here: InProcess) -> None:
    answer = here("rollout", "plan", "--rps", "5", "--base-error", "0.005")
    assert answer.code == 0, answer.err
    result = " ".join(answer.out.split())
    assert "errors x 2 (0.5 % to 1 %): found in only 2.7 % of rollouts at 5 % within 60 min" in result
    assert "mirror 100 % of requests in a shadow phase of up to 60 min ([rollout.shadow])" in result
    assert "allow the first step 6.4 h (bake_max)" in result
    document = json.loads(here("rollout", "plan", "--rps", "50", "--base-error", "0.005", "--json").out)
    assert [step["share"] for step in document["steps"]] == [5, 25, 50, 95]
    assert document["steps"][0]["faults"][0]["chance"] > 0.8


def test_a_service_without_any_errors_can_be_planned(here: InProcess) -> None:
    assert here("rollout", "plan", "--rps", "0.1", "--base-error", "0").code == 0


def test_the_command_simulates(here: InProcess) -> None:
    given = ("rollout", "simulate", "--rps", "50", "--base-error", "0.005", "--rollouts", "20", "--seed", "4")
    document = json.loads(here(*given, "--json").out)
    assert document["rollouts"] == document["rolled_back"] + document["promoted"] + document["undecided"] == 20
    assert 0 <= document["false_rollback_rate"] <= document["false_rollback_rate_upper_95"] <= 1
    assert 20 <= document["median_minutes"] <= 25
    shown = here(*given).out
    assert "promoted" in shown
    assert "min  █" in shown


def test_a_fault_makes_no_rollback_a_false_one(here: InProcess) -> None:
    given = ("rollout", "simulate", "--rps", "5", "--base-error", "0.005", "--canary-error", "0.5", "--rollouts", "5")
    document = json.loads(here(*given, "--json").out)
    assert (document["rolled_back"], document["false_rollback_rate"], document["median_minutes"]) == (5, None, 1)
