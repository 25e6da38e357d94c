"""File system check of a store: reads and verifies every reachable byte, reports all faults, repairs on request."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Final

from nxpipe.artifact_store.backends.files import scratch
from nxpipe.artifact_store.backends.protocol import Found, Sent, in_turn, nobody
from nxpipe.artifact_store.channel.generation import Head
from nxpipe.artifact_store.channel.log import ChannelLog, channels_among
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, NotFound, StoreUnavailable
from nxpipe.artifact_store.layout import blob_path, head_path, log_folder
from nxpipe.artifact_store.maintenance.reachability import (
    Collectable,
    History,
    Reach,
    find_roots,
    kind_of,
    list_all,
    mark,
    orphans,
    read_manifest,
)
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.trust.signatures import Signatures
from nxpipe.artifact_store.weights import Packs

_READERS: Final = 8  # enough to keep a network or all cores busy; each holds one chunk, or one pack
_AT_ONCE: Final = 1024  # blobs that wait for a reader
_NOTHING: Final = "doctor-0000000000000000/"  # a folder that is not there: listing it tells whether the store answers


@dataclass(frozen=True)
class Finding:
    """Something that is needed and not right; `mended` when a good copy has taken its place.

    `unreadable`: it could not be looked at, so that nothing is known to be wrong with its bytes.
    """

    path: str
    fault: str
    unreadable: bool = False
    mended: bool = False


@dataclass(frozen=True)
class Health:
    findings: tuple[Finding, ...]
    blobs: int
    bytes: int
    orphans: int
    orphaned: int

    @property
    def standing(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.mended)

    @property
    def is_sound(self) -> bool:
        return not self.standing


def unwatched(total: int) -> Sent:
    return nobody


def fsck(store: Store, *, source: Store | None = None, begin: Callable[[int], Sent] = unwatched) -> Health:
    """Examine all that is needed. With a source, blobs that are missing, damaged or unreadable are copied from there.

    `begin` hears how many bytes are to be read, and gives who is told of them as they are.
    """
    look = _Examination(store, source)
    now = store.backend.now()
    listed = list_all(store, "", look.note)
    roots = find_roots(store, History(), now, look.note)
    reach = mark(store, listed, roots, now, fault=look.note, read=look.manifest, visit=look.packs.expect)
    for channel in channels_among(listed):
        look.channel(channel)
    for found in listed:
        if kind_of(found.path) is Collectable.SIGNATURE and found.path.split("/")[1] in reach.manifests:
            look.signature(found.path)
    rest = {digest: size for digest, size in reach.blobs.items() if digest not in look.seen}
    look.sent = in_turn(begin(sum(rest.values())))
    with ThreadPoolExecutor(_READERS) as pool:
        for batch in _batches(rest):
            list(pool.map(partial(look.blob, needed=True), batch))
    return _health(look, listed, reach)


class _Examination:
    def __init__(self, store: Store, source: Store | None) -> None:
        self.sent: Sent = nobody
        self.findings: dict[str, Finding] = {}  # by path: a fault may be met twice
        self.seen: set[str] = set()
        self.packs = Packs(store.url)
        self._store = store
        self._source = source
        self._noted: set[str] = set()

    def note(self, path: str, error: Corrupt | StoreUnavailable) -> None:
        """A record, a manifest or a folder that tells nothing. A folder is listed by itself, and with those above."""
        if str(error) not in self._noted:
            self._noted.add(str(error))
            finding = self._finding(path or ".", error)
            self.findings.setdefault(finding.path, finding)

    def manifest(self, blob: Blob) -> Manifest:
        """For the marking, which says what is wrong with one that could not be mended."""
        self.seen.add(blob.sha256)
        self.blob(blob, needed=False)
        return read_manifest(self._store, blob)

    def blob(self, blob: Blob, *, needed: bool) -> None:
        finding = self._look(blob, self.sent)
        if finding is not None and self._source is not None:
            finding = self._mended(blob, finding, self._source)
        if finding is not None and (needed or finding.mended):
            self.findings[finding.path] = finding

    def channel(self, name: str) -> None:
        """The chain from the tip to the beginning, and the hint of where to find the tip."""
        log = ChannelLog(self._store.backend, name)
        path = log_folder(name)
        try:
            log.tip()
            log.insist_on_no_more()
            path = head_path(name)
            self._store.records.read(Head, path)
        except (Corrupt, StoreUnavailable) as error:
            self.note(path, error)

    def signature(self, path: str) -> None:
        """That it is what its path says. What it proves, only who has the key can tell."""
        _, manifest_digest, key_id = path.split("/")
        try:
            Signatures(self._store).well_formed(manifest_digest, key_id)
        except (Corrupt, StoreUnavailable) as error:
            self.note(path, error)

    def _look(self, blob: Blob, sent: Sent = nobody) -> Finding | None:
        try:
            chunks = self._store.blobs.chunks(blob, sent)
            if self.packs.hold(blob):
                self.packs.prove(blob, chunks)
            for _ in chunks:
                pass
        except (Corrupt, NotFound, StoreUnavailable) as error:
            return self._finding(blob_path(blob), error)
        return None

    def _mended(self, blob: Blob, finding: Finding, source: Store) -> Finding:
        """Replaced whatever is there, for what cannot be read cannot be compared either; then read like any other."""
        try:
            with scratch(self._store.backend.scratch_folder) as file:
                for chunk in source.blobs.chunks(blob):
                    file.write(chunk)
                self._store.backend.replace(finding.path, file.finish())
        except (Corrupt, NotFound, StoreUnavailable) as error:
            return replace(finding, fault=f"{finding.fault}; it could not be repaired: {error}")
        return self._look(blob) or replace(finding, mended=True)

    def _finding(self, path: str, error: Corrupt | NotFound | StoreUnavailable) -> Finding:
        if isinstance(error, Corrupt):
            path = error.where.removeprefix(f"{self._store.url}/")
        elif isinstance(error, StoreUnavailable):
            # One object that cannot be read is a finding; a store that does not answer at all is the end.
            self._store.backend.paths(_NOTHING)
        return Finding(path, str(error), unreadable=isinstance(error, StoreUnavailable))


def _health(look: _Examination, listed: Sequence[Found], reach: Reach) -> Health:
    loose = orphans(listed, reach)
    return Health(
        findings=tuple(look.findings.values()),
        blobs=len(reach.blobs),
        bytes=sum(reach.blobs.values()),
        orphans=len(loose),
        orphaned=sum(found.size for found in loose),
    )


def _batches(sizes: Mapping[str, int]) -> Iterator[list[Blob]]:
    waiting = (Blob(sha256=digest, size=size) for digest, size in sizes.items())
    while batch := list(islice(waiting, _AT_ONCE)):
        yield batch
