"""What an artifact's programs amount to, as it was worked out when they were built. Light: a cached build shows it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.compile.artifact_files import UTILISATION
from nxpipe.pipeline.util.files import json_of

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.emulator.analysis.utilization import Utilisation
    from nxpipe.emulator.passes.shard import Padding

_IN_SHORT: Final = "in_short"


def to_bytes(documents: Mapping[str, object]) -> bytes:
    """By program."""
    return json.dumps(documents, sort_keys=True, separators=(",", ":")).encode()


def document(used: "Utilisation", padding: "Padding") -> dict[str, object]:
    """Of one program; with the figures the line in which a person reads them."""
    padded = f"; padded with zeros: {padding}" if padding else ""
    return {_IN_SHORT: used.sentence() + padded, "padding": asdict(padding), **used.document()}


def read(manifest: "Manifest", store: "Store") -> dict[str, Any]:
    """By program; empty for an artifact that does not say."""
    for file in manifest.files:
        if file.path == UTILISATION:
            document = json_of(store.read_blob(file.blob))
            return document if isinstance(document, dict) else {}
    return {}


def sentences(found: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Program and line. It may be a stranger's: what is not as we write it is passed over."""
    for program, figures in found.items():
        match figures:
            case {"in_short": str(line)} if (program + line).isprintable():
                yield program, line
