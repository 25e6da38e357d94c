"""Maintenance of a store: fsck verifies and repairs reachable objects; garbage collection deletes what nothing
retains."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from typing import Final, Literal

from nxpipe.artifact_store.backends.files import scratch
from nxpipe.artifact_store.backends.protocol import Found, Sent, ignore_progress, in_turn
from nxpipe.artifact_store.channel.generation import Head
from nxpipe.artifact_store.channel.log import ChannelLog, channels_among
from nxpipe.artifact_store.documents import Blob, as_time
from nxpipe.artifact_store.errors import Corrupt, NotFound, Refused, StoreUnavailable
from nxpipe.artifact_store.layout import ACTIONS, blob_path, head_path, log_folder, retired_path
from nxpipe.artifact_store.maintenance.reachability import (
    DAY,
    Collectable,
    FoundRecord,
    History,
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
    return ignore_progress


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
        self.sent: Sent = ignore_progress
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

    def _look(self, blob: Blob, sent: Sent = ignore_progress) -> Finding | None:
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


@dataclass(frozen=True)
class Rules:
    """An artifact goes by any one of these; without one, all that were published stay."""

    keep: int | None = None  # the newest of each model and target
    max_age: float | None = None  # seconds
    budget: int | None = None  # bytes, of all artifacts that stay
    history: History = field(default_factory=History)


def given_up(store: Store, roots: Roots, rules: Rules, now: float) -> list[tuple[FoundRecord, str]]:
    """Action records to be taken back and why, the oldest first."""
    held = {root.manifest.sha256 for root in roots.held}
    newest_first = sorted(roots.actions, key=_age, reverse=True)
    reasons = dict(_by_rank_and_age(newest_first, rules, now))
    if rules.budget is not None:
        staying = [entry for entry in newest_first if entry.found.path not in reasons]
        reasons |= {
            entry.found.path: f"beyond a budget of {rules.budget} bytes"
            for entry in _over_budget(store, roots, staying, rules.budget)
        }
    return [
        (entry, reasons[entry.found.path])
        for entry in reversed(newest_first)
        if entry.found.path in reasons
        and entry.record.manifest.sha256 not in held
        and not is_young(store, entry.found, now)
    ]


def _age(entry: FoundRecord) -> tuple[float, str, str]:
    """By the store's clock; that of a bucket ticks in seconds, within which the publishers' clocks decide."""
    return entry.found.modified, entry.record.published_at, entry.record.request_key


def _by_rank_and_age(newest_first: Sequence[FoundRecord], rules: Rules, now: float) -> Iterator[tuple[str, str]]:
    ranks: Counter[tuple[str, str]] = Counter()
    for entry in newest_first:
        record = entry.record
        ranks[record.model_id, record.target] += 1
        if rules.keep is not None and ranks[record.model_id, record.target] > rules.keep:
            yield entry.found.path, f"beyond the newest {rules.keep} of {record.model_id} on {record.target}"
        elif rules.max_age is not None and now - entry.found.modified > rules.max_age:
            yield entry.found.path, f"older than {rules.max_age / DAY:g} days"


def _over_budget(store: Store, roots: Roots, newest_first: Sequence[FoundRecord], budget: int) -> list[FoundRecord]:
    """All from the one on with which the distinct blobs of the newer ones, and of what is held, exceed the budget."""
    counted: set[str] = set()
    total = sum(_added(store, root.manifest, counted) for root in roots.held)
    for at, entry in enumerate(newest_first):
        total += _added(store, entry.record.manifest, counted)
        if total > budget:
            return list(newest_first[at:])
    return []


def _added(store: Store, manifest: Blob, counted: set[str]) -> int:
    """What a manifest costs beyond the blobs that were counted before."""
    if manifest.sha256 in counted:
        return 0
    try:
        blobs = (manifest, *read_manifest(store, manifest).blobs())
    except NotFound:  # of an earlier generation
        return 0
    news = [blob for blob in blobs if blob.sha256 not in counted]
    counted.update(blob.sha256 for blob in news)
    return sum(blob.size for blob in news)


# How the canonical JSON of a manifest begins, and of nothing else in a store: "backend" is its first field.
_MANIFEST: Final = b'{"backend":"'
_APART: Final = 3600.0  # seconds between two clocks, of which one is wrong then


@dataclass(frozen=True)
class Step:
    """One object, at the version that was looked at."""

    action: Literal["retire", "remove", "clean up"]
    found: Found
    reason: str


@dataclass(frozen=True)
class Plan:
    """What goes, in this order. Ages count from `now`, while it is carried out as well."""

    rules: Rules
    now: float
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Collected:
    """What went, and what stayed because somebody wrote or needs it since the plan was made."""

    done: tuple[Step, ...]
    spared: tuple[Step, ...]

    @property
    def freed(self) -> int:
        return sum(step.found.size for step in self.done if step.action != "retire")


def ignore_step(step: Step, done: bool) -> None:
    """For those who do not watch."""


def time_to_collect(store: Store, *, looking: bool = False) -> float:
    """The store's time, by which its objects have ages; refused where this machine's clock says something else.

    A server's clock that is ahead would make all objects old, and the grace that protects new ones nothing.
    """
    theirs, ours = store.backend.now(looking=looking), time.time()
    if abs(theirs - ours) <= _APART:
        return theirs
    raise Refused(
        f"the clock of {store.url} shows {_shown(theirs)}, and that of this machine {_shown(ours)}; nothing is "
        "collected by a clock that may be wrong: set the one that is, then collect again"
    )


def _shown(seconds: float) -> str:
    return f"{as_time(seconds)[:16].replace('T', ' ')} UTC"


def plan(store: Store, rules: Rules, now: float) -> Plan:
    """Look only. A damaged record or manifest is `Corrupt`, and nothing is collected.

    One that is to be carried out is made after `store.backend.recover()`.
    """
    abandoned = list(store.backend.abandoned(now - store.grace))
    listed = list(store.backend.walk(""))
    roots = find_roots(store, rules.history, now)
    reach = mark(store, listed, roots, now)
    retirements = list(_retirements(store, listed, roots, rules, now))
    # A copy that a killed collection has left is made young when it is needed after all.
    reach.paths.update(retired_path(_key_of(step.found)) for step in retirements)
    return Plan(
        rules,
        now,
        (
            *retirements,
            *_sweep(store, listed, reach, now),
            *(Step("clean up", found, "half-written, and its writer has gone") for found in abandoned),
        ),
    )


def carry_out(store: Store, plan: Plan, told: Callable[[Step, bool], None] = ignore_step) -> Collected:
    """Take back, look again at what is needed, and sweep the rest; killed at any point, only orphans are left."""
    done: list[Step] = []
    spared: list[Step] = []
    for steps, act in _stages(store, plan):
        for step, gone in zip(steps, store.backend.each(act, steps), strict=True):
            (done if gone else spared).append(step)
            told(step, gone)
    return Collected(tuple(done), tuple(spared))


def _retirements(store: Store, listed: Sequence[Found], roots: Roots, rules: Rules, now: float) -> Iterator[Step]:
    """Not while `retired/` has an earlier record of the key: the sweep takes that, and a later plan this."""
    retired = {found.path for found in listed}
    for entry, reason in given_up(store, roots, rules, now):
        path = retired_path(entry.record.request_key)
        copy = store.records.read(RetiredRecord, path) if path in retired else None
        if copy is None or copy.write_id == entry.record.write_id:
            yield Step("retire", entry.found, reason)


def _key_of(action: Found) -> str:
    return action.path.removeprefix(ACTIONS)


def _sweep(store: Store, listed: Sequence[Found], reach: Reach, now: float) -> Iterator[Step]:
    loose: dict[Collectable, list[Found]] = {kind: [] for kind in Collectable}
    for found in listed:
        kind = kind_of(found.path)
        if kind and not reach.has(found.path) and not is_young(store, found, now):
            loose[kind].append(found)
    blobs = loose.pop(Collectable.BLOB)
    for kind, those in loose.items():
        yield from (Step("remove", found, kind.reason) for found in those)
    are_manifests = list(store.backend.each(lambda found: _is_manifest(store, found), blobs))
    both = list(zip(blobs, are_manifests, strict=True))
    yield from (Step("remove", found, "a manifest that nothing names") for found, is_one in both if is_one)
    yield from (Step("remove", found, Collectable.BLOB.reason) for found, is_one in both if not is_one)


def _is_manifest(store: Store, found: Found) -> bool:
    """A manifest goes before its blobs: whoever finds it, in a generation of long ago, relies on them."""
    if found.size > MAX_MANIFEST_BYTES:
        return False
    return b"".join(store.backend.read(found.path, 0, len(_MANIFEST)) or ()) == _MANIFEST


def _stages(store: Store, plan: Plan) -> Iterator[tuple[Sequence[Step], Callable[[Step], bool]]]:
    """Steps that may be done at once, and how. Each stage begins when the one before it has ended."""
    retire = [step for step in plan.steps if step.action == "retire"]
    if retire:
        held = {root.manifest.sha256 for root in find_held(store, plan.rules.history, plan.now)}
        yield retire, lambda step: _retire(store, step.found, held)
    sweep = [step for step in plan.steps if step.action == "remove"]
    if sweep:
        listed = [step.found for step in sweep]
        reach = mark(store, listed, find_roots(store, plan.rules.history, plan.now), plan.now)
        for _, stage in groupby(sweep, key=lambda step: step.reason):
            yield list(stage), lambda step: not reach.has(step.found.path) and store.backend.remove(step.found)
    clean_up = [step for step in plan.steps if step.action == "clean up"]
    yield clean_up, lambda step: store.backend.remove_abandoned(step.found)


def _retire(store: Store, found: Found, held: set[str]) -> bool:
    """From here on, the copy below `retired/` holds the artifact for those who found it just now."""
    record = store.records.read(ActionRecord, found.path)
    if record is None or record.manifest.sha256 in held:
        return False
    copy = RetiredRecord.model_validate(record.model_dump())
    if store.records.create_or_read(copy).write_id != record.write_id:
        return False  # an earlier record of this key is in its grace yet
    # One that a killed collection left is as old as that; it must hold for the whole grace from now on.
    return store.backend.touch(retired_path(record.request_key)) and store.backend.remove(found)
