"""Run of `nxpipe build`: plan, scheduler, output, report and exit code.

The scheduler starts the largest cell first, so that the last one to end is small, and publishes an artifact as soon as
its last cell is committed. Every event is applied to the `BuildState`, from which the scheduler decides.
"""

import heapq
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.documents import written_now
from nxpipe.artifact_store.errors import StoreError, StoreUnavailable
from nxpipe.pipeline.build.cache import BuildLog, Timings, timing_key
from nxpipe.pipeline.build.jobs import (
    BuildOptions,
    CellStatus,
    Event,
    Executor,
    Failure,
    FailureClass,
    Job,
    JobFinished,
    JobLimits,
    JobRetry,
    JobSubmitted,
)
from nxpipe.pipeline.build.plan import SMALL_BUILD, BuildPlan, PlannedArtifact, PlannedCell, make_plan
from nxpipe.pipeline.build.report.live import live_view
from nxpipe.pipeline.build.report.plan_text import plan_json, plan_table
from nxpipe.pipeline.build.report.summary import figures_of, published_artifacts, show_artifacts, show_end
from nxpipe.pipeline.build.state import BuildState, Results
from nxpipe.pipeline.build.worker import InlineExecutor
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.thresholds import Thresholds, report_of
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import BuildRefused, PipelineError
from nxpipe.pipeline.util.exit_codes import STORE
from nxpipe.pipeline.util.files import MiB, expanded, json_of, read_file, write_whole
from nxpipe.pipeline.util.process import processors

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.pipeline.config import Config


_PUBLISH_FIRST: Final = 1e30  # work of a job that publishes: it starts before every cell
_PATIENCE: Final = 1.0  # seconds to wait for events
_LONGEST_PAUSE: Final = 60.0  # seconds before another attempt
_RANDOM: Final = random.SystemRandom()


@dataclass
class JobQueue:
    """Jobs that are ready, the largest first, and artifacts that wait for cells. A cell that two artifacts share is
    one job."""

    _ready: list[tuple[float, int, Job]] = field(default_factory=list)
    _artifacts: dict[str, Job] = field(default_factory=dict)
    _missing: dict[str, set[str]] = field(default_factory=dict)
    _dependents: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _count: int = 0

    @classmethod
    def of(
        cls, plan: BuildPlan, thresholds: Thresholds, *, force: bool = False, kms_key: str | None = None
    ) -> "JobQueue":
        queue, queued = cls(), set[str]()

        def job(artifact: PlannedArtifact, cell: PlannedCell | None) -> Job:
            return Job(
                key=cell.key if cell else artifact.key,
                title=f"{artifact.title}, {cell.shape.name}" if cell else artifact.title,
                spec=artifact.spec.absolute(),
                shape=cell.shape if cell else None,
                store=plan.store,
                thresholds=thresholds,
                force=force,
                work=cell.work if cell else _PUBLISH_FIRST,
                memory=artifact.memory,
                kms_key=kms_key,
            )

        for artifact in plan.artifacts:
            if artifact.is_published or artifact.key in queue._artifacts or not artifact.key:
                continue
            queue._artifacts[artifact.key] = job(artifact, None)
            missing = [cell for cell in artifact.cells if cell.status is not CellStatus.COMMITTED]
            queue._missing[artifact.key] = {cell.key for cell in missing}
            for cell in missing:
                queue._dependents[cell.key].append(artifact.key)
                if cell.status is CellStatus.QUEUED and cell.key not in queued:
                    queued.add(cell.key)
                    queue.put(job(artifact, cell))
            queue._put_if_complete(artifact.key)
        return queue

    def __bool__(self) -> bool:
        return bool(self._ready)

    @property
    def first(self) -> Job:
        return self._ready[0][2]

    def take(self) -> Job:
        return heapq.heappop(self._ready)[2]

    def put(self, job: Job) -> None:
        self._count += 1
        heapq.heappush(self._ready, (-job.work, self._count, job))

    def complete(self, job: Job) -> None:
        """Queue the artifacts that waited for this cell alone."""
        for key in self._dependents.get(job.key, ()):
            self._missing[key].discard(job.key)
            self._put_if_complete(key)

    def _put_if_complete(self, key: str) -> None:
        if not self._missing[key]:
            self.put(self._artifacts[key])


