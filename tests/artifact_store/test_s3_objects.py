"""Objects of a bucket and their versions: look-ups, listings, touching and removal."""

import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from moto.s3.models import s3_backends

from nxpipe.artifact_store.backends.protocol import CHUNK, ListedObject, Payload
from nxpipe.artifact_store.backends.s3 import Bucket, connect
from nxpipe.artifact_store.backends.s3_client import S3Options
from nxpipe.artifact_store.backends.s3_multipart import WRITE_ID
from nxpipe.artifact_store.errors import Changed, StoreUnavailable
from tests.artifact_store.wire import Wire, answer


@pytest.fixture
def versioned(backend: Bucket, client: Any) -> Bucket:
    enabled = {"Status": "Enabled"}
    client.put_bucket_versioning(Bucket=name_of(backend), VersioningConfiguration=enabled)
    return backend


@pytest.fixture(params=["unversioned", "versioned"])
def either(request: pytest.FixtureRequest, backend: Bucket) -> Bucket:
    if request.param == "versioned":
        request.getfixturevalue("versioned")
    return backend


def name_of(backend: Bucket) -> str:
    return backend.url.split("/")[2]


def bytes_of(chunks: Iterator[bytes] | None) -> bytes | None:
    return None if chunks is None else b"".join(chunks)


def found(backend: Bucket, path: str) -> ListedObject:
    (one,) = [entry for entry in backend.walk("") if entry.path == path]
    return one


def versions(client: Any, backend: Bucket) -> dict[str, int]:
    listed = client.list_object_versions(Bucket=name_of(backend))
    return {kind: len(listed.get(kind, ())) for kind in ("Versions", "DeleteMarkers")}


def age(client: Any, backend: Bucket, path: str) -> None:
    """Make the object a day older, inside the server."""
    key = s3_backends["123456789012"]["aws"].get_object(name_of(backend), f"p/{path}")
    key.last_modified -= timedelta(days=1)


# Look-ups and listings


def test_a_look_up_and_a_listing_tell_the_same_version(either: Bucket) -> None:
    either.create("cas/a", Payload.of(b"abc"))
    stat = either.stat("cas/a")
    assert stat is not None
    assert found(either, "cas/a") == ListedObject("cas/a", 3, stat.tag, stat.modified)
    assert stat.sha256 == Payload.of(b"abc").sha256
    assert abs(stat.modified - either.now()) < 60


def test_other_bytes_have_another_tag_and_so_have_younger_ones(either: Bucket, client: Any) -> None:
    either.create("cas/a", Payload.of(b"abc"))
    age(client, either, "cas/a")
    old = found(either, "cas/a").tag
    assert either.touch("cas/a")
    young = found(either, "cas/a").tag
    either.replace("cas/a", Payload.of(b"xyz"))
    assert len({old, young, found(either, "cas/a").tag}) == 3


def test_a_walk_gives_every_object_below_a_prefix_in_order_page_by_page(backend: Bucket, client: Any) -> None:
    paths = ["a/b/c", "a-b", "a/b", "a/é", "a/b0", "z"]
    for path in paths:
        backend.create(path, Payload.of(path.encode()))
    client.put_object(Bucket=name_of(backend), Key="p2/other", Body=b"")
    client.meta.events.register("provide-client-params.s3.ListObjectsV2", lambda params, **_: {**params, "MaxKeys": 2})
    assert [entry.path for entry in backend.walk("")] == sorted(paths)
    assert [entry.path for entry in backend.walk("a/")] == ["a/b", "a/b/c", "a/b0", "a/é"]
    assert backend.paths("a/") == ["a/b", "a/b0", "a/é"]
    assert list(backend.walk("none/")) == []


# Ranges


@pytest.mark.parametrize(
    ("start", "stop"), [(0, None), (0, 4), (3, 7), (3, None), (9, 99), (10, None), (4, 4), (50, 60)]
)
def test_a_range_reads_as_a_slice_does(backend: Bucket, start: int, stop: int | None) -> None:
    backend.create("cas/a", Payload.of(b"0123456789"))
    assert bytes_of(backend.read("cas/a", start, stop)) == b"0123456789"[start:stop]
    assert backend.read("cas/none", start, stop) is None


def test_an_empty_object_reads_as_one(backend: Bucket) -> None:
    backend.create("cas/a", Payload.of(b""))
    assert bytes_of(backend.read("cas/a")) == bytes_of(backend.read("cas/a", 0, 10)) == b""


