"""Where each object lies, on every kind of store. Section 2 of docs/store-format.md."""

import re
from typing import Final

from artifact_store.manifest import Blob, Manifest

ACTIONS: Final = "ac/"
SCRATCH: Final = "tmp"

_KEY: Final = re.compile(r"[0-9a-f]{64}")


def blob_path(blob: Blob) -> str:
    # 256 folders, so that none grows beyond what a file system lists with ease.
    return f"cas/sha256/{blob.sha256[:2]}/{blob.sha256}"


def action_path(request_key: str) -> str:
    return f"{ACTIONS}{request_key}"


def is_key(name: str) -> bool:
    """False for a stranger's file below `ac/`, and for whatever else is no request key."""
    return _KEY.fullmatch(name) is not None


def listing_path(manifest: Manifest) -> str:
    folder = manifest.model.id.replace("/", "-")
    return f"neuron-artifacts/{folder}/{manifest.request_key[:16]}/manifest.json"
