"""Files that an artifact has beside its programs, by path. See section 4 of docs/reference/store-format.md."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.util.files import json_of

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.emulator.analysis.utilization import Utilisation
    from nxpipe.emulator.passes.shard import Padding


UTILISATION: Final = "utilisation.json"


def graph(program: str) -> str:
    """Path of the graph that the program was compiled from."""
    return f"graphs/{program}"


def constant(digest: str) -> str:
    """Path of a constant table that is too large to be stored in each program that reads it."""
    return f"constants/{digest}"


def device_program(program: str) -> dict[str, str]:
    """Paths of a program's files for Neuron devices among those of its step result, by the field of the manifest."""
    return {field: f"device/{program}/{field}" for field in ("neff", "module", "interface")}


_IN_SHORT: Final = "in_short"


def to_bytes(documents: Mapping[str, object]) -> bytes:
    """JSON of utilisation documents by program."""
    return json.dumps(documents, sort_keys=True, separators=(",", ":")).encode()


def document(used: "Utilisation", padding: "Padding") -> dict[str, object]:
    """Utilisation of one program: its figures, and a line that summarises them."""
    padded = f"; padded with zeros: {padding}" if padding else ""
    return {_IN_SHORT: used.sentence() + padded, "padding": asdict(padding), **used.document()}


def read(manifest: "Manifest", store: "Store") -> dict[str, Any]:
    """Utilisation documents by program; empty for an artifact without them."""
    for file in manifest.files:
        if file.path == UTILISATION:
            document = json_of(store.read_blob(file.blob))
            return document if isinstance(document, dict) else {}
    return {}
