"""Publishers, promoters, readers and collectors of one store, interleaved and killed: every invariant holds."""

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends import s3_client
from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.channel.change import Requirements, promote, rollback
from nxpipe.artifact_store.channel.log import Appended
from nxpipe.artifact_store.errors import Conflict, NotFound, Refused, StoreUnavailable
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, plan
from nxpipe.artifact_store.records import Published
from nxpipe.artifact_store.weights import read_weights
from tests.artifact_store.samples import folder, publish_verified
from tests.faults import buckets
from tests.faults.invariants import Visible, breaches, visible
from tests.faults.moto_process import moto_process
from tests.faults.operations import AUTHOR, artifact
from tests.faults.plan import ANYWHERE, Plan, by_chance
from tests.faults.proxy import Proxy
from tests.faults.turns import Task, TimedFolder

HOUR: Final = 3600.0
CHANNEL: Final = "prod"
REQUESTS: Final = ("one", "two", "three")
WRITERS: Final = 4  # at once


@dataclass(frozen=True)
class World:
    """A store for one example, whose clock the example sets."""

    backend: Backend
    objects: Callable[[], Mapping[str, bytes]]
    advance: Callable[[float], None]
    close: Callable[[], None]


def publish(seed: str, request: str, backend: Backend) -> Published:
    store = Store(backend)
    return publish_verified(store, artifact(store, seed, request))


def fetch(number: int, backend: Backend) -> bool:
    """The found artifact is complete, regardless of the duration of the read."""
    store = Store(backend)
    listed = sorted(store.list(), key=lambda one: one.request_key)
    found = store.find(listed[number % len(listed)].request_key) if listed else None
    if found is None:
        return False
    for blob in found.manifest.blobs():
        store.read_blob(blob)
    return bool(list(read_weights(store.blobs, found.manifest.weights)))


def promote_any(number: int, backend: Backend) -> Appended | None:
    store = Store(backend)
    found = sorted(store.list(), key=lambda one: one.request_key)
    return promote(store, CHANNEL, [found[number % len(found)]], AUTHOR, Requirements()) if found else None


def roll_back(backend: Backend) -> Appended:
    return rollback(Store(backend), CHANNEL, AUTHOR)


def collect(backend: Backend) -> None:
    store = Store(backend)
    apply_plan(store, plan(store, Rules(keep=1), backend.now()))


# What each may be told. Of a reader's findings nothing may be missing: whoever found an artifact can read it.
ALLOWED: Final = {
    "publish": (Conflict, StoreUnavailable),
    "fetch": (StoreUnavailable,),
    "promote": (Refused, NotFound, StoreUnavailable),
    "rollback": (Refused, NotFound, StoreUnavailable),
    "collect": (StoreUnavailable,),
}


