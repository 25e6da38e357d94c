"""Executor on AWS Batch: array jobs for the jobs of a build, and the outcomes of their children."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nxpipe.pipeline.artifacts.store_url import VARIABLE
from nxpipe.pipeline.build.executors.batch_worker import put_jobs, require_remote_sources
from nxpipe.pipeline.build.jobs import (
    Event,
    Failure,
    FailureClass,
    Job,
    JobFinished,
    JobLimits,
    JobLog,
    JobStarted,
    from_document,
)
from nxpipe.pipeline.util.aws import client, convert_sdk_errors, is_transient
from nxpipe.pipeline.util.errors import AwsError, BuildRefused
from nxpipe.pipeline.util.exit_codes import AWS, SYSTEM

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.documents import Blob


JobDescription: TypeAlias = Mapping[str, Any]  # an element of DescribeJobs or ListJobs

_DESCRIBED: Final = 100  # jobs in one request
_PAGE: Final = 1000
ENDED: Final = ("SUCCEEDED", "FAILED")


@dataclass
class ArrayJob:
    """A submitted array job. `keys` are the cache keys of its jobs by index. The sets hold indices of children: `open`
    without an outcome, `begun` started, `failed` failed. `counts` are children by status at the last poll. Times are of
    the scheduler's clock."""

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
        """The child's id in Batch."""
        return self.id if self.single else f"{self.id}:{place}"


def describe(batch: Any, ids: Sequence[str]) -> dict[str, JobDescription]:
    """Descriptions by job id, without jobs that Batch no longer knows."""
    jobs: list[JobDescription] = []
    with convert_sdk_errors("describe the jobs of the build"):
        for at in range(0, len(ids), _DESCRIBED):
            jobs += batch.describe_jobs(jobs=list(ids[at : at + _DESCRIBED]))["jobs"]
    return {job["jobId"]: job for job in jobs}


def counts_of(array: ArrayJob, job: JobDescription) -> dict[str, int]:
    """Children by status; a single job is its own child. An array may fail before it has children."""
    if array.single:
        return {job["status"]: 1}
    by_status = job.get("arrayProperties", {}).get("statusSummary", {})
    return {status: count for status, count in by_status.items() if count}


def children(batch: Any, array: ArrayJob, job: JobDescription, status: str) -> Iterator[tuple[int, JobDescription]]:
    """Children in one status by index, read a page at a time as the caller iterates."""
    if array.single:
        if job["status"] == status:
            yield 0, job
        return
    token: dict[str, str] = {}
    while True:
        with convert_sdk_errors("list the children of an array job"):
            page = batch.list_jobs(arrayJobId=array.id, jobStatus=status, maxResults=_PAGE, **token)
        for child in page["jobSummaryList"]:
            yield child["arrayProperties"]["index"], child
        if not page.get("nextToken"):
            return
        token = {"nextToken": page["nextToken"]}


# Prefixes of the reasons that Batch and ECS give.
_OUT_OF_MEMORY: Final = "OutOfMemory"
_TOO_LONG: Final = "Job attempt duration exceeded timeout"
_LIMITS: Final = {"OutOfMemory": "--memory-limit", "OutOfTime": "--timeout"}  # the option that allows more


def failure_from_job(job: JobDescription) -> Failure:
    """Failure of a child without an outcome, from its description or, if Batch does not list it, from its array's."""
    container = job.get("container", {})
    status, reason = job.get("statusReason", ""), container.get("reason", "")
    kind = _kind(status, reason)
    reasons = dict.fromkeys(text.rstrip(".") for text in (reason, status) if text)
    explanation = ", ".join(reasons) or "AWS Batch gives no reason"
    code = container.get("exitCode")
    message = f"job {job['jobId']} of the build farm ended without an outcome" + (
        "" if code is None else f" and with exit code {code}"
    )
    stream = container.get("logStreamName")
    log_hint = f"; read its log stream {stream}" if stream else ""
    if kind in _LIMITS:
        return Failure(
            FailureClass.LIMIT,
            kind,
            f"{message}: {explanation}{log_hint}; allow more with {_LIMITS[kind]}.",
            SYSTEM.number,
        )
    return Failure(FailureClass.RETRYABLE, kind, f"{message}: {explanation}{log_hint}.", AWS.number)


