"""A build that is interrupted at random moments, again and again, is finished by the next one."""

import os
import signal
import time
from pathlib import Path
from random import Random

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.maintenance.collection import fsck
from nxpipe.pipeline.util.exit_codes import INTERRUPTED, OK, TERMINATED
from tests.building.world import saved_world


@pytest.mark.sample(6)
@pytest.mark.parametrize("times", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.attempt("B527")
def test_a_storm_of_signals_ends_a_build_with_a_code_of_the_table(tmp_path: Path, times: int) -> None:
    world, chance = saved_world(tmp_path, targets="inf2.48xlarge"), Random(3)
    for _ in range(times):
        with world.running("--jobs", "2") as run:
            time.sleep(chance.uniform(0.2, 1.5))
            for _ in range(3):
                if run.process.poll() is None:
                    os.kill(run.process.pid, chance.choice((signal.SIGINT, signal.SIGTERM)))
                time.sleep(chance.uniform(0, 0.1))
            answer = run.answer()
            run.nothing_is_left()
        # A signal before Python has its handlers, or after they are gone, ends the process by itself.
        by_itself = (-signal.SIGINT, -signal.SIGTERM)
        assert answer.code in (OK.number, INTERRUPTED.number, TERMINATED.number, *by_itself), answer.err
        assert "internal error" not in answer.err
    with world.running("--jobs", "2") as run:
        assert run.answer().code == OK.number
    store = open_store(str(world.store))
    assert len(store.list()) == 3
    assert fsck(store).is_sound
    assert not list((world.store / "tmp").iterdir())
