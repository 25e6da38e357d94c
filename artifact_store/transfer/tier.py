"""A folder on this machine that keeps the blobs it has read. Section 11 of docs/store-format.md.

    cas/sha256/<first 2 hex>/<64 hex>       a blob, as in a store
    whole/<64 hex>/                         a file of many blobs, which folders have links to
    stamps/<first 2 hex>/<64 hex>           under which circumstances either was hashed; dated anew when it is used
    partial/                                large ones on their way in

Processes share it without locks: a file appears whole by being renamed, and one that is open stays readable when it is
thrown out.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final

from artifact_store.backends.files import os_errors
from artifact_store.backends.protocol import CHUNK
from artifact_store.documents import Blob
from artifact_store.layout import BLOBS, blob_path
from artifact_store.transfer.held import Held
from artifact_store.transfer.stamp import Stamps, date

DEFAULT_LIMIT: Final = 20 * 1024**3

_KEPT_PARTIAL: Final = 24 * 3600.0  # seconds
_FULL: Final = 0.9  # of the limit: what is left after throwing out, so that it is not done for every blob


@dataclass(frozen=True)
class _Kept:
    used: float  # when, the last time
    size: int
    throw_out: Callable[[], None]


class Tier:
    def __init__(self, root: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.root = root
        self.partial = root / "partial"
        self._limit = limit
        self._stamps = Stamps(root / "stamps")
        self.held = Held(root / "whole", self._stamps)
        self._room: int | None = None  # until we look again; None: we have not looked yet

    def open(self, blob: Blob) -> IO[bytes] | None:
        """The blob, proved right; None when it is not here. A damaged one is thrown away."""
        path = self.root / blob_path(blob)
        with os_errors(f"read {path}"):
            try:
                file = path.open("rb", buffering=0)
            except FileNotFoundError:
                return None
            if self._stamps.fits(blob.sha256, os.fstat(file.fileno())) or self._is_right(blob, file):
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
                self._stamps.put(blob.sha256, target.stat())
            self.make_room(blob.size)

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
            self._stamps.put(blob.sha256, before)
        return True

    def _throw_out(self, sha256: str) -> None:
        (self.root / BLOBS / sha256[:2] / sha256).unlink(missing_ok=True)
        self._stamps.forget(sha256)

    def make_room(self, size: int) -> None:
        """For so many bytes that have come. What others add meanwhile is seen at the next look: the limit is kept in
        the long run, not to the byte."""
        if self._room is not None:
            self._room -= size
        if self._room is None or self._room < 0:
            kept = sorted((*self._blobs(), *self._files()), key=lambda one: one.used)
            total = sum(one.size for one in kept)
            if total > self._limit:
                for one in kept:
                    if total <= self._limit * _FULL:
                        break
                    one.throw_out()
                    total -= one.size
                self._forget_old_partials()
            self._room = self._limit - total

    def _blobs(self) -> Iterator[_Kept]:
        for path in (self.root / BLOBS).glob("??/*"):
            with suppress(FileNotFoundError):
                used = self._stamps.last_used(path.name)
                yield _Kept(used, path.stat().st_size, partial(self._throw_out, path.name))

    def _files(self) -> Iterator[_Kept]:
        for content, size in self.held.each():
            yield _Kept(self._stamps.last_used(content), size, partial(self.held.throw_out, content))

    def _forget_old_partials(self) -> None:
        for path in self.partial.glob(".*.part"):
            with suppress(FileNotFoundError):
                # Not when it was modified: a finished one is dated back before it gets its name.
                if time.time() - path.stat().st_ctime > _KEPT_PARTIAL:
                    path.unlink()
