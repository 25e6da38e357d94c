"""Peer rules on the same minutes: alarms on one number, and a final test as in Kayenta.

Written from their behaviour, not with their code. Kayenta's rule compares, for each metric, the minutes of the canary
with those of an extra baseline of the same size by a Mann-Whitney interval of 98 %, and fails the canary when the lower
end is above a quarter of the estimate. The tuned alarm has thresholds at which 1 % of healthy hours fail, found on
simulated steady traffic of the same service, which no real service has.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np

from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.judge import Decision, Moment, judge
from nxpipe.pipeline.canary.metrics import Arm, Batch
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.planner import LOG_THRESHOLDS, P95, SPREAD, UNCHANGED_LATENCY, Slowness
from nxpipe.pipeline.rollout.simulate import INCIDENT, INCIDENT_BEGINS, INCIDENT_ERRORS, INCIDENT_MINUTES, TrafficModel

RULES: Final = ("ours", "kayenta", "kayenta-peek", "fixed", "tuned")
TITLES: Final = {
    "ours": "nxpipe",
    "kayenta": "Kayenta-style, after 60 min",
    "kayenta-peek": "the same every 5 min",
    "fixed": "fixed alarm (2x, 1.2x)",
    "tuned": "tuned alarm",
}
MINUTES: Final = 60
_SHARE: Final = 0.05
_TUNING: Final = 1000  # hours
_LOOKS: Final = 5  # minutes between two Kayenta evaluations
_Z: Final = 2.326  # 98 %, two-sided
_TOLERANCE: Final = 0.25
_LATENCIES: Final = np.exp(np.array(LOG_THRESHOLDS))


@dataclass(frozen=True)
class Hour:
    """Counts for the judge; error rates and p99 (relative to the baseline's median) for the peers."""

    batches: tuple[Batch, ...]
    canary: np.ndarray[Any, Any]  # error rate, p99; a row for each minute
    baseline: np.ndarray[Any, Any]


def hour(world: TrafficModel, random: np.random.Generator) -> Hour:
    begins = int(random.integers(INCIDENT_BEGINS))
    trouble = range(begins, begins + INCIDENT_MINUTES) if world.scenario == "incident" else range(0)
    requests = random.poisson(60 * world.rps, MINUTES)
    at_canary, at_baseline = random.binomial(requests, _SHARE), random.binomial(requests, _SHARE)
    batches, canary, baseline = [], [], []
    for minute in range(MINUTES):
        bad = INCIDENT_ERRORS if minute in trouble else 1.0
        slow = INCIDENT.scale if minute in trouble else 1.0
        new = replace(world.slowness, scale=world.slowness.scale * slow)
        mine, seen = _arm(random, int(at_canary[minute]), world.canary_error * bad, new)
        theirs, compared = _arm(random, int(at_baseline[minute]), world.base_error * bad, Slowness(slow))
        rest = max(0, int(requests[minute] - at_canary[minute] - at_baseline[minute]))
        others = _counted(random, rest, world.base_error * bad, Slowness(slow))
        slower = tuple(value + other for value, other in zip(theirs.slower, others.slower, strict=True))
        count = int(theirs.requests + others.requests)
        stable = Arm(count, theirs.errors + others.errors, count, slower)
        batches.append(Batch(minute, mine, stable))
        canary.append(seen)
        baseline.append(compared)
    return Hour(tuple(batches), np.array(canary), np.array(baseline))


def _arm(random: np.random.Generator, requests: int, error: float, slow: Slowness) -> tuple[Arm, tuple[float, float]]:
    """Draw every latency: the p99 of a minute is that of its requests."""
    latencies = _after(random.normal(0, SPREAD, requests), slow)
    slower = tuple((latencies[:, None] > _LATENCIES).sum(axis=0).tolist())
    errors = int(random.binomial(requests, min(error, 1)))
    p99 = float(np.quantile(latencies, 0.99)) if requests else 0.0
    return Arm(requests, errors, requests, slower), (errors / max(requests, 1), p99)


def _after(logs: np.ndarray[Any, Any], slow: Slowness) -> np.ndarray[Any, Any]:
    """The inverse of `Slowness.before`."""
    stretched = np.where(logs <= P95, logs, P95 + (logs - P95) * slow.stretch)
    slowed: np.ndarray[Any, Any] = np.exp(stretched + np.log(slow.scale))
    return slowed


def _counted(random: np.random.Generator, requests: int, error: float, slow: Slowness) -> Arm:
    drawn = random.multinomial(requests, slow.between())
    slower = tuple(np.cumsum(drawn[:0:-1])[::-1].tolist())
    return Arm(requests, int(random.binomial(requests, min(error, 1))), requests, slower)


def caught(plan: CanaryPlan, world: TrafficModel, runs: int, seed: int) -> dict[str, list[int | None]]:
    """The minute of the rollback in each run, for each rule."""
    seeds = np.random.SeedSequence(seed).spawn(runs)
    thresholds = tuned(world.rps, world.base_error)
    with ProcessPoolExecutor() as pool:
        jobs = ([plan] * runs, [world] * runs, [thresholds] * runs, seeds)
        rows = list(pool.map(_run, *jobs, chunksize=20))
    return {rule: [row[rule] for row in rows] for rule in RULES}


def _run(
    plan: CanaryPlan, world: TrafficModel, thresholds: tuple[float, float], seed: np.random.SeedSequence
) -> dict[str, int | None]:
    drawn = hour(world, np.random.default_rng(seed))
    fixed = (2 * world.base_error, 1.2 * float(_LATENCIES[4]))
    return {
        "ours": _ours(plan, drawn),
        "kayenta": MINUTES if _fails(drawn, MINUTES) else None,
        "kayenta-peek": next((at for at in range(_LOOKS, MINUTES + 1, _LOOKS) if _fails(drawn, at)), None),
        "fixed": _alarm(drawn, fixed),
        "tuned": _alarm(drawn, thresholds),
    }


def _ours(plan: CanaryPlan, drawn: Hour) -> int | None:
    evidence = Evidence()
    for batch in drawn.batches:
        judged = judge(plan, evidence, [batch], Moment(0, 0, batch.minute + 1))
        if judged.verdict.decision is Decision.ROLL_BACK:
            return batch.minute + 1
        evidence = judged.evidence
    return None


def _fails(drawn: Hour, minutes: int) -> bool:
    return any(_higher(drawn.canary[:minutes, at], drawn.baseline[:minutes, at]) for at in (0, 1))


def _higher(canary: np.ndarray[Any, Any], baseline: np.ndarray[Any, Any]) -> bool:
    differences = np.sort((canary[:, None] - baseline[None, :]).ravel())
    n, m = len(canary), len(baseline)
    below = int(n * m / 2 - _Z * np.sqrt(n * m * (n + m + 1) / 12))
    lowest, estimate = differences[max(below, 0)], abs(float(np.median(differences)))
    return bool(lowest > _TOLERANCE * estimate)


def _alarm(drawn: Hour, thresholds: tuple[float, float]) -> int | None:
    """The first minute with two of three minutes above either threshold."""
    above = drawn.canary > np.array(thresholds)
    for minute in range(1, MINUTES):
        if (above[max(0, minute - 2) : minute + 1].sum(axis=0) >= 2).any():
            return minute + 1
    return None


@cache
def tuned(rps: float, base_error: float) -> tuple[float, float]:
    """Thresholds of the two alarms; each fails half a percent of healthy hours."""
    world = TrafficModel("steady", rps, base_error, base_error, UNCHANGED_LATENCY)
    worst = np.array(list(_worst(world)))
    errors, p99 = np.quantile(worst, 0.995, axis=0)
    return float(errors), float(p99)


def _worst(world: TrafficModel) -> Iterator[np.ndarray[Any, Any]]:
    """The lowest threshold that an hour does not exceed in two of three minutes."""
    for seed in np.random.SeedSequence(4).spawn(_TUNING):
        seen = hour(world, np.random.default_rng(seed)).canary
        yield np.max([np.sort(seen[at : at + 3], axis=0)[-2] for at in range(MINUTES - 2)], axis=0)
