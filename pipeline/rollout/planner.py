"""Detection power of a plan on a given service, step by step, without simulation.

The log e-value of one bet is approximated by a Brownian motion with the drift and variance of that bet's exact
likelihood ratio. The chance to cross a threshold by a given minute then has a closed form (first passage, inverse
Gaussian), which takes microseconds instead of thousands of simulated rollouts.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

from nxpipe.pipeline.canary.constants import METRIC_STAKES, OBJECTIVE_STAKES
from nxpipe.pipeline.canary.evalues import bets_above, bets_below, stakes_by_step
from nxpipe.pipeline.canary.likelihood import log_likelihoods
from nxpipe.pipeline.canary.metrics import LATENCIES, METRICS
from nxpipe.pipeline.canary.plan import CanaryPlan

SPREAD: Final = 0.5  # sigma of the logarithm
_NORMAL: Final = NormalDist()
P95, _P99 = _NORMAL.inv_cdf(0.95) * SPREAD, _NORMAL.inv_cdf(0.99) * SPREAD
# Logarithms of LATENCIES relative to the median. Simulated latencies are lognormal.
LOG_THRESHOLDS: Final = (
    *(_NORMAL.inv_cdf(quantile) * SPREAD for quantile in (0.5, 0.75, 0.9, 0.95, 0.99)),
    _P99 + math.log(1.25),
    _P99 + math.log(1.6),
)
assert len(LOG_THRESHOLDS) == len(LATENCIES)


@dataclass(frozen=True)
class Slowness:
    """`scale` multiplies every latency. `tail` stretches those above p95 only, such that p99 rises by this factor."""

    scale: float = 1.0
    tail: float = 1.0

    @property
    def stretch(self) -> float:
        """Stretch of log latencies above p95."""
        return 1 + math.log(self.tail) / (_P99 - P95)

    def before(self, log_latency: float) -> float:
        """The baseline's latency at the same quantile; both are logarithms relative to the baseline's median."""
        log_latency -= math.log(self.scale)
        return log_latency if log_latency <= P95 else P95 + (log_latency - P95) / self.stretch

    def between(self) -> tuple[float, ...]:
        """Probabilities of the intervals that the thresholds divide latencies into."""
        below = [0.0, *(_NORMAL.cdf(self.before(log) / SPREAD) for log in LOG_THRESHOLDS), 1.0]
        return tuple(high - low for low, high in itertools.pairwise(below))

    def slower(self) -> tuple[float, ...]:
        """Probability of exceeding each threshold."""
        return tuple(1 - _NORMAL.cdf(self.before(log) / SPREAD) for log in LOG_THRESHOLDS)


UNCHANGED_LATENCY: Final = Slowness()


_WINDOW: Final = 400  # bad requests in the window over which the exact likelihood gives the drift
_MAX_MINUTES: Final = 60 * 24 * 365


@dataclass(frozen=True)
class Rate:
    """Expected requests of one version in a minute, and the probability that one of them is bad."""

    requests: float
    bad: float

    @property
    def mean(self) -> float:
        return self.requests * self.bad

    @property
    def variance(self) -> float:
        return self.mean * (1 - self.bad)


@dataclass(frozen=True)
class Growth:
    """Growth of one bet's log e-value, in nats per minute. `needed` is the threshold; `jump` is the largest single
    step.
    """

    needed: float
    drift: float
    variance: float
    jump: float = 0.0

    def chance(self, minutes: float) -> float:
        """The chance of having crossed the threshold by then. The overshoot is half a jump on average."""
        needed = self.needed + self.jump / 2
        if self.variance <= 0:
            return float(self.drift * minutes >= needed)
        spread = math.sqrt(self.variance * minutes)
        reflected = 2 * self.drift * needed / self.variance + _log_cdf((-self.drift * minutes - needed) / spread)
        return min(1.0, _cdf((self.drift * minutes - needed) / spread) + math.exp(min(0.0, reflected)))


def _cdf(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2


def _log_cdf(z: float) -> float:
    """log of the normal distribution; in the far tail, where a float underflows, by the first term of Mills' ratio."""
    return math.log(_cdf(z)) if z > -30 else -z * z / 2 - math.log(-z * math.sqrt(2 * math.pi))


def pooled_growth(bets: Sequence[Growth]) -> list[Growth]:
    """Growth of bets whose capitals are added: the others have grown when the fastest crosses, lowering its goal."""
    rising = [bet for bet in bets if 0 < bet.drift < math.inf]
    if not rising:
        return list(bets)
    soonest = min(bet.needed / bet.drift for bet in rising)
    grown = [bet.drift * soonest - bet.needed for bet in bets]
    bonus = math.log(math.fsum(math.exp(value - max(grown)) for value in grown))
    return [replace(bet, needed=bet.needed - bonus) for bet in bets]


