"""A folder on this machine that keeps the blobs it has read. Section 11 of docs/store-format.md.

    cas/sha256/<first 2 hex>/<64 hex>       a blob, as in a store
    stamps/<first 2 hex>/<64 hex>           under which circumstances it was hashed; written anew when it is used
    partial/                                large blobs on their way in

Processes share it without locks: a file appears whole by being renamed, and one that is open stays readable when it is
thrown out.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from artifact_store.backends.files import os_errors
from artifact_store.backends.protocol import CHUNK
from artifact_store.documents import Blob
from artifact_store.layout import BLOBS, blob_path
from artifact_store.transfer.stamp import date, stamp

DEFAULT_LIMIT: Final = 20 * 1024**3

_USED_AGAIN_AFTER: Final = 60.0  # seconds within which a second use is not noted
_KEPT_PARTIAL: Final = 24 * 3600.0  # seconds
_FULL: Final = 0.9  # of the limit: what is left after throwing out, so that it is not done for every blob


class Tier:
    def __init__(self, root: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.root = root
        self.partial = root / "partial"
        self._limit = limit
        self._room: int | None = None  # until we look again; None: we have not looked yet

    def open(self, blob: Blob) -> IO[bytes] | None:
        """The blob, proved right; None when it is not here. A damaged one is thrown away."""
        path = self.root / blob_path(blob)
        with os_errors(f"read {path}"):
            try:
                file = path.open("rb", buffering=0)
            except FileNotFoundError:
                return None
            if self._is_stamped(blob, file) or self._is_right(blob, file):
                return file
            file.close()
            self._throw_out(blob.sha256)
        return None

    def keep(self, path: Path, blob: Blob) -> None:
        """Take over a file in `partial` that has just been proved to be this blob."""
        target = self.root / blob_path(blob)
        with os_errors(f"write {target}"):
            date(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
            with suppress(FileNotFoundError):  # others may throw it out at once
                self._stamp(blob, target.stat())
            self._make_room(blob.size)

    def _stamp_of(self, sha256: str) -> Path:
        return self.root / "stamps" / sha256[:2] / sha256

    def _is_stamped(self, blob: Blob, file: IO[bytes]) -> bool:
        path = self._stamp_of(blob.sha256)
        try:
            stamped = path.read_text(errors="replace")
            used = path.stat().st_mtime
        except FileNotFoundError:
            return False
        if not stamped or stamped != stamp(os.fstat(file.fileno())):
            return False
        if time.time() - used > _USED_AGAIN_AFTER:
            with suppress(OSError):  # read-only for us; its owner's uses count
                os.utime(path)
        return True

    def _is_right(self, blob: Blob, file: IO[bytes]) -> bool:
        """By its content; dated before, so that whoever writes to it while it is hashed is noticed."""
        with suppress(PermissionError):
            date(file.fileno())
        before = os.fstat(file.fileno())
        if before.st_size != blob.size:
            return False
        hasher = hashlib.sha256()
        while chunk := file.read(CHUNK):
            hasher.update(chunk)
        file.seek(0)
        if hasher.hexdigest() != blob.sha256:
            return False
        with suppress(PermissionError):
            self._stamp(blob, before)
        return True

    def _stamp(self, blob: Blob, hashed: os.stat_result) -> None:
        """A stamp that is torn, or written over by another process, fits nothing: the blob is hashed again."""
        path = self._stamp_of(blob.sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stamp(hashed))

    def _throw_out(self, sha256: str) -> None:
        for path in (self.root / BLOBS / sha256[:2] / sha256, self._stamp_of(sha256)):
            path.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """What others add meanwhile is seen at the next look: the limit is kept in the long run, not to the byte."""
        if self._room is not None:
            self._room -= size
        if self._room is None or self._room < 0:
            kept = sorted(self._kept())
            total = sum(taken for _, taken, _ in kept)
            if total > self._limit:
                for _, taken, sha256 in kept:
                    if total <= self._limit * _FULL:
                        break
                    self._throw_out(sha256)
                    total -= taken
                self._forget_old_partials()
            self._room = self._limit - total

    def _kept(self) -> Iterator[tuple[float, int, str]]:
        """When each blob was last used, its size and its name."""
        for path in (self.root / BLOBS).glob("??/*"):
            with suppress(FileNotFoundError):
                size = path.stat().st_size
                try:
                    used = self._stamp_of(path.name).stat().st_mtime
                except FileNotFoundError:
                    used = 0.0
                yield used, size, path.name

    def _forget_old_partials(self) -> None:
        for path in self.partial.glob(".*.part"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _KEPT_PARTIAL:
                    path.unlink()
