"""The deployed function and the commands agree bit by bit, on random minutes and on extreme counts."""

import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from nxpipe.pipeline.canary.documents import canonical_json
from nxpipe.pipeline.canary.evalues import interval
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.handler import RolloutState
from nxpipe.pipeline.canary.judge import Decision, Judgement, Moment, judge
from nxpipe.pipeline.canary.likelihood import log_sum
from nxpipe.pipeline.canary.metrics import LATENCIES, METRICS, NO_REQUESTS, Arm, Batch, Count, start_of
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.canary.record import replay
from nxpipe.stacks.rollout.stack import RUNTIME
from tests.canary.function import Function, found, function
from tests.canary.samples import plan_with

CHECKOUT: Final = str(Path(__file__).parents[2])
FIRST: Final = 29_000_000  # the minute, since 1970, in which rollouts begin here
QUIET: Final[dict[str, list[str]]] = {
    "metric_names": [],
    "metric_states": [],
    "composite_names": [],
    "composite_states": [],
}
FLEET: Final = {
    "balancer": "app/front/1",
    "least": 1,
    "alarms": [],
    "colours": {name: {"group": name, "targets": name, "series": name} for name in ("blue", "green")},
}
STATE: Final = {
    "from": "blue",
    "to": "green",
    "pace": {"settle": 0},
    "weights": {"blue": [100], "green": [0]},
    "blue": {"desired": 1, "most": 1},
    "green": {"desired": 0, "most": 1},
    "alarms": QUIET,
}


@pytest.fixture(scope="module", params=[sys.executable, RUNTIME], ids=["this-python", RUNTIME])
def deployed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Function]:
    python = found(request.param)
    if not python:
        pytest.skip(f"no {request.param} here")
    with function(python, tmp_path_factory.mktemp("function")) as running:
        yield running


@dataclass
class Both:
    """One rollout, judged by the function and by a simulation and a replay."""

    function: Function
    plan: CanaryPlan
    evidence: Evidence = field(default_factory=Evidence)
    records: list[dict[str, Any]] = field(default_factory=list)
    step: int = -1
    begun: int = FIRST
    minute: int = FIRST
    waiting: list[Batch] = field(default_factory=list)
    carried: str = ""

    def __post_init__(self) -> None:
        document = {"fleet": FLEET, "state": STATE | {"plan": self.plan.as_json()}, "name": "r", "at": at(self.minute)}
        self.carried = self.function("opens", document)[0]["carried"]

    def begin_step(self) -> None:
        """Begin a step; its first minute is the next but one."""
        self.step += 1
        given = {"carried": self.carried, "step": self.step, "at": at(self.minute)}
        self.carried = self.function("begins", given)[0]["carried"]
        self.begun = self.minute + 2
        if self.step == 0:
            self.minute = self.begun

    def after(self, canary: Arm, stable: Arm, *, late: bool = False) -> Judgement:
        """One more minute. Late counts are reported as missing, and arrive with the next evaluation."""
        self.waiting.append(Batch(self.minute, canary, stable))
        self.minute += 1
        metrics = answers(self.waiting, len(self.plan.latencies))
        if late:
            metrics[0]["StatusCode"] = "PartialData"
        seen = {"at": at(self.minute), "metrics": metrics, "alarms": QUIET, "record": {}, "carried": self.carried}
        told, ratios = self.function("looks", seen)
        known = [] if late else self.waiting
        ours = judge(self.plan, self.evidence, known, Moment(self.step, self.begun, max(self.begun, self.minute)))
        self.same(told, ratios, ours)
        self.evidence, self.carried = ours.evidence, told["carried"]
        self.waiting = self.waiting if late else []
        return ours

    def same(self, told: dict[str, Any], ratios: list[tuple[float, float]], ours: Judgement) -> None:
        record = json.loads(told["record"]["text"])
        self.records.append(record)
        assert canonical_json(record["verdict"]) == canonical_json(ours.verdict.as_json())
        assert record["evidence"] == ours.evidence.digest
        assert RolloutState.from_text(told["carried"]).evidence == ours.evidence
        assert ratios == [interval(self.plan, ours.evidence.steps, metric) for metric in range(len(METRICS))]

    def replayed(self) -> list[str | None]:
        return [entry.wrong for entry in replay(self.plan, self.records)]


