"""The grid of odds ratios on which evidence is kept, and how bets are spread over it.

Constants of the method: none is tuned to a service. Against a canary, most is bet where a minute is worth most, on
ratios of 2 to 12: a smaller one needs hours whatever is bet, and a larger one shows at once. For a canary, most is
bet on a ratio of 1, which is what a healthy version has.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nxpipe.pipeline.canary.constants import (
    FIRST_STEP_STAKE,
    FULL_TRAFFIC_FACTOR,
    FULL_TRAFFIC_ODDS,
    METRIC_STAKES,
    OBJECTIVE_STAKES,
    RATIO_STAKES,
)
from nxpipe.pipeline.canary.counts import Batch, fault
from nxpipe.pipeline.canary.evidence import GRAIN, Curve, StepEvidence, sum_curves
from nxpipe.pipeline.canary.likelihood import log_sum
from nxpipe.pipeline.canary.plan import CanaryPlan


@lru_cache(maxsize=256)
def bets_above(grid: tuple[float, ...], ratio: float) -> tuple[tuple[int, float], ...]:
    """Where on the grid is bet that the ratio is above this one, and the logarithm of how much of one unit."""
    return _shared([(at, RATIO_STAKES[r][0]) for at, r in enumerate(grid) if r > ratio and r in RATIO_STAKES])


@lru_cache(maxsize=256)
def bets_below(grid: tuple[float, ...], ratio: float) -> tuple[tuple[int, float], ...]:
    return _shared([(at, RATIO_STAKES[r][1]) for at, r in enumerate(grid) if r < ratio and r in RATIO_STAKES])


def _shared(bets: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    whole = math.fsum(bet for _, bet in bets)
    return tuple((at, math.log(bet / whole)) for at, bet in bets)


def worse(plan: CanaryPlan, steps: Sequence[StepEvidence], metric: int, ratio: float) -> float:
    """Against "never above `ratio`", of one metric: bets from the first minute, and from where each step began."""
    bets, null = bets_above(plan.ratios, ratio), plan.ratios.index(ratio)
    begins = stakes_by_step(len(plan.steps))
    grown = [_log(math.fsum(begins[len(steps) :]))]  # what is to be bet on later steps lies still
    for bet, curve in zip(begins, _since_each(steps, metric), strict=False):
        grown.append(_log(bet) + _bet(bets, curve, null))
    return log_sum(grown)


def better(plan: CanaryPlan, steps: Sequence[StepEvidence], metric: int, ratio: float) -> float:
    """Against "never below `ratio`", of one metric, since the first of these steps."""
    if not steps:
        return 0.0
    return _bet(bets_below(plan.ratios, ratio), _since_each(steps, metric)[0], plan.ratios.index(ratio))


def within_objective(plan: CanaryPlan, step: StepEvidence) -> float:
    """Against "the canary fails the objective's share of requests, or more"."""
    good, rate = step.requests - step.errors, plan.objective
    return log_sum(
        [
            _log(bet) + _times(step.errors, _log(share)) + good * math.log((1 - share * rate) / (1 - rate))
            for share, bet in OBJECTIVE_STAKES
        ]
    )


def all_metrics(by_metric: Sequence[float]) -> float:
    return log_sum([_log(bet) + grown for bet, grown in zip(METRIC_STAKES, by_metric, strict=True)])


def _bet(bets: Iterable[tuple[int, float]], curve: Curve, null: int) -> float:
    return log_sum([bet + (curve[at] - curve[null]) * GRAIN for at, bet in bets])


def stakes_by_step(steps: int) -> tuple[float, ...]:
    if steps == 1:
        return (1.0,)
    return (FIRST_STEP_STAKE, *[(1 - FIRST_STEP_STAKE) / (steps - 1)] * (steps - 1))


def _since_each(steps: Sequence[StepEvidence], metric: int) -> list[Curve]:
    """The curves of all minutes since each step began."""
    sums: list[Curve] = []
    for step in reversed(steps):
        curve = step.curves[metric]
        sums.append(sum_curves(sums[-1], curve) if sums else curve)
    return sums[::-1]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _times(count: int, log: float) -> float:
    """No errors at a rate of zero is certain: 0 times minus infinity is 0 here."""
    return count * log if count else 0.0


def interval(plan: CanaryPlan, steps: Sequence[StepEvidence], metric: int) -> tuple[float, float]:
    """The canary's odds of a bad request over the stable version's, on the plan's grid.

    Each end is wrong in at most `alpha` of all rollouts whose ratio does not change, however often it is looked at: a
    ratio is excluded only together with all that lie further out.
    """
    enough = math.log(1 / plan.alpha)
    inner = plan.ratios[:-1]
    low, high = 0.0, math.inf
    for ratio in inner:
        if worse(plan, steps, metric, ratio) < enough:
            break
        low = ratio
    for ratio in reversed(plan.ratios[1:]):
        if better(plan, steps, metric, ratio) < enough:
            break
        high = ratio
    return low, high


@dataclass(frozen=True)
class FullTrafficTest:
    requests: int = 0
    errors: int = 0

    def __add__(self, batches: Iterable[Batch]) -> "FullTrafficTest":
        """A minute that cannot be is none."""
        arms = [batch.canary for batch in batches if fault(batch) is None]
        return FullTrafficTest(
            self.requests + sum(int(arm.requests) for arm in arms), self.errors + sum(int(arm.errors) for arm in arms)
        )

    def fails(self, plan: CanaryPlan) -> bool:
        return self.against(plan.objective) >= math.log(FULL_TRAFFIC_FACTOR / plan.alpha)

    def against(self, objective: float) -> float:
        """Against "the error rate was never above the objective", in nats."""
        bet = math.log(1 / len(FULL_TRAFFIC_ODDS))
        return log_sum(
            [
                bet + self.errors * math.log(odds) - self.requests * math.log1p((odds - 1) * objective)
                for odds in FULL_TRAFFIC_ODDS
            ]
        )
