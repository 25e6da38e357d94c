"""The [store] section, loaded without the other tables of nxpipe.toml.

Store commands need no other table: they start faster without them, and a fault in another table does not block
`store fetch`. A document with an unknown table or an invalid [store] is loaded completely, to report all faults.
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
        "channels",
        "signing",
        "budget",
        "amis",
        "observe",
        "release",
        "farm",
        "prove",
        "cluster",
        "acknowledge",
    }
)


def load_store_section(path: Path, environ: Mapping[str, str]) -> Store:
    """Like `load_config(..., missing_ok=True).store`, but ignores faults in other tables."""
    if not any(name.startswith("NXPIPE_STORE_") for name in environ):
        document = _document(path)
        if document.keys() <= TABLES:
            with suppress(ValidationError):  # the complete load below reports it with all others
                return Store.model_validate(document.get("store", {}))
    from nxpipe.pipeline.config.load import load_config

    return load_config(path, environ, missing_ok=True).store


def _document(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    from nxpipe.pipeline.config.toml_file import read_document

    return read_document(path)[1]
