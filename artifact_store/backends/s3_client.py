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

_TOLD: Final = re.compile(r"not authorized to perform: ([a-z0-9-]+:[A-Za-z]+)")
_WRITE: Final = "s3:PutObject"
# Of requests that are not named like their permission; a HEAD request is refused without a word.
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


def denied(operation: str, answer: Mapping[str, Any], doing: str, way_out: str) -> Denied:
    """Of a request by its name, and S3's answer to it; `doing` reads "write s3://bucket/key"."""
    said = answer.get("Message") or "no explanation"
    told = _TOLD.search(said)
    permission = told[1] if told else _NEEDED.get(operation, f"s3:{operation}")
    answered = f"S3 answers {answer.get('Code')} to {operation}, which needs {permission} ({said})"
    return Denied(f"cannot {doing}: {answered}; {way_out}", permission, operation)


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
_NO_BUCKET: Final = "create the bucket, or mend the store URL"
_DENIED: Final = (
    "allow this identity s3:GetObject, s3:PutObject and s3:ListBucket there, for large blobs "
    "s3:ListBucketMultipartUploads, s3:ListMultipartUploadParts and s3:AbortMultipartUpload, for collection "
    "s3:DeleteObject, s3:DeleteObjectVersion and s3:ListBucketVersions, and the use of the bucket's KMS key"
)
_BUSY: Final = "S3 asks for fewer requests; try again in a minute, which is safe"
_FAILED: Final = "the server failed, not this machine; a retry is safe"
_ROOM: Final = "make room on the server"
_REGION: Final = "set AWS_REGION to the bucket's region"
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_NAMELESS: Final = ("301", "400", "403", "404")
_GARBLED: Final = "the bytes changed on their way or in their file; a retry is safe"

# A HEAD request is answered without a body, so its code is the bare HTTP status.
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
    **dict.fromkeys(("InsufficientStorage", "507", "QuotaExceeded"), _ROOM),
    "BadDigest": _GARBLED,
    "XAmzContentChecksumMismatch": _GARBLED,
    "IncompleteBody": _GARBLED,
    "NotImplemented": "this server lacks what the store needs; use one that passes `nxpipe store doctor`",
}


class SentElsewhere(BotoCoreError):
    """The endpoint redirects, and names no region in which the bucket were: it is no S3, or one behind a web server."""

    fmt = "the endpoint redirects to {location}; set AWS_ENDPOINT_URL to where S3 itself answers"


def refuse_redirects(response: tuple[Any, dict[str, Any]] | None, **_: object) -> None:
    """Without the bucket's region botocore would ask for it, be redirected again, and so on until its stack is full."""
    about = response[1].get("ResponseMetadata", {}) if response else {}
    headers = about.get("HTTPHeaders", {})
    if about.get("HTTPStatusCode") in _REDIRECTS and "x-amz-bucket-region" not in headers:
        raise SentElsewhere(location=headers.get("location", "nowhere"))


def attempts() -> Iterator[int]:
    """A few, with a growing pause between them of which chance decides half, so that rivals do not meet again."""
    for number in range(ATTEMPTS):
        if number:
            time.sleep(_FIRST_PAUSE * 2**number * _CHANCE.uniform(0.5, 1))
        yield number


