"""One submitted job, an array or a single one: what Batch says of its children, in few requests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nxpipe.pipeline.build.status import Failure, FailureClass
from nxpipe.pipeline.util.aws import asking, is_no_answer
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.pipeline.util.exit_codes import AWS, SYSTEM

if TYPE_CHECKING:
    from nxpipe.artifact_store.documents import Blob


JobDescription: TypeAlias = Mapping[str, Any]  # a job, as Batch describes it

_DESCRIBED: Final = 100  # jobs a request
_PAGE: Final = 1000
ENDED: Final = ("SUCCEEDED", "FAILED")


@dataclass
class ArrayJob:
    """`keys` are those of its items; the sets hold places in it: of children that have begun, that have failed, and
    that have not been told the end of. `counts` are those of the last look, by status; times are the driver's.
    """

    id: str
    items: "Blob"
    keys: Sequence[str]
    kept_at: float
    open: set[int] = field(init=False)
    begun: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    counts: Mapping[str, int] = field(default_factory=dict)
    waits_since: float | None = None

    def __post_init__(self) -> None:
        self.open = set(range(len(self.keys)))

    @property
    def single(self) -> bool:
        return len(self.keys) == 1

    def child(self, place: int) -> str:
        """Its job's id."""
        return self.id if self.single else f"{self.id}:{place}"


def describe(batch: Any, ids: Sequence[str]) -> dict[str, JobDescription]:
    """By id; of a job that Batch has forgotten, nothing."""
    told: list[JobDescription] = []
    with asking("describe the jobs of the build"):
        for at in range(0, len(ids), _DESCRIBED):
            told += batch.describe_jobs(jobs=list(ids[at : at + _DESCRIBED]))["jobs"]
    return {one["jobId"]: one for one in told}


def counts_of(array: ArrayJob, told: JobDescription) -> dict[str, int]:
    """How many children are in which status; a single job is its own child. An array may fail before it has any."""
    if array.single:
        return {told["status"]: 1}
    summary = told.get("arrayProperties", {}).get("statusSummary", {})
    return {status: count for status, count in summary.items() if count}


def children(batch: Any, array: ArrayJob, told: JobDescription, status: str) -> Iterator[tuple[int, JobDescription]]:
    """Those in one status by their places, a page at a time: whoever has found enough asks for no more."""
    if array.single:
        if told["status"] == status:
            yield 0, told
        return
    more: dict[str, str] = {}
    while True:
        with asking("list the children of an array job"):
            page = batch.list_jobs(arrayJobId=array.id, jobStatus=status, maxResults=_PAGE, **more)
        for one in page["jobSummaryList"]:
            yield one["arrayProperties"]["index"], one
        if not page.get("nextToken"):
            return
        more = {"nextToken": page["nextToken"]}


# How Batch and ECS begin these reasons.
_OUT_OF_MEMORY: Final = "OutOfMemory"
_TOO_LONG: Final = "Job attempt duration exceeded timeout"
_LIMITS: Final = {"OutOfMemory": "--memory-limit", "OutOfTime": "--timeout"}  # by kind, what allows more


def failure_from_job(told: JobDescription) -> Failure:
    """Of a child that Batch does not list, its array may be told, of which less is known."""
    container = told.get("container", {})
    status, reason = told.get("statusReason", ""), container.get("reason", "")
    kind = _kind(status, reason)
    reasons = dict.fromkeys(each.rstrip(".") for each in (reason, status) if each)
    said = ", ".join(reasons) or "no reason is given"
    code = container.get("exitCode")
    ended = f"job {told['jobId']} of the build farm ended without an outcome" + (
        "" if code is None else f" and with exit code {code}"
    )
    stream = container.get("logStreamName")
    where = f"; its log is the stream {stream}" if stream else ""
    if kind in _LIMITS:
        return Failure(
            FailureClass.LIMIT, kind, f"{ended}: {said}{where}; allow more with {_LIMITS[kind]}.", SYSTEM.number
        )
    return Failure(FailureClass.RETRYABLE, kind, f"{ended}: {said}{where}.", AWS.number)


def lost_job(job: str) -> Failure:
    """Batch keeps a job for a day after its end, or more."""
    message = f"job {job} of the build farm left no outcome, and AWS Batch does not know it any more."
    return Failure(FailureClass.RETRYABLE, "JobForgotten", message, AWS.number)


def is_retryable(error: Exception) -> bool:
    from nxpipe.artifact_store.errors import Denied, StoreUnavailable

    if isinstance(error, StoreUnavailable):
        return not isinstance(error, Denied)
    return isinstance(error, AwsError) and is_no_answer(error)


def _kind(status: str, reason: str) -> str:
    if reason.startswith(_OUT_OF_MEMORY):
        return "OutOfMemory"
    return "OutOfTime" if status.startswith(_TOO_LONG) else "JobFailed"
