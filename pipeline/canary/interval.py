"""What is known of a ratio: a confidence sequence, valid at every moment and not only at the end."""

import math
from collections.abc import Sequence

from nxpipe.pipeline.canary.evidence import StepEvidence
from nxpipe.pipeline.canary.plan import Plan
from nxpipe.pipeline.canary.values import better, worse


def interval(plan: Plan, steps: Sequence[StepEvidence], metric: int) -> tuple[float, float]:
    """The canary's odds of a bad request over the stable version's, on the plan's grid.

    Each end is wrong in at most `alpha` of all rollouts whose ratio does not change, however often it is looked at: a
    ratio is excluded only together with all that lie further out.
    """
    enough = math.log(1 / plan.alpha)
    inner = plan.ratios[:-1]
    low, high = 0.0, math.inf
    for ratio in inner:
        if worse(plan, steps, metric, ratio) < enough:
            break
        low = ratio
    for ratio in reversed(plan.ratios[1:]):
        if better(plan, steps, metric, ratio) < enough:
            break
        high = ratio
    return low, high
