"""A load balancer's counts for late, failed and unanswered requests, and a rollout that evaluates them.

As an Application Load Balancer: a target that crashes makes it return 502 at once, one that hangs makes it return 504
after its idle timeout, and a client that gives up is a 460. These are in RequestCount of the target group, and in no
other metric of it: the load balancer counts its own responses for all target groups together.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from nxpipe.pipeline.canary.handler import Action, Evaluation, ResponseLimits, RolloutState, evaluate
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


@dataclass(frozen=True)
class Version:
    """What happens to the requests of one target group, as shares of them."""

    crash: float = 0.0  # the target closes the connection
    hang: float = 0.0  # the target sends nothing
    given_up: float = 0.0  # the target sends nothing, and the client gives up in the next minute
    failed: float = 0.005  # of the responses
    late: float = 0.0  # of the responses: sent in the next minute
    streams: int = 0  # minutes; a response takes up to so many


@dataclass
class Front:
    """Both versions, with a share of traffic each."""

    canary: Version
    stable: Version
    requests: int = 3000  # requests per minute, on average
    seed: int = 0
    idle: int = 1  # minutes of the idle timeout
    at_start: bool = True  # RequestCount counts a request when it comes; otherwise when it ends
    _counted: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _now: int = 0

    def __post_init__(self) -> None:
        self._chance = np.random.default_rng(self.seed)

    def minute(self, number: int, weight: int) -> None:
        requests = int(self._chance.poisson(self.requests))
        there = int(self._chance.binomial(requests, weight / 100))
        self._serve("canary", self.canary, number, there)
        self._serve("stable", self.stable, number, requests - there)
        self._counted.pop(number - _KEPT - 1, None)
        self._now = number

    def _serve(self, arm: str, version: Version, number: int, requests: int) -> None:
        shares = (version.crash, version.hang, version.given_up)
        crashed, hung, gone, served = self._chance.multinomial(requests, [*shares, 1 - sum(shares)]).tolist()
        for lost, code, after in ((crashed, "502", 0), (hung, "504", self.idle), (gone, "4xx", 1)):
            self._counted[number + after][f"balancer_{code}"] += lost
            self._end(arm, number, after, lost)
        spread = [1 - version.late, version.late] + [0.0] * version.streams
        if version.streams:
            spread = [1 / (version.streams + 1)] * (version.streams + 1)
        for after, responses in enumerate(self._chance.multinomial(served, spread).tolist()):
            self._end(arm, number, after, responses)
            self._respond(arm, self._counted[number + after], responses, version.failed)

    def _end(self, arm: str, number: int, after: int, requests: int) -> None:
        self._counted[number if self.at_start else number + after][f"{arm}_requests"] += requests

    def _respond(self, arm: str, counted: Counter[str], responses: int, failing: float) -> None:
        failed = int(self._chance.binomial(responses, failing))
        counted[f"{arm}_2xx"] += responses - failed
        counted[f"{arm}_5xx"] += failed
        counted[f"{arm}_timed"] += responses
        slower = self._chance.multinomial(responses, np.diff([0, *_SLOWER[::-1], 1])).tolist()
        for at in range(len(_SLOWER)):
            counted[f"{arm}_slower{at}"] += sum(slower[: len(_SLOWER) - at])

    def told(self) -> list[dict[str, Any]]:
        """Counts as CloudWatch returns them: without zeros."""
        over = {number: counts for number, counts in self._counted.items() if number <= self._now}
        names = sorted({name for counts in over.values() for name in counts})
        found = {name: {n: float(value[name]) for n, value in over.items() if value[name]} for name in names}
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
    longest = max(front.idle, front.canary.streams, front.stable.streams)
    stands, minute = replace(course(plan), limits=ResponseLimits(front.idle, longest)), _FIRST
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
