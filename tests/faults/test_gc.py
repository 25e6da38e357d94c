"""An interrupted collection of a bucket leaves at most orphans, and the next one completes it."""

from collections.abc import Callable
from typing import Any

import pytest

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.backends.s3 import Bucket
from nxpipe.artifact_store.backends.s3_client import S3Options
from nxpipe.artifact_store.errors import StoreError
from nxpipe.artifact_store.layout import ACTIONS
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, fsck, plan
from nxpipe.artifact_store.maintenance.doctor import examine, require_safety
from tests.artifact_store.samples import put
from tests.faults.conftest import client_of
from tests.faults.plan import CutAfter, CutBefore, Fault, Plan, where
from tests.faults.proxy import Proxy

PASSED = -5.0  # a grace for which everything is old


def collect(store: Store) -> None:
    apply_plan(store, plan(store, Rules(keep=1), store.backend.now()))


def published(store: Store, number: int) -> Published:
    return store.publish(put(store, str(number), request=number))


@pytest.mark.sample(12)
@pytest.mark.parametrize("versioned", [False, True], ids=["unversioned", "versioned"])
@pytest.mark.parametrize("fault", [CutBefore(), CutAfter()], ids=["before", "after"])
def test_a_connection_that_breaks_while_removing_loses_nothing(
    proxy: Proxy, new_bucket: Callable[..., str], fault: Fault, versioned: bool
) -> None:
    client: Any = client_of(proxy.url)
    for nth in (2, 7):
        proxy.start_over(Plan())
        # One removal at a time: moto cannot list versions while another request removes one.
        backend = Bucket(new_bucket(versioned=versioned), "p", client, S3Options(concurrency=1))
        store = Store(backend, grace=PASSED)
        for number in range(3):
            published(store, number)
        collect(store)  # takes two back; the next one sweeps them
        proxy.start_over(Plan(where(lambda request: request.operation == "DeleteObject", fault, nth=nth)))
        with pytest.raises(StoreError):
            collect(store)
        proxy.start_over(Plan())
        assert fsck(store).is_sound
        collect(store)
        (left,) = store.list()
        assert len(store.backend.paths(ACTIONS)) == 1
        health = fsck(store)
        assert health.is_sound
        assert health.orphans == 0
        assert health.blobs == len(left.manifest.blobs()) + 1


@pytest.mark.sample(4)
def test_a_server_that_does_as_s3_does_is_safe(proxy: Proxy, new_bucket: Callable[..., str]) -> None:
    backend = Bucket(new_bucket(versioned=True), "p", client_of(proxy.url))
    diagnoses = list(examine(backend))
    assert {diagnosis.probe.name for diagnosis in diagnoses if diagnosis.verdict == "fail"} == set()
    require_safety(backend.url, diagnoses)
    assert not list(backend.walk(""))
