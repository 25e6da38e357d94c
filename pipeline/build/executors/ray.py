"""Executor on a Ray cluster, or on a Ray started on this machine."""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeAlias

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
from nxpipe.pipeline.util.errors import ExecutorUnavailable, MissingSoftware, PipelineError
from nxpipe.pipeline.util.exit_codes import INTERNAL, SOFTWARE, SYSTEM

_PATIENCE: Final = 5.0  # seconds for a port to answer
_PROBE_TIMEOUT: Final = 20.0  # seconds for the probe process to connect
_PROBE: Final = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='CRITICAL')"
_OBJECTS: Final = 80 * 2**20  # bytes: jobs are small documents, results go through the store
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_ADDRESS: Final = re.compile(r"(ray://)?[^/]+:\d+")
_PAUSES: Final = (1, 3)  # seconds between attempts to connect
_VERSIONS: Final = re.compile(r"Ray:\s*(\S+)\s+Python:\s*(\S+)")


@dataclass(frozen=True)
class RayNode:
    cpus: int
    memory: int  # bytes


class RayCluster:
    """The one Ray connection of this process. Without an address, Ray is started on this machine and stopped by
    `close`."""

    def __init__(self, address: str | None, jobs: int | None) -> None:
        self._ray = _ray()
        self._connection_errors = _connection_errors()
        self.address = address or "this machine's own"
        if address is not None:
            _require_cluster(address)
        with _own_signals():
            context = self._connect(address, jobs)
        # Ray reports dead workers on stdout, which is for results; the executor reports them as failures of their jobs.
        self._ray._private.worker._worker_logs_enabled = False
        self._folder = None if address else Path(context.address_info["session_dir"])
        self._endpoint = address if address and address.startswith("ray://") else context.address_info["address"]

    def _connect(self, address: str | None, jobs: int | None) -> Any:
        quiet = {"log_to_driver": False, "logging_level": "CRITICAL", "runtime_env": {"env_vars": _ONE_THREAD}}
        try:
            if address is not None:
                return self._connect_to(address, quiet)
            # Without it, Ray writes a token to the home folder, which may not be writable.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            return self._ray.init(
                "local", num_cpus=jobs, object_store_memory=_OBJECTS, include_dashboard=False, **quiet
            )
        except Exception as error:  # Ray raises many classes
            if address is not None:
                raise unavailable(address, str(error)) from error
            raise ExecutorUnavailable(f"Ray cannot be started on this machine: {_last_line(str(error))}") from error

    def _connect_to(self, address: str, options: dict[str, Any]) -> Any:
        """The connection to a cluster. Its client server starts a process for each driver, which may fail by chance."""
        for pause in _PAUSES:
            with suppress(ConnectionAbortedError):
                return self._ray.init(address, **options)
            time.sleep(pause)
        return self._ray.init(address, **options)

    def nodes(self) -> list[RayNode]:
        """Nodes that are alive and have a CPU.

        The port is checked first: without its head, Ray would wait a minute and then end this process.
        """
        with self.connection_errors():
            _require_open_port(self._endpoint)
            offers = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [
            RayNode(int(resources["CPU"]), int(resources.get("memory", 0)))
            for resources in offers
            if resources.get("CPU", 0) >= 1
        ]

    @contextmanager
    def connection_errors(self) -> Iterator[None]:
        """Turn every error of a lost connection into ExecutorUnavailable."""
        try:
            yield
        except self._connection_errors as error:
            raise ExecutorUnavailable(
                f"The Ray cluster at {self.address} no longer answers ({_first_line(str(error))}); "
                "start it again, then run the same command: cached cells are not built again"
            ) from error

    def close(self) -> None:
        """Disconnect; Ray ends all tasks of the connection."""
        self._ray.shutdown()
        if self._folder is not None:  # logs and sockets that Ray leaves behind
            shutil.rmtree(self._folder, ignore_errors=True)


