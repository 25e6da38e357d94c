"""What S3 and its client say when something is wrong: as a kind for the code, as a sentence for people."""

import random
import time
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

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

from nxpipe.artifact_store.backends.s3_permissions import denied
from nxpipe.artifact_store.errors import StoreUnavailable

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
