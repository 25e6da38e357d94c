"""Maintenance of a store: fsck verifies and repairs reachable objects; garbage collection deletes unreachable ones."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from typing import Final, Literal

from nxpipe.artifact_store.backends.files import scratch
from nxpipe.artifact_store.backends.protocol import ListedObject, Sent, ignore_progress, serialized
from nxpipe.artifact_store.channel.generation import Head
from nxpipe.artifact_store.channel.log import ChannelLog, channels_among
from nxpipe.artifact_store.documents import Blob, as_time
from nxpipe.artifact_store.errors import Corrupt, NotFound, Refused, StoreUnavailable
from nxpipe.artifact_store.layout import ACTIONS, PINS, blob_path, head_path, log_folder, retired_path
from nxpipe.artifact_store.maintenance.reachability import (
    DAY,
    Collectable,
    History,
    ListedRecord,
    Reach,
    RetiredRecord,
    Roots,
    find_held,
    find_roots,
    is_young,
    kind_of,
    list_all,
    mark,
    orphans,
    read_manifest,
)
from nxpipe.artifact_store.manifest import MAX_MANIFEST_BYTES, Manifest
from nxpipe.artifact_store.records import ActionRecord
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.trust.signatures import Signatures
from nxpipe.artifact_store.weights import Packs

_READERS: Final = 8  # threads that saturate a network or all cores; each has one chunk or pack in memory
_AT_ONCE: Final = 1024  # blobs queued for the readers
_ABSENT: Final = "doctor-0000000000000000/"  # a folder that does not exist: listing it checks that the store responds


@dataclass(frozen=True)
class Finding:
    """A faulty object that is needed; `repaired` if an intact copy has replaced it.

    `unreadable`: the object could not be read, so its bytes are not known to be damaged.
    """

    path: str
    fault: str
    unreadable: bool = False
    repaired: bool = False


@dataclass(frozen=True)
class Health:
    """The result of fsck: findings, needed blobs and their bytes, unreachable objects and their bytes."""

    findings: tuple[Finding, ...]
    blobs: int
    bytes: int
    orphans: int
    orphaned: int

    @property
    def unrepaired(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.repaired)

    @property
    def is_sound(self) -> bool:
        return not self.unrepaired


def ignore_total(total: int) -> Sent:
    return ignore_progress


def fsck(store: Store, *, source: Store | None = None, begin: Callable[[int], Sent] = ignore_total) -> Health:
    """Verify all reachable objects. With a source, missing, damaged or unreadable blobs are replaced from it.

    `begin` receives the number of bytes to read, and returns the progress callback.
    """
    check = _Examination(store, source)
    now = store.backend.now()
    listed = list_all(store, "", check.note)
    roots = find_roots(store, History(), now, check.note)
    reach = mark(store, listed, roots, now, fault=check.note, read=check.manifest, visit=check.packs.expect)
    for channel in channels_among(listed):
        check.channel(channel)
    for item in listed:
        if kind_of(item.path) is Collectable.SIGNATURE and item.path.split("/")[1] in reach.manifests:
            check.signature(item.path)
    unverified = {digest: size for digest, size in reach.blobs.items() if digest not in check.seen}
    check.sent = serialized(begin(sum(unverified.values())))
    with ThreadPoolExecutor(_READERS) as pool:
        for batch in _batches(unverified):
            list(pool.map(partial(check.blob, needed=True), batch))
    return _health(check, listed, reach)


class _Examination:
    """One run of fsck: the findings so far, and the manifests that are already verified."""

    def __init__(self, store: Store, source: Store | None) -> None:
        self.sent: Sent = ignore_progress
        self.findings: dict[str, Finding] = {}  # by path, since a fault may occur twice
        self.seen: set[str] = set()
        self.packs = Packs(store.url)
        self._store = store
        self._source = source
        self._noted: set[str] = set()

    def note(self, path: str, error: Corrupt | StoreUnavailable) -> None:
        """Record an unreadable record, manifest or folder, once: a folder is also listed with its parents."""
        if str(error) not in self._noted:
            self._noted.add(str(error))
            finding = self._finding(path or ".", error)
            self.findings.setdefault(finding.path, finding)

    def manifest(self, blob: Blob) -> Manifest:
        """Verify and repair a manifest, and read it for the mark phase, which reports one that is still faulty."""
        self.seen.add(blob.sha256)
        self.blob(blob, needed=False)
        return read_manifest(self._store, blob)

    def blob(self, blob: Blob, *, needed: bool) -> None:
        finding = self._verify(blob, self.sent)
        if finding is not None and self._source is not None:
            finding = self._repair(blob, finding, self._source)
        if finding is not None and (needed or finding.repaired):
            self.findings[finding.path] = finding

    def channel(self, name: str) -> None:
        """Verify the chain from the tip to the first generation, and the head."""
        log = ChannelLog(self._store.backend, name)
        path = log_folder(name)
        try:
            log.tip()
            log.check_no_gap()
            path = head_path(name)
            self._store.records.read(Head, path)
        except (Corrupt, StoreUnavailable) as error:
            self.note(path, error)

    def signature(self, path: str) -> None:
        """Verify that the signature belongs to its path; its validity needs the public key."""
        _, manifest_digest, key_id = path.split("/")
        try:
            Signatures(self._store).well_formed(manifest_digest, key_id)
        except (Corrupt, StoreUnavailable) as error:
            self.note(path, error)

    def _verify(self, blob: Blob, sent: Sent = ignore_progress) -> Finding | None:
        try:
            chunks = self._store.blobs.chunks(blob, sent)
            if self.packs.includes(blob):
                self.packs.verify(blob, chunks)
            for _ in chunks:
                pass
        except (Corrupt, NotFound, StoreUnavailable) as error:
            return self._finding(blob_path(blob), error)
        return None

    def _repair(self, blob: Blob, finding: Finding, source: Store) -> Finding:
        """Replace the object, since an unreadable one cannot be compared, and verify the copy."""
        try:
            with scratch(self._store.backend.scratch_folder) as file:
                for chunk in source.blobs.chunks(blob):
                    file.write(chunk)
                self._store.backend.replace(finding.path, file.finish())
        except (Corrupt, NotFound, StoreUnavailable) as error:
            return replace(finding, fault=f"{finding.fault}; it could not be repaired: {error}")
        return self._verify(blob) or replace(finding, repaired=True)

    def _finding(self, path: str, error: Corrupt | NotFound | StoreUnavailable) -> Finding:
        if isinstance(error, Corrupt):
            path = error.where.removeprefix(f"{self._store.url}/")
        elif isinstance(error, StoreUnavailable):
            # One unreadable object is a finding; a store that does not respond at all is an error.
            self._store.backend.paths(_ABSENT)
        return Finding(path, str(error), unreadable=isinstance(error, StoreUnavailable))


def _health(check: _Examination, listed: Sequence[ListedObject], reach: Reach) -> Health:
    unreachable = orphans(listed, reach)
    return Health(
        findings=tuple(check.findings.values()),
        blobs=len(reach.blobs),
        bytes=sum(reach.blobs.values()),
        orphans=len(unreachable),
        orphaned=sum(item.size for item in unreachable),
    )


def _batches(sizes: Mapping[str, int]) -> Iterator[list[Blob]]:
    waiting = (Blob(sha256=digest, size=size) for digest, size in sizes.items())
    while batch := list(islice(waiting, _AT_ONCE)):
        yield batch


@dataclass(frozen=True)
class Rules:
    """Retention rules. An artifact is retired if any rule says so; without a rule all artifacts are kept."""

    keep: int | None = None  # number of the newest artifacts of each model and target
    max_age: float | None = None  # seconds
    budget: int | None = None  # bytes of all kept artifacts together
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class Kept:
    """An artifact that a collection keeps, and why."""

    record: ActionRecord
    reason: str


def records_to_retire(store: Store, roots: Roots, rules: Rules, now: float) -> list[tuple[ListedRecord, str]]:
    """Action records to retire, each with its reason, oldest first."""
    return [(entry, reason) for entry, reason, kept in _decisions(store, roots, rules, now) if kept is None]


def _decisions(store: Store, roots: Roots, rules: Rules, now: float) -> Iterator[tuple[ListedRecord, str, str | None]]:
    """Every action record, oldest first: the rule that retires it, if any does, and the reason why it stays, if it
    does."""
    holders = _holders(roots)
    newest_first = sorted(roots.actions, key=_age, reverse=True)
    reasons = dict(_by_rank_and_age(newest_first, rules, now))
    if rules.budget is not None:
        kept = [entry for entry in newest_first if entry.listed.path not in reasons]
        reasons |= {
            entry.listed.path: f"beyond a budget of {rules.budget} bytes"
            for entry in _over_budget(store, roots, kept, rules.budget)
        }
    for entry in reversed(newest_first):
        reason = reasons.get(entry.listed.path, "")
        held = holders.get(entry.record.manifest.sha256)
        if held is None and is_young(store, entry.listed, now):
            held = f"younger than {store.grace / 3600:g} h"
        yield entry, reason, held or (None if reason else _within(rules))


def _holders(roots: Roots) -> dict[str, str]:
    """The pin or the channel that holds a manifest, by its digest. A pin is the last word."""
    channels_first = sorted(roots.held, key=lambda root: root.path.startswith(PINS))
    return {root.manifest.sha256: _holder(root.path) for root in channels_first}


def _holder(path: str) -> str:
    name = path.split("/")[1]
    return f"pinned by {name}" if path.startswith(PINS) else f"served by {name} lately"


def _within(rules: Rules) -> str:
    """Why an artifact stays that no rule retires."""
    limits = [f"among the newest {rules.keep}"] if rules.keep is not None else []
    limits += [f"not older than {rules.max_age / DAY:g} days"] if rules.max_age is not None else []
    limits += ["within the budget"] if rules.budget is not None else []
    return " and ".join(limits) or "no retention rule"


def _age(entry: ListedRecord) -> tuple[float, str, str]:
    """Sort key by the store's clock; within a second, the resolution of a bucket, by the publishers' clocks."""
    return entry.listed.modified, entry.record.published_at, entry.record.request_key


def _by_rank_and_age(newest_first: Sequence[ListedRecord], rules: Rules, now: float) -> Iterator[tuple[str, str]]:
    ranks: Counter[tuple[str, str]] = Counter()
    for entry in newest_first:
        record = entry.record
        ranks[record.model_id, record.target] += 1
        if rules.keep is not None and ranks[record.model_id, record.target] > rules.keep:
            yield entry.listed.path, f"beyond the newest {rules.keep} of {record.model_id} on {record.target}"
        elif rules.max_age is not None and now - entry.listed.modified > rules.max_age:
            yield entry.listed.path, f"older than {rules.max_age / DAY:g} days"


def _over_budget(store: Store, roots: Roots, newest_first: Sequence[ListedRecord], budget: int) -> list[ListedRecord]:
    """The first record whose distinct blobs, with those of protected and newer artifacts, exceed the budget, and all
    older ones."""
    counted: set[str] = set()
    total = sum(_added_bytes(store, root.manifest, counted) for root in roots.held)
    for index, entry in enumerate(newest_first):
        total += _added_bytes(store, entry.record.manifest, counted)
        if total > budget:
            return list(newest_first[index:])
    return []


def _added_bytes(store: Store, manifest: Blob, counted: set[str]) -> int:
    """The bytes of an artifact's blobs that are not in `counted`, to which they are added."""
    if manifest.sha256 in counted:
        return 0
    try:
        blobs = (manifest, *read_manifest(store, manifest).blobs())
    except NotFound:  # collected manifest of an earlier generation
        return 0
    added = [blob for blob in blobs if blob.sha256 not in counted]
    counted.update(blob.sha256 for blob in added)
    return sum(blob.size for blob in added)


