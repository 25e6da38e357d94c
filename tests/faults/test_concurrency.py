"""Many writers: processes in one folder, and threads on an S3 that loses a tenth of its responses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends import s3_client
from nxpipe.artifact_store.channel.change import Requirements, promote
from nxpipe.artifact_store.errors import Conflict
from tests.artifact_store.samples import folder, publish_verified
from tests.faults import buckets
from tests.faults.conftest import S3
from tests.faults.invariants import breaches, history, visible
from tests.faults.operations import AUTHOR, artifact
from tests.faults.plan import CutAfter, Plan, by_chance
from tests.faults.proxy import Proxy
from tests.faults.racing import Turn, in_processes, in_threads, smallest

pytestmark = pytest.mark.sample(12)


@dataclass(frozen=True)
class Arena:
    """A shared store: how each writer opens it, how they run, and the final content."""

    store: Callable[[], Store]
    run: Callable[[int, int, Turn], list[list[str]]]
    objects: Callable[[], Mapping[str, bytes]]


@pytest.fixture(params=["folder", "bucket"])
def arena(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arena:
    if request.param == "folder":
        return Arena(lambda: folder(tmp_path).store, in_processes, lambda: folder(tmp_path).objects())
    monkeypatch.setattr(s3_client, "_FIRST_PAUSE", 0.01)
    s3: S3 = request.getfixturevalue("s3")
    proxy: Proxy = request.getfixturevalue("proxy")
    name: str = request.getfixturevalue("bucket")
    proxy.start_over(Plan(by_chance(7, 0.1, [CutAfter()])))
    store = buckets.store(buckets.client(proxy.url, attempts=5), name)
    behind: Any = buckets.client(s3.moto.url, attempts=1)
    return Arena(lambda: store, in_threads, lambda: buckets.Snapshots(behind).of(name))


def publish_the_same(arena: Arena, number: int, writer: int) -> str:
    store = arena.store()
    return store.publish(smallest(store, number)).record.write_id


def publish_another(arena: Arena, number: int, writer: int) -> str:
    store = arena.store()
    try:
        return "won " + store.publish(smallest(store, number, answer=f"{writer}")).manifest_digest
    except Conflict as conflict:
        return "lost to " + conflict.stored


def assert_writers_of_one_key_agree(arena: Arena, writers: int, rounds: int) -> None:
    result = arena.run(writers, rounds, partial(publish_the_same, arena))
    # All of a round were told of one record, and no two rounds of the same.
    assert [len(set(entry)) for entry in result] == [1] * rounds
    assert len({entry[0] for entry in result}) == rounds
    objects = arena.objects()
    assert breaches(objects) == []
    assert len(visible(objects).answers) == rounds
    assert all(any(entry[0].encode() in objects[f"ac/{key}"] for key in visible(objects).answers) for entry in result)


def promote_one(arena: Arena, number: int, writer: int) -> str:
    store = arena.store()
    one = publish_verified(store, artifact(store, f"{writer}", f"{writer}", model=f"acme/{writer}"))
    return str(promote(store, "prod", [one], AUTHOR, Requirements()).generation.generation)


def test_writers_of_one_key_are_all_told_of_the_one_record_that_stands(arena: Arena) -> None:
    assert_writers_of_one_key_agree(arena, writers=16, rounds=4)


def test_of_writers_with_different_answers_one_wins_and_all_others_are_told_of_it(arena: Arena) -> None:
    for told in arena.run(8, 3, partial(publish_another, arena)):
        (winner,) = {entry.rpartition(" ")[2] for entry in told}
        assert sorted(told) == [f"lost to {winner}"] * 7 + [f"won {winner}"]


@pytest.mark.parametrize("promoters", [6, pytest.param(32, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_promoters_that_race_leave_a_linear_history_in_which_each_has_its_place(arena: Arena, promoters: int) -> None:
    (told,) = arena.run(promoters, 1, partial(promote_one, arena))
    assert sorted(map(int, told)) == list(range(1, promoters + 1))
    objects = arena.objects()
    assert breaches(objects) == []
    assert [len(entry.artifacts) for entry in history(objects, "prod")] == list(range(1, promoters + 1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixty_four_writers_agree_two_hundred_times(arena: Arena) -> None:
    assert_writers_of_one_key_agree(arena, writers=64, rounds=200)
