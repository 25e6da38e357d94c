"""Sums of numbers that are known by their logarithms."""

import math
from collections.abc import Sequence


def log_sum(logs: Sequence[float]) -> float:
    """The log of the sum of what these are the logs of."""
    top = max(logs)
    return top if top == -math.inf else top + math.log(sum([math.exp(log - top) for log in logs]))