def _ray() -> Any:
    """The ray module, without its usage statistics unless the user has enabled them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingSoftware("ray", "--executor ray", "pip install 'nxpipe[ray]'") from error
    return ray


def _connection_errors() -> tuple[type[Exception], ...]:
    """Errors of a lost connection; each of Ray's layers raises its own."""
    from ray import exceptions

    losses: list[type[Exception]] = [OSError, exceptions.RaySystemError, exceptions.RpcError]
    with suppress(ImportError):  # without it there is no ray://
        import grpc

        losses.append(grpc.RpcError)
    return tuple(losses)


def _require_cluster(address: str) -> None:
    """Probe the address from another process: Ray itself gives up after minutes, prints pages and may end the
    process."""
    if address != "auto" and not _ADDRESS.fullmatch(address):
        raise unavailable(address, "it is neither HOST:PORT nor ray://HOST:PORT nor auto")
    try:
        if address != "auto":
            _require_open_port(address)
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE, address], capture_output=True, text=True, timeout=_PROBE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise unavailable(address, f"it did not answer within {_PROBE_TIMEOUT:g} seconds") from None
    except OSError as error:
        raise unavailable(address, str(error)) from error
    if probe.returncode != 0:
        raise unavailable(address, probe.stderr)


def _require_open_port(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()


def unavailable(address: str, text: str) -> PipelineError:
    """The error for a message of Ray about an address."""
    if versions := _VERSIONS.search(text):
        import ray

        python = ".".join(map(str, sys.version_info[:3]))
        return ExecutorUnavailable(
            f"The Ray cluster at {address} runs Ray {versions[1]} on Python {versions[2]}, and this is Ray "
            f"{ray.__version__} on Python {python}; install the cluster's versions here"
        )
    if "ray[client]" in text:
        return MissingSoftware("grpcio", f"--address {address}", "pip install 'nxpipe[ray]'")
    advice = (
        "pass the address of the cluster's client server, by default port 10001"
        if address.startswith("ray://")
        else "start a node of the cluster on this machine with `ray start`, or pass ray://HOST:10001, which needs none"
    )
    return ExecutorUnavailable(f"no Ray cluster at {address}: {_last_line(text)}; {advice}")


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces when it connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".") or "no message"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].rstrip(".")[:300] or "no message"


_BEAT: Final = 1.0  # seconds between two heartbeats of a task

RunJob: TypeAlias = Callable[[Job, Callable[[Event], None]], JobFinished]


@dataclass(frozen=True)
class Heartbeat:
    """Heartbeat of a running task, with its memory in bytes. It also marks the job as started if `JobStarted` was
    lost."""

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
    """Sender of a task's messages. It neither blocks nor fails if the mailbox is lost."""

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
    """The Ray task: run a job and send its events. No message follows its return."""
    run_job = run_job or _default_run_job()
    sender = _Sender(task, mailbox)
    sender.send(JobStarted(job.key, f"{socket.gethostname()}/{os.getpid()}"))
    sender.flush()  # a worker that is killed later has a name in the report
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

    parent = psutil.Process()
    used = 0
    for process in (parent, *parent.children(recursive=True)):
        try:
            used += process.memory_info().rss
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return used


def failure_from_task(error: Exception, title: str, worker: str) -> Failure:
    """Failure for an exception of `ray.get`. A failure of the job itself is in the task's result."""
    from ray import exceptions

    log = str(error).strip()
    if isinstance(error, exceptions.RayTaskError):
        return _outside_job(error.cause, f"{title}: {worker}", log)
    if isinstance(error, exceptions.OutOfMemoryError):
        message = (
            f"{title}: Ray killed {worker}, because its node was out of memory; "
            "give the nodes more memory or fewer CPUs"
        )
        return Failure(FailureClass.RETRYABLE, "OutOfMemory", message, SYSTEM.number, log)
    message = f"{title}: {worker} or its node was lost; its uncommitted work is lost"
    return Failure(FailureClass.RETRYABLE, "WorkerDied", message, SYSTEM.number, log)


