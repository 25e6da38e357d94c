"""Where a report is kept: beside the build, in a folder of its own. What a store keeps is artifact_store.reports."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from artifact_store.canonical import canonical_json
from artifact_store.reports import moment_of
from pipeline.build_report.document import Predicted, document
from pipeline.build_report.html import page
from pipeline.build_report.recorder import Recorder
from pipeline.building.results import Results

USUAL_FOLDER: Final = Path(".nxpipe/builds")


@dataclass(frozen=True)
class ReportFiles:
    json: Path
    html: Path


def keep_report(
    results: Results,
    recorder: Recorder,
    folder: Path = USUAL_FOLDER,
    predicted: Mapping[str, Predicted] | None = None,
) -> ReportFiles:
    """Each file appears whole, in a folder that is named after the moment at which the build began."""
    report = document(results, recorder, predicted)
    kept = folder / moment_of(results.began_at)
    kept.mkdir(parents=True, exist_ok=True)
    files = ReportFiles(kept / "report.json", kept / "report.html")
    _write(files.json, canonical_json(report))
    _write(files.html, page(report))
    return files


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
