"""Input of a rollout execution, and the plan and schedule that follow from nxpipe.toml."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.names import short_name
from nxpipe.pipeline.canary.documents import CanaryError
from nxpipe.pipeline.canary.metrics import LATENCIES
from nxpipe.pipeline.canary.plan import CanaryPlan, Schedule, ShadowPhase
from nxpipe.pipeline.config import Rollout
from nxpipe.pipeline.config.sections import RolloutShadow

if TYPE_CHECKING:
    from nxpipe.artifact_store.channel.change import EvidenceWaiver


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
    without: tuple[str, ...] = ()  # kinds of evidence that its promotions do without

    @property
    def waiver(self) -> "EvidenceWaiver | None":
        """The waiver of both promotions: to the environment's channel at the start, to the fleet's at the end."""
        from nxpipe.artifact_store.channel.change import EvidenceWaiver

        return EvidenceWaiver.of(self.without, self.reason)

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
                **({"without_evidence": self.without} if self.without else {}),
            }
        )

    @staticmethod
    def from_text(text: str) -> "RolloutInput | None":
        """The input of an execution; None if a field is missing, as after a start by hand."""
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
                tuple(given.get("without_evidence", ())),
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
        shadow=_shadow_of(rollout.shadow),
    )


def _shadow_of(shadow: RolloutShadow | None) -> ShadowPhase | None:
    if shadow is None:
        return None
    return ShadowPhase(shadow.percent, _minutes(shadow.bake_min), _minutes(shadow.bake_max))


def _minutes(duration: timedelta) -> int:
    """Whole minutes, rounded up: counts have a resolution of a minute."""
    return -(-duration // timedelta(minutes=1))


# What an instance needs besides `ready_within`: the launch, the boot, and the health checks of the load balancer.
_LAUNCH: Final = timedelta(minutes=15)


def schedule_of(minute: int, ready_within: timedelta) -> Schedule:
    """The default schedule with minutes of this many seconds.

    It waits for new instances at least as long as the fleet permits them to take: `ready_within`, after a launch.
    """
    default = Schedule()
    seconds = {name: getattr(default, name) * minute / _MINUTE for name in ("period", "poll", "settle", "warm")}
    scaled = {name: max(1, round(value)) for name, value in seconds.items()}
    tries = -(-_minutes(ready_within + _LAUNCH) * minute // scaled["warm"])
    return replace(default, **scaled, warm_tries=max(default.warm_tries, tries))
