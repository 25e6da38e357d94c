"""Whole files that the cache keeps, shared between folders by hard link, and stamps that spare rehashing them.

    whole/<content>/file            a file assembled from blobs, hard-linked into folders
    whole/<content>/pieces.json     where each blob lies in it, for other files that share some of them

A write to such a file in a folder changes the cache too; its stamp, and then its bytes, reveal that. Time stamps are
coarse: a second write within a millisecond leaves the same one. So a stamped file gets a modification time that no
clock shows any more, and every later write changes it.
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
from nxpipe.artifact_store.backends.no_symlinks import NotAFile, SafeFolder, Seen, is_ours, is_same
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Denied
from nxpipe.artifact_store.fetch.file_layout import Whole, chunks_between
from nxpipe.artifact_store.layout import is_key

_WRITTEN: Final = 946_684_800 * 10**9  # the year 2000, in nanoseconds
_LONGEST: Final = 1024  # bytes of a stamp
_USED_AGAIN_AFTER: Final = 60.0  # seconds within which a second use is not noted


def date(file: Path | int) -> None:
    """To be done before the bytes are hashed, or while nobody else knows the file."""
    os.utime(file, ns=(_WRITTEN, _WRITTEN))


def stamp(seen: os.stat_result) -> str:
    """Empty where nothing can be promised: for a file that somebody has written to since it was dated, and where the
    system does not say which start of it this is, since after a power loss a file may hold other bytes."""
    boot = _boot()
    if not boot or seen.st_mtime_ns != _WRITTEN:
        return ""
    return f"{boot} {seen.st_dev} {seen.st_ino} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns}"


class Stamps:
    """A folder of stamps by digest; each is dated by the last use of what it vouches for.

    In a cache that several users share, anybody may have written a stamp and the file that it fits: both count only
    where no other user can have written them. The digest is in the stamp, for a stranger may rename what is ours.
    """

    def __init__(self, files: SafeFolder, folder: str) -> None:
        self._files = files
        self._folder = folder

    def fits(self, digest: str, seen: os.stat_result) -> bool:
        stamped, used = self._read(digest)
        if not is_ours(seen) or not stamp(seen) or stamped != f"{digest} {stamp(seen)}":
            return False
        if time.time() - used > _USED_AGAIN_AFTER:
            with suppress(OSError):  # read-only for us; its owner's uses count
                self._files.touch(self._path(digest))
        return True

    def put(self, digest: str, hashed: os.stat_result) -> None:
        """One that another process has written over fits nothing: the bytes are hashed again."""
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
        """What a stamp of ours says, and when it was last used; nothing where there is none."""
        try:
            file = self._files.reader(self._path(digest))
        except (FileNotFoundError, PermissionError, NotAFile):
            return "", 0.0
        with file:
            seen = os.fstat(file.fileno())
            return (file.read(_LONGEST).decode(errors="replace"), seen.st_mtime) if is_ours(seen) else ("", 0.0)

    def _path(self, digest: str) -> str:
        return f"{self._folder}/{digest[:2]}/{digest}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_FILE: Final = "file"
_PIECES: Final = "pieces.json"
_HELD_LONGEST: Final = 64 * 1024**2  # bytes of notes
_FARTHEST: Final = 2**48  # in a file

Write = Callable[[bytes, int], None]  # bytes, and how far from the beginning of the blob


class LocalFiles:
    def __init__(self, files: SafeFolder, folder: str, stamps: Stamps) -> None:
        self._files = files
        self._folder = folder
        self._stamps = stamps
        self._places: dict[str, list[tuple[str, int]]] | None = None  # by blob; None: we have not looked yet

    @contextmanager
    def find(self, whole: Whole) -> Iterator[tuple[Path, int] | None]:
        """The file and its handle, proved right; None when it is not here. A damaged one is thrown away.

        One that another user may write to is none: a folder is never given a link to that, but only what is proved
        while it is copied.
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

    def _is_right(self, whole: Whole, descriptor: int) -> bool:
        if self._stamps.fits(whole.content, os.fstat(descriptor)):
            return True
        with suppress(PermissionError):
            date(descriptor)
        before = os.fstat(descriptor)
        if whole.is_right(descriptor):
            with suppress(Denied, PermissionError):
                self._stamps.put(whole.content, before)
            return True
        self.throw_out(whole.content)
        return False

    def keep(self, source: str, whole: Whole, descriptor: int) -> None:
        """Take over a file that has just been proved right."""
        folder = f"{self._folder}/{whole.content}"
        with os_errors(f"write {self._files.root / folder}"):
            places = {piece.tensor.blob.sha256: piece.at for piece in whole.pieces}
            with scratch(self._files.root / folder, 0o644, self._files) as pieces:
                pieces.write(json.dumps(places).encode())
                pieces.finish()
                self._files.rename(f"{folder}/{pieces.path.name}", f"{folder}/{_PIECES}")
            date(descriptor)
            self._files.rename(source, f"{folder}/{_FILE}")
            self._places = None
        self.stamp(whole, descriptor)

    def stamp(self, whole: Whole, proved: int) -> None:
        """Anew, after a link to it was made or taken away by us: that changes the file's circumstances."""
        with suppress(FileNotFoundError, Denied), os_errors(f"write {self._files.root / self._folder}"):
            seen = self._files.status(self._path(whole.content))
            if is_same(seen, os.fstat(proved)):
                self._stamps.put(whole.content, seen)

    def copy(self, blob: Blob, write: Write) -> bool:
        """A blob out of any of the files. False: none has it whole, and what was written is to be written over."""
        return any(self._copy(blob, content, at, write) for content, at in self._where().get(blob.sha256, ()))

    def each(self) -> Iterator[tuple[str, int]]:
        """The content and size of each file."""
        for folder in entries(self._files, self._folder):
            with suppress(FileNotFoundError):
                if folder.is_folder and is_key(folder.name):
                    yield folder.name, self._files.status(self._path(folder.name)).st_size

    def throw_out(self, content: str) -> None:
        folder = f"{self._folder}/{content}"
        for name in (_FILE, _PIECES):
            with suppress(FileNotFoundError, PermissionError):  # what is not ours may stay
                self._files.remove(f"{folder}/{name}")
        self._stamps.forget(content)
        with suppress(OSError):  # somebody is putting it there again
            self._files.remove_folder(folder)

    def _path(self, content: str) -> str:
        return f"{self._folder}/{content}/{_FILE}"

    def _where(self) -> dict[str, list[tuple[str, int]]]:
        """What the notes say is believed of no byte: what is copied is hashed."""
        if self._places is None:
            places: dict[str, list[tuple[str, int]]] = {}
            for folder in entries(self._files, self._folder):
                if folder.is_folder and is_key(folder.name):
                    for sha256, at in self._read_places(f"{self._folder}/{folder.name}/{_PIECES}").items():
                        places.setdefault(sha256, []).append((folder.name, at))
            self._places = places  # whole, for other threads
        return self._places

    def _copy(self, blob: Blob, content: str, at: int, write: Write) -> bool:
        hasher = hashlib.sha256()
        done = 0
        path = self._path(content)
        try:
            descriptor = self._files.open(path)
        except (OSError, NotAFile):
            return False
        try:
            with os_errors(f"read {self._files.root / path}"):
                for chunk in chunks_between(descriptor, at, at + blob.size):
                    hasher.update(chunk)
                    write(chunk, done)
                    done += len(chunk)
        finally:
            os.close(descriptor)
        return hasher.hexdigest() == blob.sha256

    def _read_places(self, path: str) -> dict[str, int]:
        """Notes that cannot be read say nothing."""
        try:
            with self._files.reader(path) as file:
                found = json.loads(file.read(_HELD_LONGEST))
        except (OSError, NotAFile, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {sha256: at for sha256, at in found.items() if isinstance(at, int) and 0 <= at < _FARTHEST}


def entries(files: SafeFolder, folder: str) -> Sequence[Seen]:
    """What is in a folder of the tier, which need not be there."""
    with os_errors(f"list {files.root / folder}"):
        try:
            return files.list(folder)
        except FileNotFoundError:
            return []
