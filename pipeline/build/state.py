"""State of a build: the reducer of its events, which the scheduler, the live display and the report read.

Only `BuildState.apply` changes it. A cell that several artifacts share is one job, and counts once for each of them.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from nxpipe.pipeline.build.jobs import (
    EVENT_WORDS,
    BuildEvent,
    CellStatus,
    Failure,
    JobFinished,
    JobLog,
    JobRetry,
    JobStarted,
    JobSubmitted,
)
from nxpipe.pipeline.build.plan import BuildPlan, PlannedArtifact, PlannedCell
from nxpipe.pipeline.util.exit_codes import INCOMPLETE, INTERRUPTED, combined_code
from nxpipe.pipeline.util.text import plain

_FAILURES: Final = 3  # latest failures kept for the display
_STEPS: Final = 50  # log lines kept of an attempt; a longer log does not consist of steps


@dataclass(frozen=True)
class JobName:
    """Display name of a job. Without a cell, the job publishes an artifact."""

    title: str
    program: str
    cell: PlannedCell | None

    @property
    def name(self) -> str:
        return f"{self.title}, {self.program}" if self.program else self.title


@dataclass
class Attempt:
    """One run of a job on a worker. Times are seconds since the build began. `over` and `end` are None while it runs,
    and for a lost or retried attempt."""

    job: JobName
    key: str
    worker: str
    began: float
    over: float | None = None
    end: JobFinished | None = None
    steps: list[tuple[float, str]] = field(default_factory=list)
    last_text: str = ""

    @property
    def step(self) -> str:
        """The last log line, without the program's name, which a display shows beside it."""
        return plain(self.last_text).removesuffix(f" {self.job.program}")


