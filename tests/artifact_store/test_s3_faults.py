"""Effects of S3 and network faults on a publisher."""

import base64
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import IncompleteReadError

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.backends.protocol import CHUNK, Payload
from nxpipe.artifact_store.backends.s3 import Bucket
from nxpipe.artifact_store.backends.s3_client import ATTEMPTS
from nxpipe.artifact_store.backends.s3_multipart import MAX_BLOB_BYTES, WRITE_ID
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.errors import Changed, StoreUnavailable, TooLarge
from nxpipe.artifact_store.layout import action_path, blob_path
from tests.artifact_store.samples import contents, put
from tests.artifact_store.wire import Wire, answer

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
    with pytest.raises(StoreUnavailable, match=f"{ATTEMPTS} attempts conflicted with other writers"):
        backend.create("ac/x", OURS)


def test_a_removal_that_conflicts_is_tried_again(backend: Bucket, wire: Wire) -> None:
    """To a collection, a removal that does nothing means that a writer has refreshed the object and what it names."""
    backend.create("parts/x", OURS)
    (part,) = backend.walk("parts/")
    wire.on("DeleteObject", *[answer(409, "ConditionalRequestConflict")] * 2)
    assert backend.remove(part)
    assert stored(backend, "parts/x") is None


def test_a_removal_that_conflicts_without_end_is_unavailable(backend: Bucket, wire: Wire) -> None:
    backend.create("parts/x", OURS)
    (part,) = backend.walk("parts/")
    wire.on("DeleteObject", *[answer(409, "ConditionalRequestConflict")] * 20)
    with pytest.raises(StoreUnavailable, match=f"cannot remove .*{ATTEMPTS} attempts conflicted"):
        backend.remove(part)
    assert stored(backend, "parts/x") == b"ours"


def test_many_publishers_with_lost_answers_agree_on_one_record(backend: Bucket, wire: Wire) -> None:
    chance = random.Random(11)
    seen: set[bytes] = set()
    lost = 0

    def lose_some(request: Any) -> None:
        """A fifth of all first attempts: each is repeated, and finds its own object."""
        nonlocal lost
        write_id = _bytes(request.headers[f"x-amz-meta-{WRITE_ID}"])
        first = write_id not in seen
        seen.add(write_id)
        if first and chance.random() < 0.2:
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
    headers = [{name.lower(): value for name, value in entry.items()} for entry in sent]
    assert blob in [_bytes(header["x-amz-checksum-sha256"]) for header in headers]
    assert all(header["x-amz-checksum-sha256"] and header[f"x-amz-meta-{WRITE_ID}"] for header in headers)
    unconditional = [header for header in headers if _bytes(header.get("if-none-match", "")) != b"*"]
    assert len(unconditional) == 1  # the listing, which is a copy
    assert len({_bytes(header[f"x-amz-meta-{WRITE_ID}"]) for header in headers}) == len(headers)


def _bytes(value: str | bytes) -> bytes:
    """The header as bytes; the client has text before signing, and bytes after."""
    return value if isinstance(value, bytes) else value.encode()


def test_a_checksum_that_s3_kept_is_compared_without_reading_the_object(
    backend: Bucket, client: Any, by_the_client: None
) -> None:
    blob = Store(backend).put_blob(b"abc")
    kept = base64.b64encode(bytes.fromhex(blob.sha256)).decode()
    head = {"ContentLength": 3, "ETag": '"e"', "LastModified": datetime.now(UTC)}
    client.head_object = lambda **_: {**head, "ChecksumSHA256": kept, "ChecksumType": "FULL_OBJECT"}
    client.get_object = None
    assert Store(backend).put_blob(b"abc") == blob


WRONG = base64.b64encode(bytes(32)).decode()
NOT_OF_THE_BYTES = {
    "none kept": {},
    "of parts, by its type": {"ChecksumSHA256": WRONG, "ChecksumType": "COMPOSITE"},
    "of parts, by its form": {"ChecksumSHA256": f"{WRONG}-3"},
}


