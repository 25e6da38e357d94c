"""Records that builds share through a store: leases, step results, known failures, job outcomes, reports.

An artifact is assembled from step results: the cached output of one step under its cache key
(docs/reference/store-format.md,
sections 9 and 18). Job outcomes are a message to the driver of a remote run and no more; reports hold times, so
they are no part of a manifest: equal inputs make equal artifacts.
"""

import re
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, Final, Literal

from pydantic import Field, model_validator

from nxpipe.artifact_store.backends.protocol import Backend, Payload
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.documents import (
    Blob,
    Count,
    Digest,
    Document,
    JsonObject,
    Name,
    SafePath,
    Sealed,
    Size,
    Text,
    Time,
    WriteId,
    as_time,
    seconds_since_1970,
)
from nxpipe.artifact_store.errors import Conflict, Corrupt, Incomplete, InvalidDocument, NotFound, StoreUnavailable
from nxpipe.artifact_store.index.leaves import differences
from nxpipe.artifact_store.layout import (
    blob_path,
    failure_path,
    is_key,
    lease_folder,
    number_of,
    numbered,
    outcome_path,
    part_path,
    report_folder,
    report_path,
    run_folder,
)
from nxpipe.artifact_store.records import Records
from nxpipe.artifact_store.store import Store

HELD: Final = 120.0  # seconds; renewed at a third of it
_LONGEST: Final = 3600.0  # seconds; who asked for more had a wrong clock, and would keep others waiting for ever


class Lease(Sealed):
    format: Literal["nxpipe.lease/1"] = "nxpipe.lease/1"
    request_key: Digest
    term: Count
    holder: Name
    acquired_at: Time
    expires_at: Time

    @property
    def path(self) -> str:
        return f"{lease_folder(self.request_key)}{numbered(self.term)}"

    def holds(self, now: float) -> bool:
        return 0 < seconds_since_1970(self.expires_at) - now <= _LONGEST


class Leases:
    def __init__(self, backend: Backend, seconds: float = HELD) -> None:
        self._backend = backend
        self._records = Records(backend)
        self._seconds = seconds

    def current(self, request_key: str) -> Lease | None:
        """Who is at work on this key, by the store's clock."""
        last = self._last(request_key)
        return last if last and last.holds(self._backend.now()) else None

    def take(self, request_key: str, holder: str) -> Lease | None:
        """The lease, or None when another has it. A holder is one attempt: a name with something random in it."""
        last, now = self._last(request_key), self._backend.now()
        if last is not None and last.holds(now):
            return None
        wanted = Lease(
            request_key=request_key,
            term=last.term + 1 if last else 1,
            holder=holder,
            acquired_at=as_time(now),
            expires_at=as_time(now + self._seconds),
        )
        return wanted if self._records.create_or_read(wanted).holder == holder else None

    def renew(self, lease: Lease) -> Lease:
        return self._until(lease, self._backend.now() + self._seconds)

    def give_back(self, lease: Lease) -> None:
        self._until(lease, self._backend.now())

    @contextmanager
    def kept(self, lease: Lease) -> Iterator[None]:
        """Renew a lease for as long as the block runs, then give it back."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(self._seconds / 3):
                try:
                    self.renew(lease)
                except StoreUnavailable:
                    continue  # an expired lease costs duplicate work, and nothing else

        keeper = threading.Thread(target=renew, name=f"lease {lease.request_key[:12]}", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            done.set()
            keeper.join()
            self.give_back(lease)

    def _until(self, lease: Lease, end: float) -> Lease:
        renewed = lease.model_copy(update={"expires_at": as_time(end)})
        self._records.replace(renewed)
        return renewed

    def _last(self, request_key: str) -> Lease | None:
        folder = lease_folder(request_key)
        names = (path.removeprefix(folder) for path in self._backend.paths(folder))
        terms = sorted(filter(None, map(number_of, names)))
        if not terms:
            return None
        try:
            return self._records.read(Lease, f"{folder}{numbered(terms[-1])}")
        except Corrupt:
            # Nothing depends on it: a damaged lease is one that has expired.
            long_ago = as_time(0.0)
            return Lease(
                request_key=request_key, term=terms[-1], holder="unknown", acquired_at=long_ago, expires_at=long_ago
            )


def new_holder(name: str) -> str:
    """One attempt's name, unlike that of any other."""
    return f"{name} {secrets.token_hex(8)}"


