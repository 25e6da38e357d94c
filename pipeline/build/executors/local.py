"""Executor in processes of this machine: the pool, and both ends of a worker process.

Jobs come on stdin and events go to stdout, one JSON document a line. A worker ends with its
scheduler, even during a job: the next build continues.
"""

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from nxpipe.emulator.parent_process import die_with_parent
from nxpipe.pipeline.build.jobs import (
    Event,
    Failure,
    FailureClass,
    Job,
    JobFinished,
    JobLimits,
    JobStarted,
    from_document,
    memory_exceeded,
    time_exceeded,
    to_document,
)
from nxpipe.pipeline.build.worker import run_job
from nxpipe.pipeline.util.exit_codes import SYSTEM
from nxpipe.pipeline.util.process import available_memory, processors

_MODULE: Final = "nxpipe.pipeline.build.executors.local"
# Threads of numpy and PyTorch: workers side by side must not use the same processors twice.
_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LOG_TAIL: Final = 8000  # bytes of a worker's stderr
_CHUNK: Final = 1 << 16
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_SCHEDULER_GONE: Final = 75


class WorkerProcess:
    """A worker process in its own session: Ctrl-C reaches the scheduler alone, and a kill reaches all processes that
    the worker started."""

    def __init__(self, threads: int) -> None:
        self._stderr = tempfile.TemporaryFile(prefix="nxpipe-worker-")  # noqa: SIM115 - closed by `kill`
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],  # imports nothing from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | dict.fromkeys(_THREADS, str(threads)),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._unread = b""
        self.job: Job | None = None
        self._began = 0.0
        self._is_new = False
        self.peak = 0

    @property
    def name(self) -> str:
        return f"process {self._process.pid}"

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def send(self, job: Job) -> None:
        """Send a job. If the worker has died in the meantime, `death` reports it."""
        assert self._process.stdin is not None
        self.job, self._began, self._is_new, self.peak = job, time.monotonic(), True, 0
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job.document()).encode() + b"\n")
            self._process.stdin.flush()

    def has_new_job(self) -> bool:
        """True on the first call for each job."""
        is_new, self._is_new = self._is_new, False
        return is_new

    def release(self) -> int:
        """End the worker's job; return the peak of its memory in bytes."""
        self.measure()
        self.job = None
        return self.peak

    @staticmethod
    def wait_for_events(workers: Iterable["WorkerProcess"], seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                assert worker._process.stdout is not None
                selector.register(worker._process.stdout, selectors.EVENT_READ)
            selector.select(seconds)

    def read(self) -> list[Event]:
        """Events since the last call; an incomplete line waits for its rest."""
        assert self._process.stdout is not None
        while chunk := self._process.stdout.read(_CHUNK):
            self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        return [from_document(json.loads(line)) for line in lines]

    def death(self) -> str | None:
        """How the process ended, as a phrase; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
            return f"was killed by {signal.Signals(-code).name}{hint}"
        return f"ended with exit code {code}"

    def log_tail(self) -> str:
        end = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(end - _LOG_TAIL, 0))
        return self._stderr.read().decode(errors="replace")

    def measure(self) -> int:
        """Resident memory of the process and its children in bytes; 0 on a system without /proc."""
        used = sum(map(_resident, _with_children(self._process.pid)))
        self.peak = max(self.peak, used)
        return used

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):  # an unread job
                    pipe.close()


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in path.read_text().split():
                yield from _with_children(int(child))


def _resident(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def main() -> None:
    die_with_parent(os.getppid())  # if the scheduler has ended by now, at the end of stdin
    out = _own_stdout()

    def write(document: object) -> None:
        out.write(json.dumps(document) + "\n")
        out.flush()

    def send(event: Event) -> None:
        write(to_document(event))

    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), name="jobs", daemon=True).start()
    while True:
        send(run_job(Job.from_document(json.loads(jobs.get())), send))


def _own_stdout() -> IO[str]:
    """The stdout pipe, for events alone; output of libraries is redirected to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def _read(jobs: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(_SCHEDULER_GONE)


if __name__ == "__main__":
    main()


_SHARE: Final = 0.9  # of the memory that is free when the executor starts
_POLL: Final = 0.1  # seconds between two checks of the limits


class LocalExecutor:
    """Executor in processes of this machine, as many as processors and memory allow. A worker that dies fails one
    job."""

    name: Final = "local"

    def __init__(self, jobs: int, limits: JobLimits) -> None:
        self._jobs = jobs
        self._limits = limits
        self._memory = _SHARE * available_memory()
        self._threads = max(processors() // jobs, 1)
        self._idle: list[WorkerProcess] = []
        self._busy: list[WorkerProcess] = []

    def takes(self, job: Job) -> bool:
        """True if a process and memory are free; a job that needs more memory waits until no other job runs."""
        used = sum(worker.job.memory for worker in self._busy if worker.job)
        return not self._busy or (len(self._busy) < self._jobs and used + job.memory <= self._memory)

    def start(self, job: Job) -> None:
        worker = self._idle_worker() or WorkerProcess(self._threads)
        self._busy.append(worker)
        worker.send(job)

    def events(self, patience: float) -> Sequence[Event]:
        """See `Executor.events`. Limits are checked several times a second."""
        deadline = time.monotonic() + patience
        events: list[Event] = []
        while not events:
            remaining = deadline - time.monotonic()
            if not self._busy or remaining <= 0:
                break
            WorkerProcess.wait_for_events(self._busy, min(remaining, _POLL))
            for worker in list(self._busy):
                events += self._events_of(worker)
        return events

    def close(self) -> None:
        for worker in (*self._busy, *self._idle):
            worker.kill()
        self._busy.clear()
        self._idle.clear()

    def _idle_worker(self) -> WorkerProcess | None:
        """An idle worker that still runs, so that a dead one costs no job an attempt; None if there is none."""
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

    def _release(self, worker: WorkerProcess, event: JobFinished) -> JobFinished:
        peak = worker.release()
        self._busy.remove(worker)
        self._idle.append(worker)
        return JobFinished(event.key, event.seconds, event.cached, peak or event.memory, event.failure)

    def _failure(self, worker: WorkerProcess) -> Failure | None:
        """Failure of a worker that died or exceeds a limit."""
        assert worker.job is not None
        seconds, memory = self._limits.seconds, self._limits.memory
        if (death := worker.death()) is not None:
            text = f"the worker of {worker.job.title} {death}; its uncommitted work is lost"
            return Failure(FailureClass.RETRYABLE, "WorkerDied", text, SYSTEM.number, worker.log_tail())
        if seconds is not None and worker.elapsed > seconds:
            return time_exceeded(worker.job.title, worker.elapsed, worker.log_tail())
        if memory is not None and worker.measure() > memory:
            return memory_exceeded(worker.job.title, worker.peak, memory, worker.log_tail())
        return None
