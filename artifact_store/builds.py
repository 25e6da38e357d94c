"""Records that builds share through a store: leases, step results, known failures, job outcomes, reports.

An artifact is assembled from step results: the cached output of one step under its cache key
(docs/reference/store-format.md, sections 9 and 18). Job outcomes are only messages to the driver of a remote run.
Reports hold times, so they are not part of a manifest: equal inputs make equal artifacts.
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

LEASE_SECONDS: Final = 120.0  # seconds; renewed after a third of it
_LONGEST: Final = 3600.0  # seconds; a longer lease comes from a wrong clock, and would block others forever


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
    def __init__(self, backend: Backend, seconds: float = LEASE_SECONDS) -> None:
        self._backend = backend
        self._records = Records(backend)
        self._seconds = seconds

    def current(self, request_key: str) -> Lease | None:
        """The unexpired lease of a key, by the store's clock."""
        last = self._last(request_key)
        return last if last and last.holds(self._backend.now()) else None

    def take(self, request_key: str, holder: str) -> Lease | None:
        """The lease, or None if another holder has it. `holder` names one attempt, see `new_holder`."""
        last, now = self._last(request_key), self._backend.now()
        if last is not None and last.holds(now):
            return None
        lease = Lease(
            request_key=request_key,
            term=last.term + 1 if last else 1,
            holder=holder,
            acquired_at=as_time(now),
            expires_at=as_time(now + self._seconds),
        )
        return lease if self._records.create_or_read(lease).holder == holder else None

    def renew(self, lease: Lease) -> Lease:
        return self._until(lease, self._backend.now() + self._seconds)

    def give_back(self, lease: Lease) -> None:
        self._until(lease, self._backend.now())

    @contextmanager
    def kept(self, lease: Lease) -> Iterator[None]:
        """Renew a lease while the block runs, then give it back."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(self._seconds / 3):
                try:
                    self.renew(lease)
                except StoreUnavailable:
                    continue  # an expired lease only costs duplicate work

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
            # Correctness does not depend on leases: a damaged lease counts as expired.
            long_ago = as_time(0.0)
            return Lease(
                request_key=request_key, term=terms[-1], holder="unknown", acquired_at=long_ago, expires_at=long_ago
            )


def new_holder(name: str) -> str:
    """A lease holder's name with a random suffix, unique to one attempt."""
    return f"{name} {secrets.token_hex(8)}"


MAX_PART_BYTES: Final = 1024**2

_NAMED: Final = 3  # differences listed in a Conflict


class ResultFile(Document):
    path: SafePath
    blob: Blob


class StepResult(Sealed):
    """The cached result of one build step: files and metadata under a cache key."""

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
            raise ValueError("the paths of its files are not sorted and unique")
        return self

    @property
    def path(self) -> str:
        return part_path(self.key)

    def blobs(self) -> tuple[Blob, ...]:
        """Every distinct blob, in order of first mention."""
        return tuple(dict.fromkeys(file.blob for file in self.files))

    def blob(self, path: str) -> Blob:
        for file in self.files:
            if file.path == path:
                return file.blob
        paths = ", ".join(file.path for file in self.files) or "none"
        raise NotFound(f"step result {self.key} has no file {path!r}; its files are: {paths}")

    @property
    def result(self) -> str:
        """The digest of files and metadata, independent of the writer."""
        return sha256_hex(canonical_json(self.model_dump(include={"files", "facts"})))


def step_result(store: Store, key: str) -> StepResult | None:
    """The first intact step result under a key, its blobs protected from garbage collection for the grace period.

    None if a blob of each is missing or damaged; storing the result again repairs it, or stores a successor.
    """
    return next((result for result in _step_results(store, key) if _is_kept(store, result)), None)


def keep_step_result(store: Store, key: str, files: Mapping[str, Blob], facts: dict[str, object]) -> StepResult:
    """Store a step result after its blobs. A different result under the same key raises Conflict.

    If the stored one has lost a blob that this build did not reproduce, such as a NEFF, the result is its successor.
    """
    result = _consistent(store, key, files, facts)
    while (winner := store.records.create_or_read(result)).result != result.result:
        if _is_kept(store, winner):
            raise Conflict(f"step result {key}", winner.result, result.result, store.url, _difference(winner, result))
        result = result.model_copy(update={"key": _next_key(winner.key)})
    return winner


def _consistent(store: Store, key: str, files: Mapping[str, Blob], facts: dict[str, object]) -> StepResult:
    """A new step result, not yet stored, all of whose blobs are present, durable and safe from garbage collection."""
    named = tuple(ResultFile(path=path, blob=files[path]) for path in sorted(files))
    result = StepResult(key=key, files=named, facts=facts, write_id=secrets.token_hex(16))
    for blob, fault in store.blobs.settle(result.blobs(), sent_by_us=True):
        raise Incomplete(
            f"cannot keep step result {key}: blob {blob.sha256} of {blob.size} bytes {fault} in {store.url}; "
            "put every blob before the step result that names it"
        )
    store.backend.make_durable(blob_path(blob) for blob in result.blobs())
    return result


