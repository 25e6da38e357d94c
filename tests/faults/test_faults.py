"""The proxy injects the planned faults at the planned requests."""

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.request import Request as Order
from urllib.request import urlopen

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
)

from tests.faults.plan import (
    ANYWHERE,
    CONFLICT,
    INTERNAL_ERROR,
    LATE_ERROR,
    SLOW_DOWN,
    CutAfter,
    CutBefore,
    CutUpload,
    Delay,
    Fault,
    Hold,
    Plan,
    Truncate,
    at,
    by_chance,
    on,
)
from tests.faults.proxy import Proxy

pytestmark = pytest.mark.slow  # tests of the harness: `make test-localaws`

BODY = b"0123456789" * 100


def keys(behind: Any, bucket: str) -> list[str]:
    return [found["Key"] for found in behind.list_objects_v2(Bucket=bucket).get("Contents", ())]


# What

REFUSALS = {503: SLOW_DOWN, 500: INTERNAL_ERROR, 409: CONFLICT}


@pytest.mark.parametrize("status", REFUSALS)
def test_a_refused_request_does_nothing(client: Any, behind: Any, proxy: Proxy, bucket: str, status: int) -> None:
    proxy.start_over(Plan(at(1, REFUSALS[status])))
    with pytest.raises(ClientError, match=REFUSALS[status].code):
        client.put_object(Bucket=bucket, Key="k", Body=BODY)
    assert keys(behind, bucket) == []
    client.put_object(Bucket=bucket, Key="k", Body=BODY)
    assert [exchange.status for exchange in proxy.exchanges] == [status, 200]


def test_an_error_that_comes_late_looks_like_success_at_first(client: Any, proxy: Proxy, bucket: str) -> None:
    proxy.start_over(Plan(on("CompleteMultipartUpload", LATE_ERROR)))
    upload = client.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    part = client.upload_part(Bucket=bucket, Key="k", UploadId=upload, PartNumber=1, Body=BODY)["ETag"]
    with pytest.raises(ClientError, match="InternalError"):
        client.complete_multipart_upload(
            Bucket=bucket, Key="k", UploadId=upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part}]}
        )
    assert proxy.exchanges[-1].status == 200


CUTS: dict[str, tuple[Fault, list[str]]] = {
    "cut before anything was done": (CutBefore(), []),
    "the answer was lost": (CutAfter(), ["k"]),
    "cut while the request came in": (CutUpload(), []),
    "the answer broke off": (Truncate(), ["k"]),
}


@pytest.mark.parametrize("outcome", CUTS)
def test_a_cut_leaves_a_write_done_or_undone(client: Any, behind: Any, proxy: Proxy, bucket: str, outcome: str) -> None:
    fault, left = CUTS[outcome]
    proxy.start_over(Plan(on("PutObject", fault)))
    with pytest.raises(HTTPClientError):
        client.put_object(Bucket=bucket, Key="k", Body=BODY)
    assert keys(behind, bucket) == left
    assert [(exchange.outcome, exchange.status) for exchange in proxy.exchanges] == [(outcome, None)]


def test_an_upload_is_cut_at_the_byte_that_was_asked_for(client: Any, proxy: Proxy, bucket: str) -> None:
    for number, after in enumerate((0, 1, 70_000), start=1):
        proxy.start_over(Plan(at(1, CutUpload(after))))
        with pytest.raises(HTTPClientError):
            client.put_object(Bucket=bucket, Key=str(number), Body=bytes(1_000_000))
        assert proxy.exchanges[0].received == after


@pytest.mark.parametrize("keep", [0, 1, 500, 70_000, 99_999])
def test_a_body_breaks_off_where_it_was_asked_to(client: Any, proxy: Proxy, bucket: str, keep: int) -> None:
    client.put_object(Bucket=bucket, Key="k", Body=bytes(100_000))
    proxy.start_over(Plan(at(1, Truncate(keep))))
    body = client.get_object(Bucket=bucket, Key="k")["Body"]
    assert body.read(keep) == bytes(keep)
    with pytest.raises((IncompleteReadError, ResponseStreamingError)):
        body.read(1)


@pytest.mark.parametrize("fault", ANYWHERE, ids=str)
@pytest.mark.parametrize("call", ["get_object", "head_object", "delete_object"])
def test_no_client_takes_a_fault_for_an_answer(client: Any, proxy: Proxy, bucket: str, call: str, fault: Fault) -> None:
    client.put_object(Bucket=bucket, Key="k", Body=BODY)
    proxy.start_over(Plan(at(1, fault)))
    with pytest.raises((ClientError, HTTPClientError, IncompleteReadError)):
        _taken(getattr(client, call)(Bucket=bucket, Key="k"))


def _taken(answer: dict[str, Any]) -> bytes:
    """An answer to a GET is had when its body is."""
    return answer["Body"].read() if "Body" in answer else b""


def test_a_slow_request_is_answered_all_the_same(client: Any, proxy: Proxy, bucket: str) -> None:
    proxy.start_over(Plan(at(1, Delay(0.01)), latency=0.01))
    client.put_object(Bucket=bucket, Key="k", Body=BODY)
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == BODY