class BuildState:
    """State of one build. `finished`: the last `JobFinished` by job key. `attempts`: the number of submissions by job
    key. `retrying`: keys of jobs whose last attempt ended in a retryable failure. `timeline`: attempts in the order of
    their start. `observers` are called with each event after it was applied, from one thread at a time; other threads
    hold `lock` to read."""

    def __init__(self, plan: BuildPlan, now: Callable[[], float] = time.monotonic) -> None:
        self.plan = plan
        self.lock = threading.RLock()
        self.observers: list[Callable[[BuildEvent], None]] = []
        self.finished: dict[str, JobFinished] = {}
        self.attempts = Counter[str]()
        self.retrying: set[str] = set()
        self.timeline: list[Attempt] = []
        self.failures: deque[tuple[JobName, str]] = deque(maxlen=_FAILURES)  # the last first
        self._now = now
        self._began = now()
        self._running: dict[str, Attempt] = {}
        self._published = {artifact.key for artifact in plan.artifacts if artifact.is_published}
        self._status: dict[str, CellStatus] = {}
        self._names: dict[str, JobName] = {}
        self._shared = Counter[str]()
        self._counts = Counter[CellStatus]()
        self._estimates = TimeEstimates()
        for artifact, cell in plan.cells():
            status = self._status.setdefault(cell.key, cell.status)
            self._shared[cell.key] += 1
            self._counts[status.progress] += 1
            if cell.key not in self._names and status is CellStatus.QUEUED:
                self._estimates.wait(cell)
            self._names[cell.key] = JobName(plain(artifact.title), cell.shape.name, cell)
        for artifact in plan.artifacts:
            self._names[artifact.key] = JobName(plain(artifact.title), "publish", None)

    def apply(self, event: BuildEvent | JobSubmitted) -> None:
        with self.lock:
            match event:
                case JobSubmitted():
                    self.attempts[event.key] += 1
                    return  # the executor's own events follow
                case JobStarted():
                    self._start(event)
                case JobLog():
                    self._log(event.key, event.text)
                case JobRetry():
                    self._retry(event)
                case JobFinished():
                    self._finish(event)
            for observer in self.observers:
                observer(event)

    @property
    def cells(self) -> int:
        return self._counts.total()

    @property
    def done(self) -> int:
        """Cells that are neither queued nor running."""
        return self.cells - self._counts[CellStatus.RUNNING] - self._counts[CellStatus.QUEUED]

    @property
    def published(self) -> int:
        return sum(artifact.key in self._published for artifact in self.plan.artifacts)

    @property
    def elapsed(self) -> float:
        return self._now() - self._began

    def counts(self) -> dict[CellStatus, int]:
        """Cells by the status under which a display of progress counts them."""
        return {status: self._counts[status] for status in EVENT_WORDS}

    def job_name(self, key: str) -> JobName:
        """A job that is not in the plan is named by its key."""
        return self._names.get(key) or JobName(key[:12], "", None)

    def running(self) -> Sequence[Attempt]:
        """Running attempts, the longest first."""
        return sorted(self._running.values(), key=lambda attempt: attempt.began)

    def seconds_left(self) -> float | None:
        """Estimated seconds to the end; None if no similar cell was measured, in this build or an earlier one."""
        now = self.elapsed
        running = [(attempt.job.cell, now - attempt.began) for attempt in self._running.values() if attempt.job.cell]
        return self._estimates.left(running)

    def _start(self, event: JobStarted) -> None:
        self._leave_queue(event.key)
        self._set(event.key, CellStatus.RUNNING)
        attempt = Attempt(self.job_name(event.key), event.key, event.worker, self.elapsed)
        self._running[event.key] = attempt
        self.timeline.append(attempt)

    def _log(self, key: str, text: str) -> None:
        if attempt := self._running.get(key):
            attempt.last_text = text
            if len(attempt.steps) < _STEPS:
                attempt.steps.append((self.elapsed, text))

    def _retry(self, event: JobRetry) -> None:
        self.finished[event.key] = event.attempt
        self.retrying.add(event.key)
        self._set(event.key, CellStatus.RETRYING)
        self._log(event.key, event.text)

    def _finish(self, event: JobFinished) -> None:
        self.finished[event.key] = event
        self.retrying.discard(event.key)
        self._leave_queue(event.key)
        if attempt := self._running.pop(event.key, None):
            attempt.over, attempt.end = self.elapsed, event
        name = self.job_name(event.key)
        if event.failure:
            self.failures.appendleft((name, plain(event.failure.message)))
        elif name.cell is None:
            self._published.add(event.key)
        elif not event.cached:
            self._estimates.measured(name.cell, event.seconds)
        success = CellStatus.CACHED if event.cached else CellStatus.BUILT
        self._set(event.key, CellStatus.FAILED if event.failure else success)

    def _leave_queue(self, key: str) -> None:
        """Remove the job from the queued work: at its start, or at its end if no worker could take it."""
        cell = self.job_name(key).cell
        if cell and self._status.get(key) is CellStatus.QUEUED:
            self._estimates.take(cell)

    def _set(self, key: str, status: CellStatus) -> None:
        if key in self._status:
            self._counts[self._status[key].progress] -= self._shared[key]
            self._counts[status.progress] += self._shared[key]
            self._status[key] = status


@dataclass(frozen=True)
class CellResult:
    """Result of a cell. `failure` is its own, or that of publishing its artifact; of a retried job, that of the last
    attempt."""

    artifact: PlannedArtifact
    cell: PlannedCell
    status: CellStatus
    attempts: int
    seconds: float
    memory: int
    failure: Failure | None


@dataclass(frozen=True)
class ArtifactResult:
    artifact: PlannedArtifact
    cells: tuple[CellResult, ...]

    @property
    def is_published(self) -> bool:
        return not any(cell.status.is_missing for cell in self.cells)


