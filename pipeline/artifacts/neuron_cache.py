"""Which artifacts are meant, and what of them a cache has a use for."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.backends.files import scratch
from nxpipe.artifact_store.backends.protocol import Backend, Sent, in_turn
from nxpipe.artifact_store.digest import sha256_of_chunks
from nxpipe.artifact_store.errors import NotFound, StoreError
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.names import choose
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts.channels import model_id, unknown_channel
from nxpipe.pipeline.compile.neuronx.cache_entry import (
    DONE,
    NEFF,
    CacheEntry,
    EntryState,
    entries_of,
    folder_of,
    state_of,
)

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.blobs import Blobs
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.transfer.believed import Trust
    from nxpipe.pipeline.config import Config


_BACKEND: Final = "neuronx"
_NO_DEVICE: Final = "no Neuron device runs the emulator's programs"
_BUILD_IT: Final = "build with --backend neuronx"
_TRACED: Final = (
    "AWS documents that torch_neuronx.trace uses no cache; `nxpipe agent run` and `nxpipe store fetch` bring them"
)


class NothingToExport(NotFound):
    """No artifact that was asked for has an entry that a cache could hold."""


@dataclass(frozen=True)
class ExportSelection:
    manifest: Manifest
    entries: Sequence[CacheEntry]

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def without(self) -> list[str]:
        """Programs that came with no entry."""
        having = {entry.program for entry in self.entries}
        return sorted(executable.name for executable in self.manifest.executables if executable.name not in having)

    @property
    def doubt(self) -> str | None:
        """A word on what the cache will not have of it."""
        if self.manifest.backend != _BACKEND:
            return f"{self.name}: {_NO_DEVICE}"
        if not self.without:
            return None
        return (
            f"{self.name}: {len(self.without)} of {len(self.manifest.executables)} programs came with no cache entry "
            f"({', '.join(self.without)}); {_TRACED}"
        )


def select_named(store: "Store", names: Sequence[str]) -> list[ExportSelection]:
    """Each one was meant, so one that is of no use is an error."""
    published = store.list()
    found = {one.request_key: one for one in (choose(name, published, store.url) for name in names)}
    chosen = [_chosen(one.manifest) for one in found.values()]
    for one in chosen:
        if one.manifest.backend != _BACKEND:
            raise NothingToExport(f"{one.name} cannot be exported: {_NO_DEVICE}; {_BUILD_IT}")
    return chosen


def select_served(store: "Store", channel: str, trust: "Trust") -> list[ExportSelection]:
    """What a channel serves now."""
    artifacts = trust.served(store, channel)
    if artifacts is None:
        raise unknown_channel(store, channel)
    return [_chosen(store.manifest(one.manifest)) for one in artifacts]


def select_configured(
    store: "Store", config: "Config", folder: Path, say: Callable[[str], None]
) -> list[ExportSelection]:
    """Of each model of nxpipe.toml the newest artifact for its target that AWS's compiler made."""
    published, chosen = store.list(), {}
    for model in config.models:
        wanted = (model_id(model, folder), INSTANCES[model.target].compiler_target)
        fitting = (one.manifest for one in published if (one.model_id, one.target) == wanted)
        newest = next((manifest for manifest in fitting if manifest.backend == _BACKEND), None)
        if newest is None:
            say(f"  {wanted[0]} for {wanted[1]}: the store holds no artifact by AWS's compiler, and {_NO_DEVICE}")
        else:
            chosen[newest.request_key] = _chosen(newest)
    if not chosen:
        raise NothingToExport(
            f"{store.url} holds nothing by AWS's compiler of the models of nxpipe.toml ({len(config.models)}); "
            f"{_BUILD_IT}, or name other artifacts"
        )
    return list(chosen.values())


def require_entries(chosen: Sequence[ExportSelection]) -> None:
    if not any(one.entries for one in chosen):
        doubts = "; ".join(one.doubt for one in chosen if one.doubt)
        raise NothingToExport(f"nothing can be exported: {doubts}")


def _chosen(manifest: Manifest) -> ExportSelection:
    return ExportSelection(manifest, entries_of(manifest) if manifest.backend == _BACKEND else [])


_ABANDONED: Final = 24 * 3600.0  # seconds


class EntriesLocked(StoreError):
    """Entries that others have begun and not finished: they are theirs to finish."""


