"""A serving plan as one page."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from nxpipe.pipeline.config.prices import Purchase
from nxpipe.pipeline.plan.serve import Plan, ServingPlan
from nxpipe.pipeline.plan.serve_report import (
    FULL_SERVERS,
    GpuComparison,
    money,
    money_between,
    pareto,
    payback,
    price_dates,
    steps_of,
)
from nxpipe.pipeline.predict.constants import PREDICTED
from nxpipe.pipeline.util.page.charts import Bar, Marker, Scale, bars, plot
from nxpipe.pipeline.util.page.html import Child, Markup, tag
from nxpipe.pipeline.util.page.page import Section, bullets, heading, note, sheet, table, tiles, two

_GIB: Final = 1 << 30


def plan_page(plan: ServingPlan, comparison: GpuComparison) -> bytes:
    lead = list(_lead(plan, comparison))
    return sheet(f"Serving plan, {plan.model.name}", "Serving plan", lead, _sections(plan, comparison))


def _lead(plan: ServingPlan, comparison: GpuComparison) -> Iterator[Markup]:
    yield _header(plan, comparison)
    if sentence := comparison.verdict(plan):
        yield tag("p", tag("strong", sentence[:1].upper() + sentence[1:] + "."))
    if found := comparison.break_even(plan):
        yield tag("p", payback(*found, comparison.migration))
    if not plan.plans:
        yield tag("p", "No instance type meets this.")


def _sections(plan: ServingPlan, comparison: GpuComparison) -> Iterator[Section]:
    if plan.plans:
        yield Section("Cost of a million generated tokens", _costs(plan, comparison))
        yield Section("Plans", [_plans(plan), note(FULL_SERVERS)])
        if points := _scatter(plan):
            yield Section("Tokens for a dollar against time between tokens", points)
        yield Section("What bounds each program", list(_steps(plan)), "program")
    if comparison.gpus:
        yield Section("GPUs", _gpus(comparison))
    if notes := [*comparison.silent, *map(str, plan.refused)]:
        yield Section("Not possible, or not known", bullets(notes))


def _header(plan: ServingPlan, comparison: GpuComparison) -> Markup:
    demand = plan.demand
    objectives = " · ".join(f"{name} {each}" for name, each in (("TTFT", demand.ttft), ("TPOT", demand.tpot)) if each)
    figures = [
        (f"{demand.rate:g}/s", "requests"),
        (f"{demand.prompt:,.0f}", "tokens of a prompt"),
        (f"{demand.output:,.0f}", "tokens of an answer"),
    ]
    if best := plan.best:
        figures += [
            (f"{best.fleet.size}", f"{best.instance.name}, {best.purchase}; one may be lost"),
            (money(best.monthly.nominal), "a month"),
            (money(best.per_million.nominal), "for 1M generated tokens"),
        ]
    about = (
        f"{price_dates(plan, comparison.gpus).capitalize()}. Times are those of {PREDICTED} with 90 % intervals. "
        "Costs are those of instances and of rollouts; load balancers, storage and transfer are not in them."
    )
    facts = [tag("code", plan.model.name), f" · {demand.region} · {objectives or 'no objective of latency'}"]
    return tag("div", heading("Serving plan", facts, about), tiles(figures))


def _costs(plan: ServingPlan, comparison: GpuComparison) -> Markup:
    """A bar for each plan and GPU, and a line over its interval."""
    named = [
        (_named(each.fleet.size, each.instance.name, each.purchase), each.per_million, "r-tensor")
        for each in plan.plans
    ]
    named += [
        (_named(each.sizes.nominal or 0, each.instance, each.purchase), each.per_million, "r-dma")
        for each in comparison.gpus
    ]
    known = [each for each in named if each[1].nominal is not None]
    if not known:
        return tag("p", "No price is known.")
    rows = [
        Bar(
            f"{name}: {money_between(cost)}",
            [(colour, cost.nominal or 0.0)],
            (cost.low or 0.0, math.inf if cost.high is None else cost.high),
        )
        for name, cost, colour in known
    ]
    key = [("r-tensor", "Neuron"), ("r-dma", "GPUs at unlimited load")]
    about = "The line is the 90 % interval; it is cut where it leaves the chart."
    return bars("Dollars for a million generated tokens", about, rows, key=key)


def _named(size: float, instance: str, purchase: Purchase) -> str:
    return f"{size:.0f} × {instance}" + ("" if purchase is Purchase.ON_DEMAND else f", {purchase}")


def _plans(plan: ServingPlan) -> Markup:
    rows = [_plan(plan, each) for each in plan.plans]
    columns = ("instances", "$ for 1M tokens", "$ a month", "TTFT p95", "TPOT p95", "cold start", "memory of a core")
    return table(columns, rows, "Plans")


def _plan(plan: ServingPlan, each: Plan) -> tuple[Child, ...]:
    candidate, outcome = each.candidate, each.load.outcome
    replica = candidate.replica
    remarks = [*each.notes]
    if plan.is_close(each):
        remarks.insert(0, "too close to call")
    if each.price is not None and not each.within(plan.demand.budget):
        remarks.insert(0, "over budget")
    start, memory = each.cold_start, candidate.memory
    return (
        tag(
            "div",
            tag("strong", f"{each.fleet.size} × {candidate.instance.name}"),
            tag("small", f"{each.purchase}; {candidate.copies} × tp {candidate.tp}, batch {replica.rows}, "
                f"{candidate.runtime.name}"),
            [tag("small", remark) for remark in remarks],
        ),
        two(*_between(each)),
        money(each.monthly.nominal),
        _ms(outcome.ttft_at(0.95)) if outcome else "–",
        _ms(outcome.tpot_at(0.95)) if outcome and outcome.tpot else "–",
        two(f"{start.nominal:,.0f} s", f"{start.low:,.0f} to {start.high:,.0f} s"),
        two(f"{memory.need / _GIB:.1f} GiB", f"of {memory.capacity / _GIB:.1f} GiB"),
    )  # fmt: skip


def _between(each: Plan) -> tuple[str, str]:
    cost = each.per_million
    if cost.nominal is None:
        return "unknown", ""
    return money(cost.nominal), f"{money(cost.low)} to {money(cost.high) if cost.high is not None else 'no limit'}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:,.1f} ms"


def _scatter(plan: ServingPlan) -> Markup | None:
    points = pareto(plan)
    if len(points) < 2:
        return None
    x = Scale.over([point.tpot for point in points], "median time between tokens", log=True, shown=_ms,
                  marks=_spread([point.tpot for point in points]))  # fmt: skip
    y = Scale.over([point.tokens_per_dollar for point in points], "tokens for a dollar",
                  shown=lambda value: f"{value / 1e6:.3g}M")  # fmt: skip
    marks = [
        Marker(
            point.tpot,
            point.tokens_per_dollar,
            point.mark,
            f"{point.candidate.title}: {point.tokens_per_dollar:,.0f} tokens for a dollar, {_ms(point.tpot)} between",
            point.is_best,
        )
        for point in sorted(points, key=lambda each: each.is_best)
    ]
    legend = dict(sorted({point.mark: point.candidate.instance.name for point in points}.items()))
    named = ", ".join(f"{mark}: {name}" for mark, name in legend.items())
    return plot("Every simulated load", f"{named}. Red: no other is better in both.", x, y, points=marks)


def _spread(values: Sequence[float]) -> list[float]:
    """The ends and the middle of a logarithmic range."""
    low, high = min(values), max(values)
    return sorted({low, (low * high) ** 0.5, high})


def _steps(plan: ServingPlan) -> Iterator[Markup]:
    for candidate in {each.candidate.title: each.candidate for each in plan.plans}.values():
        rows = []
        for step in steps_of(candidate, plan.demand):
            found = step.prediction
            if found is None:
                rows.append((step.name, "–", step.reason, "–"))
            else:
                time = two(f"{found.value:,.1f} ms", f"{found.low:,.1f} to {found.high:,.1f} ms")
                rows.append((step.name, time, found.bound, f"{found.floor_seconds * 1e3:,.1f} ms"))
        yield tag("h3", candidate.title)
        yield table(
            ("program", "time", "bound by", "floor"), rows, f"Programs of {candidate.title}", words=("bound by",)
        )


def _gpus(comparison: GpuComparison) -> Markup:
    rows = [
        (
            tag(
                "div",
                tag("strong", f"{each.sizes.nominal:.0f} × {each.instance}"),
                tag("small", each.measurement.basis),
            ),
            money_between(each.per_million),
            money(each.monthly.nominal),
            {None: "unknown", True: "yes", False: "no"}[each.measurement.meets],
        )
        for each in comparison.gpus
    ]
    return table(("instances", "$ for 1M tokens", "$ a month", "meets the objectives"), rows, "GPUs",
                 words=("meets the objectives",))  # fmt: skip