def test_the_servers_clock_is_told_with_every_answer(client: Any, proxy: Proxy, bucket: str) -> None:
    for ahead in (0, 86_400):
        proxy.start_over(Plan(at(2, SLOW_DOWN), clock_ahead=ahead))
        result = [client.list_objects_v2(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]["date"]]
        with pytest.raises(ClientError) as refused:
            client.list_objects_v2(Bucket=bucket)
        result.append(refused.value.response["ResponseMetadata"]["HTTPHeaders"]["date"])
        for date in result:
            off = parsedate_to_datetime(date) - datetime.now(UTC) - timedelta(seconds=ahead)
            assert abs(off) < timedelta(minutes=5)


# When


def test_a_fault_befalls_the_nth_of_its_kind(client: Any, proxy: Proxy, bucket: str) -> None:
    proxy.start_over(Plan(on("PutObject", SLOW_DOWN, nth=2)))
    statuses = []
    for key in "abc":
        client.list_objects_v2(Bucket=bucket)
        try:
            client.put_object(Bucket=bucket, Key=key, Body=BODY)
        except ClientError:
            statuses.append(key)
    assert statuses == ["b"]


def test_a_seed_decides_the_same_faults_again(client: Any, proxy: Proxy, bucket: str) -> None:
    def outcomes(seed: int) -> list[str]:
        proxy.start_over(Plan(by_chance(seed, 0.4, [SLOW_DOWN, CutBefore(), CutAfter()])))
        for _ in range(20):
            try:
                client.list_objects_v2(Bucket=bucket)
            except (ClientError, ConnectionClosedError):
                continue
        return [f"{exchange.outcome} {exchange.status}" for exchange in proxy.exchanges]

    first = outcomes(1)
    assert outcomes(1) == first
    assert outcomes(2) != first
    assert len(Counter(first)) > 2


def test_every_request_of_an_operation_can_be_made_to_fail(client: Any, proxy: Proxy, bucket: str) -> None:
    def operation() -> None:
        client.put_object(Bucket=bucket, Key="k", Body=BODY)
        client.head_object(Bucket=bucket, Key="k")
        client.delete_object(Bucket=bucket, Key="k")

    proxy.start_over(Plan())
    operation()
    count = len(proxy.exchanges)
    for number in range(1, count + 1):
        for fault in ANYWHERE:
            proxy.start_over(Plan(at(number, fault)))
            with pytest.raises((ClientError, HTTPClientError)):
                operation()
            assert [exchange.fault for exchange in proxy.exchanges] == [None] * (number - 1) + [fault]


# Another process

CHILD = """
import boto3, sys
client = boto3.client("s3")
for key in "abc":
    client.put_object(Bucket=sys.argv[1], Key=key, Body=b"x")
print("done")
"""


@pytest.mark.parametrize(("when", "left"), [("before", ["a"]), ("after", ["a", "b"])])
def test_a_process_can_be_killed_at_its_nth_request(
    behind: Any, proxy: Proxy, bucket: str, when: Any, left: list[str]
) -> None:
    proxy.start_over(Plan(at(2, Hold(when))))
    with subprocess.Popen([sys.executable, "-c", CHILD, bucket], env=os.environ, stdout=subprocess.PIPE) as child:
        assert proxy.wait_held().request.key == "b"
        child.kill()
        assert child.communicate()[0] == b""
    proxy.release(drop=True)
    proxy.settle()
    assert keys(behind, bucket) == left
    assert proxy.exchanges[-1].outcome == "dropped while it was held"


def test_a_request_that_is_let_go_goes_on(client: Any, proxy: Proxy, bucket: str) -> None:
    proxy.start_over(Plan(at(1, Hold("before")), at(2, Hold("after"))))
    with ThreadPoolExecutor() as pool:
        for key in "ab":
            answer = pool.submit(client.put_object, Bucket=bucket, Key=key, Body=BODY)
            assert proxy.wait_held().request.key == key
            assert not answer.done()
            proxy.release()
            assert answer.result()["ETag"]


def test_another_process_can_steer(client: Any, proxy: Proxy, bucket: str) -> None:
    def order(what: object = None) -> Any:
        data = None if what is None else json.dumps(what).encode()
        with urlopen(Order(f"{proxy.url}/__faults__", data)) as answer:
            return json.load(answer)

    slow = {"kind": "Refuse", "status": 503, "code": "SlowDown"}
    rules = [{"at": 1, "fault": slow}, {"operation": "PutObject", "nth": 1, "fault": {"kind": "Hold", "when": "after"}}]
    assert order({"plan": {"rules": rules}}) == []
    with pytest.raises(ClientError, match="SlowDown"):
        client.list_objects_v2(Bucket=bucket)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(client.put_object, Bucket=bucket, Key="k", Body=BODY)
        assert [entry["held"] for entry in order({"wait": "held"})] == [False, True]
        order({"release": {"drop": True}})
        assert isinstance(answer.exception(), ConnectionClosedError)
    order({"wait": "settled"})
    shown = [(entry["operation"], entry["fault"], entry["outcome"]) for entry in order()]
    assert shown == [("ListObjectsV2", "Refuse", "answered"), ("PutObject", "Hold", "dropped while it was held")]
