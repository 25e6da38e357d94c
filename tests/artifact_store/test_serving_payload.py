"""Serving payloads of a manifest: files for a runtime, of which safetensors are shared with other artifacts."""

import json
import struct
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.bundle.archive import Bundled, export_artifact
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.difference import ManifestDifference
from nxpipe.artifact_store.errors import InvalidDocument, StoreUnavailable
from nxpipe.artifact_store.fetch.folder import fetch, size_of
from nxpipe.artifact_store.fetch.read_cache import ReadCache
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, fsck, plan
from nxpipe.artifact_store.manifest import File, Manifest, ServingPayload, SharedFile
from nxpipe.artifact_store.weights import Elements, put_weights
from tests.artifact_store.afar import afar, counting
from tests.artifact_store.samples import Folder, folder, put, tree
from tests.artifact_store.test_upkeep import PASSED

LARGE = bytes(range(256)) * 512  # above the limit of packs
SMALL = b"norm" * 8


def safetensors(tensors: dict[str, bytes]) -> tuple[bytes, bytes]:
    """The header and the whole file."""
    end, header = 0, {}
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    head = struct.pack("<Q", len(text)) + text
    return head, head + b"".join(tensors.values())


def with_payload(store: Store, tensors: dict[str, bytes], name: str = "vllm-nxdi") -> Manifest:
    elements = [Elements(key, "uint8", (len(data),), memoryview(data)) for key, data in tensors.items()]
    shared = SharedFile(
        path="model/model.safetensors",
        head=store.put_blob(safetensors(tensors)[0]),
        tensors=put_weights(store.blobs, elements),
    )
    payload = ServingPayload(
        name=name,
        contract=store.put_blob(b'{"a":"contract"}'),
        files=(File(path="artifact/.marker", blob=store.put_blob(b"done")),),
        shared=(shared,),
    )
    return put(store).model_copy(update={"serving": (payload,)})


@pytest.fixture
def ours(tmp_path: Path) -> Folder:
    return folder(tmp_path / "store")


@pytest.fixture
def made(ours: Folder) -> Manifest:
    return with_payload(ours.store, {"embed": LARGE, "norm": SMALL})


def test_a_manifest_without_payloads_has_the_bytes_that_it_had_before_there_were_any(ours: Folder) -> None:
    made = put(ours.store)
    assert b"serving" not in made.to_bytes()
    assert Manifest.from_bytes(made.to_bytes()) == made
    explicit = canonical_json({**made.model_dump(), "serving": []})
    with pytest.raises(InvalidDocument, match="without payloads"):
        Manifest.from_bytes(explicit)


def test_a_manifest_with_payloads_is_read_as_it_was_written(made: Manifest) -> None:
    assert Manifest.from_bytes(made.to_bytes()) == made


@given(
    st.dictionaries(st.text("abcxyz.", min_size=1, max_size=8), st.binary(max_size=300), min_size=1, max_size=5),
    st.booleans(),
)
def test_a_shared_file_is_fetched_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, bytes], cached: bool
) -> None:
    root = tmp_path_factory.mktemp("shared")
    store = folder(root / "store").store
    made = with_payload(store, {**tensors, "large": LARGE})
    reader = afar([store.backend], ReadCache(root / "cache", 2**30)) if cached else store
    fetch(reader.blobs, made, root / "to")
    assert (root / "to/serving/vllm-nxdi/model/model.safetensors").read_bytes() == safetensors(
        {**tensors, "large": LARGE}
    )[1]


def with_shards(store: Store, count: int, name: str = "vllm-nxdi") -> tuple[Manifest, dict[str, bytes]]:
    """A payload of several safetensors files with a large tensor each, and the bytes of each file."""
    payload, wholes = with_payload(store, {"embed": LARGE}, name).serving[0], {}
    shards = []
    for number in range(count):
        tensors = {f"layer.{number}": bytes([number]) + LARGE}
        head, whole = safetensors(tensors)
        elements = [Elements(key, "uint8", (len(data),), memoryview(data)) for key, data in tensors.items()]
        path = f"model/model-{number}.safetensors"
        shards.append(SharedFile(path=path, head=store.put_blob(head), tensors=put_weights(store.blobs, elements)))
        wholes[path] = whole
    return put(store).model_copy(update={"serving": (payload.model_copy(update={"shared": tuple(shards)}),)}), wholes


