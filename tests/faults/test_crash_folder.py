"""SIGKILL right before every operation on a file, for each thing that is done to a store in a folder."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest

from tests.artifact_store.samples import folder
from tests.artifact_store.test_crashes import in_child, kill_at_step
from tests.faults.crashes import assert_nothing_half_done, assert_the_first_answer_stood
from tests.faults.invariants import visible
from tests.faults.operations import OPERATIONS, Attempt, Operation


def killed_at(step: int, root: Path, attempt: Attempt) -> bool:
    """False: the child came to its end first."""

    def work() -> None:
        kill_at_step(step, root)
        attempt.work(folder(root).store)

    status = in_child(work)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def objects(root: Path) -> Mapping[str, bytes]:
    return folder(root).objects()


def kill_at_every_step(operation: Operation, seed: int, folders: Path, *, every: int) -> int:
    """Gives the number of kills."""
    world = folders / "world"
    operation.world(folder(world).store, Random(seed))
    attempt = operation.attempt(folder(world).store, Random(seed), "attempt")
    before = visible(objects(world))
    for kills, step in enumerate(range(1, 10_000, every)):
        root = folders / f"{step}"
        shutil.copytree(world, root)
        killed = killed_at(step, root, attempt)
        crashed = objects(root)
        assert_nothing_half_done(before, crashed, attempt, finished=not killed)
        attempt.work(folder(root).store)
        repeated = objects(root)
        assert_nothing_half_done(before, repeated, attempt, finished=True)
        assert_the_first_answer_stood(crashed, repeated, attempt)
        shutil.rmtree(root)
        if not killed:
            return kills
    raise AssertionError("the operation has no end")


@pytest.mark.sample(16)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_process_killed_before_an_operation_on_a_file_leaves_nothing_half_done(
    operation: Operation, tmp_path: Path
) -> None:
    assert kill_at_every_step(operation, 0, tmp_path, every=3) >= 3


@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_process_killed_before_any_operation_on_a_file_leaves_nothing_half_done(
    operation: Operation, seed: int, tmp_path: Path
) -> None:
    kills = kill_at_every_step(operation, seed, tmp_path, every=1)
    print(f"{operation.name}, seed {seed}: {kills} kills")  # noqa: T201
    assert kills >= 8