def test_a_range_of_a_named_version_is_never_one_of_another(either: Bucket) -> None:
    either.create("cas/a", Payload.of(b"0123456789"))
    tag = found(either, "cas/a").tag
    assert bytes_of(either.read("cas/a", 2, 4, tag=tag)) == b"23"
    either.replace("cas/a", Payload.of(b"abcdefghij"))
    with pytest.raises(Changed, match=r"cas/a was replaced.*read it again"):
        either.read("cas/a", 4, 6, tag=tag)
    assert bytes_of(either.read("cas/a", 4, 6, tag=found(either, "cas/a").tag)) == b"ef"


def test_making_an_object_young_does_not_disturb_those_who_read_it(either: Bucket, client: Any) -> None:
    either.create("cas/a", Payload.of(b"0123456789"))
    age(client, either, "cas/a")
    tag = found(either, "cas/a").tag
    assert either.touch("cas/a")
    assert bytes_of(either.read("cas/a", 4, 6, tag=tag)) == b"45"


def test_an_object_of_many_chunks_arrives_whole(backend: Bucket) -> None:
    data = secrets.token_bytes(3 * CHUNK + 1)
    result: list[int] = []
    backend.create("cas/a", Payload.of(data), sent=result.append)
    chunks = list(backend.read("cas/a") or ())
    assert b"".join(chunks) == data
    assert max(map(len, chunks)) <= CHUNK
    assert sum(result) == len(data)


# Touching


def test_a_touched_object_is_young_and_otherwise_the_same(either: Bucket, client: Any) -> None:
    either.create("cas/a", Payload.of(b"abc"))
    where = {"Bucket": name_of(either), "Key": "p/cas/a"}
    before = client.head_object(**where, ChecksumMode="ENABLED")
    age(client, either, "cas/a")
    old = either.stat("cas/a")
    assert either.touch("cas/a")
    young, after = either.stat("cas/a"), client.head_object(**where, ChecksumMode="ENABLED")
    assert old is not None
    assert young is not None
    assert young.modified > old.modified + 80_000
    assert (young.size, young.sha256) == (old.size, old.sha256)
    assert after["Metadata"] == before["Metadata"]
    assert after["Metadata"].keys() == {WRITE_ID}
    assert after["ChecksumSHA256"] == before["ChecksumSHA256"]


def test_touching_what_is_not_there_makes_nothing(either: Bucket) -> None:
    assert not either.touch("cas/a")
    assert list(either.walk("")) == []


def test_an_object_that_is_written_anew_while_it_is_touched_is_looked_at_again(backend: Bucket, wire: Wire) -> None:
    backend.create("cas/a", Payload.of(b"abc"))
    wire.on("CopyObject", answer(412, "PreconditionFailed"), answer(404, "NoSuchKey"))
    assert not backend.touch("cas/a")
    assert wire.sent["HeadObject"] == 2


def test_an_object_that_never_rests_cannot_be_touched(backend: Bucket, wire: Wire) -> None:
    backend.create("cas/a", Payload.of(b"abc"))
    wire.on("CopyObject", *[answer(412, "PreconditionFailed")] * 20)
    with pytest.raises(StoreUnavailable, match="other writers replaced it"):
        backend.touch("cas/a")


def test_a_copy_names_the_bytes_that_were_looked_at(backend: Bucket, client: Any) -> None:
    backend.create("cas/a", Payload.of(b"abc"))
    result: list[dict[str, Any]] = []
    client.meta.events.register("provide-client-params.s3.CopyObject", lambda params, **_: result.append(params))
    backend.touch("cas/a")
    (request,) = result
    assert request["CopySourceIfMatch"] == client.head_object(Bucket=name_of(backend), Key="p/cas/a")["ETag"]


# Removing


def test_a_removed_object_is_gone_and_nothing_is_left_behind(either: Bucket, client: Any) -> None:
    either.create("cas/a", Payload.of(b"abc"))
    either.create("cas/ab", Payload.of(b"abc"))
    assert either.remove(found(either, "cas/a"))
    assert either.stat("cas/a") is None
    assert versions(client, either) == {"Versions": 1, "DeleteMarkers": 0}
    assert either.stat("cas/ab") is not None


def test_removing_an_object_brings_no_older_version_of_it_back(versioned: Bucket, client: Any) -> None:
    versioned.create("cas/a", Payload.of(b"abc"))
    client.delete_object(Bucket=name_of(versioned), Key="p/cas/a")
    for data in (b"abc", b"damaged"):
        versioned.replace("cas/a", Payload.of(data))
    age(client, versioned, "cas/a")
    versioned.touch("cas/a")
    assert versions(client, versioned) == {"Versions": 4, "DeleteMarkers": 1}
    assert versioned.remove(found(versioned, "cas/a"))
    assert versioned.stat("cas/a") is None
    assert versions(client, versioned) == {"Versions": 0, "DeleteMarkers": 0}


