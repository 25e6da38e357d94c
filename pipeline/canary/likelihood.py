"""Sums of numbers that are known by their logarithms.

Floats are added by `fsum` wherever the judge adds them: `sum` rounds in one way up to Python 3.11 and in another since,
and a replay must find what the function has found, whichever Python each of them runs on.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Final


def log_sum(logs: Sequence[float]) -> float:
    """The log of the sum of what these are the logs of."""
    top = max(logs)
    return top if top == -math.inf else top + math.log(math.fsum([math.exp(log - top) for log in logs]))


_NEGLIGIBLE: Final = 1e-17
_STRIDE: Final = 0.65  # in standard deviations
_WIDE: Final = 8  # the standard deviation from which a stride is cheaper than a walk
_SHORT: Final = 600  # the nats that a polynomial may span; a float has 708 to either side of 1


def log_likelihoods(canary: tuple[int, int], stable: tuple[int, int], log_ratios: Sequence[float]) -> list[float]:
    """At each log odds ratio, up to a constant that is the same at all of them. An arm is (requests, bad ones)."""
    (n, bad), (m, others) = canary, stable
    k = bad + others
    low, high = max(0, k - m), min(n, k)
    middle = (min(log_ratios) + max(log_ratios)) / 2
    if (high - low) * (max(log_ratios) - middle) < _SHORT:
        coefficients = _coefficients(n, m, k, math.exp(middle))
        polynomials = [_polynomial(coefficients, math.exp(theta - middle)) for theta in log_ratios]
        scales = [low * (theta - middle) for theta in log_ratios]
        logs = map(math.log, polynomials)
        return [bad * theta - scale - log for theta, scale, log in zip(log_ratios, scales, logs, strict=True)]
    return [bad * theta - _log_normaliser(n, m, k, theta) for theta in log_ratios]


def informative(canary: tuple[int, int], stable: tuple[int, int]) -> bool:
    """Nothing is learnt where only one share was possible: no traffic, no bad request, or none that was good."""
    (n, bad), (m, others) = canary, stable
    return n > 0 and m > 0 and 0 < bad + others < n + m


def _coefficients(n: int, m: int, k: int, ratio: float) -> list[float]:
    """All terms at this ratio, the one of the highest share first, each from its neighbour."""
    low, high, rest = max(0, k - m), min(n, k), m - k
    centre = min(max(round(_mean(n, m, k, ratio)), low), high)
    above, below = [], []
    term = 1.0
    for x in range(centre, high):
        term *= ratio * (n - x) * (k - x) / ((x + 1) * (rest + x + 1))
        above.append(term)
    term = 1.0
    for x in range(centre, low, -1):
        term *= x * (rest + x) / (ratio * (n - x + 1) * (k - x + 1))
        below.append(term)
    return [*reversed(above), 1.0, *below]


def _polynomial(coefficients: Sequence[float], ratio: float) -> float:
    total = 0.0
    for coefficient in coefficients:
        total = total * ratio + coefficient
    return total


def _log_normaliser(n: int, m: int, k: int, theta: float) -> float:
    """log of the sum over x of C(n, x) C(m, k - x) exp(theta x), but for a constant of n, m and k."""
    mean = _mean(n, m, k, math.exp(theta))
    centre = min(max(round(mean), max(0, k - m)), min(n, k))
    deviation = _deviation(n, m, k, mean)
    whole = (
        _every_term(n, m, k, centre, math.exp(theta))
        if deviation < _WIDE
        else _strided(n, m, k, centre, theta, int(_STRIDE * deviation))
    )
    return _log_term(n, m, k, centre, theta) + math.log(whole)


def _mean(n: int, m: int, k: int, ratio: float) -> float:
    """Where neighbouring terms are equal: x (m - k + x) = ratio (n - x) (k - x)."""
    a, b, c = 1 - ratio, m - k + ratio * (n + k), ratio * n * k
    root = math.sqrt(max(0.0, b * b + 4 * a * c))
    return 2 * c / (b + root) if b > 0 else (root - b) / (2 * a)


def _deviation(n: int, m: int, k: int, mean: float) -> float:
    cells = (mean, n - mean, k - mean, m - k + mean)
    return 0.0 if min(cells) <= 0 else math.fsum(1 / cell for cell in cells) ** -0.5


def _log_term(n: int, m: int, k: int, x: int, theta: float) -> float:
    lgamma = math.lgamma
    return theta * x - lgamma(x + 1) - lgamma(n - x + 1) - lgamma(k - x + 1) - lgamma(m - k + x + 1)


def _every_term(n: int, m: int, k: int, centre: int, ratio: float) -> float:
    """All terms, over the one at `centre`: each from its neighbour. Past its last share a term is zero by itself."""
    total, rest = 1.0, m - k
    term, x = 1.0, centre
    while term > _NEGLIGIBLE * total:
        term *= ratio * (n - x) * (k - x) / ((x + 1) * (rest + x + 1))
        total += term
        x += 1
    term, x = 1.0, centre
    while term > _NEGLIGIBLE * total:
        term *= x * (rest + x) / (ratio * (n - x + 1) * (k - x + 1))
        total += term
        x -= 1
    return total


def _strided(n: int, m: int, k: int, centre: int, theta: float, stride: int) -> float:
    """Every `stride`-th term, that many times, over the one at `centre`."""
    exp, lgamma, rest = math.exp, math.lgamma, m - k
    top, total = _log_term(n, m, k, centre, theta), 1.0
    upwards = range(centre + stride, min(n, k) + 1, stride)
    downwards = range(centre - stride, max(0, -rest) - 1, -stride)
    for shares in (upwards, downwards):
        for x in shares:
            log = theta * x - lgamma(x + 1) - lgamma(n - x + 1) - lgamma(k - x + 1) - lgamma(rest + x + 1)
            term = exp(log - top)
            total += term
            if term < _NEGLIGIBLE * total:
                break
    return stride * total


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