def code_of(error: Exception) -> str:
    """S3's own word for the fault; empty when no answer came."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def status_of(error: Exception) -> int:
    """The HTTP status; 0 when no answer came."""
    if not isinstance(error, ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500))


def is_nameless(error: Exception) -> bool:
    """A refused HEAD: only a request whose answer has a body is told whether key, clock or permission is to blame."""
    return code_of(error) in _NAMELESS


def is_absent(error: Exception) -> bool:
    return code_of(error) in ("404", "NoSuchKey", "NoSuchVersion")


def is_refused(error: Exception) -> bool:
    """A condition did not hold (412), or S3 could not tell because of another writer at the same moment (409)."""
    return status_of(error) in (409, 412)


def is_garbled(error: Exception) -> bool:
    """S3 received other bytes than were announced, and kept nothing; the client does not repeat these by itself."""
    return _BY_CODE.get(code_of(error)) == _GARBLED


def answer_may_be_lost(error: Exception) -> bool:
    """True when the request may have been carried out all the same."""
    return status_of(error) >= 500 or isinstance(error, _NO_ANSWER)


def unavailable(error: Fault, doing: str) -> StoreUnavailable:
    """`doing` reads "write s3://bucket/key"."""
    if isinstance(error, ClientError):
        code = code_of(error)
        if _BY_CODE.get(code) == _DENIED:
            return denied(error.operation_name, error.response["Error"], doing, _DENIED)
        said = error.response.get("Error", {}).get("Message") or "no explanation"
        return StoreUnavailable(
            f"cannot {doing}: S3 answers {code} ({said}); {_BY_CODE.get(code, 'mend that and retry')}"
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
    return StoreUnavailable(f"cannot {doing}: {_one_line(error)}; mend that, a retry is safe")


def unknown(where: str, cause: Fault, error: StoreUnavailable) -> StoreUnavailable:
    """Neither the write nor the look-up after it was answered."""
    return StoreUnavailable(
        f"it is unknown whether {where} was written: the answer was {str(cause).rstrip('.')}, and then {error}"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


@dataclass(frozen=True)
class S3Options:
    """What the AWS SDK's own settings do not say, or should not decide for this store."""

    kms_key: str | None = None  # without one, the bucket's default encryption
    bucket_key: bool = True  # one call of KMS for many objects
    endpoint: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    concurrency: int = 16  # requests at once

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
    """Region and credentials come from where the AWS SDK always looks; boto3 above it would add to the start only."""
    from botocore.config import Config
    from botocore.session import Session

    config = Config(
        connect_timeout=5,
        read_timeout=60,
        max_pool_connections=2 * options.concurrency,  # for whole objects and for parts of others
        tcp_keepalive=True,
        # "standard" backs off with jitter, and stops repeating when most of what it repeats fails as well.
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        # Every body goes out with the SHA-256 that we know, which is signed; every one that comes in is hashed by us.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": options.addressing, "payload_signing_enabled": False},
    )
    client = Session().create_client("s3", endpoint_url=options.endpoint, config=config)
    client.meta.events.register_first("needs-retry.s3", refuse_redirects)
    return client


@dataclass(frozen=True)
class Place:
    """Objects below a prefix, which is empty or ends in `/`."""

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

    def ask(self, operation: str, path: str, **parameters: Any) -> dict[str, Any]:
        """One request about one object. The client repeats what failed on the way, this what arrived garbled."""
        body, key = parameters.get("Body"), self.key(path)

        def by_the_client() -> dict[str, Any]:
            if isinstance(body, Window):
                body.seek(0)
            answer: dict[str, Any] = getattr(self.client, operation)(Bucket=self.bucket, Key=key, **parameters)
            return answer

        for attempt in attempts():
            try:
                return self.quick.ask(operation, key, parameters) or self.quick.watch(key, by_the_client)
            except FAULTS as error:
                if not is_garbled(error) or attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def head(self, path: str) -> dict[str, Any] | None:
        """What S3 knows of an object; None when there is none."""
        try:
            return self.ask("head_object", path, ChecksumMode="ENABLED")
        except FAULTS as error:
            if is_absent(error):
                return None
            reason = self.reason(error, "get_object", Key=self.key(path), Range="bytes=0-0")
            raise unavailable(reason, f"look up {self.where(path)}") from error

    def reason(self, error: Fault, operation: str, **parameters: Any) -> Fault:
        """Why a HEAD was refused, by what a request of the same permission is told."""
        if is_nameless(error):
            try:
                getattr(self.client, operation)(Bucket=self.bucket, **parameters)
            except FAULTS as told:
                return told
        return error

    def pages(self, operation: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        yield from self.client.get_paginator(operation).paginate(Bucket=self.bucket, **parameters)

    @contextmanager
    def faults(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except FAULTS as error:
            raise unavailable(error, f"{verb} {self.where(path)}") from error
