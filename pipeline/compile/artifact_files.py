"""What an artifact keeps beside its programs, by path; section 4 of docs/reference/store-format.md."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.util.files import json_of

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.emulator.analysis.utilization import Utilisation
    from nxpipe.emulator.passes.shard import Padding


UTILISATION: Final = "utilisation.json"


CACHE: Final = "neuron-cache"


def graph(program: str) -> str:
    """What the program of instructions was made of."""
    return f"graphs/{program}"


def constant(digest: str) -> str:
    """A table that is too large to stand in each program that reads it."""
    return f"constants/{digest}"


def cached(program: str, file: str) -> str:
    """What AWS's compiler left in its own cache; `file` is as it lies there, its two folders first."""
    return f"{CACHE}/{program}/{file}"


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
