"""What runs on the nodes of a Ray cluster: an item, and the box into which it puts what it has to say."""

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
from nxpipe.pipeline.build.jobs import Event, Job, JobFinished, JobLimits, JobLog, JobStarted
from nxpipe.pipeline.build.status import Failure, FailureClass
from nxpipe.pipeline.util.console import human_bytes
from nxpipe.pipeline.util.exit_codes import COMPILE, INTERNAL, SOFTWARE, SYSTEM

_BEAT: Final = 1.0  # seconds between two signs of life
_PATIENCE: Final = 5.0  # seconds that an end waits for what was said before it

RunJob: TypeAlias = Callable[[Job, Callable[[Event], None]], JobFinished]


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life: the item was begun, even where the letter that said so was lost, and holds so many bytes."""

    memory: int


Message: TypeAlias = tuple[int, Event | Heartbeat]


class Mailbox:
    """An actor: letters of the tasks, by their numbers, until the driver fetches them.

    It may die with letters in it. They are talk; what an item came to is what its task returns.
    """

    def __init__(self) -> None:
        self._letters: list[Message] = []

    def put(self, task: int, said: Event | Heartbeat) -> None:
        self._letters.append((task, said))

    def take(self) -> list[Message]:
        letters, self._letters = self._letters, []
        return letters


class _Voice:
    """Never waits and never fails: no work is lost because nobody listens."""

    def __init__(self, task: int, mailbox: Any) -> None:
        self._task = task
        self._mailbox = mailbox
        self._last: Any = None

    def say(self, said: Event | Heartbeat) -> None:
        self._last = self._mailbox.put.remote(self._task, said)

    def be_heard(self) -> None:
        """One task's letters arrive in their order: with the last, all have."""
        import ray

        ray.wait([self._last], timeout=_PATIENCE)


def run_task(task: int, job: Job, mailbox: Any, work: RunJob | None) -> JobFinished:
    """The task itself. Nothing of it is said after it has returned."""
    work = work or _usual_work()
    voice = _Voice(task, mailbox)
    voice.say(JobStarted(job.key, f"{socket.gethostname()}/{os.getpid()}"))
    with _signs_of_life(voice):
        ended = work(job, voice.say)
    voice.be_heard()
    return ended


def _usual_work() -> RunJob:
    from nxpipe.pipeline.build.worker import run_job

    return run_job


@contextmanager
def _signs_of_life(voice: _Voice) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT):
            voice.say(Heartbeat(_held()))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _held() -> int:
    """Bytes of memory of this process and of those that it started, as a compiler is."""
    from ray.thirdparty_files import psutil

    own = psutil.Process()
    held = 0
    for process in (own, *own.children(recursive=True)):
        try:
            held += process.memory_info().rss
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return held


def time_exceeded(title: str, seconds: float) -> Failure:
    return Failure(
        FailureClass.LIMIT,
        "OutOfTime",
        f"{title}: not done after {seconds:.0f} s; allow more with --timeout",
        COMPILE.number,
    )


def memory_exceeded(title: str, held: int, allowed: int) -> Failure:
    text = (
        f"{title}: its worker took {human_bytes(held)} of memory, and {human_bytes(allowed)} are allowed; "
        "allow more with --memory-limit"
    )
    return Failure(FailureClass.LIMIT, "OutOfMemory", text, SYSTEM.number)


def failure_from_task(error: Exception, title: str, worker: str) -> Failure:
    """`error` is what `ray.get` raised; a failure of the work itself is none, for it is in the task's answer."""
    from ray import exceptions

    log = str(error).strip()
    if isinstance(error, exceptions.RayTaskError):
        return _of_our_own(error.cause, f"{title}: {worker}", log)
    if isinstance(error, exceptions.OutOfMemoryError):
        message = f"{title}: Ray ended {worker}, for its node was out of memory; give nodes more of it, or fewer CPUs"
        return Failure(FailureClass.RETRYABLE, "OutOfMemory", message, SYSTEM.number, log)
    message = f"{title}: {worker} or its node was lost; what it had not committed is lost"
    return Failure(FailureClass.RETRYABLE, "WorkerDied", message, SYSTEM.number, log)


def _of_our_own(cause: BaseException, worker: str, log: str) -> Failure:
    """No item fares better with an error around the work: the node has no nxpipe, another one, or ours is broken."""
    kind, said = type(cause).__name__, " ".join(str(cause).split())
    if isinstance(cause, ImportError):
        message = f"{worker} lacks software: {said}; install the same nxpipe on every node of the cluster"
        return Failure(FailureClass.HOST, kind, message, SOFTWARE.number, log)
    message = f"{worker} failed outside of the work: {said}; is the same nxpipe installed on every node?"
    return Failure(FailureClass.HOST, kind, message, INTERNAL.number, log)


_LOOK: Final = 0.2  # seconds between two looks at the mailbox
_CENSUS: Final = 2.0  # seconds between two looks at the nodes
_ANSWER: Final = 10.0  # seconds for the mailbox to answer
_AHEAD: Final = 2  # items begun for each CPU: the next one is there when one ends, and largest first still holds
# The mailbox lives where the cluster's own head lives: what ends the one ends the other.
_ON_THE_HEAD: Final = {"node:__internal_head__": 0.001}


