"""Simulated rollouts: drawn traffic, judged by the code that the Lambda function runs.

Minutes hold what CloudWatch would count, with realised numbers, and reach the judge as results of its queries. A
request without an answer is in RequestCount of its target group, and a 502 of the load balancer. The error rates of the
method (`alpha`, `beta`) are checked against these simulations.
"""

import itertools
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from nxpipe.pipeline.canary.documents import canonical_json
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.explanation import PhaseTotals, totals_after
from nxpipe.pipeline.canary.handler import Action, RolloutState, begin_step, record_evaluation
from nxpipe.pipeline.canary.judge import Decision, Judgement, Moment, judge
from nxpipe.pipeline.canary.likelihood import Tallies, fitted_tau
from nxpipe.pipeline.canary.metrics import (
    LATENCIES,
    METRICS,
    PAIR_METRICS,
    Arm,
    Batch,
    PairCounts,
    UnansweredRequests,
    batches,
    start_of,
)
from nxpipe.pipeline.canary.plan import CanaryPlan, Schedule
from nxpipe.pipeline.rollout.forecast import StepProgress, progress_of
from nxpipe.pipeline.rollout.planner import LOG_THRESHOLDS, UNCHANGED_LATENCY, Slowness

Scenario: TypeAlias = Literal["steady", "incident", "bursty", "late"]

_BLOCK: Final = 8  # minutes per draw
_PERIOD: Final = 60  # seconds
_THRESHOLDS: Final = (1.0,) * len(LATENCIES)  # seconds; counts are drawn by the position of a threshold
INCIDENT: Final = Slowness(scale=1.5)
INCIDENT_ERRORS: Final = 10.0  # factor of the error rate
INCIDENT_MINUTES: Final = 10
INCIDENT_BEGINS: Final = 30  # latest first minute
_LATE: Final = 50  # percent of traffic from which a `late` canary fails


@dataclass(frozen=True)
class TrafficModel:
    """The true rates, which the judge has to infer."""

    scenario: Scenario
    rps: float
    base_error: float
    canary_error: float
    slowness: Slowness = UNCHANGED_LATENCY  # of the canary
    burst: float = 0.5  # coefficient of variation of a version's error rate from minute to minute, when bursty
    unanswered: float = 0.0  # share of the canary's requests without a response
    differs: float = 0.0  # share of mirrored requests to which the canary's response is another one

    @property
    def healthy(self) -> bool:
        return self.canary_error == self.base_error and self.slowness == UNCHANGED_LATENCY and not self._defective

    @property
    def _defective(self) -> bool:
        return bool(self.unanswered or self.differs)


