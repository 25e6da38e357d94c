"""Faults during a build: it ends with its exit code and a sentence, and the next one completes the work."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from nxpipe.pipeline.util.exit_codes import COMPILE, INCOMPLETE, SYSTEM
from tests.building.world import World, described, model_text, saved_world, wait_for
from tests.faults.invariants import breaches
from tests.pipeline.command import NXPIPE, Answer
from tests.pipeline.conftest import BERT, write_model

pytestmark = pytest.mark.sample(12)

ONE_AT_A_TIME = ("-q", "--jobs", "1")
_DISK = """
mount -t tmpfs -o size=60k none disk
"$@"
code=$?
cp -r disk store
exit $code
"""


@dataclass(frozen=True)
class Case:
    """A fault of a build of three cells, and the build's result: exit code, message, number of built cells."""

    happens: Callable[[World], Answer]
    code: int
    says: str
    made: int


def takes_too_much_memory(world: World) -> Answer:
    return world.build(*ONE_AT_A_TIME, "--memory-limit", "20MiB", "--keep-going")


def hangs(world: World) -> Answer:
    """The first started job hangs; later ones succeed."""
    with world.running(*ONE_AT_A_TIME, "--timeout", "10s", "--keep-going") as run:
        wait_for(run.workers)
        run.stop_workers()
        answer = run.answer()
        run.nothing_is_left()
        return answer


def dies_again_and_again(world: World) -> Answer:
    """Every worker is killed, as by the OOM killer, until no other is tried."""
    with world.running(*ONE_AT_A_TIME, "--retries", "1") as run:
        while run.process.poll() is None:
            for pid in run.workers():
                with suppress(ProcessLookupError):  # one that has just ended
                    os.kill(pid, signal.SIGKILL)
        return run.answer()


CASES = {
    "a worker takes too much memory": Case(
        takes_too_much_memory,
        SYSTEM.number,
        r"uses .* MB of memory, more than .* 21\.0 MB; .*--memory-limit",
        0,
    ),
    "a compiler hangs": Case(hangs, COMPILE.number, r"not finished after 1\d s; allow more with --timeout", 2),
    "workers are killed": Case(
        dies_again_and_again, SYSTEM.number, r"was killed by SIGKILL, as the kernel does when memory runs out", 0
    ),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_build_that_fails_says_why_and_is_finished_by_the_next_one(case: Case, tmp_path: Path) -> None:
    world = saved_world(tmp_path, targets="inf2.48xlarge")
    answer = case.happens(world)
    ends_well(world, answer, case)


def ends_well(world: World, answer: Answer, case: Case) -> None:
    assert answer.code == case.code, answer.err
    assert re.search(case.says, answer.err)
    assert "Traceback" not in answer.err
    assert breaches(world.objects(), verified=False) == []
    assert len(world.artifacts()) == case.made
    committed = world.parts()
    fates = world.build_all()
    assert sorted(fates.values()) == ["built"] * (3 - case.made) + ["found"] * case.made
    assert committed.items() <= world.parts().items()


def test_a_full_disk_stops_the_build_and_room_on_it_is_all_that_the_next_one_needs(tmp_path: Path) -> None:
    """In a namespace of its own, where anybody may mount a small disk."""
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this system lets nobody but root mount")
    world = saved_world(tmp_path, targets="inf2.48xlarge")
    (tmp_path / "disk").mkdir()
    build = [str(NXPIPE), "build", *world.words, *ONE_AT_A_TIME, "--retries", "0", "--store", "disk"]
    script = ["unshare", "-rm", "sh", "-c", _DISK, "sh", *build]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    answer = Answer(done.returncode, done.stdout, done.stderr)
    ends_well(world, answer, Case(World.build, INCOMPLETE.number, "No space left on device; free some space", 1))


def test_a_model_that_cannot_be_built_costs_no_other_model_its_build(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    write_model(tmp_path / "good", BERT | small)
    write_model(tmp_path / "bad", BERT | {"model_type": "no-such-model", "hidden_size": 64})
    good, bad = (model_text(name, "feature-extraction", [8]) for name in ("good", "bad"))
    world = described(tmp_path, good + bad)
    others = world.build(*ONE_AT_A_TIME, "--keep-going")
    assert others.code == COMPILE.number, others.err
    assert "no-such-model" in others.err
    assert sorted(world.fates().values()) == ["built", "failed"]
    assert len(world.artifacts()) == 1
    made = world.parts()
    described(tmp_path, good.replace("[8]", "[8, 16]") + bad)
    stopped = world.build(*ONE_AT_A_TIME)
    assert stopped.code == INCOMPLETE.number
    assert "not tried" in stopped.err
    assert world.parts() == made
    described(tmp_path, good)
    assert world.build(*ONE_AT_A_TIME).code == 0


def test_two_builders_of_the_same_cells_make_each_once(tmp_path: Path) -> None:
    worlds = [saved_world(tmp_path / name, targets="inf2.48xlarge") for name in ("one", "other")]
    shared = ("--store", str(tmp_path / "store"), "-q")
    with worlds[0].running(*shared) as one, worlds[1].running(*shared) as other:
        answers = [one.answer(), other.answer()]
    assert [answer.code for answer in answers] == [0, 0], answers
    first, second = (world.fates() for world in worlds)
    assert first.keys() == second.keys()
    assert [sorted((first[key], second[key])) for key in first] == [["built", "found"]] * 3
