"""The plan that a configuration asks for."""

from collections.abc import Sequence
from datetime import timedelta

from nxpipe.pipeline.canary.counts import LATENCIES
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.config import Rollout


def plan_of(rollout: Rollout, latencies: Sequence[float] = ()) -> CanaryPlan:
    """With the latencies of the stable version, in seconds, where they are known already."""
    return CanaryPlan.of(
        rollout.steps,
        bake_min=_minutes(rollout.bake_min),
        bake_max=_minutes(rollout.bake_max),
        alpha=rollout.alpha,
        beta=rollout.beta,
        objective=rollout.guards.max_error_rate,
        margin=rollout.margin,
        bursts=(rollout.bursts, *[0.0] * len(LATENCIES)),
        latencies=latencies,
    )


def _minutes(duration: timedelta) -> int:
    """Whole ones, and rather one more: counts come by the minute."""
    return -(-duration // timedelta(minutes=1))
