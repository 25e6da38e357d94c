"""Serving plans: the capacity of each candidate at the objectives, the size of its fleet, and what that costs.

What may depend on chance does not: all candidates see the same requests, only closer together, and a search over a
fixed ladder of loads finds the capacity. It follows that a tighter objective never finds more capacity, that more
traffic never needs fewer instances, and that one more instance type never makes the best plan worse.

A replica gets its share of the traffic as a stream of its own. A load balancer that knows the outstanding requests does
better, so the plan errs on the safe side.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import get_context
from statistics import fmean
from typing import Final, TypeAlias

from nxpipe.emulator.hardware import Instance
from nxpipe.pipeline.config.prices import HOURS_A_MONTH, Price, Prices, Purchase
from nxpipe.pipeline.plan.candidates import RUNTIMES, Candidate, Lengths, PlannedModel, Refusal, Runtime, candidates
from nxpipe.pipeline.plan.schedulers import Replica, Scheduling, StepTimes
from nxpipe.pipeline.plan.simulation import Outcome, quantile_of, simulate
from nxpipe.pipeline.plan.steps import PredictedSteps
from nxpipe.pipeline.plan.traffic import Request, Traffic
from nxpipe.pipeline.predict.work import NotPredicted
from nxpipe.pipeline.util.errors import InputInvalid

_SEED: Final = 23
_STEP: Final = 1.045  # between two loads of the ladder
_LADDER: Final = 64  # the lowest load is 6 % of the highest
# Of what the programs can execute: above it a queue grows for longer than a simulation lasts.
_HIGHEST: Final = 0.95
_MOST: Final = 100_000  # instances of a fleet; more are refused
# EC2's instance-level service level agreement: 99.5 % of a month.
UNAVAILABLE: Final = 0.005
SPOT_INTERRUPTIONS: Final = 0.2  # a month: the Spot Instance Advisor's highest band begins there

_OBJECTIVE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s)(?:@p([0-9]{1,2}(?:\.[0-9]+)?))?", re.ASCII)
StepsOf: TypeAlias = Callable[[Candidate], Iterator[StepTimes]]  # the nominal times, then others of their interval


@dataclass(frozen=True)
class Interval:
    """A figure at the predicted times, at their fast and at their slow end; None for impossible or unknown."""

    nominal: float | None
    low: float | None
    high: float | None

    def times(self, factor: float) -> "Interval":
        return Interval(*(None if each is None else each * factor for each in (self.nominal, self.low, self.high)))

    def overlaps(self, other: "Interval") -> bool:
        """True unless one lies above the other; an unknown upper end is above all."""
        ends = [(each.low or 0.0, math.inf if each.high is None else each.high) for each in (self, other)]
        return ends[0][0] <= ends[1][1] and ends[1][0] <= ends[0][1]

    def document(self) -> dict[str, float | None]:
        return {"nominal": self.nominal, "low": self.low, "high": self.high}


def with_ends(nominal: str, low: str, high: str) -> str:
    """A figure with its ends in words; one without an interval is alone."""
    return nominal if low == nominal == high else f"{nominal} ({low} to {high})"


@dataclass(frozen=True)
class Objective:
    """A time that a share of the requests must not exceed."""

    seconds: float
    quantile: float = 0.95

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """`500ms`, `1.5s` or `500ms@p99`; p95 by default."""
        match = _OBJECTIVE.fullmatch(text)
        seconds = float(match[1]) / (1000 if match[2] == "ms" else 1) if match else 0.0
        quantile = float(match[3]) / 100 if match and match[3] else cls.quantile
        if seconds <= 0 or not 0 < quantile < 1:
            raise InputInvalid(f"{text!r} is not a time with a percentile, as in 500ms, 1.5s or 500ms@p99")
        return cls(seconds, quantile)

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:,.0f} ms at p{100 * self.quantile:g}"


@dataclass(frozen=True)
class ServingDemand:
    """What a plan must meet: traffic, objectives, and how instances may be bought."""

    traffic: Traffic
    rate: float  # requests a second
    ttft: Objective | None = None
    tpot: Objective | None = None
    availability: float = 0.999
    budget: float | None = None  # dollars a month
    region: str = "us-east-1"
    purchases: tuple[Purchase, ...] = ()  # none: on demand, or as EC2 sells a type that has no price on demand
    spot_interruptions: float = SPOT_INTERRUPTIONS
    rollouts: float = 4  # a month
    rollout_hours: float = 0.5  # that a rollout runs both versions, without the cold start
    simulated: int = 1000  # requests of one load of one candidate
    certain: bool = False  # layouts are chosen by the slowest of the predicted times, not by the nominal ones

    @cached_property
    def sample(self) -> tuple[Request, ...]:
        """The requests that every candidate sees, at one a second."""
        return tuple(self.traffic.requests(self.simulated, _SEED, 1.0))

    @cached_property
    def lengths(self) -> Lengths:
        known = (*self.sample, *self.traffic.log)
        return Lengths(max(each.prompt for each in known), max(each.prompt + each.output for each in known))

    @cached_property
    def prompt(self) -> float:
        return fmean(each.prompt for each in self.sample)

    @cached_property
    def output(self) -> float:
        return fmean(each.output for each in self.sample)

    @property
    def tokens(self) -> float:
        """Generated in a month."""
        return self.rate * self.output * 3600 * HOURS_A_MONTH


@dataclass(frozen=True)
class Load:
    """The highest load at which a replica meets the objectives, in requests a second, and what it then does."""

    rate: float
    limit: float  # that the programs can execute
    outcome: Outcome | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Fleet:
    """Instances that carry the traffic, and those that are there to be lost."""

    needed: int
    size: int


@dataclass(frozen=True)
class Plan:
    """One instance type, bought in one way, that meets the objectives."""

    candidate: Candidate
    load: Load
    purchase: Purchase
    fleet: Fleet
    sizes: Interval
    price: Price | None
    monthly: Interval
    per_million: Interval  # generated tokens
    cold_start: Interval
    surge: float  # dollars a month, of rollouts
    notes: tuple[str, ...] = ()

    @property
    def instance(self) -> Instance:
        return self.candidate.instance

    @property
    def hourly(self) -> float | None:
        return None if self.monthly.nominal is None else (self.monthly.nominal - self.surge) / HOURS_A_MONTH

    def within(self, budget: float | None) -> bool:
        return budget is None or (self.monthly.nominal is not None and self.monthly.nominal <= budget)


@dataclass(frozen=True)
class ServingPlan:
    """All plans, the cheapest first; those without a price last."""

    model: PlannedModel
    demand: ServingDemand
    plans: tuple[Plan, ...]
    refused: tuple[Refusal, ...]
    simulated: tuple[tuple[Candidate, Load], ...] = field(repr=False)

    @property
    def best(self) -> Plan | None:
        """The cheapest plan within the budget."""
        first = next(iter(self.plans), None)
        return first if first and first.within(self.demand.budget) else None

    def is_close(self, plan: Plan) -> bool:
        """Whether the interval of a plan's cost overlaps that of the cheapest one."""
        first = self.plans[0]
        return plan is not first and plan.price is not None and plan.per_million.overlaps(first.per_million)


