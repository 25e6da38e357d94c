"""The traffic that a simulation draws, minute by minute: what CloudWatch would count, with the realised numbers."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from nxpipe.pipeline.canary.counts import Arm, Batch
from nxpipe.pipeline.canary.likelihood import Tallies
from nxpipe.pipeline.rollout.latency import AS_BEFORE, Slowness

Scenario: TypeAlias = Literal["steady", "incident", "bursty", "late"]

_BLOCK: Final = 8  # minutes drawn at once
INCIDENT: Final = Slowness(scale=1.5)
INCIDENT_ERRORS: Final = 10.0  # times as many
INCIDENT_MINUTES: Final = 10
INCIDENT_BEGINS: Final = 30  # at the latest
_LATE: Final = 50  # percent: the share under whose load a late canary fails


@dataclass(frozen=True)
class World:
    """What is true, and what the judge has to find out."""

    scenario: Scenario
    rps: float
    base_error: float
    canary_error: float
    slowness: Slowness = AS_BEFORE  # of the canary
    burst: float = 0.5  # coefficient of variation of a version's error rate from minute to minute, when bursty

    @property
    def healthy(self) -> bool:
        return self.canary_error == self.base_error and self.slowness == AS_BEFORE


class Traffic:
    """One rollout's minutes. Its draws depend on the generator alone, so a seed is a rollout."""

    def __init__(self, world: World, random: np.random.Generator) -> None:
        self._world = world
        self._random = random
        self._incident = range(0)
        if world.scenario == "incident":
            begins = int(random.integers(INCIDENT_BEGINS))
            self._incident = range(begins, begins + INCIDENT_MINUTES)

    def minutes(self, first: int, share: int) -> Iterator[Batch]:
        """With this percentage of traffic at the canary, from this minute on and without end."""
        fails = self._world.scenario != "late" or share >= _LATE
        for begin in itertools.count(first, _BLOCK):
            minutes = range(begin, begin + _BLOCK)
            requests = self._random.poisson(60 * self._world.rps, _BLOCK)
            at_canary = self._random.binomial(requests, share / 100)
            canary = self._arms(minutes, at_canary, fails)
            stable = self._arms(minutes, requests - at_canary, False)
            yield from map(Batch, minutes, canary, stable)

    def history(self, minutes: int, share: int) -> list[Tallies]:
        """The errors of minutes in which nothing differed: of a share of all hosts, beside the rest."""
        nothing_new = Traffic(_as_before(self._world), self._random)
        batches = itertools.islice(nothing_new.minutes(INCIDENT_BEGINS + INCIDENT_MINUTES, share), minutes)
        return [
            ((int(each.canary.requests), int(each.canary.errors)), (int(each.stable.requests), int(each.stable.errors)))
            for each in batches
        ]

    def _arms(self, minutes: range, requests: "np.ndarray[Any, Any]", new: bool) -> list[Arm]:
        world = self._world
        trouble = np.isin(minutes, self._incident)
        rate = np.full(len(minutes), world.canary_error if new else world.base_error)
        rate = np.where(trouble, rate * INCIDENT_ERRORS, rate) * self._bursts(len(minutes))
        errors = self._random.binomial(requests, np.minimum(rate, 1))
        slowness = world.slowness if new else AS_BEFORE
        worse = Slowness(slowness.scale * INCIDENT.scale, slowness.tail)
        between = np.where(trouble[:, None], worse.between(), slowness.between())
        drawn = self._random.multinomial(requests, between)
        slower = np.cumsum(drawn[:, :0:-1], axis=1)[:, ::-1]
        columns = zip(requests.tolist(), errors.tolist(), slower.tolist(), strict=True)
        return [Arm(n, bad, n, tuple(slow)) for n, bad, slow in columns]

    def _bursts(self, minutes: int) -> "np.ndarray[Any, Any] | float":
        """By what an arm's rate is multiplied in each minute: on average by 1."""
        if self._world.scenario != "bursty":
            return 1.0
        shape = self._world.burst**-2
        return self._random.gamma(shape, 1 / shape, minutes)


def _as_before(world: World) -> World:
    return World(world.scenario, world.rps, world.base_error, world.base_error, burst=world.burst)
