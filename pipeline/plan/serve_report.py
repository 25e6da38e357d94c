"""A serving plan as text and as JSON; what bounds each step of its programs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Final

from nxpipe.pipeline.config.prices import Prices, Purchase
from nxpipe.pipeline.plan.candidates import Candidate
from nxpipe.pipeline.plan.gpus import BreakEven, GpuMeasurement, GpuPlan, Migration, break_even, gpu_plans, verdict
from nxpipe.pipeline.plan.serve import Interval, Plan, ServingDemand, ServingPlan, with_ends
from nxpipe.pipeline.predict.constants import PREDICTED, Prediction, predict
from nxpipe.pipeline.predict.measurements import Configuration
from nxpipe.pipeline.predict.work import NotPredicted
from nxpipe.pipeline.util.text import Column, for_terminal, style, table

_GIB: Final = 1 << 30
_SHOWN: Final = 8  # refusals
_HEIGHT: Final = 12  # rows of the chart
# Rows of full servers in benchmarks/serving_rows.py, 2026-11-28; docs/reference/planning.md.
FULL_SERVERS: Final = (
    "Nine published servers under full load all generated less than is predicted for them, 1.1 to 5.1 times: the upper "
    "ends are likelier than the lower ones."
)
_MARKS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class GpuComparison:
    """A plan beside GPUs, and the migration from the first of them."""

    gpus: tuple[GpuPlan, ...] = ()
    silent: tuple[str, ...] = ()
    migration: Migration | None = None

    def verdict(self, plan: ServingPlan) -> str:
        return verdict(plan.best, self.gpus)

    def break_even(self, plan: ServingPlan) -> tuple[GpuPlan, BreakEven] | None:
        gpu = next((each for each in self.gpus if each.price is not None), None)
        if self.migration is None or gpu is None or plan.best is None:
            return None
        found = break_even(gpu.monthly, plan.best, self.migration)
        return (gpu, found) if found else None


def compare_with_gpus(
    plan: ServingPlan,
    prices: Prices,
    names: Sequence[str] = (),
    own: Sequence[GpuMeasurement] = (),
    migration: Migration | None = None,
) -> GpuComparison:
    """A plan beside the named GPU instances and the user's own measurements; without any, those with public ones."""
    wanted = dict.fromkeys((*names, *(each.instance for each in own)))
    gpus, silent = gpu_plans(plan.model.architecture, plan.demand, prices, tuple(wanted), list(own))
    return GpuComparison(tuple(gpus), tuple(silent), migration)


def price_dates(plan: ServingPlan, gpus: Sequence[GpuPlan] = ()) -> str:
    """The dates of the prices in a report, oldest first."""
    prices = [*(each.price for each in plan.plans), *(each.price for each in gpus)]
    dates = sorted({price.date for price in prices if price})
    return "no price is known" if not dates else f"prices of {_span(dates)}"


def _span(dates: Sequence[date]) -> str:
    return f"{dates[0]}" if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def money(dollars: float | None) -> str:
    if dollars is None:
        return "unknown"
    return f"${dollars:,.2f}" if dollars < 1000 else f"${dollars:,.0f}"


def money_between(interval: Interval) -> str:
    """$2.83 ($2.12 to $3.53); a figure without an interval is alone."""
    if interval.nominal is None:
        return "unknown"
    high = money(interval.high) if interval.high is not None else "no limit"
    return with_ends(money(interval.nominal), money(interval.low), high)


def summary(plan: ServingPlan, comparison: GpuComparison, width: int) -> str:
    """The whole report for a terminal."""
    parts = [_requirements(plan), _table(plan, width)]
    if plan.plans:
        parts += [_closeness(plan), _chart(plan, width), _details(plan.plans[0], plan.demand)]
    if comparison.gpus or comparison.silent:
        parts.append(_gpus(plan, comparison, width))
    if plan.refused:
        parts.append(_refusals(plan))
    return "\n\n".join(filter(None, parts))


