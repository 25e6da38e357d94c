"""The arithmetic of a blob in parts: where they begin, what they hash to, and what that proves."""

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from artifact_store.backends.protocol import CHUNK, Payload
from artifact_store.backends.s3_body import Source

WRITE_ID: Final = "nxpipe-write-id"
WHOLE: Final = "nxpipe-sha256"
PARTS: Final = "nxpipe-parts"

IN_PARTS_ABOVE: Final = 64 * 1024**2
MAX_BLOB_BYTES: Final = 5 * 1024**4
_PART_BYTES: Final = 32 * 1024**2
_MAX_PARTS: Final = 10_000


@dataclass(frozen=True)
class Part:
    number: int  # from 1
    start: int
    size: int
    checksum: str  # SHA-256, as S3 spells it


def spelled(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def stretches(size: int) -> list[tuple[int, int]]:
    """Start and size of each part: the same for everyone, so that anyone can continue anyone's upload."""
    step = _PART_BYTES
    while size > step * _MAX_PARTS:
        step *= 2
    return [(start, min(step, size - start)) for start in range(0, size, step)]


def parts_of(payload: Payload, source: Source) -> list[Part]:
    """Hash the parts, several at once; and the whole again, since nothing else ties them to the payload's digest."""
    pieces = stretches(payload.size)
    with ThreadPoolExecutor(os.cpu_count()) as pool, source.stopping_on_errors():
        whole = pool.submit(_digest, source, 0, payload.size)
        digests = list(pool.map(lambda piece: _digest(source, *piece), pieces))
        if whole.result().hex() != payload.sha256:
            raise source.changed()
    return [
        Part(number, start, size, spelled(digest))
        for number, ((start, size), digest) in enumerate(zip(pieces, digests, strict=True), 1)
    ]


def composite(parts: Sequence[Part]) -> str:
    """The checksum of checksums that S3 arrives at."""
    checksums = b"".join(base64.b64decode(part.checksum) for part in parts)
    return f"{spelled(hashlib.sha256(checksums).digest())}-{len(parts)}"


def is_stored(part: Part, listed: Mapping[str, Any], source: Source) -> bool:
    """Whether S3 holds this part already. A server that lists no checksum has its ETag, where that is an MD5."""
    if listed["Size"] != part.size:
        return False
    if listed.get("ChecksumSHA256"):
        return bool(listed["ChecksumSHA256"] == part.checksum)
    md5 = hashlib.md5(usedforsecurity=False)
    _feed(md5, source, part.start, part.size)
    return bool(listed["ETag"].strip('"') == md5.hexdigest())


def proven_sha256(head: Mapping[str, Any]) -> str | None:
    """The digest of the bytes, if what S3 keeps proves it.

    A checksum over parts is one of checksums. It proves the digest that was noted beside it if it is the expected one.
    """
    kept = head.get("ChecksumSHA256") or ""
    noted = head.get("Metadata", {})
    expected = noted.get(PARTS, "")
    if (
        kept and WHOLE in noted and kept in (expected, expected.partition("-")[0])
    ):  # some servers leave out the number of parts
        return str(noted[WHOLE])
    if head.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    try:
        digest = base64.b64decode(kept, validate=True)
    except binascii.Error:
        return None
    return digest.hex() if len(digest) == hashlib.sha256().digest_size else None


def _digest(source: Source, start: int, size: int) -> bytes:
    hasher = hashlib.sha256()
    _feed(hasher, source, start, size)
    return hasher.digest()


def _feed(hasher: Any, source: Source, start: int, size: int) -> None:
    end = start + size
    while start < end and not source.stopped.is_set() and (chunk := source.at(start, min(CHUNK, end - start))):
        hasher.update(chunk)
        start += len(chunk)
