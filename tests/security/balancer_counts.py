"""A load balancer's counts for late, failed and unanswered requests, and a rollout that evaluates them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from nxpipe.pipeline.canary.handler import Action, Evaluation, RolloutState, evaluate
from nxpipe.pipeline.canary.metrics import start_of
from nxpipe.pipeline.canary.plan import CanaryPlan, Schedule
from tests.canary.samples import plan_with

PLAN: Final = plan_with(latencies=(0.1, 0.15, 0.2, 0.3, 0.5, 0.625, 0.8))
QUIET: Final[dict[str, list[str]]] = {
    "metric_names": [],
    "metric_states": [],
    "composite_names": [],
    "composite_states": [],
}
_FIRST: Final = 30_000_000  # minutes since 1970
_SLOWER: Final = (0.5, 0.25, 0.1, 0.05, 0.01, 0.003, 0.0005)
_KEPT: Final = 5  # most minutes of an evaluation


@dataclass
class Version:
    """One target group. `late` is the share of a minute's requests that is answered in the next one: a load balancer
    may count a request when it comes, and its answer when it is there.
    """

    unanswered: float = 0.0
    failed: float = 0.005
    late: float = 0.0
    _open: int = 0

    def minute(self, requests: int, chance: np.random.Generator) -> dict[str, float]:
        answered = int(chance.binomial(requests, 1 - self.unanswered))
        later = int(chance.binomial(answered, self.late))
        answers, self._open = answered - later + self._open, later
        failed = int(chance.binomial(answers, self.failed))
        slower = chance.multinomial(answers, np.diff([0, *_SLOWER[::-1], 1]))
        counts: dict[str, float] = {"requests": requests, "2xx": answers - failed, "5xx": failed, "timed": answers}
        return counts | {f"slower{at}": int(sum(slower[: len(_SLOWER) - at])) for at in range(len(_SLOWER))}


@dataclass
class Front:
    """Both versions, with a share of traffic each."""

    canary: Version
    stable: Version
    requests: int = 3000  # requests per minute, on average
    seed: int = 0
    _counted: dict[int, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._chance = np.random.default_rng(self.seed)

    def minute(self, number: int, weight: int) -> None:
        requests = int(self._chance.poisson(self.requests))
        there = int(self._chance.binomial(requests, weight / 100))
        arms = {"canary": (self.canary, there), "stable": (self.stable, requests - there)}
        self._counted[number] = {
            f"{arm}_{name}": float(count)
            for arm, (version, share) in arms.items()
            for name, count in version.minute(share, self._chance).items()
        }
        self._counted.pop(number - _KEPT - 1, None)

    def told(self) -> list[dict[str, Any]]:
        """Counts as CloudWatch returns them: without zeros."""
        names = next(iter(self._counted.values()))
        found = {name: {n: value[name] for n, value in self._counted.items() if value[name]} for name in names}
        return [
            {"Id": name, "Timestamps": [start_of(n, 60) for n in values], "Values": [*values.values()]}
            for name, values in found.items()
        ]


def course(plan: CanaryPlan = PLAN) -> RolloutState:
    return RolloutState("r1", plan, Schedule(), "app/front/1", "targetgroup/green/1", "targetgroup/blue/1", ())


def roll_out(front: Front, plan: CanaryPlan = PLAN) -> tuple[Action, int, int]:
    """The outcome, the last step, and the duration in minutes."""
    for step, minutes, looked in looks(front, plan):
        ended = looked.action is Action.ADVANCE and step == len(plan.steps)
        if looked.action in (Action.ROLL_BACK, Action.ASK) or ended:
            return looked.action, step, minutes
    raise AssertionError("a rollout has an end")


def looks(front: Front, plan: CanaryPlan = PLAN) -> Iterator[tuple[int, int, Evaluation]]:
    """One evaluation per minute, from the first step to the one at full traffic."""
    stands, minute = course(plan), _FIRST
    for step in range(len(plan.steps) + 1):
        weight = plan.steps[step].weight if step < len(plan.steps) else 100
        stands = stands.begin(step, start_of(minute, 60))
        word = Action.CONTINUE
        while word is Action.CONTINUE:
            front.minute(minute, weight)
            minute += 1
            seen = {"metrics": front.told(), "at": start_of(minute, 60), "alarms": QUIET, "record": {}}
            looked = evaluate(stands, seen)
            stands, word = looked.state, looked.action
            yield step, minute - _FIRST, looked
