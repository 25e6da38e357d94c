"""Input of a rollout's execution: the candidate, the plan and the schedule, fixed when it starts."""

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
    """The artifact to promote, and the fleet's channel at the time of that decision."""

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
    new: str  # environment: blue or green
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
        """None if the execution was started by hand with less than this."""
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
    """The plan of [rollout] in nxpipe.toml, with the baseline's latency thresholds in seconds if they are known."""
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
    """Whole minutes, rounded up: counts have a resolution of a minute."""
    return -(-duration // timedelta(minutes=1))


def schedule_of(minute: int) -> Schedule:
    """The default schedule with minutes of this many seconds."""
    default = Schedule()
    seconds = {name: getattr(default, name) * minute / _MINUTE for name in ("period", "poll", "settle", "warm")}
    return replace(default, **{name: max(1, round(value)) for name, value in seconds.items()})
