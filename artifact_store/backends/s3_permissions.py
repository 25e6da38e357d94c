"""Which permission S3 found lacking: by its own words where it says so, else by what the request needs."""

import re
from collections.abc import Mapping
from typing import Any, Final

from nxpipe.artifact_store.errors import Denied

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