class Machine(RuleBasedStateMachine):
    """The model is small: visible artifacts stay until collected, and a history only grows."""

    world_of: ClassVar[Callable[[], World]]

    def __init__(self) -> None:
        super().__init__()
        self.world = type(self).world_of()
        self.tasks: list[Task] = []
        self.started = 0.0  # how long ago the oldest task began
        self.seen = Visible({}, {})
        self.answers: dict[str, set[str]] = {}  # all that ever stood, by request key
        self.writes = 0  # generations that may have been made

    @rule(seed=st.sampled_from("ab"), request=st.sampled_from(REQUESTS))
    def publisher(self, seed: str, request: str) -> None:
        self._begin("publish", partial(publish, seed, request))

    @rule(number=st.integers(0, 5))
    def reader(self, number: int) -> None:
        self._begin("fetch", partial(fetch, number))

    @rule(number=st.integers(0, 5))
    def promoter(self, number: int) -> None:
        self.writes += 1
        self._begin("promote", partial(promote_any, number))

    @rule()
    def roller_back(self) -> None:
        self.writes += 1
        self._begin("rollback", roll_back)

    @rule()
    def collector(self) -> None:
        self._begin("collect", collect)

    @precondition(lambda self: self.tasks)
    @rule(which=st.integers(0, WRITERS), steps=st.integers(1, 12))
    def go_on(self, which: int, steps: int) -> None:
        task = self.tasks[which % len(self.tasks)]
        for _ in range(steps):
            task.step()
        if task.done:
            self._end(task)

    @precondition(lambda self: self.tasks)
    @rule(which=st.integers(0, WRITERS))
    def go_on_to_the_end(self, which: int) -> None:
        task = self.tasks[which % len(self.tasks)]
        task.finish()
        self._end(task)

    @precondition(lambda self: self.tasks)
    @rule(which=st.integers(0, WRITERS))
    def kill(self, which: int) -> None:
        task = self.tasks[which % len(self.tasks)]
        task.kill()
        self.tasks.remove(task)

    @rule(hours=st.sampled_from([0.1, 0.4, 11.0, 13.0, 25.0]))
    def time_passes(self, hours: float) -> None:
        """Every operation ends within an hour, the duration of a promotion's pins."""
        self.started += hours
        if self.started >= 1.0:
            self._finish_all()
        self.world.advance(hours * HOUR)

    @invariant()
    def every_promise_is_kept(self) -> None:
        objects = self.world.objects()
        assert breaches(objects) == []
        now = visible(objects)
        for key, answer in now.answers.items():
            assert self.seen.answers.get(key, answer) == answer
            self.answers.setdefault(key, set()).add(answer)
        for channel, history in self.seen.histories.items():
            assert now.histories[channel][: len(history)] == history
        assert len(now.histories.get(CHANNEL, ())) <= self.writes
        self.seen = now

    def teardown(self) -> None:
        self._finish_all()
        self.every_promise_is_kept()
        self.world.close()

    def _begin(self, name: str, work: Callable[[Backend], object]) -> None:
        if len(self.tasks) == WRITERS:
            self.go_on_to_the_end(0)
        self.tasks.append(Task(name, work, self.world.backend))

    def _finish_all(self) -> None:
        for task in list(self.tasks):
            task.finish()
            self._end(task)
            self.every_promise_is_kept()

    def _end(self, task: Task) -> None:
        """The result of a writer is, or was, the state of the store."""
        self.tasks.remove(task)
        self.started = self.started if self.tasks else 0.0
        if task.error is not None and not isinstance(task.error, ALLOWED[task.name]):
            raise task.error
        before, now = self.answers, visible(self.world.objects())
        if isinstance(task.result, Published):
            stood = before.get(task.result.request_key, set()) | {now.answers.get(task.result.request_key)}
            assert task.result.manifest_digest in stood
        if isinstance(task.error, Conflict):
            assert task.error.stored in set(now.answers.values()).union(*before.values())
        if isinstance(task.result, Appended):
            assert task.result.generation.digest in now.histories[CHANNEL]


def in_a_folder() -> World:
    root = Path(tempfile.mkdtemp())
    backend = TimedFolder(root)

    def advance(seconds: float) -> None:
        backend.time += seconds

    return World(backend, folder(root).objects, advance, lambda: shutil.rmtree(root))


def run(world_of: Callable[[], World], examples: int, steps: int) -> None:
    machine = type("Machine", (Machine,), {"world_of": staticmethod(world_of)})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps))


@pytest.mark.sample(4)
def test_interleaved_writers_of_a_folder_break_no_promise() -> None:
    run(in_a_folder, examples=15, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_interleaved_writers_of_a_folder_break_no_promise_in_thirty_thousand_steps() -> None:
    run(in_a_folder, examples=600, steps=50)


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.sample(2)) for name in ("without versions", "with versions")]
)
def in_a_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], World]]:
    """An S3 with a fault in one of twelve requests, and a clock of its own."""
    monkeypatch.setattr(s3_client, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
    with moto_process() as moto, Proxy(moto) as proxy:
        behind: Any = buckets.client(moto.url, attempts=1)
        faulty = buckets.client(proxy.url, attempts=5)
        snapshots = buckets.Snapshots(behind)
        ahead = 0.0  # of the machine's clock; it is moved on, and never back

        def make() -> World:
            name = f"machine-{secrets.token_hex(8)}"
            behind.create_bucket(Bucket=name)
            if request.param == "with versions":
                behind.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
            plan = Plan(by_chance(len(name), 1 / 12, ANYWHERE), clock_ahead=ahead)
            proxy.start_over(plan)

            def advance(seconds: float) -> None:
                nonlocal ahead
                moto.advance(seconds)
                ahead += seconds
                plan.clock_ahead = ahead

            return World(buckets.punctual(faulty, name), lambda: snapshots.of(name), advance, lambda: None)

        yield make


@pytest.mark.sample(12)
def test_interleaved_writers_of_a_bucket_break_no_promise(in_a_bucket: Callable[[], World]) -> None:
    run(in_a_bucket, examples=6, steps=25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_interleaved_writers_of_a_bucket_break_no_promise_in_two_thousand_steps(
    in_a_bucket: Callable[[], World],
) -> None:
    run(in_a_bucket, examples=60, steps=40)
