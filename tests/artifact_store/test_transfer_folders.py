"""Artifacts in folders: complete, repeatable, private, and without a network."""

import json
import os
import secrets
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import NotFound, NotUnderstood, Refused, StoreUnavailable
from nxpipe.artifact_store.fetch.file_layout import layout_of
from nxpipe.artifact_store.fetch.folder import WEIGHTS, fetch, size_of
from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
from nxpipe.artifact_store.fetch.read_cache import ReadCache
from nxpipe.artifact_store.fetch.selection import by_channel, by_name
from nxpipe.artifact_store.manifest import Manifest, Tensor
from nxpipe.artifact_store.trust.channel_trust import ALL
from nxpipe.artifact_store.url import open_offline
from nxpipe.artifact_store.weights import Elements, put_weights
from tests.artifact_store.afar import afar, counting, patch, promoted
from tests.artifact_store.samples import MODEL, Place, contents, folder, manifest, put, tree
from tests.conftest import ROOT


@pytest.fixture
def tier(tmp_path: Path) -> ReadCache:
    return ReadCache(tmp_path / "cache")


# Folders


def weighty(store: Store, *, seed: str = "a", request: object = 1, name: str = "forward-b1-s128") -> Manifest:
    """An artifact with small tensors in packs, large ones, an empty one, a tied pair, and many types."""
    asked, program, *_, file = [store.put_blob(data) for data in contents(seed, request)]
    shapes = {"odd": ("uint8", (3,)), "big": ("bfloat16", (200, 300)), "tied": ("bfloat16", (200, 300))}
    shapes |= {"empty": ("float32", (0, 4)), "scalar": ("int64", ()), "exotic": ("float8_e4m3", (5, 2))}
    widths = {"uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8, "float8_e4m3": 1}
    elements = []
    for tensor, (dtype, shape) in shapes.items():
        size = widths[dtype]
        for length in shape:
            size *= length
        text = f"{seed} {'big' if tensor == 'tied' else tensor} ".encode() * size
        elements.append(Elements(tensor, dtype, shape, memoryview(text[:size])))
    sample = manifest([asked, program, file])
    executable = sample.executables[0].model_copy(update={"name": name})
    return sample.model_copy(update={"executables": (executable,), "weights": put_weights(store.blobs, elements)})


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Read by the rules of the format: tensors without gaps, and nothing after the last."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert all(isinstance(value, str) for value in header.pop("__metadata__").values())
    body, end, found = data[8 + length :], 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
        found[name] = (entry["dtype"], entry["shape"], body[entry["data_offsets"][0] : end])
    assert end == len(body)
    return found


def test_an_artifact_in_a_folder_is_all_that_its_manifest_names(place: Place, tier: ReadCache, tmp_path: Path) -> None:
    store = afar([place.backend], tier)
    wanted = place.store.publish(weighty(place.store)).manifest
    result: list[int] = []
    fetched = fetch(store.blobs, wanted, tmp_path / "served", result.append)
    root = tmp_path / "served"
    assert tree(root) == {
        *("manifest.json", ".nxpipe", "weights.safetensors"),
        *("executables/forward-b1-s128.nxe", "files/tokenizer/config.json"),
    }
    assert Blob.of((root / "manifest.json").read_bytes()).sha256 == fetched.manifest
    assert (root / "executables/forward-b1-s128.nxe").read_bytes() == contents()[1]
    assert (root / "files/tokenizer/config.json").read_bytes() == contents()[-1]
    found = read_safetensors(root / WEIGHTS)
    assert {name: Blob.of(data) for name, (_, _, data) in found.items()} == {t.name: t.blob for t in wanted.weights}
    assert found["big"][:2] == ("BF16", [200, 300])
    assert found["exotic"][:2] == ("U8", [10])
    assert sum(result) == size_of(wanted) == fetched.bytes_written


def test_the_library_of_the_format_reads_the_weights_as_they_were(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    store = folder(tmp_path / "store").store
    tensors = [Elements(f"t{n}", dtype, (n, 2), memoryview(bytes(range(n * 2)) * width)) for n, dtype, width in KINDS]
    given = store.publish(manifest_of(store, tensors)).manifest
    fetch(store.blobs, given, tmp_path / "served")
    loaded = safetensors.load_file(tmp_path / "served" / WEIGHTS)
    assert {name: (str(array.dtype), array.tobytes()) for name, array in loaded.items()} == {
        tensor.name: (tensor.dtype, bytes(tensor.data)) for tensor in tensors
    }


KINDS = [(1, "float32", 4), (3, "uint8", 1), (2, "int64", 8), (5, "float16", 2), (4, "int8", 1)]


def manifest_of(store: Store, tensors: list[Elements]) -> Manifest:
    asked, program, _, file = [store.put_blob(data) for data in contents(tensors=1)]
    return manifest([asked, program, file]).model_copy(update={"weights": put_weights(store.blobs, tensors)})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["float64", "float32", "bfloat16", "int8", "bool"]), st.lists(st.integers(0, 5), max_size=6)
        ),
        max_size=12,
    )
)
def test_every_tensor_lies_where_its_kind_may_be_mapped(kinds: list[tuple[str, list[int]]]) -> None:
    widths = {"float64": 8, "float32": 4, "bfloat16": 2, "int8": 1, "bool": 1}
    tensors = []
    for number, (dtype, shape) in enumerate(kinds):
        size = widths[dtype]
        for length in shape:
            size *= length
        blob = Blob.of(bytes(size))
        tensors.append(Tensor(name=f"é{number}", dtype=dtype, shape=tuple(shape), blob=blob, pack=None))
    layout = layout_of(tensors)
    ends = sorted((offset, offset + t.blob.size) for offset, t in zip(layout.offsets, tensors, strict=True))
    assert [start for start, _ in ends] == [len(layout.head), *(end for _, end in ends)][: len(ends)]
    assert layout.size == max([len(layout.head), *(end for _, end in ends)])
    for offset, tensor in zip(layout.offsets, tensors, strict=True):
        assert offset % widths[tensor.dtype] == 0 or not tensor.blob.size