def predicted_steps(candidate: Candidate) -> Iterator[StepTimes]:
    """The step times of a candidate's programs behind a server: nominal, and with both factors at either end."""
    nominal = PredictedSteps(
        candidate.model.name,
        candidate.instance.name,
        candidate.tp,
        candidate.cores,
        candidate.runtime.framework,
        candidate.model.architecture,
        tier="serving",
    )
    yield nominal
    yield replace(nominal, bound="low")
    yield replace(nominal, bound="high")


def plan_serving(
    model: PlannedModel,
    demand: ServingDemand,
    instances: Sequence[Instance],
    prices: Prices,
    steps: StepsOf = predicted_steps,
    *,
    runtimes: Sequence[Runtime] = RUNTIMES,
    workers: int | None = None,
) -> ServingPlan:
    """The plans of a model on instance types."""
    found, refused = candidates(model, instances, demand.lengths, runtimes)
    by_type = [[each for each in found if each.instance.name == instance.name] for instance in instances]
    jobs = [_Job(tuple(each), demand, steps) for each in by_type if each]
    results = _run(jobs, workers or min(len(jobs), os.cpu_count() or 1))
    plans: list[Plan] = []
    simulated: list[tuple[Candidate, Load]] = []
    for result in results:
        simulated += result.simulated
        refused += result.refused
        if result.best is not None:
            for item in _all_bought(result.best, demand, prices):
                (plans if isinstance(item, Plan) else refused).append(item)  # type: ignore[arg-type]
    ranked = sorted(plans, key=lambda plan: (plan.price is None, plan.per_million.nominal or 0.0, plan.instance.name))
    return ServingPlan(model, demand, tuple(ranked), tuple(refused), tuple(simulated))


