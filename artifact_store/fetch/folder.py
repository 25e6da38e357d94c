"""Target folder of a fetch: nothing is written outside it, and it is marked complete last.

    manifest.json            the manifest, byte for byte: its SHA-256 is the artifact's name; written
                             last, so that a folder which has it is complete
    executables/<name>.nxe   one compiled program each; .neff for backend neuronx
    weights.safetensors      all weights in one file, to be mapped into memory
    files/<path>             files that travel with the model
    .nxpipe                  marks the folder as ours, with the content and stamp of each file: what is unchanged since
                             then is neither fetched again nor hashed

Objects are fetched concurrently. An interrupted fetch resumes from the cache and from files already written.
"""

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from nxpipe.artifact_store.backends.files import NewFile, copy_into, new_file, os_errors, scratch, write_at
from nxpipe.artifact_store.backends.no_symlinks import NotAFile, SafeFolder, Spot, is_ours, is_same
from nxpipe.artifact_store.backends.protocol import Sent, ignore_progress, in_turn
from nxpipe.artifact_store.blobs import Blobs
from nxpipe.artifact_store.documents import Blob, Document, SafePath, parse_document
from nxpipe.artifact_store.errors import NotUnderstood, Refused
from nxpipe.artifact_store.fetch.cached_store import MirroredBlobs
from nxpipe.artifact_store.fetch.file_layout import Whole, sha256_between, weights_file
from nxpipe.artifact_store.fetch.local_files import date, stamp
from nxpipe.artifact_store.fetch.ranges import at_once
from nxpipe.artifact_store.manifest import File, Manifest, Tensor
from nxpipe.artifact_store.weights import read_weights

MANIFEST: Final = "manifest.json"
_NOTES: Final = ".nxpipe"
_LONGEST: Final = 64 * 1024**2  # bytes of notes
_MODE: Final = 0o644  # whatever the umask: files that are served are no other user's to write to


class Note(Document):
    """What a file holds, and the stamp that it had when it was written."""

    content: str
    stamp: str


class Notes(Document):
    files: dict[SafePath, Note]


@dataclass
class Filled:
    """A folder, and what is in it by our own notes. No symlink in it is followed, whoever has put it there."""

    files: SafeFolder
    noted: Mapping[str, Note]
    wanted: dict[str, Note] = field(default_factory=dict)

    @property
    def spot(self) -> Spot:
        return Spot(self.files)

    def has(self, path: str, content: str, is_right: Callable[[int], bool]) -> bool:
        """Whether the file is there: as we wrote it by our notes, or at least by its bytes."""
        note = self.noted.get(path)
        if note is None or note.content != content:
            return False
        unchanged = note.stamp and note.stamp == self._stamp(path)
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
            self._put(file.path, path)
        self.note(path, content)

    def adopt(self, path: str, source: Path, proved: int) -> bool:
        """Another name for a file that nobody writes to any more, or a copy where there can be none. False: it has
        gone, or is not the one that was proved, whose handle this is. To be noted when all other names that it gets
        or loses soon are settled."""
        aside = f".{secrets.token_hex(8)}.part"
        with self._writing(path):
            try:
                self.files.take_in(source, aside)
            except FileNotFoundError:
                return False
            except OSError:  # on another file system, or somebody else's
                return self._copied(path, proved)
            try:
                if not is_same(self.files.status(aside), os.fstat(proved)):
                    return False
                self.files.rename(aside, path)
            finally:
                with suppress(FileNotFoundError):  # two names of one file: a rename does nothing, and leaves both
                    self.files.remove(aside)
        return True

    def note(self, path: str, content: str) -> None:
        self.wanted[path] = Note(content=content, stamp=self._stamp(path))

    @contextmanager
    def _beside(self, path: str) -> Iterator[NewFile]:
        with self._writing(path), new_file((self.files.root / path).parent, _MODE, self.files) as file:
            yield file

    def _put(self, written: Path, path: str) -> None:
        self.files.rename(written.relative_to(self.files.root).as_posix(), path)

    @contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        self._refuse_links(path)
        with os_errors(f"write {self.files.root / path}"):
            yield

    def _refuse_links(self, path: str) -> None:
        """With the rule's own word; one that is put there later is not followed either."""
        for folder in list(PurePosixPath(path).parents)[:-1]:
            if (self.files.root / folder).is_symlink():
                raise Refused(
                    f"{self.files.root / folder} is a link, which leads out of {self.files.root}; remove it, or name "
                    "another folder"
                )

    def _stamp(self, path: str) -> str:
        """Empty where nothing is, and for a file that other users can write to: that is hashed each time."""
        try:
            seen = self.files.status(path)
        except OSError:
            return ""
        return stamp(seen) if is_ours(seen) else ""

    def _copied(self, path: str, proved: int) -> bool:
        with self._beside(path) as file:
            copy_into(file.descriptor, proved, 0)
            date(file.descriptor)
            os.fsync(file.descriptor)
            file.close()
            self._put(file.path, path)
        return True

    def _proved(self, path: str, is_right: Callable[[int], bool]) -> bool:
        """Dated before, so that whoever writes to it while it is read is noticed the next time."""
        try:
            descriptor = self.files.open(path)
        except (OSError, NotAFile):
            return False
        try:
            if not is_ours(os.fstat(descriptor)):
                return False  # its owner may write to it when it has been looked at
            with suppress(PermissionError):
                date(descriptor)
            return is_right(descriptor)
        finally:
            os.close(descriptor)

    def complete(self, manifest: bytes, digest: str) -> None:
        """What an earlier artifact had and this one has not is removed; then the manifest makes it official."""
        for path in self.noted.keys() - self.wanted.keys() - {MANIFEST}:
            self.remove(path)
        with os_errors(f"write {self.files.root}"):
            for folder in {path.rpartition("/")[0] for path in self.wanted}:
                self.files.flush(folder)
        if not self.has(MANIFEST, digest, holds(digest)):
            self.write(MANIFEST, digest, lambda file: write_at(file, manifest, 0))
            with os_errors(f"write {self.files.root}"):
                self.files.flush("")
        _note(self.files, self.wanted)

    def remove(self, path: str) -> None:
        with self._writing(path), suppress(FileNotFoundError):
            self.files.remove(path)