@dataclass
class _Task:
    """`asked` is the memory that it is to find on a node. `began` is set when it says something, by our clock."""

    job: Job
    reference: Any
    asked: int
    began: float | None = None
    worker: str = "its worker"
    memory: int = 0


class RayExecutor:
    name = "ray"

    def __init__(self, address: str | None, limits: JobLimits, jobs: int | None, work: RunJob | None = None) -> None:
        """`jobs`: items at once; none: as many as keep the cluster busy. `work` is what an item is carried out with."""
        self._limits = limits
        self._jobs = jobs
        self._work = work
        self._cluster = RayCluster(address, jobs)
        import ray

        self._ray = ray
        self._mailbox = ray.remote(Mailbox).options(num_cpus=0, max_restarts=-1, resources=_ON_THE_HEAD).remote()
        self._carried_out = ray.remote(run_task)
        self._numbers = count()
        self._tasks: dict[int, _Task] = {}
        self._counted_at = 0.0
        self._nodes: list[RayNode] = []
        self._lacks = False

    def takes(self, job: Job) -> bool:
        self._count_nodes()
        room = self._jobs or _AHEAD * sum(node.cpus for node in self._nodes)
        return len(self._tasks) < max(1, room)  # what waits makes a cluster that grows grow

    def start(self, job: Job) -> None:
        """It asks for no more memory than the largest node has, or it would wait for ever."""
        self._count_nodes()
        asked = min(job.memory, max((node.memory for node in self._nodes), default=job.memory))
        number = next(self._numbers)
        task = self._carried_out.options(num_cpus=1, memory=asked, max_retries=0, name=job.title)
        self._tasks[number] = _Task(job, task.remote(number, job, self._mailbox, self._work), asked)

    def events(self, patience: float) -> Sequence[Event]:
        deadline = time.monotonic() + patience
        while True:
            left = max(0.0, deadline - time.monotonic())
            with self._cluster.lost_is_said():
                happened = self._look(min(_LOOK, left))
            if happened or left == 0.0:
                return happened

    def close(self) -> None:
        self._tasks.clear()
        self._cluster.close()

    def _look(self, seconds: float) -> list[Event]:
        """Who ends has put all his letters before: so the ends are looked for first, and told last."""
        ended = self._ended_within(seconds)
        happened = [event for letter in self._letters() if (event := self._read(letter))]
        happened += [self._end_of(number) for number in ended]
        self._end_what_is_over_its_limits()
        return happened + self._capacity()

    def _ended_within(self, seconds: float) -> list[int]:
        if not self._tasks:
            time.sleep(seconds)
            return []
        numbers = {task.reference: number for number, task in self._tasks.items()}
        if not self._ray.wait(list(numbers), timeout=seconds)[0]:
            return []
        ended, _ = self._ray.wait(list(numbers), num_returns=len(numbers), timeout=0)
        return [numbers[reference] for reference in ended]

    def _letters(self) -> list[Message]:
        """A mailbox that died is started again, empty."""
        try:
            letters: list[Message] = self._ray.get(self._mailbox.take.remote(), timeout=_ANSWER)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            return []
        return letters

    def _read(self, letter: Message) -> Event | None:
        number, said = letter
        task = self._tasks.get(number)
        if task is None:  # it came after the end of one that was killed
            return None
        task.began = task.began or time.monotonic()
        if isinstance(said, JobStarted):
            task.worker = said.worker
        if isinstance(said, JobStarted | JobLog | JobFinished):
            return said
        task.memory = max(task.memory, said.memory)
        return None

    def _end_of(self, number: int) -> JobFinished:
        task = self._tasks.pop(number)
        try:
            ended: JobFinished = self._ray.get(task.reference)
        except Exception as error:  # Ray derives its errors from those of the task, which may be of any kind
            seconds = time.monotonic() - task.began if task.began else 0.0
            failure = self._over_limit(task) or failure_from_task(error, task.job.title, task.worker)
            return JobFinished(task.job.key, seconds, memory=task.memory, failure=failure)
        return ended

    def _end_what_is_over_its_limits(self) -> None:
        """Asked again and again until it has ended: to cancel twice does no harm, and a request may be lost."""
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

    def _capacity(self) -> list[Event]:
        """Items that no node can take: they wait, which is said once; those that are too large for any that is
        there now are begun again with what there is."""
        self._count_nodes()
        largest = max((node.memory for node in self._nodes), default=None)
        waiting = [number for number, task in self._tasks.items() if task.began is None]
        lacking, self._lacks = self._lacks, largest is None and bool(waiting)
        if largest is None:
            key = self._tasks[waiting[0]].job.key if waiting else ""
            line = f"waits for a node: the Ray cluster at {self._cluster.address} has no CPU to offer"
            return [JobLog(key, line)] if self._lacks and not lacking else []
        for number in waiting:
            if self._tasks[number].asked > largest:
                task = self._tasks.pop(number)
                self._ray.cancel(task.reference)
                self.start(task.job)
        return []

    def _count_nodes(self) -> None:
        if not self._counted_at or time.monotonic() - self._counted_at > _CENSUS:
            self._nodes = self._cluster.nodes()
            self._counted_at = time.monotonic()
