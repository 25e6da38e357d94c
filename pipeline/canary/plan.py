"""Plan and schedule of a rollout, fixed before its first minute.

The plan determines the evidence that each step needs; the schedule determines when CloudWatch is read. Error rates hold
only if neither changes while data arrives, so both are part of the input of the execution.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Final

from nxpipe.pipeline.canary.constants import BASELINE_SHARE, RATIO_STAKES, TOLERATED_RISE
from nxpipe.pipeline.canary.documents import PlanInvalid, digest_of
from nxpipe.pipeline.canary.metrics import LATENCIES, METRICS


@dataclass(frozen=True)
class TrafficStep:
    """A share of traffic in percent, and the odds ratio that must be ruled out before the next step."""

    share: int
    tolerates: float

    @property
    def weight(self) -> int:
        """Percent of traffic of the canary during the step."""
        return min(self.share, 100 - BASELINE_SHARE)


@dataclass(frozen=True)
class ShadowPhase:
    """The phase before the first step: requests are mirrored to the canary, both responses are compared, and no weight
    moves. No user waits for it, so it tolerates as little as the last step."""

    percent: float  # of requests that are mirrored
    bake_min: int  # minutes
    bake_max: int


def tolerated_odds(share: int) -> float:
    """The odds ratio that raises the errors of all traffic by TOLERATED_RISE percent; it falls as the share grows."""
    return round(1 + TOLERATED_RISE / min(share, 100 - BASELINE_SHARE), 2)


@dataclass(frozen=True)
class CanaryPlan:
    """The steps of a rollout, and the error rates of its sequential tests."""

    steps: tuple[TrafficStep, ...]
    bake_min: int  # minutes
    bake_max: int
    alpha: float  # Type I error: limit of the probability to roll back a version as good as the baseline
    beta: float  # limit of the probability to advance a version that is worse than a step tolerates
    objective: float  # an error rate below it is good enough
    margin: float = 1.0  # an odds ratio up to it counts as no worse
    bursts: tuple[float, ...] = (0.0,) * len(METRICS)  # tau of each metric: overdispersion, see likelihood.py
    latencies: tuple[float, ...] = ()  # seconds, as LATENCIES; empty: latency is not judged
    shadow: ShadowPhase | None = None

    def __post_init__(self) -> None:
        if reason := _fault(self):
            raise PlanInvalid(f"invalid rollout plan: {reason}")

    @staticmethod
    def of(
        shares: Sequence[int],
        *,
        bake_min: int,
        bake_max: int,
        alpha: float,
        beta: float,
        objective: float,
        margin: float = 1.0,
        bursts: Sequence[float] = (0.0,) * len(METRICS),
        latencies: Sequence[float] = (),
        shadow: ShadowPhase | None = None,
    ) -> "CanaryPlan":
        """A plan whose steps tolerate the odds ratios of their shares. Defaults: [rollout] in nxpipe.toml."""
        steps = tuple(TrafficStep(share, tolerated_odds(share)) for share in shares)
        taus, thresholds = tuple(bursts), tuple(latencies)
        return CanaryPlan(steps, bake_min, bake_max, alpha, beta, objective, margin, taus, thresholds, shadow)

    @cached_property
    def phases(self) -> tuple[TrafficStep, ...]:
        """All that is judged in turn: the shadow phase as a step without traffic, if there is one, then the steps."""
        return self.steps if self.shadow is None else (TrafficStep(0, self.steps[-1].tolerates), *self.steps)

    def is_shadow(self, phase: int) -> bool:
        return self.shadow is not None and phase == 0

    def bake(self, phase: int) -> tuple[int, int]:
        """Minimum and maximum of the phase's minutes."""
        if self.shadow is not None and phase == 0:
            return self.shadow.bake_min, self.shadow.bake_max
        return self.bake_min, self.bake_max

    @cached_property
    def ratios(self) -> tuple[float, ...]:
        """The grid of odds ratios on which evidence is accumulated."""
        return tuple(sorted({*RATIO_STAKES, self.margin, *(step.tolerates for step in self.steps)}))

    @cached_property
    def log_ratios(self) -> tuple[float, ...]:
        return tuple(map(math.log, self.ratios))

    @cached_property
    def digest(self) -> str:
        return digest_of(self.as_json())

    def as_json(self) -> dict[str, Any]:
        """A plan without a shadow phase has no such field, as in records that are older than the phase."""
        document = asdict(self)
        if self.shadow is None:
            del document["shadow"]
        return document

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "CanaryPlan":
        fields = dict(document)
        try:
            steps = tuple(TrafficStep(**step) for step in fields.pop("steps"))
            bursts, latencies = tuple(fields.pop("bursts")), tuple(fields.pop("latencies"))
            phase = fields.pop("shadow", None)
            shadow = None if phase is None else ShadowPhase(**phase)
            return CanaryPlan(steps=steps, bursts=bursts, latencies=latencies, shadow=shadow, **fields)
        except (KeyError, TypeError) as error:
            raise PlanInvalid(f"invalid rollout plan: {error}; write it with CanaryPlan.as_json") from error


