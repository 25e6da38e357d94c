"""GPUs beside a plan: published and own measurements, what a fleet of them costs, and when a migration pays back."""

import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.config.prices import HOURS_A_MONTH, Price, Prices, Purchase
from nxpipe.pipeline.plan.load_tests import LoadTest
from nxpipe.pipeline.plan.serve import SOLD, UNAVAILABLE, Interval, Objective, Plan, ServingDemand, fleet_of
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.predict.work import Architecture
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.text import did_you_mean

_TABLE: Final = Path(__file__).with_name("gpus.toml")
_SHAPE: Final = ("layers", "hidden", "heads", "kv_heads", "intermediate", "experts", "expert_intermediate", "vocab")
_TERMS: Final = 3  # of the time of a request
_LEAST_ERROR: Final = 0.05  # of any interpolation


@dataclass(frozen=True)
class GpuRow:
    """One published measurement: tokens that one copy generates in a second, under unlimited load."""

    model: str
    gpu: str
    gpus: int
    precision: str
    prompt: int
    output: int
    tokens: float


@dataclass(frozen=True)
class GpuSource:
    name: str
    engine: str
    licence: str
    read: date
    rows: tuple[GpuRow, ...]


@dataclass(frozen=True)
class GpuTable:
    """The shipped measurements, and the GPUs of instance types."""

    sources: tuple[GpuSource, ...]
    instances: dict[str, tuple[str, int]]

    def require(self, name: str) -> tuple[str, int]:
        if name not in self.instances:
            hint = did_you_mean(name, self.instances) or f"; known are {', '.join(self.instances)}"
            raise InputInvalid(f"{name} is no GPU instance type of the table{hint}")
        return self.instances[name]


@cache
def gpu_table() -> GpuTable:
    document: dict[str, Any] = tomllib.loads(_TABLE.read_text())
    sources = tuple(
        GpuSource(
            each["name"], each["engine"], each["licence"], each["read"], tuple(GpuRow(*row) for row in each["rows"])
        )
        for each in document["sources"]
    )
    return GpuTable(sources, {name: (gpu, number) for name, (gpu, number) in document["instances"].items()})


@dataclass(frozen=True)
class GpuMeasurement:
    """What an instance generates in a second with the lengths of a demand, and from what that is known.

    `meets` is None if no latency is published."""

    instance: str
    tokens: Interval  # at the source's figure, the most and the least
    basis: str
    meets: bool | None
    concurrency: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True)
class GpuPlan:
    """A fleet of GPU instances for the same demand."""

    measurement: GpuMeasurement
    purchase: Purchase
    sizes: Interval
    price: Price | None
    monthly: Interval
    per_million: Interval

    @property
    def instance(self) -> str:
        return self.measurement.instance


def gpu_plans(
    model: Architecture,
    demand: ServingDemand,
    prices: Prices,
    names: Sequence[str] = (),
    own: Sequence[GpuMeasurement] = (),
) -> tuple[list[GpuPlan], list[str]]:
    """Fleets of the named instance types, else of all with a measurement of the model's shape and a price; the
    cheapest first. The sentences say which named types have none."""
    table = gpu_table()
    silent: list[str] = []
    found = list(own)
    measured = {each.instance for each in own}
    for name in names or table.instances:
        gpu, number = table.require(name)
        published = [] if name in measured else list(_published(model, demand, name, gpu, number))
        if published:
            found.append(max(published, key=lambda each: each.tokens.nominal or 0.0))
        elif name in names and name not in measured:
            silent.append(
                f"{name}: no public measurement of this model on {gpu} with a licence is known; measure it and pass "
                f"--measured FILE --measured-instance {name}"
            )
    plans = [plan for each in found for plan in _bought(each, demand, prices)]
    if not names:
        plans = [plan for plan in plans if plan.price is not None or plan.instance in measured]
        plans = list(_cheapest_of_each_gpu(plans, table))
    plans.sort(key=lambda plan: (plan.price is None, plan.per_million.nominal or 0.0, plan.instance))
    return plans, silent


def _cheapest_of_each_gpu(plans: Sequence[GpuPlan], table: GpuTable) -> Iterator[GpuPlan]:
    best: dict[tuple[str, Purchase], GpuPlan] = {}
    for plan in plans:
        gpu = table.instances.get(plan.instance, (plan.instance, 1))[0]
        known = best.get((gpu, plan.purchase))
        if known is None or _cost(plan) < _cost(known):
            best[gpu, plan.purchase] = plan
    return iter(best.values())


def _cost(plan: GpuPlan) -> float:
    return math.inf if plan.monthly.nominal is None else plan.monthly.nominal


