"""Batch executor: jobs are children of array jobs in the queue of the build farm's stack (`stacks/build_farm.py`).

The store is the only meeting place: the list of jobs is a blob there, and each child writes its outcome there
(`batch_worker.py`). The arrays of a scheduler that dies go on. They commit their results, which the next plan finds; if
that one submits a cell that is still being built, the lease on the cell's key keeps the two apart.

Batch itself retries a child whose machine was taken away, for only Batch knows of that. All other failures are for the
scheduler to judge: a worker exits with the code of its job's failure, which Batch does not retry.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.artifacts.store_url import VARIABLE
from nxpipe.pipeline.build.executors.batch_jobs import (
    ENDED,
    ArrayJob,
    JobDescription,
    children,
    counts_of,
    describe,
    failure_from_job,
    is_retryable,
    lost_job,
)
from nxpipe.pipeline.build.executors.batch_worker import put_jobs, require_remote_sources
from nxpipe.pipeline.build.jobs import Event, Failure, Job, JobFinished, JobLimits, JobLog, JobStarted, from_document
from nxpipe.pipeline.util.aws import asking, client
from nxpipe.pipeline.util.errors import AwsError, BuildRefused

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store


PROJECT_TAG: Final = "nxpipe:project"  # permits its submitter to terminate a job
_MIB: Final = 1024**2
_MIB_A_VCPU: Final = 7500  # of the farm's instances, less what ECS reserves


@dataclass(frozen=True)
class JobSize:
    """Resources of a Batch job."""

    vcpus: int
    memory: int  # MiB


@dataclass(frozen=True)
class BuildFarm:
    """`definition` is the ARN of one revision; `store` the URL its jobs publish to, `size` its default resources."""

    batch: Any
    project: str
    queue: str
    definition: str
    store: str
    size: JobSize

    def size_for(self, job: Job, limits: JobLimits) -> JobSize:
        """At least the definition's size, doubled until the job fits, as instances double: jobs of similar size are one
        array."""
        if limits.memory is not None:
            memory = math.ceil(limits.memory / _MIB)
        else:
            times = max(1.0, job.memory / _MIB / self.size.memory)
            memory = self.size.memory * 2 ** math.ceil(math.log2(times))
        return JobSize(max(self.size.vcpus, math.ceil(memory / _MIB_A_VCPU)), memory)


def find_farm(project: str, region: str | None) -> BuildFarm:
    """The deployed stack of `[farm]`, from AWS; credentials are those of the AWS SDK."""
    batch = client("batch", region, retries="adaptive")
    queue, job = f"{project}-builds", f"{project}-build"
    with asking("find the build farm"):
        queues = batch.describe_job_queues(jobQueues=[queue])["jobQueues"]
        jobs = batch.describe_job_definitions(jobDefinitionName=job, status="ACTIVE")["jobDefinitions"]
    for what, name, found in (("job queue", queue, queues), ("job definition", job, jobs)):
        if not found:
            raise AwsError(
                f"AWS Batch has no {what} {name} in {batch.meta.region_name}; describe `[farm]` in nxpipe.toml and run "
                f"`npx cdk deploy {project}-build-farm`, or name the region that it is in"
            )
    if queues[0]["state"] != "ENABLED":
        raise AwsError(f"the job queue {queue} in {batch.meta.region_name} is disabled; enable it to submit jobs")
    newest = max(jobs, key=lambda one: one["revision"])
    container = newest["containerProperties"]
    environment = {one["name"]: one["value"] for one in container.get("environment", ())}
    resources = {one["type"]: int(one["value"]) for one in container.get("resourceRequirements", ())}
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
_REFRESH: Final = 3600.0  # seconds after which a list is marked as in use: children may wait longer than gc's grace


@dataclass(frozen=True)
class PollIntervals:
    """Seconds: between two polls; until the log says why jobs wait; for which AWS or the store may not answer."""

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
        require_remote_sources(job.asked)
        self._buffer.append(job)
        self._polled_at = -math.inf  # submitted at the next call of `events`

    def events(self, patience: float) -> Sequence[Event]:
        until = time.monotonic() + patience
        while True:
            due = self._polled_at + self._intervals.poll
            time.sleep(max(0.0, min(due, until) - time.monotonic()))
            if time.monotonic() >= due:
                self._polled_at = time.monotonic()
                if found := self._poll():
                    return found
            if time.monotonic() >= until:
                return ()

    def close(self) -> None:
        """Children end with their array. Jobs that AWS cannot be asked to terminate are named in the error."""
        self._buffer.clear()
        left: dict[str, AwsError] = {}
        while self._arrays:
            job = self._arrays.pop().id
            try:
                with asking(f"terminate job {job}"):
                    self._farm.batch.terminate_job(jobId=job, reason="The build that submitted it has ended.")
            except AwsError as error:
                left[job] = error
        if left:
            raise AwsError(
                f"{len(left)} jobs of the build farm may still run ({', '.join(left)}), which could not be terminated: "
                f"{next(iter(left.values()))}"
            )

    def _poll(self) -> list[Event]:
        """Events that came before an error are returned first; a retryable error does not end a build of hours."""
        found: list[Event] = []
        try:
            self._submit()
            for event in self._read():
                found.append(event)
            self._answered_at, self._silent = time.monotonic(), False
        except Exception as error:
            lasting = time.monotonic() - self._answered_at > self._intervals.silence
            if not found and (lasting or not is_retryable(error)):
                raise
            if not self._silent and is_retryable(error):
                self._silent = True
                found += [JobLog(key, f"polling again later: {error}") for key in self._keys()[:1]]
        return found

    def _keys(self) -> list[str]:
        waiting = [job.key for job in self._buffer]
        return waiting + [array.keys[place] for array in self._arrays for place in array.open]

    def _submit(self) -> None:
        """One array for all jobs of one size: a large model does not make all jobs large."""
        while self._buffer:
            sizes = {job.key: self._farm.size_for(job, self._limits) for job in self._buffer}
            size = sizes[self._buffer[0].key]
            jobs = [job for job in self._buffer if sizes[job.key] == size][:LARGEST_ARRAY]
            self._arrays.append(self._submit_array(jobs, size))
            submitted = {job.key for job in jobs}
            self._buffer = [job for job in self._buffer if job.key not in submitted]

    def _submit_array(self, jobs: Sequence[Job], size: JobSize) -> ArrayJob:
        blob = put_jobs(self._store, jobs)
        more: dict[str, Any] = {}
        if len(jobs) > 1:
            more["arrayProperties"] = {"size": len(jobs)}
        if self._limits.seconds is not None:
            more["timeout"] = {"attemptDurationSeconds": max(_SHORTEST, math.ceil(self._limits.seconds))}
        with asking(f"submit {len(jobs)} jobs to {self._farm.queue}"):
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
                **more,
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
        """Batch is read before the store: the outcome of a child that has ended is in the store by then."""
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
        """Reads no more pages than it takes to find the new ones."""
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
            one = described.get(array.child(place))
            yield self._end(array, place, failure_from_job(one) if one else lost_job(array.child(place)))

    def _end(self, array: ArrayJob, place: int, failure: Failure) -> JobFinished:
        array.open.discard(place)
        return JobFinished(array.keys[place], seconds=0.0, failure=failure)

    def _log_waiting(self, array: ArrayJob, job: JobDescription, counts: Mapping[str, int]) -> Iterator[JobLog]:
        """Missing capacity is no failure; the log says so, since a person may know how long to wait."""
        if not counts.get("RUNNABLE") or counts.get("STARTING") or counts.get("RUNNING"):
            array.waits_since = None
            return
        if array.waits_since is None:
            array.waits_since = time.monotonic()
        if time.monotonic() - array.waits_since >= self._intervals.waiting:
            array.waits_since = math.inf  # logged
            for place, one in children(self._farm.batch, array, job, "RUNNABLE"):
                why = one.get("statusReason") or "AWS Batch has no machine for it yet"
                yield JobLog(array.keys[place], f"job {array.id} waits for a machine: {why}")
                break

    def _refresh_list(self, array: ArrayJob) -> None:
        if array.open and time.monotonic() - array.kept_at > _REFRESH:
            self._store.blobs.is_kept(array.items)
            array.kept_at = time.monotonic()


def _require_one_store(url: str, farm: BuildFarm) -> None:
    """The scheduler must find what the workers commit, and their outcomes."""
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
