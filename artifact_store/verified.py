"""Bytes on their way out of a store: nothing leaves unless it is what its name says."""

import hashlib
from collections.abc import Iterable, Iterator

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument


def checked(chunks: Iterable[bytes], blob: Blob, where: str, way_out: str) -> Iterator[bytes]:
    """The same chunks; raises at the end, or as soon as there are too many, if they are not this blob."""
    hasher = hashlib.sha256()
    size = 0
    for chunk in chunks:
        hasher.update(chunk)
        size += len(chunk)
        if size > blob.size:
            raise Corrupt(where, f"it has more than its {blob.size} bytes", way_out)
        yield chunk
    if size < blob.size:
        raise Corrupt(where, f"it has {size} of its {blob.size} bytes", way_out)
    if hasher.hexdigest() != blob.sha256:
        raise Corrupt(where, f"its {size} bytes have the SHA-256 {hasher.hexdigest()}", way_out)


def read_at_most(limit: int, chunks: Iterable[bytes]) -> bytes:
    """All of a document, without taking a huge stranger into memory."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise InvalidDocument(f"it has more than the allowed {limit} bytes")
        parts.append(chunk)
    return b"".join(parts)