def holds(sha256: str) -> Callable[[int], bool]:
    """Proves an open file by its digest."""
    return lambda descriptor: sha256_between(descriptor, 0, os.fstat(descriptor).st_size) == sha256


def open_folder(root: Path, manifest_digest: str) -> Filled:
    """A new or an empty folder, or one of ours; another artifact's manifest goes first, since it will not hold."""
    files = SafeFolder(root)
    with os_errors(f"write {root}"):
        root.mkdir(parents=True, exist_ok=True)
        notes = _read_notes(files)
        if notes is None:
            if files.list(""):
                raise Refused(f"{root} holds files that no fetch put there; name a new or an empty folder")
            _note(files, {})
        filled = Filled(files, notes or {})
        if not filled.has(MANIFEST, manifest_digest, holds(manifest_digest)):
            filled.remove(MANIFEST)
    return filled


def _read_notes(files: SafeFolder) -> dict[str, Note] | None:
    """None: this folder is not ours. Notes that cannot be read, or that others can write, say nothing of any file."""
    try:
        with files.reader(_NOTES) as file:
            if not is_ours(os.fstat(file.fileno())):
                return {}
            return parse_document(Notes, json.loads(file.read(_LONGEST))).files
    except FileNotFoundError:
        return None
    except (ValueError, NotUnderstood, RecursionError, NotAFile):
        return {}


def _note(files: SafeFolder, noted: Mapping[str, Note]) -> None:
    notes = Notes(files=dict(noted))
    with scratch(files.root, _MODE, files) as file:
        file.write(notes.model_dump_json(indent=1).encode())
        file.finish()
        with os_errors(f"write {files.root / _NOTES}"):
            files.rename(file.path.name, _NOTES)


WEIGHTS: Final = "weights.safetensors"
_ENDINGS: Final = {"emulator": ".nxe", "neuronx": ".neff"}  # of a program, by the backend that made it


@dataclass(frozen=True)
class Fetched:
    """`bytes_written` is 0 when the folder had everything."""

    folder: Path
    manifest: str
    bytes_written: int


def fetch(blobs: Blobs, manifest: Manifest, folder: Path, sent: Sent = ignore_progress) -> Fetched:
    """Bring a folder to hold this artifact, and nothing else; repeating it is cheap, and goes on where it stopped."""
    sent = in_turn(sent)
    document = manifest.to_bytes()
    digest = Blob.of(document).sha256
    files = _files(manifest)
    filled = open_folder(folder, digest)
    missing = {path: blob for path, blob in files.items() if not filled.has(path, blob.sha256, holds(blob.sha256))}
    written = sum(map(_size, missing.values()))
    sent(sum(map(_size, files.values())) - written)

    def place(path: str) -> None:
        filled.write(path, missing[path].sha256, lambda file: blobs.copy_into(missing[path], file, (0,), sent))

    at_once(place, missing.items())
    written += _fetch_weights(blobs, manifest.weights, filled, sent)
    filled.complete(document, digest)
    return Fetched(folder, digest, written)


def size_of(manifest: Manifest) -> int:
    """What `sent` will have been told in the end."""
    return sum(map(_size, _files(manifest).values())) + sum(map(_size, {tensor.stored for tensor in manifest.weights}))


def _size(blob: Blob) -> int:
    return blob.size


def _files(manifest: Manifest) -> dict[str, Blob]:
    for executable in manifest.executables:
        if "/" in executable.name or executable.name in (".", ".."):
            raise Refused(f"the program {executable.name!r} cannot be a file of that name; publish it under another")
    ending = _ENDINGS.get(manifest.backend, "")
    named = [
        *((f"executables/{executable.name}{ending}", executable.blob) for executable in manifest.executables),
        *((f"files/{file.path}", file.blob) for file in manifest.files),
    ]
    return {parse_document(File, {"path": path, "blob": blob}).path: blob for path, blob in named}


def _fetch_weights(blobs: Blobs, tensors: Sequence[Tensor], filled: Filled, sent: Sent) -> int:
    if not tensors:
        return 0
    whole = weights_file(tensors)
    size = sum(map(_size, whole.stored))
    if filled.has(WEIGHTS, whole.content, whole.is_right):
        sent(size)
        return 0
    if isinstance(blobs, MirroredBlobs):
        blobs.assemble(whole, filled.spot, lambda path, handle: filled.adopt(WEIGHTS, path, handle), sent)
        filled.note(WEIGHTS, whole.content)
    else:
        filled.write(WEIGHTS, whole.content, lambda file: _write_weights(blobs, whole, file, sent))
    return size


def _write_weights(blobs: Blobs, whole: Whole, file: int, sent: Sent) -> None:
    """Out of a store that is near: each object is read once, and written wherever a tensor has its content."""

    def place(stored: Blob) -> None:
        placed = whole.stored[stored]
        if placed[0].tensor.pack is None:
            blobs.copy_into(stored, file, [each.at for each in placed], sent)
            return
        tensors = [each.tensor for each in placed]
        for (_, data), each in zip(read_weights(blobs, tensors), placed, strict=True):
            write_at(file, data, each.at)
        sent(stored.size)

    os.ftruncate(file, whole.size)
    write_at(file, whole.head, 0)
    at_once(place, [(stored, stored) for stored in whole.stored])