@dataclass(frozen=True)
class Results:
    """Results of a finished build. `interrupted`: by Ctrl-C. `left_behind`: a sentence that names jobs which the
    executor could not stop."""

    state: BuildState
    began_at: str
    seconds: float
    executor: str
    interrupted: bool = False
    left_behind: str = ""

    @property
    def plan(self) -> BuildPlan:
        return self.state.plan

    def artifacts(self) -> Iterator[ArtifactResult]:
        """Artifacts in the order of the plan; equal models of nxpipe.toml have one key."""
        for artifact in self.plan.artifacts:
            yield ArtifactResult(artifact, tuple(self._cell(artifact, cell) for cell in artifact.cells))

    def cells(self) -> list[CellResult]:
        return [cell for artifact in self.artifacts() for cell in artifact.cells]

    def missing(self) -> list[CellResult]:
        return [cell for cell in self.cells() if cell.status.is_missing]

    @property
    def exit_code(self) -> int:
        """Exit code: 0 only if every cell is in a published artifact. A cell that was not retried leaves the code to
        the failure that stopped the build."""
        if self.interrupted:
            return INTERRUPTED.number
        missing = self.missing()
        deciding = [cell for cell in missing if cell.status is not CellStatus.RETRYING] or missing
        return combined_code(cell.failure.code if cell.failure else INCOMPLETE.number for cell in deciding)

    def _cell(self, artifact: PlannedArtifact, cell: PlannedCell) -> CellResult:
        built, publishing = self.state.finished.get(cell.key), self.state.finished.get(artifact.key)
        published = artifact.is_published or (publishing is not None and publishing.failure is None)
        failed = next((end for end in (built, publishing) if end is not None and end.failure is not None), None)
        failure = failed.failure if failed else cell.failure
        if published:
            is_built = built is not None and built.failure is None and not built.cached
            status = CellStatus.BUILT if is_built else CellStatus.CACHED
        elif failed is not None and failed.key in self.state.retrying:
            status = CellStatus.RETRYING
        elif failure:
            status = CellStatus.FAILED
        else:
            is_built = built is not None or cell.status is CellStatus.COMMITTED
            status = CellStatus.BLOCKED if is_built else CellStatus.SKIPPED
        return CellResult(
            artifact=artifact,
            cell=cell,
            status=status,
            attempts=self.state.attempts.get(cell.key, 0),
            seconds=built.seconds if built else 0.0,
            memory=built.memory if built else 0,
            failure=None if published else failure,
        )


class TimeEstimates:
    """Estimate of the time left: the plan's estimates, scaled by their error so far; a cell without an estimate counts
    by its work. It keeps sums only, since a display reads it four times a second and a plan has thousands of cells."""

    def __init__(self) -> None:
        self._waiting = 0
        self._seconds = 0.0  # of queued cells with an estimate
        self._work = 0.0  # of queued cells without one
        self._measured = [0.0, 0.0]  # estimated seconds, actual seconds
        self._rated = [0.0, 0.0]  # work, actual seconds
        self._at_once = 1

    def wait(self, cell: PlannedCell) -> None:
        self._count(cell, 1)

    def take(self, cell: PlannedCell) -> None:
        """The cell leaves the queue."""
        self._count(cell, -1)

    def measured(self, cell: PlannedCell, seconds: float) -> None:
        self._rated[0] += cell.work
        self._rated[1] += seconds
        if cell.seconds is not None:
            self._measured[0] += cell.seconds
            self._measured[1] += seconds

    def left(self, running: Sequence[tuple[PlannedCell, float]]) -> float | None:
        """Seconds left, given the running cells with their elapsed seconds; None if no similar cell was measured.

        The work is divided by the largest number of jobs seen at once; the longest running job is a lower bound.
        """
        self._at_once = max(self._at_once, len(running))
        waiting = self._actual_seconds(self._seconds, self._work) if self._waiting else 0.0
        expected = [
            (self._actual_seconds(cell.seconds or 0.0, 0.0 if cell.seconds else cell.work), elapsed)
            for cell, elapsed in running
        ]
        remaining = [max(seconds - elapsed, 0.0) for seconds, elapsed in expected if seconds is not None]
        if waiting is None or len(remaining) < len(expected):
            return None
        return max([(waiting + sum(remaining)) / self._at_once, *remaining])

    def _count(self, cell: PlannedCell, sign: int) -> None:
        self._waiting += sign
        if cell.seconds is None:
            self._work += sign * cell.work
        else:
            self._seconds += sign * cell.seconds

    def _actual_seconds(self, seconds: float, work: float) -> float | None:
        """Actual seconds for these estimated seconds, and for this work without an estimate."""
        estimated, took = self._measured
        size, lasted = self._rated
        if work and not (size and lasted):
            return None
        return seconds * (took / estimated if estimated and took else 1.0) + (work * lasted / size if work else 0.0)
