"""What a plan can find out on a given service, step by step, and what it cannot."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from nxpipe.pipeline.canary.constants import METRIC_STAKES, OBJECTIVE_STAKES
from nxpipe.pipeline.canary.counts import METRICS
from nxpipe.pipeline.canary.evalues import bets_above, bets_below, stakes_by_step
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.drift import (
    Growth,
    Rate,
    best_chance,
    minutes_until,
    of_objective,
    of_pairs,
    of_ratio,
    together,
)
from nxpipe.pipeline.rollout.latency import AS_BEFORE, Slowness

POWER: Final = 0.8  # what is found less often within a step counts as undetectable there
_WORST: Final = 0.5  # of all requests; what is worse is simply broken
_SHARES: Final = (5, 10, 15, 20, 25, 30, 40, 50)


@dataclass(frozen=True)
class Service:
    rps: float
    base_error: float

    def arms(self, share: int, canary: float, stable: float) -> tuple[Rate, Rate]:
        requests = 60 * self.rps
        return Rate(requests * share / 100, canary), Rate(requests * (100 - share) / 100, stable)


@dataclass(frozen=True)
class Fault:
    """What may be wrong with a new version."""

    name: str
    error: float
    slowness: Slowness = AS_BEFORE


@dataclass(frozen=True)
class Prospect:
    """Of a fault that begins with the step: how often it is found within `bake_max`, and when."""

    fault: Fault
    chance: float
    median_minutes: float | None
    bad_requests: float | None  # beyond the usual ones, until it is found


@dataclass(frozen=True)
class Alternative:
    """What would find a fault that a step does not: with POWER, within the plan's `bake_max` but for the last."""

    shadow: float | None  # the share of traffic, in percent, that is answered twice
    share: int | None  # percent
    bake: float | None  # minutes


@dataclass(frozen=True)
class StepProspect:
    share: int
    advances: float | None  # the median of minutes until a healthy version does
    undecided: float  # the share of healthy versions that are not let on within `bake_max`
    faults: tuple[Prospect, ...]
    detectable_error: float | None  # the smallest error rate that is found with POWER


def faults_of(service: Service) -> tuple[Fault, ...]:
    base = service.base_error
    return (
        *(Fault(f"errors x {times}", min(_WORST, base * times)) for times in (2, 4, 10)),
        Fault("broken", _WORST),
        Fault("p99 + 20 %", base, Slowness(scale=1.2)),
        Fault("p99 + 50 %, tail", base, Slowness(tail=1.5)),
    )


def prospects(plan: CanaryPlan, service: Service) -> list[StepProspect]:
    return [_of_step(plan, service, number) for number in range(len(plan.steps))]


def alternative(plan: CanaryPlan, service: Service, fault: Fault) -> Alternative:
    """To the first step, for a fault that it does not find."""
    share = next((each for each in _SHARES if _chance(plan, service, fault, each) >= POWER), None)
    bake = minutes_until(against(plan, service, fault, 0, plan.steps[0].weight), POWER)
    errors = replace(fault, slowness=AS_BEFORE)
    shadow = next((each for each in (10.0, 25.0, 50.0, 100.0) if _seen_in_shadow(plan, service, errors, each)), None)
    return Alternative(shadow, share, bake)


def against(plan: CanaryPlan, service: Service, fault: Fault, number: int, share: int) -> list[Growth]:
    """Every bet that a fault from this step on may win."""
    bets = []
    needed = math.log(1 / plan.alpha) - math.log(stakes_by_step(len(plan.steps))[number])
    for metric, (new, old) in enumerate(_bad_chances(service, fault)):
        canary, stable = service.arms(share, new, old)
        if new <= old or plan.bursts[metric]:
            continue
        for at, bet in bets_above(plan.ratios, plan.margin):
            asked = needed - math.log(METRIC_STAKES[metric]) - bet
            bets.append(of_ratio(canary, stable, plan.ratios[at], plan.margin, asked))
    return together(bets)


def _bad_chances(service: Service, fault: Fault) -> Sequence[tuple[float, float]]:
    latencies = zip(fault.slowness.slower(), AS_BEFORE.slower(), strict=True)
    chances = [(fault.error, service.base_error), *latencies]
    assert len(chances) == len(METRICS)
    return chances


def _chance(plan: CanaryPlan, service: Service, fault: Fault, share: int) -> float:
    return best_chance(against(plan, service, fault, 0, share), plan.bake_max)


