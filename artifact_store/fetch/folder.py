"""Target folder of a fetch: nothing is written outside it, and it is marked complete last.

    manifest.json            the manifest, byte for byte: its SHA-256 is the artifact's name; written
                             last, so that a folder with a manifest is complete
    executables/<name>.nxe   one compiled program each, for the emulator; or
    executables/<name>.neff  for Neuron devices, with its interface in <name>.json
    weights.safetensors      all weights in one file, which readers map into memory
    files/<path>             other files of the model
    serving/<name>.json      a contract under which a runtime serves the files of serving/<name>/
    .nxpipe                  marks the folder as a fetch target, with the content and stamp of each file: unchanged
                             files are neither fetched again nor hashed

Objects are fetched concurrently. An interrupted fetch resumes from the cache and from files already written.
"""

import json
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

from nxpipe.artifact_store.backends.files import NewFile, copy_into, new_file, os_errors, scratch, write_at
from nxpipe.artifact_store.backends.no_symlinks import NotAFile, SafeFolder, Subfolder, is_ours, is_same
from nxpipe.artifact_store.backends.protocol import Sent, ignore_progress, serialized
from nxpipe.artifact_store.blobs import Blobs
from nxpipe.artifact_store.documents import Blob, Document, SafePath, parse_document
from nxpipe.artifact_store.errors import NotUnderstood, Refused
from nxpipe.artifact_store.fetch.cached_store import MirroredBlobs
from nxpipe.artifact_store.fetch.file_layout import AssembledFile, file_of, sha256_between, weights_file
from nxpipe.artifact_store.fetch.local_files import date
from nxpipe.artifact_store.fetch.local_files import stamp as stamp_of
from nxpipe.artifact_store.fetch.ranges import at_once
from nxpipe.artifact_store.manifest import Executable, File, Manifest, ServingPayload
from nxpipe.artifact_store.weights import read_weights

MANIFEST: Final = "manifest.json"
_NOTES: Final = ".nxpipe"
_LONGEST: Final = 64 * 1024**2  # bytes of notes
_MODE: Final = 0o644  # regardless of the umask: other users must not write to files that are served


class Note(Document):
    """The content digest of a file, and its stamp at the time of writing."""

    content: str
    stamp: str


class Notes(Document):
    files: dict[SafePath, Note]