def at(minute: int) -> str:
    return start_of(minute, 60)


def answers(batches: Sequence[Batch], latencies: int) -> list[dict[str, Any]]:
    """CloudWatch's responses: a series has no value where the count is zero."""
    found = []
    for name in ("canary", "stable"):
        arms = {at(batch.minute): getattr(batch, name) for batch in batches}
        series = {"requests": "requests", "5xx": "errors", "timed": "timed"}
        found.append(_series(f"{name}_2xx", {when: _good(arm) for when, arm in arms.items()}))
        for id_, attribute in series.items():
            found.append(_series(f"{name}_{id_}", {when: getattr(arm, attribute) for when, arm in arms.items()}))
        for number in range(latencies):
            slower = {when: arm.slower[number] for when, arm in arms.items() if arm.slower}
            found.append(_series(f"{name}_slower{number}", slower))
    return found


def _good(arm: Arm) -> Count:
    """Counts in which each request has a response."""
    good = arm.requests - arm.errors
    return good if math.isfinite(good) else 0


def _series(id_: str, counts: dict[str, Count]) -> dict[str, Any]:
    there = {when: count for when, count in counts.items() if count != 0}
    return {"Id": id_, "Timestamps": [*there], "Values": [*there.values()], "StatusCode": "Complete"}


# Drawn


def drawn_plan(chance: random.Random) -> CanaryPlan:
    shares = sorted({*chance.sample(range(1, 100), chance.randint(0, 3)), 100})
    bursts = chance.choice([0.0, 0.0, 0.3, 1.0])
    return plan_with(
        shares,
        bake_min=chance.randint(1, 3),
        bake_max=chance.randint(4, 10),
        alpha=chance.choice([0.05, 0.01, 0.001]),
        beta=chance.choice([0.05, 0.2]),
        objective=chance.choice([0.001, 0.01, 0.1]),
        margin=chance.choice([1.0, 1.1]),
        bursts=(bursts, *[0.0] * len(LATENCIES)),
        latencies=chance.choice([(), tuple(0.1 * 1.5**at for at in range(len(LATENCIES)))]),
    )


def drawn_arm(chance: random.Random, requests: int, rate: float, shares: Sequence[float]) -> Arm:
    """Random counts, some of them as of a reset or broken counter."""
    errors: Count = min(requests, round(requests * rate * chance.uniform(0.5, 1.5)))
    slower: list[Count] = [round(requests * share * chance.uniform(0.98, 1.0)) for share in shares]
    broken = chance.random()
    if broken < 0.02:
        errors = -1 - errors
    elif broken < 0.04:
        errors = chance.choice([math.nan, math.inf, errors + 0.5, requests + 1])
    elif broken < 0.06:
        slower.reverse()
    number = chance.choice([int, float])
    return Arm(number(requests), errors, number(requests), tuple(slower))


def drawn_minute(chance: random.Random, plan: CanaryPlan, share: float, digits: float) -> tuple[Arm, Arm]:
    """Nobody, or up to so many digits of requests; more often than not the versions are alike."""
    everyone = int(10 ** chance.uniform(0, digits)) if chance.random() < 0.9 else 0
    canary = min(everyone, round(everyone * share * chance.uniform(0.5, 1.5)))
    rate = chance.choice([0.0, 1.0, *[10 ** chance.uniform(-4, -1) for _ in range(6)]])
    shares = [10.0**-at * chance.uniform(0.3, 0.9) for at in range(len(plan.latencies))]
    worse = chance.choice([1.0, 1.0, 1.0, 10 ** chance.uniform(0, 2)])
    return drawn_arm(chance, canary, rate * worse, shares), drawn_arm(chance, everyone - canary, rate, shares)


