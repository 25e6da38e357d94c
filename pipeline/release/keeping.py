"""Files that appear whole, and the report among them."""

import json
import secrets
from pathlib import Path
from typing import Any

from artifact_store.reports import moment_of
from pipeline.release.page import page


def write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def keep(report: dict[str, Any], folder: Path) -> Path:
    """In a folder that is named after the moment at which the release began; the page is what people open."""
    kept = folder / moment_of(report["began_at"])
    write_whole(kept / "release.json", json.dumps(report, indent=2).encode())
    write_whole(kept / "release.html", page(report))
    return kept / "release.html"