@dataclass
class Filled:
    """A target folder and its notes: those read at the start and those of the fetched artifact.

    No symlink in the folder is followed.
    """

    files: SafeFolder
    noted: Mapping[str, Note]
    current: dict[str, Note] = field(default_factory=dict)

    @property
    def top(self) -> Subfolder:
        return Subfolder(self.files)

    def has(self, path: str, content: str, is_right: Callable[[int], bool]) -> bool:
        """True if the file is noted with this content, and is unchanged by its stamp or verified by its bytes."""
        note = self.noted.get(path)
        if note is None or note.content != content:
            return False
        unchanged = note.stamp and note.stamp == self.stamp(path)
        if not unchanged and not self._is_intact(path, is_right):
            return False
        self.note(path, content)
        return True

    def write(self, path: str, content: str, fill: Callable[[int], None], *, flush: bool = True) -> None:
        """Write a file atomically; `fill` writes the bytes to the descriptor of a temporary file beside it."""
        with self._temporary(path) as file:
            fill(file.descriptor)
            date(file.descriptor)
            if flush:
                os.fsync(file.descriptor)
            file.close()
            self._move(file.path, path)
        self.note(path, content)

    def adopt(self, path: str, source: Path, proved: int) -> bool:
        """Hard-link a finished file to `path`, or copy it if it cannot be linked. `proved` is the descriptor of the
        verified file. False: the source is gone, or is a different file. The caller notes the file after all links to
        it are made and removed, since these change its status."""
        temporary = f".{secrets.token_hex(8)}.part"
        with self._writing(path):
            try:
                self.files.link_from(source, temporary)
            except FileNotFoundError:
                return False
            except OSError:  # on another file system, or of another user
                return self._copy(path, proved)
            try:
                if not is_same(self.files.status(temporary), os.fstat(proved)):
                    return False
                self.files.rename(temporary, path)
            finally:
                with suppress(FileNotFoundError):  # a rename between two links of one file keeps both
                    self.files.remove(temporary)
        return True

    def adopt_all(self, paths: Iterable[str], source: Path, proved: int) -> bool:
        return all(self.adopt(path, source, proved) for path in paths)

    def note(self, path: str, content: str) -> None:
        self.current[path] = Note(content=content, stamp=self.stamp(path))

    @contextmanager
    def _temporary(self, path: str) -> Iterator[NewFile]:
        with self._writing(path), new_file((self.files.root / path).parent, _MODE, self.files) as file:
            yield file

    def _move(self, written: Path, path: str) -> None:
        self.files.rename(written.relative_to(self.files.root).as_posix(), path)

    @contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        self._refuse_links(path)
        with os_errors(f"write {self.files.root / path}"):
            yield

    def _refuse_links(self, path: str) -> None:
        """Raise Refused for a symlink on the path. A link that appears later is not followed either."""
        for folder in list(PurePosixPath(path).parents)[:-1]:
            if (self.files.root / folder).is_symlink():
                raise Refused(
                    f"{self.files.root / folder} is a symlink, which may lead out of {self.files.root}; remove it, or "
                    "name another folder"
                )

    def stamp(self, path: str) -> str:
        """The stamp of a file; empty if it is absent, or writable for other users and thus hashed every time."""
        try:
            status = self.files.status(path)
        except OSError:
            return ""
        return stamp_of(status) if is_ours(status) else ""

    def _copy(self, path: str, proved: int) -> bool:
        with self._temporary(path) as file:
            copy_into(file.descriptor, proved, 0)
            date(file.descriptor)
            os.fsync(file.descriptor)
            file.close()
            self._move(file.path, path)
        return True

    def _is_intact(self, path: str, is_right: Callable[[int], bool]) -> bool:
        """True if the file has the right bytes. It is dated first, so that a concurrent write is detected next time."""
        try:
            descriptor = self.files.open(path)
        except (OSError, NotAFile):
            return False
        try:
            if not is_ours(os.fstat(descriptor)):
                return False  # its owner may write to it after the verification
            with suppress(PermissionError):
                date(descriptor)
            return is_right(descriptor)
        finally:
            os.close(descriptor)

    def complete(self, manifest: bytes, digest: str) -> None:
        """Remove files of an earlier artifact, then write the manifest, which marks the folder complete."""
        for path in self.noted.keys() - self.current.keys() - {MANIFEST}:
            self.remove(path)
        with os_errors(f"write {self.files.root}"):
            for folder in {path.rpartition("/")[0] for path in self.current}:
                self.files.flush(folder)
        if not self.has(MANIFEST, digest, holds(digest)):
            self.write(MANIFEST, digest, lambda file: write_at(file, manifest, 0))
            with os_errors(f"write {self.files.root}"):
                self.files.flush("")
        _write_notes(self.files, self.current)

    def remove(self, path: str) -> None:
        with self._writing(path), suppress(FileNotFoundError):
            self.files.remove(path)


def holds(sha256: str) -> Callable[[int], bool]:
    """A check that an open file has this digest."""
    return lambda descriptor: sha256_between(descriptor, 0, os.fstat(descriptor).st_size) == sha256


def open_folder(root: Path, manifest_digest: str) -> Filled:
    """Open a new or empty folder or an earlier target. The manifest of another artifact is removed first."""
    files = SafeFolder(root)
    with os_errors(f"write {root}"):
        root.mkdir(parents=True, exist_ok=True)
        notes = _read_notes(files)
        if notes is None:
            if files.list(""):
                raise Refused(f"{root} holds files that were not fetched; name a new or an empty folder")
            _write_notes(files, {})
        filled = Filled(files, notes or {})
        if not filled.has(MANIFEST, manifest_digest, holds(manifest_digest)):
            filled.remove(MANIFEST)
    return filled


def _read_notes(files: SafeFolder) -> dict[str, Note] | None:
    """The notes of a folder; None: not a fetch target. Notes that are damaged or writable for others are ignored."""
    try:
        with files.reader(_NOTES) as file:
            if not is_ours(os.fstat(file.fileno())):
                return {}
            return parse_document(Notes, json.loads(file.read(_LONGEST))).files
    except FileNotFoundError:
        return None
    except (ValueError, NotUnderstood, RecursionError, NotAFile):
        return {}