@pytest.mark.parametrize("with_cache", [True, False])
def test_the_shards_of_a_payload_are_received_at_the_same_time(
    ours: Folder, tmp_path: Path, *, with_cache: bool
) -> None:
    manifest, wholes = with_shards(ours.store, 4)
    tensors = {blob_path(file.tensors[0].blob) for file in manifest.serving[0].shared}
    together, backend = Barrier(4, timeout=60), counting(ours.backend)
    backend.before_read = lambda path, start: together.wait() if path in tensors else None
    cache = ReadCache(tmp_path / "cache") if with_cache else None
    received: list[int] = []
    fetch(afar([backend], cache).blobs, manifest, tmp_path / "served", received.append)
    assert sum(received) == size_of(manifest)
    for path, whole in wholes.items():
        assert (tmp_path / "served/serving/vllm-nxdi" / path).read_bytes() == whole


@pytest.mark.parametrize("with_cache", [True, False])
def test_a_file_of_two_payloads_is_received_once(ours: Folder, tmp_path: Path, *, with_cache: bool) -> None:
    manifest = with_payload(ours.store, {"embed": LARGE, "norm": SMALL})
    (payload,) = manifest.serving
    other = payload.model_copy(update={"name": "vllm-neuron"})
    manifest = manifest.model_copy(update={"serving": (payload, other)})
    backend, received = counting(ours.backend), list[int]()
    fetch(
        afar([backend], ReadCache(tmp_path / "cache") if with_cache else None).blobs,
        manifest,
        tmp_path / "served",
        received.append,
    )
    assert [path for path, _ in backend.reads].count(blob_path(payload.shared[0].tensors[0].blob)) == 1
    assert sum(received) == size_of(manifest)
    for name in ("vllm-nxdi", "vllm-neuron"):
        whole = (tmp_path / "served/serving" / name / "model/model.safetensors").read_bytes()
        assert whole == safetensors({"embed": LARGE, "norm": SMALL})[1]


@pytest.mark.parametrize("with_cache", [True, False])
def test_after_the_failure_of_one_shard_no_other_comes_again(ours: Folder, tmp_path: Path, *, with_cache: bool) -> None:
    manifest, wholes = with_shards(ours.store, 4)
    tensors = [blob_path(file.tensors[0].blob) for file in manifest.serving[0].shared]
    backend, others = counting(ours.backend), Barrier(4, timeout=60)

    def fail_the_last(path: str, start: int) -> None:
        if path in tensors:
            others.wait()
        if path == tensors[3]:
            raise StoreUnavailable("cut off")

    backend.before_read = fail_the_last
    cache = ReadCache(tmp_path / "cache") if with_cache else None
    blobs = afar([backend], cache).blobs
    with pytest.raises(StoreUnavailable, match="cut off"):
        fetch(blobs, manifest, tmp_path / "served")
    backend.before_read = lambda path, start: None
    backend.reads.clear()
    fetch(blobs, manifest, tmp_path / "served")
    assert [path for path, _ in backend.reads if path in tensors] == [tensors[3]]
    for path, whole in wholes.items():
        assert (tmp_path / "served/serving/vllm-nxdi" / path).read_bytes() == whole
    assert not list((tmp_path / "served").rglob("*.part"))


