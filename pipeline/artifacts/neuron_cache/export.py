"""Entries into a cache that compilers and runtimes use meanwhile: without a lock, and without a half of one in sight.

A file is made whole under another name and linked to its own, or put into the bucket on the condition that there is
none: nothing is ever overwritten. The NEFF comes first: whoever has made it owns the entry, and others step back
before they have written anything. `model.done` comes last: readers take no folder without it.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.backends.files import scratch
from nxpipe.artifact_store.backends.protocol import Backend, Sent, in_turn
from nxpipe.artifact_store.canonical import sha256_of_chunks
from nxpipe.artifact_store.errors import StoreError
from nxpipe.pipeline.compile.neuronx.cache_entry import DONE, NEFF, CacheEntry, EntryState, state_of

if TYPE_CHECKING:
    from nxpipe.artifact_store.blobs import Blobs
    from nxpipe.artifact_store.documents import Blob

_ABANDONED: Final = 24 * 3600.0  # seconds


class EntriesHeld(StoreError):
    """Entries that others have begun and not finished: they are theirs to finish."""


class What(Enum):
    WRITTEN = "written"
    THERE = "there already"
    HELD = "held by others"


@dataclass(frozen=True)
class Exported:
    entry: CacheEntry
    what: What
    why: str = ""


def export(blobs: "Blobs", entries: Iterable[CacheEntry], cache: Backend, sent: Sent) -> Iterator[Exported]:
    """One entry after the other; a repetition goes on where the last attempt ended. Bytes are told once."""
    tell = in_turn(_halves(sent))
    for entry in entries:
        yield _export(blobs, entry, cache, tell)


def insist(exported: Sequence[Exported], url: str) -> None:
    """Raise for what is not in the cache now, after all else is."""
    held = [one for one in exported if one.what is What.HELD]
    if held:
        whys = "; ".join(f"{one.entry.folder}: {one.why}" for one in held)
        raise EntriesHeld(
            f"{len(held)} of {len(exported)} entries were left alone in {url} ({whys}); once no compiler is at work "
            "there, run `neuron_parallel_compile --command clear-locks` or remove these folders, and export again"
        )


def clear_abandoned(cache: Backend) -> None:
    """What exporters left in `tmp/` that were killed in the middle of a file."""
    for found in cache.abandoned(cache.now() - _ABANDONED):
        cache.remove_abandoned(found)


def _export(blobs: "Blobs", entry: CacheEntry, cache: Backend, tell: Sent) -> Exported:
    sizes = {found.path.rpartition("/")[2]: found.size for found in cache.walk(f"{entry.folder}/")}
    state = state_of(sizes)
    if state is EntryState.READY:
        tell(2 * entry.size)
        same = sizes[NEFF] == entry.files[NEFF].size
        return Exported(entry, What.THERE, "" if same else "by another compilation, which stays")
    if why := _why_not(entry, cache, state, sizes):
        return Exported(entry, What.HELD, why)
    for name in (NEFF, *sorted(entry.files.keys() - {NEFF, DONE}), DONE):
        if name in sizes:
            tell(2 * entry.files[name].size)
        elif not _create(blobs, entry.files[name], cache, entry.path(name), tell):
            return _export(blobs, entry, cache, tell)  # somebody else has just written another one
    return Exported(entry, What.WRITTEN)


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
