"""E-values keep their guarantee: by enumeration, not by simulation."""

import itertools
import math
from math import comb

import pytest

from nxpipe.pipeline.canary.evalues import all_metrics, better, within_objective, worse
from nxpipe.pipeline.canary.evidence import StepEvidence, empty_step, evidence_of_minute
from nxpipe.pipeline.canary.metrics import METRICS, Arm, Batch, Pairs
from nxpipe.pipeline.canary.plan import CanaryPlan
from tests.canary.samples import PLAN, errors_alone, fisher, plan_with

ERRORS = 0
# Bets on the metrics and for later minutes lie still here: what they add to 1 is taken off again.
CELLS = [(1, 1, 1), (2, 9, 4), (5, 5, 5), (5, 40, 3), (12, 8, 15), (15, 60, 7), (40, 10, 30)]


def known(batches: list[Batch], plan: CanaryPlan = PLAN) -> list[StepEvidence]:
    step = empty_step(plan, 0)
    for batch in batches:
        step += StepEvidence(0, evidence_of_minute(plan, batch), int(batch.canary.requests), int(batch.canary.errors))
    return [step]


@pytest.mark.parametrize(("n", "m", "k"), CELLS)
@pytest.mark.parametrize("margin", [1.0, 1.25])
def test_evidence_against_a_version_no_worse_is_expected_to_be_at_most_1(n: int, m: int, k: int, margin: float) -> None:
    plan = plan_with(margin=margin)
    for true in (0.2, 0.8, 1.0, margin):
        expected = sum(
            chance * math.exp(worse(plan, known([errors_alone(0, (n, x), (m, k - x))], plan), ERRORS, margin))
            for x, chance in fisher(n, m, k, true)
        )
        assert expected <= 1 + 1e-8, true


@pytest.mark.parametrize(("n", "m", "k"), CELLS)
@pytest.mark.parametrize("step", range(4))
def test_evidence_for_an_intolerable_version_is_expected_to_be_at_most_1(n: int, m: int, k: int, step: int) -> None:
    tolerates = PLAN.steps[step].tolerates
    for true in (tolerates, tolerates + 1, 40.0):
        expected = sum(
            chance * math.exp(better(PLAN, known([errors_alone(0, (n, x), (m, k - x))]), ERRORS, tolerates))
            for x, chance in fisher(n, m, k, true)
        )
        assert expected <= 1 + 1e-8, true


def test_hoeffdings_form_would_not_be_evidence_for_a_version() -> None:
    """Why the exact form is used throughout: the short one is wrong on this side of a ratio other than 1."""
    n, m, k, null, bet = 12, 8, 15, 3.0, 1.0
    form = ((null * n + m) / (bet * n + m)) ** k
    assert sum(chance * (bet / null) ** x * form for x, chance in fisher(n, m, k, null)) > 1.5


def test_ratios_may_change_from_minute_to_minute() -> None:
    cells, truths = [(3, 12, 4), (6, 9, 5)], (1.0, 0.4)
    expected = 0.0
    shares = [list(fisher(*cell, true)) for cell, true in zip(cells, truths, strict=True)]
    for drawn in itertools.product(*shares):
        batches = [
            errors_alone(at, (n, x), (m, k - x))
            for at, ((n, m, k), (x, _)) in enumerate(zip(cells, drawn, strict=True))
        ]
        chance = math.prod(value for _, value in drawn)
        expected += chance * math.exp(worse(PLAN, known(batches), ERRORS, 1.0))
    assert expected <= 1 + 1e-8


@pytest.mark.parametrize(("n", "rate"), [(1, 0.01), (30, 0.01), (30, 0.02), (200, 0.01), (200, 0.3)])
def test_evidence_for_a_version_beyond_its_objective_is_expected_to_be_at_most_1(n: int, rate: float) -> None:
    expected = sum(
        comb(n, bad)
        * rate**bad
        * (1 - rate) ** (n - bad)
        * math.exp(within_objective(PLAN, StepEvidence(0, empty_step(PLAN, 0).curves, n, bad)))
        for bad in range(n + 1)
    )
    assert expected <= 1 + 1e-8


@pytest.mark.parametrize(("n", "m", "k"), CELLS)
@pytest.mark.parametrize("tau", [0.0, 0.6])
def test_evidence_rises_with_the_canarys_bad_requests(n: int, m: int, k: int, tau: float) -> None:
    plan = plan_with(bursts=(tau, *[0.0] * (len(METRICS) - 1)))
    shares = [x for x, _ in fisher(n, m, k, 1.0)]
    steps = [known([errors_alone(0, (n, x), (m, k - x))], plan) for x in shares]
    against = [worse(plan, step, ERRORS, 1.0) for step in steps]
    in_favour = [better(plan, step, ERRORS, plan.steps[0].tolerates) for step in steps]
    assert against == sorted(against)
    assert in_favour == sorted(in_favour, reverse=True)


def test_a_pair_of_which_one_is_bad_is_a_minute_of_one_request_each() -> None:
    alone = (1, *[0] * (len(METRICS) - 1))
    nothing = (0,) * len(METRICS)
    pair = evidence_of_minute(PLAN, Batch(0, Arm(0, 0), Arm(0, 0), Pairs(alone, nothing)))
    assert pair[ERRORS] == evidence_of_minute(PLAN, errors_alone(0, (1, 1), (1, 0)))[ERRORS]
    other = evidence_of_minute(PLAN, Batch(0, Arm(0, 0), Arm(0, 0), Pairs(nothing, alone)))
    assert other[ERRORS] == evidence_of_minute(PLAN, errors_alone(0, (1, 0), (1, 1)))[ERRORS]


def test_nothing_known_is_even_odds() -> None:
    assert [worse(PLAN, known([]), metric, 1.0) for metric in range(len(METRICS))] == pytest.approx([0] * len(METRICS))
    assert all_metrics([0.0] * len(METRICS)) == pytest.approx(0)
    assert within_objective(PLAN, empty_step(PLAN, 0)) == pytest.approx(0)


def test_bets_on_later_steps_lie_still_until_those_begin() -> None:
    """However bad the first step looks good, half of a quarter is still there for the second one."""
    good = known([errors_alone(0, (5000, 0), (95000, 500))])
    assert worse(PLAN, good, ERRORS, 1.0) == pytest.approx(math.log(0.25), abs=1e-3)
    late = [*good, known([errors_alone(1, (2500, 100), (7500, 40))])[0]]
    assert worse(PLAN, late, ERRORS, 1.0) > 20