class ExportResult(Enum):
    WRITTEN = "written"
    THERE = "there already"
    HELD = "held by others"


@dataclass(frozen=True)
class ExportedEntry:
    entry: CacheEntry
    what: ExportResult
    why: str = ""


def export_entries(
    blobs: "Blobs", entries: Iterable[CacheEntry], cache: Backend, sent: Sent
) -> Iterator[ExportedEntry]:
    """One entry after the other; a repetition goes on where the last attempt ended. Bytes are told once."""
    tell = in_turn(_halves(sent))
    for entry in entries:
        yield _export(blobs, entry, cache, tell)


def require_exported(exported: Sequence[ExportedEntry], url: str) -> None:
    """Raise for what is not in the cache now, after all else is."""
    held = [one for one in exported if one.what is ExportResult.HELD]
    if held:
        whys = "; ".join(f"{one.entry.folder}: {one.why}" for one in held)
        raise EntriesLocked(
            f"{len(held)} of {len(exported)} entries were left alone in {url} ({whys}); once no compiler is at work "
            "there, run `neuron_parallel_compile --command clear-locks` or remove these folders, and export again"
        )


def remove_abandoned_files(cache: Backend) -> None:
    """What exporters left in `tmp/` that were killed in the middle of a file."""
    for found in cache.abandoned(cache.now() - _ABANDONED):
        cache.remove_abandoned(found)


def _export(blobs: "Blobs", entry: CacheEntry, cache: Backend, tell: Sent) -> ExportedEntry:
    sizes = {found.path.rpartition("/")[2]: found.size for found in cache.walk(f"{entry.folder}/")}
    state = state_of(sizes)
    if state is EntryState.READY:
        tell(2 * entry.size)
        same = sizes[NEFF] == entry.files[NEFF].size
        return ExportedEntry(entry, ExportResult.THERE, "" if same else "by another compilation, which stays")
    if why := _why_not(entry, cache, state, sizes):
        return ExportedEntry(entry, ExportResult.HELD, why)
    for name in (NEFF, *sorted(entry.files.keys() - {NEFF, DONE}), DONE):
        if name in sizes:
            tell(2 * entry.files[name].size)
        elif not _create(blobs, entry.files[name], cache, entry.path(name), tell):
            return _export(blobs, entry, cache, tell)  # somebody else has just written another one
    return ExportedEntry(entry, ExportResult.WRITTEN)


def _why_not(entry: CacheEntry, cache: Backend, state: EntryState, names: Collection[str]) -> str | None:
    if state is EntryState.LOCKED:
        return "a compiler is at work on it, or was killed and has left its lock"
    if state is EntryState.FAILED:
        return "it holds a failure of the compiler"
    for name in sorted(entry.files.keys() & set(names)):
        if not _is(cache, entry.path(name), entry.files[name]):
            return f"somebody else began it, with another {name}"
    return None


def _create(blobs: "Blobs", blob: "Blob", cache: Backend, path: str, tell: Sent) -> bool:
    """False: what is there now is not ours."""
    with scratch(cache.scratch_folder) as file:
        for chunk in blobs.chunks(blob, tell):
            file.write(chunk)
        return cache.create(path, file.finish(), durable=True, sent=tell) or _is(cache, path, blob)


def _is(cache: Backend, path: str, blob: "Blob") -> bool:
    stat = cache.stat(path)
    if stat is None or stat.size != blob.size:
        return False
    return (stat.sha256 or sha256_of_chunks(cache.read(path) or ())) == blob.sha256


def _halves(sent: Sent) -> Sent:
    """Every byte is told twice: when it was read from the store, and when the cache has it."""
    seen = told = 0

    def tell(size: int) -> None:
        nonlocal seen, told
        seen += size
        sent(seen // 2 - told)
        told = seen // 2

    return tell


@dataclass(frozen=True)
class FoundEntry:
    folder: str
    state: EntryState
    size: int  # bytes of all its files


def entries_in(cache: Backend) -> Iterator[FoundEntry]:
    """In the order of their folders; strangers' files are passed over."""
    sizes: dict[str, dict[str, int]] = {}
    for found in cache.walk(""):
        if folder := folder_of(found.path):
            sizes.setdefault(folder, {})[found.path] = found.size
    for folder in sorted(sizes):
        names = [path.rpartition("/")[2] for path in sizes[folder]]
        yield FoundEntry(folder, state_of(names), sum(sizes[folder].values()))
