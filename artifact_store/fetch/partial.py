"""Partial file of a large download, kept so that a later process resumes an interrupted one.

The file has its bytes at their offsets, followed by a journal: one byte for each range, 1 when all of it has
arrived. One file, so that a rename hands over both atomically. The journal is a hint only: every byte is hashed
before the file gets its final name.
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

from nxpipe.artifact_store.backends.files import os_errors, write_at
from nxpipe.artifact_store.backends.no_symlinks import NotAFile, Seen, Spot, is_ours
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.fetch.local_files import date

# At each end of a call the hashing thread has to wait for the receiving ones: few large calls keep it up with them.
_HASHED_AT_ONCE: Final = 8 * 1024**2
NOTED_AFTER: Final = 1024**2  # bytes
_LEFT_ALONE: Final = 3600.0  # seconds after which whoever wrote it is taken for dead, on this machine or another
_NOBODY: Final = "nobody"
_MODE: Final = 0o644  # it may become a file that is served, and is nobody else's to write to


class Partial:
    """Several threads may use it at once."""

    def __init__(self, path: Path, descriptor: int, size: int, stretches: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._size = size
        self._stretches = stretches
        # The kernel lets one writer into a file at a time, and has the others burn processor time meanwhile.
        self._one_writer = Lock()
        self._noting = Lock()
        self._complete: list[int] = []  # stretches that are not noted in the file yet
        self._unnoted = 0  # their bytes
        with os_errors(f"write {path}"):
            os.ftruncate(descriptor, size + stretches)

    def has(self, stretch: int) -> bool:
        return os.pread(self.descriptor, 1, self._size + stretch) == b"\1"

    def has_any(self) -> bool:
        for each in self._complete:
            self.write(b"\1", self._size + each)
        return b"\1" in os.pread(self.descriptor, self._stretches, self._size)

    def write(self, data: bytes | memoryview, at: int) -> None:
        with os_errors(f"write {self.path}"), self._one_writer:
            write_at(self.descriptor, data, at)

    def complete(self, stretch: int, size: int) -> None:
        """So many bytes have come there. What is small is noted together with others: a kill costs a few of them."""
        with self._noting:
            self._complete.append(stretch)
            self._unnoted += size
            if self._unnoted < NOTED_AFTER:
                return
            noted, self._complete, self._unnoted = self._complete, [], 0
        for each in noted:
            self.write(b"\1", self._size + each)

    def feed(self, hasher: "hashlib._Hash", at: int, stop: int) -> None:
        """Hash bytes as they lie in the file, which for fresh ones means in memory."""
        buffer = memoryview(bytearray(min(_HASHED_AT_ONCE, stop - at)))
        with os_errors(f"read {self.path}"):
            while at < stop and (read := os.preadv(self.descriptor, [buffer[: stop - at]], at)):
                hasher.update(buffer[:read])
                at += read

    def forget(self, first: int, count: int) -> None:
        """These have to come again."""
        self.write(bytes(count), self._size + first)

    def finish(self) -> None:
        """Nothing but its bytes, and safe from a power loss."""
        with os_errors(f"write {self.path}"):
            os.ftruncate(self.descriptor, self._size)
            date(self.descriptor)
            os.fsync(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


@contextmanager
def partial(spot: Spot, name: str, size: int, stretches: int) -> Iterator[Partial]:
    """A file of our own there, with whatever a dead process has left under this name, which is a digest.

    At the end it is gone unless it was moved away; if an error is the end, what has come stays for whoever comes next.
    """
    own = _name(name, f"{_machine()}-{os.getpid()}")
    path = spot.root / own
    with os_errors(f"write {path}"):
        ours = Partial(path, _taken_over(spot, name, own) or spot.files.create(spot.at(own), _MODE), size, stretches)
    try:
        yield ours
    except BaseException:
        with suppress(OSError):
            if ours.has_any():
                spot.files.rename(spot.at(own), spot.at(_name(name, _NOBODY)))
        raise
    finally:
        ours.close()
        with suppress(OSError):
            spot.files.remove(spot.at(own))


def _taken_over(spot: Spot, name: str, own: str) -> int | None:
    """What a dead process of this user has left, under our own name and open; nothing that others can write to."""
    for left in _abandoned(spot, name):
        with suppress(FileNotFoundError, PermissionError, NotAFile):  # somebody else was faster, or it is theirs
            spot.files.rename(spot.at(left.name), spot.at(own))
            descriptor = spot.files.open(spot.at(own), os.O_RDWR)
            if _may_be_taken_over(os.fstat(descriptor)):
                return descriptor
            os.close(descriptor)
    return None


def _may_be_taken_over(seen: os.stat_result) -> bool:
    """Ours, and under no other name: a link to another file of ours would have us write there."""
    return is_ours(seen) and seen.st_uid == os.geteuid() and seen.st_nlink == 1


def _name(name: str, owner: str) -> str:
    return f".{name}.{owner}.{secrets.token_hex(4)}.part"


def _machine() -> str:
    return sha256_hex(os.uname().nodename.encode())[:12]


def _abandoned(spot: Spot, name: str) -> Iterator[Seen]:
    try:
        listed = spot.files.list(spot.folder)
    except FileNotFoundError:
        return
    for seen in listed:
        if seen.name.startswith(f".{name}.") and seen.name.endswith(".part") and _may_be_taken_over(seen.status):
            owner = seen.name.split(".")[2]
            untouched = time.time() - seen.status.st_ctime  # a finished one has been dated back
            if owner == _NOBODY or _is_dead(owner) or untouched > _LEFT_ALONE:
                yield seen


def _is_dead(owner: str) -> bool:
    """Of another machine's processes we know nothing, and a number that somebody else has by now looks alive."""
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
