"""Kills and reruns of a build, and the invariants of its store between and after them."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random

import pytest

from tests.building.world import CELLS, Running, World, parts_of
from tests.faults.invariants import breaches, visible

JOBS = ("--jobs", "2")
Kind = Callable[[Path], World]


def how_long(folders: pytest.TempPathFactory) -> Callable[[Kind], float]:
    """The duration of an undisturbed build in seconds, measured once for each kind of project."""

    @cache
    def measured(kind: Kind) -> float:
        world = kind(folders.mktemp("undisturbed") / "project")
        began = time.monotonic()
        assert list(world.build_all(*JOBS).values()) == ["built"] * CELLS
        return time.monotonic() - began

    return measured


def kill_and_resume(
    world: World, seed: int, seconds: float, workers: Callable[[Running], set[int]] = Running.workers
) -> None:
    chance = Random(seed)
    with world.running(*JOBS) as run:
        time.sleep(chance.uniform(0, seconds))
        victim = _kill_one(run, workers(run), chance)
        answer = run.answer()
        assert answer.code in ({0, -signal.SIGKILL} if victim == run.process.pid else {0}), answer.err
        run.nothing_is_left(workers)
    killed = world.objects()
    assert breaches(killed, verified=False) == []
    committed, published = parts_of(killed), visible(killed).answers
    answer = world.build(*JOBS)
    assert answer.code == 0, answer.err
    finished = world.objects()
    assert breaches(finished, verified=False) == []
    assert committed.items() <= parts_of(finished).items()
    assert published.items() <= visible(finished).answers.items()
    if published != visible(finished).answers:
        fates = world.fates()
        assert len(fates) == CELLS
        assert {key for key, fate in fates.items() if fate == "found"} == fates.keys() & committed.keys()
        assert set(fates.values()) <= {"found", "built"}


def _kill_one(run: Running, workers: set[int], chance: Random) -> int | None:
    """Kill the driver or, with equal chance, a worker; None if none exists."""
    victim = chance.choice(sorted(workers)) if workers and chance.random() < 0.5 else run.process.pid
    if run.process.poll() is not None:
        return None
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    return victim
