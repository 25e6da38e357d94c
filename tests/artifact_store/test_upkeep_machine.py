"""No reachable object is ever collected, for any operations during the collection.

Publishers, promoters, pinning users and collectors act in any order, each of them inside any other: at a random request
of one, another does all of its work, or the first is killed.
"""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.channel.generation import Generation
from nxpipe.artifact_store.channel.log import ChannelLog, channels
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
    unpinning,
)

maybe = st.none() | st.integers(1, 3)
requests = st.integers(0, 11)
channel_names = st.sampled_from(["prod", "beta"])
pin_names = st.sampled_from(["one", "two"])
whiles = st.sampled_from([0.0, 0.0, 1.0, 7.0, 13.0, 25.0, 60.0])  # hours
moments = st.integers(1, 40) | st.integers(1, 150)
collections = st.builds(collecting, maybe, maybe, st.none() | st.integers(1, 3000))
acts = st.one_of(
    st.builds(publish, requests),
    st.builds(publish, requests),
    st.builds(promoting, requests, channel_names),
    st.builds(rolling_back, channel_names, st.none() | st.integers(1, 4)),
    st.builds(pinning, requests, pin_names, st.integers(1, 4)),
    st.builds(unpinning, pin_names),
    collections,
)


class Collection(RuleBasedStateMachine):
    """A collection whose steps begin after pauses without activity."""

    looks = 0  # of all runs: one after each step, and one before the first

    @initialize(past=st.lists(st.tuples(whiles, acts), min_size=15, max_size=30))
    def begin_with_a_past(self, past: list[tuple[float, Act]]) -> None:
        self._folder = TemporaryDirectory()
        self.backend = ClockedFolder(Path(self._folder.name) / "store")
        self.histories: dict[str, list[Generation]] = {}
        for request in range(4):
            publish(request)(self.backend)
        for hours, act in past:
            self.do(hours, act)

    def teardown(self) -> None:
        self._folder.cleanup()

    @rule(hours=whiles, act=acts)
    def do(self, hours: float, act: Act) -> None:
        self.backend.time += hours * 3600
        self._try(act, self.backend)

    @rule(hours=whiles, act=acts, other=acts, at=moments)
    def do_one_inside_the_other(self, hours: float, act: Act, other: Act, at: int) -> None:
        self.backend.time += hours * 3600
        self._try(act, interrupted(self.backend, at, lambda: self._try(other, self.backend)))

    @rule(hours=whiles, act=collections, other=acts, at=moments)
    def do_something_inside_a_collection(self, hours: float, act: Act, other: Act, at: int) -> None:
        self.do_one_inside_the_other(hours, act, other, at)

    @rule(hours=whiles, act=acts, other=collections, at=moments)
    def collect_inside_something(self, hours: float, act: Act, other: Act, at: int) -> None:
        self.do_one_inside_the_other(hours, act, other, at)

    @rule(hours=whiles, act=acts, at=moments)
    def be_killed(self, hours: float, act: Act, at: int) -> None:
        def die() -> None:
            raise Killed

        self.backend.time += hours * 3600
        with suppress(Killed):
            self._try(act, interrupted(self.backend, at, die))

    @rule(hours=whiles, act=collections, at=st.integers(1, 12))
    def be_killed_with_a_removed_file_in_hand(self, hours: float, act: Act, at: int) -> None:
        left = iter(range(at))
        unlink = Path.unlink

        def die(path: Path, missing_ok: bool = False) -> None:
            if path.name.endswith(".gone") and next(left, None) is None:
                raise Killed
            unlink(path, missing_ok)

        self.backend.time += hours * 3600
        with patch.object(Path, "unlink", die), suppress(Killed):
            self._try(act, self.backend)

    @rule(keep=maybe, days=maybe)
    def a_dry_run_says_what_a_real_run_does(self, keep: int | None, days: int | None) -> None:
        store = Store(self.backend, grace=GRACE)
        rules = Rules(keep=keep, max_age=days and days * DAY, history=HISTORY)
        now = self.backend.now()
        shown = plan(store, rules, now)
        before = self._objects()
        made = plan(store, rules, now)
        assert made == shown
        outcome = apply_plan(store, made)
        assert outcome.done == made.steps
        assert not outcome.spared
        removed = {step.listed.path for step in made.steps}
        assert before - self._objects() == removed

    @invariant()
    def everything_that_may_be_asked_for_is_there(self) -> None:
        assert not losses(self.backend)
        Collection.looks += 1

    @invariant()
    def no_history_is_ever_rewritten(self) -> None:
        for channel in channels(self.backend):
            log = ChannelLog(self.backend, channel)
            history = list(log.back_from(log.tip()))[::-1]
            before = self.histories.get(channel, [])
            assert history[: len(before)] == before
            self.histories[channel] = history

    def _try(self, act: Act, backend: Backend) -> None:
        with suppress(*LOST_RACES):
            act(backend)

    def _objects(self) -> set[str]:
        return {found.path for found in self.backend.walk("")}


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flushes: survival of power loss is tested elsewhere, and they would take most of the time here."""
    monkeypatch.setattr("nxpipe.artifact_store.backends.local.flush_to_disk", lambda path: None)


def run(examples: int, steps: int) -> None:
    machine: Any = Collection.TestCase
    machine.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    machine("runTest").runTest()


@pytest.mark.sample(4)
def test_nothing_that_may_be_asked_for_is_collected() -> None:
    run(examples=8, steps=25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_that_may_be_asked_for_is_collected_in_ten_thousand_steps() -> None:
    before = Collection.looks
    run(examples=250, steps=60)
    assert Collection.looks - before - 250 >= 10_000
