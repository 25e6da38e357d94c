"""Is everything there, and is it what its name says? Reads every byte that something needs."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from threading import Lock
from typing import Final

from artifact_store.backends.protocol import Sent, nobody
from artifact_store.blobs import PUBLISH_AGAIN
from artifact_store.channel.generation import Head
from artifact_store.channel.log import ChannelLog, channels
from artifact_store.documents import Blob
from artifact_store.errors import Corrupt, NotFound
from artifact_store.layout import blob_path, head_path
from artifact_store.manifest import Manifest
from artifact_store.store import Store
from artifact_store.upkeep.reach import History, find_roots, mark, orphans, read_manifest

_READERS: Final = 8  # enough to keep a network or all cores busy; each holds one chunk
_AT_ONCE: Final = 1024  # blobs that wait for a reader


@dataclass(frozen=True)
class Finding:
    """Something that is needed and not right; `mended` when a good copy has taken its place."""

    path: str
    fault: str
    mended: bool = False


@dataclass(frozen=True)
class Health:
    findings: tuple[Finding, ...]
    blobs: int
    bytes: int
    orphans: int
    orphaned: int

    @property
    def is_sound(self) -> bool:
        return all(finding.mended for finding in self.findings)


def unwatched(total: int) -> Sent:
    return nobody


def fsck(store: Store, *, source: Store | None = None, begin: Callable[[int], Sent] = unwatched) -> Health:
    """Examine all that is needed. With a source, blobs that are missing or damaged are copied from there.

    `begin` hears how many bytes are to be read, and gives who is told of them as they are.
    """
    look = _Examination(store, source)
    now = store.backend.now()
    listed = list(store.backend.walk(""))
    roots = find_roots(store, History(), now, look.note)
    reach = mark(store, listed, roots, now, fault=look.note, read=look.manifest)
    for channel in channels(store.backend):
        look.channel(channel)
    rest = {digest: size for digest, size in reach.blobs.items() if digest not in look.seen}
    look.read = begin(sum(rest.values()))
    with ThreadPoolExecutor(_READERS) as pool:
        for batch in _batches(rest):
            list(pool.map(partial(look.blob, needed=True), batch))
    loose = orphans(listed, reach)
    return Health(
        findings=tuple(look.findings.values()),
        blobs=len(reach.blobs),
        bytes=sum(reach.blobs.values()),
        orphans=len(loose),
        orphaned=sum(found.size for found in loose),
    )


class _Examination:
    def __init__(self, store: Store, source: Store | None) -> None:
        self.read: Sent = nobody
        self.findings: dict[str, Finding] = {}  # by path: a fault may be met twice
        self.seen: set[str] = set()
        self._store = store
        self._source = source
        self._one_at_a_time = Lock()

    def note(self, error: Corrupt) -> None:
        path = error.where.removeprefix(f"{self._store.url}/")
        self.findings.setdefault(path, Finding(path, str(error)))

    def manifest(self, blob: Blob) -> Manifest:
        """For the marking, which says what is wrong with one that could not be mended."""
        self.seen.add(blob.sha256)
        self.blob(blob, needed=False)
        return read_manifest(self._store, blob)

    def blob(self, blob: Blob, *, needed: bool) -> None:
        fault = self._fault_of(blob)
        if fault is None:
            return
        path = blob_path(blob)
        if self._mend(blob):
            self.findings[path] = Finding(path, fault, mended=True)
        elif needed:
            self.findings[path] = Finding(path, fault)

    def channel(self, name: str) -> None:
        """The chain from the tip to the beginning, and the hint of where to find the tip."""
        log = ChannelLog(self._store.backend, name)
        try:
            tip = log.tip()
            for _ in log.back_from(tip):
                pass
            head = self._store.records.read(Head, head_path(name))
            if head is not None and (tip is None or head.generation > tip.generation):
                where = f"{self._store.url}/{head_path(name)}"
                raise Corrupt(where, f"it names generation {head.generation}, which is not there", PUBLISH_AGAIN)
        except Corrupt as error:
            self.note(error)

    def _fault_of(self, blob: Blob) -> str | None:
        try:
            for chunk in self._store.blobs.chunks(blob):
                with self._one_at_a_time:
                    self.read(len(chunk))
        except (Corrupt, NotFound) as error:
            return str(error)
        return None

    def _mend(self, blob: Blob) -> bool:
        """What a source gives is verified before it is kept."""
        if self._source is None:
            return False
        try:
            self._store.blobs.put_stream(self._source.blobs.chunks(blob))
        except (Corrupt, NotFound):
            return False
        return True


def _batches(sizes: Mapping[str, int]) -> Iterator[list[Blob]]:
    waiting = (Blob(sha256=digest, size=size) for digest, size in sizes.items())
    while batch := list(islice(waiting, _AT_ONCE)):
        yield batch
