"""Workflows and actions as documents, and their shell scripts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.conftest import ROOT

WORKFLOW: Final = ROOT / ".github/workflows/release.yml"
ACTION: Final = ROOT / ".github/actions/nxpipe/action.yml"
TEMPLATES: Final = {  # workflows of this repository that `nxpipe init` writes, too
    WORKFLOW: ROOT / "pipeline/templates/nxpipe-release.yml",
    ACTION: ROOT / "pipeline/templates/nxpipe/action.yml",
}
WORKFLOWS: Final = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTIONS: Final = sorted((ROOT / ".github/actions").glob("*/action.yml"))


def read(path: Path) -> dict[str, Any]:
    """The document; YAML 1.1 reads the key `on` as true."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return {"on" if key is True else key: value for key, value in document.items()}


def jobs(path: Path) -> Mapping[str, dict[str, Any]]:
    found: Mapping[str, dict[str, Any]] = read(path)["jobs"]
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    document = read(path)
    if "runs" in document:
        yield from document["runs"]["steps"]
    for job in document.get("jobs", {}).values():
        yield from job["steps"]