@dataclass(frozen=True)
class RetryPolicy:
    """Policy after a failure. `pause`: seconds before the second attempt, doubled with each one; half of it is
    random."""

    keep_going: bool = False
    retries: int = 2
    pause: float = 1.0


def run_jobs(state: BuildState, queue: JobQueue, executor: Executor, policy: RetryPolicy) -> Results:
    """Run jobs until the queue is empty; after a failure that stops the build, until the running jobs have finished.
    Ctrl-C stops running jobs; committed results stay."""
    scheduler = _Scheduler(state, queue, executor, policy)
    began_at, began, interrupted = written_now(), time.monotonic(), False
    try:
        scheduler.run()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        left_behind = _close(executor)
    return Results(state, began_at, time.monotonic() - began, executor.name, interrupted, left_behind)


class _Scheduler:
    def __init__(self, state: BuildState, queue: JobQueue, executor: Executor, policy: RetryPolicy) -> None:
        self._state = state
        self._queue = queue
        self._executor = executor
        self._policy = policy
        self._running: dict[str, Job] = {}
        self._later: list[tuple[float, Job]] = []
        self._is_stopped = not policy.keep_going and any(cell.failure for _, cell in state.plan.cells())

    def run(self) -> None:
        while self._start_ready_jobs():
            for event in self._executor.events(self._patience()):
                self._handle(event)

    def _start_ready_jobs(self) -> bool:
        """Start the jobs that the executor takes; False if none runs and none is left to start."""
        now = time.monotonic()
        for due in [pair for pair in self._later if pair[0] <= now]:
            self._later.remove(due)
            self._queue.put(due[1])
        while self._queue and not self._is_stopped and self._executor.takes(self._queue.first):
            job = self._queue.take()
            self._running[job.key] = job
            self._state.apply(JobSubmitted(job.key))
            self._executor.start(job)
        return bool(self._running) or (not self._is_stopped and bool(self._queue or self._later))

    def _patience(self) -> float:
        due = min((moment for moment, _ in self._later), default=float("inf"))
        return min(max(due - time.monotonic(), 0.01), _PATIENCE)

    def _handle(self, event: Event) -> None:
        if not isinstance(event, JobFinished):
            self._state.apply(event)
            return
        job, event = self._running.pop(event.key), replace(event, seconds=round(event.seconds, 3))
        if event.failure and self._is_retried(job, event.failure):
            self._retry(job, event, event.failure)
            return
        self._state.apply(event)
        if event.failure is None:
            self._queue.complete(job)
        else:
            self._is_stopped |= not self._policy.keep_going or _fails_every_job(event.failure)

    def _is_retried(self, job: Job, failure: Failure) -> bool:
        attempts = self._state.attempts[job.key]
        return failure.failure_class is FailureClass.RETRYABLE and attempts <= self._policy.retries

    def _retry(self, job: Job, attempt: JobFinished, failure: Failure) -> None:
        pause = min(self._policy.pause * 2 ** (self._state.attempts[job.key] - 1), _LONGEST_PAUSE)
        pause *= 0.5 + _RANDOM.random() / 2
        self._state.apply(JobRetry(job.key, f"retry in {pause:.0f} s: {failure.message}", attempt))
        self._later.append((time.monotonic() + pause, job))


def _close(executor: Executor) -> str:
    """Close the executor; return an error as a sentence, because the result of the build matters more."""
    try:
        executor.close()
    except PipelineError as error:
        return str(error)
    return ""


def _fails_every_job(failure: Failure) -> bool:
    """True if the cause is this machine, or the store, which all jobs share."""
    return failure.failure_class is FailureClass.HOST or failure.code == STORE.number


