"""Likelihood of a minute at each odds ratio, without and with overdispersion.

Condition on the margins of the minute's 2x2 table: the requests of each version, and the bad requests of both together.
The canary's count of bad requests then follows Fisher's noncentral hypergeometric distribution, which depends on the
odds ratio alone. The error rate of the service, its traffic and its daily pattern cancel: a rise that both versions
share is no evidence.

The normaliser is a sum over all possible counts: a polynomial in the odds ratio. A short one is evaluated directly. Two
facts keep a long one short, and exact to the precision of a float:

- The terms are log-concave: away from the largest one, the remainder soon falls below 1e-17 of the sum.
- The zeros are real, so the distribution is that of a sum of independent Bernoulli variables, and its characteristic
  function at t is at most exp(-variance (1 - cos t)). Every h-th term, taken h times, therefore gives the whole sum to
  within 2 exp(-variance (1 - cos(2 pi / h))): below 1e-17 for h up to two thirds of the standard deviation.

The choice of terms depends on the margins, never on the canary's count. So each likelihood is a function that was fixed
before the observation, as an e-value requires.

Overdispersion: errors of one version may come in bursts without a common cause. The log odds ratio of a minute then
varies about the true one with standard deviation tau, and the likelihood of the minute is a mixture over ratios. The
mixture is taken on a lattice that depends on the margins and tau alone, fine enough for the narrower of the minute's
likelihood and the mixing distribution. On any lattice the likelihood ratio of two mixtures rises with the canary's bad
requests, so e-values remain e-values under this model. The model itself is an assumption: validate tau on minutes in
which both groups ran the same version.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Final


def log_sum(logs: Sequence[float]) -> float:
    """log(sum(exp(logs))).

    The judge adds floats with `fsum` only: `sum` rounds differently up to Python 3.11 and since 3.12, and a replay must
    reproduce the verdict of the Lambda function on either.
    """
    top = max(logs)
    return top if top == -math.inf else top + math.log(math.fsum([math.exp(log - top) for log in logs]))


_NEGLIGIBLE: Final = 1e-17  # of the sum
_STRIDE: Final = 0.65  # in standard deviations
_WIDE: Final = 8  # standard deviation above which strided terms are cheaper than all terms
_SHORT: Final = 600  # nats between the terms of a polynomial; a float spans 708 to either side of 1


def log_likelihoods(canary: tuple[int, int], stable: tuple[int, int], log_ratios: Sequence[float]) -> list[float]:
    """The log likelihood at each log odds ratio, up to a common constant. An arm is (requests, bad requests)."""
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
    """False if only one split of the bad requests was possible: no traffic, no bad request or no good one."""
    (n, bad), (m, others) = canary, stable
    return n > 0 and m > 0 and 0 < bad + others < n + m


def _coefficients(n: int, m: int, k: int, ratio: float) -> list[float]:
    """All terms at this ratio, that of the highest count first. Each follows from its neighbour, without factorials."""
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
    """The value of a polynomial, highest coefficient first, by Horner's rule."""
    total = 0.0
    for coefficient in coefficients:
        total = total * ratio + coefficient
    return total


def _log_normaliser(n: int, m: int, k: int, theta: float) -> float:
    """log of the sum over x of C(n, x) C(m, k - x) exp(theta x), up to a constant of n, m and k."""
    mean = _mean(n, m, k, math.exp(theta))
    centre = min(max(round(mean), max(0, k - m)), min(n, k))
    deviation = _deviation(n, m, k, mean)
    relative_sum = (
        _every_term(n, m, k, centre, math.exp(theta))
        if deviation < _WIDE
        else _strided(n, m, k, centre, theta, int(_STRIDE * deviation))
    )
    return _log_term(n, m, k, centre, theta) + math.log(relative_sum)


def _mean(n: int, m: int, k: int, ratio: float) -> float:
    """The mode of the count, where neighbouring terms are equal: x (m - k + x) = ratio (n - x) (k - x)."""
    a, b, c = 1 - ratio, m - k + ratio * (n + k), ratio * n * k
    root = math.sqrt(max(0.0, b * b + 4 * a * c))
    return 2 * c / (b + root) if b > 0 else (root - b) / (2 * a)


