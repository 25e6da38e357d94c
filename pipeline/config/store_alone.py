"""The table [store] without the rest of the file, for the commands that ask for no more than where artifacts are.

What is not asked for is neither imported nor judged: they start sooner, and a fault in the table of a fleet keeps
nobody from fetching what is served. Whatever might concern the store takes the whole way, where each fault has its
sentence.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from nxpipe.pipeline.config.store import Store

TABLES: Final = frozenset(
    {
        "project",
        "store",
        "models",
        "fleets",
        "endpoints",
        "network",
        "rollout",
        "build",
        "verify",
        "signing",
        "budget",
        "amis",
        "observe",
        "release",
        "farm",
        "cluster",
        "acknowledge",
    }
)


def load_store_section(path: Path, environ: Mapping[str, str]) -> Store:
    """As `load_config(...).store` where the file may be missing, but heedless of faults in tables beside it."""
    if not any(name.startswith("NXPIPE_STORE_") for name in environ):
        document = _document(path)
        if document.keys() <= TABLES:
            with suppress(ValidationError):  # told below, with all others
                return Store.model_validate(document.get("store", {}))
    from nxpipe.pipeline.config.load import load_config

    return load_config(path, environ, missing_ok=True).store


def _document(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    from nxpipe.pipeline.config.reading import read_document

    return read_document(path)[1]