@dataclass(frozen=True)
class _Job:
    """The candidates of one instance type."""

    candidates: tuple[Candidate, ...]
    demand: ServingDemand
    steps: StepsOf

    def reference(self, candidate: Candidate) -> tuple[StepTimes, float]:
        """The times by which a candidate is chosen, and its limit at them: nominal, or the slowest of the interval."""
        nominal, *others = self.steps(candidate) if self.demand.certain else [next(self.steps(candidate))]
        limits = [(_limit(candidate, steps, self.demand), number) for number, steps in enumerate((nominal, *others))]
        limit, number = min(limits)
        return (nominal, *others)[number], limit


@dataclass(frozen=True)
class _Capacity:
    """A candidate, its load at the nominal times, and the rates at the others of their interval."""

    candidate: Candidate
    load: Load
    rates: tuple[float, ...] = ()
    start: float = 0.0  # the slowest cold start of any layout, by which all are charged: a better one costs no more

    @property
    def ends(self) -> tuple[float, float, float]:
        """The nominal, the highest and the lowest rate of a replica."""
        return self.load.rate, max(self.load.rate, *self.rates), min(self.load.rate, *self.rates)


@dataclass(frozen=True)
class _Result:
    best: _Capacity | None
    simulated: tuple[tuple[Candidate, Load], ...]
    refused: tuple[Refusal, ...]


def _run(jobs: Sequence[_Job], workers: int) -> list[_Result]:
    """The results in the order of the jobs; the largest begins first."""
    if workers <= 1 or len(jobs) <= 1:
        return [_work(job) for job in jobs]
    order = sorted(range(len(jobs)), key=lambda number: -len(jobs[number].candidates))
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        results = dict(zip(order, pool.map(_work, [jobs[number] for number in order]), strict=True))
    return [results[number] for number in range(len(jobs))]


def _work(job: _Job) -> _Result:
    """The candidate of an instance type with the highest capacity of an instance.

    A candidate whose programs cannot execute more than another one carries at the objectives is not simulated: the
    result is the same."""
    bounded: list[tuple[float, int, Candidate, StepTimes]] = []
    refused: list[Refusal] = []
    predicted: list[Candidate] = []
    for number, candidate in enumerate(job.candidates):
        try:
            steps, limit = job.reference(candidate)
        except NotPredicted as reason:
            refused.append(Refusal(candidate.instance.name, _layout(candidate), str(reason)))
            continue
        predicted.append(candidate)
        if _is_out_of_reach(candidate, steps, job.demand):
            continue
        bounded.append((-limit * _HIGHEST * candidate.copies, number, candidate, steps))
    best: _Capacity | None = None
    simulated: list[tuple[Candidate, Load]] = []
    for most, _, candidate, steps in sorted(bounded, key=lambda each: each[:2]):
        carried = best.load.rate * best.candidate.copies if best else 0.0
        if -most <= carried:
            break
        load = capacity_of(candidate, steps, job.demand)
        simulated.append((candidate, load))
        if load.rate * candidate.copies > carried:
            best = _Capacity(candidate, load)
    if best is None:
        if predicted:
            refused.append(Refusal(predicted[0].instance.name, "", _unreachable(job, predicted)))
        return _Result(None, tuple(simulated), tuple(refused))
    nominal, *others = job.steps(best.candidate)
    if job.demand.certain:
        best = replace(best, load=capacity_of(best.candidate, nominal, job.demand))
    rates = tuple(capacity_of(best.candidate, steps, job.demand).rate for steps in others)
    start = max(cold_start(candidate).nominal or 0.0 for candidate in job.candidates)
    return _Result(replace(best, rates=rates, start=start), tuple(simulated), tuple(refused))