def test_fetching_again_writes_nothing_and_mends_what_was_changed(tmp_path: Path) -> None:
    store = folder(tmp_path / "store").store
    wanted = store.publish(weighty(store)).manifest
    root = tmp_path / "served"
    fetch(store.blobs, wanted, root)
    before = {name: (root / name).read_bytes() for name in tree(root) - {".nxpipe"}}
    assert fetch(store.blobs, wanted, root).bytes_written == 0
    for name in before:
        for damage in (lambda path: patch(path), lambda path: path.unlink()):
            damage(root / name)
            result: list[int] = []
            fetch(store.blobs, wanted, root, result.append)
            assert {name: (root / name).read_bytes() for name in tree(root) - {".nxpipe"}} == before
            assert sum(result) == size_of(wanted)


def test_another_artifact_takes_the_place_of_the_first_and_keeps_what_both_share(tmp_path: Path) -> None:
    store = folder(tmp_path / "store").store
    root = tmp_path / "served"
    fetch(store.blobs, store.publish(weighty(store, seed="a", request=1, name="old")).manifest, root)
    other = store.publish(weighty(store, seed="a", request=2, name="new")).manifest
    fetched = fetch(store.blobs, other, root)
    assert fetched.bytes_written == other.executables[0].blob.size
    assert "executables/old.nxe" not in tree(root)
    assert "executables/new.nxe" in tree(root)


def test_a_folder_with_a_manifest_is_complete(tmp_path: Path) -> None:
    """At each read that may fail, first while the folder is new and then while it holds another artifact."""
    place = folder(tmp_path / "store")
    wanted = place.store.publish(weighty(place.store)).manifest
    earlier = place.store.publish(weighty(place.store, seed="b", request=2, name="other")).manifest
    backend = counting(place.backend)
    store = Store(backend)
    root = tmp_path / "served"
    failures = 0
    for fatal in range(100):
        backend.reads.clear()

        def fail(path: str, start: int, fatal: int = fatal) -> None:
            if len(backend.reads) > fatal:
                raise StoreUnavailable("cut off")

        backend.before_read = fail
        try:
            fetch(store.blobs, wanted, root)
            break
        except StoreUnavailable:
            failures += 1
            assert not (root / "manifest.json").exists()
        backend.before_read = lambda path, start: None
        fetch(store.blobs, earlier, root)
    assert failures == len({blob for blob in wanted.blobs() if blob != wanted.key_inputs})


@pytest.mark.parametrize("name", ["..", ".", "../up", "a/b", "/etc/x", "c\\d"])
def test_a_program_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    store = folder(tmp_path / "store").store
    with pytest.raises((Refused, NotUnderstood)):
        fetch(store.blobs, weighty(store, name=name), tmp_path / "served")
    assert tree(tmp_path) == {f"store/{path}" for path in tree(tmp_path / "store")}


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    store = folder(tmp_path / "store").store
    wanted = weighty(store)
    root, outside = tmp_path / "served", tmp_path / "outside"
    outside.mkdir()
    fetch(store.blobs, wanted, root)
    for path in (root / "executables").iterdir():
        path.unlink()
    (root / "executables").rmdir()
    (root / "executables").symlink_to(outside)
    with pytest.raises(Refused, match="may lead out of"):
        fetch(store.blobs, wanted, root)
    assert not list(outside.iterdir())


