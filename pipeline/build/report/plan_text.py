"""Plan of a build as `--dry-run` prints it: a table, or JSON (`nxpipe.plan/1`)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nxpipe.pipeline.build.jobs import PLAN_WORDS, CellStatus
from nxpipe.pipeline.build.plan import BuildPlan, PlannedArtifact, PlannedCell
from nxpipe.pipeline.build.report.summary import BraceGroup, brace_groups, counted, duration, generalize
from nxpipe.pipeline.util.text import Column, plain, style, table

_COLOURS: Final = {CellStatus.QUEUED: "yellow", CellStatus.FAILED: "red", CellStatus.REFUSED: "red"}
_HEADER: Final = (Column("  program"), Column("status"), Column("time", drop=1), Column("reason"))


def plan_table(plan: BuildPlan) -> str:
    """A line for each artifact, one for each group of its cells with one status and reason, and the totals."""
    rows: list[tuple[str, ...]] = []
    for artifact in plan.artifacts:
        rows.append((_headline(artifact),))
        rows += map(_row, _groups(artifact))
    return f"{table(_HEADER, rows)}\n\n{_sum(plan)}"


def plan_json(plan: BuildPlan) -> dict[str, Any]:
    return {
        "format": "nxpipe.plan/1",
        "store": plan.store,
        "totals": _totals(plan),
        "artifacts": [_artifact_json(artifact) for artifact in plan.artifacts],
    }


@dataclass(frozen=True)
class _Row:
    """A cell with its reason, in which N stands for its bucket."""

    cell: PlannedCell
    reason: str


def _groups(artifact: PlannedArtifact) -> list[BraceGroup[_Row]]:
    """Groups of cells of one status and reason; none for a published artifact, whose headline says so."""
    if artifact.is_published:
        return []
    reasons = generalize([(reason(cell), cell.shape) for cell in artifact.cells])
    rows = [_Row(*pair) for pair in zip(artifact.cells, reasons, strict=True)]
    return brace_groups(rows, lambda row: row.cell.shape, lambda row: (row.cell.status, row.reason))


def reason(cell: PlannedCell) -> str:
    return plain(cell.failure.message if cell.failure else cell.why)


def _row(group: BraceGroup[_Row]) -> tuple[str, ...]:
    cells = [row.cell for row in group.members]
    reasons = {reason(cell) for cell in cells}
    why = reasons.pop() if len(reasons) == 1 else group.members[0].reason
    status = cells[0].status
    return f"  {group.name}", style(status.value, fg=_COLOURS.get(status, "green")), _estimate(cells), why


def _estimate(cells: Iterable[PlannedCell]) -> str:
    """Time of the queued cells; `+` if some have no estimate."""
    queued = [cell.seconds for cell in cells if cell.status is CellStatus.QUEUED]
    estimates = [seconds for seconds in queued if seconds is not None]
    if not queued:
        return ""
    return f"~{duration(sum(estimates))}{'' if len(estimates) == len(queued) else '+'}" if estimates else "?"


def _headline(artifact: PlannedArtifact) -> str:
    title = style(plain(artifact.title), bold=True)
    programs = counted(len(artifact.cells), "program")
    if artifact.is_published:
        return f"{title}: {programs}, {style('published', fg='green')}"
    return f"{title}: {programs}, {', '.join(_counts(artifact.cells))}"


def _counts(cells: Iterable[PlannedCell]) -> Iterator[str]:
    counts = Counter(cell.status for cell in cells)
    for status in PLAN_WORDS:
        if counts[status]:
            yield f"{counts[status]:,} {status.value}"


def _sum(plan: BuildPlan) -> str:
    totals = _totals(plan)
    counts = f"{totals['found']:,} cached, {totals['to_do']:,} to build"
    if totals["failed"]:
        counts += f", {totals['failed']:,} failed before"
    if totals["refused"]:
        counts += f", {totals['refused']:,} refused"
    programs, artifacts = counted(totals["cells"], "program"), counted(len(plan.artifacts), "artifact")
    return f"{programs} of {artifacts}: {counts}{_time(totals)}."


def _time(totals: Mapping[str, Any]) -> str:
    """The estimated time of one worker, since a plan has no executor."""
    if not totals["to_do"]:
        return ""
    unknown = totals["without_estimate"]
    if unknown == totals["to_do"]:
        return "; no estimate of the time: no similar program was built before"
    others = f", and {unknown:,} without an estimate" if unknown else ""
    return f"; about {duration(totals['seconds'])} of one worker's time{others}"


def _totals(plan: BuildPlan) -> dict[str, Any]:
    cells = [cell for _, cell in plan.cells()]
    counts = Counter(cell.status for cell in cells)
    estimates = [cell.seconds for cell in cells if cell.status is CellStatus.QUEUED]
    return {
        "cells": len(cells),
        "found": counts[CellStatus.PUBLISHED] + counts[CellStatus.COMMITTED],
        "to_do": counts[CellStatus.QUEUED],
        "failed": counts[CellStatus.FAILED],
        "refused": counts[CellStatus.REFUSED],
        "seconds": round(sum(seconds for seconds in estimates if seconds is not None), 3),
        "without_estimate": estimates.count(None),
    }


def _artifact_json(artifact: PlannedArtifact) -> dict[str, Any]:
    return {
        "key": artifact.key,
        "title": artifact.title,
        "asked": artifact.spec.document(),
        "cells": [_cell_json(cell) for cell in artifact.cells],
    }


def _cell_json(cell: PlannedCell) -> dict[str, Any]:
    return {
        "key": cell.key,
        "program": cell.shape.name,
        "phase": cell.shape.phase,
        "batch": cell.shape.batch,
        "sequence": cell.shape.sequence,
        "state": PLAN_WORDS[cell.status],
        "why": reason(cell),
        "seconds": cell.seconds,
        "exit_code": cell.failure.code if cell.failure else None,
    }
