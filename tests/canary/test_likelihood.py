import itertools
import math
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.pipeline.canary.likelihood import fitted_tau, log_likelihoods, mixed_log_likelihoods
from tests.canary.samples import fisher

RATIOS = (0.25, 1.0, 2.0, 11.0, 100.0)
THETAS = [math.log(ratio) for ratio in RATIOS]


def exact_log(n: int, m: int, k: int, bad: int, ratio: Fraction) -> float:
    """The log-likelihood over the one at a ratio of 1, in whole numbers: each coefficient from the one before."""
    low, high = max(0, k - m), min(n, k)
    coefficient, whole = comb(n, low) * comb(m, k - low), 0
    top, under = ratio.numerator, ratio.denominator
    for x in range(low, high + 1):
        whole += coefficient * top ** (x - low) * under ** (high - x)
        coefficient = coefficient * (n - x) * (k - x) // ((x + 1) * (m - k + x + 1))
    log_sum = math.log(whole) - (high - low) * math.log(under) + low * math.log(ratio) - math.log(comb(n + m, k))
    return bad * math.log(ratio) - log_sum


@pytest.mark.parametrize(
    ("n", "m", "k"),
    [
        pytest.param(15, 285, 2, id="few"),
        pytest.param(40, 30, 35, id="not-every-share-is-possible"),
        pytest.param(150, 2850, 1500, id="a-polynomial"),
        pytest.param(400, 9000, 300, id="a-walk"),
        pytest.param(4000, 4000, 4000, id="a-stride"),
    ],
)
@pytest.mark.parametrize("ratio", [Fraction(1, 4), Fraction(3, 2), Fraction(11)])
def test_the_likelihood_is_exact_whichever_way_it_is_summed(n: int, m: int, k: int, ratio: Fraction) -> None:
    bad = (max(0, k - m) + min(n, k)) // 2
    at_ratio, at_one = log_likelihoods((n, bad), (m, k - bad), [math.log(ratio), 0.0])
    assert at_ratio - at_one == pytest.approx(exact_log(n, m, k, bad, ratio), abs=2e-10)


cells = st.tuples(st.integers(1, 30), st.integers(1, 30)).flatmap(
    lambda arms: st.tuples(st.just(arms[0]), st.just(arms[1]), st.integers(1, sum(arms) - 1))
)


@given(cells, st.sampled_from(RATIOS))
def test_probabilities_are_those_of_the_definition(cell: tuple[int, int, int], ratio: float) -> None:
    n, m, k = cell
    for bad, probability in fisher(n, m, k, ratio):
        at_ratio, at_one = log_likelihoods((n, bad), (m, k - bad), [math.log(ratio), 0.0])
        at_random = comb(n, bad) * comb(m, k - bad) / comb(n + m, k)
        assert math.exp(at_ratio - at_one) * at_random == pytest.approx(probability, rel=1e-9)


@settings(max_examples=30)
@given(cells, st.sampled_from((0.1, 0.5, 1.2)))
def test_a_mixture_for_bursts_is_a_probability_and_its_ratios_rise(cell: tuple[int, int, int], tau: float) -> None:
    n, m, k = cell
    shares = [bad for bad, _ in fisher(n, m, k, 1.0)]
    logs = [mixed_log_likelihoods((n, bad), (m, k - bad), THETAS, tau) for bad in shares]
    ways = [comb(n, bad) * comb(m, k - bad) for bad in shares]
    wholes = [
        sum(math.exp(mixed[at]) * way for mixed, way in zip(logs, ways, strict=True)) for at in range(len(RATIOS))
    ]
    assert wholes == pytest.approx([wholes[0]] * len(wholes), rel=1e-9)
    steps = [after[3] - after[1] for after in logs]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(steps))


def test_without_bursts_the_mixture_is_the_plain_likelihood() -> None:
    plain = log_likelihoods((50, 6), (450, 9), THETAS)
    mixed = mixed_log_likelihoods((50, 6), (450, 9), THETAS, 0.01)
    assert [log - mixed[1] for log in mixed] == pytest.approx([log - plain[1] for log in plain], abs=3e-3)


def test_a_history_without_bursts_gives_a_small_tau_and_one_with_bursts_a_large_one() -> None:
    calm = [((300, 3), (5700, 57)), ((300, 2), (5700, 60)), ((300, 4), (5700, 55))] * 40
    wild = [((300, 8), (5700, 57)), ((300, 0), (5700, 60)), ((300, 1), (5700, 55))] * 40
    assert fitted_tau(calm) <= 0.2
    assert 0.6 <= fitted_tau(wild) <= 2
    assert fitted_tau([]) == 0