def _requirements(plan: ServingPlan) -> str:
    demand = plan.demand
    objectives = [f"{name} {each}" for name, each in (("TTFT", demand.ttft), ("TPOT", demand.tpot)) if each]
    lines = [
        style(for_terminal(plan.model.listed or plan.model.name), bold=True)
        + f": {demand.rate:g} requests/s, prompts of {demand.prompt:,.0f} and answers of {demand.output:,.0f} tokens",
        f"{', '.join(objectives) or 'no objective of latency'}; availability {_percent(demand.availability)} with one "
        "host lost",
        f"{demand.region}, {price_dates(plan)}; times of {PREDICTED}, 90 % intervals; instances and rollouts only",
    ]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.6g} %"


def _table(plan: ServingPlan, width: int) -> str:
    if not plan.plans:
        return style("No instance type meets this.", fg="red")
    header = (
        Column(""),
        Column("instances", whole=True),
        Column("bought", drop=3),
        Column("$ for 1M tokens", whole=True),
        Column("$ a month", drop=1),
        Column("TTFT", drop=4),
        Column("TPOT", drop=2),
        Column("load", drop=5),
    )
    rows = [_row(plan, each, mark) for each, mark in zip(plan.plans, _marks(plan), strict=True)]
    return table(header, rows, width)


def _marks(plan: ServingPlan) -> Iterator[str]:
    """A letter for each instance type, in the order of the plans."""
    types = list(dict.fromkeys(each.instance.name for each in plan.plans))
    for each in plan.plans:
        yield _MARKS[types.index(each.instance.name) % len(_MARKS)]


def _row(plan: ServingPlan, each: Plan, mark: str) -> tuple[str, ...]:
    demand, outcome = plan.demand, each.load.outcome
    ttft = tpot = "-"
    if outcome is not None:
        ttft = _ms(outcome.ttft_at(demand.ttft.quantile if demand.ttft else 0.95))
        tpot = _ms(outcome.tpot_at(demand.tpot.quantile if demand.tpot else 0.95)) if outcome.tpot else "-"
    over = "" if each.price is None or each.within(demand.budget) else ", over budget"
    return (
        mark,
        f"{each.fleet.size} x {each.instance.name}",
        str(each.purchase) + over,
        money_between(each.per_million),
        money(each.monthly.nominal),
        ttft,
        tpot,
        f"{demand.rate / (each.fleet.size * each.candidate.copies) / each.load.limit:.0%}",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:,.1f} ms"


def _closeness(plan: ServingPlan) -> str:
    first = plan.plans[0]
    sentences = []
    if not first.within(plan.demand.budget):
        sentences.append(
            f"No plan is within the budget of {money(plan.demand.budget)} a month; the cheapest costs "
            f"{money(first.monthly.nominal)}."
        )
    close = [f"{each.instance.name} ({each.purchase})" for each in plan.plans if plan.is_close(each)]
    if first.per_million.nominal is not None and first.per_million.high is None:
        sentences.append(
            f"At the slow end of the predicted times {first.instance.name} misses the objectives; --certain plans "
            "for it."
        )
    if close:
        sentences.append(f"Too close to call: the cost of {', '.join(close)} overlaps that of {first.instance.name}.")
    return "\n".join(sentences)


@dataclass(frozen=True)
class Point:
    """A simulated load of a candidate: tokens for a dollar against the time between them."""

    mark: str
    candidate: Candidate
    tpot: float
    tokens_per_dollar: float
    is_best: bool  # no other point has more tokens for a dollar and less time


def pareto(plan: ServingPlan) -> list[Point]:
    """The loads that were simulated on instance types with a price, the fastest first."""
    prices = {each.instance.name: each.price.hourly for each in reversed(plan.plans) if each.price}
    marks = dict(zip((each.instance.name for each in plan.plans), _marks(plan), strict=True))
    found = []
    for candidate, load in plan.simulated:
        hourly = prices.get(candidate.instance.name)
        if hourly and load.outcome and load.outcome.tpot:
            tokens = load.rate * candidate.copies * plan.demand.output * 3600 / hourly
            found.append((load.outcome.tpot_at(0.5), tokens, candidate))
    return [
        Point(
            marks[candidate.instance.name],
            candidate,
            tpot,
            tokens,
            not any(other[0] <= tpot and other[1] > tokens for other in found),
        )
        for tpot, tokens, candidate in sorted(found, key=lambda each: each[:2])
    ]


