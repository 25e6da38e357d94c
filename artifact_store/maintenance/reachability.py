"""Reachability: from the roots of a store to every object they need; collectable kinds; disk usage by model.

Publishers and promoters run concurrently, so the order of reads matters: the place that hands a manifest over is
read before the place that receives it, `ac/` before `retired/` and pins before channels. Objects are listed before
all of these: a writer that refers to an old object refreshes it first, and the removal notices. Referrers are
deleted before what they refer to, so that a killed collection leaves orphans and never a dangling reference.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from typing import Final, TypeVar

from nxpipe.artifact_store.backends.protocol import Found
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
    """`reason` is why one that nothing holds may go."""

    RETIRED = (r"retired/[0-9a-f]{64}", "taken back longer ago than the grace")
    LISTING = (r"neuron-artifacts/[^/]+/[0-9a-f]{16}/manifest\.json", "a listing of no artifact")
    SIGNATURE = (r"sig/[0-9a-f]{64}/[0-9a-f]{64}", "a signature of no artifact")
    REPORT = (r"reports/[0-9a-f]{64}/[0-9T.]+Z\.(html|json)", "a report of no artifact")
    EVIDENCE = (r"evidence/[0-9a-f]{64}/[0-9a-f]{64}", "evidence of no artifact")
    PART = (r"parts/[0-9a-f]{64}", "a part of no artifact")
    FAILURE = (r"failures/[0-9a-f]{64}", "a failure that has expired")
    LEASE = (r"leases/[0-9a-f]{64}/[0-9]{10}", "a lease that has ended")
    OUTCOME = (r"runs/[0-9a-f]{64}/[0-9]{10}", "an outcome of a run of long ago")
    PIN = (r"pins/[a-z0-9][a-z0-9-]{0,62}", "a pin that has expired")
    PROBE = (r"doctor-[0-9a-f]{16}/.+", "left by an examination that was killed")
    BLOB = (r"cas/sha256/([0-9a-f]{2})/\1[0-9a-f]{62}", "a blob that nothing names")

    def __init__(self, pattern: str, reason: str) -> None:
        self.pattern = re.compile(pattern)
        self.reason = reason


def kind_of(path: str) -> Collectable | None:
    return next((kind for kind in Collectable if kind.pattern.fullmatch(path)), None)


DAY: Final = 24 * 3600.0
_AT_ONCE: Final = 64  # documents in memory
_OTHER_VERSION: Final = "collect and check this store with the version of nxpipe that wrote it"

K = TypeVar("K", bound=Sealed)

# What cannot be told of an object, or of a folder of them: it is damaged or missing, or it cannot be read.
OnFault = Callable[[str, Corrupt | StoreUnavailable], None]
ReadManifest = Callable[[Blob], Manifest]


class RetiredRecord(ActionRecord):
    """An action record that was taken back: the same bytes in another place."""

    @property
    def path(self) -> str:
        return retired_path(self.request_key)


@dataclass(frozen=True)
class History:
    """How far back rollback is promised: to whatever a channel served within this time, and to its last states."""

    seconds: float = 90 * DAY
    generations: int = 10


@dataclass(frozen=True)
class Root:
    """One record's word that a manifest is needed. That of an earlier generation may have been collected before."""

    path: str
    manifest: Blob
    request_key: str | None
    may_be_gone: bool = False


@dataclass(frozen=True)
class FoundRecord:
    """An action record, and the object it was found in."""

    found: Found
    record: ActionRecord


@dataclass(frozen=True)
class Roots:
    actions: Sequence[FoundRecord]
    retired: Sequence[Root]  # those of which the grace has not passed
    held: Sequence[Root]  # by pins and channels


@dataclass
class Reach:
    """What the roots need: blobs as sizes by digest, and the paths of all else."""

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
    """Nothing may be collected of a store that is not understood."""
    raise fault


def nothing(manifest: Manifest, blob: Blob) -> None:
    """For those who need no more than the marks."""


def read_manifest(store: Store, blob: Blob) -> Manifest:
    try:
        return store.manifest(blob)
    except InvalidDocument as fault:
        raise Corrupt(f"{store.url}/{digest_path(blob.sha256)}", str(fault), _OTHER_VERSION) from fault