def lost_job(job: str) -> Failure:
    """Failure of a job that Batch no longer knows, which it keeps for at least a day after its end."""
    message = f"job {job} of the build farm left no outcome, and AWS Batch no longer knows it."
    return Failure(FailureClass.RETRYABLE, "JobForgotten", message, AWS.number)


def is_retryable(error: Exception) -> bool:
    from nxpipe.artifact_store.errors import Denied, StoreUnavailable

    if isinstance(error, StoreUnavailable):
        return not isinstance(error, Denied)
    return isinstance(error, AwsError) and is_transient(error)


def _kind(status: str, reason: str) -> str:
    if reason.startswith(_OUT_OF_MEMORY):
        return "OutOfMemory"
    return "OutOfTime" if status.startswith(_TOO_LONG) else "JobFailed"


PROJECT_TAG: Final = "nxpipe:project"  # IAM permits the submitter to terminate jobs with this tag
_MIB: Final = 1024**2
_MIB_A_VCPU: Final = 7500  # of the farm's instances, less what ECS reserves


@dataclass(frozen=True)
class JobSize:
    """Resources of a Batch job."""

    vcpus: int
    memory: int  # MiB


@dataclass(frozen=True)
class BuildFarm:
    """The deployed build farm. `definition` is the ARN of one revision; `store` the URL its jobs publish to, `size`
    their default resources."""

    batch: Any
    project: str
    queue: str
    definition: str
    store: str
    size: JobSize

    def size_for(self, job: Job, limits: JobLimits) -> JobSize:
        """At least the definition's size, doubled until the job fits, as instance sizes double: jobs of similar size
        share an array."""
        if limits.memory is not None:
            memory = math.ceil(limits.memory / _MIB)
        else:
            times = max(1.0, job.memory / _MIB / self.size.memory)
            memory = self.size.memory * 2 ** math.ceil(math.log2(times))
        return JobSize(max(self.size.vcpus, math.ceil(memory / _MIB_A_VCPU)), memory)


def find_farm(project: str, region: str | None) -> BuildFarm:
    """Find the deployed stack of `[farm]` in AWS, with the credentials of the AWS SDK."""
    batch = client("batch", region, retries="adaptive")
    queue, job = f"{project}-builds", f"{project}-build"
    with convert_sdk_errors("find the build farm"):
        queues = batch.describe_job_queues(jobQueues=[queue])["jobQueues"]
        jobs = batch.describe_job_definitions(jobDefinitionName=job, status="ACTIVE")["jobDefinitions"]
    for kind, name, matches in (("job queue", queue, queues), ("job definition", job, jobs)):
        if not matches:
            raise AwsError(
                f"AWS Batch has no {kind} {name} in {batch.meta.region_name}; describe `[farm]` in nxpipe.toml and run "
                f"`npx cdk deploy {project}-build-farm`, or name the region of the farm"
            )
    if queues[0]["state"] != "ENABLED":
        raise AwsError(f"the job queue {queue} in {batch.meta.region_name} is disabled; enable it to submit jobs")
    newest = max(jobs, key=lambda definition: definition["revision"])
    container = newest["containerProperties"]
    environment = {variable["name"]: variable["value"] for variable in container.get("environment", ())}
    resources = {resource["type"]: int(resource["value"]) for resource in container.get("resourceRequirements", ())}
    return BuildFarm(
        batch=batch,
        project=project,
        queue=queues[0]["jobQueueArn"],
        definition=newest["jobDefinitionArn"],
        store=environment.get(VARIABLE, ""),
        size=JobSize(resources["VCPU"], resources["MEMORY"]),
    )


LARGEST_ARRAY: Final = 10_000
_SHORTEST: Final = 60  # seconds: the shortest timeout of a Batch job
_REFRESH: Final = (
    3600.0  # seconds after which a list is marked as in use: children may wait longer than gc's grace period
)


@dataclass(frozen=True)
class PollIntervals:
    """Intervals in seconds. `poll`: between two polls. `waiting`: until the log explains why jobs wait. `silence`:
    without an answer of AWS or the store, until the build fails."""

    poll: float = 10.0
    waiting: float = 300.0
    silence: float = 900.0


DEFAULT_INTERVALS: Final = PollIntervals()


