"""A stretch of an open file, by its offsets: several threads may do this with one descriptor."""

import os
from collections.abc import Iterator

from nxpipe.artifact_store.backends.protocol import CHUNK
from nxpipe.artifact_store.digest import sha256_of_chunks


def chunks_between(descriptor: int, start: int, stop: int) -> Iterator[bytes]:
    """The bytes as far as there are any."""
    while start < stop and (chunk := os.pread(descriptor, min(CHUNK, stop - start), start)):
        yield chunk
        start += len(chunk)


def sha256_between(descriptor: int, start: int, stop: int) -> str:
    return sha256_of_chunks(chunks_between(descriptor, start, stop))
