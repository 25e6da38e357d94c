"""The contract of every store, tested with a folder and with S3."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Conflict, Corrupt, Incomplete, NotFound, OutputLost
from nxpipe.artifact_store.layout import action_path, blob_path, listing_path
from tests.artifact_store.samples import MODEL, Place, contents, put, watched, with_device_programs

# Blobs


@pytest.mark.parametrize("size", [0, 1, 1024**2, 3 * 1024**2 + 1])
def test_bytes_come_back_as_they_went_in(store: Store, tmp_path: Path, size: int) -> None:
    data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    blob = store.put_blob(data)
    assert blob == Blob.of(data)
    assert store.read_blob(blob) == data
    store.copy_blob_to(blob, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


def test_a_stream_gives_the_same_blob_as_its_bytes(store: Store) -> None:
    assert store.put_stream(iter([b"ab", b"", b"c"])) == store.put_blob(b"abc")
    assert store.read_blob(Blob.of(b"abc")) == b"abc"
    assert store.put_stream([]) == Blob.of(b"")


def test_a_buffer_of_any_shape_is_its_bytes(store: Store) -> None:
    square = memoryview(b"abcdef").cast("B", shape=[2, 3])
    assert store.put_blob(square) == Blob.of(b"abcdef")
    wide = memoryview(b"abcdefgh").cast("I")
    assert store.read_blob(store.put_blob(wide)) == b"abcdefgh"


def test_equal_bytes_are_stored_once(place: Place) -> None:
    place.store.put_blob(b"abc")
    before = place.objects()
    place.store.put_blob(b"abc")
    place.store.put_stream([b"abc"])
    assert place.objects() == before == {blob_path(Blob.of(b"abc")): b"abc"}


def test_a_blob_that_was_never_stored_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=Blob.of(b"abc").sha256):
        store.read_blob(Blob.of(b"abc"))
    with pytest.raises(NotFound):
        store.copy_blob_to(Blob.of(b"abc"), tmp_path / "copy")
    assert list(tmp_path.glob("*copy*")) == []


DAMAGE = {"flipped": b"abX", "shortened": b"ab", "emptied": b"", "lengthened": b"abcd"}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_bytes_are_never_handed_out(place: Place, tmp_path: Path, damage: str) -> None:
    blob = place.store.put_blob(b"abc")
    place.write(blob_path(blob), DAMAGE[damage])
    with pytest.raises(Corrupt, match=blob.sha256):
        place.store.read_blob(blob)
    (tmp_path / "out").mkdir()
    with pytest.raises(Corrupt):
        place.store.copy_blob_to(blob, tmp_path / "out" / "copy")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_putting_a_blob_again_repairs_it(place: Place, damage: str) -> None:
    blob = place.store.put_blob(b"abc")
    place.write(blob_path(blob), DAMAGE[damage])
    assert place.store.put_blob(b"abc") == blob
    assert place.store.read_blob(blob) == b"abc"
    place.write(blob_path(blob), DAMAGE[damage])
    assert place.store.put_stream([b"a", b"bc"]) == blob
    assert place.store.read_blob(blob) == b"abc"


def test_a_copy_replaces_what_stood_at_its_path_only_when_it_is_right(place: Place, tmp_path: Path) -> None:
    blob = place.store.put_blob(b"abc")
    target = tmp_path / "copy"
    target.write_bytes(b"older")
    place.write(blob_path(blob), b"abX")
    with pytest.raises(Corrupt):
        place.store.copy_blob_to(blob, target)
    assert target.read_bytes() == b"older"
    place.write(blob_path(blob), b"abc")
    place.store.copy_blob_to(blob, target)
    assert target.read_bytes() == b"abc"


# Artifacts


def test_what_is_published_is_found_listed_and_complete(store: Store) -> None:
    manifest = put(store)
    published = store.publish(manifest)
    assert published.request_key == manifest.request_key
    assert published.manifest_digest == Blob.of(manifest.to_bytes()).sha256
    assert (published.model_id, published.target, published.executables) == (MODEL, "inf2", 1)
    assert published.size_bytes == sum(map(len, contents()))
    assert store.find(manifest.request_key) == published
    assert list(store.list()) == [published]
    for found in (published, store.find(manifest.request_key), store.list()[0]):
        assert found is not None
        assert found.manifest == manifest


def test_an_empty_store_holds_nothing_and_stays_empty(place: Place) -> None:
    assert place.store.find("0" * 64) is None
    assert list(place.store.list()) == []
    with pytest.raises(NotFound, match="empty"):
        place.store.resolve("bert")
    assert place.objects() == {}


@pytest.mark.parametrize("key", ["", "0", "A" * 64, "0" * 65, "../cas/x", "../" + "0" * 61, "0" * 64 + "\n"])
def test_what_is_no_key_finds_nothing(place: Place, key: str) -> None:
    place.store.publish(put(place.store))
    assert place.store.find(key) is None


def test_a_record_of_a_later_version_is_refused_without_the_advice_to_remove_it(place: Place) -> None:
    manifest = put(place.store)
    place.store.publish(manifest)
    path = action_path(manifest.request_key)
    fields = {key: value for key, value in json.loads(place.objects()[path]).items() if key != "seal"}
    fields |= {"format": "nxpipe.action/2", "signature": "x"}
    place.write(path, canonical_json(fields | {"seal": sha256_hex(canonical_json(fields))}))
    with pytest.raises(Corrupt, match=r"format.*read it with the version of nxpipe that wrote it"):
        place.store.find(manifest.request_key)


def test_publishing_again_changes_nothing(place: Place) -> None:
    manifest = put(place.store)
    first = place.store.publish(manifest)
    before = place.objects()
    assert place.store.publish(put(place.store)) == first
    assert place.objects() == before


def test_the_listing_is_the_manifest_for_people(place: Place) -> None:
    manifest = put(place.store)
    place.store.publish(manifest)
    path = f"neuron-artifacts/acme-tiny-bert/{manifest.request_key[:16]}/manifest.json"
    assert path == listing_path(manifest)
    assert json.loads(place.objects()[path]) == json.loads(manifest.to_bytes())


def test_a_listing_that_somebody_changed_is_rewritten_by_the_next_publish(place: Place) -> None:
    manifest = put(place.store)
    place.store.publish(manifest)
    before = place.objects()
    place.write(listing_path(manifest), b"{}")
    place.store.publish(manifest)
    assert place.objects() == before


def test_a_manifest_that_names_an_absent_blob_is_not_published(place: Place) -> None:
    manifest = put(place.store)
    lost = manifest.weights[0].blob
    place.remove(blob_path(lost))
    with pytest.raises(Incomplete, match=lost.sha256):
        place.elsewhere().publish(manifest)
    assert place.store.find(manifest.request_key) is None


def test_a_manifest_that_names_a_short_blob_is_not_published(place: Place) -> None:
    manifest = put(place.store)
    place.write(blob_path(manifest.weights[0].blob), b"short")
    with pytest.raises(Incomplete, match="5 bytes"):
        place.elsewhere().publish(manifest)
    assert list(place.store.list()) == []


def test_other_bytes_under_the_same_key_are_a_conflict_that_names_both(place: Place) -> None:
    first = place.store.publish(put(place.store, "a"))
    other = put(place.store, "b")
    before = place.objects()
    with pytest.raises(Conflict, match="this build differs from the stored one of the same key") as caught:
        place.store.publish(other)
    assert caught.value.stored == first.manifest_digest
    assert caught.value.offered == Blob.of(other.to_bytes()).sha256
    assert {first.manifest_digest, caught.value.offered} <= set(
        str(caught.value).replace(",", "").replace(";", "").split()
    )
    kept = blob_path(Blob.of(other.to_bytes()))
    assert place.objects() == {**before, kept: other.to_bytes()}  # for `store diff`, until it is collected
    assert place.store.find(first.request_key) == first


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_an_artifact_that_lost_what_no_build_reproduces_says_so_until_its_record_is_removed(
    place: Place, damage: str
) -> None:
    first = with_device_programs(place.store, put(place.store))
    device = first.executables[0].device
    assert device is not None
    record = action_path(place.store.publish(first).request_key)
    again = device.model_copy(update={"neff": place.store.put_blob(b"another UUID")})
    other = first.model_copy(update={"executables": (first.executables[0].model_copy(update={"device": again}),)})
    with pytest.raises(Conflict, match=r"differs in 1 of 1 neffs \(forward-b1-s128\); compare the two"):
        place.store.publish(other)
    if damage == "missing":
        place.remove(blob_path(device.neff))
    else:
        place.write(blob_path(device.neff), b"rot")
    lost = f"whose blob {device.neff.sha256} of {device.neff.size} bytes is missing or damaged"
    with pytest.raises(OutputLost, match=rf"{lost}.* 1 of 1 neffs .*or remove \S+/{record} and build again") as caught:
        place.store.publish(other)
    assert (caught.value.stored, caught.value.offered) == (first.digest, other.digest)
    place.remove(record)
    assert place.store.publish(other).manifest == other


@pytest.mark.parametrize("rival", ["a", "b"])
def test_a_record_that_appears_between_the_check_and_the_commit_decides(place: Place, rival: str) -> None:
    """Two publishers of one key pass the check together; the slower one learns of the faster at the commit."""
    ours, theirs = put(place.store, "a"), put(place.store, rival)

    def overtake(verb: str, path: str) -> None:
        if path == action_path(ours.request_key):
            place.store.publish(theirs)

    slower = Store(watched(place.backend, overtake))
    if rival == "a":
        assert slower.publish(ours) == place.store.find(ours.request_key)
    else:
        with pytest.raises(Conflict):
            slower.publish(ours)
    found = place.store.find(ours.request_key)
    assert found is not None
    assert found.manifest == theirs


def test_the_record_is_written_last_and_after_all_that_it_names_is_durable(place: Place) -> None:
    manifest = put(place.store)
    steps: list[tuple[str, str]] = []
    Store(watched(place.backend, lambda verb, path: steps.append((verb, path)))).publish(manifest)
    document = blob_path(Blob.of(manifest.to_bytes()))
    assert steps == [
        *(("make durable", blob_path(blob)) for blob in manifest.blobs()),
        ("create", document),
        ("make durable", document),
        ("replace", listing_path(manifest)),
        ("create durably", action_path(manifest.request_key)),
    ]


def test_artifacts_that_share_tensors_store_them_once(place: Place) -> None:
    place.store.publish(put(place.store, request=1))
    blobs = {path for path in place.objects() if path.startswith("cas/")}
    place.store.publish(put(place.store, request=2))
    assert (
        len({path for path in place.objects() if path.startswith("cas/")} - blobs) == 2
    )  # the second question and its manifest


def test_the_listing_of_a_store_is_newest_first_and_passes_over_strangers(place: Place) -> None:
    keys = [place.store.publish(put(place.store, request=number)).request_key for number in range(5)]
    place.write("ac/README", b"not a record")
    place.write(f"ac/{keys[0]}.tmp", b"nor this")
    assert [entry.request_key for entry in place.store.list()] == keys[::-1]


def test_listing_reads_no_manifest(place: Place) -> None:
    manifest = put(place.store)
    published = place.store.publish(manifest)
    place.remove(blob_path(Blob.of(manifest.to_bytes())))
    assert list(place.store.list()) == [published]


# Damage


def test_a_damaged_manifest_is_corrupt_until_the_artifact_is_published_again(place: Place) -> None:
    manifest = put(place.store)
    published = place.store.publish(manifest)
    path = blob_path(Blob.of(manifest.to_bytes()))
    for damaged in (place.objects()[path][:-1] + b"]", None):
        place.remove(path)
        if damaged is not None:
            place.write(path, damaged)
        with pytest.raises(Corrupt, match="publish the artifact again"):
            place.store.find(manifest.request_key)
        assert place.store.publish(manifest) == published
        assert place.store.find(manifest.request_key) == published


def test_a_damaged_record_is_corrupt_and_never_overwritten(place: Place) -> None:
    manifest = put(place.store)
    published = place.store.publish(manifest)
    path = action_path(manifest.request_key)
    damaged = place.objects()[path].replace(b"acme", b"acne")
    place.write(path, damaged)
    calls: list[Callable[[], object]] = [
        lambda: place.store.find(manifest.request_key),
        lambda: place.store.list(),
        lambda: place.store.resolve(MODEL),
        lambda: place.store.publish(manifest),
    ]
    for call in calls:
        with pytest.raises(Corrupt, match=r"seal.*remove that object"):
            call()
    assert place.objects()[path] == damaged
    place.remove(path)
    assert place.store.publish(manifest).manifest_digest == published.manifest_digest


def test_a_record_in_anothers_place_is_corrupt(place: Place) -> None:
    first, second = (place.store.publish(put(place.store, request=number)) for number in range(2))
    place.write(action_path(first.request_key), place.objects()[action_path(second.request_key)])
    with pytest.raises(Corrupt, match=second.request_key):
        place.store.find(first.request_key)


# Names


@pytest.fixture
def three(store: Store) -> list[Published]:
    models = [("acme/bert", 0), ("acme/bert", 1), ("acme/llama", 2)]
    return [store.publish(put(store, model=model, request=request)) for model, request in models]


def test_an_artifact_goes_by_its_model_its_key_or_both(store: Store, three: list[Published]) -> None:
    for entry in three:
        for digits in (6, 12, 64):
            assert store.resolve(entry.request_key[:digits]) == entry
            assert store.resolve(f"{entry.model_id}@{entry.request_key[:digits]}") == entry
    assert store.resolve("acme/llama") == three[2]


def test_an_ambiguous_name_is_answered_with_the_candidates(store: Store, three: list[Published]) -> None:
    with pytest.raises(NotFound, match="2 artifacts") as caught:
        store.resolve("acme/bert")
    for entry in three[:2]:
        assert f"acme/bert@{entry.request_key[:12]}" in str(caught.value)


@pytest.mark.parametrize("name", ["acme/lama", "acme/llama@zzz", "acme/llama@", "@", "", "ffffff", "00000", "a" * 64])
def test_a_name_that_fits_nothing_is_answered_with_what_there_is(
    store: Store, three: list[Published], name: str
) -> None:
    with pytest.raises(NotFound) as caught:
        store.resolve(name)
    assert f"acme/llama@{three[2].request_key[:12]}" in str(caught.value)


def test_a_file_is_kept_as_its_bytes_are_and_left_where_it_is(place: Place, tmp_path: Path) -> None:
    for number, data in enumerate((b"", b"some bytes", bytes(range(256)) * 5000)):
        path = tmp_path / str(number)
        path.write_bytes(data)
        result: list[int] = []
        blob = place.store.blobs.put_file(path, result.append)
        assert blob == Blob.of(data)
        assert place.store.read_blob(blob) == path.read_bytes() == data
        assert sum(result) == len(data)
