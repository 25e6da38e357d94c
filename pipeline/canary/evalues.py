"""E-values of the sequential tests of a rollout, and the confidence sequences that follow from them. All values are in
nats.

An e-process is the capital of a betting martingale: a gambler who bets against a null hypothesis at odds that are fair
under the null. Under the null its expectation is at most 1 at every stopping time, and by Ville's inequality it ever
reaches 1/a with a probability of at most a. So evidence may be evaluated every minute and the rollout stopped at the
first crossing, with a Type I error of at most a: anytime validity. The reciprocal of its maximum so far is an
always-valid p-value; a fixed-sample p-value that is computed again every minute has no such guarantee.

A bet on the odds ratio r against the null "at most r0" multiplies the capital by L(r) / L(r0) of each minute. The ratio
rises with the canary's bad requests, and those rise stochastically with the true odds ratio (monotone likelihood
ratio). Its expectation is therefore at most 1 for every true ratio up to r0, even for one that changes with time. The
true ratio is unknown, so the capital is split over a grid (`constants.RATIO_STAKES`) and the bets are added: a mixture.
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
from nxpipe.pipeline.canary.evidence import GRAIN, Curve, StepEvidence, sum_curves
from nxpipe.pipeline.canary.likelihood import log_sum
from nxpipe.pipeline.canary.metrics import Batch, fault
from nxpipe.pipeline.canary.plan import CanaryPlan


@lru_cache(maxsize=256)
def bets_above(grid: tuple[float, ...], ratio: float) -> tuple[tuple[int, float], ...]:
    """Bets that the odds ratio is above `ratio`: positions on the grid, and the log of each stake."""
    return _normalised([(at, RATIO_STAKES[r][0]) for at, r in enumerate(grid) if r > ratio and r in RATIO_STAKES])


@lru_cache(maxsize=256)
def bets_below(grid: tuple[float, ...], ratio: float) -> tuple[tuple[int, float], ...]:
    """Bets that the odds ratio is below `ratio`."""
    return _normalised([(at, RATIO_STAKES[r][1]) for at, r in enumerate(grid) if r < ratio and r in RATIO_STAKES])


def _normalised(bets: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Bets with stakes that sum to 1, as logs."""
    total = math.fsum(bet for _, bet in bets)
    return tuple((at, math.log(bet / total)) for at, bet in bets)


def worse(plan: CanaryPlan, steps: Sequence[StepEvidence], metric: int, ratio: float) -> float:
    """The e-value against the null "the odds ratio of the metric was never above `ratio`".

    One bet runs since the first minute and one since the start of each later step. Stakes of steps that have not begun
    are idle capital, which keeps the sum an e-value at every moment.
    """
    idle = math.fsum(stakes_by_step(len(plan.phases))[len(steps) :])  # stakes of later steps
    return log_sum([_log(idle), *worse_by_step(plan, steps, metric, ratio)])


def worse_by_step(plan: CanaryPlan, steps: Sequence[StepEvidence], metric: int, ratio: float) -> list[float]:
    """The parts of `worse`: the log capital of the bet that runs since the start of each step."""
    bets, null = bets_above(plan.ratios, ratio), plan.ratios.index(ratio)
    stakes = stakes_by_step(len(plan.phases))
    return [
        _log(stake) + _bet(bets, curve, null) for stake, curve in zip(stakes, _since_each(steps, metric), strict=False)
    ]


def better(plan: CanaryPlan, steps: Sequence[StepEvidence], metric: int, ratio: float) -> float:
    """The e-value against the null "the odds ratio of the metric was never below `ratio`", since the first of these
    steps."""
    if not steps:
        return 0.0
    return _bet(bets_below(plan.ratios, ratio), _since_each(steps, metric)[0], plan.ratios.index(ratio))


def within_objective(plan: CanaryPlan, step: StepEvidence) -> float:
    """The e-value against the null "the canary's error rate is at or above the objective".

    A request multiplies the capital by its likelihood at the alternative error rate over that at the objective.
    """
    good, rate = step.requests - step.errors, plan.objective
    return log_sum(
        [
            _log(bet) + _times(step.errors, _log(share)) + good * math.log((1 - share * rate) / (1 - rate))
            for share, bet in OBJECTIVE_STAKES
        ]
    )


def all_metrics(by_metric: Sequence[float]) -> float:
    """The e-value of all metrics together: the mean of theirs, weighted by METRIC_STAKES."""
    return log_sum([_log(bet) + log_capital for bet, log_capital in zip(METRIC_STAKES, by_metric, strict=True)])


def _bet(bets: Iterable[tuple[int, float]], curve: Curve, null: int) -> float:
    """The log capital of bets against the ratio at position `null`, from a curve of log likelihoods."""
    return log_sum([bet + (curve[at] - curve[null]) * GRAIN for at, bet in bets])


def stakes_by_step(steps: int) -> tuple[float, ...]:
    """The part of the unit that is staked at the start of each step."""
    if steps == 1:
        return (1.0,)
    return (FIRST_STEP_STAKE, *[(1 - FIRST_STEP_STAKE) / (steps - 1)] * (steps - 1))


def _since_each(steps: Sequence[StepEvidence], metric: int) -> list[Curve]:
    """For each step, the curve of all minutes since its start: suffix sums."""
    sums: list[Curve] = []
    for step in reversed(steps):
        curve = step.curves[metric]
        sums.append(sum_curves(sums[-1], curve) if sums else curve)
    return sums[::-1]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _times(count: int, log: float) -> float:
    """count * log with 0 * -inf = 0: no errors are certain at a rate of zero."""
    return count * log if count else 0.0


def interval(plan: CanaryPlan, steps: Sequence[StepEvidence], metric: int) -> tuple[float, float]:
    """A confidence sequence for the odds ratio of canary and baseline, on the plan's grid.

    It is the set of ratios that the tests above do not reject at 1/alpha. Each end is wrong in at most `alpha` of all
    rollouts with a constant ratio, at all moments together: a ratio is excluded only together with all ratios beyond
    it, so the error of an end is the Type I error of one test, that against the true ratio.
    """
    threshold = math.log(1 / plan.alpha)
    inner = plan.ratios[:-1]
    low, high = 0.0, math.inf
    for ratio in inner:
        if worse(plan, steps, metric, ratio) < threshold:
            break
        low = ratio
    for ratio in reversed(plan.ratios[1:]):
        if better(plan, steps, metric, ratio) < threshold:
            break
        high = ratio
    return low, high


@dataclass(frozen=True)
class FullTrafficTest:
    """The counts at full traffic. Without a baseline the error rate is tested against the objective alone."""

    requests: int = 0
    errors: int = 0

    def __add__(self, batches: Iterable[Batch]) -> "FullTrafficTest":
        """The test with more minutes, of which invalid ones are left out."""
        arms = [batch.canary for batch in batches if fault(batch) is None]
        return FullTrafficTest(
            self.requests + sum(int(arm.requests) for arm in arms), self.errors + sum(int(arm.errors) for arm in arms)
        )

    def fails(self, plan: CanaryPlan) -> bool:
        """True if the candidate is rolled back from full traffic."""
        return self.against(plan.objective) >= math.log(FULL_TRAFFIC_FACTOR / plan.alpha)

    def against(self, objective: float) -> float:
        """The e-value against the null "the error rate was never above the objective"."""
        bet = math.log(1 / len(FULL_TRAFFIC_ODDS))
        return log_sum(
            [
                bet + self.errors * math.log(odds) - self.requests * math.log1p((odds - 1) * objective)
                for odds in FULL_TRAFFIC_ODDS
            ]
        )