def record_observation(store: Store, key: str, files: Mapping[str, Blob], facts: dict[str, object]) -> StepResult:
    """Store an observation after its blobs: a step result that other machines do not reproduce to the bit.

    The first observation is kept; a different one is no conflict. If a blob of the first is lost, the new observation
    is its successor.
    """
    if (result := step_result(store, key)) is not None:
        return result
    for damaged in _step_results(store, key):
        key = _next_key(damaged.key)
    result = _consistent(store, key, files, facts)
    return store.records.create_or_read(result)


def _step_results(store: Store, key: str) -> Iterator[StepResult]:
    """The step result under a key, and its successors."""
    while (result := store.records.read(StepResult, part_path(key))) is not None:
        yield result
        key = _next_key(key)


def _next_key(key: str) -> str:
    return sha256_hex(canonical_json({"after": key}))


def _is_kept(store: Store, result: StepResult) -> bool:
    return all(store.backend.each(store.blobs.is_kept, result.blobs()))


def _difference(before: StepResult, after: StepResult) -> str:
    paths = [difference.path for difference in differences(_contents(before), _contents(after))]
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{', '.join(paths[:_NAMED])}{more}"


def _contents(result: StepResult) -> dict[str, object]:
    return {"facts": result.facts, "files": {file.path: file.blob.sha256 for file in result.files}}


FAILURE_SECONDS: Final = 7 * 24 * 3600.0  # seconds
_SHOWN: Final = 4000  # characters of a message; the log has the full text


class Failure(Sealed):
    """A known failure of a request, stored until it expires."""

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
    """The known failure of a request, unless it has expired."""
    failure = store.records.read(Failure, failure_path(request_key))
    return failure if failure and seconds_since_1970(failure.expires_at) > store.backend.now() else None


def record_failure(
    store: Store, request_key: str, error: Exception, *, log: bytes | None = None, seconds: float = FAILURE_SECONDS
) -> Failure | None:
    """Store a deterministic failure of a request as known; None for a retryable failure."""
    if is_retryable(error):
        return None
    now = store.backend.now()
    text = " ".join(str(error).split()) or type(error).__name__
    failure = Failure(
        request_key=request_key,
        kind=type(error).__qualname__,
        message="".join(character for character in text if character.isprintable())[:_SHOWN],
        log=None if log is None else store.put_blob(log),
        at=as_time(now),
        expires_at=as_time(now + seconds),
    )
    store.records.replace(failure)
    return failure


def is_retryable(error: BaseException) -> bool:
    """True if another attempt may succeed: the cause is the machine, the store or a person.

    Every failure is retryable unless its exception has the attribute `deterministic`.
    """
    return not getattr(error, "deterministic", False)


MAX_OUTCOME_BYTES: Final = 1024**2  # includes the log of a failure


class JobOutcome(Sealed):
    """The outcome of one job. `items` is the digest of the run's job list, `place` the job's index in it, from 0."""

    max_bytes: ClassVar[int] = MAX_OUTCOME_BYTES

    format: Literal["nxpipe.outcome/1"] = "nxpipe.outcome/1"
    items: Digest
    place: Size
    ended: JsonObject

    @property
    def path(self) -> str:
        return outcome_path(self.items, self.place)


def record_outcome(store: Store, items: str, place: int, ended: dict[str, object]) -> None:
    """Store the outcome of a job; a job repeated after the loss of a machine replaces its first outcome."""
    store.records.replace(JobOutcome(items=items, place=place, ended=ended))


def outcomes_of(store: Store, items: str, places: Collection[int]) -> Iterator[JobOutcome]:
    """The stored outcomes of the jobs at `places`: one listing, and one read for each outcome."""
    requested = {outcome_path(items, place) for place in places}
    stored = [path for path in store.backend.paths(run_folder(items)) if path in requested]
    for outcome in store.backend.each(lambda path: store.records.read(JobOutcome, path), stored):
        if outcome is not None:
            yield outcome


KINDS = ("html", "json")


_MOMENT = re.compile(r"\d{8}T\d{6}(\.\d{1,6})?Z")


_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")


def timestamp_of(began_at: str) -> str:
    """A time as a file name, without colons, which some file systems refuse."""
    if not _TIME.fullmatch(began_at):
        raise InvalidDocument(f"{began_at!r} is not a time in UTC such as 2026-01-31T12:00:00.000000Z")
    return began_at.replace("-", "").replace(":", "")


def store_report(store: Store, manifest_digest: str, began_at: str, *, html: bytes, json: bytes) -> None:
    """Store the report of one build beside an artifact; a report of the same build is replaced."""
    if not is_key(manifest_digest):
        raise InvalidDocument(f"{manifest_digest!r} is not the digest of a manifest")
    for kind, data in (("html", html), ("json", json)):
        store.backend.replace(report_path(manifest_digest, timestamp_of(began_at), kind), Payload.of(data))


def report_timestamps(store: Store, manifest_digest: str) -> list[str]:
    """The start times of the builds with a stored report, newest last."""
    names = (path.rpartition("/")[2] for path in store.backend.paths(report_folder(manifest_digest)))
    moments = {moment for moment, dot, kind in (name.rpartition(".") for name in names) if dot and kind in KINDS}
    return sorted(filter(_MOMENT.fullmatch, moments))


def read_report(store: Store, manifest_digest: str, moment: str, kind: str) -> bytes | None:
    chunks = store.backend.read(report_path(manifest_digest, moment, kind))
    return None if chunks is None else b"".join(chunks)
