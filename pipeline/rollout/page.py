"""The page of a rollout, from its evaluation records in the store."""

import json
from collections.abc import Iterator, Sequence
from typing import Final

from nxpipe.pipeline.canary.explanation import percent, share
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.course import Course, EvaluationLog, EvaluationRecord
from nxpipe.pipeline.util.page.charts import Curve, Roof, Scale, plot
from nxpipe.pipeline.util.page.html import Child, Markup, tag
from nxpipe.pipeline.util.page.page import (
    Cell,
    Section,
    Site,
    heading,
    moment,
    note,
    pill,
    sheet,
    table,
    tiles,
    two,
    verdict,
)

_ACTIONS: Final = {"advance": "good", "roll_back": "bad", "undecided": "warn", "frozen": "wait", "continue": "info"}
_ROWS: Final = 500


def rollout_page(fleet: str, rollout: str, evaluations: EvaluationLog, site: Site | None = None) -> bytes:
    """What each evaluation read, what it weighed, and what it decided."""
    records, text = evaluations.refresh(), evaluations.plan_text()
    plan = CanaryPlan.from_json(json.loads(text)) if text else None
    title = f"Rollout {rollout} of fleet {fleet}"
    course = Course(plan).after(records) if plan else None
    return sheet(title, "Rollout", _lead(title, records, course), _sections(course, records), site=site)


def _lead(title: str, records: Sequence[EvaluationRecord], course: Course | None) -> list[Markup]:
    if not records:
        return [heading(title, verdict=verdict("no evaluation yet", "wait"))]
    last = records[-1]
    summary, is_promoted = (course.summary, course.is_promoted) if course else (None, False)
    word = verdict("promoted" if is_promoted else _word(last.action), _ACTIONS.get(last.action, "wait"))
    head = heading(title, f"{moment(records[0].at)} to {moment(last.at)}", summary or last.reason, verdict=word)
    new, old = (_counts(records, side) for side in ("canary", "stable"))
    figures = [(f"{new[1]:,.0f} of {new[0]:,.0f}", "requests of the new version that failed"),
               (f"{old[1]:,.0f} of {old[0]:,.0f}", "requests of the stable version that failed"),
               (f"{len(records):,}", "evaluations")]  # fmt: skip
    return [head, tiles(figures)]


def _word(action: str) -> str:
    return action.replace("_", " ")


def _counts(records: Sequence[EvaluationRecord], side: str) -> tuple[float, float]:
    """(requests, failed requests) of a version."""
    arms = [getattr(batch, side) for record in records for batch in record.batches]
    return sum(arm.requests for arm in arms), sum(arm.errors for arm in arms)


def _sections(course: Course | None, records: Sequence[EvaluationRecord]) -> Iterator[Section]:
    plan = course.plan if course else None
    if course is not None and course.totals:
        yield Section("Phases", _phases(course))
    if plan is not None and any(record.verdict for record in records):
        yield Section("Evidence", _evidence(plan, records))
    if records:
        yield Section("Failed requests", _failures(records))
        yield Section("Evaluations", _table(plan, records))
    if plan is not None:
        yield Section("Plan", _plan(plan))


def _phases(course: Course) -> Markup:
    """How each phase ended or how far it is, with the counts of both versions."""
    rows: list[list[Child | Cell]] = []
    for phase in course.phases:
        totals = phase.totals
        counts = (
            [f"{arm.errors:,} of {arm.requests:,}" for arm in (totals.canary, totals.stable)] if totals else ["–"] * 2
        )
        state = pill(_word(phase.decision), _ACTIONS.get(phase.decision, "wait")) if phase.decision else "–"
        rows.append([phase.name, "–" if phase.minutes is None else f"{phase.minutes:,}", state, *counts])
    columns = ("traffic", "minutes", "state", "new failed", "stable failed")
    return table(columns, rows, "Phases of the rollout", words=("traffic", "state"))


