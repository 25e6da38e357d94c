"""Ray executor: each job is a task of a Ray cluster, or of a Ray on this machine.

A job's result is what its task returns, and nothing else. Its events come through a mailbox actor, which may be lost
without harm.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.build.executors.ray_cluster import RayCluster, RayNode
from nxpipe.pipeline.build.jobs import (
    Event,
    Failure,
    FailureClass,
    Job,
    JobFinished,
    JobLimits,
    JobLog,
    JobStarted,
    memory_exceeded,
    time_exceeded,
)
from nxpipe.pipeline.util.exit_codes import INTERNAL, SOFTWARE, SYSTEM

_BEAT: Final = 1.0  # seconds between two heartbeats of a task
_PATIENCE: Final = 5.0  # seconds that a finished task waits for its messages to arrive

RunJob: TypeAlias = Callable[[Job, Callable[[Event], None]], JobFinished]


@dataclass(frozen=True)
class Heartbeat:
    """Of a running task, which uses so many bytes. It also tells that the job has started, if that message was lost."""

    memory: int


Message: TypeAlias = tuple[int, Event | Heartbeat]


class Mailbox:
    """Actor with the messages of tasks, by task number, until the scheduler fetches them."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def put(self, task: int, content: Event | Heartbeat) -> None:
        self._messages.append((task, content))

    def take(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages


class _Sender:
    """Sends messages of a task. It neither blocks nor fails if the mailbox is gone."""

    def __init__(self, task: int, mailbox: Any) -> None:
        self._task = task
        self._mailbox = mailbox
        self._last: Any = None

    def send(self, content: Event | Heartbeat) -> None:
        self._last = self._mailbox.put.remote(self._task, content)

    def flush(self) -> None:
        """Messages of one task arrive in order: with the last one, all have."""
        import ray

        ray.wait([self._last], timeout=_PATIENCE)


def run_task(task: int, job: Job, mailbox: Any, run_job: RunJob | None) -> JobFinished:
    """The task. It sends nothing after it has returned."""
    run_job = run_job or _default_run_job()
    sender = _Sender(task, mailbox)
    sender.send(JobStarted(job.key, f"{socket.gethostname()}/{os.getpid()}"))
    with _heartbeats(sender):
        finished = run_job(job, sender.send)
    sender.flush()
    return finished


def _default_run_job() -> RunJob:
    from nxpipe.pipeline.build.worker import run_job

    return run_job


@contextmanager
def _heartbeats(sender: _Sender) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT):
            sender.send(Heartbeat(_memory()))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _memory() -> int:
    """Bytes of this process and its children, such as a compiler."""
    from ray.thirdparty_files import psutil

    own = psutil.Process()
    used = 0
    for process in (own, *own.children(recursive=True)):
        try:
            used += process.memory_info().rss
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return used


def failure_from_task(error: Exception, title: str, worker: str) -> Failure:
    """From what `ray.get` raised. A failure of the job itself does not raise: it is in the task's result."""
    from ray import exceptions

    log = str(error).strip()
    if isinstance(error, exceptions.RayTaskError):
        return _outside_job(error.cause, f"{title}: {worker}", log)
    if isinstance(error, exceptions.OutOfMemoryError):
        message = (
            f"{title}: Ray killed {worker}, for its node was out of memory; give the nodes more memory or fewer CPUs"
        )
        return Failure(FailureClass.RETRYABLE, "OutOfMemory", message, SYSTEM.number, log)
    message = f"{title}: {worker} or its node was lost; its uncommitted work is lost"
    return Failure(FailureClass.RETRYABLE, "WorkerDied", message, SYSTEM.number, log)


def _outside_job(cause: BaseException, worker: str, log: str) -> Failure:
    """An error outside the job fails every job: the node has no nxpipe, or another version."""
    kind, text = type(cause).__name__, " ".join(str(cause).split())
    if isinstance(cause, ImportError):
        message = f"{worker} lacks software: {text}; install the same nxpipe on every node of the cluster"
        return Failure(FailureClass.HOST, kind, message, SOFTWARE.number, log)
    message = f"{worker} failed outside the job: {text}; install the same nxpipe on every node of the cluster"
    return Failure(FailureClass.HOST, kind, message, INTERNAL.number, log)


_POLL: Final = 0.2  # seconds between two reads of the mailbox
_NODES_INTERVAL: Final = 2.0  # seconds between two listings of the nodes
_MAILBOX_TIMEOUT: Final = 10.0  # seconds
_AHEAD: Final = 2  # jobs submitted for each CPU: the next one is there when one ends, and the largest still go first
# The mailbox runs on the head node, without which there is no cluster.
_ON_THE_HEAD: Final = {"node:__internal_head__": 0.001}


@dataclass
class _Task:
    """`requested` is memory in bytes. `began`: time of its first message, by the scheduler's clock."""

    job: Job
    reference: Any
    requested: int
    began: float | None = None
    worker: str = "its worker"
    memory: int = 0