@pytest.mark.parametrize("kept", NOT_OF_THE_BYTES)
def test_without_a_checksum_of_the_bytes_the_object_is_read_back(
    backend: Bucket, client: Any, by_the_client: None, kept: str
) -> None:
    blob = Store(backend).put_blob(b"abc")
    head = client.head_object(Bucket=backend.url.split("/")[2], Key=f"p/{blob_path(blob)}")
    client.head_object = lambda **_: {**head, "ChecksumSHA256": None, **NOT_OF_THE_BYTES[kept]}
    assert (found := backend.stat(blob_path(blob))) is not None
    assert (found.size, found.sha256) == (3, blob.sha256)


class Body:
    """A response body that breaks off after its first byte."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def iter_chunks(self, size: int) -> Iterator[bytes]:
        yield self._data[:1]
        raise IncompleteReadError(actual_bytes=1, expected_bytes=len(self._data))

    def close(self) -> None:
        pass


def test_a_body_that_breaks_off_is_continued_where_it_broke(backend: Bucket, client: Any, by_the_client: None) -> None:
    blob = Store(backend).put_blob(b"abc")
    asked: list[dict[str, str]] = []

    def get(**request: str) -> dict[str, Any]:
        asked.append({"Range": "bytes=0-", **request})
        start = asked[-1]["Range"].removeprefix("bytes=").rstrip("-")
        return {"Body": Body(b"abc"[int(start) :]), "ETag": '"e"'}

    real, client.get_object = client.get_object, get
    with pytest.raises(StoreUnavailable, match="a retry is safe"):
        Store(backend).read_blob(blob)
    assert [entry["Range"] for entry in asked[:3]] == ["bytes=0-", "bytes=1-", "bytes=2-"]
    assert {entry.get("IfMatch") for entry in asked[1:]} == {'"e"'}
    client.get_object = lambda **asked: real(**asked) if "Range" in asked else get()
    blob = Store(backend).put_blob(b"abc")
    with pytest.raises(Changed, match="read it again"):  # the version that began it, "e", is not there
        Store(backend).read_blob(blob)


def test_bytes_that_arrive_garbled_are_sent_again(backend: Bucket, wire: Wire) -> None:
    wire.on("PutObject", answer(400, "BadDigest"), answer(400, "XAmzContentChecksumMismatch"))
    assert backend.create("ac/x", OURS)
    assert stored(backend) == b"ours"


def test_what_always_arrives_garbled_is_one_sentence(backend: Bucket, wire: Wire) -> None:
    wire.on("PutObject", *[answer(400, "BadDigest")] * 20)
    with pytest.raises(StoreUnavailable, match="the bytes changed in transit"):
        backend.create("ac/x", OURS)
    assert wire.sent["PutObject"] == ATTEMPTS


def test_a_file_that_shrinks_while_it_is_sent_is_named(backend: Bucket, client: Any, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 * CHUNK))
    payload = Payload(sha256_hex(bytes(4 * CHUNK)), 4 * CHUNK, path)
    client.meta.events.register("before-send.s3.PutObject", lambda **_: os.truncate(path, CHUNK))
    with pytest.raises(Changed, match=rf"{path} changed while it was being stored"):
        backend.create("cas/x", payload)
    assert stored(backend, "cas/x") is None


def test_more_than_an_object_holds_is_refused_with_the_numbers(backend: Bucket) -> None:
    huge = Payload("0" * 64, MAX_BLOB_BYTES + 1, memoryview(b""))
    for write in (backend.create, backend.replace):
        with pytest.raises(TooLarge, match=f"{MAX_BLOB_BYTES + 1} bytes.*at most {MAX_BLOB_BYTES}"):
            write("ac/x", huge)


# Everything else that a user meets

REFUSALS = {
    "AccessDenied": (403, "s3:GetObject, s3:PutObject and s3:ListBucket"),
    "ExpiredToken": (400, "log in to AWS again"),
    "InvalidAccessKeyId": (403, "AWS_ACCESS_KEY_ID"),
    "RequestTimeTooSkewed": (403, "clock"),
    "PermanentRedirect": (301, "AWS_REGION"),
    "SlowDown": (503, "throttles requests"),
    "KMS.DisabledException": (400, "fix that"),
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
    with pytest.raises(StoreUnavailable, match=r"NoSuchBucket.*create the bucket, or correct the store URL"):
        calls[call]()


def test_missing_credentials_are_one_sentence(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StoreUnavailable, match=r"no usable AWS credentials.*AWS_PROFILE"):
        open_store("s3://some-bucket/p").list()


def test_an_unknown_profile_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
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
