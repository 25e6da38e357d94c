"""A folder that is filled from a store: nothing lands outside of it, and a half-filled one does not look complete.

.nxpipe          says that the folder is ours, and of each file its content and under which circumstances it was
                 written: what is unchanged since then need not come again, nor be hashed
manifest.json    comes last, so that a folder which has it is complete
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from artifact_store.backends.files import NewFile, copy_into, flush_to_disk, new_file, os_errors, scratch, write_at
from artifact_store.documents import Document, SafePath, parse_document
from artifact_store.errors import NotUnderstood, Refused
from artifact_store.transfer.spans import sha256_between
from artifact_store.transfer.stamp import date, stamp_of

MANIFEST: Final = "manifest.json"
_NOTES: Final = ".nxpipe"


class Note(Document):
    """What a file holds, and the stamp that it had when it was written."""

    content: str
    stamp: str


class Notes(Document):
    files: dict[SafePath, Note]


@dataclass
class Filled:
    """A folder, and what is in it by our own notes."""

    root: Path
    noted: Mapping[str, Note]
    wanted: dict[str, Note] = field(default_factory=dict)

    def has(self, path: str, content: str, is_right: Callable[[int], bool]) -> bool:
        """Whether the file is there: as we wrote it by our notes, or at least by its bytes."""
        note = self.noted.get(path)
        if note is None or note.content != content:
            return False
        unchanged = note.stamp and note.stamp == stamp_of(self.root / path)
        if not unchanged and not self._proved(path, is_right):
            return False
        self.note(path, content)
        return True

    def write(self, path: str, content: str, fill: Callable[[int], None]) -> None:
        """Put a file there whole; `fill` writes its bytes into one that lies beside it, given as a descriptor."""
        with self._beside(path) as file:
            fill(file.descriptor)
            date(file.descriptor)
            os.fsync(file.descriptor)
            file.close()
            file.path.replace(self.root / path)
        self.note(path, content)

    def adopt(self, path: str, source: Path) -> bool:
        """Another name for a file that nobody writes to any more, or a copy where there can be none. False: it has
        gone. To be noted when all other names that it gets or loses soon are settled."""
        with self._beside(path) as file:
            try:
                file.path.unlink()
                file.path.hardlink_to(source)
            except FileNotFoundError:
                return False
            except OSError:  # on another file system, or somebody else's
                return self._copied(path, source)
            file.path.replace(self.root / path)
        return True

    def note(self, path: str, content: str) -> None:
        self.wanted[path] = Note(content=content, stamp=stamp_of(self.root / path))

    def folder_of(self, path: str) -> Path:
        return (self.root / path).parent

    @contextmanager
    def _beside(self, path: str) -> Iterator[NewFile]:
        folder = self.folder_of(path)
        with os_errors(f"write {self.root / path}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._refuse_ways_out(folder)
            with new_file(folder) as file:
                yield file

    def _copied(self, path: str, source: Path) -> bool:
        try:
            opened = source.open("rb", buffering=0)
        except FileNotFoundError:
            return False
        with opened, self._beside(path) as file:
            copy_into(file.descriptor, opened, 0)
            date(file.descriptor)
            os.fsync(file.descriptor)
            file.close()
            file.path.replace(self.root / path)
        return True

    def _proved(self, path: str, is_right: Callable[[int], bool]) -> bool:
        """Dated before, so that whoever writes to it while it is read is noticed the next time."""
        try:
            descriptor = os.open(self.root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            with suppress(PermissionError):
                date(descriptor)
            return is_right(descriptor)
        finally:
            os.close(descriptor)

    def complete(self, manifest: bytes, digest: str) -> None:
        """What an earlier artifact had and this one has not is removed; then the manifest makes it official."""
        with os_errors(f"write {self.root}"):
            for path in self.noted.keys() - self.wanted.keys() - {MANIFEST}:
                self._refuse_ways_out((self.root / path).parent)
                (self.root / path).unlink(missing_ok=True)
            for folder in {(self.root / path).parent for path in self.wanted}:
                flush_to_disk(folder)
        if not self.has(MANIFEST, digest, holds(digest)):
            self.write(MANIFEST, digest, lambda file: write_at(file, manifest, 0))
            with os_errors(f"write {self.root}"):
                flush_to_disk(self.root)
        _note(self.root, self.wanted)

    def _refuse_ways_out(self, folder: Path) -> None:
        if not folder.resolve().is_relative_to(self.root.resolve()):
            raise Refused(f"{folder} is a link that leads out of {self.root}; remove it, or name another folder")


def holds(sha256: str) -> Callable[[int], bool]:
    """Proves an open file by its digest."""
    return lambda descriptor: sha256_between(descriptor, 0, os.fstat(descriptor).st_size) == sha256


def open_folder(root: Path, manifest_digest: str) -> Filled:
    """A new or an empty folder, or one of ours; another artifact's manifest goes first, since it will not hold."""
    with os_errors(f"write {root}"):
        root.mkdir(parents=True, exist_ok=True)
        notes = _read_notes(root)
        if notes is None:
            if any(root.iterdir()):
                raise Refused(f"{root} holds files that no fetch put there; name a new or an empty folder")
            _note(root, {})
        filled = Filled(root, notes or {})
        if not filled.has(MANIFEST, manifest_digest, holds(manifest_digest)):
            (root / MANIFEST).unlink(missing_ok=True)
    return filled


def _read_notes(root: Path) -> dict[str, Note] | None:
    """None: this folder is not ours. Notes that cannot be read say nothing about any file."""
    try:
        return parse_document(Notes, json.loads((root / _NOTES).read_bytes())).files
    except FileNotFoundError:
        return None
    except (ValueError, NotUnderstood):
        return {}


def _note(root: Path, files: Mapping[str, Note]) -> None:
    notes = Notes(files=dict(files))
    with scratch(root) as file:
        file.write(notes.model_dump_json(indent=1).encode())
        file.finish()
        with os_errors(f"write {root / _NOTES}"):
            file.path.replace(root / _NOTES)