class SimulatedTraffic:
    """Minutes of one rollout. Draws depend on the generator alone, so a seed determines a rollout."""

    def __init__(self, world: TrafficModel, random: np.random.Generator) -> None:
        self._world = world
        self._random = random
        self._opened = (UnansweredRequests(), UnansweredRequests())
        self._incident = range(0)
        if world.scenario == "incident":
            begins = int(random.integers(INCIDENT_BEGINS))
            self._incident = range(begins, begins + INCIDENT_MINUTES)

    def minutes(self, first: int, share: int) -> Iterator[Batch]:
        """An endless series of minutes from `first` on, with this percentage of traffic at the canary."""
        for minutes, results in self.results(first, share):
            taken, self._opened = batches(results, minutes, _THRESHOLDS, _PERIOD, self._opened)
            yield from taken

    def results(self, first: int, share: int) -> Iterator[tuple[range, list[dict[str, Any]]]]:
        """The same minutes in blocks, as CloudWatch would report them."""
        fails = self._world.scenario != "late" or share >= _LATE
        for begin in itertools.count(first, _BLOCK):
            minutes = range(begin, begin + _BLOCK)
            requests = self._random.poisson(60 * self._world.rps, _BLOCK)
            at_canary = self._random.binomial(requests, share / 100)
            unanswered = self._unanswered(at_canary) if fails else np.zeros_like(at_canary)
            canary = self._counts(minutes, at_canary - unanswered, fails)
            stable = self._counts(minutes, requests - at_canary, False)
            canary["requests"] = at_canary
            series = {
                f"{arm}_{name}": counts
                for arm, by in (("canary", canary), ("stable", stable))
                for name, counts in by.items()
            }
            series["balancer_502"] = unanswered
            times = [start_of(minute, _PERIOD) for minute in minutes]
            yield (
                minutes,
                [{"Id": name, "Timestamps": times, "Values": counts.tolist()} for name, counts in series.items()],
            )

    def mirrored(self, first: int, percent: float) -> Iterator[Batch]:
        """An endless series of minutes in which this percentage of requests is mirrored to the canary."""
        world, random = self._world, self._random
        bad = 1 - (1 - min(1, world.canary_error + world.unanswered)) * (1 - world.differs)
        for minute in itertools.count(first):
            rate = world.base_error * (INCIDENT_ERRORS if minute in self._incident else 1)
            requests = int(random.poisson(60 * world.rps))
            stable = Arm(requests, int(random.binomial(requests, min(rate, 1))))
            chances = [bad * (1 - rate), (1 - bad) * rate, bad * rate]
            pairs = int(random.binomial(requests, percent / 100))
            canary_alone, stable_alone, both, _ = random.multinomial(pairs, [*chances, 1 - sum(chances)]).tolist()
            yield PairCounts(pairs, canary_alone + both, canary_alone, stable_alone).batch(minute, stable)

    def phase(self, plan: CanaryPlan, number: int, first: int) -> Iterator[Batch]:
        """The minutes of a phase of the plan, from `first` on."""
        if plan.shadow is not None and plan.is_shadow(number):
            return self.mirrored(first, plan.shadow.percent)
        return self.minutes(first, plan.phases[number].weight)

    def history(self, minutes: int, share: int) -> list[Tallies]:
        """Errors of minutes in which both groups run the same version: a share of the hosts, and the rest."""
        unchanged = SimulatedTraffic(_as_before(self._world), self._random)
        batches = itertools.islice(unchanged.minutes(INCIDENT_BEGINS + INCIDENT_MINUTES, share), minutes)
        return [
            (
                (int(batch.canary.requests), int(batch.canary.errors)),
                (int(batch.stable.requests), int(batch.stable.errors)),
            )
            for batch in batches
        ]

    def _unanswered(self, requests: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        share = self._world.unanswered
        return self._random.binomial(requests, share) if share else np.zeros_like(requests)

    def _counts(self, minutes: range, requests: "np.ndarray[Any, Any]", new: bool) -> "dict[str, np.ndarray[Any, Any]]":
        """The counts of a target group that answers so many requests."""
        world = self._world
        trouble = np.isin(minutes, self._incident)
        rate = np.full(len(minutes), world.canary_error if new else world.base_error)
        rate = np.where(trouble, rate * INCIDENT_ERRORS, rate) * self._bursts(len(minutes))
        errors = self._random.binomial(requests, np.minimum(rate, 1))
        slowness = world.slowness if new else UNCHANGED_LATENCY
        worse = Slowness(slowness.scale * INCIDENT.scale, slowness.tail)
        between = np.where(trouble[:, None], worse.between(), slowness.between())
        drawn = self._random.multinomial(requests, between)
        slower = np.cumsum(drawn[:, :0:-1], axis=1)[:, ::-1]
        counts = {"requests": requests, "2xx": requests - errors, "5xx": errors, "timed": requests}
        return counts | {f"slower{at}": slower[:, at] for at in range(len(LATENCIES))}

    def _bursts(self, minutes: int) -> "np.ndarray[Any, Any] | float":
        """Factors of an arm's error rate, with mean 1."""
        if self._world.scenario != "bursty":
            return 1.0
        shape = self._world.burst**-2
        return self._random.gamma(shape, 1 / shape, minutes)


def _as_before(world: TrafficModel) -> TrafficModel:
    return TrafficModel(world.scenario, world.rps, world.base_error, world.base_error, burst=world.burst)


def upper_limit(events: int, trials: int, doubt: float = 0.05) -> float:
    """The one-sided upper confidence limit of a rate (Clopper and Pearson)."""
    if events >= trials:
        return 1.0
    low, high = events / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(events, trials, middle) > doubt else (low, middle)
    return high


def _at_most(events: int, trials: int, rate: float) -> float:
    if rate in (0.0, 1.0):
        return 1.0 - rate
    logs = (
        math.lgamma(trials + 1)
        - math.lgamma(count + 1)
        - math.lgamma(trials - count + 1)
        + count * math.log(rate)
        + (trials - count) * math.log1p(-rate)
        for count in range(events + 1)
    )
    return math.fsum(map(math.exp, logs))


_CHUNK: Final = 50  # rollouts of one task; bursty ones share a history
_HISTORY: Final = 1440  # minutes


@dataclass(frozen=True)
class SimulatedRollout:
    """The end of one rollout."""

    decision: Decision
    step: int
    minutes: int
    tau: float = 0.0  # fitted overdispersion of errors

    @property
    def promoted(self) -> bool:
        return self.decision is Decision.ADVANCE


@dataclass(frozen=True)
class SimulationSummary:
    world: TrafficModel
    outcomes: tuple[SimulatedRollout, ...]

    def ended(self, decision: Decision) -> list[SimulatedRollout]:
        return [outcome for outcome in self.outcomes if outcome.decision is decision]

    @property
    def rolled_back(self) -> list[SimulatedRollout]:
        return self.ended(Decision.ROLL_BACK)

    @property
    def promoted(self) -> list[SimulatedRollout]:
        return self.ended(Decision.ADVANCE)

    def as_json(self) -> dict[str, Any]:
        back, trials, world = len(self.rolled_back), len(self.outcomes), self.world
        limit = upper_limit(back, trials)
        return {
            "scenario": world.scenario,
            "rps": world.rps,
            "base_error": world.base_error,
            "canary_error": world.canary_error,
            "canary_unanswered": world.unanswered,
            "canary_differs": world.differs,
            "latency_scale": world.slowness.scale,
            "latency_tail": world.slowness.tail,
            "rollouts": trials,
            "rolled_back": back,
            "promoted": len(self.promoted),
            "undecided": len(self.ended(Decision.UNDECIDED)),
            "rollback_rate": back / trials,
            "rollback_rate_upper_95": limit,
            "false_rollback_rate": back / trials if world.healthy else None,
            "false_rollback_rate_upper_95": limit if world.healthy else None,
            "median_minutes": median_minutes(self.outcomes),
            "median_minutes_promoted": median_minutes(self.promoted),
            "median_minutes_rolled_back": median_minutes(self.rolled_back),
        }


def median_minutes(outcomes: Sequence[SimulatedRollout]) -> float | None:
    return statistics.median(outcome.minutes for outcome in outcomes) if outcomes else None


def simulate(
    plan: CanaryPlan, world: TrafficModel, rollouts: int, seed: int, processes: int | None = None
) -> SimulationSummary:
    """The same seed gives the same rollouts for any number of processes."""
    seeds = np.random.SeedSequence(seed).spawn(-(-rollouts // _CHUNK))
    sizes = [min(_CHUNK, rollouts - begin) for begin in range(0, rollouts, _CHUNK)]
    plans, worlds = [plan] * len(sizes), [world] * len(sizes)
    if len(sizes) == 1:
        return SimulationSummary(world, tuple(_some(plan, world, seeds[0], sizes[0])))
    with ProcessPoolExecutor(processes or os.cpu_count()) as pool:
        chunks = pool.map(_some, plans, worlds, seeds, sizes)
        return SimulationSummary(world, tuple(outcome for chunk in chunks for outcome in chunk))


def _some(plan: CanaryPlan, world: TrafficModel, seed: np.random.SeedSequence, count: int) -> list[SimulatedRollout]:
    own, *seeds = seed.spawn(1 + count)
    if world.scenario == "bursty":
        history = SimulatedTraffic(world, np.random.default_rng(own)).history(_HISTORY, plan.steps[0].weight)
        plan = replace(plan, bursts=(fitted_tau(history), *[0.0] * (len(METRICS) - 1)))
    return [roll_out(plan, SimulatedTraffic(world, np.random.default_rng(rollout_seed))) for rollout_seed in seeds]


def roll_out(plan: CanaryPlan, traffic: SimulatedTraffic) -> SimulatedRollout:
    for at, _, judged in judgements(plan, traffic):
        last = (judged.verdict.decision, at)
    return SimulatedRollout(last[0], last[1].step, last[1].minute, plan.bursts[0])


def judgements(plan: CanaryPlan, traffic: SimulatedTraffic) -> Iterator[tuple[Moment, Batch, Judgement]]:
    """The judgement of every minute of a rollout, to its end; the last one of a phase that advances is `advance`."""
    evidence, minute = Evidence(), 0
    for number in range(len(plan.phases)):
        begun, decision = minute, Decision.CONTINUE
        for batch in traffic.phase(plan, number, begun):
            minute = batch.minute + 1
            at = Moment(number, begun, minute)
            judged = judge(plan, evidence, [batch], at)
            evidence, decision = judged.evidence, judged.verdict.decision
            yield at, batch, judged
            if decision not in (Decision.CONTINUE, Decision.FROZEN):
                break
        if decision is not Decision.ADVANCE:
            return


def foreseen(plan: CanaryPlan, world: TrafficModel, seed: int) -> Iterator[tuple[StepProgress, Decision, int]]:
    """The progress in each minute of a rollout, with the end of its phase and the minutes that remained until then."""
    traffic = SimulatedTraffic(world, np.random.default_rng(seed))
    evidence, totals = Evidence(), tuple[PhaseTotals, ...]()
    phase: list[tuple[StepProgress, int]] = []
    for at, batch, judged in judgements(plan, traffic):
        totals = totals_after(totals, evidence, judged.evidence, [batch])
        evidence, decision = judged.evidence, judged.verdict.decision
        if decision in (Decision.CONTINUE, Decision.FROZEN):
            phase.append((progress_of(plan, evidence, totals, judged.verdict, 60 * world.rps), at.minute))
            continue
        yield from ((progress, decision, at.minute - minute) for progress, minute in phase)
        phase.clear()


MEDIAN: Final = 0.04  # seconds; the stable version's latency in a recorded rollout
_FIRST: Final = 29_716_560  # the minute 2026-07-02T12:00Z
_QUIET: Final[dict[str, list[str]]] = {
    name: [] for name in ("metric_names", "metric_states", "composite_names", "composite_states")
}


def record_rollout(plan: CanaryPlan, world: TrafficModel, seed: int) -> list[str]:
    """The record of one rollout, line by line: the plan, and each evaluation by the function that judges on AWS.

    CloudWatch's delay, the warm-up of a step and full traffic are part of it. It ends undecided when an operator would
    be notified.
    """
    plan = replace(plan, latencies=tuple(MEDIAN * math.exp(log) for log in LOG_THRESHOLDS))
    course = _RecordedCourse(SimulatedTraffic(world, np.random.default_rng(seed)), plan)
    state = RolloutState(f"simulated-{seed}", plan, Schedule(), "app/simulated", "canary", "stable", ())
    lines, carried, verdict = [canonical_json(plan.as_json())], state.text(), Action.ADVANCE.value
    for step in range(len(plan.phases) + 1):
        if verdict != Action.ADVANCE:
            break
        answer = begin_step({"carried": carried, "step": step, "at": course.now})
        counts = course.phase(step)
        while True:
            next(counts)
            seen = {"metrics": course.metrics(), "alarms": _QUIET, "record": {}, "at": course.now}
            answer = record_evaluation({"carried": answer["carried"], **seen})
            lines.append(answer["record"]["text"])
            if answer["verdict"] not in (Action.CONTINUE, Action.WATCH):
                break
        carried, verdict = answer["carried"], answer["verdict"]
    return lines


class _RecordedCourse:
    """The clock of a recorded rollout, and the counts of its last minutes."""

    def __init__(self, traffic: SimulatedTraffic, plan: CanaryPlan) -> None:
        self._traffic = traffic
        self._plan = plan
        self._minute = _FIRST
        self._counts: dict[int, dict[str, float]] = {}

    @property
    def now(self) -> str:
        """Some seconds after the minute's begin."""
        return start_of(self._minute, _PERIOD).replace(":00Z", ":20Z")

    def phase(self, step: int) -> Iterator[None]:
        """A minute more with each item, with the weights of this step."""
        for counts in self._minutes(step):
            self._counts[self._minute] = counts
            self._minute += 1
            yield

    def metrics(self) -> list[dict[str, Any]]:
        """The results of the queries, for the last minutes."""
        recent = range(self._minute - _BLOCK, self._minute)
        names = sorted({name for minute in recent for name in self._counts.get(minute, {})})
        return [
            {
                "Id": name,
                "Timestamps": [start_of(minute, _PERIOD) for minute in recent if name in self._counts.get(minute, {})],
                "Values": [self._counts[minute][name] for minute in recent if name in self._counts.get(minute, {})],
            }
            for name in names
        ]

    def _minutes(self, step: int) -> Iterator[dict[str, float]]:
        if self._plan.shadow is not None and self._plan.is_shadow(step):
            yield from map(_mirrored_counts, self._traffic.mirrored(self._minute, self._plan.shadow.percent))
        weight = self._plan.phases[step].weight if step < len(self._plan.phases) else 100
        for minutes, results in self._traffic.results(self._minute, weight):
            for at in range(len(minutes)):
                yield {result["Id"]: float(result["Values"][at]) for result in results}


def _mirrored_counts(batch: Batch) -> dict[str, float]:
    assert batch.pairs is not None
    pairs = (batch.canary.requests, batch.canary.errors, batch.pairs.canary_alone[0], batch.pairs.stable_alone[0])
    good = batch.stable.requests - batch.stable.errors
    stable = {"stable_requests": batch.stable.requests, "stable_2xx": good, "stable_5xx": batch.stable.errors}
    return {name: float(count) for name, count in (*zip(PAIR_METRICS, pairs, strict=True), *stable.items())}
