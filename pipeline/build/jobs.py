"""Jobs, their events and the protocol of executors: the contract between the scheduler and all that runs jobs.

Jobs and events cross processes and machines as JSON. The names in their documents are fixed by `nxpipe.items/1` and by
the event lines of `nxpipe build --json`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeAlias

from nxpipe.pipeline.build.status import Failure
from nxpipe.pipeline.models.shapes import Shape
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.thresholds import Thresholds


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
