"""S3 client of one bucket and prefix: requests, and the translation of S3 errors, missing permissions included."""

import random
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
from botocore.exceptions import (
    ConnectionError as NoConnection,
)

from nxpipe.artifact_store.backends.s3_connection import Window
from nxpipe.artifact_store.backends.s3_quick import FastPath
from nxpipe.artifact_store.errors import Denied, StoreUnavailable

_PERMISSION: Final = re.compile(r"not authorized to perform: ([a-z0-9-]+:[A-Za-z]+)")
_WRITE: Final = "s3:PutObject"
# Permissions of operations with a different name; a refused HEAD request has no message to parse.
_NEEDED: Final = {
    "HeadBucket": "s3:ListBucket",
    "ListObjectsV2": "s3:ListBucket",
    "ListObjectVersions": "s3:ListBucketVersions",
    "HeadObject": "s3:GetObject, or s3:ListBucket where there is no such object",
    "CopyObject": "s3:GetObject or s3:PutObject",
    "CreateMultipartUpload": _WRITE,
    "UploadPart": _WRITE,
    "UploadPartCopy": "s3:GetObject or s3:PutObject",
    "CompleteMultipartUpload": _WRITE,
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListParts": "s3:ListMultipartUploadParts",
    "DeleteObject": "s3:DeleteObject, or s3:DeleteObjectVersion in a bucket with versions",
}


def denied(operation: str, answer: Mapping[str, Any], doing: str, remedy: str) -> Denied:
    """The error for a refused operation and S3's response; `doing` is a phrase such as "write s3://bucket/key"."""
    message = answer.get("Message") or "no explanation"
    match = _PERMISSION.search(message)
    permission = match[1] if match else _NEEDED.get(operation, f"s3:{operation}")
    reason = f"S3 answers {answer.get('Code')} to {operation}, which needs {permission} ({message})"
    return Denied(f"cannot {doing}: {reason}; {remedy}", permission, operation)


Fault: TypeAlias = BotoCoreError | ClientError
FAULTS: Final = (BotoCoreError, ClientError)
ATTEMPTS: Final = 5
_FIRST_PAUSE: Final = 0.1  # seconds, doubled each time
_CHANCE: Final = random.SystemRandom()

_NO_IDENTITY: Final = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
_NO_ANSWER: Final = (NoConnection, HTTPClientError)
_RENEW: Final = "log in to AWS again or renew AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_NO_BUCKET: Final = "create the bucket, or correct the store URL"
_DENIED: Final = (
    "allow this identity s3:GetObject, s3:PutObject and s3:ListBucket there, for large blobs "
    "s3:ListBucketMultipartUploads, s3:ListMultipartUploadParts and s3:AbortMultipartUpload, for collection "
    "s3:DeleteObject, s3:DeleteObjectVersion and s3:ListBucketVersions, and the use of the bucket's KMS key"
)
_BUSY: Final = "S3 throttles requests; try again in a minute, which is safe"
_FAILED: Final = "the server failed, not this machine; a retry is safe"
_FULL: Final = "free space on the server"
_REGION: Final = "set AWS_REGION to the bucket's region"
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_NAMELESS: Final = ("301", "400", "403", "404")
_GARBLED: Final = "the bytes changed in transit or in their file; a retry is safe"

# The response to a HEAD request has no body, so its code is the HTTP status.
_BY_CODE: Final = {
    "NoSuchBucket": _NO_BUCKET,
    "InvalidBucketName": _NO_BUCKET,
    "404": _NO_BUCKET,
    "AccessDenied": _DENIED,
    "403": _DENIED,
    "InvalidAccessKeyId": _RENEW,
    "SignatureDoesNotMatch": _RENEW,
    "ExpiredToken": _RENEW,
    "InvalidToken": _RENEW,
    "RequestTimeTooSkewed": "set this machine's clock",
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "SlowDown": _BUSY,
    "503": _BUSY,
    **dict.fromkeys(("InternalError", "500", "502", "504"), _FAILED),
    **dict.fromkeys(("InsufficientStorage", "507", "QuotaExceeded"), _FULL),
    "BadDigest": _GARBLED,
    "XAmzContentChecksumMismatch": _GARBLED,
    "IncompleteBody": _GARBLED,
    "NotImplemented": "this server lacks what the store needs; use one that passes `nxpipe store doctor`",
}


class SentElsewhere(BotoCoreError):
    """The endpoint redirects without naming the bucket's region: it is not S3, or S3 behind a web server."""

    fmt = "the endpoint redirects to {location}; set AWS_ENDPOINT_URL to the address of S3 itself"


def refuse_redirects(response: tuple[Any, dict[str, Any]] | None, **_: object) -> None:
    """Without the bucket's region in a redirect, botocore requests it, is redirected again, and recurses forever."""
    metadata = response[1].get("ResponseMetadata", {}) if response else {}
    headers = metadata.get("HTTPHeaders", {})
    if metadata.get("HTTPStatusCode") in _REDIRECTS and "x-amz-bucket-region" not in headers:
        raise SentElsewhere(location=headers.get("location", "nowhere"))


def attempts() -> Iterator[int]:
    """Attempt numbers, with exponential backoff and jitter in between, so that concurrent writers diverge."""
    for number in range(ATTEMPTS):
        if number:
            time.sleep(_FIRST_PAUSE * 2**number * _CHANCE.uniform(0.5, 1))
        yield number