def _shape(a: Architecture) -> tuple[int, ...]:
    return tuple(a.get(key) or (a["heads"] if key == "kv_heads" else 0) for key in _SHAPE)


def _published(
    model: Architecture, demand: ServingDemand, name: str, gpu: str, number: int
) -> Iterator[GpuMeasurement]:
    """What each source says of a model of the same shape on an instance type, by degree and precision."""
    for source in gpu_table().sources:
        groups: dict[tuple[int, str], list[GpuRow]] = {}
        for row in source.rows:
            known = architecture(row.model)
            if row.gpu == gpu and row.gpus <= number and known is not None and _shape(known) == _shape(model):
                groups.setdefault((row.gpus, row.precision), []).append(row)
        for (degree, precision), rows in groups.items():
            tokens, how = _interpolated(rows, demand.prompt, demand.output)
            copies = number // degree
            basis = f"{source.engine}, {precision}, {degree} GPU a copy, {how}; {source.name}, read {source.read}"
            yield GpuMeasurement(name, tokens.times(copies), basis, meets=None)


def _interpolated(rows: Sequence[GpuRow], prompt: float, output: float) -> tuple[Interval, str]:
    """Tokens a second of one copy at other lengths.

    Under full load a request takes a time of the GPU that grows with its prompt, with its answer, and with the cache
    that the answer reads: three terms, fitted to the rows by their relative errors. The largest of these is the
    interval. Of fewer rows than terms the nearest is taken as it is."""
    if len(rows) > _TERMS:
        terms = [_work(row.prompt, row.output) for row in rows]
        seconds = [row.output / row.tokens for row in rows]
        constants = _least_squares([[t / s for t in each] for each, s in zip(terms, seconds, strict=True)])
        if constants is not None:
            fitted = [_sum(constants, each) for each in terms]
            error = max(_LEAST_ERROR, *(abs(f / s - 1) for f, s in zip(fitted, seconds, strict=True)))
            tokens = output / _sum(constants, _work(prompt, output))
            how = f"interpolated between {len(rows)} rows, within {error:.0%} of each"
            return Interval(tokens, tokens * (1 + error), tokens * (1 - error)), how
    nearest = min(rows, key=lambda row: math.hypot(math.log(row.prompt / prompt), math.log(row.output / output)))
    tokens = nearest.tokens
    how = f"the nearest row: prompts of {nearest.prompt:,} and answers of {nearest.output:,} tokens"
    return Interval(tokens, tokens, tokens), how


def _work(prompt: float, output: float) -> tuple[float, float, float]:
    return prompt, output, output * (prompt + output / 2)


def _sum(constants: Sequence[float], terms: Sequence[float]) -> float:
    return math.fsum(c * t for c, t in zip(constants, terms, strict=True))


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Constants whose sum of terms is nearest to 1 in each row; None if one is negative."""
    n = len(rows[0])
    matrix = [
        [math.fsum(row[i] * row[j] for row in rows) for j in range(n)] + [math.fsum(row[i] for row in rows)]
        for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if not matrix[i][i]:
            return None
        for k in range(n):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [x - factor * y for x, y in zip(matrix[k], matrix[i], strict=True)]
    found = [matrix[i][n] / matrix[i][i] for i in range(n)]
    return found if min(found) >= 0 else None


def own_measurement(tests: Sequence[LoadTest], instance: str, demand: ServingDemand) -> GpuMeasurement:
    """The user's measurement of an instance: the highest load that meets the objectives, else the highest of all."""
    gpu_table().require(instance)
    judged = [(_test_meets(test, demand), test) for test in tests]
    meeting = [test for meets, test in judged if meets]
    chosen = max(meeting or [test for _, test in judged], key=lambda test: test.tokens)
    meets = _test_meets(chosen, demand)
    basis = f"your measurement by {chosen.tool}{f' of {chosen.date}' if chosen.date else ''}, {chosen.file}"
    if chosen.prompt and chosen.output and not _alike(chosen, demand):
        basis += f", with prompts of {chosen.prompt:,.0f} and answers of {chosen.output:,.0f} tokens, which differ"
    tokens = Interval(chosen.tokens, chosen.tokens, chosen.tokens)
    return GpuMeasurement(instance, tokens, basis, meets, chosen.concurrency, chosen.ttft(None), chosen.tpot(None))


def _alike(test: LoadTest, demand: ServingDemand) -> bool:
    pairs = ((test.prompt, demand.prompt), (test.output, demand.output))
    return all(measured is not None and 0.8 <= measured / planned <= 1.25 for measured, planned in pairs)


def _test_meets(test: LoadTest, demand: ServingDemand) -> bool | None:
    verdicts = [
        _within(found, objective)
        for found, objective in ((test.ttft, demand.ttft), (test.tpot, demand.tpot))
        if objective is not None
    ]
    return None if None in verdicts else all(verdicts)


