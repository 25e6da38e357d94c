"""Outcomes of runs: news that the next attempt replaces, that a driver reads once, and that nobody keeps."""

from pathlib import Path

import pytest

from nxpipe.artifact_store.builds import MAX_OUTCOME_BYTES, outcomes_of, record_outcome
from nxpipe.artifact_store.errors import Corrupt
from nxpipe.artifact_store.layout import outcome_path
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, fsck, plan
from nxpipe.artifact_store.store import Store
from tests.artifact_store.upkeep_world import ClockedFolder

RUN, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path: Path) -> ClockedFolder:
    return ClockedFolder(tmp_path / "store")


@pytest.fixture
def store(folder: ClockedFolder) -> Store:
    return Store(folder)


def read(store: Store, *places: int) -> dict[int, dict[str, object]]:
    return {outcome.place: outcome.ended for outcome in outcomes_of(store, RUN, places)}


def test_a_driver_reads_the_places_that_it_asks_for_and_that_are_there(store: Store) -> None:
    for place in (0, 3, 10_000):
        record_outcome(store, RUN, place, {"seconds": place / 2})
    record_outcome(store, OTHER, 1, {"seconds": 1.0})
    assert read(store, 1, 3, 10_000) == {3: {"seconds": 1.5}, 10_000: {"seconds": 5000.0}}
    assert read(store) == {}


def test_the_last_attempt_stands(store: Store) -> None:
    for attempt in ("first", "second"):
        record_outcome(store, RUN, 0, {"attempt": attempt})
    assert read(store, 0) == {0: {"attempt": "second"}}


def test_an_outcome_holds_a_long_log(store: Store) -> None:
    log = "\u001b" * (MAX_OUTCOME_BYTES // 8)  # six bytes each in JSON
    record_outcome(store, RUN, 0, {"log": log})
    assert read(store, 0) == {0: {"log": log}}


def test_an_outcome_in_the_place_of_another_is_not_believed(store: Store, tmp_path: Path) -> None:
    record_outcome(store, RUN, 0, {"seconds": 1.0})
    there = tmp_path / "store" / outcome_path(RUN, 0)
    there.with_name(f"{1:010d}").write_bytes(there.read_bytes())
    with pytest.raises(Corrupt, match="it is the record of"):
        read(store, 1)


def test_an_outcome_goes_when_it_is_older_than_the_grace_and_is_no_finding_before(
    store: Store, folder: ClockedFolder
) -> None:
    for place in (0, 1):
        record_outcome(store, RUN, place, {})
    folder.age(outcome_path(RUN, 0), store.grace + 1)
    assert fsck(store).findings == ()
    planned = plan(store, Rules(), folder.now())
    assert [(step.action, step.listed.path) for step in planned.steps] == [("remove", outcome_path(RUN, 0))]
    apply_plan(store, planned)
    assert read(store, 0, 1) == {1: {}}