def find_roots(store: Store, history: History, now: float, fault: OnFault = stop) -> Roots:
    """Every record that holds a manifest, looked for in the one safe order."""
    published = _keyed(store, ACTIONS, fault)
    actions = [FoundRecord(found, record) for found, record in _records(store, ActionRecord, published, fault)]
    young = [found for found in _keyed(store, RETIRED, fault) if is_young(store, found, now)]
    retired = [
        Root(found.path, record.manifest, record.request_key)
        for found, record in _records(store, RetiredRecord, young, fault)
    ]
    return Roots(actions, retired, find_held(store, history, now, fault))


def find_held(store: Store, history: History, now: float, fault: OnFault = stop) -> list[Root]:
    """What pins and channels hold, whatever becomes of action records."""
    pins = [found for found in list_all(store, PINS, fault) if Collectable.PIN.pattern.fullmatch(found.path)]
    held = [Root(found.path, pin.manifest, None) for found, pin in _records(store, Pin, pins, fault) if pin.holds(now)]
    for channel in channels_among(list_all(store, CHANNELS, fault)):
        held += _served(store, channel, history, now, fault)
    return held


def mark(
    store: Store,
    listed: Sequence[Found],
    roots: Roots,
    now: float,
    *,
    fault: OnFault = stop,
    read: ReadManifest | None = None,
    visit: Callable[[Manifest, Blob], None] = nothing,
) -> Reach:
    """Everything that the roots need, and what else stays because it is young. `listed` is older than the roots."""
    reach = Reach()
    reach.paths.update(entry.found.path for entry in roots.actions)
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


def is_young(store: Store, found: Found, now: float) -> bool:
    return found.modified >= now - store.grace


def _mark_evidence(store: Store, listed: Sequence[Found], reach: Reach, now: float, fault: OnFault) -> None:
    """Of what stays, and of what is about to: a publisher makes a manifest young before its record stands."""
    young = {found.path for found in listed if is_young(store, found, now)}

    def stays(found: Found) -> bool:
        manifest = found.path.split("/")[1]
        return manifest in reach.manifests or not young.isdisjoint((found.path, digest_path(manifest)))

    documents = [found for found in listed if Collectable.EVIDENCE.pattern.fullmatch(found.path)]
    for found, evidence in _records(store, Evidence, filter(stays, documents), fault):
        reach.paths.add(found.path)
        reach.add(*evidence.blobs())
        reach.evidence.setdefault(evidence.manifest, []).append(evidence)


def _mark_notes(store: Store, listed: Sequence[Found], reach: Reach, now: float, fault: OnFault) -> None:
    """Signatures and reports of what stays; failures that stay, with the blobs that they name."""
    subjects = reach.manifests.union(each.digest for documents in reach.evidence.values() for each in documents)
    reach.paths.update(found.path for found in listed if _beside(found.path) in subjects)
    failures = [found for found in listed if Collectable.FAILURE.pattern.fullmatch(found.path)]
    for found, failure in _records(store, Failure, failures, fault):
        if is_young(store, found, now) or seconds_since_1970(failure.expires_at) > now:
            reach.paths.add(found.path)
            reach.add(*([failure.log] if failure.log else []))


def _mark_parts(store: Store, listed: Sequence[Found], reach: Reach, now: float, fault: OnFault) -> None:
    """Young ones with their blobs; older ones while each of their blobs stays anyway.

    Young blobs stay too, so one that is found or made again, which makes its blobs young, lives as long as a new one.
    """
    parts = [found for found in listed if Collectable.PART.pattern.fullmatch(found.path)]
    young = {found.path for found in listed if is_young(store, found, now)}

    def keep(found: Found, part: StepResult) -> None:
        reach.paths.add(found.path)
        reach.add(*part.blobs())

    for found, part in _records(store, StepResult, (each for each in parts if each.path in young), fault):
        keep(found, part)
    for found, part in _records(store, StepResult, (each for each in parts if each.path not in young), fault):
        paths = map(blob_path, part.blobs())
        if part.files and all(path in young or reach.has(path) for path in paths):
            keep(found, part)


def _beside(path: str) -> str:
    return path.split("/")[1] if path.startswith((SIGNATURES, REPORTS)) else ""


