"""Fault plans: faults, the requests that they can affect, and schedules.

A schedule depends on the requests and a seed only, so that a failure can be reproduced.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import parse_qs, unquote

from tests.faults.wire import Head


@dataclass(frozen=True)
class Refuse:
    """The server receives the request, does nothing, and responds with an error."""

    status: int
    code: str


@dataclass(frozen=True)
class CutBefore:
    """The connection closes after the request was received and before it is executed."""


@dataclass(frozen=True)
class CutAfter:
    """The request is executed and its response lost."""


@dataclass(frozen=True)
class CutUpload:
    """The connection closes within the request's body: after so many bytes, or half of them; at once without a body."""

    after: int | None = None


@dataclass(frozen=True)
class Truncate:
    """The response ends early: after so many bytes of its body, or half of them; in its first line without a body."""

    keep: int | None = None


@dataclass(frozen=True)
class Delay:
    """A slow response without a fault."""

    seconds: float


@dataclass(frozen=True)
class Hold:
    """The request waits until the test releases it, before or after its execution."""

    when: Literal["before", "after"] = "before"


Fault = Refuse | CutBefore | CutAfter | CutUpload | Truncate | Delay | Hold

SLOW_DOWN: Final = Refuse(503, "SlowDown")
INTERNAL_ERROR: Final = Refuse(500, "InternalError")
# S3 sends this only for a conditional write at the time of another write of the key.
CONFLICT: Final = Refuse(409, "ConditionalRequestConflict")
# CompleteMultipartUpload and copies may fail after S3 has sent status 200.
LATE_ERROR: Final = Refuse(200, "InternalError")

# Faults that can affect any request.
ANYWHERE: Final[tuple[Fault, ...]] = (SLOW_DOWN, INTERNAL_ERROR, CutBefore(), CutAfter(), CutUpload(), Truncate())


@dataclass(frozen=True)
class Request:
    """A received request; the first has number 1."""

    number: int
    method: str
    path: str
    query: str
    operation: str
    conditional: bool  # whether it is a write with If-Match or If-None-Match

    @classmethod
    def of(cls, head: Head, number: int) -> "Request":
        method, target, _ = head.start.split(" ", 2)
        path, _, query = target.partition("?")
        condition = head.get("If-Match") or head.get("If-None-Match")
        operation = _operation(method, path, query, copies=head.get("x-amz-copy-source") is not None)
        return cls(number, method, path, query, operation, method not in ("GET", "HEAD") and condition is not None)

    @property
    def key(self) -> str:
        """The key; empty for a request about a bucket or the service."""
        return unquote(self.path.lstrip("/").partition("/")[2])

    @property
    def parameters(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(self.query, keep_blank_values=True).items()}


_OF_BUCKETS: Final = {
    ("GET", "list-type"): "ListObjectsV2",
    ("GET", "versions"): "ListObjectVersions",
    ("GET", "uploads"): "ListMultipartUploads",
    ("GET", "versioning"): "GetBucketVersioning",
    ("PUT", "versioning"): "PutBucketVersioning",
    ("POST", "delete"): "DeleteObjects",
    ("PUT", ""): "CreateBucket",
    ("HEAD", ""): "HeadBucket",
    ("DELETE", ""): "DeleteBucket",
    ("GET", ""): "ListObjects",
}
_OF_OBJECTS: Final = {
    ("PUT", "partNumber"): "UploadPart",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("GET", "uploadId"): "ListParts",
    ("GET", "attributes"): "GetObjectAttributes",
    ("GET", ""): "GetObject",
    ("HEAD", ""): "HeadObject",
    ("PUT", ""): "PutObject",
    ("DELETE", ""): "DeleteObject",
}
_COPIES: Final = {"PutObject": "CopyObject", "UploadPart": "UploadPartCopy"}
# Parameters that do not select the operation.
_REFINEMENTS: Final = frozenset({"x-id", "versionId", "prefix", "delimiter", "marker", "max-keys", "encoding-type"})


def _operation(method: str, path: str, query: str, *, copies: bool) -> str:
    """boto3's name of the operation; if unknown, its method and subject."""
    names = _OF_OBJECTS if path.strip("/").count("/") else _OF_BUCKETS
    parameters = parse_qs(query, keep_blank_values=True).keys()
    for (its_method, parameter), name in names.items():
        if method == its_method and parameter in parameters:
            return name
    about = "&".join(sorted(parameters - _REFINEMENTS)) if path.strip("/") else "?"
    name = names.get((method, about), f"{method} {about}")
    return _COPIES.get(name, name) if copies else name


Rule = Callable[[Request], Fault | None]


class Plan:
    """A list of rules; the first one with a fault for a request applies. Without rules no request fails."""

    def __init__(self, *rules: Rule, latency: float = 0.0, clock_ahead: float = 0.0) -> None:
        """`latency` of every request in seconds; `clock_ahead`: how far the server's Date is ahead of ours."""
        self._rules = rules
        self.latency = latency
        self.clock_ahead = clock_ahead

    def fault(self, request: Request) -> Fault | None:
        return next((fault for rule in self._rules if (fault := rule(request)) is not None), None)


def at(number: int, fault: Fault) -> Rule:
    """The fault affects the request with this number."""
    return lambda request: fault if request.number == number else None


def where(matches: Callable[[Request], bool], fault: Fault, *, nth: int | None = None) -> Rule:
    """The fault affects every matching request, or only the nth one that this rule has seen."""
    seen = 0

    def rule(request: Request) -> Fault | None:
        nonlocal seen
        if not matches(request):
            return None
        seen += 1
        return fault if nth in (None, seen) else None

    return rule


def on(operation: str, fault: Fault, *, nth: int | None = None) -> Rule:
    return where(lambda request: request.operation == operation, fault, nth=nth)


def by_chance(
    seed: int, probability: float, faults: Sequence[Fault], matches: Callable[[Request], bool] = lambda _: True
) -> Rule:
    """Random faults that depend only on the seed and the request's number, regardless of overlap."""

    def rule(request: Request) -> Fault | None:
        chance = random.Random(f"{seed}:{request.number}")
        return chance.choice(faults) if matches(request) and chance.random() < probability else None

    return rule