class BatchExecutor:
    name: Final = "batch"

    def __init__(
        self, store: "Store", farm: BuildFarm, limits: JobLimits, intervals: PollIntervals = DEFAULT_INTERVALS
    ) -> None:
        _require_one_store(store.url, farm)
        self._store = store
        self._farm = farm
        self._limits = limits
        self._intervals = intervals
        self._buffer: list[Job] = []
        self._arrays: list[ArrayJob] = []
        self._polled_at = -math.inf
        self._answered_at = time.monotonic()
        self._silent = False

    def takes(self, job: Job) -> bool:
        return len(self._buffer) < LARGEST_ARRAY

    def start(self, job: Job) -> None:
        require_remote_sources(job.spec)
        self._buffer.append(job)
        self._polled_at = -math.inf  # submitted at the next call of `events`

    def events(self, patience: float) -> Sequence[Event]:
        until = time.monotonic() + patience
        while True:
            due = self._polled_at + self._intervals.poll
            time.sleep(max(0.0, min(due, until) - time.monotonic()))
            if time.monotonic() >= due:
                self._polled_at = time.monotonic()
                if events := self._poll():
                    return events
            if time.monotonic() >= until:
                return ()

    def close(self) -> None:
        """Terminate the arrays, and with them their children. The error names jobs that could not be terminated."""
        self._buffer.clear()
        not_terminated: dict[str, AwsError] = {}
        while self._arrays:
            job = self._arrays.pop().id
            try:
                with convert_sdk_errors(f"terminate job {job}"):
                    self._farm.batch.terminate_job(jobId=job, reason="The build that submitted it has ended.")
            except AwsError as error:
                not_terminated[job] = error
        if not_terminated:
            raise AwsError(
                f"{len(not_terminated)} jobs of the build farm could not be terminated and may still run "
                f"({', '.join(not_terminated)}): {next(iter(not_terminated.values()))}"
            )

    def _poll(self) -> list[Event]:
        """Events since the last poll. Those before an error are returned first; a retryable error does not end the
        build until `silence` has passed."""
        events: list[Event] = []
        try:
            self._submit()
            for event in self._read():
                events.append(event)
            self._answered_at, self._silent = time.monotonic(), False
        except Exception as error:
            is_lasting = time.monotonic() - self._answered_at > self._intervals.silence
            if not events and (is_lasting or not is_retryable(error)):
                raise
            if not self._silent and is_retryable(error):
                self._silent = True
                events += [JobLog(key, f"polling again later: {error}") for key in self._keys()[:1]]
        return events

    def _keys(self) -> list[str]:
        waiting = [job.key for job in self._buffer]
        return waiting + [array.keys[place] for array in self._arrays for place in array.open]

    def _submit(self) -> None:
        """Submit one array for all jobs of one size, so that a large model does not enlarge all jobs."""
        while self._buffer:
            sizes = {job.key: self._farm.size_for(job, self._limits) for job in self._buffer}
            size = sizes[self._buffer[0].key]
            jobs = [job for job in self._buffer if sizes[job.key] == size][:LARGEST_ARRAY]
            self._arrays.append(self._submit_array(jobs, size))
            submitted = {job.key for job in jobs}
            self._buffer = [job for job in self._buffer if job.key not in submitted]

    def _submit_array(self, jobs: Sequence[Job], size: JobSize) -> ArrayJob:
        blob = put_jobs(self._store, jobs)
        options: dict[str, Any] = {}
        if len(jobs) > 1:
            options["arrayProperties"] = {"size": len(jobs)}
        if self._limits.seconds is not None:
            options["timeout"] = {"attemptDurationSeconds": max(_SHORTEST, math.ceil(self._limits.seconds))}
        with convert_sdk_errors(f"submit {len(jobs)} jobs to {self._farm.queue}"):
            answer = self._farm.batch.submit_job(
                jobName=f"{self._farm.project}-build-{blob.sha256[:12]}",
                jobQueue=self._farm.queue,
                jobDefinition=self._farm.definition,
                containerOverrides={
                    "command": ["nxpipe", "worker", "--items", blob.sha256],
                    "resourceRequirements": [
                        {"type": "VCPU", "value": str(size.vcpus)},
                        {"type": "MEMORY", "value": str(size.memory)},
                    ],
                },
                tags={PROJECT_TAG: self._farm.project},
                **options,
            )
        return ArrayJob(answer["jobId"], blob, [job.key for job in jobs], time.monotonic())

    def _read(self) -> Iterator[Event]:
        described = describe(self._farm.batch, [array.id for array in self._arrays])
        for array in self._arrays:
            if array.id in described:
                yield from self._events_of(array, described[array.id])
            else:
                yield from (self._end(array, place, lost_job(array.id)) for place in sorted(array.open))
            self._refresh_list(array)
        self._arrays = [array for array in self._arrays if array.open]

    def _events_of(self, array: ArrayJob, job: JobDescription) -> Iterator[Event]:
        """Events of one array. Batch is read before the store, which has the outcome of an ended child by then."""
        counts = counts_of(array, job)
        if counts != array.counts and counts.get("RUNNING"):
            for place, _ in children(self._farm.batch, array, job, "RUNNING"):
                yield from self._start(array, place)
        array.counts = counts
        self._note_failed(array, job, counts)
        if sum(counts.get(status, 0) for status in ENDED) > len(array.keys) - len(array.open):
            yield from self._outcomes(array)
        yield from self._without_outcome(array, array.failed & array.open)
        if job["status"] in ENDED and len(array.failed) >= counts.get("FAILED", 0):
            yield from (self._end(array, place, failure_from_job(job)) for place in sorted(array.open))
        yield from self._log_waiting(array, job, counts)

    def _start(self, array: ArrayJob, place: int) -> Iterator[Event]:
        if place not in array.begun:
            array.begun.add(place)
            yield JobStarted(array.keys[place], array.child(place))

    def _note_failed(self, array: ArrayJob, job: JobDescription, counts: Mapping[str, int]) -> None:
        """Record failed children; no more pages are read than needed to find the new ones."""
        if len(array.failed) < counts.get("FAILED", 0):
            for place, _ in children(self._farm.batch, array, job, "FAILED"):
                array.failed.add(place)
                if len(array.failed) == counts["FAILED"]:
                    break

    def _outcomes(self, array: ArrayJob) -> Iterator[Event]:
        from nxpipe.artifact_store.builds import outcomes_of

        for outcome in outcomes_of(self._store, array.items.sha256, array.open):
            event = from_document(outcome.ended)
            if isinstance(event, JobFinished):
                yield from self._start(array, outcome.place)
                array.open.discard(outcome.place)
                yield event

    def _without_outcome(self, array: ArrayJob, places: set[int]) -> Iterator[Event]:
        described = describe(self._farm.batch, [array.child(place) for place in sorted(places)])
        for place in sorted(places):
            child = described.get(array.child(place))
            yield self._end(array, place, failure_from_job(child) if child else lost_job(array.child(place)))

    def _end(self, array: ArrayJob, place: int, failure: Failure) -> JobFinished:
        array.open.discard(place)
        return JobFinished(array.keys[place], seconds=0.0, failure=failure)

    def _log_waiting(self, array: ArrayJob, job: JobDescription, counts: Mapping[str, int]) -> Iterator[JobLog]:
        """Log once why an array waits: missing capacity is no failure, but a person may want to end the build."""
        if not counts.get("RUNNABLE") or counts.get("STARTING") or counts.get("RUNNING"):
            array.waits_since = None
            return
        if array.waits_since is None:
            array.waits_since = time.monotonic()
        if time.monotonic() - array.waits_since >= self._intervals.waiting:
            array.waits_since = math.inf  # logged
            for place, child in children(self._farm.batch, array, job, "RUNNABLE"):
                explanation = child.get("statusReason") or "AWS Batch has no machine for it yet"
                yield JobLog(array.keys[place], f"job {array.id} waits for a machine: {explanation}")
                break

    def _refresh_list(self, array: ArrayJob) -> None:
        if array.open and time.monotonic() - array.kept_at > _REFRESH:
            self._store.blobs.is_kept(array.items)
            array.kept_at = time.monotonic()


def _require_one_store(url: str, farm: BuildFarm) -> None:
    """Raise BuildRefused unless the build uses the farm's store, where the scheduler finds results and outcomes."""
    if not url.startswith("s3://"):
        raise BuildRefused(
            f"the build farm cannot reach {url}, a folder of this machine; pass --store "
            f"{farm.store or 's3://BUCKET/PREFIX'}"
        )
    if url.rstrip("/") != farm.store.rstrip("/"):
        raise BuildRefused(
            f"the build farm publishes to {farm.store or 'no store'}, this build to {url}; pass --store "
            f"{farm.store}, or deploy the farm of the project that has {url}"
        )
