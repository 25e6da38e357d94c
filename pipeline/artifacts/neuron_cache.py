"""Export of artifacts to the Neuron runtime's persistent compile cache; docs/guides/neuronx.md.

Compilers and runtimes use the cache during an export, and the export takes no lock. In a folder, a complete file is
written under a temporary name and then linked; in a bucket, an object is created if absent: nothing is overwritten. The
NEFF is created first: its creator owns the entry, and other writers stop before they have written anything.
`model.done` is created last: readers ignore a folder without it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.backends.files import scratch
from nxpipe.artifact_store.backends.protocol import Backend, Sent, serialized
from nxpipe.artifact_store.canonical import sha256_of_chunks
from nxpipe.artifact_store.errors import NotFound, StoreError
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.names import choose
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts.channels import model_id, unknown_channel
from nxpipe.pipeline.util.errors import ProgramInvalid

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.blobs import Blobs
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier
    from nxpipe.pipeline.config import Config


_KEPT: Final = "neuron-cache"  # folder of an artifact's files, with a folder for each program
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


def entries_of(manifest: Manifest) -> list[CacheEntry]:
    """The cache entries of an artifact's programs; ProgramInvalid if one is not complete."""
    files_of: dict[tuple[str, str], dict[str, Blob]] = {}
    for file in manifest.files:
        top, _, path = file.path.partition("/")
        if top == _KEPT:
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


def _parts(manifest: Manifest, path: str) -> tuple[str, str, str]:
    program, _, file = path.partition("/")
    folder = folder_of(file)
    if folder is None or program not in {executable.name for executable in manifest.executables}:
        raise ProgramInvalid(
            f"{manifest.model.id}: its file {_KEPT}/{path} belongs to no cache entry of its programs; build "
            "the model again"
        )
    return program, folder, file.removeprefix(f"{folder}/")


# Selection ----------------------------------------------------------------------------------------------------------

_BACKEND: Final = "neuronx"
_NO_DEVICE: Final = "no Neuron device runs the emulator's programs"
_UNCACHED: Final = "builds compile without that cache; `nxpipe agent run` and `nxpipe store fetch` bring the programs"


class NothingToExport(NotFound):
    """None of the selected artifacts has a cache entry."""


@dataclass(frozen=True)
class ExportSelection:
    """A selected artifact and its cache entries."""

    manifest: Manifest
    entries: Sequence[CacheEntry]

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def without(self) -> list[str]:
        """Programs without an entry."""
        having = {entry.program for entry in self.entries}
        return sorted(executable.name for executable in self.manifest.executables if executable.name not in having)

    @property
    def warning(self) -> str | None:
        """A warning about programs that the export omits."""
        if self.manifest.backend != _BACKEND:
            return f"{self.name}: {_NO_DEVICE}"
        if not self.without:
            return None
        return (
            f"{self.name}: {len(self.without)} of {len(self.manifest.executables)} programs came with no cache entry "
            f"({', '.join(self.without)}); {_UNCACHED}"
        )


def select_named(store: "Store", names: Sequence[str]) -> list[ExportSelection]:
    """The named artifacts; NothingToExport for one that cannot be exported."""
    published = store.list()
    by_key = {artifact.request_key: artifact for artifact in (choose(name, published, store.url) for name in names)}
    chosen = [_chosen(artifact.manifest) for artifact in by_key.values()]
    for artifact in chosen:
        if artifact.manifest.backend != _BACKEND:
            raise NothingToExport(f"{artifact.name} cannot be exported: {_NO_DEVICE}; name another artifact")
    return chosen


def select_served(store: "Store", channel: str, trust: "ChannelVerifier") -> list[ExportSelection]:
    """The artifacts of a channel's current generation."""
    artifacts = trust.served(store, channel)
    if artifacts is None:
        raise unknown_channel(store, channel)
    return [_chosen(store.manifest(served.manifest)) for served in artifacts]


def select_configured(
    store: "Store", config: "Config", folder: Path, say: Callable[[str], None]
) -> list[ExportSelection]:
    """The newest artifact of neuronx-cc for each model of nxpipe.toml and its target."""
    published, chosen = store.list(), {}
    for model in config.models:
        requested = (model_id(model, folder), INSTANCES[model.target].compiler_target)
        matching = (artifact.manifest for artifact in published if (artifact.model_id, artifact.target) == requested)
        newest = next((manifest for manifest in matching if manifest.backend == _BACKEND), None)
        if newest is None:
            say(f"  {requested[0]} for {requested[1]}: the store holds no artifact of neuronx-cc, and {_NO_DEVICE}")
        else:
            chosen[newest.request_key] = _chosen(newest)
    if not chosen:
        raise NothingToExport(
            f"{store.url} holds no artifact of neuronx-cc for the models of nxpipe.toml ({len(config.models)}); "
            "name other artifacts"
        )
    return list(chosen.values())


