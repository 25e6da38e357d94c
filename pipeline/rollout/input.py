"""What a rollout was asked to do: the input of its execution, which nobody changes afterwards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from nxpipe.artifact_store.names import short_name
from nxpipe.pipeline.canary.counts import LATENCIES
from nxpipe.pipeline.canary.documents import CanaryError
from nxpipe.pipeline.canary.plan import CanaryPlan, Schedule
from nxpipe.pipeline.config import Rollout

_MINUTE: Final = 60  # seconds


@dataclass(frozen=True)
class RolloutCandidate:
    """The artifact that is to take over, and what the fleet's channel was when that was decided."""

    model: str
    target: str
    artifact: str  # request key
    channel: str
    generation: int  # of the channel; 0 while it is empty

    @property
    def name(self) -> str:
        return short_name(self.model, self.artifact)


@dataclass(frozen=True)
class RolloutInput:
    old: str
    new: str  # colour
    candidate: RolloutCandidate
    plan: CanaryPlan
    pace: Schedule
    by: str
    reason: str

    def text(self) -> str:
        return json.dumps(
            {
                "from": self.old,
                "to": self.new,
                **vars(self.candidate),
                "plan": self.plan.as_json(),
                "pace": vars(self.pace),
                "by": self.by,
                "reason": self.reason,
            }
        )

    @staticmethod
    def from_text(text: str) -> "RolloutInput | None":
        """None where somebody has started the machine by hand, and told it less than this."""
        given: dict[str, Any] = json.loads(text)
        try:
            return RolloutInput(
                given["from"],
                given["to"],
                RolloutCandidate(**{name: given[name] for name in RolloutCandidate.__dataclass_fields__}),
                CanaryPlan.from_json(given["plan"]),
                Schedule.from_json(given["pace"]),
                given["by"],
                given["reason"],
            )
        except (KeyError, TypeError, CanaryError):
            return None


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


def schedule_of(minute: int) -> Schedule:
    """The usual one, in minutes of this length."""
    usual = Schedule()
    seconds = {name: getattr(usual, name) * minute / _MINUTE for name in ("period", "poll", "settle", "warm")}
    return replace(usual, **{name: max(1, round(value)) for name, value in seconds.items()})