def in_favour(plan: CanaryPlan, service: Service, number: int) -> list[Growth]:
    """Every bet by which a healthy version may end this step."""
    step = plan.steps[number]
    canary, stable = service.arms(step.weight, service.base_error, service.base_error)
    needed = math.log(1 / plan.beta) + math.log(2)
    by_ratio = [
        of_ratio(canary, stable, plan.ratios[at], step.tolerates, needed - bet)
        for at, bet in bets_below(plan.ratios, step.tolerates)
    ]
    by_objective = [
        of_objective(canary, plan.objective, share, needed - math.log(bet)) for share, bet in OBJECTIVE_STAKES
    ]
    return together(by_ratio + by_objective)


def _of_step(plan: CanaryPlan, service: Service, number: int) -> StepProspect:
    share, healthy = plan.steps[number].weight, in_favour(plan, service, number)
    advances = minutes_until(healthy)
    return StepProspect(
        share,
        advances and max(advances, plan.bake_min),
        1 - best_chance(healthy, plan.bake_max),
        tuple(_prospect(plan, service, fault, number) for fault in faults_of(service)),
        _detectable(plan, service, number),
    )


def _prospect(plan: CanaryPlan, service: Service, fault: Fault, number: int) -> Prospect:
    share = plan.steps[number].weight
    bets = against(plan, service, fault, number, share)
    if not bets:
        return Prospect(fault, 0.0, None, None)
    median = minutes_until(bets)
    beyond = 60 * service.rps * share / 100 * (fault.error - service.base_error)
    return Prospect(fault, best_chance(bets, plan.bake_max), median, median and beyond * max(1.0, median))


def _detectable(plan: CanaryPlan, service: Service, number: int) -> float | None:
    """In tenths of the usual rate. The worse a version, the likelier it is found, so few rates are asked about."""

    def is_found(rate: float) -> bool:
        bets = against(plan, service, Fault("", rate), number, plan.steps[number].weight)
        return best_chance(bets, plan.bake_max) >= POWER

    rates = [rate for tenths in range(11, 1001) if (rate := service.base_error * tenths / 10) <= _WORST]
    at = bisect_left(rates, True, key=is_found)
    return rates[at] if at < len(rates) else None


def _seen_in_shadow(plan: CanaryPlan, service: Service, fault: Fault, percent: float) -> bool:
    pairs, new, old = 60 * service.rps * percent / 100, fault.error, service.base_error
    needed = math.log(1 / plan.alpha) - math.log(stakes_by_step(len(plan.steps))[0] * METRIC_STAKES[0])
    bets = [
        of_pairs(pairs * new * (1 - old), pairs * old * (1 - new), plan.ratios[at], plan.margin, needed - bet)
        for at, bet in bets_above(plan.ratios, plan.margin)
    ]
    return best_chance(together(bets), plan.bake_max) >= POWER


def advice(plan: CanaryPlan, service: Service, found: Sequence[StepProspect]) -> tuple[str, ...]:
    """What the first step does not find, and what would."""
    first = found[0]
    missed = [each for each in first.faults if each.chance < POWER]
    said = [_instead(plan, service, each) for each in missed]
    slow = [each.share for each in found if each.undecided > 1 - POWER]
    if slow:
        shares = " and ".join(f"{share} %" for share in slow)
        said.append(
            f"At {shares}, more than {1 - POWER:.0%} of healthy versions end undecided: bake longer, or raise "
            "max_error_rate further above the usual rate."
        )
    return tuple(said)


def _instead(plan: CanaryPlan, service: Service, missed: Prospect) -> str:
    fault, other = missed.fault, alternative(plan, service, missed.fault)
    ways = [
        other.shadow and f"shadow {other.shadow:g} % of requests before the first step",
        other.share and f"begin with a step of {other.share} %",
        other.bake and f"bake the first step for {_duration(other.bake)}",
    ]
    ways = [way for way in ways if way]
    how = f"To find it in {POWER:.0%}: {', or '.join(map(str, ways))}." if ways else "No share or shadow would find it."
    error = f" ({service.base_error:.2%} to {fault.error:.2%})" if fault.error != service.base_error else ""
    return (
        f"{fault.name}{error} is undetectable at {plan.steps[0].weight} % within {_duration(plan.bake_max)}: "
        f"found in {missed.chance:.0%} of rollouts. {how}"
    )


def _duration(minutes: float) -> str:
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
