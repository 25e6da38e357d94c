"""Writing files so that nobody ever sees half of one, and saying what the operating system said."""

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from artifact_store.backends.protocol import CHUNK, Payload
from artifact_store.errors import StoreUnavailable

_WAY_OUT: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room for it"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make the folder writable for this user"),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR), "move away what stands in its place"),
}


@contextmanager
def os_errors(doing: str) -> Iterator[None]:
    """Turn an OSError into the store's own sentence: `doing` reads "write /some/file"."""
    try:
        yield
    except OSError as error:
        way_out = _WAY_OUT.get(error.errno or 0, "mend that")
        raise StoreUnavailable(
            f"cannot {doing}: {error.strerror or error}; {way_out}, or use another store; a retry is safe"
        ) from error


class Scratch:
    """A file being written, hashed on the way."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self._file = file
        self._hasher = hashlib.sha256()
        self._size = 0

    def write(self, chunk: bytes | memoryview) -> None:
        with os_errors(f"write {self.path}"):
            self._file.write(chunk)
        self._hasher.update(chunk)
        self._size += len(chunk)

    def finish(self) -> Payload:
        with os_errors(f"write {self.path}"):
            self._file.close()
        return Payload(self._hasher.hexdigest(), self._size, self.path)


@contextmanager
def scratch(folder: Path) -> Iterator[Scratch]:
    """A new file in `folder` that is gone at the end, unless it was moved away; however the block ends."""
    path = folder / f".{secrets.token_hex(8)}.part"
    try:
        with os_errors(f"write {path}"):
            folder.mkdir(parents=True, exist_ok=True)
            file = path.open("xb", buffering=CHUNK)
        try:
            yield Scratch(path, file)
        finally:
            # A full disk fails the last flush again; the error that matters has been raised by then.
            with suppress(OSError):
                file.close()
    finally:
        with suppress(OSError):
            path.unlink()


def chunks_of(file: IO[bytes], size: int | None = None) -> Iterator[bytes]:
    """The rest of a file, or its next `size` bytes; closes it."""
    left = float("inf") if size is None else size
    with file:
        while left > 0 and (chunk := file.read(int(min(CHUNK, left)))):
            left -= len(chunk)
            yield chunk


def flush_to_disk(path: Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