def _layout(candidate: Candidate) -> str:
    return f"tp {candidate.tp}, batch {candidate.replica.rows}, {candidate.runtime.name}"


def _unreachable(job: _Job, predicted: Sequence[Candidate]) -> str:
    """Why no layout of an instance type meets the objectives: the best that a request alone gets."""
    demand, first, between = job.demand, math.inf, math.inf
    shortest = min(demand.sample, key=lambda each: each.prompt)
    for candidate in predicted:
        steps, _ = job.reference(candidate)
        first = min(first, _prompt_seconds(candidate.replica, steps, shortest))
        between = min(between, _token_seconds(candidate.replica, steps, demand))
    objectives = [f"{name} {each}" for name, each in (("TTFT", demand.ttft), ("TPOT", demand.tpot)) if each]
    return (
        f"no layout meets {' and '.join(objectives)} at any load; the least TTFT is {first * 1e3:,.0f} ms and the "
        f"least TPOT {between * 1e3:,.1f} ms, of different layouts"
    )


def _prompt_seconds(replica: Replica, steps: StepTimes, request: Request) -> float:
    """The time that programs take for a prompt: what no scheduler undercuts."""
    if not replica.chunk:
        return steps.prefill(replica.bucket(request.prompt))
    total, at = 0.0, 0
    if replica.scheduler is Scheduling.NXPIPE:  # a row may hold the beginning that requests share
        at = min(request.shared, request.prompt - 1) // replica.chunk * replica.chunk
    while at < request.prompt:
        length = replica.bucket(min(replica.chunk, request.prompt - at))
        total += steps.prefill(length, at)
        at += replica.chunk
    return total


def _prompt_times(replica: Replica, steps: StepTimes, sample: Sequence[Request]) -> list[float]:
    by_length = {(each.prompt, each.shared): each for each in sample}
    seconds = {key: _prompt_seconds(replica, steps, each) for key, each in by_length.items()}
    return [seconds[each.prompt, each.shared] for each in sample]


def _token_seconds(replica: Replica, steps: StepTimes, demand: ServingDemand, rows: int | None = None) -> float:
    """The least time of a step that decodes. All servers but vllm-neuron compute all rows in it."""
    rows = rows or (1 if replica.scheduler is Scheduling.VLLM else replica.rows)
    shortest = min(each.prompt for each in demand.sample)
    return steps.decode(rows, max(replica.window(shortest + 1), replica.longest))


def _limit(candidate: Candidate, steps: StepTimes, demand: ServingDemand) -> float:
    """Requests a second that no schedule exceeds: each takes the time of its prompt, and its tokens their share of
    steps in which every row generates one."""
    replica = candidate.replica
    token = _token_seconds(replica, steps, demand, replica.rows) / replica.rows
    prompts = fmean(_prompt_times(replica, steps, demand.sample))
    return 1.0 / (prompts + token * fmean(each.output - 1 for each in demand.sample))


