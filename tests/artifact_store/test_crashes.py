"""SIGKILL at every step of a publish, and at random moments: visible artifacts are complete, a retry completes it."""

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from tests.artifact_store.samples import contents, folder, manifest, put, tree

pytestmark = pytest.mark.sample(12)

KILLS = 60
FILE_EVENTS = {"open", "os.link", "os.mkdir", "os.remove", "os.rename"}


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process; gives its wait status."""
    pid = os.fork()
    if pid == 0:
        _run_and_leave(work)
    return os.waitpid(pid, 0)[1]


def _run_and_leave(work: Callable[[], object]) -> NoReturn:
    """Exit the child without a return into pytest."""
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def kill_at_step(step: int, root: Path) -> None:
    """SIGKILL this process right before its `step`-th operation on a file below `root`."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS and _is_below(str(arguments[0]), root):
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _is_below(path: str, root: Path) -> bool:
    """Whether the path is below root: the store opens files relative to folder handles, by names without a slash."""
    return str(root) in path or "/" not in path


def publish_until(step: int, root: Path) -> None:
    kill_at_step(step, root)
    store = folder(root).store
    store.publish(put(store))


def assert_only_whole_things_are_visible(root: Path) -> None:
    store = folder(root).store
    for entry in store.list():
        assert store.find(entry.request_key) == entry
        for blob in entry.manifest.blobs():
            store.read_blob(blob)
    for path in tree(root):
        data = (root / path).read_bytes()
        if path.startswith(("cas/", "index/")):  # whoever lists many records writes a segment
            assert hashlib.sha256(data).hexdigest() == Path(path).name
        elif path.startswith("neuron-artifacts/"):
            json.loads(data)
        else:
            assert path.startswith(("ac/", "tmp/"))


@pytest.mark.sample(4)
@pytest.mark.parametrize("first", range(1, 5))
def test_a_publisher_killed_before_any_step_leaves_nothing_half_done(tmp_path: Path, first: int) -> None:
    """Every fourth step: each has its turn within four commits."""
    killed, visible = 0, set()
    for step in range(first, 1000, 4):
        root = tmp_path / f"{step}"

        status = in_child(partial(publish_until, step, root))
        assert_only_whole_things_are_visible(root)
        visible.add(len(folder(root).store.list()))
        retried = folder(root).store.publish(put(folder(root).store))
        assert list(folder(root).store.list()) == [retried]
        assert_only_whole_things_are_visible(root)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
        killed += 1
    # File operations had their turns, before and after the moment of publication.
    assert killed >= 7
    assert visible == {0, 1}


def test_a_publisher_killed_at_a_random_moment_leaves_nothing_half_done(tmp_path: Path) -> None:
    """One store lives through all the deaths; large blobs make death in the middle of a write likely."""
    store, chance = folder(tmp_path).store, random.Random(7)

    def publish(number: int) -> None:
        blobs = [store.put_blob(data) for data in contents(f"{number}", number, tensors=6, size=300_000)]
        store.publish(manifest(blobs))

    started = time.perf_counter()
    publish(0)
    usual = time.perf_counter() - started
    killed = number = 0
    while killed < KILLS:
        number += 1
        pid = os.fork()
        if pid == 0:
            _run_and_leave(partial(publish, number))
        time.sleep(chance.uniform(0, usual))
        os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        for entry in store.list():
            assert store.find(entry.request_key) == entry
    assert_only_whole_things_are_visible(tmp_path)
    for again in range(number + 1):
        publish(again)
    assert len(store.list()) == number + 1
    assert_only_whole_things_are_visible(tmp_path)


def test_an_interrupt_leaves_no_temporary_file(tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM unwind the stack, so they may clean up."""
    place = folder(tmp_path / "store")

    def interrupted(by: BaseException) -> Iterator[bytes]:
        yield b"half"
        assert any(path.startswith("tmp/") for path in tree(place.root))
        raise by

    for interruption in (KeyboardInterrupt(), SystemExit(143)):
        with pytest.raises(type(interruption)):
            place.store.put_stream(interrupted(interruption))
        assert tree(place.root) == set()
