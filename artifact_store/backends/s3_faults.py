"""What S3 and its client say when something is wrong, as one sentence each with the way out."""

from typing import Final

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

from artifact_store.errors import StoreUnavailable

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
_DENIED: Final = (
    "allow this identity s3:GetObject, s3:PutObject and s3:ListBucket there, and the use of the bucket's KMS key"
)
_BUSY: Final = "S3 asks for fewer requests; try again in a minute, which is safe"
_REGION: Final = "set AWS_REGION to the bucket's region"

# A HEAD request is answered without a body, so its code is the bare HTTP status.
_BY_CODE: Final = {
    "NoSuchBucket": "create the bucket, or mend the store URL",
    "AccessDenied": _DENIED,
    "403": _DENIED,
    "InvalidAccessKeyId": _RENEW,
    "SignatureDoesNotMatch": _RENEW,
    "ExpiredToken": _RENEW,
    "RequestTimeTooSkewed": "set this machine's clock",
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "SlowDown": _BUSY,
    "503": _BUSY,
}


def code_of(error: Exception) -> str:
    """S3's own word for the fault; empty when no answer came."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def answer_may_be_lost(error: Exception) -> bool:
    """True when the request may have been carried out all the same."""
    if isinstance(error, ClientError):
        return int(error.response["ResponseMetadata"].get("HTTPStatusCode", 500)) >= 500
    return isinstance(error, _NO_ANSWER)


def unavailable(error: BotoCoreError | ClientError, doing: str) -> StoreUnavailable:
    """`doing` reads "write s3://bucket/key"."""
    if isinstance(error, ClientError):
        code = code_of(error)
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
