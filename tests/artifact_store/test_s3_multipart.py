"""Large blobs: multipart uploads, resumed after a crash, and complete or absent after any lost response."""

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.s3.models import s3_backends

from nxpipe.artifact_store.backends import s3, s3_multipart
from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.backends.s3 import Bucket, connect
from nxpipe.artifact_store.backends.s3_client import S3Options
from nxpipe.artifact_store.backends.s3_connection import opened
from nxpipe.artifact_store.backends.s3_multipart import (
    MAX_BLOB_BYTES,
    PARTS,
    WHOLE,
    WRITE_ID,
    UploadPart,
    is_stored,
    part_ranges,
    parts_of,
)
from nxpipe.artifact_store.errors import Changed, StoreUnavailable
from tests.artifact_store.wire import Wire, answer
from tests.conftest import ROOT
from tests.localaws.moto_patches import checksums

pytestmark = pytest.mark.sample(12)

MIB = 1024**2
DATA = secrets.token_bytes(15 * MIB + 1)  # in parts of 5, 5 and 5 MiB, and of one byte
BLOB = Payload.of(DATA)
NUMBER_OF_PARTS = 4
PATH = f"cas/sha256/{BLOB.sha256[:2]}/{BLOB.sha256}"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest part size of S3, so that a test need not send hundreds of megabytes."""
    monkeypatch.setattr(s3_multipart, "_PART_BYTES", 5 * MIB)
    monkeypatch.setattr(s3, "IN_PARTS_ABOVE", 10 * MIB)


@pytest.fixture
def payload(small: None, tmp_path: Path) -> Payload:
    path = tmp_path / "weights"
    path.write_bytes(DATA)
    return Payload(BLOB.sha256, BLOB.size, path)


def where(backend: Bucket, path: str = PATH) -> dict[str, str]:
    return {"Bucket": backend.url.split("/")[2], "Key": f"p/{path}"}


def sha256_of(backend: Bucket, path: str = PATH) -> str | None:
    chunks = backend.read(path)
    return None if chunks is None else hashlib.sha256(b"".join(chunks)).hexdigest()


def uploads(backend: Bucket, client: Any) -> list[str]:
    listed = client.list_multipart_uploads(Bucket=where(backend)["Bucket"]).get("Uploads", ())
    return [entry["UploadId"] for entry in listed]


def break_off(backend: Bucket, wire: Wire, payload: Payload, *, sent: int) -> None:
    """An upload that ends after so many parts, as if its process had been killed."""
    wire.on("UploadPart", *[None] * sent, *[answer(403, "AccessDenied")] * 20)
    with pytest.raises(StoreUnavailable, match="AccessDenied"):
        one_stream(backend).create(PATH, payload)
    wire.off("UploadPart")


def one_stream(backend: Bucket) -> Bucket:
    """Sequential parts."""
    return Bucket(where(backend)["Bucket"], "p", backend._place.client, S3Options(concurrency=1))


# The object that comes of it


@pytest.mark.parametrize("source", ["file", "memory"])
def test_a_large_blob_arrives_in_parts_and_is_proven_without_being_read(
    backend: Bucket, client: Any, wire: Wire, payload: Payload, source: str
) -> None:
    result: list[int] = []
    assert backend.create(PATH, payload if source == "file" else BLOB, sent=result.append)
    assert sha256_of(backend) == BLOB.sha256
    assert sum(result) == BLOB.size
    assert min(result) > 0
    read = wire.sent["GetObject"]
    stat = backend.stat(PATH)
    assert stat is not None
    assert (stat.size, stat.sha256) == (BLOB.size, BLOB.sha256)
    assert (wire.sent["GetObject"], wire.sent["UploadPart"]) == (read, NUMBER_OF_PARTS)
    noted = client.head_object(**where(backend))["Metadata"]
    assert noted.keys() == {WRITE_ID, WHOLE, PARTS}
    assert noted[PARTS].endswith(f"-{NUMBER_OF_PARTS}")


def test_every_part_carries_its_sha256_and_the_completion_overwrites_nothing(
    backend: Bucket, client: Any, payload: Payload
) -> None:
    document: dict[str, list[dict[str, Any]]] = {"UploadPart": [], "CompleteMultipartUpload": []}
    for name, calls in document.items():
        client.meta.events.register(
            f"provide-client-params.s3.{name}", lambda params, calls=calls, **_: calls.append(params)
        )
    backend.create(PATH, payload)
    backend.replace(PATH, payload)
    for part in document["UploadPart"]:
        start = (part["PartNumber"] - 1) * 5 * MIB
        assert part["ChecksumSHA256"] == s3_multipart.spelled(hashlib.sha256(DATA[start : start + 5 * MIB]).digest())
    created, replaced = document["CompleteMultipartUpload"]
    assert (created["IfNoneMatch"], "IfNoneMatch" in replaced) == ("*", False)
    assert created["MpuObjectSize"] == BLOB.size
    assert [entry["PartNumber"] for entry in created["MultipartUpload"]["Parts"]] == [1, 2, 3, 4]


def test_parts_that_are_not_those_of_the_blob_prove_nothing(backend: Bucket, client: Any, payload: Payload) -> None:
    """Right notes over wrong bytes: what S3 kept of the parts does not fit them, so the object is read."""
    backend.create(PATH, payload)
    noted = client.head_object(**where(backend))["Metadata"]
    begun = client.create_multipart_upload(**where(backend), ChecksumAlgorithm="SHA256", Metadata=noted)
    upload = {**where(backend), "UploadId": begun["UploadId"]}
    etag = client.upload_part(**upload, PartNumber=1, Body=bytes(len(DATA)))["ETag"]
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
    stat = backend.stat(PATH)
    assert stat is not None
    assert stat.sha256 != BLOB.sha256
    backend.replace(PATH, payload)
    assert sha256_of(backend) == BLOB.sha256


def test_a_repair_overwrites_what_is_damaged(backend: Bucket, client: Any, payload: Payload) -> None:
    client.put_object(**where(backend), Body=b"damaged")
    assert not backend.create(PATH, payload)
    backend.replace(PATH, payload)
    assert sha256_of(backend) == BLOB.sha256
    assert uploads(backend, client) == []


def test_a_file_that_is_not_what_its_digest_says_is_never_sent(
    backend: Bucket, client: Any, wire: Wire, payload: Payload
) -> None:
    assert isinstance(payload.source, Path)
    with payload.source.open("r+b") as file:
        file.seek(7 * MIB)
        file.write(b"!")
    with pytest.raises(Changed, match=r"weights changed while it was being stored"):
        backend.create(PATH, payload)
    os.truncate(payload.source, MIB)
    with pytest.raises(Changed):
        backend.create(PATH, payload)
    assert wire.sent["UploadPart"] == 0
    assert uploads(backend, client) == []


def test_a_file_that_is_cut_while_it_is_sent_is_named(backend: Bucket, wire: Wire, payload: Payload) -> None:
    assert isinstance(payload.source, Path)
    file = payload.source
    wire.on("UploadPart", lambda _: os.truncate(file, 1 * MIB))
    with pytest.raises(Changed, match="weights changed"):
        backend.create(PATH, payload)
    assert backend.stat(PATH) is None


def test_the_parts_of_a_blob_depend_on_its_size_alone() -> None:
    assert part_ranges(64 * MIB + 1)[-1] == (64 * MIB, 1)
    assert len(part_ranges(10_000 * 32 * MIB)) == 10_000
    assert part_ranges(10_000 * 32 * MIB + 1)[0] == (0, 64 * MIB)


@settings(max_examples=25)
@given(st.integers(s3_multipart.IN_PARTS_ABOVE + 1, MAX_BLOB_BYTES))
def test_parts_cover_a_blob_of_any_size_and_stay_within_the_limits_of_s3(size: int) -> None:
    pieces = part_ranges(size)
    assert pieces[0][0] == 0
    assert all(start + length == after for (start, length), (after, _) in pairwise(pieces))
    assert sum(pieces[-1]) == size
    assert len(pieces) <= 10_000
    assert {length for _, length in pieces[:-1]} == {pieces[0][1]}
    assert 0 < pieces[-1][1] <= pieces[0][1] <= 5 * 1024**3


# Broken-off uploads


@pytest.mark.parametrize("sent", [1, 3])
def test_a_broken_off_upload_is_continued_with_what_is_missing(
    backend: Bucket, client: Any, wire: Wire, payload: Payload, sent: int
) -> None:
    break_off(backend, wire, payload, sent=sent)
    before = wire.sent["UploadPart"]
    result: list[int] = []
    assert backend.create(PATH, payload, sent=result.append)
    assert wire.sent["UploadPart"] - before == NUMBER_OF_PARTS - sent
    assert sum(result) == BLOB.size - sent * 5 * MIB
    assert sha256_of(backend) == BLOB.sha256
    assert uploads(backend, client) == []


def test_a_part_with_other_bytes_is_sent_again(backend: Bucket, client: Any, wire: Wire, payload: Payload) -> None:
    break_off(backend, wire, payload, sent=3)
    (upload,) = uploads(backend, client)
    client.upload_part(**where(backend), UploadId=upload, PartNumber=2, Body=bytes(5 * MIB))
    before = wire.sent["UploadPart"]
    assert backend.create(PATH, payload)
    assert wire.sent["UploadPart"] - before == 2
    assert sha256_of(backend) == BLOB.sha256


KEPT = {"a SHA-256": True, "an ETag that is an MD5": False}


@pytest.mark.parametrize("kept", KEPT)
def test_a_stored_part_is_known_by(kept: str) -> None:
    data = b"0123456789"
    part = UploadPart(1, 2, 4, s3_multipart.spelled(hashlib.sha256(b"2345").digest()))
    listed = {"Size": 4, "ETag": f'"{hashlib.md5(b"2345").hexdigest()}"'}
    if KEPT[kept]:
        listed |= {"ChecksumSHA256": part.checksum, "ETag": '"encrypted"'}
    other = {"ETag": '"0"'} | ({"ChecksumSHA256": s3_multipart.spelled(bytes(32))} if KEPT[kept] else {})
    with opened(Payload.of(data), lambda _: None) as source:
        assert is_stored(part, listed, source)
        assert not is_stored(part, {**listed, "Size": 5}, source)
        assert not is_stored(part, {**listed, **other}, source)


def test_bytes_in_memory_are_hashed_once_for_their_name_and_their_parts(
    backend: Bucket, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = backend.hashed(DATA)
    assert (payload.sha256, payload.size) == (BLOB.sha256, BLOB.size)
    with opened(BLOB, lambda _: None) as source:
        expected = parts_of(BLOB, source)
        monkeypatch.setattr(s3_multipart, "_digests", None)
        assert parts_of(payload, source) == expected
    assert backend.create(PATH, payload)
    assert sha256_of(backend) == BLOB.sha256
    assert (stat := backend.stat(PATH)) is not None
    assert stat.sha256 == BLOB.sha256


def test_bytes_that_change_after_they_were_hashed_are_refused_by_their_parts(
    backend: Bucket, small: None, client: Any
) -> None:
    data = bytearray(DATA)
    payload = backend.hashed(memoryview(data))
    data[-1] ^= 1
    sent: list[tuple[str, str]] = []

    def compare(request: Any, **_: Any) -> None:
        body = request.body.read()
        request.body.seek(0)
        x_amz_checksum_sha256 = request.headers["x-amz-checksum-sha256"]
        sent.append(
            (
                x_amz_checksum_sha256 if isinstance(x_amz_checksum_sha256, str) else x_amz_checksum_sha256.decode(),
                s3_multipart.spelled(hashlib.sha256(body).digest()),
            )
        )

    client.meta.events.register("before-send.s3.UploadPart", compare)
    checksums.apply()  # stock moto believes what it is told; S3 compares these two
    with pytest.raises(StoreUnavailable, match="BadDigest"):
        backend.create(PATH, payload)
    assert len({claimed for claimed, real in sent if claimed != real}) == 1  # however often it is sent


def test_the_upload_that_has_most_is_the_one_that_is_continued(
    backend: Bucket, client: Any, wire: Wire, payload: Payload
) -> None:
    break_off(backend, wire, payload, sent=3)
    for path in (PATH, f"{PATH}0"):  # an empty one, and one of another object
        client.create_multipart_upload(**where(backend, path), ChecksumAlgorithm="SHA256")
    before = wire.sent["UploadPart"]
    assert backend.create(PATH, payload)
    assert wire.sent["UploadPart"] - before == 1
    assert len(uploads(backend, client)) == 2


CHILD = """
import json, re, sys
from pathlib import Path
from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.backends.s3 import connect
from nxpipe.artifact_store.backends.s3_client import S3Options
bucket, path, file, size, sha256, streams = json.loads(sys.argv[1])
backend = connect(bucket, "p", S3Options(concurrency=streams))
assert backend.create(path, Payload(sha256, size, Path(file)))
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.fixture
def large(tmp_path: Path) -> Payload:
    path = tmp_path / "large"
    data = secrets.token_bytes(MIB) * 108
    path.write_bytes(data)
    return Payload(hashlib.sha256(data).hexdigest(), len(data), path)