def require_entries(chosen: Sequence[ExportSelection]) -> None:
    if not any(selection.entries for selection in chosen):
        warnings = "; ".join(selection.warning for selection in chosen if selection.warning)
        raise NothingToExport(f"nothing can be exported: {warnings}")


def _chosen(manifest: Manifest) -> ExportSelection:
    return ExportSelection(manifest, entries_of(manifest) if manifest.backend == _BACKEND else [])


_ABANDONED: Final = 24 * 3600.0  # seconds


class EntriesLocked(StoreError):
    """Entries that another writer has started and not completed."""


class ExportResult(Enum):
    WRITTEN = "written"
    THERE = "there already"
    HELD = "held by others"


@dataclass(frozen=True)
class ExportedEntry:
    """The result of one entry's export; `why` explains it."""

    entry: CacheEntry
    result: ExportResult
    why: str = ""


def export_entries(
    blobs: "Blobs", entries: Iterable[CacheEntry], cache: Backend, sent: Sent
) -> Iterator[ExportedEntry]:
    """Export the entries in order; a repetition continues where the last attempt ended."""
    progress = serialized(_halved(sent))
    for entry in entries:
        yield _export(blobs, entry, cache, progress)


def require_exported(exported: Sequence[ExportedEntry], url: str) -> None:
    """Raise EntriesLocked for entries that were skipped, after all others were exported."""
    skipped = [entry for entry in exported if entry.result is ExportResult.HELD]
    if skipped:
        reasons = "; ".join(f"{entry.entry.folder}: {entry.why}" for entry in skipped)
        raise EntriesLocked(
            f"{len(skipped)} of {len(exported)} entries were skipped in {url} ({reasons}); when no compiler runs "
            "there, run `neuron_parallel_compile --command clear-locks` or remove these folders, and export again"
        )


def remove_abandoned_files(cache: Backend) -> None:
    """Remove files that killed exports left in `tmp/`."""
    for file in cache.abandoned(cache.now() - _ABANDONED):
        cache.remove_abandoned(file)


def _export(blobs: "Blobs", entry: CacheEntry, cache: Backend, progress: Sent) -> ExportedEntry:
    sizes = {file.path.rpartition("/")[2]: file.size for file in cache.walk(f"{entry.folder}/")}
    state = state_of(sizes)
    if state is EntryState.READY:
        progress(2 * entry.size)
        same = sizes[NEFF] == entry.files[NEFF].size
        return ExportedEntry(entry, ExportResult.THERE, "" if same else "from another compilation, which is kept")
    if why := _why_not(entry, cache, state, sizes):
        return ExportedEntry(entry, ExportResult.HELD, why)
    for name in (NEFF, *sorted(entry.files.keys() - {NEFF, DONE}), DONE):
        if name in sizes:
            progress(2 * entry.files[name].size)
        elif not _create(blobs, entry.files[name], cache, entry.path(name), progress):
            return _export(blobs, entry, cache, progress)  # a concurrent writer was faster
    return ExportedEntry(entry, ExportResult.WRITTEN)


def _why_not(entry: CacheEntry, cache: Backend, state: EntryState, names: Collection[str]) -> str | None:
    if state is EntryState.LOCKED:
        return "locked by a compiler that runs or was killed"
    if state is EntryState.FAILED:
        return "the entry is a failed compilation"
    for name in sorted(entry.files.keys() & set(names)):
        if not _is(cache, entry.path(name), entry.files[name]):
            return f"another writer started it with a different {name}"
    return None


def _create(blobs: "Blobs", blob: "Blob", cache: Backend, path: str, progress: Sent) -> bool:
    """Create a file; False if a different one exists."""
    with scratch(cache.scratch_folder) as file:
        for chunk in blobs.chunks(blob, progress):
            file.write(chunk)
        return cache.create(path, file.finish(), durable=True, sent=progress) or _is(cache, path, blob)


def _is(cache: Backend, path: str, blob: "Blob") -> bool:
    stat = cache.stat(path)
    if stat is None or stat.size != blob.size:
        return False
    return (stat.sha256 or sha256_of_chunks(cache.read(path) or ())) == blob.sha256


def _halved(sent: Sent) -> Sent:
    """Progress in halves: a byte counts when it is read from the store and when it is in the cache."""
    total = reported = 0

    def progress(size: int) -> None:
        nonlocal total, reported
        total += size
        sent(total // 2 - reported)
        reported = total // 2

    return progress


@dataclass(frozen=True)
class FoundEntry:
    """An entry in a compile cache."""

    folder: str
    state: EntryState
    size: int  # bytes of all its files


def entries_in(cache: Backend) -> Iterator[FoundEntry]:
    """Entries of a cache, sorted by folder; files outside of entries are ignored."""
    sizes: dict[str, dict[str, int]] = {}
    for file in cache.walk(""):
        if folder := folder_of(file.path):
            sizes.setdefault(folder, {})[file.path] = file.size
    for folder in sorted(sizes):
        names = [path.rpartition("/")[2] for path in sizes[folder]]
        yield FoundEntry(folder, state_of(names), sum(sizes[folder].values()))
