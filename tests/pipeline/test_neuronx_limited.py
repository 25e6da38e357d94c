"""A process with a limit of time and memory, which leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nxpipe.pipeline.compile.neuronx.compiler import OutOfMemory, OutOfTime, ProcessLimits, run_limited
from tests.conftest import ROOT

ROOM = ProcessLimits(seconds=100, memory=1 << 40)
SPEAK = "echo hello; echo child >&2; pwd"
# A child of the command writes its id and sleeps; the command waits for it or leaves it behind.
SLEEPER = f'{sys.executable} -c \'import os, time; open("note", "w").write(str(os.getpid())); time.sleep(600)\''
GROW = f"{sys.executable} -c 'import time; kept = bytearray(400 << 20); time.sleep(600)'; true"


def run(folder: Path, script: str, limits: ProcessLimits = ROOM) -> int:
    return run_limited(["/bin/sh", "-c", script], folder, folder / "log", os.environ, limits)


def gone(process: int) -> bool:
    """Whether the process has ended, also as a zombie, as in a container without an init."""
    stat = Path(f"/proc/{process}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_all_that_is_said_is_in_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, SPEAK) == 0
    assert (tmp_path / "log").read_text() == f"hello\nchild\n{tmp_path}\n"
    assert capfd.readouterr() == ("", "")


def test_the_status_is_that_of_the_command(tmp_path: Path) -> None:
    assert run(tmp_path, "exit 7") == 7
    assert run(tmp_path, "kill -SEGV $$") == -signal.SIGSEGV


def test_time_that_is_up_ends_the_children_too(tmp_path: Path) -> None:
    note = tmp_path / "note"
    for seconds in (1, 5, 20, 80):  # a slow machine may not have started the child when the time is up
        with pytest.raises(OutOfTime):
            run(tmp_path, f"{SLEEPER}; true", ProcessLimits(seconds, memory=1 << 40))
        if note.exists() and note.read_text():
            break
    assert gone(int(note.read_text()))


def test_the_memory_of_children_counts(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory):
        run(tmp_path, GROW, ProcessLimits(seconds=100, memory=300 << 20))


def test_a_child_that_outlives_its_parent_is_ended(tmp_path: Path) -> None:
    assert run(tmp_path, f"{SLEEPER} & while ! test -s note; do sleep 0.05; done") == 0
    assert gone(int((tmp_path / "note").read_text()))


def test_the_command_ends_with_the_process_that_runs_it_even_if_that_is_killed(tmp_path: Path) -> None:
    """As a worker of a build is, when its time is up."""
    calling = f"from tests.pipeline.test_neuronx_limited import *; run(Path({str(tmp_path)!r}), SLEEPER + '; true')"
    note = tmp_path / "note"
    caller = subprocess.Popen([sys.executable, "-c", calling], cwd=ROOT)
    while not note.exists() or not note.read_text():
        assert caller.poll() is None
        time.sleep(0.05)
    caller.kill()
    caller.wait()
    assert gone(int(note.read_text()))
