"""Cached store: reads go through this machine's cache, then the store, then its mirrors; partial files are reused."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO

from nxpipe.artifact_store.backends.files import chunks_of, copy_into, os_errors
from nxpipe.artifact_store.backends.no_symlinks import SafeFolder, Spot
from nxpipe.artifact_store.backends.protocol import Backend, Sent, ignore_progress
from nxpipe.artifact_store.blobs import Blobs
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.evidence import Evidence
from nxpipe.artifact_store.fetch.file_layout import Placed, Whole, chunks_between
from nxpipe.artifact_store.fetch.local_files import LocalFiles
from nxpipe.artifact_store.fetch.mirrors import Sources
from nxpipe.artifact_store.fetch.partial import Partial, partial
from nxpipe.artifact_store.fetch.ranges import Piece, at_once, fill, ranges_of, receive
from nxpipe.artifact_store.fetch.read_cache import ReadCache
from nxpipe.artifact_store.index.segments import Report, unheard
from nxpipe.artifact_store.layout import action_path
from nxpipe.artifact_store.records import ActionRecord, Published, Records
from nxpipe.artifact_store.store import Store, evidence_in
from nxpipe.artifact_store.weights import read_weights


def stretches_of(whole: Whole) -> int:
    """How many parts of it come by themselves."""
    return sum(ranges_of(stored) for stored in whole.stored)


def assemble(whole: Whole, file: Partial, blobs: Blobs, sources: Sources, tier: ReadCache | None, sent: Sent) -> None:
    """Bring every object to its places, each proved right; then the head, with which the file is finished."""
    firsts = accumulate(map(ranges_of, whole.stored), initial=0)
    pieces = {
        stored: Piece(stored, placed[0].at, first)
        for (stored, placed), first in zip(whole.stored.items(), firsts, strict=False)
    }

    def place(stored: Blob) -> None:
        placed = whole.stored[stored]
        if placed[0].tensor.pack is not None:
            _unpack(blobs, placed, file)
            sent(stored.size)
            return
        piece = pieces[stored]
        if _is_in_partial(file, piece) or (tier and _is_near(file, piece, tier)):
            sent(stored.size)
        else:
            sources.first(f"blob {stored.sha256}", lambda place: _filled(file, piece, place, sent))
        _repeat(file, piece, placed[1:])

    at_once(place, [(stored, stored) for stored in whole.stored])
    file.write(whole.head, 0)
    file.finish()


def _filled(file: Partial, piece: Piece, place: Backend, sent: Sent) -> bool:
    fill(file, piece, place, sent)
    return True


def _unpack(blobs: Blobs, placed: Sequence[Placed], file: Partial) -> None:
    tensors = [each.tensor for each in placed]
    for (_, data), each in zip(read_weights(blobs, tensors), placed, strict=True):
        file.write(data, each.at)


def _is_in_partial(file: Partial, piece: Piece) -> bool:
    """Of a blob in several ranges those that are missing come, and all of it is hashed then."""
    if piece.ranges > 1 or not file.has(piece.first):
        return False
    hasher = hashlib.sha256()
    file.feed(hasher, piece.at, piece.at + piece.blob.size)
    return hasher.hexdigest() == piece.blob.sha256


def _is_near(file: Partial, piece: Piece, tier: ReadCache) -> bool:
    opened = tier.open(piece.blob)
    if opened:
        with opened:
            copy_into(file.descriptor, opened, piece.at)
    elif not tier.held.copy(piece.blob, lambda data, at: file.write(data, piece.at + at)):
        return False
    for number in range(piece.ranges):
        start, stop = piece.span(number)
        file.complete(piece.first + number, stop - start)
    return True


def _repeat(file: Partial, piece: Piece, others: Sequence[Placed]) -> None:
    """Equal tensors are one object, and lie in the file several times."""
    for other in others:
        at = other.at
        for chunk in chunks_between(file.descriptor, piece.at, piece.at + piece.blob.size):
            file.write(chunk, at)
            at += len(chunk)


class MirroredBlobs(Blobs):
    """Writes go to the store; so does every look that decides about a write, since a copy elsewhere proves nothing."""

    def __init__(self, backend: Backend, sources: Sources, tier: ReadCache | None) -> None:
        super().__init__(backend)
        self._sources = sources
        self._tier = tier

    def chunks(self, blob: Blob, sent: Sent = ignore_progress) -> Iterator[bytes]:
        """The bytes in chunks, verified before the first one."""
        return chunks_of(self.open(blob, sent))

    def open(self, blob: Blob, sent: Sent = ignore_progress) -> IO[bytes]:
        """The bytes as a file to be read, verified; from the tier, which gets what it lacks."""
        opened: list[IO[bytes]] = []

        def use(name: str, handle: int) -> None:
            opened.append(os.fdopen(os.dup(handle), "rb", buffering=0))
            if self._tier:
                self._tier.keep(name, blob, handle)

        found = self._tier and self._tier.open(blob)
        if found:
            sent(blob.size)
            return found
        self._receive(blob, self._tier.partial if self._tier else _spot(self._backend.scratch_folder), use, sent)
        return opened[0]

    def copy_to(self, blob: Blob, path: Path, sent: Sent = ignore_progress) -> None:
        def use(name: str, handle: int) -> None:
            with os_errors(f"write {path}"):
                os.fsync(handle)
                (path.parent / name).replace(path)

        if self._tier is None:
            self._receive(blob, _spot(path.parent), use, sent)
        else:
            super().copy_to(blob, path, sent)

    def copy_into(self, blob: Blob, descriptor: int, offsets: Sequence[int], sent: Sent = ignore_progress) -> None:
        with self.open(blob, sent) as file:
            for offset in offsets:
                copy_into(descriptor, file, offset)

    def assemble(
        self, whole: Whole, near: Spot, adopt: Callable[[Path, int], bool], sent: Sent = ignore_progress
    ) -> None:
        """Hand a file that is put together from blobs to `adopt`, with its handle, which gives it another name, or
        tells that it has gone. It is made in the tier, which keeps it, or else in the folder `near`."""
        if self._tier and self._is_held(whole, self._tier.held, adopt):
            sent(sum(stored.size for stored in whole.stored))
            return
        spot = self._tier.partial if self._tier else near
        with partial(spot, whole.content, whole.size, stretches_of(whole)) as file:
            assemble(whole, file, self, self._sources, self._tier, sent)
            adopt(file.path, file.descriptor)
            if self._tier:
                self._tier.held.keep(spot.at(file.path.name), whole, file.descriptor)
                self._tier.make_room(whole.size)

    def _is_held(self, whole: Whole, held: LocalFiles, adopt: Callable[[Path, int], bool]) -> bool:
        with held.find(whole) as found:
            if found is None or not adopt(*found):
                return False
            held.stamp(whole, found[1])
            return True

    def _receive(self, blob: Blob, spot: Spot, use: Callable[[str, int], None], sent: Sent) -> None:
        def from_one(place: Backend) -> bool:
            receive(blob, spot, use, place, sent)
            return True

        self._sources.first(f"blob {blob.sha256}", from_one)


def _spot(folder: Path) -> Spot:
    return Spot(SafeFolder(folder))


class CachedStore(Store):
    """Records are read from the first place that has them; a listing from the first that answers."""

    def __init__(self, backend: Backend, blobs: MirroredBlobs, sources: Sources) -> None:
        super().__init__(backend)
        self.blobs = blobs
        self.sources = sources

    def _sought(self, request_key: str) -> ActionRecord | None:
        path = action_path(request_key)
        return self.sources.first(path, lambda place: Records(place).read(ActionRecord, path))

    def evidence(self, manifest_digest: str) -> Sequence[Evidence]:
        what = f"the evidence of manifest {manifest_digest}"
        return self.sources.first(what, lambda place: evidence_in(place, manifest_digest) or None) or []

    def list(self, report: Report = unheard) -> Sequence[Published]:
        found = self.sources.first("the listing", lambda place: Store(place).list(report))
        return [self._published(one.record) for one in found or ()]


def sources_of(store: Store) -> Sources:
    """Where a store is read from: itself, and its mirrors if it has any."""
    return store.sources if isinstance(store, CachedStore) else Sources([store.backend])