def child(backend: Bucket, payload: Payload, streams: int) -> subprocess.Popen[str]:
    dumps = json.dumps(
        [where(backend)["Bucket"], "cas/large", str(payload.source), payload.size, payload.sha256, streams]
    )
    return subprocess.Popen([sys.executable, "-c", CHILD, dumps], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def killed_with_parts_stored(backend: Bucket, client: Any, large: Payload) -> set[int]:
    """Kill an uploader that has stored at least two parts; start another if it was too fast."""
    for _ in range(10):
        victim, stored = child(backend, large, streams=1), set[int]()
        while victim.poll() is None and len(stored) < 2:
            time.sleep(0.02)
            stored = {part for upload in uploads(backend, client) for part in parts_of_upload(backend, upload)}
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        if victim.returncode == -signal.SIGKILL and uploads(backend, client):
            return stored
        client.delete_object(**where(backend, "cas/large"))
    raise AssertionError("no uploader could be killed in time")


def parts_of_upload(backend: Bucket, upload: str) -> set[int]:
    """Inside the server: asked for a list it hashes the parts, and so disturbs its own hashing of one that comes in."""
    bucket = s3_backends["123456789012"]["aws"].buckets[where(backend)["Bucket"]]
    found = bucket.multiparts.get(upload)
    return set(found.parts) if found else set()


def test_another_process_continues_what_a_killed_one_began(backend: Bucket, client: Any, large: Payload) -> None:
    """One that is sent twice because the server erred is no part that was stored."""
    stored, sent = killed_with_parts_stored(backend, client, large), set[int]()

    def note(request: Any, **_: object) -> None:
        sent.add(int(parse_qs(urlsplit(request.url).query)["partNumber"][0]))

    client.meta.events.register("before-send.s3.UploadPart", note)
    assert backend.create("cas/large", large)
    assert sent <= {1, 2, 3, 4} - stored
    assert sha256_of(backend, "cas/large") == large.sha256
    assert uploads(backend, client) == []


def test_memory_does_not_grow_with_the_blob(backend: Bucket, large: Payload) -> None:
    upload = child(backend, large, streams=16)
    kilobytes, _ = upload.communicate()
    assert upload.returncode == 0
    assert int(kilobytes) < 100 * 1024  # less than the four parts, all of which are under way at once


# Lost answers and rivals


LOST = {
    "of the beginning": "CreateMultipartUpload",
    "of a part": "UploadPart",
    "of the completion": "CompleteMultipartUpload",
}


@pytest.mark.parametrize("lost", LOST)
def test_an_answer_that_is_lost_once_is_made_up_for(backend: Bucket, wire: Wire, payload: Payload, lost: str) -> None:
    wire.on(LOST[lost], wire.deliver_and_cut)
    assert backend.create(PATH, payload)
    assert sha256_of(backend) == BLOB.sha256


def test_a_completion_whose_every_answer_was_lost_is_still_ours(backend: Bucket, wire: Wire, payload: Payload) -> None:
    wire.on("CompleteMultipartUpload", wire.deliver_and_cut, wire.deliver_and_cut)
    assert backend.create(PATH, payload)


def test_a_repair_whose_every_answer_was_lost_has_succeeded(
    backend: Bucket, client: Any, wire: Wire, payload: Payload
) -> None:
    client.put_object(**where(backend), Body=b"damaged")
    wire.on("CompleteMultipartUpload", wire.deliver_and_cut, wire.deliver_and_cut)
    backend.replace(PATH, payload)
    assert sha256_of(backend) == BLOB.sha256


def test_an_upload_whose_completion_the_client_repeats_in_vain_is_still_ours(
    backend: Bucket, wire: Wire, payload: Payload
) -> None:
    """S3 has forgotten the upload by then, since it is an object."""
    wire.on("CompleteMultipartUpload", wire.deliver_and_cut, answer(404, "NoSuchUpload"))
    assert backend.create(PATH, payload)


def test_a_completion_that_never_arrived_is_unavailable_and_continued(
    backend: Bucket, wire: Wire, payload: Payload
) -> None:
    wire.on("CompleteMultipartUpload", wire.cut, wire.cut)
    with pytest.raises(StoreUnavailable, match="a retry is safe"):
        backend.create(PATH, payload)
    assert backend.stat(PATH) is None
    backend.create(PATH, payload)
    assert wire.sent["UploadPart"] == NUMBER_OF_PARTS
    assert sha256_of(backend) == BLOB.sha256


def test_an_outcome_that_cannot_be_looked_up_is_reported_as_unknown(
    backend: Bucket, wire: Wire, payload: Payload
) -> None:
    wire.on("CompleteMultipartUpload", wire.deliver_and_cut, wire.cut)
    wire.on("HeadObject", wire.cut, wire.cut)
    with pytest.raises(StoreUnavailable, match=r"it is unknown whether s3://.* was written"):
        backend.create(PATH, payload)


def test_a_conflict_at_the_end_starts_over_with_a_new_upload(
    backend: Bucket, client: Any, wire: Wire, payload: Payload
) -> None:
    wire.on("CompleteMultipartUpload", answer(409, "ConditionalRequestConflict"))
    result: list[int] = []
    assert backend.create(PATH, payload, sent=result.append)
    assert wire.sent["CreateMultipartUpload"] == 2
    assert wire.sent["UploadPart"] == 2 * NUMBER_OF_PARTS
    assert sum(result) == BLOB.size
    assert uploads(backend, client) == []


def test_endless_conflicts_end(backend: Bucket, client: Any, wire: Wire, payload: Payload) -> None:
    wire.on("CompleteMultipartUpload", *[answer(409, "ConditionalRequestConflict")] * 20)
    with pytest.raises(StoreUnavailable, match="uploads conflicted with other writers"):
        backend.create(PATH, payload)
    assert uploads(backend, client) == []


@pytest.mark.parametrize("moment", ["UploadPart", "CompleteMultipartUpload"])
def test_an_upload_that_a_collector_ended_is_begun_again(
    backend: Bucket, client: Any, wire: Wire, payload: Payload, moment: str
) -> None:
    def end(request: Any) -> Any:
        for upload in uploads(backend, client):
            client.abort_multipart_upload(**where(backend), UploadId=upload)
        return answer(404, "NoSuchUpload")(request)

    wire.on(moment, end)
    assert one_stream(backend).create(PATH, payload)
    assert sha256_of(backend) == BLOB.sha256
    assert wire.sent["CreateMultipartUpload"] == 2


def test_a_part_that_arrives_garbled_is_sent_again(backend: Bucket, wire: Wire, payload: Payload) -> None:
    wire.on("UploadPart", answer(400, "BadDigest"))
    result: list[int] = []
    assert backend.create(PATH, payload, sent=result.append)
    assert wire.sent["UploadPart"] == NUMBER_OF_PARTS + 1
    assert sum(result) == BLOB.size
    assert sha256_of(backend) == BLOB.sha256


def test_whoever_loses_the_race_leaves_no_upload_and_the_winners_object(
    backend: Bucket, client: Any, wire: Wire, payload: Payload
) -> None:
    def win(request: Any) -> None:
        client.put_object(**where(backend), Body=DATA, Metadata={WRITE_ID: "theirs"})

    wire.on("CompleteMultipartUpload", win)
    assert not backend.create(PATH, payload)
    assert client.head_object(**where(backend))["Metadata"] == {WRITE_ID: "theirs"}
    assert uploads(backend, client) == []


def test_of_ten_creators_of_one_large_blob_none_fails_and_one_object_stands(
    backend: Bucket, client: Any, small: None
) -> None:
    shared = Payload.of(DATA[: 10 * MIB + 1])
    backends = [connect(where(backend)["Bucket"], "p") for _ in range(10)]
    with ThreadPoolExecutor(10) as pool:
        created = list(pool.map(lambda each: each.create(PATH, shared), backends))
    assert any(created)
    assert sha256_of(backend) == shared.sha256
    stat = backend.stat(PATH)
    assert stat is not None
    assert stat.sha256 == shared.sha256
    for entry in backend.abandoned(older_than=backend.now() + 60):
        assert backend.remove_abandoned(entry)
    assert uploads(backend, client) == []


def test_ctrl_c_ends_the_streams_at_once(
    backend: Bucket, wire: Wire, payload: Payload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(futures: object) -> Iterator[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(s3_multipart, "as_completed", interrupt)
    result: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        backend.create(PATH, payload, sent=result.append)
    assert sum(result) < BLOB.size


# Upkeep


def test_a_broken_off_upload_is_listed_by_the_age_of_its_youngest_part(
    backend: Bucket, client: Any, wire: Wire, payload: Payload
) -> None:
    break_off(backend, wire, payload, sent=2)
    now = backend.now()
    assert list(backend.abandoned(older_than=now - 3600)) == []
    (found,) = backend.abandoned(older_than=now + 3600)
    assert found.path.startswith(f"{PATH}#")
    assert found.size == 10 * MIB
    assert abs(found.modified - now) < 600
    assert backend.remove_abandoned(found)
    assert not backend.remove_abandoned(found)
    assert uploads(backend, client) == []


def test_uploads_of_another_prefix_are_none_of_ours(backend: Bucket, client: Any) -> None:
    for key in ("other/x", "p2/x", "p/x"):
        client.create_multipart_upload(Bucket=where(backend)["Bucket"], Key=key)
    assert [entry.path.split("#")[0] for entry in backend.abandoned(older_than=backend.now() + 60)] == ["x"]


TOUCHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "at once": lambda patch: None,
    "in parts": lambda patch: patch.setattr(s3, "MAX_COPY_BYTES", 10 * MIB),
}


@pytest.mark.parametrize("copied", TOUCHES)
def test_a_large_blob_that_was_made_young_is_proven_as_before(
    backend: Bucket, client: Any, wire: Wire, payload: Payload, monkeypatch: pytest.MonkeyPatch, copied: str
) -> None:
    TOUCHES[copied](monkeypatch)
    backend.create(PATH, payload)
    noted = client.head_object(**where(backend))["Metadata"]
    assert backend.touch(PATH)
    assert client.head_object(**where(backend))["Metadata"] == noted
    stat = backend.stat(PATH)
    assert stat is not None
    assert stat.sha256 == BLOB.sha256
    assert wire.sent["GetObject"] == 0
    assert wire.sent["UploadPartCopy"] == (NUMBER_OF_PARTS if copied == "in parts" else 0)
    assert sha256_of(backend) == BLOB.sha256


def test_a_copy_in_parts_that_fails_leaves_the_object_and_no_upload(
    backend: Bucket, client: Any, wire: Wire, payload: Payload, monkeypatch: pytest.MonkeyPatch
) -> None:
    TOUCHES["in parts"](monkeypatch)
    backend.create(PATH, payload)
    wire.on("UploadPartCopy", None, answer(403, "AccessDenied"))
    with pytest.raises(StoreUnavailable, match="cannot refresh"):
        backend.touch(PATH)
    assert sha256_of(backend) == BLOB.sha256
    assert uploads(backend, client) == []
