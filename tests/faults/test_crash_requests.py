"""A fault at every request of every operation on S3: what is visible is complete, and a repetition finishes the rest.

First the requests of an operation are counted; then it is done anew for each request and each mishap.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, Final

import pytest

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends import s3_client
from nxpipe.artifact_store.errors import StoreError
from tests.faults import buckets
from tests.faults.conftest import S3
from tests.faults.crashes import assert_nothing_half_done, assert_the_first_answer_stood
from tests.faults.invariants import visible
from tests.faults.operations import OPERATIONS, Attempt, Operation
from tests.faults.plan import (
    CONFLICT,
    INTERNAL_ERROR,
    SLOW_DOWN,
    CutAfter,
    CutBefore,
    CutUpload,
    Fault,
    Plan,
    Rule,
    Truncate,
    at,
    where,
)
from tests.faults.proxy import Proxy


@dataclass(frozen=True)
class Mishap:
    """A fault at the n-th request, and whether the client retries."""

    name: str
    rules: Callable[[int], list[Rule]]
    patient: bool
    survived: bool  # a store must make up for this without an error

    @classmethod
    def once(cls, fault: Fault, *, patient: bool) -> "Mishap":
        name = f"{fault} and {'its repetition' if patient else 'no more attempts'}"
        return cls(name, lambda number: [at(number, fault)], patient, survived=patient)

    @classmethod
    def crash(cls, *, after: bool) -> "Mishap":
        """To the server a killed client is one that never returns."""
        last: list[Fault] = [CutAfter()] if after else []

        def rules(number: int) -> list[Rule]:
            gone = where(lambda request: request.number >= number, CutBefore())
            return [*(at(number, fault) for fault in last), gone]

        return cls(f"gone {'after' if after else 'before'} it is carried out", rules, patient=False, survived=False)


def conflict(*, patient: bool) -> Mishap:
    """S3 sends this for any conditional write, and for no other request."""

    def rules(number: int) -> list[Rule]:
        return [where(lambda request: request.number == number and request.conditional, CONFLICT)]

    return Mishap(f"{CONFLICT} ({patient=})", rules, patient, survived=True)


FAULTS: Final = (CutBefore(), CutAfter(), CutUpload(), Truncate(), SLOW_DOWN, INTERNAL_ERROR)
MISHAPS: Final = (
    *(Mishap.once(fault, patient=patient) for patient in (True, False) for fault in FAULTS),
    *(conflict(patient=patient) for patient in (True, False)),
    *(Mishap.crash(after=after) for after in (True, False)),
)
A_FEW: Final = 12  # of several hundred points
WORLD_LASTS: Final = 40  # attempts


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waits between attempts."""
    monkeypatch.setattr(s3_client, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)


class Sweep:
    """One operation with every fault. Each world is a bucket: moto scans a whole one for each listing."""

    def __init__(self, operation: Operation, proxy: Proxy, behind: str) -> None:
        self._operation = operation
        self._proxy = proxy
        self._numbers = count(1)
        self._undisturbed = buckets.client(behind, attempts=1)
        self._clients = {True: buckets.client(proxy.url, attempts=5), False: buckets.client(proxy.url, attempts=1)}
        self._snapshots = buckets.Snapshots(self._undisturbed)

    def run(self, seed: int, mishaps: Sequence[Mishap], most: int | None = None) -> int:
        """The number of injected faults; of all points, the seed chooses `most`."""
        befallen = 0
        world = self._new_world(seed)
        numbers = range(1, self._requests(world, seed) + 1)
        points = [(number, mishap) for number in numbers for mishap in mishaps]
        for turn, (number, mishap) in enumerate(Random(seed).sample(points, min(len(points), most or len(points)))):
            # Each look at a world costs more the fuller it is.
            world = self._new_world(seed) if turn % WORLD_LASTS == WORLD_LASTS - 1 else world
            befallen += self._disturb(world, seed, number, mishap)
        return befallen

    def _store(self, world: str, client: Any = None) -> Store:
        return buckets.store(client or self._undisturbed, world)

    def _new_world(self, seed: int) -> str:
        world = f"world-{secrets.token_hex(8)}"
        self._undisturbed.create_bucket(Bucket=world)
        self._operation.world(self._store(world), Random(seed))
        return world

    def _requests(self, world: str, seed: int) -> int:
        attempt = self._operation.attempt(self._store(world), Random(seed), "count")
        self._proxy.start_over(Plan())
        attempt.work(self._store(world, self._clients[True]))
        return len(self._proxy.exchanges)

    def _disturb(self, world: str, seed: int, number: int, mishap: Mishap) -> int:
        attempt = self._operation.attempt(self._store(world), Random(seed), f"attempt-{next(self._numbers)}")
        before = visible(self._snapshots.of(world))
        self._proxy.start_over(Plan(*mishap.rules(number)))
        finished = self._finishes(attempt, self._store(world, self._clients[mishap.patient]))
        self._proxy.settle()
        befallen = any(exchange.fault for exchange in self._proxy.exchanges)
        assert finished or (befallen and not mishap.survived), f"{mishap.name} at request {number}"
        crashed = self._snapshots.of(world)
        assert_nothing_half_done(before, crashed, attempt, finished=finished)
        attempt.work(self._store(world))
        repeated = self._snapshots.of(world)
        assert_nothing_half_done(before, repeated, attempt, finished=True)
        assert_the_first_answer_stood(crashed, repeated, attempt)
        return befallen

    def _finishes(self, attempt: Attempt, store: Store) -> bool:
        try:
            attempt.work(store)
        except StoreError:
            return False
        return True


@pytest.fixture
def sweep(s3: S3, proxy: Proxy) -> Callable[[Operation], Sweep]:
    return lambda operation: Sweep(operation, proxy, s3.moto.url)


def named(operation: Operation) -> str:
    return operation.name


@pytest.mark.sample(16)
@pytest.mark.parametrize("operation", OPERATIONS, ids=named)
def test_a_fault_at_any_request_leaves_nothing_half_done(
    sweep: Callable[[Operation], Sweep], operation: Operation
) -> None:
    assert sweep(operation).run(0, MISHAPS, A_FEW) > A_FEW / 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("operation", OPERATIONS, ids=named)
def test_every_fault_at_every_request_leaves_nothing_half_done(
    sweep: Callable[[Operation], Sweep], operation: Operation, seed: int
) -> None:
    befallen = sweep(operation).run(seed, MISHAPS)
    print(f"{operation.name}, seed {seed}: {befallen} faults")  # noqa: T201
    assert befallen >= len(MISHAPS)