def _chart(plan: ServingPlan, width: int) -> str:
    """Points of a scatter chart: a letter for an instance type, small where another one is better in both."""
    points = pareto(plan)
    if len(points) < 2:
        return ""
    columns = max(24, min(width - 14, 72))
    left, right = math.log(min(p.tpot for p in points)), math.log(max(p.tpot for p in points))
    top = max(p.tokens_per_dollar for p in points)
    grid = [[" "] * columns for _ in range(_HEIGHT)]
    for point in sorted(points, key=lambda each: each.is_best):
        x = round((math.log(point.tpot) - left) / ((right - left) or 1) * (columns - 1))
        y = _HEIGHT - 1 - round(point.tokens_per_dollar / top * (_HEIGHT - 1))
        grid[y][x] = point.mark if point.is_best else point.mark.lower()
    labels = {0: f"{top / 1e6:.2f}M", _HEIGHT - 1: "0"}
    lines = [f"{labels.get(n, ''):>8} |{''.join(row).rstrip()}" for n, row in enumerate(grid)]
    ends = (_ms(math.exp(left)), _ms(math.exp(right)))
    axis = f"{'':>8} +{'-' * columns}\n{'':>10}{ends[0]}{ends[1]:>{columns - len(ends[0])}}"
    title = "Tokens for a dollar, against the median time between tokens; a capital letter: none is better in both"
    return "\n".join((title, *lines, axis))


def _details(plan: Plan, demand: ServingDemand) -> str:
    candidate = plan.candidate
    memory = candidate.memory
    start = plan.cold_start
    lines = [
        style(f"{plan.fleet.size} x {candidate.instance.name}", bold=True)
        + f": {candidate.copies} x tp {candidate.tp}, batch {candidate.replica.rows}, prompts of "
        f"{', '.join(map(str, candidate.replica.buckets))} tokens, {candidate.runtime.name}",
        f"  {plan.fleet.needed} carry the traffic; a replica takes {plan.load.rate:.2f} requests/s at the objectives",
        f"  {memory.need / _GIB:.1f} of {memory.capacity / _GIB:.1f} GiB of a core: "
        f"{memory.weights / _GIB:.1f} weights, {memory.cache / _GIB:.1f} KV cache, "
        f"{(memory.scratch + memory.code) / _GIB:.1f} scratch and code",
        f"  a new instance answers {start.nominal:,.0f} s ({start.low:,.0f} to {start.high:,.0f}) after its boot",
    ]
    if plan.purchase is not Purchase.CAPACITY_BLOCK:
        lines.append(
            f"  a rollout runs up to {2 * plan.fleet.size} instances; {demand.rollouts:g} a month cost "
            f"{money(plan.surge) if plan.price else 'an unknown sum'}"
        )
    if plan.price is not None:
        lines.append(f"  ${plan.price.hourly:,.4f} an hour, {plan.purchase}, {plan.price.date}: {plan.price.source}")
    return "\n".join([*lines, *(f"  {note}" for note in plan.notes), f"  {FULL_SERVERS}"])


def _gpus(plan: ServingPlan, comparison: GpuComparison, width: int) -> str:
    parts = []
    if comparison.gpus:
        rows = [
            (
                f"{each.sizes.nominal:.0f} x {each.instance}",
                str(each.purchase),
                money_between(each.per_million),
                money(each.monthly.nominal),
                {None: "unknown", True: "yes", False: "no"}[each.measurement.meets],
            )
            for each in comparison.gpus
        ]
        parts.append(table(("GPU instances", "bought", "$ for 1M tokens", "$ a month", "meets it"), rows, width))
        bases = dict.fromkeys(f"{each.instance}: {each.measurement.basis}" for each in comparison.gpus)
        parts.append("\n".join(map(for_terminal, bases)))
        parts.append(f"{plan.demand.region}, {price_dates(plan, comparison.gpus)}")
    parts += comparison.silent
    if sentence := comparison.verdict(plan):
        parts.append(style(sentence[:1].upper() + sentence[1:] + ".", bold=True))
    if found := comparison.break_even(plan):
        parts.append(payback(*found, comparison.migration))
    return "\n".join(parts)


