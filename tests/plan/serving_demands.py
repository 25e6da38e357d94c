"""Demands and step times for tests of serving plans."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nxpipe.pipeline.plan.candidates import RUNTIMES, Candidate
from nxpipe.pipeline.plan.schedulers import Scheduling
from nxpipe.pipeline.plan.serve import Objective, ServingDemand
from nxpipe.pipeline.plan.traffic import Arrivals, LengthDistribution, Traffic

LLAMA = "meta-llama/Llama-3.1-8B"
NXDI = [each for each in RUNTIMES if each.scheduling is Scheduling.NXDI]


def traffic(prompt: str = "uniform:50-400", output: str = "exponential:40") -> Traffic:
    return Traffic(LengthDistribution.parse(prompt), LengthDistribution.parse(output), Arrivals.POISSON)


def demand(rate: float = 5.0, **fields: Any) -> ServingDemand:
    """A demand of which few requests are simulated."""
    given: dict[str, Any] = {
        "ttft": Objective(1.0),
        "tpot": Objective(0.05),
        "region": "us-east-2",
        "simulated": 120,
    } | fields
    return ServingDemand(traffic(), rate, **given)


@dataclass(frozen=True)
class LinearSteps:
    """ProgramStep times in proportion to tokens, rows and context."""

    factor: float

    def prefill(self, tokens: int, context: int = 0, rows: int = 1) -> float:
        return self.factor * rows * (0.004 + 5e-5 * tokens + 1e-8 * tokens * context)

    def decode(self, rows: int, context: int) -> float:
        return self.factor * (0.006 + 2e-4 * rows + 1e-7 * rows * context)


def linear_steps(candidate: Candidate) -> Iterator[LinearSteps]:
    """The more cores, the faster; the interval is 25 % either way."""
    return (LinearSteps(factor * 4 / candidate.tp) for factor in (1.0, 0.8, 1.25))


def tighter(objective: Objective, factor: float) -> Objective:
    return replace(objective, seconds=objective.seconds * factor)
