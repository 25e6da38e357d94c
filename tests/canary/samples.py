"""Minutes of a service, and the exact probabilities behind them."""

from collections.abc import Iterator, Sequence
from math import comb
from typing import Any

from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.judge import Judgement, Moment, judge
from nxpipe.pipeline.canary.metrics import LATENCIES, Arm, Batch
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.config import Rollout
from nxpipe.pipeline.rollout.input import plan_of

_DEFAULTS = plan_of(Rollout())
_FIELDS = ("bake_min", "bake_max", "alpha", "beta", "objective", "margin", "bursts", "latencies")


def plan_with(shares: Sequence[int] = (5, 25, 50, 100), **changes: Any) -> CanaryPlan:
    """A plan with the defaults of [rollout] and these changes."""
    return CanaryPlan.of(shares, **({name: getattr(_DEFAULTS, name) for name in _FIELDS} | changes))


PLAN = plan_with()
_SLOWER = (0.5, 0.25, 0.1, 0.05, 0.01, 0.003, 0.0005)


def arm(requests: int, errors: int) -> Arm:
    """Counts with the expected latencies of so many requests."""
    return Arm(requests, errors, requests, tuple(round(requests * share) for share in _SLOWER))


def minute(number: int, canary: tuple[int, int], stable: tuple[int, int]) -> Batch:
    return Batch(number, arm(*canary), arm(*stable))


def errors_alone(number: int, canary: tuple[int, int], stable: tuple[int, int]) -> Batch:
    return Batch(number, Arm(*canary), Arm(*stable))


def judged_alone(batches: list[Batch], plan: CanaryPlan = PLAN, at: int | None = None) -> Judgement:
    """Judge all batches at once, in the first step."""
    over = at if at is not None else max((batch.minute for batch in batches), default=0) + 1
    return judge(plan, Evidence(), batches, Moment(0, 0, over))


def fisher(n: int, m: int, k: int, ratio: float) -> Iterator[tuple[int, float]]:
    """The probability of every share of the bad requests in the canary, by definition."""
    shares = range(max(0, k - m), min(n, k) + 1)
    weights = [comb(n, x) * comb(m, k - x) * ratio**x for x in shares]
    whole = sum(weights)
    yield from ((x, weight / whole) for x, weight in zip(shares, weights, strict=True))


assert len(_SLOWER) == len(LATENCIES)
