"""Read-through cache of blobs in a folder of this machine. Section 11 of docs/reference/store-format.md.

    cas/sha256/<first 2 hex>/<64 hex>       a blob, as in a store
    whole/<64 hex>/                         a file of many blobs, which folders have links to
    stamps/<first 2 hex>/<64 hex>           under which circumstances either was hashed; dated anew when it is used
    partial/                                large ones on their way in

Processes share it without locks: a file appears whole by being renamed, and one that is open stays readable when it is
thrown out.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final

from nxpipe.artifact_store.backends.files import os_errors, write_at
from nxpipe.artifact_store.backends.no_symlinks import PRIVATE, NotAFile, SafeFolder, Spot, is_ours, is_same
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Denied
from nxpipe.artifact_store.fetch.file_layout import chunks_between, sha256_between
from nxpipe.artifact_store.fetch.local_files import LocalFiles, Stamps, date, entries
from nxpipe.artifact_store.layout import BLOBS, blob_path

DEFAULT_LIMIT: Final = 20 * 1024**3

_KEPT_PARTIAL: Final = 24 * 3600.0  # seconds
_FULL: Final = 0.9  # of the limit: what is left after throwing out, so that it is not done for every blob


@dataclass(frozen=True)
class _Kept:
    used: float  # when, the last time
    size: int
    throw_out: Callable[[], None]


class ReadCache:
    """Files that another user may write to are hashed at each use, in a copy that nobody else can open."""

    def __init__(self, root: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.root = root
        self._files = SafeFolder(root, PRIVATE)
        self.partial = Spot(self._files, "partial")
        self._limit = limit
        self._stamps = Stamps(self._files, "stamps")
        self.held = LocalFiles(self._files, "whole", self._stamps)
        self._room: int | None = None  # until we look again; None: we have not looked yet

    def open(self, blob: Blob) -> IO[bytes] | None:
        """The blob, proved right; None when it is not here. A damaged one is thrown away."""
        path = blob_path(blob)
        with os_errors(f"read {self.root / path}"):
            try:
                file = self._files.reader(path)
            except FileNotFoundError:
                return None
            except NotAFile:
                self._throw_out(blob.sha256)
                return None
            if not is_ours(os.fstat(file.fileno())):
                with file:
                    proved = self._copied(blob, file)
            elif self._stamps.fits(blob.sha256, os.fstat(file.fileno())) or self._is_right(blob, file):
                return file
            else:
                file.close()
                proved = None
            if proved is None:
                self._throw_out(blob.sha256)
        return proved

    def keep(self, name: str, blob: Blob, descriptor: int) -> None:
        """Take over a file in `partial` that has just been proved to be this blob."""
        target = blob_path(blob)
        with os_errors(f"write {self.root / target}"):
            date(descriptor)
            self._files.rename(self.partial.at(name), target)
            with suppress(FileNotFoundError):  # others may throw it out at once
                seen = self._files.status(target)
                if is_same(seen, os.fstat(descriptor)):
                    self._stamps.put(blob.sha256, seen)
            self.make_room(blob.size)

    def _is_right(self, blob: Blob, file: IO[bytes]) -> bool:
        """By its content; dated before, so that whoever writes to it while it is hashed is noticed."""
        with suppress(PermissionError):
            date(file.fileno())
        before = os.fstat(file.fileno())
        if before.st_size != blob.size or sha256_between(file.fileno(), 0, blob.size) != blob.sha256:
            return False
        with suppress(Denied, PermissionError):
            self._stamps.put(blob.sha256, before)
        return True

    def _copied(self, blob: Blob, file: IO[bytes]) -> IO[bytes] | None:
        """Hashed while it is copied, for its owner may write to it at any moment."""
        if os.fstat(file.fileno()).st_size != blob.size:
            return None
        copy, hasher, done = self._nameless(), hashlib.sha256(), 0
        for chunk in chunks_between(file.fileno(), 0, blob.size):
            hasher.update(chunk)
            write_at(copy.fileno(), chunk, done)
            done += len(chunk)
        if hasher.hexdigest() == blob.sha256:
            return copy
        copy.close()
        return None

    def _nameless(self) -> IO[bytes]:
        try:
            return tempfile.TemporaryFile(buffering=0, dir=self.partial.root)
        except OSError:  # we may not write there, or it is not there yet
            return tempfile.TemporaryFile(buffering=0)

    def _throw_out(self, sha256: str) -> None:
        with suppress(FileNotFoundError, PermissionError, IsADirectoryError):  # what is not ours may stay
            self._files.remove(f"{BLOBS}{sha256[:2]}/{sha256}")
        self._stamps.forget(sha256)

    def make_room(self, size: int) -> None:
        """For so many bytes that have come. What others add meanwhile is seen at the next look: the limit is kept in
        the long run, not to the byte."""
        if self._room is not None:
            self._room -= size
        if self._room is None or self._room < 0:
            kept = sorted((*self._blobs(), *self._whole()), key=lambda one: one.used)
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
        for shard in entries(self._files, BLOBS.rstrip("/")):
            for seen in entries(self._files, f"{BLOBS}{shard.name}") if shard.is_folder else ():
                if seen.is_file:
                    used = self._stamps.last_used(seen.name)
                    yield _Kept(used, seen.status.st_size, partial(self._throw_out, seen.name))

    def _whole(self) -> Iterator[_Kept]:
        for content, size in self.held.each():
            yield _Kept(self._stamps.last_used(content), size, partial(self.held.throw_out, content))

    def _forget_old_partials(self) -> None:
        for seen in entries(self._files, self.partial.folder):
            # Not when it was modified: a finished one is dated back before it gets its name.
            old = time.time() - seen.status.st_ctime > _KEPT_PARTIAL
            if seen.is_file and old and seen.name.startswith(".") and seen.name.endswith(".part"):
                with suppress(FileNotFoundError, PermissionError):
                    self._files.remove(self.partial.at(seen.name))
