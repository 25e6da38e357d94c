"""Entries of the Neuron compile cache: folders, files and states; and those files of entries that an artifact keeps."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.compile.artifact_files import CACHE, cached
from nxpipe.pipeline.util.errors import ProgramInvalid

if TYPE_CHECKING:
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.manifest import Manifest


NEFF: Final = "model.neff"
DONE: Final = "model.done"
_FAILED: Final = "model.log"  # the compiler's output
_LOCK: Final = ".lock"
_COMPILER: Final = re.compile(r"neuronxcc-[0-9A-Za-z][0-9A-Za-z.+_-]*")
_MODULE: Final = re.compile(r"MODULE_[0-9A-Za-z]+\+[0-9A-Za-z]+")  # the hash of the graph, that of the flags


class EntryState(Enum):
    READY = "ready"
    LOCKED = "locked"  # a compiler is running, or was killed
    FAILED = "failed"  # a failed compilation, which is not repeated
    UNFINISHED = "unfinished"


def state_of(names: Collection[str]) -> EntryState:
    """The state by the files of the folder. A lock beside a finished NEFF is stale."""
    if NEFF in names and DONE in names:
        return EntryState.READY
    if any(name.endswith(_LOCK) for name in names):
        return EntryState.LOCKED
    return EntryState.FAILED if DONE in names or _FAILED in names else EntryState.UNFINISHED


def is_kept(name: str) -> bool:
    """True for a file that an artifact keeps: not a lock, which belongs to a process, nor a log, which names local
    paths."""
    return not name.endswith(_LOCK) and name != _FAILED


@dataclass(frozen=True)
class CacheEntry:
    """A finished cache entry in an artifact."""

    program: str  # of the artifact that keeps it
    folder: str  # in a cache
    files: Mapping[str, "Blob"]

    @property
    def size(self) -> int:
        return sum(blob.size for blob in self.files.values())

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"


def entries_of(manifest: "Manifest") -> list[CacheEntry]:
    """The cache entries of an artifact's programs; ProgramInvalid if one is not complete."""
    files_of: dict[tuple[str, str], dict[str, Blob]] = {}
    for file in manifest.files:
        top, _, path = file.path.partition("/")
        if top == CACHE:
            program, folder, name = _parts(manifest, path)
            files_of.setdefault((program, folder), {})[name] = file.blob
    for (program, folder), files in files_of.items():
        if state_of(files) is not EntryState.READY:
            raise ProgramInvalid(
                f"{manifest.model.id} {program}: {folder} lacks {NEFF} or {DONE}; build the model again"
            )
    return [CacheEntry(program, folder, files) for (program, folder), files in files_of.items()]


def folder_of(path: str) -> str | None:
    """The entry that a file of a cache belongs to; None for a file of no entry."""
    compiler, _, rest = path.partition("/")
    module, _, name = rest.partition("/")
    named = _COMPILER.fullmatch(compiler) and _MODULE.fullmatch(module) and name and "/" not in name
    return f"{compiler}/{module}" if named else None


def _parts(manifest: "Manifest", path: str) -> tuple[str, str, str]:
    program, _, file = path.partition("/")
    folder = folder_of(file)
    if folder is None or program not in {executable.name for executable in manifest.executables}:
        raise ProgramInvalid(
            f"{manifest.model.id}: its file {CACHE}/{path} belongs to no cache entry of its programs; build "
            "the model again"
        )
    return program, folder, file.removeprefix(f"{folder}/")


def cache_entries(cache: Path, program: str) -> dict[str, bytes]:
    """Files of the finished entries, by path in an artifact. Usually none: AWS documents that tracing uses no cache."""
    kept: dict[str, bytes] = {}
    for folder in sorted(cache.glob("*/*/")):
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if state_of([path.name for path in files]) is EntryState.READY:
            for path in files:
                where = path.relative_to(cache).as_posix()
                if folder_of(where) and is_kept(path.name):
                    kept[cached(program, where)] = path.read_bytes()
    return kept