class RayExecutor:
    name = "ray"

    def __init__(self, address: str | None, limits: JobLimits, jobs: int | None, run_job: RunJob | None = None) -> None:
        """`jobs` at once; None: as many as keep the cluster busy. `run_job` is the worker's function."""
        self._limits = limits
        self._jobs = jobs
        self._run_job = run_job
        self._cluster = RayCluster(address, jobs)
        import ray

        self._ray = ray
        self._mailbox = ray.remote(Mailbox).options(num_cpus=0, max_restarts=-1, resources=_ON_THE_HEAD).remote()
        self._run_task = ray.remote(run_task)
        self._numbers = count()
        self._tasks: dict[int, _Task] = {}
        self._counted_at = 0.0
        self._nodes: list[RayNode] = []
        self._has_no_nodes = False

    def takes(self, job: Job) -> bool:
        self._count_nodes()
        room = self._jobs or _AHEAD * sum(node.cpus for node in self._nodes)
        return len(self._tasks) < max(1, room)  # queued tasks make an autoscaling cluster grow

    def start(self, job: Job) -> None:
        """Requests at most the memory of the largest node, else the task would wait for ever."""
        self._count_nodes()
        requested = min(job.memory, max((node.memory for node in self._nodes), default=job.memory))
        number = next(self._numbers)
        task = self._run_task.options(num_cpus=1, memory=requested, max_retries=0, name=job.title)
        self._tasks[number] = _Task(job, task.remote(number, job, self._mailbox, self._run_job), requested)

    def events(self, patience: float) -> Sequence[Event]:
        deadline = time.monotonic() + patience
        while True:
            left = max(0.0, deadline - time.monotonic())
            with self._cluster.connection_errors():
                events = self._poll(min(_POLL, left))
            if events or left == 0.0:
                return events

    def close(self) -> None:
        self._tasks.clear()
        self._cluster.close()

    def _poll(self, seconds: float) -> list[Event]:
        """A task has sent all its messages before it ends: ends are looked up first and returned last."""
        ended = self._ended_within(seconds)
        events = [event for message in self._fetch() if (event := self._read(message))]
        events += [self._end_of(number) for number in ended]
        self._cancel_over_limits()
        return events + self._wait_for_nodes()

    def _ended_within(self, seconds: float) -> list[int]:
        if not self._tasks:
            time.sleep(seconds)
            return []
        numbers = {task.reference: number for number, task in self._tasks.items()}
        if not self._ray.wait(list(numbers), timeout=seconds)[0]:
            return []
        ended, _ = self._ray.wait(list(numbers), num_returns=len(numbers), timeout=0)
        return [numbers[reference] for reference in ended]

    def _fetch(self) -> list[Message]:
        """A mailbox that died is restarted, empty."""
        try:
            messages: list[Message] = self._ray.get(self._mailbox.take.remote(), timeout=_MAILBOX_TIMEOUT)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            return []
        return messages

    def _read(self, message: Message) -> Event | None:
        number, content = message
        task = self._tasks.get(number)
        if task is None:  # it arrived after its task was killed
            return None
        task.began = task.began or time.monotonic()
        if isinstance(content, JobStarted):
            task.worker = content.worker
        if isinstance(content, JobStarted | JobLog | JobFinished):
            return content
        task.memory = max(task.memory, content.memory)
        return None

    def _end_of(self, number: int) -> JobFinished:
        task = self._tasks.pop(number)
        try:
            ended: JobFinished = self._ray.get(task.reference)
        except Exception as error:  # Ray derives its errors from those of the task, of any class
            seconds = time.monotonic() - task.began if task.began else 0.0
            failure = self._over_limit(task) or failure_from_task(error, task.job.title, task.worker)
            return JobFinished(task.job.key, seconds, memory=task.memory, failure=failure)
        return ended

    def _cancel_over_limits(self) -> None:
        """Repeated until the task has ended: a cancel is idempotent, and one may be lost."""
        for task in self._tasks.values():
            if self._over_limit(task):
                self._ray.cancel(task.reference, force=True)

    def _over_limit(self, task: _Task) -> Failure | None:
        seconds, memory = self._limits.seconds, self._limits.memory
        if seconds is not None and task.began and (elapsed := time.monotonic() - task.began) > seconds:
            return time_exceeded(task.job.title, elapsed)
        if memory is not None and task.memory > memory:
            return memory_exceeded(task.job.title, task.memory, memory)
        return None

    def _wait_for_nodes(self) -> list[Event]:
        """Without nodes, jobs wait, which is logged once. A task that requests more memory than any node has is
        submitted again with less."""
        self._count_nodes()
        largest = max((node.memory for node in self._nodes), default=None)
        waiting = [number for number, task in self._tasks.items() if task.began is None]
        reported, self._has_no_nodes = self._has_no_nodes, largest is None and bool(waiting)
        if largest is None:
            key = self._tasks[waiting[0]].job.key if waiting else ""
            line = f"waits for a node: the Ray cluster at {self._cluster.address} has no CPU to offer"
            return [JobLog(key, line)] if self._has_no_nodes and not reported else []
        for number in waiting:
            if self._tasks[number].requested > largest:
                task = self._tasks.pop(number)
                self._ray.cancel(task.reference)
                self.start(task.job)
        return []

    def _count_nodes(self) -> None:
        if not self._counted_at or time.monotonic() - self._counted_at > _NODES_INTERVAL:
            self._nodes = self._cluster.nodes()
            self._counted_at = time.monotonic()
