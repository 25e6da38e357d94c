"""Items as tasks of a Ray cluster, one each: on several machines, or on this one.

What an item came to is what its task returns, and nothing else; what it says meanwhile comes through a mailbox.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from nxpipe.pipeline.build.events import Begun, Ended, Event, Fault, Said
from nxpipe.pipeline.build.executors.protocol import Limits
from nxpipe.pipeline.build.executors.ray_cluster import Cluster, Node
from nxpipe.pipeline.build.executors.ray_faults import fault_of, over_memory, over_time
from nxpipe.pipeline.build.executors.ray_worker import Letter, Mailbox, Work, carried_out
from nxpipe.pipeline.build.item import Item

_LOOK: Final = 0.2  # seconds between two looks at the mailbox
_CENSUS: Final = 2.0  # seconds between two looks at the nodes
_ANSWER: Final = 10.0  # seconds for the mailbox to answer
_AHEAD: Final = 2  # items begun for each CPU: the next one is there when one ends, and largest first still holds
# The mailbox lives where the cluster's own head lives: what ends the one ends the other.
_ON_THE_HEAD: Final = {"node:__internal_head__": 0.001}


@dataclass
class _Task:
    """`asked` is the memory that it is to find on a node. `began` is set when it says something, by our clock."""

    item: Item
    reference: Any
    asked: int
    began: float | None = None
    worker: str = "its worker"
    memory: int = 0


class RayExecutor:
    name = "ray"

    def __init__(self, address: str | None, limits: Limits, jobs: int | None, work: Work | None = None) -> None:
        """`jobs`: items at once; none: as many as keep the cluster busy. `work` is what an item is carried out with."""
        self._limits = limits
        self._jobs = jobs
        self._work = work
        self._cluster = Cluster(address, jobs)
        import ray

        self._ray = ray
        self._mailbox = ray.remote(Mailbox).options(num_cpus=0, max_restarts=-1, resources=_ON_THE_HEAD).remote()
        self._carried_out = ray.remote(carried_out)
        self._numbers = count()
        self._tasks: dict[int, _Task] = {}
        self._counted_at = 0.0
        self._nodes: list[Node] = []
        self._lacks = False

    def takes(self, item: Item) -> bool:
        self._count_nodes()
        room = self._jobs or _AHEAD * sum(node.cpus for node in self._nodes)
        return len(self._tasks) < max(1, room)  # what waits makes a cluster that grows grow

    def start(self, item: Item) -> None:
        """It asks for no more memory than the largest node has, or it would wait for ever."""
        self._count_nodes()
        asked = min(item.memory, max((node.memory for node in self._nodes), default=item.memory))
        number = next(self._numbers)
        task = self._carried_out.options(num_cpus=1, memory=asked, max_retries=0, name=item.title)
        self._tasks[number] = _Task(item, task.remote(number, item, self._mailbox, self._work), asked)

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

    def _letters(self) -> list[Letter]:
        """A mailbox that died is started again, empty."""
        try:
            letters: list[Letter] = self._ray.get(self._mailbox.take.remote(), timeout=_ANSWER)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            return []
        return letters

    def _read(self, letter: Letter) -> Event | None:
        number, said = letter
        task = self._tasks.get(number)
        if task is None:  # it came after the end of one that was killed
            return None
        task.began = task.began or time.monotonic()
        if isinstance(said, Begun):
            task.worker = said.worker
        if isinstance(said, Begun | Said | Ended):
            return said
        task.memory = max(task.memory, said.memory)
        return None

    def _end_of(self, number: int) -> Ended:
        task = self._tasks.pop(number)
        try:
            ended: Ended = self._ray.get(task.reference)
        except Exception as error:  # Ray derives its errors from those of the task, which may be of any kind
            seconds = time.monotonic() - task.began if task.began else 0.0
            fault = self._over_limit(task) or fault_of(error, task.item.title, task.worker)
            return Ended(task.item.key, seconds, memory=task.memory, fault=fault)
        return ended

    def _end_what_is_over_its_limits(self) -> None:
        """Asked again and again until it has ended: to cancel twice does no harm, and a request may be lost."""
        for task in self._tasks.values():
            if self._over_limit(task):
                self._ray.cancel(task.reference, force=True)

    def _over_limit(self, task: _Task) -> Fault | None:
        seconds, memory = self._limits.seconds, self._limits.memory
        if seconds is not None and task.began and (elapsed := time.monotonic() - task.began) > seconds:
            return over_time(task.item.title, elapsed)
        if memory is not None and task.memory > memory:
            return over_memory(task.item.title, task.memory, memory)
        return None

    def _capacity(self) -> list[Event]:
        """Items that no node can take: they wait, which is said once; those that are too large for any that is
        there now are begun again with what there is."""
        self._count_nodes()
        largest = max((node.memory for node in self._nodes), default=None)
        waiting = [number for number, task in self._tasks.items() if task.began is None]
        lacking, self._lacks = self._lacks, largest is None and bool(waiting)
        if largest is None:
            key = self._tasks[waiting[0]].item.key if waiting else ""
            line = f"waits for a node: the Ray cluster at {self._cluster.address} has no CPU to offer"
            return [Said(key, line)] if self._lacks and not lacking else []
        for number in waiting:
            if self._tasks[number].asked > largest:
                task = self._tasks.pop(number)
                self._ray.cancel(task.reference)
                self.start(task.item)
        return []

    def _count_nodes(self) -> None:
        if not self._counted_at or time.monotonic() - self._counted_at > _CENSUS:
            self._nodes = self._cluster.nodes()
            self._counted_at = time.monotonic()
