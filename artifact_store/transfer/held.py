"""Whole files that the tier keeps: what one folder was given, the next one gets as a link, without a byte of its own.

    whole/<content>/file            a file that was put together from blobs, and is in folders by the same inode
    whole/<content>/pieces.json     where each blob lies in it, for other files that share some of them

Whoever writes to such a file in a folder writes here too. The stamp tells, and then the bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.backends.beneath import Beneath, NotAFile, Seen, is_ours, is_same
from nxpipe.artifact_store.backends.files import os_errors, scratch
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Denied
from nxpipe.artifact_store.layout import is_key
from nxpipe.artifact_store.transfer.spans import chunks_between
from nxpipe.artifact_store.transfer.stamp import Stamps, date
from nxpipe.artifact_store.transfer.whole import Whole

_FILE: Final = "file"
_PIECES: Final = "pieces.json"
_LONGEST: Final = 64 * 1024**2  # bytes of notes
_FARTHEST: Final = 2**48  # in a file

Write = Callable[[bytes, int], None]  # bytes, and how far from the beginning of the blob


class Held:
    def __init__(self, files: Beneath, folder: str, stamps: Stamps) -> None:
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
                found = json.loads(file.read(_LONGEST))
        except (OSError, NotAFile, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {sha256: at for sha256, at in found.items() if isinstance(at, int) and 0 <= at < _FARTHEST}


def entries(files: Beneath, folder: str) -> Sequence[Seen]:
    """What is in a folder of the tier, which need not be there."""
    with os_errors(f"list {files.root / folder}"):
        try:
            return files.list(folder)
        except FileNotFoundError:
            return []
