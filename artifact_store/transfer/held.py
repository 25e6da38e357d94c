"""Whole files that the tier keeps: what one folder was given, the next one gets as a link, without a byte of its own.

    whole/<content>/file            a file that was put together from blobs, and is in folders by the same inode
    whole/<content>/pieces.json     where each blob lies in it, for other files that share some of them

Whoever writes to such a file in a folder writes here too. The stamp tells, and then the bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from artifact_store.backends.files import os_errors, scratch
from artifact_store.documents import Blob
from artifact_store.transfer.spans import chunks_between
from artifact_store.transfer.stamp import Stamps, date
from artifact_store.transfer.whole import Whole

_FILE: Final = "file"
_PIECES: Final = "pieces.json"

Write = Callable[[bytes, int], None]  # bytes, and how far from the beginning of the blob


class Held:
    def __init__(self, root: Path, stamps: Stamps) -> None:
        self._root = root
        self._stamps = stamps
        self._places: dict[str, list[tuple[str, int]]] | None = None  # by blob; None: we have not looked yet

    def find(self, whole: Whole) -> Path | None:
        """The file, proved right; None when it is not here. A damaged one is thrown away."""
        path = self._root / whole.content / _FILE
        with os_errors(f"read {path}"):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                if self._stamps.fits(whole.content, os.fstat(descriptor)):
                    return path
                with suppress(PermissionError):
                    date(descriptor)
                before = os.fstat(descriptor)
                if whole.is_right(descriptor):
                    with suppress(PermissionError):
                        self._stamps.put(whole.content, before)
                    return path
            finally:
                os.close(descriptor)
            self.throw_out(whole.content)
        return None

    def keep(self, path: Path, whole: Whole) -> None:
        """Take over a file that has just been proved right."""
        folder = self._root / whole.content
        with os_errors(f"write {folder}"):
            places = {piece.tensor.blob.sha256: piece.at for piece in whole.pieces}
            with scratch(folder) as pieces:
                pieces.write(json.dumps(places).encode())
                pieces.finish()
                pieces.path.replace(folder / _PIECES)
            date(path)
            path.replace(folder / _FILE)
            self._places = None
        self.stamp(whole)

    def stamp(self, whole: Whole) -> None:
        """Anew, after a link to it was made or taken away by us: that changes the file's circumstances."""
        with suppress(FileNotFoundError, PermissionError), os_errors(f"write {self._root}"):
            self._stamps.put(whole.content, (self._root / whole.content / _FILE).stat())

    def copy(self, blob: Blob, write: Write) -> bool:
        """A blob out of any of the files. False: none has it whole, and what was written is to be written over."""
        return any(self._copy(blob, content, at, write) for content, at in self._where().get(blob.sha256, ()))

    def each(self) -> Iterator[tuple[str, int]]:
        """The content and size of each file."""
        for path in self._root.glob(f"*/{_FILE}"):
            with suppress(FileNotFoundError):
                yield path.parent.name, path.stat().st_size

    def throw_out(self, content: str) -> None:
        folder = self._root / content
        for name in (_FILE, _PIECES):
            (folder / name).unlink(missing_ok=True)
        self._stamps.forget(content)
        with suppress(OSError):  # somebody is putting it there again
            folder.rmdir()

    def _where(self) -> dict[str, list[tuple[str, int]]]:
        """What the notes say is believed of no byte: what is copied is hashed."""
        if self._places is None:
            places: dict[str, list[tuple[str, int]]] = {}
            for path in self._root.glob(f"*/{_PIECES}"):
                for sha256, at in _read_places(path).items():
                    places.setdefault(sha256, []).append((path.parent.name, at))
            self._places = places  # whole, for other threads
        return self._places

    def _copy(self, blob: Blob, content: str, at: int, write: Write) -> bool:
        hasher = hashlib.sha256()
        done = 0
        try:
            descriptor = os.open(self._root / content / _FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            with os_errors(f"read {self._root / content}"):
                for chunk in chunks_between(descriptor, at, at + blob.size):
                    hasher.update(chunk)
                    write(chunk, done)
                    done += len(chunk)
        finally:
            os.close(descriptor)
        return hasher.hexdigest() == blob.sha256


def _read_places(path: Path) -> dict[str, int]:
    """Notes that cannot be read say nothing."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {sha256: at for sha256, at in found.items() if isinstance(at, int) and at >= 0}
