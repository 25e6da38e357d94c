"""What a rollout is to do, decided before its first minute and never changed after it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from nxpipe.pipeline.canary.canonical import digest_of
from nxpipe.pipeline.canary.counts import LATENCIES, METRICS
from nxpipe.pipeline.canary.errors import PlanInvalid
from nxpipe.pipeline.canary.ratios import grid_with

HELD_BACK: Final = 5  # percent that stays with the stable version until the end: without it nothing can be compared


@dataclass(frozen=True)
class Step:
    """A share of traffic, in percent, and the odds ratio that must be ruled out before the next share."""

    share: int
    tolerates: float

    @property
    def weight(self) -> int:
        """The percentage that the canary gets while the step lasts."""
        return min(self.share, 100 - HELD_BACK)


def tolerance_of(share: int) -> float:
    """What would raise the errors of all traffic by a half: the more a version has of it, the less it is forgiven."""
    return round(1 + 50 / min(share, 100 - HELD_BACK), 2)


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...]
    bake_min: int  # minutes
    bake_max: int
    alpha: float
    beta: float
    objective: float  # the error rate that a version must stay below
    margin: float = 1.0  # the odds ratio that counts as no worse
    bursts: tuple[float, ...] = (0.0,) * len(METRICS)  # tau, metric by metric
    latencies: tuple[float, ...] = ()  # seconds, in the order of LATENCIES; empty where no latency is judged

    def __post_init__(self) -> None:
        if said := _fault(self):
            raise PlanInvalid(f"This plan cannot be followed: {said}.")

    @staticmethod
    def of(
        shares: Sequence[int] = (5, 25, 50, 100),
        *,
        bake_min: int = 5,
        bake_max: int = 60,
        alpha: float = 0.01,
        beta: float = 0.05,
        objective: float = 0.01,
        margin: float = 1.0,
        bursts: Sequence[float] = (0.0,) * len(METRICS),
        latencies: Sequence[float] = (),
    ) -> "Plan":
        """A plan whose steps tolerate what their shares call for."""
        steps = tuple(Step(share, tolerance_of(share)) for share in shares)
        return Plan(steps, bake_min, bake_max, alpha, beta, objective, margin, tuple(bursts), tuple(latencies))

    @cached_property
    def ratios(self) -> tuple[float, ...]:
        """Where every curve of this rollout is kept."""
        return grid_with((self.margin, *(step.tolerates for step in self.steps)))

    @cached_property
    def log_ratios(self) -> tuple[float, ...]:
        return tuple(map(math.log, self.ratios))

    @cached_property
    def digest(self) -> str:
        return digest_of(self.as_json())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Plan":
        fields = dict(document)
        try:
            steps = tuple(Step(**step) for step in fields.pop("steps"))
            bursts, latencies = tuple(fields.pop("bursts")), tuple(fields.pop("latencies"))
            return Plan(steps=steps, bursts=bursts, latencies=latencies, **fields)
        except (KeyError, TypeError) as error:
            raise PlanInvalid(f"This is no plan of a rollout: {error}; write it with Plan.as_json.") from error


def _fault(plan: Plan) -> str | None:
    shares = [step.share for step in plan.steps]
    if not shares or shares != sorted(set(shares)) or shares[0] < 1 or shares[-1] != 100:
        return f"its shares are {shares}, and must ascend from at least 1 to 100"
    if not all(1 < step.tolerates <= 100 for step in plan.steps):
        return "a step must tolerate an odds ratio above 1, and at most 100"
    if not 1 <= plan.bake_min <= plan.bake_max:
        return f"it bakes for {plan.bake_min} to {plan.bake_max} minutes"
    for name in ("alpha", "beta", "objective"):
        if not 0 < getattr(plan, name) < 1:
            return f"its {name} is {getattr(plan, name)}, and must lie between 0 and 1"
    if not 1 <= plan.margin < min(step.tolerates for step in plan.steps):
        return f"its margin is {plan.margin}, and must be at least 1 and below what every step tolerates"
    if len(plan.bursts) != len(METRICS) or not all(0 <= tau <= 5 for tau in plan.bursts):
        return f"its bursts are {plan.bursts}: one tau from 0 to 5 for each of {len(METRICS)} metrics"
    return _latency_fault(plan.latencies)


def _latency_fault(latencies: tuple[float, ...]) -> str | None:
    if len(latencies) not in (0, len(LATENCIES)):
        return f"it has {len(latencies)} latencies instead of {len(LATENCIES)}"
    if not all(0 < latency < math.inf for latency in latencies) or list(latencies) != sorted(latencies):
        return "its latencies are not ascending numbers of seconds"
    return None