def _within(found: Any, objective: Objective) -> bool | None:
    value: float | None = found(objective.quantile)
    return None if value is None else value <= objective.seconds * 1e3


def _bought(measurement: GpuMeasurement, demand: ServingDemand, prices: Prices) -> Iterator[GpuPlan]:
    """A fleet for each way of buying that has a price; one without money if none has."""
    ways = demand.purchases or SOLD
    priced = [each for each in ways if prices.price(demand.region, measurement.instance, each)]
    for purchase in (priced if demand.purchases else priced[:1]) or ways[:1]:
        yield from _fleets(measurement, demand, purchase, prices)


def _fleets(
    measurement: GpuMeasurement, demand: ServingDemand, purchase: Purchase, prices: Prices
) -> Iterator[GpuPlan]:
    """The fleet with one host lost, as that of a plan; rollouts run both versions as long."""
    carried = measurement.tokens.times(1 / demand.output)
    fleets = [
        fleet_of(demand.rate, each or 0.0, demand.availability, UNAVAILABLE)
        for each in (carried.nominal, carried.low, carried.high)
    ]
    if None in fleets:
        return
    sizes = Interval(*(float(fleet.size) for fleet in fleets if fleet))
    price = prices.price(demand.region, measurement.instance, purchase)
    if price is None:
        unknown = Interval(None, None, None)
        yield GpuPlan(measurement, purchase, sizes, None, unknown, unknown)
        return
    hours = HOURS_A_MONTH + (0.0 if purchase is Purchase.CAPACITY_BLOCK else demand.rollouts * demand.rollout_hours)
    monthly = sizes.times(price.hourly * hours)
    yield GpuPlan(measurement, purchase, sizes, price, monthly, monthly.times(1e6 / demand.tokens))


@dataclass(frozen=True)
class Migration:
    """The work of moving a model from GPUs: weeks of an engineer, dollars of one, and the share by which it may
    overrun."""

    weeks: float
    week_cost: float
    overrun: float = 0.5

    @property
    def cost(self) -> Interval:
        nominal = self.weeks * self.week_cost
        return Interval(nominal, nominal, nominal * (1 + self.overrun))


@dataclass(frozen=True)
class BreakEven:
    """Dollars that a month saves, and months until they have paid the migration; None: it never pays back."""

    saved: Interval
    months: Interval


def break_even(gpu: Interval, plan: Plan, migration: Migration) -> BreakEven | None:
    """None if one of the two has no price. `gpu` are dollars a month."""
    if gpu.nominal is None or plan.monthly.nominal is None:
        return None
    cheapest, dearest = plan.monthly.low or 0.0, plan.monthly.high
    most = (gpu.nominal if gpu.high is None else gpu.high) - cheapest
    least = None if dearest is None else (gpu.low or 0.0) - dearest
    saved = Interval(gpu.nominal - plan.monthly.nominal, least, most)
    cost = migration.cost
    months = Interval(_months(cost.nominal, saved.nominal), _months(cost.low, most), _months(cost.high, least))
    return BreakEven(saved, months)


def _months(cost: float | None, saved: float | None) -> float | None:
    return cost / saved if cost is not None and saved is not None and saved > 0 else None


_MISSES: Final = ", but {} misses the objectives at the slow end of its predicted times"


def verdict(best: Plan | None, gpus: Sequence[GpuPlan]) -> str:
    """One sentence: which is the better choice here."""
    priced = [plan for plan in gpus if plan.price is not None and plan.measurement.meets is not False]
    if not priced:
        return ""
    gpu = priced[0]
    unproven = (
        ""
        if gpu.measurement.meets
        else f"; {gpu.instance} was measured at unlimited load, which says nothing of these objectives"
    )
    if best is None:
        return f"a GPU is the better choice here: no Neuron plan meets the objectives, and {gpu.instance} may{unproven}"
    if best.price is None:
        return f"no comparison with {gpu.instance}: the Neuron plan has no known price"
    ours, theirs = best.per_million, gpu.per_million
    assert ours.nominal is not None
    assert theirs.nominal is not None
    figures = f"${theirs.nominal:,.2f} against ${ours.nominal:,.2f} for 1M tokens"
    if ours.overlaps(theirs):
        reason = "" if ours.high is not None else _MISSES.format(best.instance.name)
        return f"too close to call between {best.instance.name} and {gpu.instance}: {figures}{reason}{unproven}"
    if theirs.nominal < ours.nominal:
        return f"a GPU is the better choice here: {gpu.instance}, {figures}{unproven}"
    return f"the better choice is {best.instance.name}: {gpu.instance} costs {figures}"
