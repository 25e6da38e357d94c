"""SIGKILL of a real child in the middle of its n-th request to S3."""

import multiprocessing
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.faults import buckets
from tests.faults.conftest import S3
from tests.faults.crashes import assert_nothing_half_done, assert_the_first_answer_stood
from tests.faults.invariants import visible
from tests.faults.operations import OPERATIONS, Operation, Work
from tests.faults.plan import Hold, Plan, at
from tests.faults.proxy import Proxy

# Forked from a server without threads, which has imported all that takes long: a child is there in milliseconds.
FORKS: Any = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.faults.buckets", "tests.faults.operations"])
STEP = 7  # every so many requests there is a kill


def in_bucket(work: Work, url: str, bucket: str) -> None:
    work(buckets.store(buckets.client(url, attempts=5), bucket))


def kill_at_every(step: int, operation: Operation, proxy: Proxy, behind: str, bucket: str, seed: int) -> int:
    """Gives the number of kills; it ends when the child comes to its end before its n-th request."""
    undisturbed = buckets.client(behind, attempts=1)
    ours, snapshots = buckets.store(undisturbed, bucket), buckets.Snapshots(undisturbed)
    operation.world(ours, Random(seed))
    for kills, number in enumerate(range(1, 1000, step)):
        attempt = operation.attempt(ours, Random(seed), f"attempt-{number}")
        before = visible(snapshots.of(bucket))
        proxy.start_over(Plan(at(number, Hold("before" if number // step % 2 else "after"))))
        child = FORKS.Process(target=in_bucket, args=(attempt.work, proxy.url, bucket))
        child.start()
        if not _held(child, proxy):
            assert child.exitcode == 0
            return kills
        child.kill()
        child.join()
        proxy.release(drop=True)
        proxy.settle()
        crashed = snapshots.of(bucket)
        assert_nothing_half_done(before, crashed, attempt, finished=False)
        attempt.work(ours)
        repeated = snapshots.of(bucket)
        assert_nothing_half_done(before, repeated, attempt, finished=True)
        assert_the_first_answer_stood(crashed, repeated, attempt)
    raise AssertionError("the operation has no end")


def _held(child: Any, proxy: Proxy) -> bool:
    """Whether the child waits in its request; False when it has come to its end without it."""
    while not any(exchange.held for exchange in proxy.exchanges):
        child.join(0.005)
        if child.exitcode is not None:
            return False
    return True


@pytest.fixture
def kills(s3: S3, proxy: Proxy, bucket: str) -> Callable[[int, Operation, int], int]:
    return lambda step, operation, seed: kill_at_every(step, operation, proxy, s3.moto.url, bucket, seed)


@pytest.mark.sample(16)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_client_killed_in_a_request_leaves_nothing_half_done(
    kills: Callable[[int, Operation, int], int], operation: Operation
) -> None:
    assert kills(STEP, operation, 1) >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_client_killed_in_every_request_leaves_nothing_half_done(
    kills: Callable[[int, Operation, int], int], operation: Operation
) -> None:
    assert kills(1, operation, 2) >= 1  # a pin is one request
