"""Latencies as a simulation draws them: lognormal, and slower in one of two ways."""

import itertools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from nxpipe.pipeline.canary.counts import LATENCIES

SPREAD: Final = 0.5  # sigma of the logarithm
_NORMAL: Final = NormalDist()
P95, _P99 = _NORMAL.inv_cdf(0.95) * SPREAD, _NORMAL.inv_cdf(0.99) * SPREAD
# The logarithms of LATENCIES, over the median.
FROZEN: Final = (
    *(_NORMAL.inv_cdf(quantile) * SPREAD for quantile in (0.5, 0.75, 0.9, 0.95, 0.99)),
    _P99 + math.log(1.25),
    _P99 + math.log(1.6),
)
assert len(FROZEN) == len(LATENCIES)


@dataclass(frozen=True)
class Slowness:
    """`scale` multiplies every latency. `tail` stretches those above p95 alone, so that p99 rises by this factor."""

    scale: float = 1.0
    tail: float = 1.0

    @property
    def stretch(self) -> float:
        """Of what lies above p95, in logarithms."""
        return 1 + math.log(self.tail) / (_P99 - P95)

    def before(self, log_latency: float) -> float:
        """The latency that has become this one, both as logarithms over the median of the stable version."""
        log_latency -= math.log(self.scale)
        return log_latency if log_latency <= P95 else P95 + (log_latency - P95) / self.stretch

    def between(self) -> tuple[float, ...]:
        """How probable it is to be below the first frozen latency, between each and the next, above the last."""
        below = [0.0, *(_NORMAL.cdf(self.before(log) / SPREAD) for log in FROZEN), 1.0]
        return tuple(high - low for low, high in itertools.pairwise(below))

    def slower(self) -> tuple[float, ...]:
        """How probable each frozen latency is to be exceeded."""
        return tuple(1 - _NORMAL.cdf(self.before(log) / SPREAD) for log in FROZEN)


AS_BEFORE: Final = Slowness()
