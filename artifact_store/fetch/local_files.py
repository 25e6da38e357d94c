"""Assembled files in the cache, shared with target folders by hard link, and stamps that avoid hashing them again.

    whole/<content>/file            a file assembled from blobs, hard-linked into folders
    whole/<content>/pieces.json     the offset of each blob in it, for other files with some of these blobs

A write to such a file in a folder changes the cache too, which its stamp and its bytes reveal. Time stamps are coarse:
two writes within a millisecond may have the same one. Therefore a stamped file gets a modification time in the past,
which every later write changes.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.backends.files import os_errors, scratch
from nxpipe.artifact_store.backends.no_symlinks import FolderEntry, NotAFile, SafeFolder, is_ours, is_same
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Denied
from nxpipe.artifact_store.fetch.file_layout import AssembledFile, chunks_between
from nxpipe.artifact_store.layout import is_key

_WRITTEN: Final = 946_684_800 * 10**9  # the year 2000, in nanoseconds
_LONGEST: Final = 1024  # bytes of a stamp
_USED_AGAIN_AFTER: Final = 60.0  # seconds; a second use within this time is not recorded


def date(file: Path | int) -> None:
    """Set the fixed modification time; done before the bytes are hashed, or before other processes know the file."""
    os.utime(file, ns=(_WRITTEN, _WRITTEN))


def stamp(status: os.stat_result) -> str:
    """The stamp of a file, which changes with every write to it and with every boot of the machine.

    Empty for a file written since it was dated, and on a system without a boot id, since a power loss may change files.
    """
    boot = _boot()
    if not boot or status.st_mtime_ns != _WRITTEN:
        return ""
    return f"{boot} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


class Stamps:
    """A folder of stamps by digest; the modification time of a stamp is the last use of the stamped file.

    In a shared cache any user may have written a stamp and its file: both are used only if no other user can have
    written them. The stamp includes the digest, since another user may rename our files.
    """

    def __init__(self, files: SafeFolder, folder: str) -> None:
        self._files = files
        self._folder = folder

    def fits(self, digest: str, status: os.stat_result) -> bool:
        stamped, used = self._read(digest)
        if not is_ours(status) or not stamp(status) or stamped != f"{digest} {stamp(status)}":
            return False
        if time.time() - used > _USED_AGAIN_AFTER:
            with suppress(OSError):  # read-only for this user; only its owner's uses are recorded
                self._files.touch(self._path(digest))
        return True

    def put(self, digest: str, hashed: os.stat_result) -> None:
        """Write the stamp of a hashed file. A concurrent stamp for other bytes never matches; the file is rehashed."""
        path = self._path(digest)
        folder = self._files.root / path.rpartition("/")[0]
        with scratch(folder, 0o644, self._files) as file:
            file.write(f"{digest} {stamp(hashed)}".encode())
            file.finish()
            self._files.rename(file.path.relative_to(self._files.root).as_posix(), path)

    def last_used(self, digest: str) -> float:
        try:
            return self._files.status(self._path(digest)).st_mtime
        except FileNotFoundError:
            return 0.0

    def forget(self, digest: str) -> None:
        with suppress(FileNotFoundError, PermissionError):
            self._files.remove(self._path(digest))

    def _read(self, digest: str) -> tuple[str, float]:
        """The text of a stamp and its last use; empty for an absent stamp or one of another user."""
        try:
            file = self._files.reader(self._path(digest))
        except (FileNotFoundError, PermissionError, NotAFile):
            return "", 0.0
        with file:
            status = os.fstat(file.fileno())
            return (file.read(_LONGEST).decode(errors="replace"), status.st_mtime) if is_ours(status) else ("", 0.0)

    def _path(self, digest: str) -> str:
        return f"{self._folder}/{digest[:2]}/{digest}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_FILE: Final = "file"
_PIECES: Final = "pieces.json"
_MAX_OFFSETS_BYTES: Final = 64 * 1024**2  # of pieces.json
_MAX_OFFSET: Final = 2**48  # in a file

Write = Callable[[bytes, int], None]  # bytes, and their offset in the blob


class LocalFiles:
    """The assembled files of a cache."""

    def __init__(self, files: SafeFolder, folder: str, stamps: Stamps) -> None:
        self._files = files
        self._folder = folder
        self._stamps = stamps
        self._offsets: dict[str, list[tuple[str, int]]] | None = None  # by blob: file and offset; None: not loaded

    @contextmanager
    def find(self, whole: AssembledFile) -> Iterator[tuple[Path, int] | None]:
        """The path and descriptor of a file, verified; None if it is absent. A damaged file is removed.

        A file that another user may write to counts as absent: it must not be linked into a folder.
        """
        path = self._path(whole.content)
        with os_errors(f"read {self._files.root / path}"):
            try:
                descriptor = self._files.open(path)
            except (FileNotFoundError, NotAFile):
                descriptor = None
        if descriptor is None:
            yield None
            return
        try:
            right = is_ours(os.fstat(descriptor)) and self._is_right(whole, descriptor)
            yield (self._files.root / path, descriptor) if right else None
        finally:
            os.close(descriptor)

    def _is_right(self, whole: AssembledFile, descriptor: int) -> bool:
        if self._stamps.fits(whole.content, os.fstat(descriptor)):
            return True
        with suppress(PermissionError):
            date(descriptor)
        before = os.fstat(descriptor)
        if whole.is_right(descriptor):
            with suppress(Denied, PermissionError):
                self._stamps.put(whole.content, before)
            return True
        self.remove(whole.content)
        return False

    def keep(self, source: str, whole: AssembledFile, descriptor: int) -> None:
        """Move a verified file into the cache."""
        folder = f"{self._folder}/{whole.content}"
        with os_errors(f"write {self._files.root / folder}"):
            offsets = {piece.tensor.blob.sha256: piece.at for piece in whole.pieces}
            with scratch(self._files.root / folder, 0o644, self._files) as pieces:
                pieces.write(json.dumps(offsets).encode())
                pieces.finish()
                self._files.rename(f"{folder}/{pieces.path.name}", f"{folder}/{_PIECES}")
            date(descriptor)
            self._files.rename(source, f"{folder}/{_FILE}")
            self._offsets = None
        self.stamp(whole, descriptor)

    def stamp(self, whole: AssembledFile, proved: int) -> None:
        """Write a new stamp after a link to the file was made or removed, which changes its status."""
        with suppress(FileNotFoundError, Denied), os_errors(f"write {self._files.root / self._folder}"):
            status = self._files.status(self._path(whole.content))
            if is_same(status, os.fstat(proved)):
                self._stamps.put(whole.content, status)

    def copy(self, blob: Blob, write: Write) -> bool:
        """Copy a blob from one of the files. False: none has it intact, and the caller must overwrite the bytes."""
        return any(self._copy(blob, content, offset, write) for content, offset in self._find(blob))

    def each(self) -> Iterator[tuple[str, int]]:
        """The content and size of each file."""
        for folder in entries(self._files, self._folder):
            with suppress(FileNotFoundError):
                if folder.is_folder and is_key(folder.name):
                    yield folder.name, self._files.status(self._path(folder.name)).st_size

    def remove(self, content: str) -> None:
        folder = f"{self._folder}/{content}"
        for name in (_FILE, _PIECES):
            with suppress(FileNotFoundError, PermissionError):  # files of other users may stay
                self._files.remove(f"{folder}/{name}")
        self._stamps.forget(content)
        with suppress(OSError):  # another process writes the file again
            self._files.remove_folder(folder)

    def _path(self, content: str) -> str:
        return f"{self._folder}/{content}/{_FILE}"

    def _find(self, blob: Blob) -> Sequence[tuple[str, int]]:
        """The files and offsets of a blob. They are hints only: copied bytes are hashed."""
        if self._offsets is None:
            offsets: dict[str, list[tuple[str, int]]] = {}
            for folder in entries(self._files, self._folder):
                if folder.is_folder and is_key(folder.name):
                    for sha256, offset in self._read_offsets(f"{self._folder}/{folder.name}/{_PIECES}").items():
                        offsets.setdefault(sha256, []).append((folder.name, offset))
            self._offsets = offsets  # assigned when complete, for other threads
        return self._offsets.get(blob.sha256, ())

    def _copy(self, blob: Blob, content: str, offset: int, write: Write) -> bool:
        hasher = hashlib.sha256()
        done = 0
        path = self._path(content)
        try:
            descriptor = self._files.open(path)
        except (OSError, NotAFile):
            return False
        try:
            with os_errors(f"read {self._files.root / path}"):
                for chunk in chunks_between(descriptor, offset, offset + blob.size):
                    hasher.update(chunk)
                    write(chunk, done)
                    done += len(chunk)
        finally:
            os.close(descriptor)
        return hasher.hexdigest() == blob.sha256

    def _read_offsets(self, path: str) -> dict[str, int]:
        """The offsets in a `pieces.json`; empty if it is absent or damaged."""
        try:
            with self._files.reader(path) as file:
                parsed = json.loads(file.read(_MAX_OFFSETS_BYTES))
        except (OSError, NotAFile, ValueError, RecursionError):
            return {}
        if not isinstance(parsed, dict):
            return {}
        return {
            sha256: offset for sha256, offset in parsed.items() if isinstance(offset, int) and 0 <= offset < _MAX_OFFSET
        }


def entries(files: SafeFolder, folder: str) -> Sequence[FolderEntry]:
    """The entries of a folder of the cache; empty if it does not exist."""
    with os_errors(f"list {files.root / folder}"):
        try:
            return files.list(folder)
        except FileNotFoundError:
            return []