@dataclass(frozen=True)
class ExecutorOptions:
    """The executor and its limits. `address` is that of a Ray cluster; `project` and `region` identify the build farm
    on AWS Batch."""

    executor: str
    limits: JobLimits
    jobs: int | None
    address: str | None
    project: str
    region: str | None


def execute(state: BuildState, store: Store, queue: JobQueue, options: ExecutorOptions, policy: RetryPolicy) -> Results:
    """Run the jobs with the executor of `options`. With nothing to do, no cluster is started."""
    executor = _executor(state, store, options) if queue else InlineExecutor(state.apply)
    return run_jobs(state, queue, executor, policy)


def _executor(state: BuildState, store: Store, options: ExecutorOptions) -> Executor:
    if options.executor == "ray":
        from nxpipe.pipeline.build.executors.ray import RayExecutor

        return RayExecutor(options.address, options.limits, options.jobs)
    if options.executor == "batch":
        from nxpipe.pipeline.build.executors.batch import BatchExecutor, find_farm

        return BatchExecutor(store, find_farm(options.project, options.region), options.limits)
    work = [cell.work for _, cell in state.plan.cells() if cell.status is CellStatus.QUEUED]
    is_small = len(work) <= 1 or (options.jobs is None and sum(work) <= SMALL_BUILD)
    if is_small and options.limits == JobLimits():
        return InlineExecutor(state.apply)
    from nxpipe.pipeline.build.executors.local import LocalExecutor

    return LocalExecutor(options.jobs or max(min(processors(), len(work)), 1), options.limits)


@dataclass
class BuildRun:
    """One run of `nxpipe build`. `state_folder` is the project's `.nxpipe`: reports, timings and the arguments of an
    unfinished build."""

    console: Console
    store: "Store"
    config: "Config"
    thresholds: Thresholds
    state_folder: Path
    options: BuildOptions

    @property
    def timings(self) -> Timings:
        return Timings.kept_in(self.state_folder)

    def plan(self, specs: Sequence[ModelSpec]) -> BuildPlan:
        return make_plan(specs, self.store, self.thresholds, self.timings, force=self.options.force, hints=True)

    def show(self, plan: BuildPlan) -> int:
        """Print the plan of a dry run; return its exit code."""
        if self.console.json:
            self.console.data(plan_json(plan))
        else:
            self.console.page(plan_table(plan))
        return plan.exit_code

    def execute(self, plan: BuildPlan) -> Results:
        queue = JobQueue.of(plan, self.thresholds, force=self.options.force, kms_key=self.config.store.kms_key)
        for why in dict.fromkeys(cell.why for _, cell in plan.cells() if cell.status is CellStatus.QUEUED and cell.why):
            self.console.say(f"  {why}")
        policy = RetryPolicy(self.options.keep_going, self.options.retries)
        state = BuildState(plan)
        with live_view(self.console, state):
            return execute(state, self.store, queue, self._executor_options(), policy)

    def finish(self, results: Results) -> int:
        """Print the artifacts and what is missing, write the reports, and return the exit code."""
        _record_timings(results, self.timings)
        _record_builds(results, self.store.url)
        try:
            published = published_artifacts(self.store, results)
            figures = {item.request_key: figures_of(item.manifest, self.store) for item in published.values()}
            verified = {item.request_key: report_of(item.manifest, self.store) for item in published.values()}
        except StoreUnavailable:
            if not results.missing():
                raise
            published, figures, verified = {}, {}, {}  # the failure is printed below
        show_artifacts(self.console, published, figures, verified, results)
        page = self._write_reports(results, published, figures)
        show_end(self.console, results, page)
        _annotate_github(self.console, results)
        return results.exit_code

    def _executor_options(self) -> ExecutorOptions:
        section, options = self.config.build, self.options
        seconds = options.timeout or (section.timeout.total_seconds() if section.timeout else None)
        jobs = options.jobs or (section.parallelism if isinstance(section.parallelism, int) else None)
        limits, project = JobLimits(seconds, options.memory_limit), self.config.project
        executor = options.executor or section.executor
        return ExecutorOptions(executor, limits, jobs, options.address, project.name, project.region)

    def _write_reports(
        self, results: Results, published: Mapping[str, "Published"], figures: Mapping[str, dict[str, Any]]
    ) -> Path | None:
        """Write the report, if a job ran: to the state folder, and beside each artifact that this build published."""
        attempts = results.state.attempts
        if not attempts:
            return None
        from nxpipe.artifact_store.builds import store_report
        from nxpipe.pipeline.build.report.document import ArtifactFigures, artifact_figures, write_report

        try:
            known = {key: artifact_figures(self.store, item.manifest, figures[key]) for key, item in published.items()}
        except StoreError as error:  # of what other builds stored, such as a channel
            self.console.say(f"  the report has neither accuracy nor changes: {error}")
            known = {key: ArtifactFigures(document) for key, document in figures.items()}
        files = write_report(results, self.state_folder / "builds", known, Thresholds.of(self.config))
        html, json = files.html.read_bytes(), files.json.read_bytes()
        try:
            for key, artifact in published.items():
                if key in attempts:
                    store_report(self.store, artifact.manifest_digest, results.began_at, html=html, json=json)
        except StoreUnavailable as error:  # the artifacts and the local report are complete
            self.console.say(f"  the report was not stored beside the artifacts: {error}")
        return files.html


