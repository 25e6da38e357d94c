"""The arithmetic of a blob in parts: where they begin, what they hash to, and what that proves."""

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from nxpipe.artifact_store.backends.protocol import CHUNK, Payload, nobody
from nxpipe.artifact_store.backends.s3_body import Source, opened

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


def hashed_in_parts(data: bytes | memoryview | Path, size: int) -> Payload:
    """The digests of the whole and of its parts: what the parts tie together are then the bytes that have the name."""
    unnamed = Payload("", size, data if isinstance(data, Path) else memoryview(data).cast("B"))
    with opened(unnamed, nobody) as source:
        whole, parts = _digests(unnamed, source)
    return replace(unnamed, sha256=whole.hex(), parts=parts)


def parts_of(payload: Payload, source: Source) -> list[Part]:
    """By their digests; where those were not taken with the whole's, it too is hashed again, which alone ties them."""
    digests = payload.parts
    if not digests:
        whole, digests = _digests(payload, source)
        if whole.hex() != payload.sha256:
            raise source.changed()
    return [
        Part(number, start, size, spelled(digest))
        for number, ((start, size), digest) in enumerate(zip(stretches(payload.size), digests, strict=True), 1)
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


def _digests(payload: Payload, source: Source) -> tuple[bytes, tuple[bytes, ...]]:
    """Of the whole and of each part, several at once."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, source.stopping_on_errors():
        whole = pool.submit(_digest, source, 0, payload.size)
        parts = tuple(pool.map(lambda piece: _digest(source, *piece), stretches(payload.size)))
        return whole.result(), parts


def _digest(source: Source, start: int, size: int) -> bytes:
    hasher = hashlib.sha256()
    _feed(hasher, source, start, size)
    return hasher.digest()


def _feed(hasher: Any, source: Source, start: int, size: int) -> None:
    end = start + size
    while start < end and not source.stopped.is_set() and (chunk := source.at(start, min(CHUNK, end - start))):
        hasher.update(chunk)
        start += len(chunk)