def _evidence(plan: CanaryPlan, records: Sequence[EvaluationRecord]) -> Markup:
    """Both kinds of evidence as shares of what is needed; they are logarithms, so that equal minutes add equally."""
    judged = [(number, each.verdict) for number, each in enumerate(records, 1) if each.verdict]
    shares = [
        Curve("to advance", [(number, share(found.better, plan.beta)) for number, found in judged]),
        Curve("of a regression", [(number, share(found.worse, plan.alpha)) for number, found in judged]),
    ]
    x = Scale(1, max(len(records), 2), "evaluation", shown=lambda value: f"{value:.0f}",
              marks=range(1, len(records) + 1))  # fmt: skip
    y = Scale.over([1.0, *(part for curve in shares for _, part in curve.points)], "share of what is needed",
                   shown=lambda value: f"{value:.0%}")  # fmt: skip
    about = "At 100 % the judge decides. Evidence to advance begins anew with each step."
    return plot("Evidence", about, x, y, lines=shares, roofs=[Roof(((1, 1.0), (x.high, 1.0)), "needed")])


def _failures(records: Sequence[EvaluationRecord]) -> Markup:
    curves = []
    for name, side in (("new version", "canary"), ("stable version", "stable")):
        counted = [(number, *_counts([record], side)) for number, record in enumerate(records, 1)]
        curves.append(Curve(name, [(number, failed / requests) for number, requests, failed in counted if requests]))
    if not any(curve.points for curve in curves):
        return tag("p", "No request was counted yet.")
    x = Scale(1, max(len(records), 2), "evaluation", shown=lambda value: f"{value:.0f}",
              marks=range(1, len(records) + 1))  # fmt: skip
    y = Scale.over([share for curve in curves for _, share in curve.points], "failed requests",
                   shown=lambda value: f"{value:.2%}")  # fmt: skip
    return plot("Share of failed requests", "In the minutes that each evaluation read.", x, y, lines=curves)


def _table(plan: CanaryPlan | None, records: Sequence[EvaluationRecord]) -> list[Markup | None]:
    rows = [_row(plan, record) for record in reversed(records[-_ROWS:])]
    columns = ("at", "action", "step", "new failed", "stable failed", "to advance", "regression", "reason")
    left = len(records) - len(rows)
    shown = table(columns, rows, "Evaluations, the newest first", words=("action", "step", "reason"))
    return [shown, note(f"{left:,} earlier evaluations are not listed." if left else "")]


def _row(plan: CanaryPlan | None, record: EvaluationRecord) -> "list[Child | Cell]":
    found = record.verdict
    summary = record.reason.split("\n")[0]
    shares = (_percent(found.better, plan.beta), _percent(found.worse, plan.alpha)) if plan and found else ("–", "–")
    return [
        moment(record.at),
        pill(_word(record.action), _ACTIONS.get(record.action, "wait")),
        _step(plan, record),
        *(f"{failed:,.0f} of {requests:,.0f}"
          for requests, failed in (_counts([record], side) for side in ("canary", "stable"))),
        *shares,
        Cell(summary, long=True),
    ]  # fmt: skip


def _percent(nats: float, error: float) -> str:
    return percent(share(nats, error))


def _step(plan: CanaryPlan | None, record: EvaluationRecord) -> Child:
    if record.step is None:
        return "full traffic"
    if plan is None or record.step >= len(plan.phases):
        return f"{record.step + 1}"
    return two(f"{record.step + 1} of {len(plan.phases)}", f"{plan.phases[record.step].weight} % of traffic")


def _plan(plan: CanaryPlan) -> Markup:
    rows = []
    for number, phase in enumerate(plan.phases):
        shortest, longest = plan.bake(number)
        kind = "shadow" if plan.is_shadow(number) else f"{phase.weight} % of traffic"
        rows.append((str(number + 1), kind, f"{shortest} to {longest} min"))
    return table(("step", "traffic", "duration"), rows, "Steps of the rollout", words=("traffic",))
