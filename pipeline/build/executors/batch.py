"""The build farm as it is deployed: where jobs are submitted, what they run, and how much of a machine each gets."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

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
from nxpipe.pipeline.build.jobs import Event, Job, JobFinished, JobLimits, JobLog, JobStarted, from_document
from nxpipe.pipeline.build.status import Failure
from nxpipe.pipeline.cli.store_url import VARIABLE
from nxpipe.pipeline.util.aws import asking, client
from nxpipe.pipeline.util.errors import AwsError, BuildRefused

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store


PROJECT_TAG: Final = "nxpipe:project"  # by which whoever submits jobs may end them
_MIB: Final = 1024**2
_MIB_A_VCPU: Final = 7500  # the most that instances of the farm have, less what ECS keeps


@dataclass(frozen=True)
class JobSize:
    """What a job is promised."""

    vcpus: int
    memory: int  # MiB


@dataclass(frozen=True)
class BuildFarm:
    """`definition` is the ARN of one revision; `store` is where its jobs publish, `room` what they get unasked."""

    batch: Any
    project: str
    queue: str
    definition: str
    store: str
    room: JobSize

    def room_for(self, job: Job, limits: JobLimits) -> JobSize:
        """Never less than what the definition says; and twice as much or four times, as instances are twice as large,
        so that items of about one size go into one array.
        """
        if limits.memory is not None:
            memory = math.ceil(limits.memory / _MIB)
        else:
            times = max(1.0, job.memory / _MIB / self.room.memory)
            memory = self.room.memory * 2 ** math.ceil(math.log2(times))
        return JobSize(max(self.room.vcpus, math.ceil(memory / _MIB_A_VCPU)), memory)


def find_farm(project: str, region: str | None) -> BuildFarm:
    """What the stack of `[farm]` has made. Asks AWS; credentials come from where the AWS SDK always looks."""
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
        raise AwsError(f"the job queue {queue} in {batch.meta.region_name} takes no jobs; somebody has disabled it")
    newest = max(jobs, key=lambda one: one["revision"])
    container = newest["containerProperties"]
    environment = {one["name"]: one["value"] for one in container.get("environment", ())}
    asked = {one["type"]: int(one["value"]) for one in container.get("resourceRequirements", ())}
    return BuildFarm(
        batch=batch,
        project=project,
        queue=queues[0]["jobQueueArn"],
        definition=newest["jobDefinitionArn"],
        store=environment.get(VARIABLE, ""),
        room=JobSize(asked["VCPU"], asked["MEMORY"]),
    )


LARGEST_ARRAY: Final = 10_000
_SHORTEST: Final = 60  # seconds: Batch knows no shorter limit of a job
_KEPT: Final = 3600.0  # seconds after which a list is looked at: children may wait longer than a store's grace


@dataclass(frozen=True)
class PollIntervals:
    """Seconds: between two looks at the jobs; until somebody is told what jobs wait for; and for which AWS, or the
    store, may be silent."""

    poll: float = 10.0
    waiting: float = 300.0
    silence: float = 900.0


USUAL: Final = PollIntervals()


class BatchExecutor:
    name: Final = "batch"

    def __init__(self, store: "Store", farm: BuildFarm, limits: JobLimits, pace: PollIntervals = USUAL) -> None:
        _require_one_store(store.url, farm)
        self._store = store
        self._farm = farm
        self._limits = limits
        self._pace = pace
        self._buffer: list[Job] = []
        self._arrays: list[ArrayJob] = []
        self._looked_at = -math.inf
        self._answered_at = time.monotonic()
        self._silent = False

    def takes(self, job: Job) -> bool:
        return len(self._buffer) < LARGEST_ARRAY

    def start(self, job: Job) -> None:
        require_remote_sources(job.asked)
        self._buffer.append(job)
        self._looked_at = -math.inf  # to be submitted when events are asked for next

    def events(self, patience: float) -> Sequence[Event]:
        until = time.monotonic() + patience
        while True:
            due = self._looked_at + self._pace.poll
            time.sleep(max(0.0, min(due, until) - time.monotonic()))
            if time.monotonic() >= due:
                self._looked_at = time.monotonic()
                if found := self._round():
                    return found
            if time.monotonic() >= until:
                return ()

    def close(self) -> None:
        """The children end with their array. What is left running, as AWS cannot be told, is named in the error."""
        self._buffer.clear()
        left: dict[str, AwsError] = {}
        while self._arrays:
            job = self._arrays.pop().id
            try:
                with asking(f"end job {job}"):
                    self._farm.batch.terminate_job(jobId=job, reason="The build that submitted it has ended.")
            except AwsError as error:
                left[job] = error
        if left:
            raise AwsError(
                f"{len(left)} jobs of the build farm may still run ({', '.join(left)}), for they could not be ended: "
                f"{next(iter(left.values()))}"
            )

    def _round(self) -> list[Event]:
        """What was found out before a fault is told; one that may pass is not the end of a build of hours."""
        found: list[Event] = []
        try:
            self._submit()
            for event in self._look():
                found.append(event)
            self._answered_at, self._silent = time.monotonic(), False
        except Exception as error:
            lasting = time.monotonic() - self._answered_at > self._pace.silence
            if not found and (lasting or not is_retryable(error)):
                raise
            if not self._silent and is_retryable(error):
                self._silent = True
                found += [JobLog(key, f"asked again in a while: {error}") for key in self._keys()[:1]]
        return found

    def _keys(self) -> list[str]:
        waiting = [job.key for job in self._buffer]
        return waiting + [array.keys[place] for array in self._arrays for place in array.open]

    def _submit(self) -> None:
        """An array for all items that need about as much memory: one large model does not make all jobs large."""
        while self._buffer:
            rooms = {job.key: self._farm.room_for(job, self._limits) for job in self._buffer}
            room = rooms[self._buffer[0].key]
            items = [job for job in self._buffer if rooms[job.key] == room][:LARGEST_ARRAY]
            self._arrays.append(self._submitted(items, room))
            submitted = {job.key for job in items}
            self._buffer = [job for job in self._buffer if job.key not in submitted]

    def _submitted(self, items: Sequence[Job], room: JobSize) -> ArrayJob:
        blob = put_jobs(self._store, items)
        asked: dict[str, Any] = {}
        if len(items) > 1:
            asked["arrayProperties"] = {"size": len(items)}
        if self._limits.seconds is not None:
            asked["timeout"] = {"attemptDurationSeconds": max(_SHORTEST, math.ceil(self._limits.seconds))}
        with asking(f"submit {len(items)} items to {self._farm.queue}"):
            told = self._farm.batch.submit_job(
                jobName=f"{self._farm.project}-build-{blob.sha256[:12]}",
                jobQueue=self._farm.queue,
                jobDefinition=self._farm.definition,
                containerOverrides={
                    "command": ["nxpipe", "worker", "--items", blob.sha256],
                    "resourceRequirements": [
                        {"type": "VCPU", "value": str(room.vcpus)},
                        {"type": "MEMORY", "value": str(room.memory)},
                    ],
                },
                tags={PROJECT_TAG: self._farm.project},
                **asked,
            )
        return ArrayJob(told["jobId"], blob, [job.key for job in items], time.monotonic())

    def _look(self) -> Iterator[Event]:
        told = describe(self._farm.batch, [array.id for array in self._arrays])
        for array in self._arrays:
            if array.id in told:
                yield from self._news(array, told[array.id])
            else:
                yield from (self._end(array, place, lost_job(array.id)) for place in sorted(array.open))
            self._keep_list(array)
        self._arrays = [array for array in self._arrays if array.open]

    def _news(self, array: ArrayJob, told: JobDescription) -> Iterator[Event]:
        """Batch is asked before the store: what a child has written before it ended is there then."""
        counts = counts_of(array, told)
        if counts != array.counts and counts.get("RUNNING"):
            for place, _ in children(self._farm.batch, array, told, "RUNNING"):
                yield from self._begin(array, place)
        array.counts = counts
        self._note_failed(array, told, counts)
        if sum(counts.get(status, 0) for status in ENDED) > len(array.keys) - len(array.open):
            yield from self._outcomes(array)
        yield from self._without_outcome(array, array.failed & array.open)
        if told["status"] in ENDED and len(array.failed) >= counts.get("FAILED", 0):
            yield from (self._end(array, place, failure_from_job(told)) for place in sorted(array.open))
        yield from self._waiting(array, told, counts)

    def _begin(self, array: ArrayJob, place: int) -> Iterator[Event]:
        if place not in array.begun:
            array.begun.add(place)
            yield JobStarted(array.keys[place], array.child(place))

    def _note_failed(self, array: ArrayJob, told: JobDescription, counts: Mapping[str, int]) -> None:
        """No more pages are read than it takes to find those that are new."""
        if len(array.failed) < counts.get("FAILED", 0):
            for place, _ in children(self._farm.batch, array, told, "FAILED"):
                array.failed.add(place)
                if len(array.failed) == counts["FAILED"]:
                    break

    def _outcomes(self, array: ArrayJob) -> Iterator[Event]:
        from nxpipe.artifact_store.runs import outcomes_of

        for outcome in outcomes_of(self._store, array.items.sha256, array.open):
            event = from_document(outcome.ended)
            if isinstance(event, JobFinished):
                yield from self._begin(array, outcome.place)
                array.open.discard(outcome.place)
                yield event

    def _without_outcome(self, array: ArrayJob, places: set[int]) -> Iterator[Event]:
        told = describe(self._farm.batch, [array.child(place) for place in sorted(places)])
        for place in sorted(places):
            one = told.get(array.child(place))
            yield self._end(array, place, failure_from_job(one) if one else lost_job(array.child(place)))

    def _end(self, array: ArrayJob, place: int, failure: Failure) -> JobFinished:
        array.open.discard(place)
        return JobFinished(array.keys[place], seconds=0.0, failure=failure)

    def _waiting(self, array: ArrayJob, told: JobDescription, counts: Mapping[str, int]) -> Iterator[JobLog]:
        """Capacity waits and does not fail; but a person may know better how long it is worth to."""
        if not counts.get("RUNNABLE") or counts.get("STARTING") or counts.get("RUNNING"):
            array.waits_since = None
            return
        if array.waits_since is None:
            array.waits_since = time.monotonic()
        if time.monotonic() - array.waits_since >= self._pace.waiting:
            array.waits_since = math.inf  # it has been said
            for place, one in children(self._farm.batch, array, told, "RUNNABLE"):
                why = one.get("statusReason") or "AWS Batch has not found a machine for it yet"
                yield JobLog(array.keys[place], f"job {array.id} waits for machines, and so do its items: {why}")
                break

    def _keep_list(self, array: ArrayJob) -> None:
        if array.open and time.monotonic() - array.kept_at > _KEPT:
            self._store.blobs.is_kept(array.items)
            array.kept_at = time.monotonic()


def _require_one_store(url: str, farm: BuildFarm) -> None:
    """Parts that the workers commit must be found by this driver, and so must their outcomes."""
    if not url.startswith("s3://"):
        raise BuildRefused(
            f"the build farm and this machine must see the same store, and {url} is a folder here; pass --store "
            f"{farm.store or 's3://BUCKET/PREFIX'}"
        )
    if url.rstrip("/") != farm.store.rstrip("/"):
        raise BuildRefused(
            f"the jobs of the build farm publish to {farm.store or 'no store'}, and this build to {url}; pass --store "
            f"{farm.store}, or deploy the farm of the project that has {url}"
        )
