"""Ctrl-C at a terminal, once and twice, and SIGTERM: workers end at once, and committed results are reused."""

import fcntl
import os
import pty
import signal
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from nxpipe.pipeline.util.exit_codes import INTERRUPTED, TERMINATED
from tests.building.world import PATIENCE, Running, World, saved_world, wait_for

pytestmark = pytest.mark.sample(12)

CTRL_C = b"\x03"


class Terminal:
    """The terminal of a build: takes keys, and is read continuously."""

    def __init__(self) -> None:
        self._here, self.there = pty.openpty()
        self.shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press(self, key: bytes) -> None:
        os.write(self._here, key)

    def close(self) -> str:
        os.close(self.there)
        self._reader.join(PATIENCE)
        os.close(self._here)
        return self.shown.decode(errors="replace")

    def _read(self) -> None:
        with suppress(OSError):  # nobody is at the other end any more
            while data := os.read(self._here, 4096):
                self.shown += data


@contextmanager
def held_in_the_middle(world: World, terminal: Terminal) -> Iterator[Running]:
    """Wait until one result is committed and other jobs hang."""
    at_it = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.there)
    with world.running("--jobs", "2", **at_it, preexec_fn=_in_the_foreground) as run:
        wait_for(lambda: (world.store / "parts").is_dir() and any((world.store / "parts").iterdir()))
        run.stop_workers()
        yield run


def _in_the_foreground() -> None:
    """Of this terminal. A shell that started the tests in the background has left Ctrl-C ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.sample(12)
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_ctrl_c_ends_the_workers_and_the_next_build_goes_on(times: int, tmp_path: Path) -> None:
    world, terminal = saved_world(tmp_path), Terminal()
    with held_in_the_middle(world, terminal) as run:
        for _ in range(times):
            terminal.press(CTRL_C)
        assert run.process.wait(PATIENCE) == INTERRUPTED.number
        run.nothing_is_left()
    assert "Interrupted" in terminal.close()
    goes_on(world)


def test_sigterm_ends_the_workers_and_the_next_build_goes_on(tmp_path: Path) -> None:
    world, terminal = saved_world(tmp_path), Terminal()
    with held_in_the_middle(world, terminal) as run:
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(PATIENCE) == TERMINATED.number
        run.nothing_is_left()
    assert "Terminated" in terminal.close()
    goes_on(world)


def test_workers_that_hang_end_with_a_driver_that_has_no_time_to_end_them(tmp_path: Path) -> None:
    """As with a second Ctrl-C that comes before the first has been heeded."""
    world, terminal = saved_world(tmp_path), Terminal()
    with held_in_the_middle(world, terminal) as run:
        run.process.kill()
        assert run.process.wait(PATIENCE) == -signal.SIGKILL
        run.nothing_is_left()
    terminal.close()
    goes_on(world)


def goes_on(world: World) -> None:
    """Continue with the same arguments by --resume."""
    committed = world.parts()
    assert committed
    resumed = World(world.folder, ("--resume",))
    fates = resumed.build_all()
    assert {key for key, fate in fates.items() if fate == "found"} == fates.keys() & committed.keys()
    assert committed.items() <= world.parts().items()
    assert resumed.build().code != 0  # there is nothing left to resume
