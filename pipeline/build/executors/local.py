"""This process itself, one item at a time: for a build that is not worth a second process."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from nxpipe.pipeline.build.executors.process import WorkerProcess
from nxpipe.pipeline.build.jobs import Event, Job, JobFinished, JobLimits, JobStarted
from nxpipe.pipeline.build.status import Failure, FailureClass
from nxpipe.pipeline.build.worker import run_job
from nxpipe.pipeline.util.console import human_bytes
from nxpipe.pipeline.util.exit_codes import COMPILE, SYSTEM
from nxpipe.pipeline.util.machine import available_memory, processors


class InlineExecutor:
    name: Final = "local"

    def __init__(self, tell: Callable[[Event], None]) -> None:
        """`tell` hears of steps while an item is carried out, for until then `events` does not return."""
        self._tell = tell
        self._item: Job | None = None

    def takes(self, job: Job) -> bool:
        return self._item is None

    def start(self, job: Job) -> None:
        self._item = job

    def events(self, patience: float) -> Sequence[Event]:
        if self._item is None:
            return ()
        self._tell(JobStarted(self._item.key, "this process"))
        job, self._item = self._item, None
        return (run_job(job, self._tell),)

    def close(self) -> None:
        """Nothing runs but while `events` does."""


_SHARE: Final = 0.9  # of the memory that is free at the beginning
_LOOK: Final = 0.1  # seconds between two looks at limits


class LocalExecutor:
    name: Final = "local"

    def __init__(self, jobs: int, limits: JobLimits) -> None:
        self._jobs = jobs
        self._limits = limits
        self._memory = _SHARE * available_memory()
        self._threads = max(processors() // jobs, 1)
        self._idle: list[WorkerProcess] = []
        self._busy: list[WorkerProcess] = []

    def takes(self, job: Job) -> bool:
        """What is too large for the memory that is left waits, until it is alone."""
        taken = sum(worker.job.memory for worker in self._busy if worker.job)
        return not self._busy or (len(self._busy) < self._jobs and taken + job.memory <= self._memory)

    def start(self, job: Job) -> None:
        worker = self._idle_worker() or WorkerProcess(self._threads)
        self._busy.append(worker)
        worker.give(job)

    def events(self, patience: float) -> Sequence[Event]:
        """Limits are looked at in short turns."""
        until = time.monotonic() + patience
        heard: list[Event] = []
        while not heard:
            left = until - time.monotonic()
            if not self._busy or left <= 0:
                break
            WorkerProcess.wait_for_news(self._busy, min(left, _LOOK))
            for worker in list(self._busy):
                heard += self._hear(worker)
        return heard

    def close(self) -> None:
        for worker in (*self._busy, *self._idle):
            worker.kill()
        self._busy.clear()
        self._idle.clear()

    def _idle_worker(self) -> WorkerProcess | None:
        """One that was killed when it had nothing to do costs no item an attempt."""
        while self._idle:
            worker = self._idle.pop()
            if worker.death() is None:
                return worker
            worker.kill()
        return None

    def _hear(self, worker: WorkerProcess) -> list[Event]:
        assert worker.job is not None
        heard: list[Event] = [JobStarted(worker.job.key, worker.name)] if worker.is_new_to_its_item() else []
        heard += worker.read()
        if heard and isinstance(heard[-1], JobFinished):
            heard[-1] = self._back_from(worker, heard[-1])
        elif failure := self._fault(worker):
            heard.append(JobFinished(worker.job.key, worker.elapsed, memory=worker.peak, failure=failure))
            self._busy.remove(worker)
            worker.kill()
        return heard

    def _back_from(self, worker: WorkerProcess, ended: JobFinished) -> JobFinished:
        peak = worker.take_back()
        self._busy.remove(worker)
        self._idle.append(worker)
        return JobFinished(ended.key, ended.seconds, ended.cached, peak or ended.memory, ended.failure)

    def _fault(self, worker: WorkerProcess) -> Failure | None:
        """Why a worker has to be given up, or is gone."""
        assert worker.job is not None
        seconds, memory = self._limits.seconds, self._limits.memory
        if (how := worker.death()) is not None:
            about = f"the worker of {worker.job.title} {how}"
            return Failure(
                FailureClass.RETRYABLE,
                "WorkerDied",
                f"{about}; what it had not committed is lost",
                SYSTEM.number,
                worker.last_words(),
            )
        if seconds is not None and worker.elapsed > seconds:
            text = f"{worker.job.title}: not done after {worker.elapsed:.0f} s; allow more with --timeout"
            return Failure(FailureClass.LIMIT, "OutOfTime", text, COMPILE.number, worker.last_words())
        if memory is not None and worker.measure() > memory:
            text = (
                f"{worker.job.title}: its worker took {human_bytes(worker.peak)} of memory, and "
                f"{human_bytes(memory)} are allowed; allow more with --memory-limit"
            )
            return Failure(FailureClass.LIMIT, "OutOfMemory", text, SYSTEM.number, worker.last_words())
        return None
