"""A large file on its way in, so kept that a later process goes on where a dead one stopped.

The file has its bytes at their places, and behind them a journal: one byte for each stretch that comes by itself, 1
when all of it has come. One file, so that renaming it hands over both at once. Nothing of this is believed in the end:
every byte is hashed before the file gets its name.
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

from artifact_store.backends.files import os_errors, write_at
from artifact_store.digest import sha256_hex
from artifact_store.transfer.stamp import date

# At each end of a call the hashing thread has to wait for the receiving ones: few large calls keep it up with them.
_HASHED_AT_ONCE: Final = 8 * 1024**2
NOTED_AFTER: Final = 1024**2  # bytes
_LEFT_ALONE: Final = 3600.0  # seconds after which whoever wrote it is taken for dead, on this machine or another
_NOBODY: Final = "nobody"


class Partial:
    """Several threads may use it at once."""

    def __init__(self, path: Path, size: int, stretches: int) -> None:
        self.path = path
        self._size = size
        self._stretches = stretches
        # The kernel lets one writer into a file at a time, and has the others burn processor time meanwhile.
        self._one_writer = Lock()
        self._noting = Lock()
        self._complete: list[int] = []  # stretches that are not noted in the file yet
        self._unnoted = 0  # their bytes
        with os_errors(f"write {path}"):
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self.descriptor, size + stretches)

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
def partial(folder: Path, name: str, size: int, stretches: int) -> Iterator[Partial]:
    """A file of our own in `folder`, with whatever a dead process has left under this name, which is a digest.

    At the end it is gone unless it was moved away; if an error is the end, what has come stays for whoever comes next.
    """
    path = folder / _name(name, f"{_machine()}-{os.getpid()}")
    with os_errors(f"write {path}"):
        folder.mkdir(parents=True, exist_ok=True)
        for left in _abandoned(folder, name):
            with suppress(FileNotFoundError):  # somebody else was faster
                left.rename(path)
                break
    ours = Partial(path, size, stretches)
    try:
        yield ours
    except BaseException:
        with suppress(OSError):
            if ours.has_any():
                path.rename(folder / _name(name, _NOBODY))
        raise
    finally:
        ours.close()
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _name(name: str, owner: str) -> str:
    return f".{name}.{owner}.{secrets.token_hex(4)}.part"


def _machine() -> str:
    return sha256_hex(os.uname().nodename.encode())[:12]


def _abandoned(folder: Path, name: str) -> Iterator[Path]:
    for path in folder.glob(f".{name}.*.part"):
        owner = path.name.split(".")[2]
        if owner == _NOBODY or _is_dead(owner) or _untouched(path) > _LEFT_ALONE:
            yield path


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


def _untouched(path: Path) -> float:
    try:
        return time.time() - path.stat().st_ctime  # a finished one has been dated back
    except FileNotFoundError:
        return 0.0