def _is_out_of_reach(candidate: Candidate, steps: StepTimes, demand: ServingDemand) -> bool:
    """Whether even an idle replica misses an objective."""
    if demand.tpot and _token_seconds(candidate.replica, steps, demand) > demand.tpot.seconds:
        return demand.output > 1
    if demand.ttft is None:
        return False
    times = _prompt_times(candidate.replica, steps, demand.sample)
    return quantile_of(times, demand.ttft.quantile) > demand.ttft.seconds


def capacity_of(candidate: Candidate, steps: StepTimes, demand: ServingDemand) -> Load:
    """The highest load of the ladder at which a replica meets the objectives; a rate of 0 if there is none.

    Bisection visits the same loads for all objectives, until one meets them and another does not: so the
    capacity at a tighter objective is never higher, even if meeting an objective is not quite monotone in the load."""
    limit = _limit(candidate, steps, demand)
    low, high = -1, _LADDER  # the load at `low` meets the objectives, that at `high` does not
    kept: Outcome | None = None
    while high - low > 1:
        middle = (low + high) // 2
        outcome = _simulated(candidate, steps, demand.sample, _rate(limit, middle))
        if _meets(outcome, demand):
            low, kept = middle, outcome
        else:
            high = middle
    return Load(_rate(limit, low) if low >= 0 else 0.0, limit, kept)


def _rate(limit: float, rung: int) -> float:
    return float(limit * _HIGHEST * _STEP ** (rung + 1 - _LADDER))


def _simulated(candidate: Candidate, steps: StepTimes, sample: Sequence[Request], rate: float) -> Outcome:
    requests = [Request(each.arrival / rate, each.prompt, each.output, each.shared) for each in sample]
    return simulate(requests, candidate.replica, steps)


def _meets(outcome: Outcome, demand: ServingDemand) -> bool:
    if outcome.refused:
        return False
    if demand.ttft and outcome.ttft_at(demand.ttft.quantile) > demand.ttft.seconds:
        return False
    return not (demand.tpot and outcome.tpot and outcome.tpot_at(demand.tpot.quantile) > demand.tpot.seconds)


def fleet_of(rate: float, capacity: float, availability: float, unavailable: float) -> Fleet | None:
    """The smallest fleet that carries the traffic with one host lost, and with the availability if hosts fail
    independently; None if there is none."""
    if capacity <= 0 or rate / capacity > _MOST:
        return None
    needed = max(1, math.ceil(rate / capacity * (1 - 1e-9)))
    size = needed + 1
    while _at_least(needed, size, 1 - unavailable) < availability:
        size += 1
        if size > 2 * needed + 100:
            return None
    return Fleet(needed, size)


def _at_least(needed: int, size: int, up: float) -> float:
    """The probability that so many of the instances are up."""
    down = 1 - up
    term, total = up**size, 0.0
    for lost in range(size - needed + 1):
        total += term
        term *= (size - lost) / (lost + 1) * down / up
    return total


# Start of a replica, from the start of the agent to its first answer. Fetch: 15 GiB in 42.7 s on two cores
# (benchmarks/agent_start.py, 2026-11-28). Load: Llama-3.1-405B in 85 s on the 16 chips of a trn2.48xlarge (AWS's
# tutorial). Then the runtime's 6.7 s (aws-neuron-sdk issue 1361), and what is left of the warm starts of Qwen3-8B on
# one chip of Trn2 that were published, 49 s (kiln) and 106.9 s (vllm-neuron).
_AGENT_SECONDS: Final = 2.0
_FETCH: Final = 15 * (1 << 30) / 42.7
_LOAD: Final = 0.6e9  # bytes a second and chip
_RUNTIME_SECONDS: Final = 6.7
_WARM_UP: Final = (39.0, 15.0, 73.0)


