"""Evidence of a rollout: sums over minutes, one log-likelihood curve for each step and metric.

A curve holds the log likelihood at every odds ratio of the plan's grid, relative to a ratio of 1. Independent minutes
multiply, so their curves add, and every e-value is a function of the sums: minutes need not be stored.

Values are whole grains of 2**-30 nats. Sums of integers are exact: the same minutes give the same evidence, to the bit,
in any order and from any region, and JSON preserves it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from nxpipe.pipeline.canary.documents import EvidenceInvalid, digest_of
from nxpipe.pipeline.canary.likelihood import informative, log_likelihoods, mixed_log_likelihoods
from nxpipe.pipeline.canary.metrics import METRICS, Batch, Minutes, Pairs
from nxpipe.pipeline.canary.plan import CanaryPlan

GRAIN: Final = 2.0**-30

Curve = tuple[int, ...]  # grains, at the plan's odds ratios


@dataclass(frozen=True)
class StepEvidence:
    """The evidence of one step: a curve of each metric over the plan's ratios, and the canary's own counts."""

    begun: int  # its first minute
    curves: tuple[Curve, ...]
    requests: int = 0
    errors: int = 0
    untimed: int = 0  # good responses without a latency, in minutes that have latencies

    def __add__(self, other: "StepEvidence") -> "StepEvidence":
        return StepEvidence(
            min(self.begun, other.begun),
            tuple(sum_curves(mine, theirs) for mine, theirs in zip(self.curves, other.curves, strict=True)),
            self.requests + other.requests,
            self.errors + other.errors,
            self.untimed + other.untimed,
        )


def sum_curves(left: Curve, right: Curve) -> Curve:
    return tuple(map(int.__add__, left, right))


@dataclass(frozen=True)
class Evidence:
    """The evidence of a rollout: of each step, and the minutes that it contains."""

    steps: tuple[StepEvidence, ...] = ()
    taken: Minutes = field(default_factory=Minutes)
    frozen: Minutes = field(default_factory=Minutes)  # minutes in which the baseline itself was beyond its objective
    baked: Minutes = field(default_factory=Minutes)  # minutes that were not frozen and in which the canary had requests
    set_aside: int = 0  # batches that were invalid

    @property
    def digest(self) -> str:
        return digest_of(self.as_json())

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        return document | {name: getattr(self, name).ranges for name in ("taken", "frozen", "baked")}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Evidence":
        try:
            return Evidence(
                tuple(_step(step) for step in document["steps"]),
                Minutes.from_json(document["taken"]),
                Minutes.from_json(document["frozen"]),
                Minutes.from_json(document.get("baked", document["taken"])),  # written before `baked` was a field
                document["set_aside"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EvidenceInvalid(f"invalid evidence: {error!r}; begin with Evidence()") from error


def _step(document: Mapping[str, Any]) -> StepEvidence:
    curves = tuple(tuple(map(int, curve)) for curve in document["curves"])
    return StepEvidence(document["begun"], curves, document["requests"], document["errors"], document.get("untimed", 0))


def empty_step(plan: CanaryPlan, minute: int) -> StepEvidence:
    """A step without data."""
    return StepEvidence(minute, ((0,) * len(plan.ratios),) * len(METRICS))


def pooled(regions: Sequence[Evidence]) -> Evidence:
    """The combined evidence of independent regions that follow one plan and are at one step: their curves add.

    A minute is taken, frozen or baked if it is in any region.
    """
    if len({len(region.steps) for region in regions}) != 1:
        raise EvidenceInvalid("the regions are at different steps; pool them after all have begun the same one")
    first, *others = regions
    for other in others:
        first = Evidence(
            tuple(map(StepEvidence.__add__, first.steps, other.steps)),
            first.taken.joined(other.taken),
            first.frozen.joined(other.frozen),
            first.baked.joined(other.baked),
            first.set_aside + other.set_aside,
        )
    return first


def evidence_of_minute(plan: CanaryPlan, batch: Batch) -> tuple[Curve, ...]:
    """The curve of each metric: log likelihoods at the plan's odds ratios, relative to a ratio of 1."""
    thetas = plan.log_ratios
    if batch.pairs is not None:
        return _of_pairs(batch.pairs, thetas)
    arms = zip(batch.canary.tallies(), batch.stable.tallies(), plan.bursts, strict=True)
    return tuple(
        _of_arms((int(n), int(bad)), (int(m), int(others)), thetas, tau) for (n, bad), (m, others), tau in arms
    )


def _of_arms(canary: tuple[int, int], stable: tuple[int, int], thetas: tuple[float, ...], tau: float) -> Curve:
    if not informative(canary, stable):
        return (0,) * len(thetas)
    if tau:
        return _in_grains(mixed_log_likelihoods(canary, stable, thetas, tau), thetas)
    return _in_grains(log_likelihoods(canary, stable, thetas), thetas)


def _of_pairs(pairs: Pairs, thetas: tuple[float, ...]) -> tuple[Curve, ...]:
    """The curves of shadowed pairs. A discordant pair is a minute with one request of each version: its likelihood has
    a closed form."""
    counts = [(int(pairs.canary_alone[at]), int(pairs.stable_alone[at])) for at in range(len(METRICS))]
    return tuple(
        _in_grains([canary * theta - (canary + stable) * math.log1p(math.exp(theta)) for theta in thetas], thetas)
        for canary, stable in counts
    )


def _in_grains(logs: list[float], thetas: tuple[float, ...]) -> Curve:
    at_one = logs[thetas.index(0.0)]
    return tuple(round((log - at_one) / GRAIN) for log in logs)
