"""Atomic file writes, and messages for errors of the operating system."""

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from nxpipe.artifact_store.backends.no_symlinks import SafeFolder
from nxpipe.artifact_store.backends.protocol import CHUNK, Payload
from nxpipe.artifact_store.errors import Denied, StoreUnavailable

_FORBIDDEN: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_REMEDIES: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "make it readable and writable for this user"),
    errno.EROFS: "make the folder writable for this user",
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR), "move the file or folder in its place away"),
    errno.ELOOP: "put a real folder in its place",
}

# Errors of fallocate on a file system that lacks it (NFS, EFS), and in a sandbox that forbids it.
_NO_RESERVATION: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)
_AT_ONCE: Final = 16 * 1024**2  # bytes per in-kernel copy; Ctrl-C takes effect between two copies
# Errors of copy_file_range across file systems, on one that lacks it, and in a sandbox that forbids it.
_NO_COPY_INSIDE: Final = (errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)


@contextmanager
def os_errors(doing: str) -> Iterator[None]:
    """Turn an OSError into a StoreUnavailable with a remedy; `doing` is a phrase such as "write /some/file"."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "fix that")
        message = f"cannot {doing}: {error.strerror or error}; {remedy}, or use another location; a retry is safe"
        if error.errno in _FORBIDDEN:
            raise Denied(message, f"permission to {doing.partition(' ')[0]}", doing) from error
        raise StoreUnavailable(message) from error


class NewFile:
    """A file being written under a random name that no other process uses."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._open = True

    def close(self) -> None:
        """Close the file. A network file system reports failed writes only here."""
        if self._open:
            self._open = False
            os.close(self.descriptor)


class Scratch:
    """A new file that is hashed while it is written."""

    def __init__(self, file: NewFile) -> None:
        self.path = file.path
        self.descriptor = file.descriptor
        self._file = file
        self._hasher = hashlib.sha256()
        self._size = 0

    def write(self, chunk: bytes | memoryview) -> None:
        with os_errors(f"write {self.path}"):
            write_at(self._file.descriptor, chunk, self._size)
        self._hasher.update(chunk)
        self._size += len(chunk)

    def finish(self) -> Payload:
        with os_errors(f"write {self.path}"):
            self._file.close()
        return Payload(self._hasher.hexdigest(), self._size, self.path)


@contextmanager
def new_file(folder: Path, mode: int = 0o666, within: SafeFolder | None = None) -> Iterator[NewFile]:
    """A new file in `folder`, removed when the block ends in any way, unless it was moved.

    With `within`, whose root contains the folder, no symlink below that root is followed.
    """
    name = f".{secrets.token_hex(8)}.part"
    path = folder / name
    below = within and within.relative(folder, name)
    try:
        with os_errors(f"write {path}"):
            file = NewFile(path, within.create(below, mode) if within and below else _created(path, mode))
        try:
            yield file
        finally:
            # An error of a network file system at this point follows the error that matters.
            with suppress(OSError):
                file.close()
    finally:
        with suppress(OSError):
            if within and below:
                within.remove(below)
            else:
                path.unlink()


@contextmanager
def scratch(folder: Path, mode: int = 0o666, within: SafeFolder | None = None) -> Iterator[Scratch]:
    with new_file(folder, mode, within) as file:
        yield Scratch(file)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def reserve(descriptor: int, offset: int, size: int) -> None:
    """Allocate the blocks of bytes that are about to be written, where the file system can: writes are then faster, and
    a full disk is reported before a transfer and not in its midst."""
    import ctypes  # os.posix_fallocate is no substitute: where a file system cannot, it writes to every block

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return
    while libc.fallocate(descriptor, 0, ctypes.c_int64(offset), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in _NO_RESERVATION:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def copy_into(descriptor: int, source: IO[bytes] | int, offset: int) -> None:
    """Copy a whole file to an offset of another: in the kernel, which may share blocks, where that is supported."""
    done, opened = 0, source if isinstance(source, int) else source.fileno()
    if hasattr(os, "copy_file_range"):
        try:
            while copied := os.copy_file_range(opened, descriptor, _AT_ONCE, done, offset + done):
                done += copied
        except OSError as error:
            if error.errno not in _NO_COPY_INSIDE:
                raise
    while chunk := os.pread(opened, CHUNK, done):
        write_at(descriptor, chunk, offset + done)
        done += len(chunk)


def _created(path: Path, mode: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, mode)


def chunks_of(file: IO[bytes], size: int | None = None) -> Iterator[bytes]:
    """Yield the rest of a file, or its next `size` bytes, in chunks; close it."""
    left = float("inf") if size is None else size
    with file:
        while left > 0 and (chunk := file.read(int(min(CHUNK, left)))):
            left -= len(chunk)
            yield chunk


def flush_to_disk(path: str | Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