def best_chance(bets: Sequence[Growth], minutes: float) -> float:
    return max((bet.chance(minutes) for bet in bets), default=0.0)


def minutes_until(bets: Sequence[Growth], chance: float = 0.5) -> float | None:
    """Minutes until one of these bets has crossed with this chance; None if that is more than a year."""
    low, high = 1.0, 1.0  # no evaluation before a minute is over
    while best_chance(bets, high) < chance:
        low, high = high, high * 2
        if high > _MAX_MINUTES:
            return None
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if best_chance(bets, middle) >= chance else (middle, high)
    return high


def ratio_growth(canary: Rate, stable: Rate, bet: float, null: float, needed: float) -> Growth:
    """Growth of the bet on an odds ratio of `bet` against a null of `null`."""
    window = _WINDOW / max(canary.mean + stable.mean, 1e-9)
    n, m = round(canary.requests * window), round(stable.requests * window)
    bad, others = round(canary.mean * window), round(stable.mean * window)
    thetas = [math.log(bet), math.log(null)]

    def grown(bad: int, others: int) -> float:
        at_bet, at_null = log_likelihoods((n, bad), (m, others), thetas)
        return at_bet - at_null

    now = grown(bad, others)
    of_canary, of_stable = grown(bad + 1, others) - now, grown(bad, others + 1) - now
    variance = of_canary**2 * canary.variance + of_stable**2 * stable.variance
    return Growth(needed, now / window, variance, max(of_canary, of_stable, 0.0))


def paired_growth(canary: float, stable: float, bet: float, null: float, needed: float) -> Growth:
    """Growth of a bet on paired requests; the rates are discordant pairs per minute."""
    normaliser = math.log((1 + bet) / (1 + null))
    of_canary = math.log(bet / null) - normaliser
    drift = of_canary * canary - normaliser * stable
    return Growth(needed, drift, of_canary**2 * canary + normaliser**2 * stable, max(of_canary, 0.0))


def objective_growth(canary: Rate, objective: float, share: float, needed: float) -> Growth:
    """Growth of the bet that the canary's error rate is this fraction of the objective."""
    of_good = math.log((1 - share * objective) / (1 - objective))
    if share == 0:
        # One error loses the bet, so only a service without errors wins it.
        return Growth(needed, of_good * canary.requests if canary.bad == 0 else -math.inf, 0.0)
    of_bad = math.log(share)
    drift = of_bad * canary.mean + of_good * (canary.requests - canary.mean)
    return Growth(needed, drift, (of_bad - of_good) ** 2 * canary.variance)


POWER: Final = 0.8  # a defect found less often within a step counts as undetectable there
_WORST: Final = 0.5  # error rate of a broken version
_SHARES: Final = (5, 10, 15, 20, 25, 30, 40, 50)


@dataclass(frozen=True)
class Service:
    rps: float
    base_error: float

    def arms(self, share: int, canary: float, stable: float) -> tuple[Rate, Rate]:
        requests = 60 * self.rps
        return Rate(requests * share / 100, canary), Rate(requests * (100 - share) / 100, stable)


@dataclass(frozen=True)
class Defect:
    """A defect that a new version may have."""

    name: str
    error: float
    slowness: Slowness = UNCHANGED_LATENCY


@dataclass(frozen=True)
class Prospect:
    """Detection of a defect that begins with the step: the chance within `bake_max`, and the time."""

    fault: Defect
    chance: float
    median_minutes: float | None
    bad_requests: float | None  # beyond those of the baseline, until detection


@dataclass(frozen=True)
class Alternative:
    """Changes of the plan that would detect a defect with POWER; all but `bake` within its `bake_max`."""

    shadow: float | None  # percent of requests that both versions serve
    share: int | None  # percent
    bake: float | None  # minutes


@dataclass(frozen=True)
class StepProspect:
    share: int
    advances: float | None  # median minutes until a healthy version advances
    undecided: float  # fraction of healthy versions that do not advance within `bake_max`
    faults: tuple[Prospect, ...]
    detectable_error: float | None  # smallest error rate that is detected with POWER


def defects_of(service: Service) -> tuple[Defect, ...]:
    base = service.base_error
    return (
        *(Defect(f"errors x {times}", min(_WORST, base * times)) for times in (2, 4, 10)),
        Defect("broken", _WORST),
        Defect("p99 + 20 %", base, Slowness(scale=1.2)),
        Defect("p99 + 50 %, tail", base, Slowness(tail=1.5)),
    )


