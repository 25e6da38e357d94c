"""Fisher's noncentral hypergeometric distribution: how likely the canary's share of the bad requests is.

Given how many requests each version had and how many were bad in all, it depends on the odds ratio alone. Its
normaliser is a sum over all shares that are possible: a polynomial in the ratio. A short one is simply evaluated. Two
facts keep a long one short, and exact to the precision of a float:

- Its terms are log-concave: walking away from the largest one, what is left is soon below a 1e-17th of the sum.
- Its zeros are real, so the distribution is that of a sum of independent Bernoulli variables, and its characteristic
  function at t is at most exp(-variance (1 - cos t)). Every h-th term, taken h times, therefore gives the whole sum to
  within 2 exp(-variance (1 - cos(2 pi / h))): below 1e-17 for h up to two thirds of the standard deviation.

Which terms are summed follows from the counts that are conditioned on, never from the canary's share.
"""

import math
from collections.abc import Sequence
from typing import Final

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
