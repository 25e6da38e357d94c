"""Processes of this machine, as many as its processors and its memory allow. Whatever becomes of one, it takes one item
with it."""

import time
from collections.abc import Sequence
from typing import Final

from nxpipe.pipeline.build.events import Begun, Ended, Event, Fault
from nxpipe.pipeline.build.executors.process import WorkerProcess
from nxpipe.pipeline.build.executors.protocol import Limits
from nxpipe.pipeline.build.item import Item
from nxpipe.pipeline.util.exit_codes import COMPILE, SYSTEM
from nxpipe.pipeline.util.process import available_memory, processors
from nxpipe.pipeline.util.text import human_bytes

_SHARE: Final = 0.9  # of the memory that is free at the beginning
_LOOK: Final = 0.1  # seconds between two looks at limits


class LocalExecutor:
    name: Final = "local"

    def __init__(self, jobs: int, limits: Limits) -> None:
        self._jobs = jobs
        self._limits = limits
        self._memory = _SHARE * available_memory()
        self._threads = max(processors() // jobs, 1)
        self._idle: list[WorkerProcess] = []
        self._busy: list[WorkerProcess] = []

    def takes(self, item: Item) -> bool:
        """What is too large for the memory that is left waits, until it is alone."""
        taken = sum(worker.item.memory for worker in self._busy if worker.item)
        return not self._busy or (len(self._busy) < self._jobs and taken + item.memory <= self._memory)

    def start(self, item: Item) -> None:
        worker = self._idle_worker() or WorkerProcess(self._threads)
        self._busy.append(worker)
        worker.give(item)

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
        assert worker.item is not None
        heard: list[Event] = [Begun(worker.item.key, worker.name)] if worker.is_new_to_its_item() else []
        heard += worker.read()
        if heard and isinstance(heard[-1], Ended):
            heard[-1] = self._back_from(worker, heard[-1])
        elif fault := self._fault(worker):
            heard.append(Ended(worker.item.key, worker.elapsed, memory=worker.peak, fault=fault))
            self._busy.remove(worker)
            worker.kill()
        return heard

    def _back_from(self, worker: WorkerProcess, ended: Ended) -> Ended:
        peak = worker.take_back()
        self._busy.remove(worker)
        self._idle.append(worker)
        return Ended(ended.key, ended.seconds, ended.cached, peak or ended.memory, ended.fault)

    def _fault(self, worker: WorkerProcess) -> Fault | None:
        """Why a worker has to be given up, or is gone."""
        assert worker.item is not None
        seconds, memory = self._limits.seconds, self._limits.memory
        if (how := worker.death()) is not None:
            about = f"the worker of {worker.item.title} {how}"
            return Fault(
                "environmental",
                "WorkerDied",
                f"{about}; what it had not committed is lost",
                SYSTEM.number,
                worker.last_words(),
            )
        if seconds is not None and worker.elapsed > seconds:
            text = f"{worker.item.title}: not done after {worker.elapsed:.0f} s; allow more with --timeout"
            return Fault("limit", "OutOfTime", text, COMPILE.number, worker.last_words())
        if memory is not None and worker.measure() > memory:
            text = (
                f"{worker.item.title}: its worker took {human_bytes(worker.peak)} of memory, and "
                f"{human_bytes(memory)} are allowed; allow more with --memory-limit"
            )
            return Fault("limit", "OutOfMemory", text, SYSTEM.number, worker.last_words())
        return None