def _fault(plan: CanaryPlan) -> str | None:
    """The reason why a plan is invalid; None if it is valid."""
    shares = [step.share for step in plan.steps]
    if not shares or shares != sorted(set(shares)) or shares[0] < 1 or shares[-1] != 100:
        return f"shares {shares} must ascend from at least 1 to 100"
    if not all(1 < step.tolerates <= 100 for step in plan.steps):
        return "every step must tolerate an odds ratio above 1 and at most 100"
    if not 1 <= plan.bake_min <= plan.bake_max:
        return f"bake_min {plan.bake_min} and bake_max {plan.bake_max} must ascend from at least 1"
    if plan.shadow is not None and (reason := _shadow_fault(plan.shadow)):
        return reason
    for name in ("alpha", "beta", "objective"):
        if not 0 < getattr(plan, name) < 1:
            return f"{name} {getattr(plan, name)} must lie between 0 and 1"
    if not 1 <= plan.margin < min(step.tolerates for step in plan.steps):
        return f"margin {plan.margin} must be at least 1 and below the tolerated ratio of every step"
    if len(plan.bursts) != len(METRICS) or not all(0 <= tau <= 5 for tau in plan.bursts):
        return f"bursts {plan.bursts} must be one tau from 0 to 5 for each of {len(METRICS)} metrics"
    return _latency_fault(plan.latencies)


def _shadow_fault(shadow: ShadowPhase) -> str | None:
    if not 0 < shadow.percent <= 100:
        return f"a shadow phase mirrors more than 0 and at most 100 percent of requests, not {shadow.percent}"
    if not 1 <= shadow.bake_min <= shadow.bake_max:
        return f"bake_min {shadow.bake_min} and bake_max {shadow.bake_max} of shadow must ascend from at least 1"
    return None


def _latency_fault(latencies: tuple[float, ...]) -> str | None:
    if len(latencies) not in (0, len(LATENCIES)):
        return f"{len(latencies)} latencies instead of {len(LATENCIES)}"
    if not all(0 < latency < math.inf for latency in latencies) or list(latencies) != sorted(latencies):
        return "latencies must be ascending numbers of seconds"
    return None


# Most health checks, each with a few events: an execution then stays within the 25,000 events of a history.
_MAX_WARM_TRIES: Final = 1_000


@dataclass(frozen=True)
class Schedule:
    """Intervals and timeouts, which change no verdict. A minute of the plan is one `period`, so a rehearsal can run a
    rollout in seconds."""

    period: int = 60  # seconds of one count
    poll: int = 60  # seconds between evaluations
    settle: int = 120  # seconds until CloudWatch is not expected to change a count
    warm: int = 15  # seconds between health checks of new instances
    warm_tries: int = 240  # health checks until the capacity counts as unavailable
    final: int = 10  # minutes of full traffic before the baseline's instances are stopped
    patience: int = 1_440  # minutes for a person to approve or abort an undecided step

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("settle", "patience") else 1
            if type(value) is not int or value < least:
                raise PlanInvalid(f"invalid schedule: {field.name} is {value!r}; pass a whole number >= {least}")
        if self.warm_tries > _MAX_WARM_TRIES:
            raise PlanInvalid(
                f"invalid schedule: warm_tries is {self.warm_tries}; pass at most {_MAX_WARM_TRIES} and a longer `warm`"
            )

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Schedule":
        unknown = sorted(set(document) - {field.name for field in fields(Schedule)})
        if unknown:
            raise PlanInvalid(f"invalid schedule: unknown fields {', '.join(unknown)}; remove them")
        return Schedule(**document)
