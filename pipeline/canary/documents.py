"""One spelling of a document, so that a digest names what it says."""

import hashlib
import json


def canonical_json(document: object) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest_of(document: object) -> str:
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


class CanaryError(Exception):
    """Root of the judge's errors; the message is one sentence that ends in the way out."""


class PlanInvalid(CanaryError):
    """A plan that no rollout can follow."""


class EvidenceInvalid(CanaryError):
    """Evidence that is none, or that belongs to another plan or moment."""


class RecordInvalid(CanaryError):
    """A record that is not what a rollout has written, or that says what the judge would not have said."""
