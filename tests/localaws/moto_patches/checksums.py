"""Checksums of uploads to S3. Moto stores bytes that differ from their checksum, and keeps a checksum only if another
field names its algorithm.

CRC32C and CRC64NVME, which Python's standard library lacks, are kept and not checked.
"""

import base64
from functools import cache
from typing import Any, Final

from moto.s3.exceptions import S3ClientError
from moto.s3.responses import S3Response

from tests.faults.digests import ALGORITHMS, checksum_of
from tests.localaws.moto_patches._around import around

_TRAILING: Final = b"\r\nx-amz-checksum-"


class BadDigest(S3ClientError):
    code = 400

    def __init__(self, algorithm: str) -> None:
        super().__init__("BadDigest", f"The {algorithm.upper()} you specified did not match the calculated checksum.")


@cache
def apply() -> None:
    around(S3Response, "put_object", _checked)
    around(S3Response, "upload_part", _checked)
    around(S3Response, "_get_checksum", _kept)


def _checked(stock: Any, response: Any) -> Any:
    if (claim := _claim(response)) is not None:
        name, value = claim
        if name in ALGORITHMS:
            digest = ALGORITHMS[name]()
            digest.update(response.body or b"")
            if base64.b64encode(digest.digest()).decode() != value:
                raise BadDigest(name)
    return stock(response)


def _kept(stock: Any, response: Any, response_headers: dict[str, Any]) -> tuple[str, str | None]:
    claim = _claim(response)
    if claim is None:
        result: tuple[str, str | None] = stock(response, response_headers)
        return result
    name, value = claim
    response_headers[f"x-amz-checksum-{name}"] = value
    return name.upper(), value


def _claim(response: Any) -> tuple[str, str] | None:
    """The algorithm and the value of the checksum, which is a header field or follows the last chunk of the body."""
    sent = checksum_of({name.lower(): value for name, value in response.headers.items()})
    if sent is not None or "x-amz-trailer" not in response.headers:
        return sent
    _, found, trailer = bytes(response.raw_body).rpartition(_TRAILING)
    name, _, value = trailer.partition(b"\r\n")[0].partition(b":")
    return (name.decode().lower(), value.strip().decode()) if found else None
