"""Publishers, a promoter, one who rolls back, collectors and a fetcher at one folder, all of them killed again and
again: nothing that may be asked for is lost, and nothing is left over."""

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.channel.change import Requirements, promote, rollback
from nxpipe.artifact_store.channel.log import ChannelLog, channels
from nxpipe.artifact_store.errors import NotFound
from nxpipe.artifact_store.fetch.folder import fetch
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, fsck, plan
from nxpipe.artifact_store.maintenance.reachability import History
from tests.artifact_store.samples import publish_verified
from tests.artifact_store.upkeep_world import ANYBODY, LOST_RACES, chosen, losses, program_of, sample

attempt = pytest.mark.attempt
HISTORY = History(seconds=0.0, generations=2)
OLD = 1_000_000_000
REQUESTS = 24

Act = Callable[[Store, Random], object]


def publishing(store: Store, chance: Random) -> object:
    request = chance.randrange(REQUESTS)
    program_of(store, request)
    return publish_verified(store, sample(store, request))


def promoting(store: Store, chance: Random) -> object:
    channel = chance.choice(("prod", "stage"))
    return promote(store, channel, [chosen(store, chance.randrange(100))], ANYBODY, Requirements())


def rolling_back(store: Store, chance: Random) -> object:
    return rollback(store, chance.choice(("prod", "stage")), ANYBODY, to=None)


def collecting(store: Store, chance: Random) -> object:
    store.backend.recover()
    rules = Rules(keep=chance.choice((None, 2, 6)), history=HISTORY)
    return apply_plan(store, plan(store, rules, store.backend.now()))


def fetching(store: Store, chance: Random) -> object:
    with tempfile.TemporaryDirectory() as folder:
        return fetch(store.blobs, chosen(store, chance.randrange(100)).manifest, Path(folder) / "o")


ACTS: tuple[Act, ...] = (publishing, publishing, promoting, rolling_back, collecting, collecting, fetching)


def work(root: Path, act: Act, grace: float, seed: str) -> None:
    """Until it is killed. A lost race is no fault; anything else ends the process in a way that is noticed."""
    store, chance = Store(LocalFolder(root), grace=grace), Random(seed)
    while True:
        with suppress(*LOST_RACES):
            act(store, chance)


def started(what: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            what()
        os._exit(1)
    return pid


def aged(root: Path) -> None:
    """Everything is long past its grace: what is published again is reused while it may be collected."""
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (OLD, OLD))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("grace", "seconds"),
    [
        pytest.param(60.0, 2.0, marks=attempt("B520", "B521")),
        pytest.param(12.0, 150.0, marks=[pytest.mark.slow, attempt("B520")]),
        pytest.param(5.0, 90.0, marks=[pytest.mark.slow, attempt("B521")]),
    ],
)
def test_nothing_is_lost_though_everybody_is_killed(tmp_path: Path, grace: float, seconds: float) -> None:
    root, chance = tmp_path / "store", Random(1)
    store = Store(LocalFolder(root), grace=grace)
    for request in range(REQUESTS):
        publish_verified(store, sample(store, request))
    promote(store, "prod", [store.list()[0]], ANYBODY, Requirements())
    aged(root)
    running = {started(partial(work, root, act, grace, secrets.token_hex(4))): act for act in ACTS}
    ended, kills = [], 0
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until or kills <= 3:  # on a busy machine a process takes long to start
            time.sleep(chance.uniform(0, 0.3))
            pid = chance.choice(list(running))
            act = running.pop(pid)
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            if not os.WIFSIGNALED(status):
                ended.append(act.__name__)
            kills += 1
            running[started(partial(work, root, act, grace, secrets.token_hex(4)))] = act
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert kills > 3
    assert not ended  # by an error that is no lost race
    assert not losses(LocalFolder(root))
    _is_clean(root)


def _is_clean(root: Path) -> None:
    backend = LocalFolder(root)
    for channel in channels(backend):
        log = ChannelLog(backend, channel)
        assert len(list(log.back_from(log.tip()))) >= 1
    assert fsck(Store(backend)).is_sound
    for path in (root / "tmp").rglob("*"):
        os.utime(path, (OLD, OLD))
    for path in (root / "tmp").iterdir():
        os.utime(path, (OLD, OLD))
    collecting(Store(backend), Random(2))
    assert not list((root / "tmp").iterdir())
    with suppress(NotFound):
        chosen(Store(backend), 0)
    assert not losses(backend)
