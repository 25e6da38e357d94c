"""Paths of all objects in a store, the same on every backend. Section 2 of docs/reference/store-format.md."""

import re
from typing import Final

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.manifest import Manifest

BLOBS: Final = "cas/sha256/"
ACTIONS: Final = "ac/"
PARTS: Final = "parts/"
FAILURES: Final = "failures/"
LEASES: Final = "leases/"
RUNS: Final = "runs/"
CHANNELS: Final = "channels/"
PINS: Final = "pins/"
SIGNATURES: Final = "sig/"
REPORTS: Final = "reports/"
EVIDENCE: Final = "evidence/"
RECORD_SEGMENTS: Final = "index/records/"
INPUT_SEGMENTS: Final = "index/inputs/"
RETIRED: Final = "retired/"
LISTINGS: Final = "neuron-artifacts/"
SCRATCH: Final = "tmp"

_KEY: Final = re.compile(r"[0-9a-f]{64}")
_OBJECT: Final = re.compile(
    "|".join(
        (
            r"cas/sha256/([0-9a-f]{2})/\1[0-9a-f]{62}",
            r"(ac|parts|failures|retired|index/records|index/inputs)/[0-9a-f]{64}",
            r"(leases|runs)/[0-9a-f]{64}/[0-9]{10}",
            r"channels/[a-z0-9][a-z0-9-]{0,62}/(head|log/[0-9]{10})",
            r"pins/[a-z0-9][a-z0-9-]{0,62}",
            r"(evidence|sig)/[0-9a-f]{64}/[0-9a-f]{64}",
            r"reports/[0-9a-f]{64}/[0-9T.]+Z\.(html|json)",
            r"neuron-artifacts/[^/]+/[0-9a-f]{16}/manifest\.json",
            r"doctor-[0-9a-f]{16}/[^/]+",
        )
    )
)
_NUMBER: Final = re.compile(r"[0-9]{10}")


def blob_path(blob: Blob) -> str:
    return digest_path(blob.sha256)


def digest_path(sha256: str) -> str:
    # 256 folders keep each folder small enough for a fast listing.
    return f"{BLOBS}{sha256[:2]}/{sha256}"


def action_path(request_key: str) -> str:
    return f"{ACTIONS}{request_key}"


def retired_path(request_key: str) -> str:
    return f"{RETIRED}{request_key}"


def part_path(key: str) -> str:
    return f"{PARTS}{key}"


def failure_path(request_key: str) -> str:
    return f"{FAILURES}{request_key}"


def lease_folder(request_key: str) -> str:
    return f"{LEASES}{request_key}/"


def run_folder(items: str) -> str:
    return f"{RUNS}{items}/"


def outcome_path(items: str, place: int) -> str:
    return f"{run_folder(items)}{numbered(place)}"


def log_folder(channel: str) -> str:
    return f"{CHANNELS}{channel}/log/"


def generation_path(channel: str, generation: int) -> str:
    return f"{log_folder(channel)}{numbered(generation)}"


def head_path(channel: str) -> str:
    return f"{CHANNELS}{channel}/head"


def pin_path(name: str) -> str:
    return f"{PINS}{name}"


def signature_folder(manifest_digest: str) -> str:
    return f"{SIGNATURES}{manifest_digest}/"


def report_folder(manifest_digest: str) -> str:
    return f"{REPORTS}{manifest_digest}/"


def report_path(manifest_digest: str, moment: str, kind: str) -> str:
    return f"{report_folder(manifest_digest)}{moment}.{kind}"


def evidence_folder(manifest_digest: str) -> str:
    return f"{EVIDENCE}{manifest_digest}/"


def evidence_path(manifest_digest: str, digest: str) -> str:
    return f"{evidence_folder(manifest_digest)}{digest}"


def listing_path(manifest: Manifest) -> str:
    return listing_path_of(manifest.model.id, manifest.request_key)


def listing_path_of(model_id: str, request_key: str) -> str:
    return f"{LISTINGS}{model_id.replace('/', '-')}/{request_key[:16]}/manifest.json"


def numbered(number: int) -> str:
    """A term, a generation or a position in a path, zero-padded so that text order is numeric order."""
    return f"{number:010d}"


def number_of(name: str) -> int | None:
    """The inverse of `numbered`; None for a name that the store did not write."""
    return int(name) if _NUMBER.fullmatch(name) and int(name) > 0 else None


def is_key(name: str) -> bool:
    """True for a digest; false for any other file below `ac/`."""
    return _KEY.fullmatch(name) is not None


def is_object(path: str) -> bool:
    """True if an object of a store may have this path; false for a path that leaves the store's folder."""
    return _OBJECT.fullmatch(path) is not None and not {".", ".."} & set(path.split("/"))
