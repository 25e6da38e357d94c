"""Shared types of plan, scheduler, workers and reports: statuses, failures, jobs, events and the executor protocol.

Jobs and events are sent between processes and machines as JSON. Documents spell a status in words of their own, which
their format version fixes: `nxpipe.items/1`, `nxpipe.plan/1`, `nxpipe.build-report/1`, and the event lines of `nxpipe
build --json`.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum
from typing import Any, Final, Literal, Protocol, Self, TypeAlias

from nxpipe.artifact_store.errors import BadUrl, Changed, Denied, Incomplete, StoreUnavailable, UnsafeBackend
from nxpipe.emulator.errors import LimitExceeded
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.util.errors import AwsError, MissingSoftware, NotEnoughMemory, sentence_of
from nxpipe.pipeline.util.exit_codes import COMPILE, INTERNAL, SYSTEM, exit_code_of
from nxpipe.pipeline.util.process import report_crash
from nxpipe.pipeline.util.text import human_bytes


class CellStatus(Enum):
    """Status of a cell, from plan to report, in the order of a summary. See docs/reference/building.md, section 3."""

    PUBLISHED = "published"  # plan: its artifact is in the store and within [verify]
    COMMITTED = "committed"  # plan: its step results are in the store, its artifact is not
    CACHED = "cached"  # a job found it in the store, or its artifact was published before
    BUILT = "built"  # this build compiled or verified it
    FAILED = "failed"  # failed in this build, or in an earlier one (known failure)
    REFUSED = "refused"  # plan: its specification cannot be resolved, so it has no cache key
    RETRYING = "not retried"  # its last attempt met a retryable failure; another attempt is due
    RUNNING = "running"
    QUEUED = "queued"
    SKIPPED = "not tried"  # the build ended before its job started
    BLOCKED = "blocked"  # built or committed, but other cells of its artifact are missing

    @property
    def in_store(self) -> bool:
        """True if the store holds the cell, so that it is not built."""
        return self in (CellStatus.PUBLISHED, CellStatus.COMMITTED)

    @property
    def is_missing(self) -> bool:
        """True if, at the end of a build, the cell is in no published artifact."""
        return self not in (CellStatus.PUBLISHED, CellStatus.CACHED, CellStatus.BUILT)

    @property
    def progress(self) -> "CellStatus":
        """The status under which a display of progress counts it: cached, built, failed, running or queued."""
        return _PROGRESS.get(self, self)


_PROGRESS: Final = {
    CellStatus.PUBLISHED: CellStatus.CACHED,
    CellStatus.COMMITTED: CellStatus.CACHED,
    CellStatus.REFUSED: CellStatus.FAILED,
    CellStatus.RETRYING: CellStatus.RUNNING,
}
# Plans: `nxpipe.plan/1`, and `before.state` of a report.
PLAN_WORDS: Final[Mapping[CellStatus, str]] = {
    CellStatus.PUBLISHED: "published",
    CellStatus.COMMITTED: "committed",
    CellStatus.QUEUED: "to do",
    CellStatus.FAILED: "failed",
    CellStatus.REFUSED: "refused",
}
# `counts` of an event line, in this order.
EVENT_WORDS: Final[Mapping[CellStatus, str]] = {
    CellStatus.CACHED: "found",
    CellStatus.BUILT: "built",
    CellStatus.FAILED: "failed",
    CellStatus.RUNNING: "running",
    CellStatus.QUEUED: "waiting",
}
# `became` and `counts` of a report (`nxpipe.build-report/1`), in this order.
REPORT_WORDS: Final[Mapping[CellStatus, str]] = {
    CellStatus.CACHED: "found",
    CellStatus.BUILT: "built",
    CellStatus.FAILED: "failed",
    CellStatus.RETRYING: "not retried",
    CellStatus.SKIPPED: "not tried",
    CellStatus.BLOCKED: "waiting",
}
# `fate` of the results that `nxpipe build --json` prints: a blocked cell counts as one that was not tried.
RESULT_WORDS: Final[Mapping[CellStatus, str]] = {**REPORT_WORDS, CellStatus.BLOCKED: "not tried"}


class FailureClass(StrEnum):
    """Class of a failure: it decides what the scheduler does with the job. Values are those of documents. See
    docs/reference/building.md, section 4."""

    DETERMINISTIC = "deterministic"  # the same request fails again: recorded as a known failure, never retried
    RETRYABLE = "environmental"  # a full disk, a network, a killed worker: retried with a growing pause
    LIMIT = "limit"  # --timeout, --memory-limit: not retried, for the limit would be hit again
    HOST = "here"  # a package, credentials, the store: stops the build, for every other job would fail as well


@dataclass(frozen=True)
class Failure:
    """Failure of a job. `kind` is the error's class name, `code` its exit code, `log` the traceback or the end of the
    process's stderr."""

    failure_class: FailureClass
    kind: str
    message: str
    code: int
    log: str = ""

    def document(self) -> dict[str, Any]:
        return {
            "sort": self.failure_class.value,
            "kind": self.kind,
            "message": self.message,
            "code": self.code,
            "log": self.log,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        fields = dict(document)
        return cls(FailureClass(fields.pop("sort")), **fields)


# Errors that would fail every other job as well.
_HOST: Final = (MissingSoftware, AwsError, BadUrl, Denied, UnsafeBackend)
_RETRYABLE: Final = (OSError, MemoryError, StoreUnavailable, Changed, Incomplete, NotEnoughMemory)
# Errors of this machine's state, which may cause errors of a request: no memory, no disk, a missing package.
_MACHINE: Final = (MemoryError, OSError, ImportError)


def failure_from(error: Exception) -> Failure:
    row = exit_code_of(error)
    return Failure(
        failure_class=failure_class_of(error),
        kind=type(error).__qualname__,
        message=" ".join(sentence_of(error).split()) if row else report_crash(error),  # one line: for tables and logs
        code=(row or INTERNAL).number,
        log="".join(traceback.format_exception(error)),
    )


def time_exceeded(title: str, seconds: float, log: str = "") -> Failure:
    text = f"{title}: not finished after {seconds:.0f} s; allow more with --timeout"
    return Failure(FailureClass.LIMIT, "OutOfTime", text, COMPILE.number, log)


def memory_exceeded(title: str, used: int, limit: int, log: str = "") -> Failure:
    text = f"{title}: its worker uses {human_bytes(used)} of memory, more than the limit of {human_bytes(limit)}"
    return Failure(FailureClass.LIMIT, "OutOfMemory", f"{text}; allow more with --memory-limit", SYSTEM.number, log)


def failure_class_of(error: Exception) -> FailureClass:
    """Class of an error; deterministic if unknown, so that only failures known to be transient are retried."""
    if isinstance(error, _HOST):
        return FailureClass.HOST
    if isinstance(error, LimitExceeded):
        return FailureClass.LIMIT
    if isinstance(error, _RETRYABLE) or is_caused_by_machine(error):
        return FailureClass.RETRYABLE
    return FailureClass.DETERMINISTIC


def is_caused_by_machine(error: BaseException) -> bool:
    """True if an error of this machine's state is anywhere in the chain of causes."""
    return any(isinstance(cause, _MACHINE) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


@dataclass(frozen=True)
class Job:
    """A cell to build, or an artifact to publish (`shape` is None). `key` is the cache key of its result, `work` its
    size relative to other jobs (the largest starts first), `memory` an estimate in bytes."""

    key: str
    title: str
    spec: ModelSpec
    shape: Shape | None
    store: str
    thresholds: Thresholds
    force: bool
    work: float
    memory: int
    kms_key: str | None = None  # the store's encryption key

    @property
    def kind(self) -> Literal["cell", "artifact"]:
        return "cell" if self.shape else "artifact"

    def document(self) -> dict[str, Any]:
        fields = asdict(self) | {"spec": self.spec.document()}
        return {"asked" if name == "spec" else name: value for name, value in fields.items()}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Job":
        fields = dict(document)
        spec, shape = ModelSpec.from_document(fields.pop("asked")), fields.pop("shape")
        return cls(
            spec=spec,
            shape=None if shape is None else Shape(**shape),
            thresholds=Thresholds(**fields.pop("thresholds")),
            **fields,
        )


@dataclass(frozen=True)
class JobSubmitted:
    """An attempt was handed to the executor. Internal to the scheduler: neither executors nor documents have it."""

    key: str


@dataclass(frozen=True)
class JobStarted:
    key: str
    worker: str


@dataclass(frozen=True)
class JobLog:
    """The title of a step that began, or a line of the log."""

    key: str
    text: str


@dataclass(frozen=True)
class JobFinished:
    """`cached`: a cache hit in the worker, nothing was built. `memory` is the peak in bytes."""

    key: str
    seconds: float
    cached: bool = False
    memory: int = 0
    failure: Failure | None = None


@dataclass(frozen=True)
class JobRetry:
    """An attempt ended in a retryable failure, and another one is due. Emitted by the scheduler; in documents it is a
    log line with `text`."""

    key: str
    text: str
    attempt: JobFinished


Event: TypeAlias = JobStarted | JobLog | JobFinished  # sent by an executor
BuildEvent: TypeAlias = Event | JobRetry  # seen by the observers of a build


def to_document(event: BuildEvent) -> dict[str, Any]:
    match event:
        case JobStarted():
            return {"event": "begun", "key": event.key, "worker": event.worker}
        case JobLog() | JobRetry():
            return {"event": "said", "key": event.key, "text": event.text}
        case JobFinished():
            return {
                "event": "ended",
                "key": event.key,
                "seconds": event.seconds,
                "cached": event.cached,
                "memory": event.memory,
                "fault": event.failure.document() if event.failure else None,
            }


def from_document(document: Mapping[str, Any]) -> Event:
    fields = dict(document)
    match fields.pop("event"):
        case "begun":
            return JobStarted(**fields)
        case "said":
            return JobLog(**fields)
        case "ended":
            failure = fields.pop("fault", None)
            return JobFinished(**fields, failure=None if failure is None else Failure.from_document(failure))
        case kind:
            raise ValueError(f"unknown job event {kind!r}")


@dataclass(frozen=True)
class JobLimits:
    """Limits of each job; None: no limit."""

    seconds: float | None = None
    memory: int | None = None  # bytes


class Executor(Protocol):
    """Every job that was started ends in exactly one `JobFinished`, also when its process or machine is lost."""

    @property
    def name(self) -> str:
        """The value of `--executor`."""
        ...

    def takes(self, job: Job) -> bool:
        """True if the job would start now; after False the scheduler tries again when a job has finished."""
        ...

    def start(self, job: Job) -> None: ...

    def events(self, patience: float) -> Sequence[Event]:
        """Events since the last call; with none, wait for the next one, at most `patience` seconds."""
        ...

    def close(self) -> None:
        """Stop all running jobs at once. What they have committed stays."""
        ...


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build, None where `[build]` of nxpipe.toml decides.

    `timeout`: seconds of one job. `memory_limit`: bytes of one job. `address` is that of a Ray cluster.
    """

    force: bool = False
    keep_going: bool = False
    retries: int = 2
    executor: str | None = None
    address: str | None = None
    jobs: int | None = None
    timeout: float | None = None
    memory_limit: int | None = None
