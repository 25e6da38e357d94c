"""Jobs of AWS Batch: an array job and its children, read in few requests, and the failure of a child without an
outcome."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nxpipe.pipeline.build.jobs import Failure, FailureClass
from nxpipe.pipeline.util.aws import asking, is_no_answer
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.pipeline.util.exit_codes import AWS, SYSTEM

if TYPE_CHECKING:
    from nxpipe.artifact_store.documents import Blob


JobDescription: TypeAlias = Mapping[str, Any]  # an element of DescribeJobs or ListJobs

_DESCRIBED: Final = 100  # jobs in one request
_PAGE: Final = 1000
ENDED: Final = ("SUCCEEDED", "FAILED")


@dataclass
class ArrayJob:
    """`keys` are those of its jobs. The sets hold indices: of children that have started, that have failed, and whose
    end is open. `counts` by status are those of the last poll; times are of the scheduler's clock."""

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
        """Its id in Batch."""
        return self.id if self.single else f"{self.id}:{place}"


def describe(batch: Any, ids: Sequence[str]) -> dict[str, JobDescription]:
    """By id, without jobs that Batch no longer knows."""
    found: list[JobDescription] = []
    with asking("describe the jobs of the build"):
        for at in range(0, len(ids), _DESCRIBED):
            found += batch.describe_jobs(jobs=list(ids[at : at + _DESCRIBED]))["jobs"]
    return {one["jobId"]: one for one in found}


def counts_of(array: ArrayJob, job: JobDescription) -> dict[str, int]:
    """Children by status; a single job is its own child. An array may fail before it has children."""
    if array.single:
        return {job["status"]: 1}
    summary = job.get("arrayProperties", {}).get("statusSummary", {})
    return {status: count for status, count in summary.items() if count}


def children(batch: Any, array: ArrayJob, job: JobDescription, status: str) -> Iterator[tuple[int, JobDescription]]:
    """Children in one status by index, read a page at a time as the caller iterates."""
    if array.single:
        if job["status"] == status:
            yield 0, job
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


# Prefixes of reasons of Batch and ECS.
_OUT_OF_MEMORY: Final = "OutOfMemory"
_TOO_LONG: Final = "Job attempt duration exceeded timeout"
_LIMITS: Final = {"OutOfMemory": "--memory-limit", "OutOfTime": "--timeout"}  # the option that allows more


def failure_from_job(job: JobDescription) -> Failure:
    """From a child, or from its array if Batch does not list the child."""
    container = job.get("container", {})
    status, reason = job.get("statusReason", ""), container.get("reason", "")
    kind = _kind(status, reason)
    reasons = dict.fromkeys(each.rstrip(".") for each in (reason, status) if each)
    why = ", ".join(reasons) or "AWS Batch gives no reason"
    code = container.get("exitCode")
    ended = f"job {job['jobId']} of the build farm ended without an outcome" + (
        "" if code is None else f" and with exit code {code}"
    )
    stream = container.get("logStreamName")
    where = f"; read its log stream {stream}" if stream else ""
    if kind in _LIMITS:
        return Failure(
            FailureClass.LIMIT, kind, f"{ended}: {why}{where}; allow more with {_LIMITS[kind]}.", SYSTEM.number
        )
    return Failure(FailureClass.RETRYABLE, kind, f"{ended}: {why}{where}.", AWS.number)


def lost_job(job: str) -> Failure:
    """Batch keeps a job for at least a day after its end."""
    message = f"job {job} of the build farm left no outcome, and AWS Batch no longer knows it."
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
