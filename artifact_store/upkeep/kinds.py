"""What may be collected at all: the kinds of objects by their paths, in the order in which they go.

Whatever points goes before what it points to, so that a collection which is killed leaves orphans, never a pointer
to nothing. Paths of no kind are not the store's, or are for ever: action records are taken back, not swept, and the
log of a channel is its history.
"""

import re
from enum import Enum


class Kind(Enum):
    """`reason` is why one that nothing holds may go."""

    RETIRED = (r"retired/[0-9a-f]{64}", "taken back longer ago than the grace")
    LISTING = (r"neuron-artifacts/[^/]+/[0-9a-f]{16}/manifest\.json", "a listing of no artifact")
    SIGNATURE = (r"sig/[0-9a-f]{64}/[0-9a-f]{64}", "a signature of no artifact")
    REPORT = (r"reports/[0-9a-f]{64}/[0-9T.]+Z\.(html|json)", "a report of no artifact")
    EVIDENCE = (r"evidence/[0-9a-f]{64}/[0-9a-f]{64}", "evidence of no artifact")
    PART = (r"parts/[0-9a-f]{64}", "a part of no artifact")
    FAILURE = (r"failures/[0-9a-f]{64}", "a failure that has expired")
    LEASE = (r"leases/[0-9a-f]{64}/[0-9]{10}", "a lease that has ended")
    OUTCOME = (r"runs/[0-9a-f]{64}/[0-9]{10}", "an outcome of a run of long ago")
    PIN = (r"pins/[a-z0-9][a-z0-9-]{0,62}", "a pin that has expired")
    PROBE = (r"doctor-[0-9a-f]{16}/.+", "left by an examination that was killed")
    BLOB = (r"cas/sha256/([0-9a-f]{2})/\1[0-9a-f]{62}", "a blob that nothing names")

    def __init__(self, pattern: str, reason: str) -> None:
        self.pattern = re.compile(pattern)
        self.reason = reason


def kind_of(path: str) -> Kind | None:
    return next((kind for kind in Kind if kind.pattern.fullmatch(path)), None)
