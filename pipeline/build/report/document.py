"""Report of a build as data, and the files it is written to.

It names no user and no machine: workers are numbered, and paths in the home folder begin with `~`.
"""

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from nxpipe.artifact_store.builds import timestamp_of
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.pipeline import VERSION
from nxpipe.pipeline.build.jobs import PLAN_WORDS, REPORT_WORDS
from nxpipe.pipeline.build.report.html import page
from nxpipe.pipeline.build.report.summary import (
    AWS_COMPILER,
    EXECUTION,
    MissingGroup,
    missing_groups,
    reason,
    status_counts,
)
from nxpipe.pipeline.build.state import ArtifactResult, Attempt, CellResult, Results
from nxpipe.pipeline.models.thresholds import Thresholds, complete_evidence
from nxpipe.pipeline.models.versions import LIBRARIES, compiler_digest
from nxpipe.pipeline.util.files import expanded, write_whole
from nxpipe.pipeline.util.process import processors

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest


@dataclass(frozen=True)
class BuildHost:
    """Machine of the scheduler. `versions` are by name; the compiler's is the digest of its source."""

    cores: int
    memory: int
    system: str
    versions: dict[str, str]

    @classmethod
    def current(cls) -> Self:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(processors(), memory, f"{platform.system()} {platform.machine()}", _versions())


def _versions() -> dict[str, str]:
    versions = {"nxpipe": VERSION, "compiler": compiler_digest(), "python": platform.python_version()}
    return versions | {name: release for name in LIBRARIES if (release := _installed(name))}


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""  # not installed on a machine that only submits jobs


FORMAT: Final = "nxpipe.build-report/1"
Predicted = Mapping[str, Mapping[str, Any]]  # figures by program name, from `artifact_files.read`


@dataclass(frozen=True)
class ArtifactFigures:
    """What the store knows of a published artifact: the figures of its programs, the accuracy of their outputs, and the
    artifacts that channels serve for the same model and target."""

    predicted: Predicted
    accuracy: Mapping[str, Any] = field(default_factory=dict)  # by program
    served: Sequence[Mapping[str, Any]] = ()


_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def report_document(
    results: Results,
    figures: Mapping[str, ArtifactFigures] | None = None,
    host: BuildHost | None = None,
    home: Path | None = None,
    thresholds: Thresholds | None = None,
) -> dict[str, Any]:
    """The report as JSON. `figures` are by request key; paths below `home` begin with `~`."""
    known = figures or {}
    artifacts = [
        _artifact(results, result, known.get(result.artifact.key, ArtifactFigures({})))
        for result in results.artifacts()
    ]
    document = _head(results) | _host(host or BuildHost.current())
    document |= {"thresholds": asdict(thresholds) if thresholds else None}
    document |= {"artifacts": artifacts, "attempts": list(_attempts(results))}
    clean: dict[str, Any] = _clean(document, str(home or expanded("~")))
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
        "counts": {REPORT_WORDS[status]: count for status, count in status_counts(results).items()},
        "missing": [_group(group) for group in missing_groups(results)],
    }


def _host(host: BuildHost) -> dict[str, Any]:
    machine = {"cores": host.cores, "memory_bytes": host.memory, "system": host.system}
    return {"host": machine, "versions": host.versions}


def artifact_figures(store: "Store", manifest: "Manifest", predicted: Predicted) -> ArtifactFigures:
    """The figures of a published artifact; the accuracy is that of the evidence of its build."""
    from nxpipe.pipeline.artifacts.bench import served_comparisons

    return ArtifactFigures(predicted, accuracy_of(manifest, store), served_comparisons(manifest, store))


def accuracy_of(manifest: "Manifest", store: "Store") -> dict[str, Any]:
    """The deviations of the outputs of each program, from the evidence of the emulator; empty without any."""
    complete = complete_evidence(manifest, store.evidence(manifest.digest))
    return {
        each.program: {
            "reference": each.yardstick,
            "outputs": [figures.model_dump() for figures in each.outputs],
        }
        for each in (complete.programs if complete else ())
    }


def _artifact(results: Results, result: ArtifactResult, figures: ArtifactFigures) -> dict[str, Any]:
    artifact = result.artifact
    return {
        "key": artifact.key,
        "title": artifact.title,
        "asked": artifact.spec.document(),
        "published": result.is_published,
        "cells": [_cell(results, cell) | program_figures(figures, cell.cell.shape.name) for cell in result.cells],
        "served": list(figures.served),
    }


def _cell(results: Results, result: CellResult) -> dict[str, Any]:
    shape = result.cell.shape
    return {
        "key": result.cell.key,
        "program": shape.name,
        "phase": shape.phase,
        "batch": shape.batch,
        "sequence": shape.sequence,
        "before": {
            "state": PLAN_WORDS[result.cell.status],
            "why": result.cell.why,
            "estimated_seconds": result.cell.seconds,
        },
        "became": REPORT_WORDS[result.status],
        "attempts": result.attempts,
        "seconds": round(result.seconds, 3),
        "memory_bytes": result.memory,
        "missing": _missing(results, result) if result.status.is_missing else None,
    }


