"""Sums of numbers that are known by their logarithms.

Floats are added by `fsum` wherever the judge adds them: `sum` rounds in one way up to Python 3.11 and in another since,
and a replay must find what the function has found, whichever Python each of them runs on.
"""

import math
from collections.abc import Sequence


def log_sum(logs: Sequence[float]) -> float:
    """The log of the sum of what these are the logs of."""
    top = max(logs)
    return top if top == -math.inf else top + math.log(math.fsum([math.exp(log - top) for log in logs]))