def _deviation(n: int, m: int, k: int, mean: float) -> float:
    """The standard deviation of the count, by the normal approximation."""
    cells = (mean, n - mean, k - mean, m - k + mean)
    return 0.0 if min(cells) <= 0 else math.fsum(1 / cell for cell in cells) ** -0.5


def _log_term(n: int, m: int, k: int, x: int, theta: float) -> float:
    lgamma = math.lgamma
    return theta * x - lgamma(x + 1) - lgamma(n - x + 1) - lgamma(k - x + 1) - lgamma(m - k + x + 1)


def _every_term(n: int, m: int, k: int, centre: int, ratio: float) -> float:
    """Sum of all terms relative to the one at `centre`. Beyond the possible counts a factor makes the term zero."""
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
    """`stride` times the sum of every `stride`-th term, relative to the one at `centre`."""
    exp, lgamma, rest = math.exp, math.lgamma, m - k
    top, total = _log_term(n, m, k, centre, theta), 1.0
    upwards = range(centre + stride, min(n, k) + 1, stride)
    downwards = range(centre - stride, max(0, -rest) - 1, -stride)
    for side in (upwards, downwards):
        for x in side:
            log = theta * x - lgamma(x + 1) - lgamma(n - x + 1) - lgamma(k - x + 1) - lgamma(rest + x + 1)
            term = exp(log - top)
            total += term
            if term < _NEGLIGIBLE * total:
                break
    return stride * total


_REACH: Final = 5.0  # half-width of the lattice, in tau
_TAUS: Final = tuple(step / 20 for step in range(61))
# Half of the 90 % point of chi-squared with one degree of freedom: a one-sided likelihood limit of 95 %.
_UPPER: Final = 1.353

Tallies = tuple[tuple[int, int], tuple[int, int]]


def mixed_log_likelihoods(
    canary: tuple[int, int], stable: tuple[int, int], log_ratios: Sequence[float], tau: float
) -> list[float]:
    """`log_likelihoods` under a log odds ratio that varies with standard deviation tau from minute to minute."""
    reach = _REACH * tau
    lattice = _lattice(canary, stable, min(log_ratios) - reach, max(log_ratios) + reach, tau)
    known = log_likelihoods(canary, stable, lattice)
    return [_mixed(lattice, known, theta, tau) for theta in log_ratios]


def fitted_tau(history: Sequence[Tallies]) -> float:
    """The upper 95 % limit of tau, from minutes in which both groups ran the same version.

    The limit, not the estimate: a short history must cause too little evidence, never too much.
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
    while low < high:  # the likelihood is unimodal in tau
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fit(middle) < fit(middle + 1) else (low, middle)
    best, limit = low, low
    while limit + 1 < len(_TAUS) and fit(limit + 1) >= fit(best) - _UPPER:
        limit += 1
    return _TAUS[limit]


def _lattice(canary: tuple[int, int], stable: tuple[int, int], low: float, high: float, tau: float) -> list[float]:
    """The lattice of log odds ratios; zero is one of them."""
    k = canary[1] + stable[1]
    support = min(canary[0], k) - max(0, k - stable[0])
    step = (
        1 / tau**2 + support / 4
    ) ** -0.5  # a sum of `shares` Bernoulli variables has a variance of at most a quarter of them
    return [step * at for at in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _mixed(lattice: Sequence[float], known: Sequence[float], theta: float, tau: float) -> float:
    """The log of a Gaussian mixture, around theta with standard deviation tau, of known log likelihoods."""
    weights = [-0.5 * ((at - theta) / tau) ** 2 for at in lattice]
    return log_sum([weight + log for weight, log in zip(weights, known, strict=True)]) - log_sum(weights)


def _at_zero(lattice: Sequence[float], known: Sequence[float]) -> float:
    return known[lattice.index(0.0)]
