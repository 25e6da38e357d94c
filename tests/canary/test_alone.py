"""A version at full traffic must keep its objective."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.pipeline.canary.evalues import FullTrafficTest
from nxpipe.pipeline.canary.metrics import NO_REQUESTS, Arm, Batch
from tests.canary.samples import plan_with
from tests.tiers import examples


@given(st.floats(0.001, 0.3), st.floats(0, 1), st.integers(1, 12))
@settings(max_examples=examples(40))
def test_a_version_that_keeps_to_its_objective_has_no_expectation_of_evidence_against_it(
    objective: float, share: float, requests: int
) -> None:
    rate = share * objective
    chances = [math.comb(requests, bad) * rate**bad * (1 - rate) ** (requests - bad) for bad in range(requests + 1)]
    values = [math.exp(FullTrafficTest(requests, bad).against(objective)) for bad in range(requests + 1)]
    assert sum(chance * value for chance, value in zip(chances, values, strict=True)) <= 1 + 1e-12


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_each_failure_speaks_against_it_and_each_success_for_it(good: int, bad: int) -> None:
    against = FullTrafficTest(good + bad, bad).against(0.01)
    assert (
        FullTrafficTest(good + bad + 1, bad + 1).against(0.01)
        > against
        > FullTrafficTest(good + bad + 1, bad).against(0.01)
    )


def test_nothing_is_made_of_a_minute_that_cannot_be() -> None:
    batches = [
        Batch(1, Arm(100, 3), NO_REQUESTS),
        Batch(2, Arm(100, 101), NO_REQUESTS),
        Batch(3, Arm(math.nan, 0), NO_REQUESTS),
    ]
    assert FullTrafficTest() + batches == FullTrafficTest(100, 3)


def test_a_broken_version_is_seen_at_once_and_a_good_one_is_let_be() -> None:
    plan = plan_with(objective=0.01)
    assert FullTrafficTest(60, 30).fails(plan)
    assert not FullTrafficTest(100_000, 1000).fails(plan)
    assert not FullTrafficTest().fails(plan)
