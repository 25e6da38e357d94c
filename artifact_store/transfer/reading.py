"""A store that is read from afar: through a tier of this machine, or from a mirror when the store fails."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from nxpipe.artifact_store.backends.beneath import Beneath, Spot
from nxpipe.artifact_store.backends.files import chunks_of, copy_into, os_errors
from nxpipe.artifact_store.backends.protocol import Backend, Sent, nobody
from nxpipe.artifact_store.blobs import Blobs
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.evidence import Evidence
from nxpipe.artifact_store.index.segments import Report, unheard
from nxpipe.artifact_store.layout import action_path
from nxpipe.artifact_store.record import ActionRecord, Published
from nxpipe.artifact_store.records import Records
from nxpipe.artifact_store.store import Store, evidence_in
from nxpipe.artifact_store.transfer.assemble import assemble, stretches_of
from nxpipe.artifact_store.transfer.held import Held
from nxpipe.artifact_store.transfer.partial import partial
from nxpipe.artifact_store.transfer.ranges import receive
from nxpipe.artifact_store.transfer.source import Sources
from nxpipe.artifact_store.transfer.tier import Tier
from nxpipe.artifact_store.transfer.whole import Whole


class BlobsFromAfar(Blobs):
    """Writes go to the store; so does every look that decides about a write, since a copy elsewhere proves nothing."""

    def __init__(self, backend: Backend, sources: Sources, tier: Tier | None) -> None:
        super().__init__(backend)
        self._sources = sources
        self._tier = tier

    def chunks(self, blob: Blob, sent: Sent = nobody) -> Iterator[bytes]:
        """The bytes in chunks, verified before the first one."""
        return chunks_of(self.open(blob, sent))

    def open(self, blob: Blob, sent: Sent = nobody) -> IO[bytes]:
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

    def copy_to(self, blob: Blob, path: Path, sent: Sent = nobody) -> None:
        def use(name: str, handle: int) -> None:
            with os_errors(f"write {path}"):
                os.fsync(handle)
                (path.parent / name).replace(path)

        if self._tier is None:
            self._receive(blob, _spot(path.parent), use, sent)
        else:
            super().copy_to(blob, path, sent)

    def copy_into(self, blob: Blob, descriptor: int, offsets: Sequence[int], sent: Sent = nobody) -> None:
        with self.open(blob, sent) as file:
            for offset in offsets:
                copy_into(descriptor, file, offset)

    def assemble(self, whole: Whole, near: Spot, adopt: Callable[[Path, int], bool], sent: Sent = nobody) -> None:
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

    def _is_held(self, whole: Whole, held: Held, adopt: Callable[[Path, int], bool]) -> bool:
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
    return Spot(Beneath(folder))


class StoreFromAfar(Store):
    """Records are read from the first place that has them; a listing from the first that answers."""

    def __init__(self, backend: Backend, blobs: BlobsFromAfar, sources: Sources) -> None:
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
    return store.sources if isinstance(store, StoreFromAfar) else Sources([store.backend])