def payback(gpu: GpuPlan, found: BreakEven, migration: Migration | None) -> str:
    assert migration is not None
    cost = migration.cost
    begin = (
        f"A migration from {gpu.instance} of {migration.weeks:g} weeks at {money(migration.week_cost)} costs "
        f"{money(cost.nominal)} to {money(cost.high)}"
    )
    if found.months.nominal is None:
        return f"{begin} and does not pay back: it saves nothing a month."
    last = "never" if found.months.high is None else f"{found.months.high:,.1f}"
    return (
        f"{begin}, saves {money(found.saved.nominal)} a month and pays back in {found.months.nominal:,.1f} months "
        f"({found.months.low or 0.0:,.1f} to {last})."
    )


def _refusals(plan: ServingPlan) -> str:
    listed = [f"  {each}" for each in plan.refused[:_SHOWN]]
    left = len(plan.refused) - len(listed)
    return "\n".join(["Not possible:", *listed, *([f"  and {left} more; --json lists all"] if left else [])])


@dataclass(frozen=True)
class ProgramStep:
    """A program of a candidate, its predicted time, and the term that takes most of it."""

    name: str
    prediction: Prediction | None
    reason: str = ""

    def document(self) -> dict[str, Any]:
        found = self.prediction
        if found is None:
            return {"program": self.name, "reason": self.reason}
        times = {"ms": found.value, "low_ms": found.low, "high_ms": found.high}
        return {"program": self.name, **times, "bound_by": found.bound, "floor_ms": found.floor_seconds * 1e3}

    def __str__(self) -> str:
        found = self.prediction
        if found is None:
            return f"  {self.name}: {self.reason}"
        return (
            f"  {self.name}: {found.value:,.1f} ms ({found.low:,.1f} to {found.high:,.1f}), bound by {found.bound}; "
            f"floor {found.floor_seconds * 1e3:,.1f} ms"
        )


def steps_of(candidate: Candidate, demand: ServingDemand) -> list[ProgramStep]:
    """The programs of a candidate: each prompt length, and a token at the middle of the answers."""
    context = round(demand.prompt + demand.output / 2)
    rows = candidate.replica.rows
    found = [_step(f"prompt of {each:,} tokens", candidate, "prefill", 1, each) for each in candidate.replica.buckets]
    found.append(_step(f"a token of {rows} rows at {context:,}", candidate, "decode", rows, context))
    return found


def _step(name: str, candidate: Candidate, phase: str, rows: int, sequence: int) -> ProgramStep:
    configuration = Configuration(
        family=f"llm-{phase}",
        model=candidate.model.name,
        instance=candidate.instance.name,
        metric="ttft_ms" if phase == "prefill" else "tpot_ms",
        cores=candidate.cores,
        tp=candidate.tp,
        batch=rows,
        sequence=sequence,
        framework=candidate.runtime.framework,
    )
    try:
        return ProgramStep(name, predict(configuration, architecture=candidate.model.architecture))
    except NotPredicted as reason:
        return ProgramStep(name, None, str(reason))


def explanation(plan: ServingPlan) -> str:
    """What bounds the steps of each plan, and the candidates that were simulated."""
    parts = []
    for each in {found.candidate.title: found for found in plan.plans}.values():
        steps = "\n".join(map(str, steps_of(each.candidate, plan.demand)))
        parts.append(f"{each.candidate.title}\n{steps}\n  {_shares(each)}")
    lines = [
        f"  {candidate.title}: {load.rate * candidate.copies:.2f} of at most {load.limit * candidate.copies:.2f}"
        for candidate, load in plan.simulated
    ]
    parts.append("\n".join(["Simulated, in requests/s of an instance at the objectives:", *lines]))
    return "\n\n".join(parts)


def _shares(plan: Plan) -> str:
    outcome = plan.load.outcome
    if outcome is None:
        return "no load was found"
    return (
        f"at {plan.load.rate:.2f} requests/s its programs run {outcome.busy:.0%} of the time; "
        f"{plan.load.rate / plan.load.limit:.0%} of what they can execute"
    )


