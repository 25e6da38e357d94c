"""The ranks of a program: one host function on every rank, in processes for devices or in threads for the emulator.

The launcher is the watchdog. It waits for reports of the ranks and never in a library: a rank that reports nothing for
`limit` seconds, or that ends without a result, ends all ranks.
"""

import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias

from nxpipe.emulator.run.devices import Implementation, open_runtime, resolved
from nxpipe.emulator.run.devices.environment import RankPlacement, free_address
from nxpipe.emulator.run.devices.faults import (
    CollectiveFault,
    DeviceTimeout,
    RankCrashed,
    RankFailed,
    RankHung,
    fault_named,
)
from nxpipe.emulator.run.devices.protocol import DeviceRuntime
from nxpipe.emulator.run.status import InvalidLoad, RuntimeFault

Document: TypeAlias = Any  # JSON
# The launcher's import path comes first, so that the rank finds the same packages.
_START: Final = (
    "import json, sys; job = json.load(open(sys.argv[1])); sys.path[:] = job['path']; "
    "from nxpipe.emulator.run.devices.rank_process import main; main(job)"
)
_START_LIMIT: Final = 120.0  # seconds, to import packages and to open the runtime
_KILL_LIMIT: Final = 30.0  # seconds, for the end of a killed process
_LOG_LINES: Final = 5  # of a crashed rank, in its error
_READ: Final = 1 << 16  # bytes


@dataclass
class Rank:
    """One rank, as its host function sees it. `core` counts from 0 within the process."""

    number: int
    world: int
    core: int
    runtime: DeviceRuntime
    report: Callable[[Document], None]

    def step(self, name: str) -> None:
        """Report the beginning of a step to the watchdog."""
        self.report({"step": name})


def run_ranks(
    host: str,
    argument: Document,
    *,
    world: int,
    implementation: Implementation = "auto",
    options: Mapping[str, Any] | None = None,
    limit: float = 900.0,
    placement: RankPlacement | None = None,
) -> list[Document]:
    """The results of the host function `package.module:function`, called as function(rank, argument) on every rank.

    `options` are those of `open_runtime`. Raises the error of the rank that failed first.
    """
    if world < 1:
        raise InvalidLoad(f"{world} ranks were requested; a program has at least one")
    kind = resolved(implementation)
    if kind == "emulated":
        return _run_threads(host, argument, options or {}, _Watchdog(world, limit, limit))
    placement = placement or RankPlacement(world, free_address())
    job = {"host": host, "argument": argument, "implementation": kind, "options": dict(options or {}), "world": world}
    with tempfile.TemporaryDirectory(prefix="nxpipe-ranks-") as folder:
        return _run_processes(job, placement, _Watchdog(world, limit, max(limit, _START_LIMIT)), Path(folder))


def function_of(host: str) -> Callable[[Rank, Document], Document]:
    """The host function that a text names."""
    module, _, name = host.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def document_of(fault: BaseException) -> Document:
    """An error as a rank reports it."""
    name = type(fault).__name__
    if isinstance(fault, RuntimeFault):
        return {"fault": name, "message": str(fault), "status": int(fault.status)}
    return {"fault": RankFailed.__name__, "message": f"{name}: {fault}", "status": int(RankFailed.status)}


class _Watchdog:
    """Steps and results of all ranks, and the time by which each must report again."""

    def __init__(self, world: int, limit: float, start_limit: float) -> None:
        self.world, self._limit = world, limit
        self._steps = ["start"] * world
        self._deadlines = {rank: time.monotonic() + start_limit for rank in range(world)}
        self.results: dict[int, Document] = {}
        self.faults: list[RuntimeFault] = []

    @property
    def is_over(self) -> bool:
        return bool(self.faults) or not self._deadlines

    @property
    def seconds_left(self) -> float:
        return max(min(self._deadlines.values()) - time.monotonic(), 0.0)

    def take(self, rank: int, report: Document) -> None:
        """Note a report: a step, the result, or an error."""
        self._deadlines[rank] = time.monotonic() + self._limit
        if "step" in report:
            self._steps[rank] = report["step"]
        elif "fault" in report:
            message = self._placed(rank, report["message"])
            self.faults.append(fault_named(report["fault"], message, report["status"]))
            del self._deadlines[rank]
        else:
            self.results[rank] = report["result"]
            del self._deadlines[rank]

    def has_ended(self, rank: int) -> bool:
        return rank not in self._deadlines

    def note_crash(self, rank: int, exit_code: int, log: str) -> None:
        how = f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
        tail = " | ".join(log.splitlines()[-_LOG_LINES:])
        self.faults.insert(0, RankCrashed(self._placed(rank, f"its process ended {how}; {tail or 'it wrote no log'}")))
        del self._deadlines[rank]

    def note_silence(self) -> None:
        """Note the ranks that have not reported in time, and those that soon would not: ranks wait for each other in
        collectives, and the first to be late may not be the one that hangs."""
        now = time.monotonic()
        if any(deadline <= now for deadline in self._deadlines.values()):
            late = [rank for rank, deadline in self._deadlines.items() if deadline <= now + self._limit / 4]
            steps = "; ".join(f"rank {rank} since it began to {self._steps[rank]!r}" for rank in late)
            self.faults.append(
                RankHung(
                    f"no progress within the limit of {self._limit:g} s: {steps}; all ranks were ended; look for "
                    "a rank that failed or loads in another order, or allow more time"
                )
            )

    def outcome(self) -> list[Document]:
        """The results in the order of ranks; raises the cause of a failure, not its consequence on other ranks."""
        for fault in sorted(self.faults, key=lambda fault: isinstance(fault, CollectiveFault | DeviceTimeout)):
            raise fault
        return [self.results[rank] for rank in range(self.world)]

    def _placed(self, rank: int, message: str) -> str:
        return f"rank {rank} of {self.world}, at {self._steps[rank]!r}: {message}" if self.world > 1 else message


