"""Reachability: from the roots of a store to every object they need; collectable kinds; disk usage by model.

Publishers and promoters run concurrently, so the order of reads matters: the source of a moving manifest is read before
its destination, `ac/` before `retired/` and pins before channels. Objects are listed before all of these: a writer that
refers to an old object touches it first, and the removal notices. Referrers are deleted before the objects that they
name, so that an interrupted collection leaves orphans and never a dangling reference.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from typing import Final, TypeVar

from nxpipe.artifact_store.backends.protocol import ListedObject
from nxpipe.artifact_store.blobs import PUBLISH_AGAIN
from nxpipe.artifact_store.builds import Failure, StepResult
from nxpipe.artifact_store.channel.generation import Generation
from nxpipe.artifact_store.channel.log import channels_among
from nxpipe.artifact_store.documents import Blob, Sealed, seconds_since_1970
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument, NotFound, StoreUnavailable
from nxpipe.artifact_store.evidence import Evidence
from nxpipe.artifact_store.layout import (
    ACTIONS,
    CHANNELS,
    PINS,
    REPORTS,
    RETIRED,
    SIGNATURES,
    blob_path,
    digest_path,
    is_key,
    listing_path,
    log_folder,
    number_of,
    retired_path,
)
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.pins import Pin
from nxpipe.artifact_store.records import ActionRecord
from nxpipe.artifact_store.store import Store


class Collectable(Enum):
    """The kinds of object that a collection may remove; `reason` is the reason shown for an unreachable one."""

    RETIRED = (r"retired/[0-9a-f]{64}", "retired longer ago than the grace period")
    LISTING = (r"neuron-artifacts/[^/]+/[0-9a-f]{16}/manifest\.json", "a listing without an artifact")
    SIGNATURE = (r"sig/[0-9a-f]{64}/[0-9a-f]{64}", "a signature without an artifact")
    REPORT = (r"reports/[0-9a-f]{64}/[0-9T.]+Z\.(html|json)", "a report without an artifact")
    EVIDENCE = (r"evidence/[0-9a-f]{64}/[0-9a-f]{64}", "evidence without an artifact")
    PART = (r"parts/[0-9a-f]{64}", "a step result of no artifact")
    FAILURE = (r"failures/[0-9a-f]{64}", "a failure that has expired")
    LEASE = (r"leases/[0-9a-f]{64}/[0-9]{10}", "a lease that has ended")
    OUTCOME = (r"runs/[0-9a-f]{64}/[0-9]{10}", "an outcome of an old run")
    PIN = (r"pins/[a-z0-9][a-z0-9-]{0,62}", "a pin that has expired")
    PROBE = (r"doctor-[0-9a-f]{16}/.+", "left by an interrupted run of doctor")
    BLOB = (r"cas/sha256/([0-9a-f]{2})/\1[0-9a-f]{62}", "an unreferenced blob")

    def __init__(self, pattern: str, reason: str) -> None:
        self.pattern = re.compile(pattern)
        self.reason = reason


def kind_of(path: str) -> Collectable | None:
    return next((kind for kind in Collectable if kind.pattern.fullmatch(path)), None)


DAY: Final = 24 * 3600.0
_AT_ONCE: Final = 64  # documents in memory at a time
_OTHER_VERSION: Final = "collect and check this store with the version of nxpipe that wrote it"

K = TypeVar("K", bound=Sealed)

# Called with the path of an object or folder and its fault: damaged, missing or unreadable.
OnFault = Callable[[str, Corrupt | StoreUnavailable], None]
ReadManifest = Callable[[Blob], Manifest]


class RetiredRecord(ActionRecord):
    """A retired action record: the same bytes under another path."""

    @property
    def path(self) -> str:
        return retired_path(self.request_key)


@dataclass(frozen=True)
class History:
    """The range of possible rollbacks: the generations served within `seconds`, and the last `generations`."""

    seconds: float = 90 * DAY
    generations: int = 10


@dataclass(frozen=True)
class Root:
    """A record that needs a manifest. The manifest of an earlier generation may already be collected."""

    path: str
    manifest: Blob
    request_key: str | None
    may_be_gone: bool = False


@dataclass(frozen=True)
class ListedRecord:
    """An action record and its object."""

    listed: ListedObject
    record: ActionRecord


@dataclass(frozen=True)
class Roots:
    """The roots of a mark phase."""

    actions: Sequence[ListedRecord]
    retired: Sequence[Root]  # still in their grace period
    held: Sequence[Root]  # of pins and channels


@dataclass
class Reach:
    """The reachable objects: sizes of blobs by digest, and the paths of all other objects."""

    blobs: dict[str, int] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    manifests: set[str] = field(default_factory=set)
    evidence: dict[str, list[Evidence]] = field(default_factory=dict)  # by manifest

    def has(self, path: str) -> bool:
        digest = path.rpartition("/")[2]
        return path in self.paths or (digest in self.blobs and path == digest_path(digest))

    def add(self, *blobs: Blob) -> None:
        self.blobs.update((blob.sha256, blob.size) for blob in blobs)


def stop(path: str, fault: Corrupt | StoreUnavailable) -> None:
    """Raise the fault: a store with faults must not be collected."""
    raise fault


def visit_nothing(manifest: Manifest, blob: Blob) -> None:
    """A visitor that does nothing."""


def read_manifest(store: Store, blob: Blob) -> Manifest:
    try:
        return store.manifest(blob)
    except InvalidDocument as fault:
        raise Corrupt(f"{store.url}/{digest_path(blob.sha256)}", str(fault), _OTHER_VERSION) from fault


def find_roots(store: Store, history: History, now: float, fault: OnFault = stop) -> Roots:
    """Every record that needs a manifest, read in the safe order (see the module)."""
    published = _keyed(store, ACTIONS, fault)
    actions = [ListedRecord(item, record) for item, record in _records(store, ActionRecord, published, fault)]
    young = [item for item in _keyed(store, RETIRED, fault) if is_young(store, item, now)]
    retired = [
        Root(item.path, record.manifest, record.request_key)
        for item, record in _records(store, RetiredRecord, young, fault)
    ]
    return Roots(actions, retired, find_held(store, history, now, fault))


def find_held(store: Store, history: History, now: float, fault: OnFault = stop) -> list[Root]:
    """The roots of pins and channels, which are independent of action records."""
    pins = [item for item in list_all(store, PINS, fault) if Collectable.PIN.pattern.fullmatch(item.path)]
    held = [Root(item.path, pin.manifest, None) for item, pin in _records(store, Pin, pins, fault) if pin.holds(now)]
    for channel in channels_among(list_all(store, CHANNELS, fault)):
        held += _served(store, channel, history, now, fault)
    return held


def mark(
    store: Store,
    listed: Sequence[ListedObject],
    roots: Roots,
    now: float,
    *,
    fault: OnFault = stop,
    read: ReadManifest | None = None,
    visit: Callable[[Manifest, Blob], None] = visit_nothing,
) -> Reach:
    """The objects that the roots need, or that are protected as young. `listed` must be older than `roots`."""
    reach = Reach()
    reach.paths.update(entry.listed.path for entry in roots.actions)
    reach.paths.update(root.path for root in (*roots.retired, *roots.held))
    needed = _distinct(roots)
    reach.add(*(root.manifest for root in needed))
    for root, manifest in _manifests(store, needed, read or partial(read_manifest, store), fault):
        if root.manifest.sha256 not in reach.manifests:
            reach.manifests.add(root.manifest.sha256)
            reach.add(*manifest.blobs())
            reach.paths.add(listing_path(manifest))
            visit(manifest, root.manifest)
    _mark_evidence(store, listed, reach, now, fault)
    _mark_notes(store, listed, reach, now, fault)
    _mark_parts(store, listed, reach, now, fault)
    return reach


def is_young(store: Store, item: ListedObject, now: float) -> bool:
    return item.modified >= now - store.grace


def _mark_evidence(store: Store, listed: Sequence[ListedObject], reach: Reach, now: float, fault: OnFault) -> None:
    """Mark the evidence of reachable manifests and of young ones, whose record may not be written yet."""
    young = {item.path for item in listed if is_young(store, item, now)}

    def is_needed(item: ListedObject) -> bool:
        manifest = item.path.split("/")[1]
        return manifest in reach.manifests or not young.isdisjoint((item.path, digest_path(manifest)))

    documents = [item for item in listed if Collectable.EVIDENCE.pattern.fullmatch(item.path)]
    for item, evidence in _records(store, Evidence, filter(is_needed, documents), fault):
        reach.paths.add(item.path)
        reach.add(*evidence.blobs())
        reach.evidence.setdefault(evidence.manifest, []).append(evidence)


def _mark_notes(store: Store, listed: Sequence[ListedObject], reach: Reach, now: float, fault: OnFault) -> None:
    """Mark signatures and reports of reachable documents, and unexpired failures with their blobs."""
    evidence = (document.digest for documents in reach.evidence.values() for document in documents)
    subjects = reach.manifests.union(evidence)
    reach.paths.update(item.path for item in listed if _subject(item.path) in subjects)
    failures = [item for item in listed if Collectable.FAILURE.pattern.fullmatch(item.path)]
    for item, failure in _records(store, Failure, failures, fault):
        if is_young(store, item, now) or seconds_since_1970(failure.expires_at) > now:
            reach.paths.add(item.path)
            reach.add(*([failure.log] if failure.log else []))


def _mark_parts(store: Store, listed: Sequence[ListedObject], reach: Reach, now: float, fault: OnFault) -> None:
    """Mark young step results with their blobs, and older ones while all of their blobs are kept anyway.

    Young blobs are kept too. Reusing or storing a result refreshes its blobs, so it lasts as long as a new one.
    """
    results = [item for item in listed if Collectable.PART.pattern.fullmatch(item.path)]
    young = {item.path for item in listed if is_young(store, item, now)}

    def keep(item: ListedObject, result: StepResult) -> None:
        reach.paths.add(item.path)
        reach.add(*result.blobs())

    for item, result in _records(store, StepResult, (item for item in results if item.path in young), fault):
        keep(item, result)
    for item, result in _records(store, StepResult, (item for item in results if item.path not in young), fault):
        paths = map(blob_path, result.blobs())
        if result.files and all(path in young or reach.has(path) for path in paths):
            keep(item, result)


def _subject(path: str) -> str:
    """The digest of the document that a signature or report belongs to; empty for other objects."""
    return path.split("/")[1] if path.startswith((SIGNATURES, REPORTS)) else ""


def _served(store: Store, channel: str, history: History, now: float, fault: OnFault) -> Iterator[Root]:
    folder = log_folder(channel)
    log = [item for item in list_all(store, folder, fault) if number_of(item.path.removeprefix(folder))]
    kept = [item for index, item in enumerate(log) if _is_kept(log, index, history, now)]
    for item, generation in _records(store, Generation, kept, fault):
        for served in generation.artifacts:
            yield Root(item.path, served.manifest, served.request_key, may_be_gone=item != log[-1])


def _is_kept(log: Sequence[ListedObject], index: int, history: History, now: float) -> bool:
    """True if a generation is in the history; it was served until the next one was written."""
    return index >= len(log) - max(history.generations, 1) or log[index + 1].modified >= now - history.seconds


def list_all(store: Store, folder: str, fault: OnFault = stop) -> list[ListedObject]:
    """The objects below a folder that can be listed."""
    listed: list[ListedObject] = []
    try:
        listed.extend(store.backend.walk(folder))
    except StoreUnavailable as error:
        fault(folder, error)
    return listed


def _keyed(store: Store, folder: str, fault: OnFault) -> list[ListedObject]:
    return [item for item in list_all(store, folder, fault) if is_key(item.path.removeprefix(folder))]


def _records(
    store: Store, kind: type[K], listed: Iterable[ListedObject], fault: OnFault
) -> Iterator[tuple[ListedObject, K]]:
    """The records that still exist, read in batches."""

    def read(item: ListedObject) -> K | None:
        try:
            return store.records.read(kind, item.path)
        except (Corrupt, StoreUnavailable) as error:
            fault(item.path, error)
            return None

    waiting = iter(listed)
    while batch := list(islice(waiting, _AT_ONCE)):
        for item, record in zip(batch, store.backend.each(read, batch), strict=True):
            if record is not None:
                yield item, record


def _distinct(roots: Roots) -> list[Root]:
    """One root for each manifest and expected request key; preferably one whose manifest must exist."""
    distinct: dict[tuple[str, str | None], Root] = {}
    actions = (Root(entry.listed.path, entry.record.manifest, entry.record.request_key) for entry in roots.actions)
    for root in (*actions, *roots.retired, *roots.held):
        known = distinct.setdefault((root.manifest.sha256, root.request_key), root)
        if known.may_be_gone and not root.may_be_gone:
            distinct[root.manifest.sha256, root.request_key] = root
    return list(distinct.values())


def _manifests(
    store: Store, roots: Sequence[Root], read: ReadManifest, fault: OnFault
) -> Iterator[tuple[Root, Manifest]]:
    def load(root: Root) -> Manifest | None:
        where = f"{store.url}/{root.path}"
        try:
            manifest = read(root.manifest)
        except NotFound:
            if not root.may_be_gone:
                missing = f"its manifest {root.manifest.sha256} is missing"
                fault(root.path, Corrupt(where, missing, PUBLISH_AGAIN))
            return None
        except (Corrupt, StoreUnavailable) as error:
            fault(digest_path(root.manifest.sha256), error)
            return None
        if root.request_key not in (None, manifest.request_key):
            fault(root.path, Corrupt(where, f"its manifest has the request key {manifest.request_key}", PUBLISH_AGAIN))
            return None
        return manifest

    waiting = iter(roots)
    while batch := list(islice(waiting, _AT_ONCE)):
        for root, manifest in zip(batch, store.backend.each(load, batch), strict=True):
            if manifest is not None:
                yield root, manifest


def orphans(listed: Iterable[ListedObject], reach: Reach) -> list[ListedObject]:
    """Unreachable objects, including those of a publication in progress."""
    ignored = (None, Collectable.LEASE, Collectable.OUTCOME)
    return [item for item in listed if kind_of(item.path) not in ignored and not reach.has(item.path)]


@dataclass(frozen=True)
class ModelUsage:
    """Disk usage of one model in bytes: `logical` is the sum over its artifacts, `stored` counts each blob once, `own`
    only blobs of no other model."""

    model_id: str
    artifacts: int
    logical: int
    stored: int
    own: int


@dataclass(frozen=True)
class Usage:
    """Disk usage of a store; sizes in bytes."""

    models: tuple[ModelUsage, ...]
    logical: int
    artifacts_stored: int  # each blob once, even if several models share it
    shared: int  # the part of artifacts_stored that several models need
    orphans: int
    orphaned: int
    objects: int
    stored: int  # all objects, including records and listings


def usage(store: Store) -> Usage:
    now = store.backend.now()
    listed = list(store.backend.walk(""))
    blobs: dict[str, dict[str, int]] = {}
    owners: dict[str, str] = {}  # the model of each manifest
    artifacts: Counter[str] = Counter()
    logical: Counter[str] = Counter()

    def add(model: str, named: Collection[Blob]) -> None:
        logical[model] += sum(blob.size for blob in named)
        blobs.setdefault(model, {}).update((blob.sha256, blob.size) for blob in named)

    def count(manifest: Manifest, document: Blob) -> None:
        owners[document.sha256] = manifest.model.id
        artifacts[manifest.model.id] += 1
        add(manifest.model.id, (document, *manifest.blobs()))

    reach = mark(store, listed, find_roots(store, History(), now), now, visit=count)
    for manifest, documents in reach.evidence.items():
        if manifest in owners:
            add(owners[manifest], {blob for document in documents for blob in document.blobs()})
    users = Counter(digest for of_model in blobs.values() for digest in of_model)
    sizes = {digest: size for of_model in blobs.values() for digest, size in of_model.items()}
    unreachable = orphans(listed, reach)
    return Usage(
        models=tuple(
            ModelUsage(
                model_id=model,
                artifacts=artifacts[model],
                logical=logical[model],
                stored=sum(of_model.values()),
                own=sum(size for digest, size in of_model.items() if users[digest] == 1),
            )
            for model, of_model in sorted(blobs.items())
        ),
        logical=logical.total(),
        artifacts_stored=sum(sizes.values()),
        shared=sum(size for digest, size in sizes.items() if users[digest] > 1),
        orphans=len(unreachable),
        orphaned=sum(item.size for item in unreachable),
        objects=len(listed),
        stored=sum(item.size for item in listed),
    )