def drawn_rollout(deployed: Function, chance: random.Random) -> Iterator[Judgement]:
    """Up to a billion requests; with bursts up to ten thousand, for the judge takes long to weigh more of them."""
    both = Both(deployed, drawn_plan(chance))
    digits = chance.choice([1, 2, 4] if any(both.plan.bursts) else [1, 2, 4, 6, 9])
    for step in both.plan.steps:
        both.begin_step()
        for _ in range(chance.randint(3, 12)):
            minute = drawn_minute(chance, both.plan, step.weight / 100, digits)
            yield both.after(*minute, late=chance.random() < 0.1)
    assert both.replayed() == [None] * len(both.records)


@pytest.mark.parametrize("wanted", [150, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_the_function_and_the_commands_agree_to_the_bit_on_drawn_batches(deployed: Function, wanted: int) -> None:
    chance, decisions, batches = random.Random(wanted), set(), 0
    while batches < wanted:
        for judged in drawn_rollout(deployed, chance):
            decisions.add(judged.verdict.decision)
            batches += 1
    assert decisions == set(Decision)


def test_the_function_has_nothing_but_its_archive_and_the_standard_library(deployed: Function) -> None:
    assert [file for file in deployed.files if file.endswith("pipeline/canary/judge.py")]
    assert not [file for file in deployed.files if "site-packages" in file or file.startswith(CHECKOUT)]


def test_floats_are_added_alike_by_every_python() -> None:
    """What is small beside the first is not lost one by one."""
    tiny = [math.log(1e-16)] * 10
    assert log_sum([0.0, *tiny]) == math.log(1 + 1e-15)


# Extremes

USUAL: Final = (Arm(150, 1), Arm(2850, 14))
EXTREMES: Final = {
    "zero traffic": ([(NO_REQUESTS, NO_REQUESTS)] * 60, Decision.UNDECIDED),
    "traffic of the canary alone": ([(Arm(150, 1), NO_REQUESTS)] * 5, Decision.CONTINUE),
    "zero errors": ([(Arm(150, 0), Arm(2850, 0))] * 6, Decision.ADVANCE),
    "all errors, of both": ([(Arm(150, 150), Arm(2850, 2850))] * 5, Decision.FROZEN),
    "all errors, of the canary": ([(Arm(150, 150), Arm(2850, 14))], Decision.ROLL_BACK),
    "a billion requests": ([(Arm(50_000_000, 250_000), Arm(950_000_000, 4_750_000))] * 5, Decision.ADVANCE),
    "a billion requests, of which some more fail": (
        [(Arm(50_000_000, 300_000), Arm(950_000_000, 4_750_000))],
        Decision.ROLL_BACK,
    ),
    "missing minutes": (
        [USUAL if entry % 3 == 0 else (NO_REQUESTS, NO_REQUESTS) for entry in range(30)],
        Decision.ADVANCE,
    ),
    "a counter reset": ([USUAL, (Arm(-3000, -20), Arm(-57_000, -280)), *[USUAL] * 5], Decision.ADVANCE),
    "more errors than requests": ([(Arm(10, 11), Arm(190, 1))], Decision.CONTINUE),
    "NaN": ([(Arm(150, math.nan), Arm(math.nan, 14))] * 5, Decision.CONTINUE),
    "infinitely many": ([(Arm(math.inf, 1), Arm(2850, 14))], Decision.CONTINUE),
}


@pytest.mark.parametrize("what", EXTREMES)
def test_counts_that_go_to_extremes_have_a_defined_verdict(deployed: Function, what: str) -> None:
    minutes, decision = EXTREMES[what]
    both = Both(deployed, plan_with())
    both.begin_step()
    result = [both.after(*minute).verdict for minute in minutes]
    assert result[-1].decision is decision
    assert all(math.isfinite(number) for verdict in result for number in (verdict.worse, verdict.better))


def test_minutes_that_are_told_late_count_as_if_they_had_not_been(deployed: Function) -> None:
    late, timely = Both(deployed, plan_with()), Both(deployed, plan_with())
    for both in (late, timely):
        both.begin_step()
        for number in range(6):
            judged = both.after(*USUAL, late=both is late and number < 5)
        assert judged.verdict.decision is Decision.ADVANCE
    assert late.evidence == timely.evidence