# The first bytes of a manifest in canonical JSON, and of no other object: "backend" is its first field.
_MANIFEST: Final = b'{"backend":"'
_APART: Final = 3600.0  # seconds; with a larger difference one of two clocks is wrong


@dataclass(frozen=True)
class Step:
    """One action on one version of an object."""

    action: Literal["retire", "remove", "clean up"]
    listed: ListedObject
    reason: str


@dataclass(frozen=True)
class Plan:
    """The steps of a collection, in order. Ages are relative to `now`, also while it runs."""

    rules: Rules
    now: float
    steps: tuple[Step, ...]
    kept: tuple[Kept, ...] = ()


@dataclass(frozen=True)
class Collected:
    """The result of a collection; `spared` steps were skipped, since the object was written or needed meanwhile."""

    done: tuple[Step, ...]
    spared: tuple[Step, ...]

    @property
    def freed(self) -> int:
        return sum(step.listed.size for step in self.done if step.action != "retire")


def ignore_step(step: Step, done: bool) -> None:
    """A progress callback that does nothing."""


def time_to_collect(store: Store, *, read_only: bool = False) -> float:
    """The store's time, by which its objects have ages. Refused if this machine's clock differs by over an hour.

    If a server's clock is ahead, all objects look old, and the grace period protects nothing.
    """
    theirs, ours = store.backend.now(read_only=read_only), time.time()
    if abs(theirs - ours) <= _APART:
        return theirs
    raise Refused(
        f"the clock of {store.url} shows {_shown(theirs)}, and that of this machine {_shown(ours)}; nothing is "
        "collected while one of them may be wrong: set the wrong clock, then collect again"
    )


