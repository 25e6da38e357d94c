"""A minute's evidence: for each metric one curve over the plan's odds ratios, zero at a ratio of 1."""

import math

from nxpipe.pipeline.canary.bursts import mixed_log_likelihoods
from nxpipe.pipeline.canary.counts import METRICS, Batch, Pairs
from nxpipe.pipeline.canary.evidence import GRAIN, Curve
from nxpipe.pipeline.canary.likelihood import informative, log_likelihoods
from nxpipe.pipeline.canary.plan import Plan


def curves_of(plan: Plan, batch: Batch) -> tuple[Curve, ...]:
    thetas = plan.log_ratios
    if batch.pairs is not None:
        return _of_pairs(batch.pairs, thetas)
    arms = zip(batch.canary.tallies(), batch.stable.tallies(), plan.bursts, strict=True)
    return tuple(
        _of_arms((int(n), int(bad)), (int(m), int(others)), thetas, tau) for (n, bad), (m, others), tau in arms
    )


def _of_arms(canary: tuple[int, int], stable: tuple[int, int], thetas: tuple[float, ...], tau: float) -> Curve:
    if not informative(canary, stable):
        return (0,) * len(thetas)
    if tau:
        return _in_grains(mixed_log_likelihoods(canary, stable, thetas, tau), thetas)
    return _in_grains(log_likelihoods(canary, stable, thetas), thetas)


def _of_pairs(pairs: Pairs, thetas: tuple[float, ...]) -> tuple[Curve, ...]:
    """A pair of which one alone was bad is a minute of one request each: the same curve in closed form."""
    counts = [(int(pairs.canary_alone[at]), int(pairs.stable_alone[at])) for at in range(len(METRICS))]
    return tuple(
        _in_grains([canary * theta - (canary + stable) * math.log1p(math.exp(theta)) for theta in thetas], thetas)
        for canary, stable in counts
    )


def _in_grains(logs: list[float], thetas: tuple[float, ...]) -> Curve:
    at_one = logs[thetas.index(0.0)]
    return tuple(round((log - at_one) / GRAIN) for log in logs)
