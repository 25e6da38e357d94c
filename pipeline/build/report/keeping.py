"""Where a report is kept: beside the build, in a folder of its own. What a store keeps is artifact_store.reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nxpipe.artifact_store.builds import timestamp_of
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.pipeline.build.report.document import Predicted, document
from nxpipe.pipeline.build.report.html import page
from nxpipe.pipeline.build.report.recorder import Recorder
from nxpipe.pipeline.build.results import Results
from nxpipe.pipeline.util.files import write_whole


@dataclass(frozen=True)
class ReportFiles:
    json: Path
    html: Path


def keep_report(
    results: Results,
    recorder: Recorder,
    folder: Path,
    predicted: Mapping[str, Predicted] | None = None,
) -> ReportFiles:
    """Each file appears whole, in a folder that is named after the moment at which the build began."""
    report = document(results, recorder, predicted)
    kept = folder / timestamp_of(results.began_at)
    files = ReportFiles(kept / "report.json", kept / "report.html")
    write_whole(files.json, canonical_json(report))
    write_whole(files.html, page(report))
    return files