@pytest.mark.parametrize("notes", ["{}", "[]", "x", '{"files":{"../kept":{"content":"c","stamp":"s"}}}'])
def test_forged_notes_lead_nobody_out_of_the_folder(tmp_path: Path, notes: str) -> None:
    store = folder(tmp_path / "store").store
    wanted = weighty(store)
    root = tmp_path / "served"
    (tmp_path / "kept").write_text("mine")
    fetch(store.blobs, wanted, root)
    (root / ".nxpipe").write_text(notes)
    fetch(store.blobs, wanted, root)
    assert (tmp_path / "kept").read_text() == "mine"
    assert fetch(store.blobs, wanted, root).bytes_written == 0


def test_a_folder_with_files_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    store = folder(tmp_path / "store").store
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text("mine")
    with pytest.raises(Refused, match="were not fetched"):
        fetch(store.blobs, weighty(store), tmp_path / "mine")
    assert (tmp_path / "mine" / "manifest.json").read_text() == "mine"


# Offline


def test_offline_serves_what_was_seen_and_says_how_old_it_is(tmp_path: Path, tier: ReadCache) -> None:
    url = "s3://a-bucket/that-is-not-there"
    place = folder(tmp_path / "store")
    wanted, channel = promoted(place.store)
    online = afar([place.backend], tier)
    remember = OfflineIndex(tier.root, url)
    fetch(online.blobs, by_name(online, wanted.request_key, remember).manifest, tmp_path / "first")
    assert by_channel(online, channel, None, None, ALL, remember).seen_ago is None
    seen = time.time() - 7200
    os.utime(remember.scratch_folder.parent / "channels" / channel / "head", (seen, seen))

    offline = open_offline(url, tier.root)
    for found in (
        by_name(offline, wanted.request_key),
        by_name(offline, wanted.model.id),
        by_channel(offline, channel, wanted.model.id, "inf2", ALL),
    ):
        assert found.manifest == wanted
        fetch(offline.blobs, found.manifest, tmp_path / secrets.token_hex(4))
    assert by_channel(offline, channel, None, None, ALL).seen_ago == pytest.approx(7200, abs=100)


def test_offline_says_what_is_not_here(tmp_path: Path) -> None:
    offline = open_offline("s3://a-bucket/p", tmp_path / "cache")
    with pytest.raises(NotFound, match="as last seen from here"):
        by_name(offline, "acme/bert")
    with pytest.raises(NotFound, match="as last seen from here"):
        by_channel(offline, "prod", None, None, ALL)
    with pytest.raises(StoreUnavailable, match=r"offline: .* does not hold blob"):
        offline.read_blob(Blob.of(b"never seen"))


def test_offline_and_a_hit_import_no_client(tmp_path: Path, tier: ReadCache) -> None:
    place = folder(tmp_path / "store")
    wanted = place.store.publish(put(place.store)).manifest
    online = afar([place.backend], tier)
    fetch(online.blobs, by_name(online, MODEL, OfflineIndex(tier.root, "s3://b/p")).manifest, tmp_path / "first")
    code = (
        "import sys; from pathlib import Path; from nxpipe.artifact_store.url import open_offline; "
        "from nxpipe.artifact_store.fetch.selection import by_name; "
        "from nxpipe.artifact_store.fetch.folder import fetch; "
        f"store = open_offline('s3://b/p', Path({str(tier.root)!r})); "
        f"fetch(store.blobs, by_name(store, {wanted.request_key!r}).manifest, Path({str(tmp_path / 'served')!r})); "
        "print(sorted({'boto3', 'botocore', 'numpy', 'click', 'socketserver'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


# Opening


def test_a_folder_near_by_has_no_tier(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store", cache=tmp_path / "cache")
    assert store.read_blob(store.put_blob(b"some bytes")) == b"some bytes"
    assert not (tmp_path / "cache").exists()


def test_a_store_is_opened_with_its_mirrors(tmp_path: Path) -> None:
    mirror = folder(tmp_path / "mirror").store
    blob = mirror.put_blob(b"some bytes")
    heard: list[str] = []
    store = open_store(f"{tmp_path}/store", mirrors=[f"{tmp_path}/mirror"], notice=heard.append)
    assert store.read_blob(blob) == b"some bytes"
    assert f"file://{tmp_path}/mirror" in heard[0]
