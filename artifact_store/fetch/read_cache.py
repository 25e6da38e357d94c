"""Read-through cache of blobs in a folder of this machine. Section 11 of docs/reference/store-format.md.

    cas/sha256/<first 2 hex>/<64 hex>       a blob, as in a store
    whole/<64 hex>/                         a file of many blobs, hard-linked into folders
    stamps/<first 2 hex>/<64 hex>           status of either when it was hashed; touched at each use
    partial/                                incomplete downloads

Processes share it without locks: a file appears atomically by a rename, and an open file stays readable after its
eviction.
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
from nxpipe.artifact_store.backends.no_symlinks import PRIVATE, NotAFile, SafeFolder, Subfolder, is_ours, is_same
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Denied
from nxpipe.artifact_store.fetch.file_layout import chunks_between, sha256_between
from nxpipe.artifact_store.fetch.local_files import LocalFiles, Stamps, date, entries
from nxpipe.artifact_store.layout import BLOBS, blob_path

DEFAULT_LIMIT: Final = 20 * 1024**3

_KEPT_PARTIAL: Final = 24 * 3600.0  # seconds
_FULL: Final = 0.9  # fraction of the limit that an eviction leaves, so that it does not run for every blob


@dataclass(frozen=True)
class _Entry:
    used: float  # time of the last use
    size: int
    evict: Callable[[], None]


class ReadCache:
    """A read-through cache. A file that another user may write to is copied and hashed at each use."""

    def __init__(self, root: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.root = root
        self._files = SafeFolder(root, PRIVATE)
        self.partial = Subfolder(self._files, "partial")
        self._limit = limit
        self._stamps = Stamps(self._files, "stamps")
        self.local_files = LocalFiles(self._files, "whole", self._stamps)
        self._free: int | None = None  # bytes before the next scan; None: not scanned yet

    def open(self, blob: Blob) -> IO[bytes] | None:
        """The blob as an open file, verified; None if it is absent. A damaged file is removed."""
        path = blob_path(blob)
        with os_errors(f"read {self.root / path}"):
            try:
                file = self._files.reader(path)
            except FileNotFoundError:
                return None
            except NotAFile:
                self._remove(blob.sha256)
                return None
            if not is_ours(os.fstat(file.fileno())):
                with file:
                    proved = self._verified_copy(blob, file)
            elif self._stamps.fits(blob.sha256, os.fstat(file.fileno())) or self._is_right(blob, file):
                return file
            else:
                file.close()
                proved = None
            if proved is None:
                self._remove(blob.sha256)
        return proved

    def keep(self, name: str, blob: Blob, descriptor: int) -> None:
        """Move a verified file from `partial` into the cache."""
        target = blob_path(blob)
        with os_errors(f"write {self.root / target}"):
            date(descriptor)
            self._files.rename(self.partial.at(name), target)
            with suppress(FileNotFoundError):  # another process may evict it at once
                status = self._files.status(target)
                if is_same(status, os.fstat(descriptor)):
                    self._stamps.put(blob.sha256, status)
            self.evict(blob.size)

    def _is_right(self, blob: Blob, file: IO[bytes]) -> bool:
        """True if the content matches. The file is dated first, so that a concurrent write is detected."""
        with suppress(PermissionError):
            date(file.fileno())
        before = os.fstat(file.fileno())
        if before.st_size != blob.size or sha256_between(file.fileno(), 0, blob.size) != blob.sha256:
            return False
        with suppress(Denied, PermissionError):
            self._stamps.put(blob.sha256, before)
        return True

    def _verified_copy(self, blob: Blob, file: IO[bytes]) -> IO[bytes] | None:
        """A copy that is hashed while copying, since the owner of the file may write to it at any time."""
        if os.fstat(file.fileno()).st_size != blob.size:
            return None
        copy, hasher, done = self._temporary_file(), hashlib.sha256(), 0
        for chunk in chunks_between(file.fileno(), 0, blob.size):
            hasher.update(chunk)
            write_at(copy.fileno(), chunk, done)
            done += len(chunk)
        if hasher.hexdigest() == blob.sha256:
            return copy
        copy.close()
        return None

    def _temporary_file(self) -> IO[bytes]:
        try:
            return tempfile.TemporaryFile(buffering=0, dir=self.partial.root)
        except OSError:  # no write permission, or no such folder yet
            return tempfile.TemporaryFile(buffering=0)

    def _remove(self, sha256: str) -> None:
        with suppress(FileNotFoundError, PermissionError, IsADirectoryError):  # files of other users may stay
            self._files.remove(f"{BLOBS}{sha256[:2]}/{sha256}")
        self._stamps.forget(sha256)

    def evict(self, size: int) -> None:
        """Account for `size` new bytes and evict the least recently used files if the limit is exceeded. Files of other
        processes are counted at the next scan, so the limit may be exceeded for a time."""
        if self._free is not None:
            self._free -= size
        if self._free is None or self._free < 0:
            oldest_first = sorted((*self._blobs(), *self._whole()), key=lambda entry: entry.used)
            total = sum(entry.size for entry in oldest_first)
            if total > self._limit:
                for entry in oldest_first:
                    if total <= self._limit * _FULL:
                        break
                    entry.evict()
                    total -= entry.size
                self._remove_old_partials()
            self._free = self._limit - total

    def _blobs(self) -> Iterator[_Entry]:
        for shard in entries(self._files, BLOBS.rstrip("/")):
            for file in entries(self._files, f"{BLOBS}{shard.name}") if shard.is_folder else ():
                if file.is_file:
                    used = self._stamps.last_used(file.name)
                    yield _Entry(used, file.status.st_size, partial(self._remove, file.name))

    def _whole(self) -> Iterator[_Entry]:
        for content, size in self.local_files.each():
            yield _Entry(self._stamps.last_used(content), size, partial(self.local_files.remove, content))

    def _remove_old_partials(self) -> None:
        for file in entries(self._files, self.partial.folder):
            # The status time, since a finished file gets an old modification time before its name.
            old = time.time() - file.status.st_ctime > _KEPT_PARTIAL
            if file.is_file and old and file.name.startswith(".") and file.name.endswith(".part"):
                with suppress(FileNotFoundError, PermissionError):
                    self._files.remove(self.partial.at(file.name))