def _served(store: Store, channel: str, history: History, now: float, fault: OnFault) -> Iterator[Root]:
    folder = log_folder(channel)
    log = [found for found in list_all(store, folder, fault) if number_of(found.path.removeprefix(folder))]
    kept = [found for at, found in enumerate(log) if _is_kept(log, at, history, now)]
    for found, generation in _records(store, Generation, kept, fault):
        for served in generation.artifacts:
            yield Root(found.path, served.manifest, served.request_key, may_be_gone=found != log[-1])


def _is_kept(log: Sequence[Found], at: int, history: History, now: float) -> bool:
    """A generation was served until the next one was made."""
    return at >= len(log) - max(history.generations, 1) or log[at + 1].modified >= now - history.seconds


def list_all(store: Store, folder: str, fault: OnFault = stop) -> list[Found]:
    """What can be listed below a folder."""
    listed: list[Found] = []
    try:
        listed.extend(store.backend.walk(folder))
    except StoreUnavailable as error:
        fault(folder, error)
    return listed


def _keyed(store: Store, folder: str, fault: OnFault) -> list[Found]:
    return [found for found in list_all(store, folder, fault) if is_key(found.path.removeprefix(folder))]


def _records(store: Store, kind: type[K], listed: Iterable[Found], fault: OnFault) -> Iterator[tuple[Found, K]]:
    """The records that are still there, not many of them in memory."""

    def read(found: Found) -> K | None:
        try:
            return store.records.read(kind, found.path)
        except (Corrupt, StoreUnavailable) as error:
            fault(found.path, error)
            return None

    waiting = iter(listed)
    while batch := list(islice(waiting, _AT_ONCE)):
        for found, record in zip(batch, store.backend.each(read, batch), strict=True):
            if record is not None:
                yield found, record


def _distinct(roots: Roots) -> list[Root]:
    """One root for each manifest and the key it must answer; one that insists on it, if there is any."""
    found: dict[tuple[str, str | None], Root] = {}
    actions = (Root(each.found.path, each.record.manifest, each.record.request_key) for each in roots.actions)
    for root in (*actions, *roots.retired, *roots.held):
        known = found.setdefault((root.manifest.sha256, root.request_key), root)
        if known.may_be_gone and not root.may_be_gone:
            found[root.manifest.sha256, root.request_key] = root
    return list(found.values())


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
            fault(root.path, Corrupt(where, f"its manifest answers {manifest.request_key}", PUBLISH_AGAIN))
            return None
        return manifest

    waiting = iter(roots)
    while batch := list(islice(waiting, _AT_ONCE)):
        for root, manifest in zip(batch, store.backend.each(load, batch), strict=True):
            if manifest is not None:
                yield root, manifest


def orphans(listed: Iterable[Found], reach: Reach) -> list[Found]:
    """What nothing holds; of a publish that is under way, too."""
    passing = (None, Collectable.LEASE, Collectable.OUTCOME)
    return [found for found in listed if kind_of(found.path) not in passing and not reach.has(found.path)]


@dataclass(frozen=True)
class ModelUsage:
    """`logical` counts each artifact as if it were alone; `stored` each blob once; `own` those of no other model."""

    model_id: str
    artifacts: int
    logical: int
    stored: int
    own: int


@dataclass(frozen=True)
class Usage:
    models: tuple[ModelUsage, ...]
    logical: int
    artifacts_stored: int  # each blob once, whatever the number of models that share it
    shared: int  # of these, those that several models need
    orphans: int
    orphaned: int
    objects: int
    stored: int  # everything, records and listings too


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
            add(owners[manifest], {blob for each in documents for blob in each.blobs()})
    users = Counter(digest for each in blobs.values() for digest in each)
    sizes = {digest: size for each in blobs.values() for digest, size in each.items()}
    loose = orphans(listed, reach)
    return Usage(
        models=tuple(
            ModelUsage(
                model_id=model,
                artifacts=artifacts[model],
                logical=logical[model],
                stored=sum(each.values()),
                own=sum(size for digest, size in each.items() if users[digest] == 1),
            )
            for model, each in sorted(blobs.items())
        ),
        logical=logical.total(),
        artifacts_stored=sum(sizes.values()),
        shared=sum(size for digest, size in sizes.items() if users[digest] > 1),
        orphans=len(loose),
        orphaned=sum(found.size for found in loose),
        objects=len(listed),
        stored=sum(found.size for found in listed),
    )