def _outside_job(cause: BaseException, worker: str, log: str) -> Failure:
    """Failure for an error outside the job, which fails every job: the node has no nxpipe, or another version."""
    kind, text = type(cause).__name__, " ".join(str(cause).split())
    if isinstance(cause, ImportError):
        message = f"{worker} lacks software: {text}; install the same nxpipe on every node of the cluster"
        return Failure(FailureClass.HOST, kind, message, SOFTWARE.number, log)
    message = f"{worker} failed outside the job: {text}; install the same nxpipe on every node of the cluster"
    return Failure(FailureClass.HOST, kind, message, INTERNAL.number, log)


_POLL: Final = 0.2  # seconds between two reads of the mailbox
_NODES_INTERVAL: Final = 2.0  # seconds between two listings of the nodes
_MAILBOX_TIMEOUT: Final = 10.0  # seconds
_AHEAD: Final = 2  # jobs submitted for each CPU: a next one is queued when one ends, and the largest still start first
# The mailbox runs on the head node, since the cluster does not survive its loss.
_ON_THE_HEAD: Final = {"node:__internal_head__": 0.001}


@dataclass
class _Task:
    """A submitted task. `requested` is memory in bytes; `began` the time of its first message, by the scheduler's
    clock."""

    job: Job
    reference: Any
    requested: int
    began: float | None = None
    worker: str = "its worker"
    memory: int = 0


class RayExecutor:
    name = "ray"

    def __init__(self, address: str | None, limits: JobLimits, jobs: int | None, run_job: RunJob | None = None) -> None:
        """`jobs`: most jobs at once; None: as many as keep the cluster busy. `run_job` replaces the worker's
        function."""
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
        limit = self._jobs or _AHEAD * sum(node.cpus for node in self._nodes)
        return len(self._tasks) < max(1, limit)  # queued tasks make an autoscaling cluster grow

    def start(self, job: Job) -> None:
        """Submit a job. It requests at most the memory of the largest node: a task that fits no node waits for ever."""
        self._count_nodes()
        requested = min(job.memory, max((node.memory for node in self._nodes), default=job.memory))
        number = next(self._numbers)
        task = self._run_task.options(num_cpus=1, memory=requested, max_retries=0, name=job.title)
        self._tasks[number] = _Task(job, task.remote(number, job, self._mailbox, self._run_job), requested)

    def events(self, patience: float) -> Sequence[Event]:
        deadline = time.monotonic() + patience
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            with self._cluster.connection_errors():
                events = self._poll(min(_POLL, remaining))
            if events or remaining == 0.0:
                return events

    def close(self) -> None:
        self._tasks.clear()
        self._cluster.close()

    def _poll(self, seconds: float) -> list[Event]:
        """Events of messages and ended tasks. A task ends after its last message: ends are read first and returned
        last."""
        ended_tasks = self._ended_within(seconds)
        events = [event for message in self._fetch() if (event := self._read(message))]
        events += [self._end_of(number) for number in ended_tasks]
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
        """Messages of the mailbox actor; none if it does not answer, or has lost them in a restart."""
        try:
            messages: list[Message] = self._ray.get(self._mailbox.take.remote(), timeout=_MAILBOX_TIMEOUT)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            return []
        return messages

    def _read(self, message: Message) -> Event | None:
        number, content = message
        task = self._tasks.get(number)
        if task is None:  # a message that arrived after its task was killed
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
            event: JobFinished = self._ray.get(task.reference)
        except Exception as error:  # Ray derives its errors from those of the task, of any class
            seconds = time.monotonic() - task.began if task.began else 0.0
            failure = self._over_limit(task) or failure_from_task(error, task.job.title, task.worker)
            return JobFinished(task.job.key, seconds, memory=task.memory, failure=failure)
        return event

    def _cancel_over_limits(self) -> None:
        """Cancel tasks over a limit, at each poll until they end: cancelling is idempotent, and a request may be
        lost."""
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
        """Log once that jobs wait for a node. A task that requests more memory than any node has is submitted again
        with less."""
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