def test_a_folder_has_the_contract_and_the_files_beneath_it(ours: Folder, made: Manifest, tmp_path: Path) -> None:
    sent: list[int] = []
    fetch(ours.store.blobs, made, tmp_path / "to", sent.append)
    found = {path for path in tree(tmp_path / "to") if path.startswith("serving")}
    below = "serving/vllm-nxdi"
    assert found == {f"{below}.json", f"{below}/artifact/.marker", f"{below}/model/model.safetensors"}
    assert sum(sent) == size_of(made)
    again = fetch(ours.store.blobs, made, tmp_path / "to")
    assert again.bytes_written == 0


def test_a_payload_leaves_the_folder_with_its_artifact(ours: Folder, made: Manifest, tmp_path: Path) -> None:
    fetch(ours.store.blobs, made, tmp_path / "to")
    fetch(ours.store.blobs, put(ours.store), tmp_path / "to")
    assert not any(path.startswith("serving") for path in tree(tmp_path / "to"))


def test_collection_keeps_what_a_payload_names_and_removes_it_with_the_artifact(ours: Folder, made: Manifest) -> None:
    published = ours.store.publish(made)
    aged = Store(ours.backend, grace=PASSED)
    apply_plan(aged, plan(aged, Rules(), aged.backend.now()))
    assert fsck(ours.store).is_sound
    for _ in range(2):
        apply_plan(aged, plan(aged, Rules(keep=0), aged.backend.now()))
    assert not any(ours.backend.stat(blob_path(blob)) for blob in published.manifest.blobs())


@pytest.mark.parametrize("which", ["contract", "file", "head", "tensor", "pack"])
def test_fsck_finds_damage_of_every_part_of_a_payload(which: str, ours: Folder, made: Manifest) -> None:
    ours.store.publish(made)
    payload = made.serving[0]
    large, small = payload.shared[0].tensors
    parts = {"contract": payload.contract, "file": payload.files[0].blob, "head": payload.shared[0].head}
    parts |= {"tensor": large.blob, "pack": small.stored}
    path = blob_path(parts[which])
    ours.write(path, ours.objects()[path][:-1] + b"?")
    assert [finding.path for finding in fsck(ours.store).findings] == [path]


def test_a_bundle_carries_a_payload(ours: Folder, made: Manifest, tmp_path: Path) -> None:
    published = ours.store.publish(made)
    export_artifact(ours.store, published, tmp_path / "b.tar")
    other = folder(tmp_path / "other").store
    assert Bundled.read(tmp_path / "b.tar").publish(other).manifest == made
    fetch(other.blobs, made, tmp_path / "to")
    assert (tmp_path / "to/serving/vllm-nxdi/artifact/.marker").read_bytes() == b"done"


def test_a_difference_of_payloads_names_the_file(ours: Folder, made: Manifest) -> None:
    other = with_payload(ours.store, {"embed": LARGE[::-1], "norm": SMALL})
    difference = ManifestDifference.between(made, other)
    section = next(one for one in difference.sections if one.title == "serving")
    assert [change.name for change in section.changed] == ["vllm-nxdi/model/model.safetensors"]
    assert "1 of 3 serving" in difference.in_short()


def test_a_tensor_that_the_store_holds_is_not_stored_again(ours: Folder) -> None:
    tensor = put_weights(ours.store.blobs, [Elements("embed", "uint8", (len(LARGE),), memoryview(LARGE))])
    made = with_payload(ours.store, {"embed": LARGE, "norm": SMALL})
    assert made.serving[0].shared[0].tensors[0] == tensor[0]


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", "a\\b", ".", ""])
def test_a_path_that_leaves_the_folder_is_no_path_of_a_payload(path: str, made: Manifest) -> None:
    data = json.loads(made.to_bytes())
    data["serving"][0]["files"][0]["path"] = path
    with pytest.raises(InvalidDocument):
        Manifest.from_bytes(canonical_json(data))


def test_two_files_of_a_payload_cannot_have_one_path(made: Manifest) -> None:
    data = json.loads(made.to_bytes())
    data["serving"][0]["files"][0]["path"] = "model/model.SAFETENSORS"
    with pytest.raises(InvalidDocument, match="same name"):
        Manifest.from_bytes(canonical_json(data))
