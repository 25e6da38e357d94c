"""Partial file of a large download, from which a later process resumes an interrupted one.

The file has its bytes at their offsets, followed by a journal: one byte for each range, 1 when it is complete. Both are
in one file, so that a rename moves both atomically. The journal is a hint only: every byte is hashed before the file
gets its final name.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Final

from nxpipe.artifact_store.backends.files import os_errors, reserve, write_at
from nxpipe.artifact_store.backends.no_symlinks import FolderEntry, NotAFile, Subfolder, is_ours
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.fetch.local_files import date

# Bytes. After each call the hashing thread waits for the receiving threads: few large calls keep it fast enough.
_HASHED_AT_ONCE: Final = 8 * 1024**2
NOTED_AFTER: Final = 1024**2  # bytes
_LEFT_ALONE: Final = 3600.0  # seconds without a write after which its process counts as dead, on any machine
_NO_OWNER: Final = "nobody"
_MODE: Final = 0o644  # it may become a file that is served, which other users must not write to


class Partial:
    """A partial file; thread-safe. Its ranges are numbered from 0; each has an entry in the journal."""

    def __init__(self, path: Path, descriptor: int, size: int, ranges: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._size = size
        self._ranges = ranges
        # The kernel serializes writers of one file by spinning, which wastes processor time.
        self._write_lock = Lock()
        self._journal_lock = Lock()
        self._complete: list[int] = []  # complete ranges that are not in the journal yet
        self._unnoted = 0  # their bytes
        with os_errors(f"write {path}"):
            os.ftruncate(descriptor, size + ranges)

    def has(self, number: int) -> bool:
        return os.pread(self.descriptor, 1, self._size + number) == b"\1"

    def has_any(self) -> bool:
        for number in self._complete:
            self.write(b"\1", self._size + number)
        return b"\1" in os.pread(self.descriptor, self._ranges, self._size)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        with os_errors(f"write {self.path}"), self._write_lock:
            write_at(self.descriptor, data, offset)

    def reserve(self, offset: int, size: int) -> None:
        """Allocate the blocks of bytes that are about to be received."""
        with os_errors(f"write {self.path}"), self._write_lock:
            reserve(self.descriptor, offset, size)

    def complete(self, number: int, size: int) -> None:
        """Mark a range of `size` bytes complete. Small ranges are journaled together; a kill may lose a few."""
        with self._journal_lock:
            self._complete.append(number)
            self._unnoted += size
            if self._unnoted < NOTED_AFTER:
                return
            noted, self._complete, self._unnoted = self._complete, [], 0
        for complete in noted:
            self.write(b"\1", self._size + complete)

    def feed(self, hasher: "hashlib._Hash", start: int, stop: int) -> None:
        """Hash bytes of the file; recently written ones are still in the page cache."""
        buffer = memoryview(bytearray(min(_HASHED_AT_ONCE, stop - start)))
        with os_errors(f"read {self.path}"):
            while start < stop and (read := os.preadv(self.descriptor, [buffer[: stop - start]], start)):
                hasher.update(buffer[:read])
                start += read

    def forget(self, first: int, count: int) -> None:
        """Mark `count` ranges from `first` on as missing."""
        self.write(bytes(count), self._size + first)

    def finish(self, *, flush: bool = True) -> None:
        """Remove the journal, and flush the file to disk."""
        with os_errors(f"write {self.path}"):
            os.ftruncate(self.descriptor, self._size)
            date(self.descriptor)
            if flush:
                os.fsync(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


@contextmanager
def partial(spot: Subfolder, name: str, size: int, ranges: int) -> Iterator[Partial]:
    """A partial file for a digest `name`, resumed from the remains of a dead process if there are any.

    At the end the file is removed unless it was moved; after an error it is kept for a later process.
    """
    own = _name(name, f"{_machine()}-{os.getpid()}")
    path = spot.root / own
    with os_errors(f"write {path}"):
        descriptor = _take_over(spot, name, own) or spot.files.create(spot.at(own), _MODE)
        file = Partial(path, descriptor, size, ranges)
    try:
        yield file
    except BaseException:
        with suppress(OSError):
            if file.has_any():
                spot.files.rename(spot.at(own), spot.at(_name(name, _NO_OWNER)))
        raise
    finally:
        file.close()
        with suppress(OSError):
            spot.files.remove(spot.at(own))


def _take_over(spot: Subfolder, name: str, own: str) -> int | None:
    """Rename and open the partial file of a dead process of this user, if only this user can write to it."""
    for abandoned in _abandoned(spot, name):
        with suppress(FileNotFoundError, PermissionError, NotAFile):  # another process took it, or another user owns it
            spot.files.rename(spot.at(abandoned.name), spot.at(own))
            descriptor = spot.files.open(spot.at(own), os.O_RDWR)
            if _may_be_taken_over(os.fstat(descriptor)):
                return descriptor
            os.close(descriptor)
    return None


def _may_be_taken_over(status: os.stat_result) -> bool:
    """True for a file of this user with a single link; a second link may be a different file that must not change."""
    return is_ours(status) and status.st_uid == os.geteuid() and status.st_nlink == 1


def _name(name: str, owner: str) -> str:
    return f".{name}.{owner}.{secrets.token_hex(4)}.part"


def _machine() -> str:
    return sha256_hex(os.uname().nodename.encode())[:12]


def _abandoned(spot: Subfolder, name: str) -> Iterator[FolderEntry]:
    try:
        listed = spot.files.list(spot.folder)
    except FileNotFoundError:
        return
    for entry in listed:
        if entry.name.startswith(f".{name}.") and entry.name.endswith(".part") and _may_be_taken_over(entry.status):
            owner = entry.name.split(".")[2]
            untouched = time.time() - entry.status.st_ctime  # a finished file has an old modification time
            if owner == _NO_OWNER or _is_dead(owner) or untouched > _LEFT_ALONE:
                yield entry


def _is_dead(owner: str) -> bool:
    """True for a dead process of this machine; processes of other machines and reused ids count as alive."""
    machine, _, process = owner.partition("-")
    if machine != _machine() or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