MAX_PART_BYTES: Final = 1024**2

_NAMED: Final = 3  # differences that a conflict names


class ResultFile(Document):
    path: SafePath
    blob: Blob


class StepResult(Sealed):
    max_bytes: ClassVar[int] = MAX_PART_BYTES

    format: Literal["nxpipe.part/1"] = "nxpipe.part/1"
    key: Digest
    files: tuple[ResultFile, ...] = Field(strict=False)
    facts: JsonObject
    write_id: WriteId

    @model_validator(mode="after")
    def _has_one_order(self) -> "StepResult":
        paths = [file.path for file in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("the paths of its files do not ascend, each once")
        return self

    @property
    def path(self) -> str:
        return part_path(self.key)

    def blobs(self) -> tuple[Blob, ...]:
        """Every distinct one, in the order of first mention."""
        return tuple(dict.fromkeys(file.blob for file in self.files))

    def blob(self, path: str) -> Blob:
        for file in self.files:
            if file.path == path:
                return file.blob
        held = ", ".join(file.path for file in self.files) or "none"
        raise NotFound(f"part {self.key} holds no file {path!r}; its files are: {held}")

    @property
    def result(self) -> str:
        """The digest of what was made, whoever made it."""
        return sha256_hex(canonical_json(self.model_dump(include={"files", "facts"})))


def step_result(store: Store, key: str) -> StepResult | None:
    """What was made, for whoever is about to use it: its blobs are intact, and are kept from being collected.

    Where one is missing or damaged the answer is None; who then makes the part again repairs it.
    """
    part = store.records.read(StepResult, part_path(key))
    return part if part and _is_kept(store, part) else None


def keep_step_result(store: Store, key: str, files: Mapping[str, Blob], facts: dict[str, object]) -> StepResult:
    """After its blobs are stored. Another result for the same key is a conflict, as it is for an artifact."""
    part = _consistent(store, key, files, facts)
    winner = store.records.create_or_read(part)
    if winner.result != part.result:
        raise Conflict(f"part {key}", winner.result, part.result, store.url, _difference(winner, part))
    return winner


def _consistent(store: Store, key: str, files: Mapping[str, Blob], facts: dict[str, object]) -> StepResult:
    """A part to be created, all of whose blobs are there, young and durable."""
    named = tuple(ResultFile(path=path, blob=files[path]) for path in sorted(files))
    part = StepResult(key=key, files=named, facts=facts, write_id=secrets.token_hex(16))
    for blob, fault in store.blobs.settle(part.blobs(), sent_by_us=True):
        raise Incomplete(
            f"cannot keep part {key}: blob {blob.sha256} of {blob.size} bytes {fault} in {store.url}; "
            "put every blob before the part that names it"
        )
    store.backend.make_durable(blob_path(blob) for blob in part.blobs())
    return part


def observed(store: Store, key: str) -> StepResult | None:
    """What was observed under a key, intact: for what another machine would not find to the bit."""
    return next((part for part in _observations(store, key) if _is_kept(store, part)), None)


def record_observation(store: Store, key: str, files: Mapping[str, Blob], facts: dict[str, object]) -> StepResult:
    """After its blobs are stored. What was observed first stands, and another result is no conflict.

    Where a blob of it is lost, no second observation brings that back: it gets the key that follows.
    """
    if (part := observed(store, key)) is not None:
        return part
    for lost in _observations(store, key):
        key = _next_key(lost.key)
    part = _consistent(store, key, files, facts)
    return store.records.create_or_read(part)


def _observations(store: Store, key: str) -> Iterator[StepResult]:
    while (part := store.records.read(StepResult, part_path(key))) is not None:
        yield part
        key = _next_key(key)


def _next_key(key: str) -> str:
    return sha256_hex(canonical_json({"after": key}))


def _is_kept(store: Store, part: StepResult) -> bool:
    return all(store.backend.each(store.blobs.is_kept, part.blobs()))


def _difference(before: StepResult, after: StepResult) -> str:
    paths = [each.path for each in differences(_contents(before), _contents(after))]
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{', '.join(paths[:_NAMED])}{more}"


def _contents(part: StepResult) -> dict[str, object]:
    return {"facts": part.facts, "files": {file.path: file.blob.sha256 for file in part.files}}


REMEMBERED: Final = 7 * 24 * 3600.0  # seconds
_SHOWN: Final = 4000  # characters of a message; the log has all of it


class Failure(Sealed):
    format: Literal["nxpipe.failure/1"] = "nxpipe.failure/1"
    request_key: Digest
    kind: Name
    message: Text
    log: Blob | None
    at: Time
    expires_at: Time

    @property
    def path(self) -> str:
        return failure_path(self.request_key)


def failure_of(store: Store, request_key: str) -> Failure | None:
    """What this request died of, unless that was too long ago."""
    found = store.records.read(Failure, failure_path(request_key))
    return found if found and seconds_since_1970(found.expires_at) > store.backend.now() else None


def record_failure(
    store: Store, request_key: str, error: Exception, *, log: bytes | None = None, seconds: float = REMEMBERED
) -> Failure | None:
    """Keep the failure of a request; None for one that another attempt may be spared."""
    if is_retryable(error):
        return None
    now = store.backend.now()
    text = " ".join(str(error).split()) or type(error).__name__
    failure = Failure(
        request_key=request_key,
        kind=type(error).__qualname__,
        message="".join(each for each in text if each.isprintable())[:_SHOWN],
        log=None if log is None else store.put_blob(log),
        at=as_time(now),
        expires_at=as_time(now + seconds),
    )
    store.records.replace(failure)
    return failure


def is_retryable(error: BaseException) -> bool:
    """Whether the cause may be gone at the next attempt: the machine's, the store's, or a person's.

    Whatever is not known to be the request's own fault is of this kind; an error says so by `deterministic`.
    """
    return not getattr(error, "deterministic", False)


MAX_OUTCOME_BYTES: Final = 1024**2  # the log of a failure is in it


class JobOutcome(Sealed):
    """`items` is the digest of the run's list, `place` an item's place in it, the first one's 0."""

    max_bytes: ClassVar[int] = MAX_OUTCOME_BYTES

    format: Literal["nxpipe.outcome/1"] = "nxpipe.outcome/1"
    items: Digest
    place: Size
    ended: JsonObject

    @property
    def path(self) -> str:
        return outcome_path(self.items, self.place)


def record_outcome(store: Store, items: str, place: int, ended: dict[str, object]) -> None:
    """An item that is carried out again, as a machine was lost, says so in the place of its first outcome."""
    store.records.replace(JobOutcome(items=items, place=place, ended=ended))


def outcomes_of(store: Store, items: str, places: Collection[int]) -> Iterator[JobOutcome]:
    """Those of these places that are there: one listing, and a read for each that is found."""
    wanted = {outcome_path(items, place) for place in places}
    found = [path for path in store.backend.paths(run_folder(items)) if path in wanted]
    for outcome in store.backend.each(lambda path: store.records.read(JobOutcome, path), found):
        if outcome is not None:
            yield outcome


KINDS = ("html", "json")


_MOMENT = re.compile(r"\d{8}T\d{6}(\.\d{1,6})?Z")


_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")


def timestamp_of(began_at: str) -> str:
    """A time as a name of files: some systems allow no colon in one."""
    if not _TIME.fullmatch(began_at):
        raise InvalidDocument(f"{began_at!r} is not a time in UTC, as 2026-01-31T12:00:00.000000Z is one")
    return began_at.replace("-", "").replace(":", "")


def store_report(store: Store, manifest_digest: str, began_at: str, *, html: bytes, json: bytes) -> None:
    """Keep the report of one build beside an artifact; said again, it replaces what was said."""
    if not is_key(manifest_digest):
        raise InvalidDocument(f"{manifest_digest!r} is not the digest of a manifest")
    for kind, data in (("html", html), ("json", json)):
        store.backend.replace(report_path(manifest_digest, timestamp_of(began_at), kind), Payload.of(data))


def report_timestamps(store: Store, manifest_digest: str) -> list[str]:
    """When the builds began whose reports are kept, the newest last."""
    names = (path.rpartition("/")[2] for path in store.backend.paths(report_folder(manifest_digest)))
    found = {moment for moment, dot, kind in (name.rpartition(".") for name in names) if dot and kind in KINDS}
    return sorted(filter(_MOMENT.fullmatch, found))


def read_report(store: Store, manifest_digest: str, moment: str, kind: str) -> bytes | None:
    chunks = store.backend.read(report_path(manifest_digest, moment, kind))
    return None if chunks is None else b"".join(chunks)
