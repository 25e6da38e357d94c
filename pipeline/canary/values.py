"""E-values: what a bet against a hypothesis has grown to. One whose hypothesis holds reaches 1/a with a chance of at
most a, however often it is looked at (Ville's inequality). All of them here are in nats."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

from nxpipe.pipeline.canary.counts import LATENCIES
from nxpipe.pipeline.canary.evidence import GRAIN, Curve, StepEvidence, added
from nxpipe.pipeline.canary.logs import log_sum
from nxpipe.pipeline.canary.plan import Plan
from nxpipe.pipeline.canary.ratios import bets_above, bets_below

# Half is bet on errors, and half on the latencies together.
METRIC_BETS: Final = (0.5, *[0.5 / len(LATENCIES)] * len(LATENCIES))
# Three quarters are bet from the first minute on, and the rest begins anew with each later step.
_FROM_THE_START: Final = 0.75
# To show that the canary meets the objective: shares of it that its error rate is bet to be, and the bets.
OBJECTIVE_BETS: Final = ((0.0, 0.1), (0.125, 0.15), (0.25, 0.2), (0.5, 0.55))


def worse(plan: Plan, steps: Sequence[StepEvidence], metric: int, ratio: float) -> float:
    """Against "never above `ratio`", of one metric: bets from the first minute, and from where each step began."""
    bets, null = bets_above(plan.ratios, ratio), plan.ratios.index(ratio)
    begins = begin_bets(len(plan.steps))
    grown = [_log(math.fsum(begins[len(steps) :]))]  # what is to be bet on later steps lies still
    for bet, curve in zip(begins, _since_each(steps, metric), strict=False):
        grown.append(_log(bet) + _bet(bets, curve, null))
    return log_sum(grown)


def better(plan: Plan, steps: Sequence[StepEvidence], metric: int, ratio: float) -> float:
    """Against "never below `ratio`", of one metric, since the first of these steps."""
    if not steps:
        return 0.0
    return _bet(bets_below(plan.ratios, ratio), _since_each(steps, metric)[0], plan.ratios.index(ratio))


def within_objective(plan: Plan, step: StepEvidence) -> float:
    """Against "the canary fails the objective's share of requests, or more"."""
    good, rate = step.requests - step.errors, plan.objective
    return log_sum(
        [
            _log(bet) + _times(step.errors, _log(share)) + good * math.log((1 - share * rate) / (1 - rate))
            for share, bet in OBJECTIVE_BETS
        ]
    )


def all_metrics(by_metric: Sequence[float]) -> float:
    return log_sum([_log(bet) + grown for bet, grown in zip(METRIC_BETS, by_metric, strict=True)])


def _bet(bets: Iterable[tuple[int, float]], curve: Curve, null: int) -> float:
    return log_sum([bet + (curve[at] - curve[null]) * GRAIN for at, bet in bets])


def begin_bets(steps: int) -> tuple[float, ...]:
    if steps == 1:
        return (1.0,)
    return (_FROM_THE_START, *[(1 - _FROM_THE_START) / (steps - 1)] * (steps - 1))


def _since_each(steps: Sequence[StepEvidence], metric: int) -> list[Curve]:
    """The curves of all minutes since each step began."""
    sums: list[Curve] = []
    for step in reversed(steps):
        curve = step.curves[metric]
        sums.append(added(sums[-1], curve) if sums else curve)
    return sums[::-1]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _times(count: int, log: float) -> float:
    """No errors at a rate of zero is certain: 0 times minus infinity is 0 here."""
    return count * log if count else 0.0
