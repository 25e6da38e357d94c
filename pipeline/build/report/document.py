"""The report of a build as data: what was asked for, what became of each cell, and what it took."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.build.planned import PlannedArtifact
from nxpipe.pipeline.build.report.about import About
from nxpipe.pipeline.build.report.reasons import Lack, became, missing, reason, tallied
from nxpipe.pipeline.build.report.recorder import Attempt, Recorder
from nxpipe.pipeline.build.results import CellResult, Results
from nxpipe.pipeline.util.files import expanded

FORMAT: Final = "nxpipe.build-report/1"
Predicted = Mapping[str, Mapping[str, Any]]  # figures of each program by its name, as utilisation.read gives them

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def document(
    results: Results,
    recorder: Recorder,
    predicted: Mapping[str, Predicted] | None = None,
    about: About | None = None,
    home: Path | None = None,
) -> dict[str, Any]:
    """`predicted` is by request key. Paths below `home` are written from `~` on: they would name a user."""
    cells: dict[int, list[CellResult]] = {}
    for one in results.cells():
        cells.setdefault(id(one.artifact), []).append(one)
    artifacts = [
        _artifact(results, artifact, cells.get(id(artifact), []), (predicted or {}).get(artifact.key, {}))
        for artifact in results.plan.artifacts
    ]
    said = _head(results) | _made_with(about or About.here())
    said |= {"artifacts": artifacts, "attempts": list(_attempts(results, recorder.attempts))}
    clean: dict[str, Any] = _clean(said, str(home or expanded("~")))
    return clean


def _head(results: Results) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "verdict": "interrupted" if results.interrupted else "incomplete" if results.missing() else "complete",
        "exit_code": results.exit_code,
        "began_at": results.began_at,
        "seconds": round(results.seconds, 3),
        "executor": results.executor,
        "store": results.plan.store,
        "counts": dict(tallied(results)),
        "missing": [_lack(lack) for lack in missing(results)],
    }


def _made_with(about: About) -> dict[str, Any]:
    host = {"cores": about.cores, "memory_bytes": about.memory, "system": about.system}
    return {"host": host, "versions": about.versions}


def _artifact(
    results: Results, artifact: PlannedArtifact, cells: Sequence[CellResult], predicted: Predicted
) -> dict[str, Any]:
    return {
        "key": artifact.key,
        "title": artifact.title,
        "asked": artifact.asked.document(),
        "published": not any(one.is_missing for one in cells),
        "cells": [_cell(results, one) | {"predicted": _figures(predicted, one.cell.shape.name)} for one in cells],
    }


def _cell(results: Results, one: CellResult) -> dict[str, Any]:
    shape = one.cell.shape
    return {
        "key": one.cell.key,
        "program": shape.name,
        "phase": shape.phase,
        "batch": shape.batch,
        "sequence": shape.sequence,
        "before": {"state": one.cell.state, "why": one.cell.why, "estimated_seconds": one.cell.seconds},
        "became": became(results, one),
        "attempts": one.attempts,
        "seconds": round(one.seconds, 3),
        "memory_bytes": one.memory,
        "missing": _missing(results, one) if one.is_missing else None,
    }


def _missing(results: Results, one: CellResult) -> dict[str, Any]:
    why = reason(results, one)
    sort, kind = (one.fault.sort, one.fault.kind) if one.fault else (None, None)
    return {"reason": why.name, "message": why.text, "sort": sort, "kind": kind}


def _lack(lack: Lack) -> dict[str, Any]:
    why = lack.reason
    said = {"became": why.became, "reason": why.name, "message": why.text, "way_out": why.way_out}
    lots = [{"title": lot.members[0].artifact.title, "programs": lot.name} for lot in lack.lots]
    return said | {"cells": lack.cells, "lots": lots}


def _figures(predicted: Predicted, program: str) -> dict[str, Any] | None:
    """What a reader compares; it may be a stranger's artifact, and what is not as we write it is passed over."""
    match predicted.get(program):
        case {"in_short": str(line), "time": {"latency_ns": float() | int() as latency, "bound_by": str(bound)}}:
            return {"in_short": line, "latency_ns": latency, "bound_by": bound}
        case _:
            return None


def _attempts(results: Results, attempts: Sequence[Attempt]) -> Iterator[dict[str, Any]]:
    """Workers are numbered as they appear, since their names may be those of machines."""
    workers: dict[str, int] = {}
    names = {cell.key: (artifact.title, cell.shape.name) for artifact, cell in results.plan.cells()}
    names |= {artifact.key: (artifact.title, "publish") for artifact in results.plan.artifacts}
    for one in attempts:
        title, program = names.get(one.key, ("", one.key))
        yield {
            "key": one.key,
            "title": title,
            "program": program,
            "worker": workers.setdefault(one.worker, len(workers) + 1),
            "began": round(one.began, 3),
            "over": None if one.over is None else round(one.over, 3),
            "outcome": _outcome(one),
            "steps": [[round(at, 3), text] for at, text in one.steps],
        }


def _outcome(one: Attempt) -> str:
    if one.end is None:
        return "cut short"
    return "failed" if one.end.fault else "found" if one.end.cached else "built"


def _clean(value: Any, home: str) -> Any:
    """Texts that UTF-8 can spell and that name no user; all else as it is."""
    if isinstance(value, str):
        text = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
        return re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 and home in text else text
    if isinstance(value, Mapping):
        return {key: _clean(each, home) for key, each in value.items()}
    return [_clean(each, home) for each in value] if isinstance(value, list | tuple) else value