def _write_notes(files: SafeFolder, noted: Mapping[str, Note]) -> None:
    notes = Notes(files=dict(noted))
    with scratch(files.root, _MODE, files) as file:
        file.write(notes.model_dump_json(indent=1).encode())
        file.finish()
        with os_errors(f"write {files.root / _NOTES}"):
            files.rename(file.path.name, _NOTES)


WEIGHTS: Final = "weights.safetensors"
SERVING: Final = "serving"
# Files of an artifact that only the emulator's programs need: graphs, constant tables, and figures of a program.
_OF_THE_EMULATOR: Final = ("graphs/", "constants/", "utilisation.json")


class Programs(StrEnum):
    """The programs of an artifact that a folder gets: those for Neuron devices, or the emulator's."""

    DEVICE = "device"
    EMULATOR = "emulator"

    @classmethod
    def of(cls, manifest: Manifest) -> "Programs":
        """The programs for devices, if the artifact has them."""
        return cls.DEVICE if manifest.runs_on_devices else cls.EMULATOR


@dataclass(frozen=True)
class Fetched:
    """The result of a fetch; `bytes_written` is 0 if the folder was complete."""

    folder: Path
    manifest: str
    bytes_written: int


def fetch(
    blobs: Blobs,
    manifest: Manifest,
    folder: Path,
    sent: Sent = ignore_progress,
    programs: Programs | None = None,
    *,
    flush: bool = True,
) -> Fetched:
    """Make a folder hold exactly this artifact, with one kind of its programs. A repetition is cheap, and resumes an
    interrupted fetch.

    Without `flush`, files of weights are not flushed to disk: after a power loss the folder may be complete by its
    manifest and have other bytes. The next fetch finds out, since no note outlives a boot.
    """
    sent = serialized(sent)
    document = manifest.to_bytes()
    digest = Blob.of(document).sha256
    files = files_of(manifest, programs)
    filled = open_folder(folder, digest)
    missing = {path: blob for path, blob in files.items() if not filled.has(path, blob.sha256, holds(blob.sha256))}
    if missing:
        filled.remove(MANIFEST)  # of a folder with the other programs; a folder with a manifest is complete
    written = sum(map(_size, missing.values()))
    sent(sum(map(_size, files.values())) - written)

    def place(path: str) -> None:
        filled.write(path, missing[path].sha256, lambda file: blobs.copy_into(missing[path], file, (0,), sent))

    at_once(place, missing.items())
    written += _fetch_assembled(blobs, _assembled_files(blobs, manifest), filled, sent, flush)
    filled.complete(document, digest)
    return Fetched(folder, digest, written)


def verified(folder: Path) -> frozenset[str]:
    """The paths of a fetched folder whose files are unchanged since a fetch verified them in this boot."""
    filled = Filled(SafeFolder(folder), {})
    notes = _read_notes(filled.files) or {}
    return frozenset(path for path, note in notes.items() if note.stamp and note.stamp == filled.stamp(path))


def note_again(folder: Path, paths: Collection[str]) -> None:
    """Note the present stamps of verified files: a new link or another mode changes the stamp, and no byte."""
    filled = Filled(SafeFolder(folder), {})
    notes = dict(_read_notes(filled.files) or {})
    for path in notes.keys() & set(paths):
        filled.note(path, notes[path].content)
    _write_notes(filled.files, notes | filled.current)


def size_of(manifest: Manifest, programs: Programs | None = None) -> int:
    """The total of bytes that a fetch reports to `sent`."""
    return sum(map(_size, files_of(manifest, programs).values())) + sum(
        sum(map(_size, {tensor.stored for tensor in tensors}))
        for tensors in (manifest.weights, *(file.tensors for payload in manifest.serving for file in payload.shared))
    )


def _size(blob: Blob) -> int:
    return blob.size