def document(plan: ServingPlan, comparison: GpuComparison) -> dict[str, Any]:
    """All of a report as JSON."""
    demand = plan.demand
    even = comparison.break_even(plan)
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "demand": {
            "requests_per_second": demand.rate,
            "prompt_tokens": demand.prompt,
            "output_tokens": demand.output,
            "ttft": _objective(demand, "ttft"),
            "tpot": _objective(demand, "tpot"),
            "availability": demand.availability,
            "budget_monthly": demand.budget,
            "region": demand.region,
        },
        "prices": price_dates(plan, comparison.gpus),
        "plans": [_plan_document(plan, each) for each in plan.plans],
        "refused": [{"instance": r.instance, "what": r.what, "reason": r.reason} for r in plan.refused],
        "pareto": [
            {"candidate": p.candidate.title, "tpot_ms": p.tpot * 1e3, "tokens_per_dollar": p.tokens_per_dollar}
            | {"best": p.is_best}
            for p in pareto(plan)
        ],
        "gpus": [_gpu_document(each) for each in comparison.gpus],
        "not_measured": list(comparison.silent),
        "verdict": comparison.verdict(plan),
        "break_even": even
        and {"from": even[0].instance, "saved": even[1].saved.document(), "months": even[1].months.document()},
    }


def _objective(demand: ServingDemand, name: str) -> dict[str, float] | None:
    found = getattr(demand, name)
    return found and {"ms": found.seconds * 1e3, "quantile": found.quantile}


def _plan_document(plan: ServingPlan, each: Plan) -> dict[str, Any]:
    candidate, memory, outcome = each.candidate, each.candidate.memory, each.load.outcome
    return {
        "instance": candidate.instance.name,
        "purchase": each.purchase.value,
        "runtime": candidate.runtime.name,
        "scheduler": candidate.runtime.scheduling.value,
        "tp": candidate.tp,
        "copies": candidate.copies,
        "batch": candidate.replica.rows,
        "buckets": list(candidate.replica.buckets),
        "kv_tokens": candidate.replica.capacity,
        "memory_bytes": {
            "need": memory.need,
            "capacity": memory.capacity,
            "weights": memory.weights,
            "cache": memory.cache,
        },
        "fleet": {"needed": each.fleet.needed, "size": each.fleet.size, "interval": each.sizes.document()},
        "requests_per_second_of_a_replica": each.load.rate,
        "executable_requests_per_second": each.load.limit,
        "busy": outcome and outcome.busy,
        "ttft_ms": outcome and _quantiles(outcome.ttft_at),
        "tpot_ms": outcome and outcome.tpot and _quantiles(outcome.tpot_at),
        "cold_start_seconds": each.cold_start.document(),
        "price": each.price
        and {"hourly": each.price.hourly, "date": each.price.date.isoformat(), "source": each.price.source},
        "hourly": each.hourly,
        "monthly": each.monthly.document(),
        "rollouts_monthly": each.surge,
        "per_million_tokens": each.per_million.document(),
        "too_close_to_call": plan.is_close(each),
        "within_budget": each.within(plan.demand.budget),
        "notes": list(each.notes),
        "steps": [step.document() for step in steps_of(candidate, plan.demand)],
    }


def _quantiles(at: Any) -> Mapping[str, float]:
    return {f"p{round(100 * q)}": at(q) * 1e3 for q in (0.5, 0.9, 0.95, 0.99)}


def _gpu_document(each: GpuPlan) -> dict[str, Any]:
    return {
        "instance": each.instance,
        "purchase": each.purchase.value,
        "basis": each.measurement.basis,
        "tokens_per_second_of_an_instance": each.measurement.tokens.document(),
        "meets_objectives": each.measurement.meets,
        "fleet": each.sizes.document(),
        "price": each.price and {"hourly": each.price.hourly, "date": each.price.date.isoformat()},
        "monthly": each.monthly.document(),
        "per_million_tokens": each.per_million.document(),
    }