def code_of(error: Exception) -> str:
    """S3's error code; empty without a response."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def status_of(error: Exception) -> int:
    """The HTTP status; 0 without a response."""
    if not isinstance(error, ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500))


def is_nameless(error: Exception) -> bool:
    """True for a refused HEAD request: its response has no body with the cause (key, clock or permission)."""
    return code_of(error) in _NAMELESS


def is_absent(error: Exception) -> bool:
    return code_of(error) in ("404", "NoSuchKey", "NoSuchVersion")


def is_changed(error: Exception) -> bool:
    """True if a condition failed: the object is not the version that the request names."""
    return status_of(error) == 412


def is_refused(error: Exception) -> bool:
    """True if a condition failed (412), or S3 could not decide it because of a concurrent writer (409)."""
    return status_of(error) in (409, 412)


def is_garbled(error: Exception) -> bool:
    """True if S3 received bytes with a wrong checksum and stored nothing; botocore does not retry these."""
    return _BY_CODE.get(code_of(error)) == _GARBLED


def response_may_be_lost(error: Exception) -> bool:
    """True if the request may have taken effect despite the error."""
    return status_of(error) >= 500 or isinstance(error, _NO_ANSWER)


def unavailable(error: Fault, doing: str) -> StoreUnavailable:
    """The store's error for a fault of S3; `doing` is a phrase such as "write s3://bucket/key"."""
    if isinstance(error, ClientError):
        code = code_of(error)
        if _BY_CODE.get(code) == _DENIED:
            return denied(error.operation_name, error.response["Error"], doing, _DENIED)
        message = error.response.get("Error", {}).get("Message") or "no explanation"
        return StoreUnavailable(
            f"cannot {doing}: S3 answers {code} ({message}); {_BY_CODE.get(code, 'fix that and retry')}"
        )
    if isinstance(error, _NO_IDENTITY):
        return StoreUnavailable(
            f"cannot {doing}: no usable AWS credentials ({_one_line(error)}); set AWS_PROFILE, or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role"
        )
    if isinstance(error, _NO_ANSWER):
        return StoreUnavailable(
            f"cannot {doing}: the connection failed ({_one_line(error)}); check the network, AWS_REGION and "
            "AWS_ENDPOINT_URL; a retry is safe"
        )
    return StoreUnavailable(f"cannot {doing}: {_one_line(error)}; fix that, a retry is safe")


def unknown(where: str, cause: Fault, error: StoreUnavailable) -> StoreUnavailable:
    """The error for a write whose response, and the look-up after it, both failed."""
    return StoreUnavailable(
        f"it is unknown whether {where} was written: the response was {str(cause).rstrip('.')}, and then {error}"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


@dataclass(frozen=True)
class S3Options:
    """Options of a store in S3 that the AWS SDK's settings do not cover or should not decide."""

    kms_key: str | None = None  # without one, the bucket's default encryption
    bucket_key: bool = True  # one call of KMS for many objects
    endpoint: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    concurrency: int = 16  # concurrent requests

    @property
    def encryption(self) -> dict[str, Any]:
        if self.kms_key is None:
            return {}
        return {
            "ServerSideEncryption": "aws:kms",
            "SSEKMSKeyId": self.kms_key,
            "BucketKeyEnabled": self.bucket_key,
        }


DEFAULT: Final = S3Options()


def s3_client(options: S3Options = DEFAULT) -> Any:
    """A botocore client with the SDK's usual region and credentials; boto3 would only add to the start-up time."""
    from botocore.config import Config
    from botocore.session import Session

    config = Config(
        connect_timeout=5,
        read_timeout=60,
        max_pool_connections=2 * options.concurrency,  # for whole objects and for parts
        tcp_keepalive=True,
        # "standard" backs off with jitter, and stops retrying when most retries fail too.
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        # Every upload includes its signed SHA-256, and every download is hashed by the store.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": options.addressing, "payload_signing_enabled": False},
    )
    client = Session().create_client("s3", endpoint_url=options.endpoint, config=config)
    client.meta.events.register_first("needs-retry.s3", refuse_redirects)
    return client


@dataclass(frozen=True)
class Place:
    """A bucket and a prefix, which is empty or ends in `/`, with the client for requests below it."""

    client: Any = field(repr=False)
    bucket: str
    prefix: str
    options: S3Options
    quick: FastPath = field(repr=False)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, path: str) -> str:
        return self.prefix + path

    def where(self, path: str) -> str:
        return f"{self.url}/{path}"

    def request(self, operation: str, path: str, **parameters: Any) -> dict[str, Any]:
        """One request for one object. The client retries failed requests, this method those with a wrong checksum."""
        body, key = parameters.get("Body"), self.key(path)

        def by_client() -> dict[str, Any]:
            if isinstance(body, Window):
                body.seek(0)
            answer: dict[str, Any] = getattr(self.client, operation)(Bucket=self.bucket, Key=key, **parameters)
            return answer

        for attempt in attempts():
            try:
                return self.quick.request(operation, key, parameters) or self.quick.watch(key, by_client)
            except FAULTS as error:
                if not is_garbled(error) or attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def head(self, path: str) -> dict[str, Any] | None:
        """S3's metadata of an object; None if absent."""
        try:
            return self.request("head_object", path, ChecksumMode="ENABLED")
        except FAULTS as error:
            if is_absent(error):
                return None
            reason = self.reason(error, "get_object", Key=self.key(path), Range="bytes=0-0")
            raise unavailable(reason, f"look up {self.where(path)}") from error

    def reason(self, error: Fault, operation: str, **parameters: Any) -> Fault:
        """The cause of a refused HEAD, from the response to another operation with the same permission."""
        if is_nameless(error):
            try:
                getattr(self.client, operation)(Bucket=self.bucket, **parameters)
            except FAULTS as cause:
                return cause
        return error

    def pages(self, operation: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        yield from self.client.get_paginator(operation).paginate(Bucket=self.bucket, **parameters)

    @contextmanager
    def faults(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except FAULTS as error:
            raise unavailable(error, f"{verb} {self.where(path)}") from error
