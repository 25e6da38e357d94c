"""An assessment for people: a table for the terminal, Markdown, and one page without scripts."""

from collections.abc import Iterator
from typing import Any, Final

from nxpipe.pipeline.plan.assessment import (
    AssessedWorkload,
    Assessment,
    MigrationDecision,
    MigrationPhase,
    dollars_of,
    phases,
)
from nxpipe.pipeline.plan.serve import Interval
from nxpipe.pipeline.util.page.charts import Dot, Scale, dots
from nxpipe.pipeline.util.page.html import Child, Markup, tag
from nxpipe.pipeline.util.page.page import Section, bullets, heading, sheet, table
from nxpipe.pipeline.util.text import for_markdown
from nxpipe.pipeline.util.text import table as text_table

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
        text_table(_COLUMNS, rows, width),
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
    name = found.source.portfolio.name
    lead = heading(name, f"{_counted(found)}. {_totals(found)}.")
    return sheet(f"Migration assessment, {name}", "Migration assessment", lead, _sections(found))


def _sections(found: Assessment) -> Iterator[Section]:
    rows = [_cells(each) for each in found.workloads]
    words = ("decision", "GPUs today", "on Neuron")
    yield Section("Decisions", table(_COLUMNS, rows, "Decisions", words=words))
    if chart := _chart(found):
        yield Section("Dollars saved in a month", chart)
    for each in found.workloads:
        reasons = bullets([tag("strong", aspect), ": ", _with_code(reason)] for aspect, reason in each.reasons)
        yield Section(f"{each.workload.name}: {each.decision}", reasons)
    for phase in phases(found):
        yield Section(f"Phase: {phase.title}", [tag("p", ", ".join(phase.workloads)), _tasks(phase)])
    yield Section("Method", tag("p", _METHOD))


def _tasks(phase: MigrationPhase) -> Markup:
    rows = [(_with_code(task), _BLANK, _BLANK) for task in phase.tasks]
    return table(("task", "owner", "date"), rows, f"Tasks of the phase: {phase.title}", words=("owner", "date"))


def _with_code(text: str) -> list[Child]:
    """Text whose parts between backticks are code."""
    return [tag("code", part) if number % 2 else part for number, part in enumerate(text.split("`"))]


def _chart(found: Assessment) -> Markup | None:
    """The saving of each workload with its interval, around zero."""
    shown = [(each.workload.name, each.saved) for each in found.workloads if each.saved is not None]
    ends = [end for _, saved in shown for end in (saved.low, saved.high, saved.nominal) if end is not None]
    if not ends:
        return None
    axis = Scale(min(0.0, *ends), max(0.0, *ends) or 1.0, "dollars saved in a month", shown=_dollars)
    rows = [Dot(f"{name}: {dollars_of(saved)}", saved.nominal, _interval(saved, axis)) for name, saved in shown]
    about = "A dot is the saving at the predicted times, a line its 90 % interval."
    return dots("Saving of each workload", about, rows, axis)


def _interval(saved: Interval, axis: Scale) -> tuple[float, float]:
    """An end that is not known is that of the chart."""
    low = axis.low if saved.low is None else saved.low
    return low, axis.high if saved.high is None else saved.high


def _dollars(value: float) -> str:
    return f"-${-value:,.0f}" if value < 0 else f"${value:,.0f}"


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
