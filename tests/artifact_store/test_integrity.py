"""Every damage to an object is detected by its readers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt
from nxpipe.artifact_store.layout import action_path, blob_path
from nxpipe.artifact_store.manifest import Manifest
from tests.artifact_store.samples import Folder, folder, put
from tests.tiers import examples


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folder(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def manifest(place: Folder) -> Manifest:
    manifest = put(place.store)
    place.store.publish(manifest)
    return manifest


def read_everything(store: Store, *keys: str) -> None:
    """Find the artifact and read all that it names, as a fleet does."""
    for key in keys:
        found = store.find(key)
        assert found is not None
        for blob in found.manifest.blobs():
            store.read_blob(blob)


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """One flipped bit, a cut, an insertion, or a stretch of zeros where a disk lost a sector."""
    where, bit, width = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 7)), draw(st.integers(1, 32))
    kind = draw(st.sampled_from(["flip", "cut", "insert", "zero"]))

    def damage(data: bytes) -> bytes:
        at = int(where * len(data))
        match kind:
            case "flip":
                return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
            case "cut":
                return data[:at]
            case "insert":
                return data[:at] + bytes(width) + data[at:]
            case _:
                return data[:at] + bytes(len(data[at : at + width])) + data[at + width :]

    return damage


@settings(max_examples=examples(1000))
@given(data=st.data(), damage=damages())
def test_any_damage_to_any_object_is_caught(
    place: Folder, manifest: Manifest, data: st.DataObject, damage: Callable[[bytes], bytes]
) -> None:
    objects = [action_path(manifest.request_key), blob_path(Blob.of(manifest.to_bytes()))]
    path = data.draw(st.sampled_from([*objects, *(blob_path(blob) for blob in manifest.blobs())]))
    intact = (place.root / path).read_bytes()
    (place.root / path).write_bytes(damage(intact))
    try:
        with pytest.raises(Corrupt):
            read_everything(place.store, manifest.request_key)
    finally:
        (place.root / path).write_bytes(intact)
    read_everything(place.store, manifest.request_key)


@given(st.data())
def test_two_objects_that_changed_places_are_caught(place: Folder, manifest: Manifest, data: st.DataObject) -> None:
    other = place.store.publish(put(place.store, "b", request=2))
    paths = [action_path(manifest.request_key), action_path(other.request_key)]
    paths += [blob_path(blob) for blob in (*manifest.blobs(), *other.manifest.blobs(), Blob.of(manifest.to_bytes()))]
    one, two = (
        place.root / path for path in data.draw(st.lists(st.sampled_from(paths), min_size=2, max_size=2, unique=True))
    )
    before = one.read_bytes(), two.read_bytes()
    one.write_bytes(before[1])
    two.write_bytes(before[0])
    try:
        with pytest.raises(Corrupt):
            read_everything(place.store, manifest.request_key, other.request_key)
    finally:
        one.write_bytes(before[0])
        two.write_bytes(before[1])


def test_a_huge_file_in_place_of_a_record_is_refused_unread(place: Folder, manifest: Manifest) -> None:
    path = place.root / action_path(manifest.request_key)
    intact = path.read_bytes()
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: a terabyte that takes no room
    try:
        with pytest.raises(Corrupt, match="16384"):
            place.store.find(manifest.request_key)
    finally:
        path.write_bytes(intact)


def test_a_huge_file_in_place_of_a_blob_is_refused_at_once(place: Folder, manifest: Manifest, tmp_path: Path) -> None:
    blob = manifest.blobs()[0]
    path = place.root / blob_path(blob)
    intact = path.read_bytes()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    try:
        with pytest.raises(Corrupt, match=f"more than its {blob.size} bytes"):
            place.store.read_blob(blob)
        with pytest.raises(Corrupt, match=f"more than its {blob.size} bytes"):
            place.store.copy_blob_to(blob, tmp_path / "copy")
    finally:
        path.write_bytes(intact)
