"""Statuses, failures, jobs, events and the protocol of executors: what plan, scheduler, workers and reports share.

`CellStatus` and `FailureClass` are the one enumeration of each. Jobs and events cross processes and machines as JSON.
Documents have words of their own for a status, fixed by their format version: `nxpipe.items/1`, `nxpipe.plan/1`,
`nxpipe.build-report/1`, and the event lines of `nxpipe build --json`.
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
    """From plan to report, in the order in which a summary lists them. docs/building.md, section 3."""

    PUBLISHED = "published"  # plan: its artifact is in the store and within [verify]
    COMMITTED = "committed"  # plan: its step results are in the store, its artifact is not
    CACHED = "cached"  # a job found it in the store, or its artifact was published before
    BUILT = "built"  # this build compiled or verified it
    FAILED = "failed"  # given up, now or by an earlier build (known failure)
    REFUSED = "refused"  # plan: no request can be made of it, so it has no key
    RETRYING = "not retried"  # its last attempt met a retryable failure; another attempt is due
    RUNNING = "running"
    QUEUED = "queued"
    SKIPPED = "not tried"  # the build ended before its job started
    BLOCKED = "blocked"  # built or committed, but other cells of its artifact are missing

    @property
    def in_store(self) -> bool:
        """A plan need not build it."""
        return self in (CellStatus.PUBLISHED, CellStatus.COMMITTED)

    @property
    def is_missing(self) -> bool:
        """At the end of a build: it is in no published artifact."""
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
    """What the scheduler does with a failed job. Values are those of documents. docs/building.md, section 4."""

    DETERMINISTIC = "deterministic"  # the same request fails again: recorded as a known failure, never retried
    RETRYABLE = "environmental"  # a full disk, a network, a killed worker: retried with a growing pause
    LIMIT = "limit"  # --timeout, --memory-limit: not retried, for the limit would be hit again
    HOST = "here"  # a package, credentials, the store: stops the build, for every other job would fail as well


@dataclass(frozen=True)
class Failure:
    """Why a job failed. `kind` is the error's class, `code` its number in the table of exit codes, `log` the traceback
    or the end of a process's stderr."""

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


# Every other job would fail as well.
_HOST: Final = (MissingSoftware, AwsError, BadUrl, Denied, UnsafeBackend)
_RETRYABLE: Final = (OSError, MemoryError, StoreUnavailable, Changed, Incomplete, NotEnoughMemory)
# The state of this machine may be the cause of an error of the request: no memory, no disk, a missing package.
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
    """An error of an unknown class is deterministic: only what is known to pass is retried."""
    if isinstance(error, _HOST):
        return FailureClass.HOST
    if isinstance(error, LimitExceeded):
        return FailureClass.LIMIT
    if isinstance(error, _RETRYABLE) or is_caused_by_machine(error):
        return FailureClass.RETRYABLE
    return FailureClass.DETERMINISTIC


def is_caused_by_machine(error: BaseException) -> bool:
    """The state of this machine is in the chain of causes, however deep it was wrapped."""
    return any(isinstance(cause, _MACHINE) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


@dataclass(frozen=True)
class Job:
    """A cell to build, or an artifact to publish (`shape` is None). `key` is the cache key of its result, `work` its
    size relative to others (the largest goes first), `memory` an estimate in bytes."""

    key: str
    title: str
    asked: ModelSpec
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
        return asdict(self) | {"asked": self.asked.document()}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Job":
        shape = document["shape"]
        return cls(
            **dict(document)
            | {
                "asked": ModelSpec.from_document(document["asked"]),
                "shape": None if shape is None else Shape(**shape),
                "thresholds": Thresholds(**document["thresholds"]),
            }
        )


@dataclass(frozen=True)
class JobSubmitted:
    """An attempt was handed to the executor. Of the scheduler alone: no executor sends it, no document has it."""

    key: str


@dataclass(frozen=True)
class JobStarted:
    key: str
    worker: str


@dataclass(frozen=True)
class JobLog:
    """A step that began, or a line of the log."""

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
    """An attempt ended in a retryable failure, and another one is due. Of the scheduler; in documents it is a log
    line with `text`."""

    key: str
    text: str
    attempt: JobFinished


Event: TypeAlias = JobStarted | JobLog | JobFinished  # of an executor
BuildEvent: TypeAlias = Event | JobRetry  # of a build, as its observers see it


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
            raise ValueError(f"{kind!r} is no event of a job")


@dataclass(frozen=True)
class JobLimits:
    """Of each job; None: no limit."""

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
