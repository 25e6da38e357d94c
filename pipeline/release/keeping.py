"""Where a release's report is kept."""

import json
from pathlib import Path
from typing import Any

from nxpipe.artifact_store.reports import moment_of
from nxpipe.pipeline.release.page import page
from nxpipe.pipeline.util.files import write_whole


def keep(report: dict[str, Any], folder: Path) -> Path:
    """In a folder that is named after the moment at which the release began; the page is what people open."""
    kept = folder / moment_of(report["began_at"])
    write_whole(kept / "release.json", json.dumps(report, indent=2).encode())
    write_whole(kept / "release.html", page(report))
    return kept / "release.html"
