"""A child process with limits of time and memory, which leaves no process behind.

neuronx-cc starts processes of its own, so limits and the final kill apply to the session: all of them together.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, TypeVar

_Argument = TypeVar("_Argument")
_INTERVAL: Final = 0.2  # seconds between two measurements of memory


@dataclass(frozen=True)
class ProcessLimits:
    seconds: float
    memory: int  # bytes


class OutOfTime(Exception):
    """The work took longer than it may."""


class OutOfMemory(Exception):
    """The work took more memory than it may."""


def run_limited(work: Callable[[_Argument], None], argument: _Argument, log: Path, limits: ProcessLimits) -> int:
    """Run `work` with its output in `log`. Returns the exit status; negative if a signal ended it."""
    process = get_context("spawn").Process(target=_begin, args=(work, argument, log))
    process.start()
    try:
        _watch(process, limits)
    finally:
        _end(process)
    assert process.exitcode is not None
    return process.exitcode


def _begin(work: Callable[[_Argument], None], argument: _Argument, log: Path) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    work(argument)


def _watch(process: BaseProcess, limits: ProcessLimits) -> None:
    deadline = time.monotonic() + limits.seconds
    while not wait([process.sentinel], timeout=_INTERVAL):
        if time.monotonic() > deadline:
            raise OutOfTime
        if sum(_resident(process.pid)) > limits.memory:
            raise OutOfMemory


def _end(process: BaseProcess) -> None:
    """Kill the whole session, even if its first process has ended: until that is waited for, its id is not reused."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)  # before it had a session of its own
    process.join()


def _resident(session: int | None) -> Iterator[int]:
    """Bytes of memory that each process of a session holds; what they share counts for each."""
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process that has just ended
            fields = entry.read_text().rpartition(")")[2].split()  # the name before may hold anything
            if int(fields[3]) == session:
                yield int(fields[21]) * page
