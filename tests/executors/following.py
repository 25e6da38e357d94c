"""Waiting for the events of an executor, for files, and for the end of a process."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nxpipe.pipeline.build.jobs import Event, Executor, JobFinished

_PATIENCE = 60  # seconds until a test fails


def until(executor: Executor, done: Callable[[list[Event]], bool]) -> list[Event]:
    happened: list[Event] = []
    deadline = time.monotonic() + _PATIENCE
    while not done(happened):
        assert time.monotonic() < deadline, happened
        happened += executor.events(1)
    return happened


def ends(events: Sequence[Event]) -> list[JobFinished]:
    return [event for event in events if isinstance(event, JobFinished)]


def until_ended(executor: Executor, count: int = 1) -> list[Event]:
    return until(executor, lambda events: len(ends(events)) >= count)


def is_there(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