@pytest.mark.parametrize("deleted", range(3))
def test_a_removal_that_breaks_off_has_not_brought_an_older_version_back(
    versioned: Bucket, wire: Wire, deleted: int
) -> None:
    for data in (b"first", b"second", b"third"):
        versioned.replace("cas/a", Payload.of(data))
    wire.on("DeleteObject", *[None] * deleted, wire.cut, wire.cut)
    with pytest.raises(StoreUnavailable):
        versioned.remove(found(versioned, "cas/a"))
    assert bytes_of(versioned.read("cas/a")) == b"third"
    assert versioned.remove(found(versioned, "cas/a"))
    assert versioned.stat("cas/a") is None


def test_what_has_changed_since_it_was_listed_stays(either: Bucket, client: Any) -> None:
    either.create("cas/a", Payload.of(b"abc"))
    age(client, either, "cas/a")
    listed = found(either, "cas/a")
    either.touch("cas/a")
    assert not either.remove(listed)
    either.replace("cas/a", Payload.of(b"xyz"))
    assert not either.remove(listed)
    assert bytes_of(either.read("cas/a")) == b"xyz"


def test_what_is_gone_already_is_not_removed(either: Bucket) -> None:
    either.create("cas/a", Payload.of(b"abc"))
    listed = found(either, "cas/a")
    assert either.remove(listed)
    assert not either.remove(listed)


@pytest.mark.parametrize("moment", ["ListObjectVersions", "DeleteObject"])
def test_a_version_that_is_made_during_a_removal_survives_it(
    versioned: Bucket, client: Any, wire: Wire, moment: str
) -> None:
    """A publisher makes the object young after the collector looked at it."""
    versioned.create("cas/a", Payload.of(b"abc"))
    listed = found(versioned, "cas/a")

    def touch(request: Any) -> None:
        versioned.touch("cas/a")

    wire.on(moment, touch)
    assert versioned.remove(listed) == (moment == "DeleteObject")
    assert bytes_of(versioned.read("cas/a")) == b"abc"


def test_without_versions_other_bytes_survive_a_removal(backend: Bucket, wire: Wire) -> None:
    backend.create("cas/a", Payload.of(b"damaged"))
    listed = found(backend, "cas/a")
    wire.on("DeleteObject", lambda _: backend.replace("cas/a", Payload.of(b"repaired")))
    assert not backend.remove(listed)
    assert bytes_of(backend.read("cas/a")) == b"repaired"


# The clock, and how the bucket is asked


def test_the_time_is_the_servers(backend: Bucket, wire: Wire) -> None:
    wire.on("HeadBucket", answer(200, date="Wed, 21 Oct 2015 07:28:00 GMT"))
    assert backend.now() == pytest.approx(1445412480.0, abs=30)


def test_a_server_without_a_clock_is_one_sentence(backend: Bucket, wire: Wire) -> None:
    wire.on("HeadBucket", answer(200))
    with pytest.raises(StoreUnavailable, match="no Date"):
        backend.now()


def test_a_key_of_kms_goes_with_every_write(backend: Bucket, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encrypted = connect(name_of(backend), "p", S3Options(kms_key="alias/store"))
    encrypted.create("cas/a", Payload.of(b"abc"))
    encrypted.replace("cas/b", Payload.of(b"abc"))
    encrypted.create("cas/c", Payload.of(b"abc"))
    encrypted.touch("cas/c")
    for path in "abc":
        head = client.head_object(Bucket=name_of(backend), Key=f"p/cas/{path}")
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", "alias/store")
        assert head["BucketKeyEnabled"] is True


def test_an_endpoint_may_be_given(server: dict[str, str], backend: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.create("cas/a", Payload.of(b"abc"))
    endpoint = server["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    other = connect(name_of(backend), "p", S3Options(endpoint=endpoint, addressing="path", concurrency=2))
    assert bytes_of(other.read("cas/a")) == b"abc"


def test_what_the_client_hashes_is_nothing(backend: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is hashed once, by us: the signature covers the checksum, so it need not cover the bytes."""
    result: list[dict[str, Any]] = []
    ours = connect(name_of(backend), "p")
    ours._place.client.meta.events.register("before-send.s3", lambda request, **_: result.append(dict(request.headers)))
    ours.create("cas/a", Payload.of(secrets.token_bytes(2 * CHUNK)))
    assert bytes_of(ours.read("cas/a")) is not None
    headers = [{name.lower(): value for name, value in entry.items()} for entry in result]
    assert headers[0]["x-amz-content-sha256"] in ("UNSIGNED-PAYLOAD", b"UNSIGNED-PAYLOAD")
    assert "x-amz-checksum-sha256" in str(headers[0]["authorization"])
    assert not any("x-amz-checksum-mode" in header for header in headers)
