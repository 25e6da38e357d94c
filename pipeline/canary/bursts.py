"""Errors that come in bursts of one version: the log odds ratio of a minute strays about the true one by tau.

A minute is then likely by a mixture of ratios. They stand on a lattice that depends on the counts conditioned on and on
tau alone, fine enough for the sharper of the two, the minute and the mixture. Whatever the lattice, the mixture is a
likelihood whose ratios rise with the canary's bad requests, so e-values remain e-values under this model. It is a
model: unlike the rest, it has to be proved on histories in which nothing differed.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Final

from nxpipe.pipeline.canary.likelihood import informative, log_likelihoods
from nxpipe.pipeline.canary.logs import log_sum

_REACH: Final = 5.0  # tau to either side
_TAUS: Final = tuple(step / 20 for step in range(61))
_UPPER: Final = 1.353  # half of chi-squared's 90 % point: a one-sided limit of 95 %

Tallies = tuple[tuple[int, int], tuple[int, int]]


def mixed_log_likelihoods(
    canary: tuple[int, int], stable: tuple[int, int], log_ratios: Sequence[float], tau: float
) -> list[float]:
    """What `log_likelihoods` says, when ratios stray by tau from minute to minute."""
    reach = _REACH * tau
    lattice = _lattice(canary, stable, min(log_ratios) - reach, max(log_ratios) + reach, tau)
    known = log_likelihoods(canary, stable, lattice)
    return [_mixed(lattice, known, theta, tau) for theta in log_ratios]


def fitted_tau(history: Sequence[Tallies]) -> float:
    """The upper 95 % limit of tau, by the likelihood of minutes in which nothing differed.

    The limit and not the estimate: a short history must make the judge careful, not bold.
    """
    minutes = [minute for minute in history if informative(*minute)]
    if not minutes:
        return 0.0
    tables = []
    for minute in minutes:
        lattice = _lattice(*minute, -_REACH, _REACH, 0.2)
        tables.append((lattice, log_likelihoods(*minute, lattice)))

    @cache
    def fit(at: int) -> float:
        tau = _TAUS[at]
        return math.fsum(_mixed(*table, 0.0, tau) if tau else _at_zero(*table) for table in tables)

    low, high = 0, len(_TAUS) - 1
    while low < high:  # it rises to one best tau, and falls behind it
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fit(middle) < fit(middle + 1) else (low, middle)
    best, limit = low, low
    while limit + 1 < len(_TAUS) and fit(limit + 1) >= fit(best) - _UPPER:
        limit += 1
    return _TAUS[limit]


def _lattice(canary: tuple[int, int], stable: tuple[int, int], low: float, high: float, tau: float) -> list[float]:
    """Zero is always on it."""
    k = canary[1] + stable[1]
    shares = min(canary[0], k) - max(0, k - stable[0])
    step = (1 / tau**2 + shares / 4) ** -0.5  # a sum of `shares` Bernoulli variables varies by a quarter of them
    return [step * at for at in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _mixed(lattice: Sequence[float], known: Sequence[float], theta: float, tau: float) -> float:
    weights = [-0.5 * ((at - theta) / tau) ** 2 for at in lattice]
    return log_sum([weight + log for weight, log in zip(weights, known, strict=True)]) - log_sum(weights)


def _at_zero(lattice: Sequence[float], known: Sequence[float]) -> float:
    return known[lattice.index(0.0)]
