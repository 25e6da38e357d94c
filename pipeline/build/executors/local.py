"""Local executor: a pool of worker processes on this machine."""

import time
from collections.abc import Sequence
from typing import Final

from nxpipe.pipeline.build.executors.process import WorkerProcess
from nxpipe.pipeline.build.jobs import (
    Event,
    Failure,
    FailureClass,
    Job,
    JobFinished,
    JobLimits,
    JobStarted,
    memory_exceeded,
    time_exceeded,
)
from nxpipe.pipeline.util.exit_codes import SYSTEM
from nxpipe.pipeline.util.process import available_memory, processors

_SHARE: Final = 0.9  # of the memory that is free at the start
_POLL: Final = 0.1  # seconds between two checks of the limits


class LocalExecutor:
    """As many processes as processors and memory allow. A worker that dies takes one job with it."""

    name: Final = "local"

    def __init__(self, jobs: int, limits: JobLimits) -> None:
        self._jobs = jobs
        self._limits = limits
        self._memory = _SHARE * available_memory()
        self._threads = max(processors() // jobs, 1)
        self._idle: list[WorkerProcess] = []
        self._busy: list[WorkerProcess] = []

    def takes(self, job: Job) -> bool:
        """A job that needs more memory than is left waits until no other runs."""
        taken = sum(worker.job.memory for worker in self._busy if worker.job)
        return not self._busy or (len(self._busy) < self._jobs and taken + job.memory <= self._memory)

    def start(self, job: Job) -> None:
        worker = self._idle_worker() or WorkerProcess(self._threads)
        self._busy.append(worker)
        worker.send(job)

    def events(self, patience: float) -> Sequence[Event]:
        """Limits are checked several times a second meanwhile."""
        until = time.monotonic() + patience
        events: list[Event] = []
        while not events:
            left = until - time.monotonic()
            if not self._busy or left <= 0:
                break
            WorkerProcess.wait_for_events(self._busy, min(left, _POLL))
            for worker in list(self._busy):
                events += self._events_of(worker)
        return events

    def close(self) -> None:
        for worker in (*self._busy, *self._idle):
            worker.kill()
        self._busy.clear()
        self._idle.clear()

    def _idle_worker(self) -> WorkerProcess | None:
        """A worker that died idle is dropped: it must not cost a job an attempt."""
        while self._idle:
            worker = self._idle.pop()
            if worker.death() is None:
                return worker
            worker.kill()
        return None

    def _events_of(self, worker: WorkerProcess) -> list[Event]:
        assert worker.job is not None
        events: list[Event] = [JobStarted(worker.job.key, worker.name)] if worker.has_new_job() else []
        events += worker.read()
        if events and isinstance(events[-1], JobFinished):
            events[-1] = self._release(worker, events[-1])
        elif failure := self._failure(worker):
            events.append(JobFinished(worker.job.key, worker.elapsed, memory=worker.peak, failure=failure))
            self._busy.remove(worker)
            worker.kill()
        return events

    def _release(self, worker: WorkerProcess, ended: JobFinished) -> JobFinished:
        peak = worker.release()
        self._busy.remove(worker)
        self._idle.append(worker)
        return JobFinished(ended.key, ended.seconds, ended.cached, peak or ended.memory, ended.failure)

    def _failure(self, worker: WorkerProcess) -> Failure | None:
        """Of a worker that died or exceeds a limit."""
        assert worker.job is not None
        seconds, memory = self._limits.seconds, self._limits.memory
        if (how := worker.death()) is not None:
            text = f"the worker of {worker.job.title} {how}; its uncommitted work is lost"
            return Failure(FailureClass.RETRYABLE, "WorkerDied", text, SYSTEM.number, worker.log_tail())
        if seconds is not None and worker.elapsed > seconds:
            return time_exceeded(worker.job.title, worker.elapsed, worker.log_tail())
        if memory is not None and worker.measure() > memory:
            return memory_exceeded(worker.job.title, worker.peak, memory, worker.log_tail())
        return None
