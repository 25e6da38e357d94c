"""Canonical JSON of plans, evidence and records, and the errors of invalid documents.

Invalid counts are not an error: the judge sets such a minute aside and counts it.
"""

import hashlib
import json


def canonical_json(document: object) -> str:
    """The canonical text of a document: equal content has equal digests."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest_of(document: object) -> str:
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


class CanaryError(Exception):
    """Base of the judge's errors. Each message is one sentence that ends in the remedy."""


class PlanInvalid(CanaryError):
    """A plan or schedule that is not a valid rollout."""


class EvidenceInvalid(CanaryError):
    """Evidence that cannot be parsed, or that belongs to another plan or moment."""


class RecordInvalid(CanaryError):
    """A decision record that cannot be parsed, or whose verdict the judge does not reproduce."""
