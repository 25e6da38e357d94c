"""Verification of a client's checksum claims against the received bytes."""

import base64
import binascii
import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import IO, Final, Protocol

from tests.faults.wire import CHUNK, Answer, error

PREFIX: Final = "x-amz-checksum-"
_NOT_DIGESTS: Final = ("x-amz-checksum-algorithm", "x-amz-checksum-mode", "x-amz-checksum-type")


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


class Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


# CRC32C and CRC64NVME are not in the standard library: such claims are passed on unchecked, as in moto.
ALGORITHMS: Final[Mapping[str, Callable[[], Digest]]] = {
    "crc32": Crc32,
    "sha1": hashlib.sha1,
    "sha256": hashlib.sha256,
}


def checksum_of(claims: Mapping[str, str]) -> tuple[str, str] | None:
    """The algorithm and the value of a request's checksum."""
    for name, value in claims.items():
        if name.startswith(PREFIX) and name not in _NOT_DIGESTS:
            return name.removeprefix(PREFIX), value
    return None


def refusal(claims: Mapping[str, str], body: IO[bytes]) -> Answer | None:
    """S3's error for bytes that differ from a claim; None if all agree. Names are in lower case."""
    checks = list(_checks(claims))
    for _, digest, claimed, _ in checks:
        if claimed is None or len(claimed) != len(digest.digest()):
            return error(400, "InvalidDigest", "The digest you specified is not a valid one.")
    body.seek(0)
    while data := body.read(CHUNK):
        for _, digest, _, _ in checks:
            digest.update(data)
    for code, digest, claimed, message in checks:
        if digest.digest() != claimed:
            return error(400, code, message)
    return None


def _checks(claims: Mapping[str, str]) -> list[tuple[str, Digest, bytes | None, str]]:
    """For each claim: the error code, a digest object, the expected value, and the message."""
    found: list[tuple[str, Digest, bytes | None, str]] = []
    for name, algorithm in ALGORITHMS.items():
        if (claimed := claims.get(PREFIX + name)) is not None:
            message = f"The {name.upper()} you specified did not match the calculated checksum."
            found.append(("BadDigest", algorithm(), _decoded(claimed), message))
    if (claimed := claims.get("content-md5")) is not None:
        message = "The Content-MD5 you specified did not match what we received."
        found.append(("BadDigest", hashlib.md5(usedforsecurity=False), _decoded(claimed), message))
    signed = claims.get("x-amz-content-sha256", "")
    if len(signed) == 64:  # else the payload is unsigned, or signed by chunk
        message = "The provided 'x-amz-content-sha256' header does not match what was computed."
        found.append(("XAmzContentSHA256Mismatch", hashlib.sha256(), bytes.fromhex(signed), message))
    return found


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None


def composite(algorithm: str, parts: list[str]) -> str:
    """The checksum of a multipart object: that of the parts' checksums, and the number of parts."""
    digest = ALGORITHMS[algorithm]()
    for part in parts:
        digest.update(base64.b64decode(part))
    return f"{base64.b64encode(digest.digest()).decode()}-{len(parts)}"
