"""A plan for people, as `--dry-run` prints it, and for programs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nxpipe.pipeline.build.planned import Plan, PlannedArtifact, PlannedCell, State
from nxpipe.pipeline.build.report.folding import Fold, folds, in_general
from nxpipe.pipeline.build.report.words import counted, duration, plain
from nxpipe.pipeline.util.escape import style
from nxpipe.pipeline.util.text import table

_COLOURS: Final[Mapping[State, str]] = {"to do": "yellow", "failed": "red", "refused": "red"}
_HEADER: Final = ("  PROGRAM", "STATE", "TIME", "REASON")


def plan_table(plan: Plan) -> str:
    """A line for each artifact, a line for each lot of its cells that stand alike, and the sum of it."""
    lots = [(artifact, _lots(artifact)) for artifact in plan.artifacts]
    lines = table(_HEADER, [_row(lot) for _, all_of_it in lots for lot in all_of_it]).splitlines()
    header, rows = lines[0], iter(lines[1:])
    shown = [header] if len(lines) > 1 else []
    for artifact, all_of_it in lots:
        shown.append(_headline(artifact))
        shown += [next(rows) for _ in all_of_it]
    return "\n".join([*shown, "", _sum(plan)])


def plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "format": "nxpipe.plan/1",
        "store": plan.store,
        "totals": _totals(plan),
        "artifacts": [_artifact_json(artifact) for artifact in plan.artifacts],
    }


@dataclass(frozen=True)
class Told:
    """A cell, and its reason as it reads for every bucket."""

    cell: PlannedCell
    reason: str


def _lots(artifact: PlannedArtifact) -> list[Fold[Told]]:
    """None of one that is published: there is nothing to say of its cells that its own line does not say."""
    if artifact.is_published:
        return []
    reasons = in_general([(reason(cell), cell.shape) for cell in artifact.cells])
    told = [Told(*each) for each in zip(artifact.cells, reasons, strict=True)]
    return folds(told, lambda one: one.cell.shape, lambda one: (one.cell.state, one.reason))


def reason(cell: PlannedCell) -> str:
    return plain(cell.fault.message if cell.fault else cell.why)


def _row(lot: Fold[Told]) -> tuple[str, ...]:
    cells = [one.cell for one in lot.members]
    said = {reason(cell) for cell in cells}
    why = said.pop() if len(said) == 1 else lot.members[0].reason
    state = style(cells[0].state, fg=_COLOURS.get(cells[0].state, "green"))
    return f"  {lot.name}", state, _estimate(cells), why


def _estimate(cells: Iterable[PlannedCell]) -> str:
    """Of what is to be done, as far as it was done alike before."""
    to_do = [cell.seconds for cell in cells if cell.state == "to do"]
    known = [seconds for seconds in to_do if seconds is not None]
    if not to_do:
        return ""
    return f"~{duration(sum(known))}{'' if len(known) == len(to_do) else '+'}" if known else "?"


def _headline(artifact: PlannedArtifact) -> str:
    title = style(plain(artifact.title), bold=True)
    how_many = counted(len(artifact.cells), "program")
    if artifact.is_published:
        return f"{title}: {how_many}, {style('published', fg='green')}"
    return f"{title}: {how_many}, {', '.join(_parts(artifact.cells))}"


def _parts(cells: Iterable[PlannedCell]) -> Iterator[str]:
    counts = Counter(cell.state for cell in cells)
    for state in ("published", "committed", "to do", "failed", "refused"):
        if counts[state]:
            yield f"{counts[state]:,} {state}"


def _sum(plan: Plan) -> str:
    totals = _totals(plan)
    said = [
        f"{counted(totals['cells'], 'program')} of {counted(len(plan.artifacts), 'artifact')}",
        f"{totals['found']:,} found, {totals['to_do']:,} to do",
    ]
    if totals["failed"]:
        said[1] += f", {totals['failed']:,} failed before"
    if totals["refused"]:
        said[1] += f", {totals['refused']:,} refused"
    return f"{said[0]}: {said[1]}{_time(totals)}."


def _time(totals: Mapping[str, Any]) -> str:
    """One worker's, since a plan knows of no workers."""
    if not totals["to_do"]:
        return ""
    unknown = totals["without_estimate"]
    if unknown == totals["to_do"]:
        return "; nothing like it was timed before, so how long it takes is not known"
    beside = f", and {unknown:,} that nothing like was timed before" if unknown else ""
    return f"; about {duration(totals['seconds'])} of one worker's time{beside}"


def _totals(plan: Plan) -> dict[str, Any]:
    cells = [cell for _, cell in plan.cells()]
    counts = Counter(cell.state for cell in cells)
    estimates = [cell.seconds for cell in cells if cell.state == "to do"]
    return {
        "cells": len(cells),
        "found": counts["published"] + counts["committed"],
        "to_do": counts["to do"],
        "failed": counts["failed"],
        "refused": counts["refused"],
        "seconds": round(sum(seconds for seconds in estimates if seconds is not None), 3),
        "without_estimate": estimates.count(None),
    }


def _artifact_json(artifact: PlannedArtifact) -> dict[str, Any]:
    return {
        "key": artifact.key,
        "title": artifact.title,
        "asked": artifact.asked.document(),
        "cells": [_cell_json(cell) for cell in artifact.cells],
    }


def _cell_json(cell: PlannedCell) -> dict[str, Any]:
    return {
        "key": cell.key,
        "program": cell.shape.name,
        "phase": cell.shape.phase,
        "batch": cell.shape.batch,
        "sequence": cell.shape.sequence,
        "state": cell.state,
        "why": reason(cell),
        "seconds": cell.seconds,
        "exit_code": cell.fault.code if cell.fault else None,
    }
