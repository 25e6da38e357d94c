"""Whole rollouts by the very judge that a Lambda runs, on drawn traffic."""

import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from nxpipe.pipeline.canary.counts import METRICS
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.judge import Decision, Moment, judge
from nxpipe.pipeline.canary.likelihood import fitted_tau
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.limits import upper_limit
from nxpipe.pipeline.rollout.world import Traffic, World

_TOGETHER: Final = 50  # rollouts that one process runs at once; bursty ones share a history
_HISTORY: Final = 1440  # minutes of it


@dataclass(frozen=True)
class Outcome:
    """How one rollout ended."""

    decision: Decision
    step: int
    minutes: int
    tau: float = 0.0  # as it was fitted, of errors

    @property
    def promoted(self) -> bool:
        return self.decision is Decision.ADVANCE


@dataclass(frozen=True)
class Summary:
    world: World
    outcomes: tuple[Outcome, ...]

    def ended(self, decision: Decision) -> list[Outcome]:
        return [each for each in self.outcomes if each.decision is decision]

    @property
    def rolled_back(self) -> list[Outcome]:
        return self.ended(Decision.ROLL_BACK)

    @property
    def promoted(self) -> list[Outcome]:
        return self.ended(Decision.ADVANCE)

    def as_json(self) -> dict[str, Any]:
        back, trials, world = len(self.rolled_back), len(self.outcomes), self.world
        limit = upper_limit(back, trials)
        return {
            "scenario": world.scenario,
            "rps": world.rps,
            "base_error": world.base_error,
            "canary_error": world.canary_error,
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


def median_minutes(outcomes: Sequence[Outcome]) -> float | None:
    return statistics.median(each.minutes for each in outcomes) if outcomes else None


def simulate(plan: CanaryPlan, world: World, rollouts: int, seed: int, processes: int | None = None) -> Summary:
    """The same seed gives the same rollouts, whatever the number of processes."""
    seeds = np.random.SeedSequence(seed).spawn(-(-rollouts // _TOGETHER))
    sizes = [min(_TOGETHER, rollouts - begin) for begin in range(0, rollouts, _TOGETHER)]
    plans, worlds = [plan] * len(sizes), [world] * len(sizes)
    if len(sizes) == 1:
        return Summary(world, tuple(_some(plan, world, seeds[0], sizes[0])))
    with ProcessPoolExecutor(processes or os.cpu_count()) as pool:
        chunks = pool.map(_some, plans, worlds, seeds, sizes)
        return Summary(world, tuple(outcome for chunk in chunks for outcome in chunk))


def _some(plan: CanaryPlan, world: World, seed: np.random.SeedSequence, count: int) -> list[Outcome]:
    own, *each = seed.spawn(1 + count)
    if world.scenario == "bursty":
        history = Traffic(world, np.random.default_rng(own)).history(_HISTORY, plan.steps[0].weight)
        plan = replace(plan, bursts=(fitted_tau(history), *[0.0] * (len(METRICS) - 1)))
    return [roll_out(plan, Traffic(world, np.random.default_rng(one))) for one in each]


def roll_out(plan: CanaryPlan, traffic: Traffic) -> Outcome:
    evidence, minute, decision = Evidence(), 0, Decision.CONTINUE
    for number, step in enumerate(plan.steps):
        begun = minute
        for batch in traffic.minutes(begun, step.weight):
            minute = batch.minute + 1
            judged = judge(plan, evidence, [batch], Moment(number, begun, minute))
            evidence, decision = judged.evidence, judged.verdict.decision
            if decision not in (Decision.CONTINUE, Decision.FROZEN):
                break
        if decision is not Decision.ADVANCE:
            break
    return Outcome(decision, number, minute, plan.bursts[0])
