"""Without faults the proxy behaves as moto, and records requests."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.plan import (
    Plan,
    Refuse,
    where,
)
from tests.faults.proxy import Proxy

pytestmark = pytest.mark.slow  # tests of the harness: `make test-localaws`

BODY = b"0123456789" * 100


KEYS = st.sampled_from(["a", "b/c", "b/d e", "b/é+%"])
BODIES = st.binary(max_size=40)
NUMBERS = st.integers(0, 50)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("put_object"), st.fixed_dictionaries({"Key": KEYS, "Body": BODIES})),
        st.tuples(
            st.just("put_object"), st.fixed_dictionaries({"Key": KEYS, "Body": BODIES, "IfNoneMatch": st.just("*")})
        ),
        st.tuples(
            st.sampled_from(["get_object", "head_object", "delete_object"]), st.fixed_dictionaries({"Key": KEYS})
        ),
        st.builds(
            lambda key, first, last: ("get_object", {"Key": key, "Range": f"bytes={first}-{last}"}),
            KEYS,
            NUMBERS,
            NUMBERS,
        ),
        st.builds(lambda prefix: ("list_objects_v2", {"Prefix": prefix}), st.sampled_from(["", "a", "b/"])),
        st.builds(
            lambda found: ("delete_objects", {"Delete": {"Objects": [{"Key": key} for key in found]}}),
            st.lists(KEYS, min_size=1, max_size=3, unique=True),
        ),
    ),
    min_size=1,
    max_size=12,
)


def said(client: Any, bucket: str, call: str, arguments: dict[str, Any]) -> object:
    """A response without its variable fields; the proxy adds `ChecksumType`."""
    try:
        answer = getattr(client, call)(Bucket=bucket, **arguments)
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
    status = answer.pop("ResponseMetadata")["HTTPStatusCode"]
    for name in ("LastModified", "ChecksumType", "Name"):
        answer.pop(name, None)
    if "Body" in answer:
        answer["Body"] = answer["Body"].read()
    for found in answer.get("Contents", ()):
        del found["LastModified"]
    return status, answer


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_without_faults_every_answer_is_motos(
    client: Any, behind: Any, new_bucket: Callable[..., str], calls: list[tuple[str, dict[str, Any]]]
) -> None:
    ours, theirs = new_bucket(), new_bucket()
    for call, arguments in calls:
        assert said(client, ours, call, arguments) == said(behind, theirs, call, arguments)


def test_versions_pass_through(client: Any, bucket: str) -> None:
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    first, second = (client.put_object(Bucket=bucket, Key="k", Body=body)["VersionId"] for body in (b"1", b"2"))
    client.delete_object(Bucket=bucket, Key="k")
    client.put_object(Bucket=bucket, Key="k", Body=b"3", IfNoneMatch="*")  # a delete marker is no object
    assert client.get_object(Bucket=bucket, Key="k", VersionId=first)["Body"].read() == b"1"
    client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "k", "VersionId": second}]})
    found = client.list_object_versions(Bucket=bucket)
    assert (len(found["Versions"]), len(found["DeleteMarkers"])) == (2, 1)
    assert second not in [version["VersionId"] for version in found["Versions"]]


def test_a_large_object_goes_up_in_parts_and_down_in_ranges(client: Any, bucket: str, tmp_path: Any) -> None:
    source, target = tmp_path / "up", tmp_path / "down"
    source.write_bytes(os.urandom(20 * 1024 * 1024 + 1))
    client.upload_file(str(source), bucket, "big")
    client.download_file(bucket, "big", str(target))
    assert target.read_bytes() == source.read_bytes()


def test_a_race_for_a_key_has_one_winner(client: Any, bucket: str) -> None:
    def create(number: int) -> object:
        return said(client, bucket, "put_object", {"Key": "k", "Body": str(number).encode(), "IfNoneMatch": "*"})

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(create, range(64)))
    assert answers.count((412, "PreconditionFailed")) == 63


def test_a_connection_is_used_again(client: Any, proxy: Proxy, bucket: str) -> None:
    opened = proxy.connections
    for number in range(5):
        client.put_object(Bucket=bucket, Key=str(number), Body=BODY)
        client.get_object(Bucket=bucket, Key=str(number))["Body"].read()
    assert proxy.connections == opened + 1


def test_each_request_is_recorded_in_order(client: Any, proxy: Proxy, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="a b", Body=BODY, IfNoneMatch="*")
    client.get_object(Bucket=bucket, Key="a b", Range="bytes=0-9")["Body"].read()
    client.list_objects_v2(Bucket=bucket)
    with pytest.raises(ClientError):
        client.head_object(Bucket=bucket, Key="none")
    found = [
        (exchange.request.number, exchange.request.operation, exchange.received, exchange.status)
        for exchange in proxy.exchanges
    ]
    assert found == [
        (1, "PutObject", len(BODY), 200),
        (2, "GetObject", 0, 206),
        (3, "ListObjectsV2", 0, 200),
        (4, "HeadObject", 0, 404),
    ]
    first = proxy.exchanges[0]
    assert (first.request.key, first.request.conditional, first.outcome) == ("a b", True, "answered")


OPERATIONS: list[tuple[str, dict[str, Any]]] = [
    ("CreateMultipartUpload", {"Key": "k"}),
    ("ListMultipartUploads", {}),
    ("ListParts", {"Key": "k", "UploadId": "u"}),
    ("UploadPart", {"Key": "k", "UploadId": "u", "PartNumber": 1, "Body": b""}),
    ("CompleteMultipartUpload", {"Key": "k", "UploadId": "u", "MultipartUpload": {"Parts": []}}),
    ("AbortMultipartUpload", {"Key": "k", "UploadId": "u"}),
    ("CopyObject", {"Key": "k", "CopySource": "some/k"}),
    ("DeleteObjects", {"Delete": {"Objects": [{"Key": "k"}]}}),
    ("ListObjectVersions", {}),
    ("GetBucketVersioning", {}),
    ("HeadBucket", {}),
    ("DeleteObject", {"Key": "k", "VersionId": "v"}),
    ("ListObjectsV2", {"Prefix": "p", "Delimiter": "/", "MaxKeys": 1}),
]


def test_operations_are_named_as_boto3_names_them(client: Any, proxy: Proxy, bucket: str) -> None:
    proxy.start_over(Plan(where(lambda _: True, Refuse(400, "NotToday"))))
    for name, arguments in OPERATIONS:
        with pytest.raises(ClientError):
            client._make_api_call(name, {"Bucket": bucket, **arguments})
    assert [exchange.request.operation for exchange in proxy.exchanges] == [name for name, _ in OPERATIONS]
