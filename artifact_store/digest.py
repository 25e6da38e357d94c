"""SHA-256, the one digest of the store."""

import hashlib
from collections.abc import Iterable


def sha256_hex(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of_chunks(chunks: Iterable[bytes]) -> str:
    """The digest of bytes that need not fit in memory."""
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()
