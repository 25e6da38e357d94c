"""A run's artifacts on stdout, and what is missing on stderr."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxpipe.pipeline.build.planned import PlannedArtifact
from nxpipe.pipeline.build.report.summary import summary
from nxpipe.pipeline.build.results import CellResult, Results
from nxpipe.pipeline.compile import utilisation
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import human_bytes
from nxpipe.pipeline.verify.verify import Report, sentences

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store


def published_of(store: "Store", results: Results) -> dict[str, "Published"]:
    """What there is now of all that was asked for, by request key."""
    lacking = {id(one.artifact) for one in results.missing()}
    whole = [artifact.key for artifact in results.plan.artifacts if id(artifact) not in lacking]
    found = ((key, store.find(key)) for key in dict.fromkeys(whole))
    return {key: one for key, one in found if one is not None}


def show_artifacts(
    console: Console,
    published: Mapping[str, "Published"],
    figures: Mapping[str, dict[str, Any]],
    verified: Mapping[str, Report],
    results: Results,
) -> None:
    """Every artifact that there is now, and whether this run made it; programs read what is missing too."""
    documents = []
    for artifact, cells in _by_artifact(results):
        one = published.get(artifact.key)
        if one is None:
            documents.append(_missing(artifact, cells))
            continue
        cached = artifact.is_published or not _made(results, artifact)
        documents.append(_as_json(one, cells, figures[artifact.key], verified[artifact.key], cached=cached))
        if not console.json:
            console.result(*_lines(one, figures[artifact.key], verified[artifact.key], cached=cached))
    if console.json:
        console.data(documents)


def show_end(console: Console, results: Results, report: Path | None) -> None:
    """The one failure of a small build in a sentence; of a large one what it amounts to."""
    missing = results.missing()
    faults = list(dict.fromkeys(one.fault for one in missing if one.fault))
    if console.verbose:
        for fault in faults:
            console.trace(fault.log)
    if results.left_behind:
        console.complain(results.left_behind)
    if results.interrupted:
        console.say("Interrupted; what was committed is kept, and `nxpipe build --resume` goes on from there.")
    elif len(faults) == 1 and len(results.cells()) == 1:
        console.complain(faults[0].message)
    elif missing:
        console.complain(*summary(results, report))
    elif results.attempts and len(results.cells()) > 1:
        console.say(*summary(results, report))


def _by_artifact(results: Results) -> list[tuple[PlannedArtifact, list[CellResult]]]:
    found: dict[int, tuple[PlannedArtifact, list[CellResult]]] = {}
    for one in results.cells():
        found.setdefault(id(one.artifact), (one.artifact, []))[1].append(one)
    return list(found.values())


def _made(results: Results, artifact: PlannedArtifact) -> bool:
    ended = results.ended.get(artifact.key)
    return ended is not None and not ended.cached


def _lines(published: "Published", programs: dict[str, Any], verified: Report, *, cached: bool) -> list[str]:
    manifest = published.manifest
    count = len(manifest.executables)
    headline = (
        "cached" if cached else "built",
        published.name,
        published.target,
        f"{count} program{'s' if count > 1 else ''}",
        human_bytes(published.size_bytes),
    )
    parts = [*sentences(verified), *(f"{name}: {line}" for name, line in utilisation.sentences(programs))]
    return ["  ".join(headline), *(f"  {text}" for text in parts)]


def _as_json(
    published: "Published", cells: list[CellResult], programs: dict[str, Any], verified: Report, *, cached: bool
) -> dict[str, object]:
    return {
        "model": published.model_id,
        "request_key": published.request_key,
        "manifest": published.manifest_digest,
        "cache": "hit" if cached else "miss",
        "target": published.target,
        "programs": [program.name for program in published.manifest.executables],
        "size_bytes": published.size_bytes,
        "verification": verified,
        "utilisation": programs,
        "cells": [_cell(one) for one in cells],
    }


def _missing(artifact: PlannedArtifact, cells: list[CellResult]) -> dict[str, object]:
    return {
        "model": artifact.asked.name or artifact.asked.order.model_id,
        "request_key": artifact.key or None,
        "cache": "missing",
        "target": artifact.asked.order.target,
        "cells": [_cell(one) for one in cells],
    }


def _cell(one: CellResult) -> dict[str, object]:
    document = {"program": one.cell.shape.name, "fate": one.fate, "attempts": one.attempts, "seconds": one.seconds}
    if one.fault is None:
        return document
    return document | {"fault": {"kind": one.fault.kind, "message": one.fault.message, "exit_code": one.fault.code}}
