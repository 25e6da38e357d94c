"""A large blob on its way in, so kept that a later process goes on where a dead one stopped.

The file has the blob's bytes at their places, and behind them a journal: one byte for each range, 1 when the range is
complete. One file, so that renaming it hands over both at once. Nothing of this is believed in the end: the whole is
hashed before it gets its name.
"""

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from artifact_store.backends.files import os_errors
from artifact_store.digest import sha256_hex
from artifact_store.documents import Blob

RANGE: Final = 32 * 1024**2
# At each end of a call the hashing thread has to wait for the receiving ones: few large calls keep it up with them.
_HASHED_AT_ONCE: Final = 8 * 1024**2
_LEFT_ALONE: Final = 3600.0  # seconds after which whoever wrote it is taken for dead, on this machine or another
_NOBODY: Final = "nobody"


class Partial:
    def __init__(self, path: Path, blob: Blob) -> None:
        self.path = path
        self._size = blob.size
        self.ranges = -(-blob.size // RANGE)
        with os_errors(f"write {path}"):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._descriptor, self._size + self.ranges)
        self._buffer = memoryview(bytearray(min(_HASHED_AT_ONCE, self._size)))

    def span(self, number: int) -> tuple[int, int]:
        return number * RANGE, min((number + 1) * RANGE, self._size)

    def missing(self) -> list[int]:
        journal = os.pread(self._descriptor, self.ranges, self._size)
        return [number for number, done in enumerate(journal) if done != 1]

    def write(self, data: bytes, at: int) -> None:
        with os_errors(f"write {self.path}"):
            view = memoryview(data)
            while view:
                written = os.pwrite(self._descriptor, view, at)
                view, at = view[written:], at + written

    def complete(self, number: int) -> None:
        self.write(b"\1", self._size + number)

    def feed(self, hasher: "hashlib._Hash", number: int) -> None:
        """Hash a range as it lies in the file, which for a fresh one means in memory."""
        at, stop = self.span(number)
        with os_errors(f"read {self.path}"):
            while at < stop and (read := os.preadv(self._descriptor, [self._buffer[: stop - at]], at)):
                hasher.update(self._buffer[:read])
                at += read

    def forget(self) -> None:
        """Everything has to come again."""
        self.write(bytes(self.ranges), self._size)

    def finish(self) -> None:
        with os_errors(f"write {self.path}"):
            os.ftruncate(self._descriptor, self._size)

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def partial(folder: Path, blob: Blob) -> Iterator[Partial]:
    """A file of our own in `folder`, with whatever a dead process has left of this blob.

    At the end it is gone unless it was moved away; if an error is the end, what has come stays for whoever comes next.
    """
    path = folder / _name(blob, f"{_machine()}-{os.getpid()}")
    with os_errors(f"write {path}"):
        folder.mkdir(parents=True, exist_ok=True)
        for left in _abandoned(folder, blob):
            with suppress(FileNotFoundError):  # somebody else was faster
                left.rename(path)
                break
    ours = Partial(path, blob)
    try:
        yield ours
    except BaseException:
        with suppress(OSError):
            if len(ours.missing()) < ours.ranges:
                path.rename(folder / _name(blob, _NOBODY))
        raise
    finally:
        ours.close()
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _name(blob: Blob, owner: str) -> str:
    return f".{blob.sha256}.{owner}.{secrets.token_hex(4)}.part"


def _machine() -> str:
    return sha256_hex(socket.gethostname().encode())[:12]


def _abandoned(folder: Path, blob: Blob) -> Iterator[Path]:
    for path in folder.glob(f".{blob.sha256}.*.part"):
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
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