def _record_timings(results: Results, timings: Timings) -> None:
    """Record the times of built cells for the estimates of the next plan."""
    built = [result for result in results.cells() if result.status is CellStatus.BUILT and result.seconds]
    keys = [timing_key(BuildSpec.of(result.artifact.spec), result.cell.shape) for result in built]
    timings.note({key: (result.cell.work, result.seconds) for key, result in zip(keys, built, strict=True)})


def _record_builds(results: Results, store: str) -> None:
    """Record the hits and misses of each artifact for `nxpipe stats`."""
    entries = []
    for result in results.artifacts():
        cells = {status: [cell for cell in result.cells if cell.status is status] for status in CellStatus}
        hits, built = (cells[status] for status in (CellStatus.CACHED, CellStatus.BUILT))
        if hits or built:
            entries.append(
                {"at": results.began_at, "store": store, "artifact": result.artifact.key}
                | {"model": _model_name(result.artifact.spec), "target": result.artifact.spec.target}
                | {
                    "hits": {cell.cell.key: cell.cell.shape.name for cell in hits},
                    "built": {c.cell.key: c.seconds for c in built},
                }
            )
    BuildLog.of_user().note(entries)


def _model_name(spec: ModelSpec) -> str:
    """The name in nxpipe.toml, else that of artifacts: the hub's id, or the name of the folder or file."""
    return spec.name or (spec.model_id if spec.kind == "hub" else expanded(spec.model_id).resolve().name)


def _annotate_github(console: Console, results: Results) -> None:
    if "GITHUB_ACTIONS" not in os.environ:
        return
    from nxpipe.pipeline.build.report.github import annotations, in_github, show_summary, write_summary

    if in_github(os.environ):
        show_summary(console, lambda: write_summary(results, os.environ))
        for line in annotations(results):
            console.command(line)


class UnfinishedBuild:
    """Arguments of a build that began and has not published everything."""

    def __init__(self, state_folder: Path) -> None:
        self._path = state_folder / "unfinished-build.json"

    def begin(self, arguments: Sequence[str]) -> None:
        """Best effort: without the file there is no `--resume`."""
        with suppress(OSError):
            write_whole(self._path, json.dumps(list(arguments)).encode())

    def end(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def arguments(self) -> list[str]:
        try:
            document = json_of(read_file(self._path, limit=MiB))
        except (OSError, ValueError):
            document = None
        if not isinstance(document, list):
            raise BuildRefused(f"no unfinished build: {self._path} does not exist; run nxpipe build without --resume")
        return [str(argument) for argument in document]