def files_of(manifest: Manifest, programs: Programs | None = None) -> dict[str, Blob]:
    """The files of a folder by path, other than its weights."""
    for executable in manifest.executables:
        if "/" in executable.name or executable.name in (".", ".."):
            raise Refused(f"the program name {executable.name!r} is not a file name; publish it under another name")
    chosen = programs or Programs.of(manifest)
    files = [
        *(
            (f"executables/{path}", blob)
            for executable in manifest.executables
            for path, blob in _of(executable, chosen)
        ),
        *((f"files/{file.path}", file.blob) for file in manifest.files if _is_read_by(chosen, file.path)),
        *(entry for payload in manifest.serving for entry in _of_payload(payload)),
    ]
    return {parse_document(File, {"path": path, "blob": blob}).path: blob for path, blob in files}


def _of(executable: Executable, programs: Programs) -> list[tuple[str, Blob]]:
    name, device = executable.name, executable.device
    if programs is Programs.EMULATOR:
        return [(f"{name}.nxe", executable.blob)]
    if device is None:
        raise Refused(f"program {name} has no NEFF for Neuron devices; build the artifact with --backend neuronx")
    return [(f"{name}.neff", device.neff), (f"{name}.json", device.interface)]


def _of_payload(payload: ServingPayload) -> list[tuple[str, Blob]]:
    folder = f"{SERVING}/{payload.name}"
    return [(f"{folder}.json", payload.contract), *((f"{folder}/{file.path}", file.blob) for file in payload.files)]


def _is_read_by(programs: Programs, path: str) -> bool:
    return programs is Programs.EMULATOR or not path.startswith(_OF_THE_EMULATOR)


def _assembled_files(blobs: Blobs, manifest: Manifest) -> Iterator[tuple[str, AssembledFile]]:
    if manifest.weights:
        yield WEIGHTS, weights_file(manifest.weights)
    for payload in manifest.serving:
        for file in payload.shared:
            yield f"{SERVING}/{payload.name}/{file.path}", file_of(blobs.read(file.head), file.tensors)


def _fetch_assembled(
    blobs: Blobs, files: Iterable[tuple[str, AssembledFile]], filled: Filled, sent: Sent, flush: bool
) -> int:
    """Returns the number of bytes that the folder did not have."""
    missing: list[tuple[str, AssembledFile]] = []
    for path, whole in files:
        if filled.has(path, whole.content, whole.is_right):
            sent(_bytes_of(whole))
        else:
            missing.append((path, whole))
    if isinstance(blobs, MirroredBlobs):
        _assemble_together(blobs, missing, filled, sent, flush)
    else:
        for path, whole in missing:
            filled.write(path, whole.content, partial(_write_assembled, blobs, whole, sent), flush=flush)
    return sum(_bytes_of(whole) for _, whole in missing)


def _assemble_together(
    blobs: MirroredBlobs, missing: Sequence[tuple[str, AssembledFile]], filled: Filled, sent: Sent, flush: bool
) -> None:
    """Assemble files concurrently; one that is at several paths is assembled once."""
    paths: dict[str, list[str]] = {}  # of each content
    for path, whole in missing:
        if whole.content in paths:
            sent(_bytes_of(whole))
        paths.setdefault(whole.content, []).append(path)
    different = {whole.content: whole for _, whole in missing}.values()
    adopting = [(whole, partial(filled.adopt_all, paths[whole.content])) for whole in different]
    blobs.assemble(adopting, filled.top, sent, flush=flush)
    for path, whole in missing:
        filled.note(path, whole.content)


def _bytes_of(whole: AssembledFile) -> int:
    return sum(map(_size, whole.stored))


def _write_assembled(blobs: Blobs, whole: AssembledFile, sent: Sent, file: int) -> None:
    """Assemble a file from a local store: each object is read once, and written at every offset of its content."""

    def place(stored: Blob) -> None:
        placed = whole.stored[stored]
        if placed[0].tensor.pack is None:
            blobs.copy_into(stored, file, [piece.at for piece in placed], sent)
            return
        tensors = [piece.tensor for piece in placed]
        for (_, data), piece in zip(read_weights(blobs, tensors), placed, strict=True):
            write_at(file, data, piece.at)
        sent(stored.size)

    os.ftruncate(file, whole.size)
    write_at(file, whole.head, 0)
    at_once(place, [(stored, stored) for stored in whole.stored])
