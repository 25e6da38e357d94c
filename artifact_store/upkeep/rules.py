"""Which artifacts are given up: what a store keeps beside that which channels and pins hold."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import NotFound
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.upkeep.reach import DAY, Entry, History, Roots, is_young, read_manifest


@dataclass(frozen=True)
class Rules:
    """An artifact goes by any one of these; without one, all that were published stay."""

    keep: int | None = None  # the newest of each model and target
    max_age: float | None = None  # seconds
    budget: int | None = None  # bytes, of all artifacts that stay
    history: History = field(default_factory=History)


def given_up(store: Store, roots: Roots, rules: Rules, now: float) -> list[tuple[Entry, str]]:
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


def _age(entry: Entry) -> tuple[float, str, str]:
    """By the store's clock; that of a bucket ticks in seconds, within which the publishers' clocks decide."""
    return entry.found.modified, entry.record.published_at, entry.record.request_key


def _by_rank_and_age(newest_first: Sequence[Entry], rules: Rules, now: float) -> Iterator[tuple[str, str]]:
    ranks: Counter[tuple[str, str]] = Counter()
    for entry in newest_first:
        record = entry.record
        ranks[record.model_id, record.target] += 1
        if rules.keep is not None and ranks[record.model_id, record.target] > rules.keep:
            yield entry.found.path, f"beyond the newest {rules.keep} of {record.model_id} on {record.target}"
        elif rules.max_age is not None and now - entry.found.modified > rules.max_age:
            yield entry.found.path, f"older than {rules.max_age / DAY:g} days"


def _over_budget(store: Store, roots: Roots, newest_first: Sequence[Entry], budget: int) -> list[Entry]:
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
