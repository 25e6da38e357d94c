"""A process with a limit of time and memory, which leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nxpipe.pipeline.compile.neuronx.backend import OutOfMemory, OutOfTime, ProcessLimits, run_limited

ROOM = ProcessLimits(seconds=100, memory=1 << 40)
SLEEP = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
GROW = "import time; kept = bytearray(b'x' * (400 << 20)); time.sleep(600)"


def speak(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", f"import sys; sys.stderr.write('child of {word}')"], check=True)


def end(status: int) -> None:
    sys.exit(status)


def kill_itself(number: int) -> None:
    os.kill(os.getpid(), number)


def start_a_sleeper(note: str) -> None:
    subprocess.run([sys.executable, "-c", SLEEP, note], check=True)


def leave_a_sleeper(note: str) -> None:
    subprocess.Popen([sys.executable, "-c", SLEEP, note])
    while not Path(note).exists() or not Path(note).read_text():
        time.sleep(0.05)


def grow(_: str) -> None:
    subprocess.run([sys.executable, "-c", GROW], check=True)


def gone(process: int) -> bool:
    """Whether the process has ended, also as a zombie, as in a container without an init."""
    stat = Path(f"/proc/{process}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_all_that_is_said_is_in_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_limited(speak, "hello", tmp_path / "log", ROOM) == 0
    assert (tmp_path / "log").read_text() == "hello\nchild of hello"
    assert capfd.readouterr() == ("", "")


def test_the_status_is_that_of_the_work(tmp_path: Path) -> None:
    assert run_limited(end, 7, tmp_path / "log", ROOM) == 7
    assert run_limited(kill_itself, signal.SIGSEGV.value, tmp_path / "log", ROOM) == -signal.SIGSEGV


def test_time_that_is_up_ends_the_children_too(tmp_path: Path) -> None:
    note = tmp_path / "note"
    for seconds in (1, 5, 20, 80):  # a slow machine may not have started the child when the time is up
        with pytest.raises(OutOfTime):
            run_limited(start_a_sleeper, str(note), tmp_path / "log", ProcessLimits(seconds, memory=1 << 40))
        if note.exists():
            break
    assert gone(int(note.read_text()))


def test_the_memory_of_children_counts(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory):
        run_limited(grow, "", tmp_path / "log", ProcessLimits(seconds=100, memory=300 << 20))


def test_a_child_that_outlives_its_parent_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "note"
    assert run_limited(leave_a_sleeper, str(note), tmp_path / "log", ROOM) == 0
    assert gone(int(note.read_text()))
