"""What a number of simulated rollouts says about the rate behind it."""

import math


def upper_limit(events: int, trials: int, doubt: float = 0.05) -> float:
    """The rate above which so few events would have a chance below `doubt` (Clopper and Pearson, one-sided)."""
    if events >= trials:
        return 1.0
    low, high = events / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(events, trials, middle) > doubt else (low, middle)
    return high


def _at_most(events: int, trials: int, rate: float) -> float:
    if rate in (0.0, 1.0):
        return 1.0 - rate
    logs = (
        math.lgamma(trials + 1)
        - math.lgamma(count + 1)
        - math.lgamma(trials - count + 1)
        + count * math.log(rate)
        + (trials - count) * math.log1p(-rate)
        for count in range(events + 1)
    )
    return math.fsum(map(math.exp, logs))
