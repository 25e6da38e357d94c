"""Canonical JSON of plans, evidence and records, and the errors of documents that are invalid.

Invalid counts are no error: the judge sets such a minute aside and counts it.
"""

import hashlib
import json


def canonical_json(document: object) -> str:
    """The one text of a document, so that a digest identifies its content."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest_of(document: object) -> str:
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


class CanaryError(Exception):
    """Root of the judge's errors; the message is one sentence that ends in the remedy."""


class PlanInvalid(CanaryError):
    """A plan or schedule that no rollout can follow."""


class EvidenceInvalid(CanaryError):
    """Evidence that cannot be parsed, or that belongs to another plan or moment."""


class RecordInvalid(CanaryError):
    """A decision record that cannot be parsed, or whose verdict the judge does not reproduce."""
