"""The new version serves alone: nobody is there to compare it with, so that all it can be held to is its objective.

What is found against it is an e-value of its own, which must reach ten times what a comparison must: a version that
keeps to its objective goes back from here in at most a tenth of `alpha` of all rollouts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from nxpipe.pipeline.canary.counts import Batch, fault
from nxpipe.pipeline.canary.logs import log_sum
from nxpipe.pipeline.canary.plan import Plan

_STRICTER: Final = 10
_ODDS: Final = (1.5, 2.0, 4.0, 10.0)  # beyond the objective, as the error rate is bet to be; the same on each


@dataclass(frozen=True)
class Alone:
    requests: int = 0
    errors: int = 0

    def __add__(self, batches: Iterable[Batch]) -> "Alone":
        """A minute that cannot be is none."""
        arms = [batch.canary for batch in batches if fault(batch) is None]
        return Alone(
            self.requests + sum(int(arm.requests) for arm in arms), self.errors + sum(int(arm.errors) for arm in arms)
        )

    def fails(self, plan: Plan) -> bool:
        return self.against(plan.objective) >= math.log(_STRICTER / plan.alpha)

    def against(self, objective: float) -> float:
        """Against "the error rate was never above the objective", in nats."""
        bet = math.log(1 / len(_ODDS))
        return log_sum(
            [bet + self.errors * math.log(odds) - self.requests * math.log1p((odds - 1) * objective) for odds in _ODDS]
        )
