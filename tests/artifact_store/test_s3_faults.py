"""What S3 and the network do to a publisher. Server, client and its silent retries are real, the wire is not."""

import base64
import hashlib
import random
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError, FlexibleChecksumError, IncompleteReadError
from botocore.httpsession import URLLib3Session

from artifact_store import Store, open_store
from artifact_store.backends.protocol import Payload, Stat
from artifact_store.backends.s3 import MAX_PUT_BYTES, WRITE_ID, Bucket
from artifact_store.errors import Corrupt, StoreUnavailable, TooLarge
from artifact_store.layout import action_path, blob_path
from tests.artifact_store.samples import contents, put, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


class Wire:
    """Between the client and the server: decides the fate of each attempt at an operation, in order."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._session = URLLib3Session()

    def on(self, operation: str, *fates: Callable[[Any], Any] | None) -> None:
        remaining = list(fates)

        def decide(request: Any, **kwargs: object) -> Any:
            fate = remaining.pop(0) if remaining else None
            return fate(request) if fate else None

        self._client.meta.events.register(f"before-send.s3.{operation}", decide)

    def deliver_and_cut(self, request: Any) -> None:
        """The server does its work; the answer never arrives."""
        self._session.send(request)
        self.cut(request)

    def cut(self, request: Any) -> None:
        raise ConnectionClosedError(endpoint_url=request.url)


def answer(status: int, code: str) -> Callable[[Any], AWSResponse]:
    body = f"<Error><Code>{code}</Code><Message>as told by the test</Message></Error>".encode()

    class Raw(BytesIO):
        def stream(self, *args: object, **kwargs: object) -> Iterator[bytes]:
            yield self.read()

    return lambda request: AWSResponse(request.url, status, {"content-type": "application/xml"}, Raw(body))


@pytest.fixture
def client(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    # Two attempts, so that the client's own silent retry is part of every test here.
    return boto3.client(
        "s3", config=Config(retries={"mode": "standard", "total_max_attempts": 2}, max_pool_connections=32)
    )


@pytest.fixture
def backend(client: Any) -> Bucket:
    name = f"test-{secrets.token_hex(8)}"
    client.create_bucket(Bucket=name)
    return Bucket(name, "p", client)


@pytest.fixture
def wire(client: Any) -> Wire:
    return Wire(client)


OURS, THEIRS = Payload.of(b"ours"), Payload.of(b"theirs")


def stored(backend: Bucket, path: str = "ac/x") -> bytes | None:
    chunks = backend.read(path)
    return None if chunks is None else b"".join(chunks)


# Lost answers


def test_a_write_that_the_client_silently_repeats_is_still_ours(backend: Bucket, wire: Wire) -> None:
    """The repetition is answered 412, by the object that the first attempt made."""
    wire.on("PutObject", wire.deliver_and_cut)
    assert backend.create("ac/x", OURS)
    assert stored(backend) == b"ours"


def test_a_write_whose_every_answer_was_lost_is_still_ours(backend: Bucket, wire: Wire) -> None:
    wire.on("PutObject", wire.deliver_and_cut, wire.deliver_and_cut)
    assert backend.create("ac/x", OURS)


def test_losing_to_another_writer_is_told_apart_from_meeting_oneself(backend: Bucket, wire: Wire) -> None:
    assert backend.create("ac/x", THEIRS)
    wire.on("PutObject", wire.deliver_and_cut)
    assert not backend.create("ac/x", OURS)
    assert stored(backend) == b"theirs"


def test_equal_bytes_of_another_writer_are_not_taken_for_ours(backend: Bucket) -> None:
    assert [backend.create("ac/x", OURS) for _ in range(2)] == [True, False]


def test_a_write_that_never_arrived_is_unavailable_and_may_be_repeated(backend: Bucket, wire: Wire) -> None:
    wire.on("PutObject", wire.cut, wire.cut)
    with pytest.raises(StoreUnavailable, match=r"the connection failed.*a retry is safe"):
        backend.create("ac/x", OURS)
    assert stored(backend) is None
    assert backend.create("ac/x", OURS)


def test_an_outcome_that_cannot_be_looked_up_is_reported_as_unknown(backend: Bucket, wire: Wire) -> None:
    wire.on("PutObject", wire.deliver_and_cut, wire.cut)
    wire.on("HeadObject", wire.cut, wire.cut)
    with pytest.raises(StoreUnavailable, match=r"it is unknown whether s3://.*/ac/x was written"):
        backend.create("ac/x", OURS)


def test_a_conflict_without_an_object_is_tried_again(backend: Bucket, wire: Wire) -> None:
    """S3 answers 409 when another writer was under way; that one may have failed since."""
    wire.on("PutObject", answer(409, "ConditionalRequestConflict"), answer(409, "ConditionalRequestConflict"))
    assert backend.create("ac/x", OURS)
    assert stored(backend) == b"ours"


def test_endless_conflicts_end(backend: Bucket, wire: Wire) -> None:
    wire.on("PutObject", *[answer(409, "ConditionalRequestConflict")] * 20)
    with pytest.raises(StoreUnavailable, match="4 attempts ran into other writers"):
        backend.create("ac/x", OURS)


def test_many_publishers_with_lost_answers_agree_on_one_record(backend: Bucket, wire: Wire) -> None:
    chance = random.Random(11)
    lost = 0

    def lose_some(request: Any) -> None:
        """A fifth of all first attempts: the client repeats each of them, and meets its own object."""
        nonlocal lost
        if b"attempt=1" in _bytes(request.headers["amz-sdk-request"]) and chance.random() < 0.2:
            lost += 1
            wire.deliver_and_cut(request)

    wire.on("PutObject", *[lose_some] * 1000)
    store = Store(backend)
    for number in range(3):
        manifest = put(store, request=number)
        with ThreadPoolExecutor(16) as pool:
            published = set(pool.map(store.publish, [manifest] * 16))
        assert published == {store.find(manifest.request_key)}
    assert len(store.list()) == 3
    assert lost > 0


# Bytes


def test_every_write_carries_its_sha256_and_refuses_to_overwrite(backend: Bucket, client: Any) -> None:
    sent: list[dict[str, str]] = []
    client.meta.events.register("before-send.s3.PutObject", lambda request, **_: sent.append(dict(request.headers)))
    Store(backend).publish(put(Store(backend)))
    blob = base64.b64encode(hashlib.sha256(contents()[0]).digest())
    headers = [{name.lower(): value for name, value in each.items()} for each in sent]
    assert blob in [_bytes(each["x-amz-checksum-sha256"]) for each in headers]
    assert all(each["x-amz-checksum-sha256"] and each[f"x-amz-meta-{WRITE_ID}"] for each in headers)
    unconditional = [each for each in headers if _bytes(each.get("if-none-match", "")) != b"*"]
    assert len(unconditional) == 1  # the listing, which is a copy
    assert len({_bytes(each[f"x-amz-meta-{WRITE_ID}"]) for each in headers}) == len(headers)


def _bytes(value: str | bytes) -> bytes:
    """The client holds a header as text before it is signed, and as bytes after."""
    return value if isinstance(value, bytes) else value.encode()


def test_a_checksum_that_s3_kept_is_compared_without_reading_the_object(backend: Bucket, client: Any) -> None:
    blob = Store(backend).put_blob(b"abc")
    kept = base64.b64encode(bytes.fromhex(blob.sha256)).decode()
    client.head_object = lambda **_: {"ContentLength": 3, "ChecksumSHA256": kept, "ChecksumType": "FULL_OBJECT"}
    client.get_object = None
    assert Store(backend).put_blob(b"abc") == blob


WRONG = base64.b64encode(bytes(32)).decode()
NOT_OF_THE_BYTES = {
    "none kept": {},
    "of parts, by its type": {"ChecksumSHA256": WRONG, "ChecksumType": "COMPOSITE"},
    "of parts, by its form": {"ChecksumSHA256": f"{WRONG}-3"},
}


@pytest.mark.parametrize("kept", NOT_OF_THE_BYTES)
def test_without_a_checksum_of_the_bytes_the_object_is_read_back(backend: Bucket, client: Any, kept: str) -> None:
    blob = Store(backend).put_blob(b"abc")
    client.head_object = lambda **_: {"ContentLength": 3, **NOT_OF_THE_BYTES[kept]}
    assert backend.stat(blob_path(blob)) == Stat(3, blob.sha256)


class Body:
    """An answer's body that breaks off."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def iter_chunks(self, size: int) -> Iterator[bytes]:
        yield b"a"
        raise self._error