def prospects(plan: CanaryPlan, service: Service) -> list[StepProspect]:
    return [_of_step(plan, service, number) for number in range(len(plan.steps))]


def alternative(plan: CanaryPlan, service: Service, fault: Defect) -> Alternative:
    """Alternatives to the first step for a defect that it does not detect."""
    share = next((share for share in _SHARES if _chance(plan, service, fault, share) >= POWER), None)
    bake = minutes_until(against(plan, service, fault, 0, plan.steps[0].weight), POWER)
    errors = replace(fault, slowness=UNCHANGED_LATENCY)
    shadow = next(
        (percent for percent in (10.0, 25.0, 50.0, 100.0) if _seen_in_shadow(plan, service, errors, percent)), None
    )
    return Alternative(shadow, share, bake)


def against(plan: CanaryPlan, service: Service, fault: Defect, number: int, share: int) -> list[Growth]:
    """The bets that win if the defect begins with this step."""
    bets = []
    needed = math.log(1 / plan.alpha) - math.log(_stake(plan, number))
    for metric, (new, old) in enumerate(_bad_chances(service, fault)):
        canary, stable = service.arms(share, new, old)
        if new <= old or plan.bursts[metric]:
            continue
        for at, bet in bets_above(plan.ratios, plan.margin):
            threshold = needed - math.log(METRIC_STAKES[metric]) - bet
            bets.append(ratio_growth(canary, stable, plan.ratios[at], plan.margin, threshold))
    return pooled_growth(bets)


def _stake(plan: CanaryPlan, number: int) -> float:
    """The stake of the bets that begin with a step; a shadow phase before the first one has a stake of its own."""
    return stakes_by_step(len(plan.phases))[number + (plan.shadow is not None)]


def _bad_chances(service: Service, fault: Defect) -> Sequence[tuple[float, float]]:
    latencies = zip(fault.slowness.slower(), UNCHANGED_LATENCY.slower(), strict=True)
    chances = [(fault.error, service.base_error), *latencies]
    assert len(chances) == len(METRICS)
    return chances


def _chance(plan: CanaryPlan, service: Service, fault: Defect, share: int) -> float:
    return best_chance(against(plan, service, fault, 0, share), plan.bake_max)


def in_favour(plan: CanaryPlan, service: Service, number: int) -> list[Growth]:
    """The bets by which a healthy version advances from this step."""
    step = plan.steps[number]
    canary, stable = service.arms(step.weight, service.base_error, service.base_error)
    needed = math.log(1 / plan.beta) + math.log(2)
    by_ratio = [
        ratio_growth(canary, stable, plan.ratios[at], step.tolerates, needed - bet)
        for at, bet in bets_below(plan.ratios, step.tolerates)
    ]
    by_objective = [
        objective_growth(canary, plan.objective, share, needed - math.log(bet)) for share, bet in OBJECTIVE_STAKES
    ]
    return pooled_growth(by_ratio + by_objective)


def _of_step(plan: CanaryPlan, service: Service, number: int) -> StepProspect:
    share, healthy = plan.steps[number].weight, in_favour(plan, service, number)
    advances = minutes_until(healthy)
    return StepProspect(
        share,
        advances and max(advances, plan.bake_min),
        1 - best_chance(healthy, plan.bake_max),
        tuple(_prospect(plan, service, fault, number) for fault in defects_of(service)),
        _detectable(plan, service, number),
    )


def _prospect(plan: CanaryPlan, service: Service, fault: Defect, number: int) -> Prospect:
    share = plan.steps[number].weight
    bets = against(plan, service, fault, number, share)
    if not bets:
        return Prospect(fault, 0.0, None, None)
    median = minutes_until(bets)
    beyond = 60 * service.rps * share / 100 * (fault.error - service.base_error)
    return Prospect(fault, best_chance(bets, plan.bake_max), median, median and beyond * max(1.0, median))


def _detectable(plan: CanaryPlan, service: Service, number: int) -> float | None:
    """Smallest detectable error rate in tenths of the baseline's. Detection rises with it, so bisection is valid."""

    def is_found(rate: float) -> bool:
        bets = against(plan, service, Defect("", rate), number, plan.steps[number].weight)
        return best_chance(bets, plan.bake_max) >= POWER

    rates = [rate for tenths in range(11, 1001) if (rate := service.base_error * tenths / 10) <= _WORST]
    at = bisect_left(rates, True, key=is_found)
    return rates[at] if at < len(rates) else None


