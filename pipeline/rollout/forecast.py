"""Time until a step of a running rollout advances or rolls back, as a range.

The log capital of each bet is a random walk whose drift and variance follow from the requests per minute and the two
rates of bad requests, as in the planner; the bet's present capital lowers what is needed. The rates are known from few
bad requests, so the chance to have crossed is averaged over what they may be: a Gamma posterior of the stable version's
rate, and one of the canary's factor on it, whose prior is a healthy version's factor of 1. The range holds the middle
80 % of that distribution. It foresees chance, not change: a regression that begins later is in no range.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any, Final

from nxpipe.pipeline.canary.constants import METRIC_STAKES, OBJECTIVE_STAKES
from nxpipe.pipeline.canary.evalues import bets_above, bets_below, stakes_by_step
from nxpipe.pipeline.canary.evidence import GRAIN, Curve, Evidence
from nxpipe.pipeline.canary.explanation import PhaseTotals, share
from nxpipe.pipeline.canary.judge import Decision, Verdict
from nxpipe.pipeline.canary.metrics import METRICS
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.planner import Growth, Rate, best_chance, objective_growth, paired_growth, pooled_growth

LOW, HIGH = 0.1, 0.9  # quantiles of the range
_PRIOR: Final = 2.0  # bad requests that the prior of the canary's factor is worth
_NORMAL: Final = NormalDist()
_POSTERIOR: Final = tuple(_NORMAL.inv_cdf(quantile) for quantile in (0.1, 0.3, 0.5, 0.7, 0.9))


@dataclass(frozen=True)
class TimeLeft:
    """Minutes until a decision. `chance` is that of reaching it within the step's limit; `earliest` and `latest` are
    None where it would come after the limit only."""

    chance: float
    earliest: int | None
    latest: int | None

    def place_of(self, actual: int) -> str:
        """Where a time that came true lies: `inside`, `earlier` or `later`; `unknown` without a range."""
        if self.earliest is None:
            return "unknown"
        if actual < self.earliest:
            return "earlier"
        return "later" if self.latest is not None and actual > self.latest else "inside"

    def as_json(self) -> dict[str, Any]:
        return {"chance": round(self.chance, 3), "earliest": self.earliest, "latest": self.latest}


@dataclass(frozen=True)
class StepProgress:
    """Evidence as shares of what a decision needs, with the time that is still expected.

    A time is None if there is nothing to expect it from: no request yet, or an incident of the stable version.
    """

    advance: float
    regression: float
    until_advance: TimeLeft | None
    until_rollback: TimeLeft | None
    limit: int  # minutes until the step ends undecided
    bake: int  # minutes of evidence that the step needs in any case
    rpm: float  # requests a minute at present, of both versions

    def as_json(self) -> dict[str, Any]:
        return {
            "advance": round(self.advance, 4),
            "regression": round(self.regression, 4),
            "until_advance": self.until_advance and self.until_advance.as_json(),
            "until_rollback": self.until_rollback and self.until_rollback.as_json(),
            "minutes_until_limit": self.limit,
            "requests_per_minute": round(self.rpm, 1),
        }


@dataclass(frozen=True)
class Observed:
    """Bad requests of both versions in one metric. In pairs, both versions have the same requests."""

    canary: tuple[float, float]  # requests, bad
    stable: tuple[float, float]

    @property
    def share(self) -> float:
        whole = self.canary[0] + self.stable[0]
        return self.canary[0] / whole if whole else 0.0

    def rates(self) -> list[tuple[float, float]]:
        """Likely rates of bad requests, of canary and stable version: quantiles of the posterior, equally weighted."""
        (n, bad), (m, others) = self.canary, self.stable
        found = []
        for z in _POSTERIOR:
            stable = min(0.5, _gamma(others + 0.5, z) / (m + 1))
            whole = _PRIOR + n * stable
            found += [(min(0.9, stable * _gamma(_PRIOR + bad, y) / whole), stable) for y in _POSTERIOR]
        return found


def _gamma(shape: float, z: float) -> float:
    """The quantile of a Gamma distribution of rate 1 at a standard normal quantile (Wilson and Hilferty)."""
    return shape * max(0.01, 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))) ** 3


def progress_of(
    plan: CanaryPlan, evidence: Evidence, totals: Sequence[PhaseTotals], verdict: Verdict, rpm: float
) -> StepProgress:
    """The progress of the step of a verdict, at a rate of requests per minute."""
    begun = evidence.steps[verdict.step].begun
    shortest, longest = plan.bake(verdict.step)
    limit, bake = max(0, longest - verdict.minutes), max(0, shortest - evidence.baked.since(begun))
    advance, regression = share(verdict.better, plan.beta), share(verdict.worse, plan.alpha)
    counts = totals[verdict.step]
    if verdict.decision is Decision.FROZEN or not counts.canary.requests or not rpm:
        return StepProgress(advance, regression, None, None, limit, bake, rpm)
    until_advance = _time_left(_advances(plan, evidence, counts, verdict.step, rpm), limit, max(1, bake))
    until_rollback = _time_left(_rolls_back(plan, evidence, counts, verdict.step, rpm), limit, 1)
    return StepProgress(advance, regression, until_advance, until_rollback, limit, bake, rpm)


def _time_left(courses: Sequence[Sequence[Growth]], limit: int, at_least: int) -> TimeLeft:
    """The range of a distribution of first passages; a decision comes at the end of a minute."""

    def chance(minutes: int) -> float:
        return fmean(best_chance(bets, minutes) for bets in courses) if minutes >= at_least else 0.0

    def quantile(wanted: float) -> int | None:
        low, high = 0, max(limit, 0)
        if chance(high) < wanted:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if chance(middle) >= wanted else (middle, high)
        return high

    return TimeLeft(chance(limit), quantile(LOW), quantile(HIGH))


def _advances(plan: CanaryPlan, evidence: Evidence, counts: PhaseTotals, phase: int, rpm: float) -> list[list[Growth]]:
    """For each pair of likely rates, the bets that advance the step."""
    step, tolerated = evidence.steps[phase], plan.phases[phase].tolerates
    goal = math.log(1 / plan.beta) + math.log(2)
    observed, requests = _observed(plan, counts, phase, 0), rpm * _part(plan, counts, phase)
    pace = 2 * requests if plan.is_shadow(phase) else rpm
    good = step.requests - step.errors
    courses = []
    for canary, stable in observed.rates():
        below = (bets_below(plan.ratios, tolerated), tolerated)
        rates = (canary, stable)
        bets = [] if plan.bursts[0] else _ratio_bets(plan, step.curves[0], below, goal, rates, observed, pace)
        # Of mirrored pairs all bad ones count here, whichever version was bad as well.
        bad = canary if not plan.is_shadow(phase) else max(canary, counts.canary.errors / counts.canary.requests)
        for fraction, stake in OBJECTIVE_STAKES:
            if fraction == 0 and step.errors:
                continue  # lost
            held = step.errors * math.log(fraction) if fraction else 0.0
            held += good * math.log((1 - fraction * plan.objective) / (1 - plan.objective))
            bets.append(objective_growth(Rate(requests, bad), plan.objective, fraction, goal - math.log(stake) - held))
        courses.append(pooled_growth(bets))
    return courses


def _rolls_back(
    plan: CanaryPlan, evidence: Evidence, counts: PhaseTotals, phase: int, rpm: float
) -> list[list[Growth]]:
    """For each pair of likely rates, the bets of the metric that is nearest to a rollback."""
    stakes = stakes_by_step(len(plan.phases))
    goals = [
        (metric, math.log(1 / plan.alpha) - math.log(METRIC_STAKES[metric]))
        for metric in range(len(METRICS))
        if not plan.bursts[metric] and (metric == 0 or counts.canary.slower)
    ]
    if not goals:
        return [[]]

    def best(metric: int) -> int:
        curve = evidence.steps[phase].curves[metric]
        return max(curve[at] - curve[plan.ratios.index(plan.margin)] for at, _ in bets_above(plan.ratios, plan.margin))

    metric, goal = max(goals, key=lambda each: best(each[0]) * GRAIN - each[1])
    curves = [_since(evidence, metric, 0), _since(evidence, metric, phase)]
    stakes_here = (stakes[0], stakes[phase]) if phase else (stakes[0],)
    observed = _observed(plan, counts, phase, metric)
    pace = 2 * rpm * _part(plan, counts, phase) if plan.is_shadow(phase) else rpm
    courses = []
    for rates in observed.rates():
        bets = [
            growth
            for curve, stake in zip(curves, stakes_here, strict=False)
            for growth in _ratio_bets(
                plan,
                curve,
                (bets_above(plan.ratios, plan.margin), plan.margin),
                goal - math.log(stake),
                rates,
                observed,
                pace,
            )
        ]
        courses.append(pooled_growth(bets))
    return courses


def _since(evidence: Evidence, metric: int, first: int) -> Curve:
    return tuple(map(sum, zip(*(step.curves[metric] for step in evidence.steps[first:]), strict=True)))


def _ratio_bets(
    plan: CanaryPlan,
    curve: Curve,
    bets: tuple[Sequence[tuple[int, float]], float],
    goal: float,
    rates: tuple[float, float],
    observed: Observed,
    rpm: float,
) -> list[Growth]:
    """Bets on odds ratios against a null. Bad requests are few, so each is the canary's with a chance that follows from
    its share of traffic: the limit of the hypergeometric likelihood, which for pairs is exact. A pair is a request of
    each version."""
    staked, null = bets
    at_null, part = plan.ratios.index(null), observed.share
    canary, stable = rpm * part * rates[0], rpm * (1 - part) * rates[1]
    if not 0 < part < 1:
        return []
    # paired_growth takes ratios of even odds; a share of traffic multiplies them.
    even = part / (1 - part)
    return [
        paired_growth(
            canary, stable, plan.ratios[at] * even, null * even, goal - stake - (curve[at] - curve[at_null]) * GRAIN
        )
        for at, stake in staked
    ]


def _observed(plan: CanaryPlan, counts: PhaseTotals, phase: int, metric: int) -> Observed:
    new, old = counts.canary, counts.stable
    if plan.is_shadow(phase):
        return Observed((new.requests, counts.paired[0]), (new.requests, counts.paired[1]))
    if metric:
        return Observed((new.timed, new.slower[metric - 1]), (old.timed, old.slower[metric - 1]))
    return Observed((new.requests, new.errors), (old.requests, old.errors))


def _part(plan: CanaryPlan, counts: PhaseTotals, phase: int) -> float:
    """The canary's part of the requests per minute; mirrored pairs are a part of the stable version's requests."""
    whole = counts.stable.requests + (0 if plan.is_shadow(phase) else counts.canary.requests)
    return counts.canary.requests / whole if whole else 0.0