def test_a_body_that_breaks_off_is_unavailable(backend: Bucket, client: Any) -> None:
    blob = Store(backend).put_blob(b"abc")
    client.get_object = lambda **_: {"Body": Body(IncompleteReadError(actual_bytes=1, expected_bytes=3))}
    with pytest.raises(StoreUnavailable, match="a retry is safe"):
        Store(backend).read_blob(blob)


def test_a_body_that_fails_s3s_own_checksum_is_corrupt(backend: Bucket, client: Any) -> None:
    blob = Store(backend).put_blob(b"abc")
    client.get_object = lambda **_: {"Body": Body(FlexibleChecksumError(error_msg="it does not match"))}
    with pytest.raises(Corrupt, match="it does not match"):
        Store(backend).read_blob(blob)


def test_more_than_one_put_takes_is_refused_with_the_numbers(backend: Bucket) -> None:
    huge = Payload("0" * 64, MAX_PUT_BYTES + 1, memoryview(b""))
    with pytest.raises(TooLarge, match=f"{MAX_PUT_BYTES + 1} bytes.*at most {MAX_PUT_BYTES}"):
        backend.create("ac/x", huge)
    assert stored(backend) is None


# Everything else that a user meets

REFUSALS = {
    "AccessDenied": (403, "s3:GetObject, s3:PutObject and s3:ListBucket"),
    "ExpiredToken": (400, "log in to AWS again"),
    "InvalidAccessKeyId": (403, "AWS_ACCESS_KEY_ID"),
    "RequestTimeTooSkewed": (403, "clock"),
    "PermanentRedirect": (301, "AWS_REGION"),
    "SlowDown": (503, "fewer requests"),
    "KMS.DisabledException": (400, "mend that"),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_by_s3_is_one_sentence_with_the_way_out(backend: Bucket, wire: Wire, code: str) -> None:
    status, way_out = REFUSALS[code]
    wire.on("GetObject", *[answer(status, code)] * 4)
    with pytest.raises(StoreUnavailable, match=way_out) as caught:
        Store(backend).find("0" * 64)
    assert f"{backend.url}/{action_path('0' * 64)}" in str(caught.value)
    assert code in str(caught.value)


@pytest.mark.parametrize("call", ["list", "find", "put"])
def test_a_missing_bucket_is_one_sentence(client: Any, call: str) -> None:
    store = Store(Bucket("no-such-bucket", "", client))
    calls: dict[str, Callable[[], object]] = {
        "list": lambda: store.list(),
        "find": lambda: store.find("0" * 64),
        "put": lambda: store.put_blob(b"abc"),
    }
    with pytest.raises(StoreUnavailable, match=r"NoSuchBucket.*create the bucket, or mend the store URL"):
        calls[call]()


def test_missing_credentials_are_one_sentence(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(StoreUnavailable, match=r"no usable AWS credentials.*AWS_PROFILE"):
        open_store("s3://some-bucket/p").list()


def test_an_unknown_profile_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(StoreUnavailable, match=r"nobody.*AWS_PROFILE"):
        open_store("s3://some-bucket/p")


def test_an_endpoint_that_nobody_serves_is_one_sentence(server: dict[str, str]) -> None:
    client = boto3.client(
        "s3",
        endpoint_url="http://127.0.0.1:9",
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
        config=Config(retries={"total_max_attempts": 1}),
    )
    store = Store(Bucket("some-bucket", "", client))
    for call in (store.list, lambda: store.put_blob(b"abc")):
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9.*AWS_ENDPOINT_URL"):
            call()


def test_keys_lie_below_the_prefix_and_nowhere_else(backend: Bucket, client: Any) -> None:
    Store(backend).publish(put(Store(backend)))
    keys = [found["Key"] for found in client.list_objects_v2(Bucket=backend.url.split("/")[2])["Contents"]]
    assert all(key.startswith(("p/cas/", "p/ac/", "p/neuron-artifacts/")) for key in keys)