def shadow_prospect(plan: CanaryPlan, service: Service) -> StepProspect | None:
    """The prospects of the plan's shadow phase, in which a healthy version answers alike; no user sees a failure."""
    phase = plan.shadow
    if phase is None:
        return None
    pairs = 60 * service.rps * phase.percent / 100
    needed = math.log(1 / plan.beta) + math.log(2)
    healthy = [
        objective_growth(Rate(pairs, service.base_error), plan.objective, fraction, needed - math.log(stake))
        for fraction, stake in OBJECTIVE_STAKES
    ]
    tolerated, alone = plan.steps[-1].tolerates, pairs * service.base_error * (1 - service.base_error)
    healthy += [
        paired_growth(alone, alone, plan.ratios[at], tolerated, needed - bet)
        for at, bet in bets_below(plan.ratios, tolerated)
    ]
    healthy = pooled_growth(healthy)
    advances = minutes_until(healthy)
    faults = []
    for fault in defects_of(service):
        bets = [] if fault.slowness != UNCHANGED_LATENCY else _shadow_bets(plan, service, fault, phase.percent)
        median = minutes_until(bets) if bets else None
        faults.append(Prospect(fault, best_chance(bets, phase.bake_max), median, 0.0))
    undecided = 1 - best_chance(healthy, phase.bake_max)
    return StepProspect(0, advances and max(advances, phase.bake_min), undecided, tuple(faults), None)


def _shadow_bets(plan: CanaryPlan, service: Service, fault: Defect, percent: float) -> list[Growth]:
    pairs, new, old = 60 * service.rps * percent / 100, fault.error, service.base_error
    stake = stakes_by_step(len(plan.phases))[0] if plan.shadow else stakes_by_step(1 + len(plan.steps))[0]
    needed = math.log(1 / plan.alpha) - math.log(stake * METRIC_STAKES[0])
    bets = [
        paired_growth(pairs * new * (1 - old), pairs * old * (1 - new), plan.ratios[at], plan.margin, needed - bet)
        for at, bet in bets_above(plan.ratios, plan.margin)
    ]
    return pooled_growth(bets)


def _seen_in_shadow(plan: CanaryPlan, service: Service, fault: Defect, percent: float) -> bool:
    return best_chance(_shadow_bets(plan, service, fault, percent), plan.bake_max) >= POWER


def advice(
    plan: CanaryPlan, service: Service, prospects: Sequence[StepProspect], *, mirrors: bool = True
) -> tuple[str, ...]:
    """Defects that neither the shadow phase nor the first step detects, and changes that would. `mirrors`: a fleet's
    server can copy requests, so that a shadow phase is possible."""
    first, shadow = prospects[0], shadow_prospect(plan, service)
    seen = {found.fault.name for found in shadow.faults if found.chance >= POWER} if shadow else set()
    missed = [prospect for prospect in first.faults if prospect.chance < POWER and prospect.fault.name not in seen]
    advices = [_instead(plan, service, prospect, mirrors) for prospect in missed]
    slow = [step.share for step in prospects if step.undecided > 1 - POWER]
    if slow:
        shares = " and ".join(f"{share} %" for share in slow)
        advices.append(
            f"At {shares}, more than {percent(1 - POWER)} of healthy versions end undecided: raise bake_max, or raise "
            "max_error_rate further above the error rate of the stable version."
        )
    return tuple(advices)


def _instead(plan: CanaryPlan, service: Service, missed: Prospect, mirrors: bool) -> str:
    fault, other = missed.fault, alternative(plan, service, missed.fault)
    present = plan.shadow.percent if plan.shadow else 0.0
    more = other.shadow if other.shadow and other.shadow > present else None
    limit = _duration(plan.bake_max)
    ways = [
        mirrors and more and f"mirror {more:g} % of requests in a shadow phase of up to {limit} ([rollout.shadow])",
        other.share and f"begin with a step of {other.share} %",
        other.bake and f"allow the first step {_duration(other.bake)} (bake_max)",
    ]
    ways = [way for way in ways if way]
    how = (
        f"To find it in {percent(POWER)}: {', or '.join(map(str, ways))}." if ways else "No larger first step finds it."
    )
    error = f" ({percent(service.base_error)} to {percent(fault.error)})" if fault.error != service.base_error else ""
    return (
        f"{fault.name}{error}: found in only {percent(missed.chance)} of rollouts at {plan.steps[0].weight} % within "
        f"{limit}. {how}"
    )


def percent(part: float) -> str:
    """A share or rate for people: whole percents from 10 % on."""
    return f"{100 * part:.0f} %" if part >= 0.1 or not part else f"{100 * part:.2g} %"


def _duration(minutes: float) -> str:
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