def _run_threads(host: str, argument: Document, options: Mapping[str, Any], watchdog: _Watchdog) -> list[Document]:
    """All ranks in this process, which share the runtime. A thread cannot be killed: one that hangs is left behind."""
    reports: SimpleQueue[tuple[int, Document]] = SimpleQueue()
    function = function_of(host)
    with open_runtime("emulated", **options) as runtime:

        def run(number: int) -> None:
            rank = Rank(number, watchdog.world, number, runtime, lambda report: reports.put((number, report)))
            try:
                reports.put((number, {"result": function(rank, argument)}))
            except BaseException as fault:
                reports.put((number, document_of(fault)))

        for number in range(watchdog.world):
            threading.Thread(target=run, args=(number,), daemon=True, name=f"rank {number}").start()
        while not watchdog.is_over:
            with suppress(Empty):
                watchdog.take(*reports.get(timeout=watchdog.seconds_left))
            watchdog.note_silence()
        _take_rest(watchdog, reports)
    return watchdog.outcome()


def _take_rest(watchdog: _Watchdog, reports: "SimpleQueue[tuple[int, Document]]") -> None:
    """Take the reports that are there, which may have the cause of the first error."""
    with suppress(Empty):
        while True:
            watchdog.take(*reports.get_nowait())


class _RankProcess:
    """A rank's process in a process group of its own, with the pipe of its reports."""

    def __init__(self, job: Document, rank: int, placement: RankPlacement, folder: Path) -> None:
        self.rank = rank
        self._log, document = folder / f"rank-{rank}.log", folder / f"rank-{rank}.json"
        self._pending = b""
        self.reports, theirs = os.pipe()
        own = {"rank": rank, "reports": theirs, "parent": os.getpid(), "path": sys.path}
        document.write_text(json.dumps({**job, **own}))
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, document],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=placement.variables(rank, os.environ),
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        finally:
            os.close(theirs)

    def receive(self, watchdog: _Watchdog) -> bool:
        """Take the reports that have arrived; False once the process has closed its pipe."""
        data = os.read(self.reports, _READ)
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            watchdog.take(self.rank, json.loads(line))
        if not data and not watchdog.has_ended(self.rank):
            exit_code = self._end()
            watchdog.note_crash(self.rank, exit_code, self._log.read_text(errors="replace"))
        return bool(data)

    def kill(self) -> None:
        """End the process and all that it started."""
        self._end()
        os.close(self.reports)

    def _end(self) -> int:
        """Kill the process group; the exit code, which a process that has ended keeps."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # inside of a driver, a process ends when the driver returns
            self._process.wait(_KILL_LIMIT)
        return -signal.SIGKILL if self._process.returncode is None else self._process.returncode


def _run_processes(job: Document, placement: RankPlacement, watchdog: _Watchdog, folder: Path) -> list[Document]:
    processes: list[_RankProcess] = []
    with selectors.DefaultSelector() as selector:
        try:
            for rank in range(watchdog.world):
                processes.append(_RankProcess(job, rank, placement, folder))
                selector.register(processes[-1].reports, selectors.EVENT_READ, processes[-1])
            while not watchdog.is_over:
                for key, _ in selector.select(watchdog.seconds_left):
                    if not key.data.receive(watchdog):
                        selector.unregister(key.fd)
                watchdog.note_silence()
        finally:
            for process in processes:
                process.kill()
    return watchdog.outcome()