def cold_start(candidate: Candidate) -> Interval:
    """Seconds from the start of the agent on a new instance until it answers; EC2's own boot is not in it."""
    stored = 2.0 * candidate.model.parameters
    read = candidate.memory.weights * candidate.tp * candidate.copies
    fixed = _AGENT_SECONDS + _RUNTIME_SECONDS + stored / _FETCH + read / (_LOAD * candidate.instance.chips)
    nominal, low, high = (fixed + each for each in _WARM_UP)
    return Interval(nominal, low, high)


SOLD: Final = (Purchase.ON_DEMAND, Purchase.CAPACITY_BLOCK, Purchase.SPOT)  # the first that has a price, by default


def _all_bought(best: _Capacity, demand: ServingDemand, prices: Prices) -> Iterator[Plan | Refusal]:
    """A plan for each way of buying that has a price; one without money if none has."""
    name = best.candidate.instance.name
    priced = [each for each in demand.purchases or SOLD if prices.price(demand.region, name, each)]
    for purchase in demand.purchases if priced else ():
        if purchase not in priced:
            yield Refusal(name, str(purchase), f"its price in {demand.region} is unknown")
    chosen = priced if demand.purchases else priced[:1]
    for purchase in chosen or (demand.purchases or SOLD)[:1]:
        yield _bought(best, purchase, demand, prices)


def _bought(best: _Capacity, purchase: Purchase, demand: ServingDemand, prices: Prices) -> Plan | Refusal:
    """The plan of a candidate, bought in one way."""
    candidate, name = best.candidate, best.candidate.instance.name
    start = cold_start(candidate)
    price = prices.price(demand.region, name, purchase)
    notes = list(_notes(candidate, purchase, price, demand))
    unavailable = UNAVAILABLE
    if purchase is Purchase.SPOT:
        replaced = best.start / 3600 / HOURS_A_MONTH
        unavailable += demand.spot_interruptions * replaced
    fleet, *others = (
        fleet_of(demand.rate, each * candidate.copies, demand.availability, unavailable) for each in best.ends
    )
    if fleet is None:
        what = f"more than {_MOST:,} instances, or no fleet of them has an availability of {demand.availability:%}"
        return Refusal(name, str(purchase), what)
    sizes = Interval(fleet.size, *(each.size if each else None for each in others))
    if sizes.high is None:
        notes.append("at the slow end of the predicted times it misses the objectives at any load")
    surge_hours = demand.rollouts * (demand.rollout_hours + best.start / 3600)
    if purchase is Purchase.CAPACITY_BLOCK:
        surge_hours = 0.0  # instances of a block are updated in place
        notes.append("instances of a capacity block are updated in place, one at a time")
    if price is None:
        unknown = Interval(None, None, None)
        return Plan(candidate, best.load, purchase, fleet, sizes, None, unknown, unknown, start, 0.0, tuple(notes))
    of_rollouts = prices.price(demand.region, name, Purchase.ON_DEMAND) or price
    each = price.hourly * HOURS_A_MONTH + of_rollouts.hourly * surge_hours
    monthly = sizes.times(each)
    return Plan(
        candidate,
        best.load,
        purchase,
        fleet,
        sizes,
        price,
        monthly,
        monthly.times(1e6 / demand.tokens),
        start,
        fleet.size * of_rollouts.hourly * surge_hours,
        tuple(notes),
    )


def _notes(candidate: Candidate, purchase: Purchase, price: Price | None, demand: ServingDemand) -> Iterator[str]:
    name = candidate.instance.name
    if price is None:
        yield f"the price of {name} in {demand.region}, {purchase}, is unknown; it is not counted as zero"
    if purchase is Purchase.SPOT:
        yield (
            f"EC2 may refuse or reclaim spot instances; {demand.spot_interruptions:g} interruptions of an instance a "
            "month are assumed"
        )
    if purchase is Purchase.CAPACITY_BLOCK:
        yield "capacity blocks are sold for fixed dates and must be bought again before each ends"
    if candidate.runtime.scheduling is Scheduling.NXPIPE:
        yield f"{candidate.runtime.name}: {candidate.runtime.state}"
