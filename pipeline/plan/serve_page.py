"""A serving plan as one page without scripts and requests, in the style of the build report."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from nxpipe.pipeline.build.report.html import Child, Markup, sheet, tag
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

_ROW: Final = 34  # pixels of a bar
_BAR: Final = 12
_AXIS: Final = 22
_HEIGHT: Final = 260
_GIB: Final = 1 << 30


def plan_page(plan: ServingPlan, comparison: GpuComparison) -> bytes:
    return sheet(f"Serving plan, {plan.model.name}", _sections(plan, comparison))


def _sections(plan: ServingPlan, comparison: GpuComparison) -> Iterator[Markup]:
    yield _header(plan, comparison)
    if sentence := comparison.verdict(plan):
        yield tag("p", tag("strong", sentence[:1].upper() + sentence[1:] + "."))
    if found := comparison.break_even(plan):
        yield tag("p", payback(*found, comparison.migration))
    if not plan.plans:
        yield tag("p", "No instance type meets this.")
    else:
        yield tag("section", tag("h2", "Cost of a million generated tokens"), _costs(plan, comparison))
        yield tag("section", tag("h2", "Plans"), _plans(plan), tag("p", FULL_SERVERS, class_="about"))
        if points := _scatter(plan):
            yield tag("section", tag("h2", "Tokens for a dollar against time between tokens"), points)
        yield tag("section", tag("h2", "What bounds each program"), list(_steps(plan)), class_="program")
    if comparison.gpus:
        yield tag("section", tag("h2", "GPUs"), _gpus(comparison))
    if notes := [*comparison.silent, *map(str, plan.refused)]:
        yield tag("section", tag("h2", "Not possible, or not known"), tag("ul", [tag("li", each) for each in notes]))


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
    tiles = [tag("div", tag("strong", figure), tag("span", label)) for figure, label in figures]
    return tag(
        "header",
        tag("h1", "Serving plan"),
        tag("p", tag("code", plan.model.name), f" · {demand.region} · {objectives or 'no objective of latency'}"),
        tag(
            "p",
            f"{price_dates(plan, comparison.gpus).capitalize()}. Times are those of {PREDICTED} with 90 % intervals. "
            "Costs are those of instances and of rollouts; load balancers, storage and transfer are not in them.",
            class_="about",
        ),
        tag("div", tiles, class_="tiles"),
    )


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
    most = 1.05 * max(
        max(cost.nominal or 0.0, min(cost.high or 0.0, 3 * (cost.nominal or 0.0))) for _, cost, _ in known
    )
    drawn = []
    for number, (name, cost, colour) in enumerate(known):
        y = number * _ROW
        high = math.inf if cost.high is None else cost.high
        drawn += [
            tag("text", f"{name}: {money_between(cost)}", x=0, y=y + 12),
            tag("rect", x=0, y=y + 17, width=_share(cost.nominal or 0.0, most), height=_BAR, rx=2, class_=colour),
            tag("line", x1=_share(cost.low or 0.0, most), x2=_share(high, most), y1=y + 23, y2=y + 23, class_="roof"),
        ]  # fmt: skip
    described = "dollars for a million generated tokens, with intervals"
    chart = tag(
        "svg",
        tag("title", described),
        drawn,
        class_="roofline",
        height=len(known) * _ROW,
        role="img",
        aria_label=described,
    )
    caption = (
        "Blue: Neuron. Orange: GPUs at unlimited load. The line is the interval; it is cut where it leaves the chart."
    )
    return tag("figure", chart, tag("figcaption", caption), class_="chart")


def _named(size: float, instance: str, purchase: Purchase) -> str:
    return f"{size:.0f} × {instance}" + ("" if purchase is Purchase.ON_DEMAND else f", {purchase}")


def _share(part: float, whole: float) -> str:
    return f"{100 * min(part / whole, 1.0):.2f}%"


def _plans(plan: ServingPlan) -> Markup:
    rows = [_plan(plan, each) for each in plan.plans]
    return _table(
        ("instances", "$ for 1M tokens", "$ a month", "TTFT p95", "TPOT p95", "cold start", "of each core"), rows
    )


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
        _two(*_between(each)),
        money(each.monthly.nominal),
        _ms(outcome.ttft_at(0.95)) if outcome else "–",
        _ms(outcome.tpot_at(0.95)) if outcome and outcome.tpot else "–",
        _two(f"{start.nominal:,.0f} s", f"{start.low:,.0f} to {start.high:,.0f} s"),
        _two(f"{memory.need / _GIB:.1f} GiB", f"of {memory.capacity / _GIB:.1f} GiB"),
    )  # fmt: skip


def _between(each: Plan) -> tuple[str, str]:
    cost = each.per_million
    if cost.nominal is None:
        return "unknown", ""
    return money(cost.nominal), f"{money(cost.low)} to {money(cost.high) if cost.high is not None else 'no limit'}"


def _two(figure: str, small: str) -> Markup:
    return tag("span", figure, tag("small", small))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:,.1f} ms"


def _scatter(plan: ServingPlan) -> Markup | None:
    points = pareto(plan)
    if len(points) < 2:
        return None
    left, right = math.log(min(p.tpot for p in points)), math.log(max(p.tpot for p in points))
    top = 1.05 * max(p.tokens_per_dollar for p in points)
    marks = []
    for point in sorted(points, key=lambda each: each.is_best):
        across = 4 + 90 * (math.log(point.tpot) - left) / ((right - left) or 1)
        down = 14 + (_HEIGHT - _AXIS - 32) * (1 - point.tokens_per_dollar / top)
        title = (
            f"{point.candidate.title}: {point.tokens_per_dollar:,.0f} tokens for a dollar, {_ms(point.tpot)} between"
        )
        marks.append(
            tag(
                "svg",
                tag("title", title),
                tag("circle", cx=9, cy=9, r=8, class_="point whole" if point.is_best else "point"),
                tag("text", point.mark, x=9, y=13, text_anchor="middle"),
                x=f"{across:.2f}%",
                y=round(down, 1),
                width=18,
                height=18,
                class_="mark",
            )
        )
    ticks = [
        tag("text", _ms(math.exp(left)), x="0", y=_HEIGHT - 4),
        tag("text", _ms(math.exp(right)), x="100%", y=_HEIGHT - 4, text_anchor="end"),
        tag("text", f"{top / 1e6:.2f}M tokens for a dollar", x="0", y=12),
        tag("line", x1="0", x2="100%", y1=_HEIGHT - _AXIS, y2=_HEIGHT - _AXIS),
    ]
    described = "tokens for a dollar over the median time between tokens, of every simulated load"
    chart = tag(
        "svg",
        tag("title", described),
        ticks,
        marks,
        class_="roofline",
        height=_HEIGHT,
        role="img",
        aria_label=described,
    )
    legend = dict(sorted({point.mark: point.candidate.instance.name for point in points}.items()))
    named = ", ".join(f"{mark}: {name}" for mark, name in legend.items())
    caption = f"{named}. Red: no other is better in both. Across, logarithmic: median time between tokens."
    return tag("figure", chart, tag("figcaption", caption), class_="chart")


def _steps(plan: ServingPlan) -> Iterator[Markup]:
    for candidate in {each.candidate.title: each.candidate for each in plan.plans}.values():
        rows = []
        for step in steps_of(candidate, plan.demand):
            found = step.prediction
            if found is None:
                rows.append((step.name, "–", step.reason, "–"))
            else:
                time = _two(f"{found.value:,.1f} ms", f"{found.low:,.1f} to {found.high:,.1f} ms")
                rows.append((step.name, time, found.bound, f"{found.floor_seconds * 1e3:,.1f} ms"))
        yield tag("h3", candidate.title)
        yield _table(("program", "time", "bound by", "floor"), rows)


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
    return _table(("instances", "$ for 1M tokens", "$ a month", "meets the objectives"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Child]]) -> Markup:
    """A table whose first column is text, and all others figures."""
    heads = [tag("th", name, scope="col", class_="number" if n else None) for n, name in enumerate(columns)]
    body = [tag("tr", [tag("td", cell, class_="number" if n else None) for n, cell in enumerate(row)]) for row in rows]
    return tag("div", tag("table", tag("thead", tag("tr", heads)), tag("tbody", body)), class_="wide")