def _missing(results: Results, result: CellResult) -> dict[str, Any]:
    why = reason(results, result)
    failure_class, kind = (result.failure.failure_class.value, result.failure.kind) if result.failure else (None, None)
    return {"reason": why.name, "message": why.text, "sort": failure_class, "kind": kind}


def _group(group: MissingGroup) -> dict[str, Any]:
    why = group.reason
    document = {"became": REPORT_WORDS[why.status], "reason": why.name, "message": why.text, "way_out": why.remedy}
    lots = [{"title": cells.members[0].artifact.title, "programs": cells.name} for cells in group.groups]
    return document | {"cells": group.cells, "lots": lots}


def program_figures(figures: ArtifactFigures, program: str) -> dict[str, Any]:
    """The predictions of a program, and the accuracy of its outputs; None for what is not known."""
    return {
        "predicted": prediction_of(figures.predicted, program),
        "accuracy": figures.accuracy.get(program),
    }


def prediction_of(predicted: Predicted, program: str) -> dict[str, Any] | None:
    """The predictions of a program; the artifact may be another producer's, so those of another form are skipped."""
    match predicted.get(program):
        case {
            "in_short": str(line),
            "time": {"latency_ns": float() | int() as latency, "bound_by": str(bound)} as time,
        }:
            figures = {"in_short": line, "latency_ns": latency, "bound_by": bound}
            return figures | _bounds(time) | _times(predicted[program]) | _parts(predicted[program])
        case _:
            return None


def _bounds(time: Mapping[str, Any]) -> dict[str, Any]:
    """What limits the program, and its distance from the floor; older artifacts do not say so."""
    match time:
        case {"limited_by": str(resource), "over_floor": float() | int() as factor}:
            return {"limited_by": resource, "over_floor": factor}
        case _:
            return {}


# Figures of a program that the page draws, and their paths in the stored document.
_PARTS: Final = {
    "busy_ns": ("time", "busy_ns"),
    "critical_path_ns": ("time", "critical_path_ns"),
    "moved_bytes": ("hbm", "moved_bytes"),
    "compulsory_bytes": ("hbm", "compulsory_bytes"),
    "spilled_bytes": ("spilled", "bytes"),
    "footprint": ("footprint",),
}


def _parts(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, and numbers by name; those that the artifact lacks are left out."""
    found: dict[str, Any] = {}
    for name, path in _PARTS.items():
        value: Any = figures
        for step in path:
            value = value.get(step) if isinstance(value, Mapping) else None
        if _is_number(value) or (isinstance(value, Mapping) and value and all(map(_is_number, value.values()))):
            found[name] = value
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _times(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The time of this program with the host and collectives, and that of `AWS's compiler`."""
    return {name: figures[name] for name in (EXECUTION, AWS_COMPILER) if figures.get(name)}


def _attempts(results: Results) -> Iterator[dict[str, Any]]:
    """Workers are numbered in the order of their first job, for their names may be those of machines."""
    workers: dict[str, int] = {}
    names = {cell.key: (artifact.title, cell.shape.name) for artifact, cell in results.plan.cells()}
    names |= {artifact.key: (artifact.title, "publish") for artifact in results.plan.artifacts}
    for attempt in results.state.timeline:
        title, program = names.get(attempt.key, ("", attempt.key))
        yield {
            "key": attempt.key,
            "title": title,
            "program": program,
            "worker": workers.setdefault(attempt.worker, len(workers) + 1),
            "began": round(attempt.began, 3),
            "over": None if attempt.over is None else round(attempt.over, 3),
            "outcome": _outcome(attempt),
            "steps": [[round(at, 3), text] for at, text in attempt.steps],
        }


def _outcome(attempt: Attempt) -> str:
    if attempt.end is None:
        return "cut short"
    return "failed" if attempt.end.failure else "found" if attempt.end.cached else "built"


def _clean(value: Any, home: str) -> Any:
    """Texts without lone surrogates, which UTF-8 cannot encode, and without the user's home folder."""
    if isinstance(value, str):
        text = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
        return re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 and home in text else text
    if isinstance(value, Mapping):
        return {key: _clean(item, home) for key, item in value.items()}
    return [_clean(item, home) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class ReportFiles:
    json: Path
    html: Path


def write_report(
    results: Results,
    folder: Path,
    figures: Mapping[str, ArtifactFigures] | None = None,
    thresholds: Thresholds | None = None,
) -> ReportFiles:
    """Each file is written atomically, in a folder named by the time at which the build began."""
    report = report_document(results, figures, thresholds=thresholds)
    report_folder = folder / timestamp_of(results.began_at)
    files = ReportFiles(report_folder / "report.json", report_folder / "report.html")
    write_whole(files.json, canonical_json(report))
    write_whole(files.html, page(report))
    return files