def _shown(seconds: float) -> str:
    return f"{as_time(seconds)[:16].replace('T', ' ')} UTC"


def plan(store: Store, rules: Rules, now: float) -> Plan:
    """Plan a collection; writes nothing. A damaged record or manifest raises `Corrupt`, and nothing is collected.

    Call `store.backend.recover()` before planning a collection that will run.
    """
    abandoned = list(store.backend.abandoned(now - store.grace))
    listed = list(store.backend.walk(""))
    roots = find_roots(store, rules.history, now)
    reach = mark(store, listed, roots, now)
    retirements = list(_retirements(store, listed, roots, rules, now))
    # A retired copy that an interrupted collection left is reused, and refreshed, by the new retirement.
    reach.paths.update(retired_path(_key_of(step.listed)) for step in retirements)
    return Plan(
        rules,
        now,
        (
            *retirements,
            *_sweep(store, listed, reach, now),
            *(Step("clean up", item, "an interrupted write") for item in abandoned),
        ),
        tuple(Kept(entry.record, why) for entry, _, why in _decisions(store, roots, rules, now) if why is not None),
    )


def apply_plan(store: Store, plan: Plan, report: Callable[[Step, bool], None] = ignore_step) -> Collected:
    """Retire records, mark again, and remove unreachable objects; an interruption leaves only orphans."""
    done: list[Step] = []
    spared: list[Step] = []
    for steps, act in _stages(store, plan):
        for step, removed in zip(steps, store.backend.each(act, steps), strict=True):
            (done if removed else spared).append(step)
            report(step, removed)
    return Collected(tuple(done), tuple(spared))


