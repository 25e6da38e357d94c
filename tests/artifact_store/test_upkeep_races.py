"""A collection and another process, at every request of either: no reachable object is lost."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.layout import ACTIONS, RETIRED
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, plan
from nxpipe.artifact_store.maintenance.reachability import DAY
from tests.artifact_store.upkeep_world import (
    GRACE,
    HISTORY,
    LOST_RACES,
    Act,
    ClockedFolder,
    Killed,
    collecting,
    interrupted,
    losses,
    pinning,
    promoting,
    publish,
    rolling_back,
)

COLLECT = collecting(keep=1, days=None, budget=None)


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flushes: survival of power loss is tested elsewhere."""
    monkeypatch.setattr("nxpipe.artifact_store.backends.local.flush_to_disk", lambda path: None)


@dataclass(frozen=True)
class World:
    """A store that is copied for each moment."""

    root: Path
    time: float

    def copy(self, name: str) -> ClockedFolder:
        copied = self.root.with_name(name)
        shutil.copytree(self.root, copied)
        backend = ClockedFolder(copied)
        backend.time = self.time
        return backend


@pytest.fixture
def world(tmp_path: Path) -> World:
    """What generation 1 serves was taken back long ago and is to be swept; others are to be retired."""
    backend = ClockedFolder(tmp_path / "original")
    for request in (0, 2, 4):
        publish(request)(backend)
        backend.time += DAY
        promoting(0, "prod")(backend)  # the newest
    backend.time += 100 * DAY
    COLLECT(backend)
    publish(1)(backend)
    publish(3)(backend)
    backend.time += 2 * DAY
    return World(tmp_path / "original", backend.time)


OTHERS = {
    "a rollback to what is being swept": rolling_back("prod", 1),
    "a publication of what is being swept": publish(0),
    "a publication of what is being retired": publish(1),
    "a promotion of what is being retired": promoting(1, "prod"),
}
MORE = {
    "a rollback": rolling_back("prod", None),
    "a publication that shares blobs": publish(8),
    "a promotion of the newest": promoting(0, "prod"),
    "a pin of what is being retired": pinning(1, "one", 3),
    "another collection": COLLECT,
}
ALL = [
    *(pytest.param(act, id=name) for name, act in OTHERS.items()),
    *(pytest.param(act, id=name, marks=pytest.mark.slow) for name, act in MORE.items()),
]


def at_every_request(world: World, act: Act, other: Act) -> int:
    """The number of requests."""
    for at in range(1, 1000):
        backend = world.copy(f"at-{at}")
        happened: list[int] = []

        def happen(backend: ClockedFolder = backend, happened: list[int] = happened) -> None:
            happened.append(1)
            with suppress(*LOST_RACES):
                other(backend)

        with suppress(*LOST_RACES):
            act(interrupted(backend, at, happen))
        assert not losses(backend), at
        shutil.rmtree(world.root.with_name(f"at-{at}"))
        if not happened:
            return at - 1
    raise AssertionError("it never ends")


@pytest.mark.sample(12)
@pytest.mark.parametrize("other", ALL)
def test_whatever_happens_at_any_moment_of_a_collection_loses_nothing(world: World, other: Act) -> None:
    assert at_every_request(world, COLLECT, other) > 20


@pytest.mark.sample(12)
@pytest.mark.parametrize("act", ALL)
def test_a_collection_at_any_moment_of_something_else_loses_nothing(world: World, act: Act) -> None:
    assert at_every_request(world, act, COLLECT) > 5


def test_a_collection_that_is_killed_at_any_request_loses_nothing_and_the_next_one_finishes(world: World) -> None:
    complete = world.copy("complete")
    COLLECT(complete)
    left = {found.path for found in complete.walk("")}
    for at in range(1, 1000):
        backend = world.copy(f"at-{at}")

        def die() -> None:
            raise Killed

        try:
            COLLECT(interrupted(backend, at, die))
        except Killed:
            assert not losses(backend), at
            COLLECT(backend)
        else:
            assert at > 30
            return
        assert {found.path for found in backend.walk("")} == left


def test_a_record_that_was_put_back_after_a_kill_keeps_its_blobs(world: World) -> None:
    """Killed with the record in hand, the collector has neither removed it nor left it in its place."""
    backend = world.copy("killed")
    unlink = os.unlink

    def die(name: str, *, dir_fd: int | None = None) -> None:
        if name.endswith(".gone"):
            raise Killed
        unlink(name, dir_fd=dir_fd)

    with patch.object(os, "unlink", die), pytest.raises(Killed):
        COLLECT(backend)
    assert list((world.root.with_name("killed") / "tmp").glob("*/ac*.gone"))
    backend.time += 3 * DAY
    collecting(keep=None, days=None, budget=None)(backend)
    assert not losses(backend)
    assert set(backend.paths(ACTIONS)) == set(world.copy("before").paths(ACTIONS))


def test_what_a_killed_collection_began_to_take_back_has_its_whole_grace_from_the_next_one_on(world: World) -> None:
    backend = world.copy("killed")
    retiring = Store(backend, grace=GRACE)
    (step, *_) = plan(retiring, Rules(keep=1, history=HISTORY), backend.now()).steps
    assert step.action == "retire"
    record = step.listed.path.removeprefix(ACTIONS)
    copy = backend.read(step.listed.path)
    assert copy is not None
    (world.root.with_name("killed") / RETIRED).mkdir(exist_ok=True)
    path = world.root.with_name("killed") / RETIRED / record
    path.write_bytes(b"".join(copy))
    backend.age(f"{RETIRED}{record}", path.stat().st_mtime - backend.time + 5 * DAY)
    apply_plan(retiring, plan(retiring, Rules(keep=1, history=HISTORY), backend.now()))
    assert step.listed.path not in backend.paths(ACTIONS)
    before = {found.path for found in backend.walk("")}
    backend.time += 0.9 * DAY
    apply_plan(retiring, plan(retiring, Rules(keep=1, history=HISTORY), backend.now()))
    assert {found.path for found in backend.walk("")} == before


def test_a_rollback_to_what_was_collected_is_refused_and_the_channel_stays_as_it_is(world: World) -> None:
    backend = world.copy("collected")
    COLLECT(backend)
    before = ChannelLog(backend, "prod").tip()
    with suppress(*LOST_RACES):
        rolling_back("prod", 1)(backend)
    assert ChannelLog(backend, "prod").tip() == before
