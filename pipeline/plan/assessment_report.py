"""An assessment for people: a table for the terminal, Markdown, and one page without scripts."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from nxpipe.pipeline.build.report.html import Child, Markup, sheet, tag
from nxpipe.pipeline.plan.assessment import (
    AssessedWorkload,
    Assessment,
    MigrationDecision,
    MigrationPhase,
    dollars_of,
    phases,
)
from nxpipe.pipeline.plan.serve import Interval
from nxpipe.pipeline.util.text import for_markdown, table

_COLUMNS: Final = ("workload", "decision", "GPUs today", "on Neuron", "$ a month", "saves a month", "pays back")
_BLANK: Final = "________"
_METHOD: Final = (
    "Times are predictions of AWS's compiler with 90 % intervals, of decoders carried through a simulation of the "
    "server; the weeks of an engineer are estimates unless the portfolio gives them. A decision to move holds at the "
    "slow end of the predictions, with the migration paid within the horizon."
)


def text_page(found: Assessment, width: int) -> str:
    rows = [_cells(each) for each in found.workloads]
    lines = [
        f"{found.source.portfolio.name}: {_counted(found)}",
        _totals(found),
        "",
        table(_COLUMNS, rows, width),
    ]
    for each in found.workloads:
        lines += ["", f"{each.workload.name}: {each.decision}"]
        lines += [f"  {aspect}: {reason}" for aspect, reason in each.reasons]
    for phase in phases(found):
        lines += ["", f"{phase.title}: {', '.join(phase.workloads)}", *(f"  [ ] {task}" for task in phase.tasks)]
    return "\n".join((*lines, "", _METHOD))


def _counted(found: Assessment) -> str:
    return ", ".join(f"{len(found.of(decision))} {decision}" for decision in MigrationDecision)


def _totals(found: Assessment) -> str:
    months = found.source.portfolio.horizon_months
    if not found.of(MigrationDecision.MOVE):
        return "Nothing moves: no Neuron fleet is cheaper at the slow end of the predictions."
    return (
        f"What moves saves {dollars_of(found.saved)} a month, and {dollars_of(found.value)} in {months} months with "
        "the migration paid"
    )


def _cells(each: AssessedWorkload) -> tuple[str, ...]:
    gpu, fleet = each.workload.gpu, each.fleet
    bill = "unknown" if each.bill is None else f"${each.bill:,.0f}"
    months = each.months
    return (
        each.workload.name,
        str(each.decision),
        f"{gpu.count} x {gpu.instance}, {bill}",
        f"{fleet.size} x {fleet.instance}" if fleet else "none",
        dollars_of(fleet.monthly) if fleet else "",
        dollars_of(each.saved) if each.saved else "",
        f"{months:,.1f} months" if months is not None and each.decision is not MigrationDecision.STAY else "",
    )


def markdown(found: Assessment) -> str:
    rows = ["| " + " | ".join(map(for_markdown, _cells(each))) + " |" for each in found.workloads]
    lines = [
        f"# Migration assessment: {for_markdown(found.source.portfolio.name)}",
        "",
        f"{_counted(found)}. {_totals(found)}.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " --- |" * len(_COLUMNS),
        *rows,
    ]
    for each in found.workloads:
        lines += ["", f"## {for_markdown(each.workload.name)}: {each.decision}", ""]
        lines += [f"- **{aspect}**: {for_markdown(reason)}" for aspect, reason in each.reasons]
    for phase in phases(found):
        lines += ["", f"## Phase: {phase.title}", "", f"{', '.join(map(for_markdown, phase.workloads))}", ""]
        lines += ["| Task | Owner | Date |", "| --- | --- | --- |"]
        lines += [f"| {for_markdown(task)} | {_BLANK} | {_BLANK} |" for task in phase.tasks]
    return "\n".join((*lines, "", _METHOD, ""))


def html(found: Assessment) -> bytes:
    return sheet(f"Migration assessment, {found.source.portfolio.name}", _sections(found))


def _sections(found: Assessment) -> Iterator[Markup]:
    yield tag(
        "header",
        tag("p", "Migration assessment", class_="kicker"),
        tag("h1", found.source.portfolio.name),
        tag("p", f"{_counted(found)}. {_totals(found)}."),
    )
    yield tag("section", tag("h2", "Decisions"), _table(_COLUMNS, [_cells(each) for each in found.workloads]))
    if chart := _chart(found):
        yield tag("section", tag("h2", "Dollars saved in a month"), chart)
    for each in found.workloads:
        reasons = [tag("li", tag("strong", aspect), f": {reason}") for aspect, reason in each.reasons]
        yield tag("section", tag("h2", f"{each.workload.name}: {each.decision}"), tag("ul", reasons))
    for phase in phases(found):
        yield tag("section", tag("h2", f"Phase: {phase.title}"), tag("p", ", ".join(phase.workloads)), _tasks(phase))
    yield tag("section", tag("h2", "How this was found"), tag("p", _METHOD))


def _tasks(phase: MigrationPhase) -> Markup:
    return _table(("task", "owner", "date"), [(task, _BLANK, _BLANK) for task in phase.tasks])


def _table(columns: Sequence[str], rows: Sequence[Sequence[Child]]) -> Markup:
    head = tag("thead", tag("tr", [tag("th", column) for column in columns]))
    body = tag("tbody", [tag("tr", [tag("td", cell) for cell in row]) for row in rows])
    return tag("div", tag("table", head, body), class_="wide")


_WIDTH: Final = 640
_ROW: Final = 34
_NAME: Final = 150
_PLOT: Final = _WIDTH - _NAME - 20


def _chart(found: Assessment) -> Markup | None:
    """The saving of each workload with its interval, around zero."""
    shown = [(each.workload.name, each.saved) for each in found.workloads if each.saved is not None]
    ends = [end for _, saved in shown for end in (saved.low, saved.high, saved.nominal) if end is not None]
    if not ends:
        return None
    low, high = min(0.0, *ends), max(0.0, *ends)
    span = (high - low) or 1.0

    def at(value: float) -> float:
        return round(_NAME + 10 + (value - low) / span * _PLOT, 1)

    parts: list[Markup] = []
    height = _ROW * len(shown) + 24
    parts.append(tag("line", x1=at(0), x2=at(0), y1=0, y2=height - 22, stroke="currentColor", stroke_opacity=0.4))
    for row, (name, saved) in enumerate(shown):
        parts += _interval(name, saved, row * _ROW + _ROW // 2, at, low, high)
    parts.append(tag("text", "$0", x=at(0), y=height - 6, text_anchor="middle", fill="currentColor"))
    label = "; ".join(f"{name}: {dollars_of(saved)}" for name, saved in shown)
    return tag(
        "figure",
        tag("svg", parts, viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=label),
        tag("figcaption", "A dot is the saving at the predicted times, a line its 90 % interval."),
        class_="chart",
    )


def _interval(name: str, saved: Interval, y: int, at: Any, low: float, high: float) -> list[Markup]:
    start = at(saved.low if saved.low is not None else low)
    stop = at(saved.high if saved.high is not None else high)
    parts = [
        tag("text", name[:20], x=0, y=y + 4, fill="currentColor"),
        tag("line", x1=start, x2=stop, y1=y, y2=y, stroke="currentColor", stroke_width=3, stroke_opacity=0.5),
    ]
    if saved.nominal is not None:
        parts.append(tag("circle", cx=at(saved.nominal), cy=y, r=5, fill="currentColor"))
    return parts


def document(found: Assessment) -> dict[str, Any]:
    """The assessment as JSON."""
    return {
        "portfolio": found.source.portfolio.model_dump(),
        "saved_a_month": found.saved.document(),
        "value": found.value.document(),
        "workloads": [
            {
                "name": each.workload.name,
                "decision": str(each.decision),
                "reasons": dict(each.reasons),
                "gpu_dollars_a_month": each.bill,
                "gpu_price_date": each.billed.isoformat() if each.billed else None,
                "fleet": None
                if each.fleet is None
                else {"instance": each.fleet.instance, "size": each.fleet.size, "title": each.fleet.title}
                | {"dollars_a_month": each.fleet.monthly.document(), "price_date": each.fleet.priced.isoformat()},
                "migration_dollars": each.migration.document(),
                "saved_a_month": each.saved.document() if each.saved else None,
                "value": each.value.document() if each.value else None,
                "months": each.months,
            }
            for each in found.workloads
        ],
        "phases": [
            {"title": phase.title, "workloads": phase.workloads, "tasks": phase.tasks} for phase in phases(found)
        ],
    }