def _retirements(
    store: Store, listed: Sequence[ListedObject], roots: Roots, rules: Rules, now: float
) -> Iterator[Step]:
    """Retirements, except of keys with an earlier record in `retired/`: the sweep removes that record first."""
    retired = {item.path for item in listed}
    for entry, reason in records_to_retire(store, roots, rules, now):
        path = retired_path(entry.record.request_key)
        copy = store.records.read(RetiredRecord, path) if path in retired else None
        if copy is None or copy.write_id == entry.record.write_id:
            yield Step("retire", entry.listed, reason)


def _key_of(action: ListedObject) -> str:
    return action.path.removeprefix(ACTIONS)


def _sweep(store: Store, listed: Sequence[ListedObject], reach: Reach, now: float) -> Iterator[Step]:
    unreachable: dict[Collectable, list[ListedObject]] = {kind: [] for kind in Collectable}
    for item in listed:
        kind = kind_of(item.path)
        if kind and not reach.has(item.path) and not is_young(store, item, now):
            unreachable[kind].append(item)
    blobs = unreachable.pop(Collectable.BLOB)
    for kind, objects in unreachable.items():
        yield from (Step("remove", item, kind.reason) for item in objects)
    are_manifests = list(store.backend.each(lambda item: _is_manifest(store, item), blobs))
    pairs = list(zip(blobs, are_manifests, strict=True))
    yield from (Step("remove", item, "an unreferenced manifest") for item, is_manifest in pairs if is_manifest)
    yield from (Step("remove", item, Collectable.BLOB.reason) for item, is_manifest in pairs if not is_manifest)


def _is_manifest(store: Store, item: ListedObject) -> bool:
    """Manifests are removed before their blobs, which a reader of an old generation may still need."""
    if item.size > MAX_MANIFEST_BYTES:
        return False
    return b"".join(store.backend.read(item.path, 0, len(_MANIFEST)) or ()) == _MANIFEST


def _stages(store: Store, plan: Plan) -> Iterator[tuple[Sequence[Step], Callable[[Step], bool]]]:
    """Stages of concurrent steps, each with its action. A stage begins after the previous one has ended."""
    retire = [step for step in plan.steps if step.action == "retire"]
    if retire:
        protected = {root.manifest.sha256 for root in find_held(store, plan.rules.history, plan.now)}
        yield retire, lambda step: _retire(store, step.listed, protected)
    sweep = [step for step in plan.steps if step.action == "remove"]
    if sweep:
        listed = [step.listed for step in sweep]
        reach = mark(store, listed, find_roots(store, plan.rules.history, plan.now), plan.now)
        for _, stage in groupby(sweep, key=lambda step: step.reason):
            yield list(stage), lambda step: not reach.has(step.listed.path) and store.backend.remove(step.listed)
    clean_up = [step for step in plan.steps if step.action == "clean up"]
    yield clean_up, lambda step: store.backend.remove_abandoned(step.listed)


def _retire(store: Store, item: ListedObject, protected: set[str]) -> bool:
    """Move a record to `retired/`, which protects the artifact for the grace period for its current readers."""
    record = store.records.read(ActionRecord, item.path)
    if record is None or record.manifest.sha256 in protected:
        return False
    copy = RetiredRecord.model_validate(record.model_dump())
    if store.records.create_or_read(copy).write_id != record.write_id:
        return False  # an earlier record of this key is still in its grace period
    # A copy left by an interrupted collection is old, and must protect for the whole grace period from now on.
    return store.backend.touch(retired_path(record.request_key)) and store.backend.remove(item)
