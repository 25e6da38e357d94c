"""Cached store: reads go through this machine's cache, then the store, then its mirrors; partial files are reused."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from threading import Event
from typing import IO

from nxpipe.artifact_store.backends.files import chunks_of, copy_into, os_errors
from nxpipe.artifact_store.backends.no_symlinks import SafeFolder, Subfolder
from nxpipe.artifact_store.backends.protocol import Backend, Sent, ignore_progress
from nxpipe.artifact_store.blobs import Blobs
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.evidence import Evidence
from nxpipe.artifact_store.fetch.file_layout import AssembledFile, PlacedTensor, chunks_between
from nxpipe.artifact_store.fetch.local_files import LocalFiles
from nxpipe.artifact_store.fetch.mirrors import Sources
from nxpipe.artifact_store.fetch.partial import Partial, partial
from nxpipe.artifact_store.fetch.ranges import Piece, at_once, fill, ranges_of, receive, streamed
from nxpipe.artifact_store.fetch.read_cache import ReadCache
from nxpipe.artifact_store.index.segments import Report, ignore_report
from nxpipe.artifact_store.layout import action_path
from nxpipe.artifact_store.records import ActionRecord, Published, Records
from nxpipe.artifact_store.store import Store, evidence_in
from nxpipe.artifact_store.weights import read_weights

Adopt = Callable[[Path, int], bool]


def range_count(whole: AssembledFile) -> int:
    """The number of ranges in which the objects of a file are received."""
    return sum(ranges_of(stored) for stored in whole.stored)


@dataclass(frozen=True)
class _Placement:
    """An object of a file that is being assembled."""

    whole: AssembledFile
    file: Partial
    piece: Piece


def assemble(
    files: Sequence[tuple[AssembledFile, Partial]], blobs: Blobs, sources: Sources, cache: ReadCache | None, sent: Sent
) -> None:
    """Write every object at its offsets, verified, and the head of each file last, which completes it.

    Large objects are first, so that none is received alone at the end; the files take turns, because the kernel lets
    one thread at a time write to a file.
    """

    def place(placement: _Placement) -> None:
        piece, file = placement.piece, placement.file
        placed = placement.whole.stored[piece.blob]
        if placed[0].tensor.pack is not None:
            _unpack(blobs, placed, file)
            sent(piece.blob.size)
            return
        if _is_in_partial(file, piece) or (cache and _copy_from_cache(file, piece, cache)):
            sent(piece.blob.size)
        else:
            sources.first(f"blob {piece.blob.sha256}", lambda backend: _fill(file, piece, backend, sent))
        _repeat(file, piece, placed[1:])

    in_order, stopped = streamed([stored for whole, _ in files for stored in whole.stored]), Event()
    columns = [_placements(whole, file, in_order, stopped) for whole, file in files]
    turns = [(placement, placement.piece.blob) for row in zip_longest(*columns) for placement in row if placement]
    at_once(place, sorted(turns, key=lambda turn: -turn[1].size), in_order, stopped)
    for whole, file in files:
        file.write(whole.head, 0)


def _placements(
    whole: AssembledFile, file: Partial, in_order: Collection[Blob], stopped: Event
) -> Iterator[_Placement]:
    firsts = accumulate(map(ranges_of, whole.stored), initial=0)
    for (stored, placed), first in zip(whole.stored.items(), firsts, strict=False):
        piece = Piece(stored, placed[0].at, first, stopped if stored in in_order else None)
        yield _Placement(whole, file, piece)


def _fill(file: Partial, piece: Piece, backend: Backend, sent: Sent) -> bool:
    fill(file, piece, backend, sent)
    return True


def _unpack(blobs: Blobs, placed: Sequence[PlacedTensor], file: Partial) -> None:
    tensors = [piece.tensor for piece in placed]
    for (_, data), piece in zip(read_weights(blobs, tensors), placed, strict=True):
        file.write(data, piece.at)


def _is_in_partial(file: Partial, piece: Piece) -> bool:
    """True if a blob of one range is already in the file. A blob of several ranges is completed and hashed later."""
    if piece.ranges > 1 or not file.has(piece.first):
        return False
    hasher = hashlib.sha256()
    file.feed(hasher, piece.at, piece.at + piece.blob.size)
    return hasher.hexdigest() == piece.blob.sha256


def _copy_from_cache(file: Partial, piece: Piece, cache: ReadCache) -> bool:
    """Copy a blob from the cache into the file. False: the cache does not have it."""
    opened = cache.open(piece.blob)
    if opened:
        with opened:
            copy_into(file.descriptor, opened, piece.at)
    elif not cache.local_files.copy(piece.blob, lambda data, offset: file.write(data, piece.at + offset)):
        return False
    for number in range(piece.ranges):
        start, stop = piece.span(number)
        file.complete(piece.first + number, stop - start)
    return True


def _repeat(file: Partial, piece: Piece, others: Sequence[PlacedTensor]) -> None:
    """Write the bytes of an object at its other offsets: equal tensors are one object."""
    for other in others:
        offset = other.at
        for chunk in chunks_between(file.descriptor, piece.at, piece.at + piece.blob.size):
            file.write(chunk, offset)
            offset += len(chunk)


class MirroredBlobs(Blobs):
    """Blobs read from this machine's cache, the store or a mirror.

    Writes, and every look-up that decides a write, use the store itself.
    """

    def __init__(self, backend: Backend, sources: Sources, cache: ReadCache | None) -> None:
        super().__init__(backend)
        self._sources = sources
        self._cache = cache

    def chunks(self, blob: Blob, sent: Sent = ignore_progress) -> Iterator[bytes]:
        """The bytes in chunks, verified before the first one."""
        return chunks_of(self.open(blob, sent))

    def open(self, blob: Blob, sent: Sent = ignore_progress) -> IO[bytes]:
        """The bytes as an open file, verified; read through the cache."""
        opened: list[IO[bytes]] = []

        def use(name: str, handle: int) -> None:
            opened.append(os.fdopen(os.dup(handle), "rb", buffering=0))
            if self._cache:
                self._cache.keep(name, blob, handle)

        cached = self._cache and self._cache.open(blob)
        if cached:
            sent(blob.size)
            return cached
        folder = self._cache.partial if self._cache else _subfolder(self._backend.scratch_folder)
        self._receive(blob, folder, use, sent)
        return opened[0]

    def copy_to(self, blob: Blob, path: Path, sent: Sent = ignore_progress) -> None:
        def use(name: str, handle: int) -> None:
            with os_errors(f"write {path}"):
                os.fsync(handle)
                (path.parent / name).replace(path)

        if self._cache is None:
            self._receive(blob, _subfolder(path.parent), use, sent)
        else:
            super().copy_to(blob, path, sent)

    def copy_into(self, blob: Blob, descriptor: int, offsets: Sequence[int], sent: Sent = ignore_progress) -> None:
        with self.open(blob, sent) as file:
            for offset in offsets:
                copy_into(descriptor, file, offset)

    def assemble(
        self,
        files: Iterable[tuple[AssembledFile, Adopt]],
        near: Subfolder,
        sent: Sent = ignore_progress,
        *,
        flush: bool = True,
    ) -> None:
        """Assemble files from blobs, concurrently, and pass the path and descriptor of each to its `Adopt`, which links
        it to its target and returns False if the file is gone. They are assembled in the cache, which keeps them, or
        else in `near`."""
        folder = self._cache.partial if self._cache else near
        with ExitStack() as partials:
            missing: list[tuple[AssembledFile, Partial, Adopt]] = []
            for whole, adopt in files:
                if self._cache and self._adopt_local(whole, self._cache.local_files, adopt):
                    sent(sum(stored.size for stored in whole.stored))
                    continue
                file = partials.enter_context(partial(folder, whole.content, whole.size, range_count(whole)))
                missing.append((whole, file, adopt))
            assemble([(whole, file) for whole, file, _ in missing], self, self._sources, self._cache, sent)
            for whole, file, adopt in missing:
                file.finish(flush=flush)
                adopt(file.path, file.descriptor)
                if self._cache:
                    self._cache.local_files.keep(folder.at(file.path.name), whole, file.descriptor)
                    self._cache.evict(whole.size)

    def _adopt_local(self, whole: AssembledFile, local_files: LocalFiles, adopt: Callable[[Path, int], bool]) -> bool:
        """Pass the cached file to `adopt`. False: the cache does not have it, or it is gone."""
        with local_files.find(whole) as cached:
            if cached is None or not adopt(*cached):
                return False
            local_files.stamp(whole, cached[1])
            return True

    def _receive(self, blob: Blob, folder: Subfolder, use: Callable[[str, int], None], sent: Sent) -> None:
        def receive_from(backend: Backend) -> bool:
            receive(blob, folder, use, backend, sent)
            return True

        self._sources.first(f"blob {blob.sha256}", receive_from)


def _subfolder(folder: Path) -> Subfolder:
    return Subfolder(SafeFolder(folder))


class CachedStore(Store):
    """A store with mirrors: a record is read from the first source that has it, a listing from the first available."""

    def __init__(self, backend: Backend, blobs: MirroredBlobs, sources: Sources) -> None:
        super().__init__(backend)
        self.blobs = blobs
        self.sources = sources

    def _find_record(self, request_key: str) -> ActionRecord | None:
        path = action_path(request_key)
        return self.sources.first(path, lambda backend: Records(backend).read(ActionRecord, path))

    def evidence(self, manifest_digest: str) -> Sequence[Evidence]:
        what = f"the evidence of manifest {manifest_digest}"
        return self.sources.first(what, lambda backend: evidence_in(backend, manifest_digest) or None) or []

    def list(self, report: Report = ignore_report) -> Sequence[Published]:
        listed = self.sources.first("the listing", lambda backend: Store(backend).list(report))
        return [self._published(published.record) for published in listed or ()]


def sources_of(store: Store) -> Sources:
    """The sources of a store: itself and its mirrors."""
    return store.sources if isinstance(store, CachedStore) else Sources([store.backend])
