"""One artifact carried by hand from store to store: complete, and verified again."""

import io
import json
import os
import re
import secrets
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.bundle import oci
from nxpipe.artifact_store.bundle.archive import Bundled, export_artifact
from nxpipe.artifact_store.bundle.oci import BLOB_TYPE, KEY_ID, BadBundle, Image, blob_name
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Conflict, Corrupt, NotFound, Refused, StoreError
from nxpipe.artifact_store.layout import blob_path, signature_folder
from nxpipe.artifact_store.trust.envelope import statement_of
from nxpipe.artifact_store.trust.keys import as_base64
from tests.artifact_store.samples import Folder, Place, folder, publish_verified, put, watched
from tests.conftest import ROOT
from tests.tiers import examples

KEY = "ab" * 32


def envelope(store: Store, published: Published) -> bytes:
    """A signature by a key that is unknown on this machine."""
    statement = statement_of(published.manifest, store.key_inputs(published.manifest), "nxpipe:local")
    return canonical_json(
        {
            "payload": as_base64(statement.to_bytes()),
            "payloadType": "application/vnd.in-toto+json",
            "signatures": [{"keyid": KEY, "sig": "AA=="}],
        }
    )


def signed(place: Place, data: bytes | None = None) -> Published:
    published = publish_verified(place.store, put(place.store))
    path = signature_folder(published.manifest_digest) + KEY
    place.store.backend.replace(path, Payload.of(data or envelope(place.store, published)))
    return published


@pytest.fixture
def other(tmp_path: Path) -> Folder:
    return folder(tmp_path / "other")


@pytest.fixture(params=["bundle.tar", "bundle"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / "out" / str(request.param)


# There and back


def test_an_artifact_arrives_as_it_left_with_its_signatures(place: Place, other: Folder, target: Path) -> None:
    published = signed(place)
    export_artifact(place.store, published, target)
    arrived = Bundled.read(target).publish(other.store)
    assert arrived.manifest_digest == published.manifest_digest
    assert arrived.manifest == published.manifest
    changed = {"published_at", "write_id"}
    assert arrived.record.model_dump(exclude=changed) == published.record.model_dump(exclude=changed)
    assert arrived.record.write_id != published.record.write_id
    ours, theirs = place.objects(), other.objects()
    assert {path: data for path, data in theirs.items() if not path.startswith("ac/")} == {
        path: data for path, data in ours.items() if not path.startswith("ac/")
    }


def test_a_bundle_is_taken_in_by_every_kind_of_store(place: Place, other: Folder, target: Path) -> None:
    published = signed(other)
    export_artifact(other.store, published, target)
    assert Bundled.read(target).publish(place.store).manifest == published.manifest


def test_equal_artifacts_make_equal_bundles(tmp_path: Path) -> None:
    bundles = []
    for name in ("one", "two"):
        place = folder(tmp_path / name)
        export_artifact(place.store, signed(place), tmp_path / f"{name}.tar")
        bundles.append((tmp_path / f"{name}.tar").read_bytes())
    assert bundles[0] == bundles[1]


def test_a_bundle_is_an_image_layout_that_any_tool_can_follow(other: Folder, tmp_path: Path) -> None:
    published = signed(other)
    export_artifact(other.store, published, tmp_path / "b.tar")
    with tarfile.open(tmp_path / "b.tar") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    export_artifact(other.store, published, tmp_path / "b")
    files = {path.relative_to(tmp_path / "b"): path for path in (tmp_path / "b").rglob("*") if path.is_file()}
    for name, path in files.items():
        assert (tmp_path / "unpacked" / name).read_bytes() == path.read_bytes()
        if name.parts[0] == "blobs":
            assert Blob.of(path.read_bytes()).sha256 == name.name
    assert json.loads((tmp_path / "b/oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    (described,) = json.loads((tmp_path / "b/index.json").read_text())["manifests"]
    image = json.loads((tmp_path / "b/blobs/sha256" / described["digest"].removeprefix("sha256:")).read_text())
    assert image["config"]["digest"] == f"sha256:{published.manifest_digest}"
    named = {entry["digest"].removeprefix("sha256:") for entry in (described, image["config"], *image["layers"])}
    assert named == {name.name for name in files if name.parts[0] == "blobs"}


def test_an_export_never_writes_over_anything(other: Folder, target: Path) -> None:
    published = signed(other)
    export_artifact(other.store, published, target)
    with pytest.raises(Refused, match="which exists"):
        export_artifact(other.store, published, target)


def test_an_export_that_fails_leaves_nothing(other: Folder, target: Path) -> None:
    published = signed(other)
    lost = published.manifest.weights[-1].blob
    other.write(blob_path(lost), b"damaged")
    with pytest.raises(Corrupt):
        export_artifact(other.store, published, target)
    assert list(target.parent.iterdir()) == []


# Repetition


def test_an_import_goes_on_where_the_last_one_ended(other: Folder, target: Path, tmp_path: Path) -> None:
    published = signed(other)
    export_artifact(other.store, published, target)
    there = folder(tmp_path / "there")
    half = published.manifest.blobs()[:2]
    for blob in half:
        there.store.put_blob(other.store.read_blob(blob))
    written: list[str] = []
    Bundled.read(target).publish(Store(watched(there.backend, lambda verb, path: written.append(f"{verb} {path}"))))
    copied = [path for path in written if path.startswith("create cas/")]
    assert not {f"create {blob_path(blob)}" for blob in half} & set(copied)
    before = there.objects()
    Bundled.read(target).publish(there.store)
    assert there.objects() == before


def test_a_signature_that_is_there_already_stays(other: Folder, target: Path, tmp_path: Path) -> None:
    published = signed(other)
    export_artifact(other.store, published, target)
    there = folder(tmp_path / "there")
    newer = envelope(other.store, published).replace(b"AA==", b"AAA=")
    signed(there, newer)
    Bundled.read(target).publish(there.store)
    assert there.objects()[signature_folder(published.manifest_digest) + KEY] == newer


def test_an_import_that_contradicts_the_store_is_a_conflict(other: Folder, target: Path, tmp_path: Path) -> None:
    export_artifact(other.store, signed(other), target)
    there = folder(tmp_path / "there")
    standing = there.store.publish(put(there.store, "b"))
    with pytest.raises(Conflict, match=r"2 of 2 weights \(layer\.0, layer\.1\)"):
        Bundled.read(target).publish(there.store)
    assert there.store.find(standing.request_key) == standing


# What is refused


def refused(where: Path, words: str, tmp_path: Path) -> None:
    there = folder(tmp_path / secrets.token_hex(4))
    with pytest.raises(BadBundle, match=words):
        Bundled.read(where).publish(there.store)
    assert there.objects() == {}


@pytest.fixture
def layout(other: Folder, tmp_path: Path) -> Path:
    export_artifact(other.store, signed(other), tmp_path / "layout")
    return tmp_path / "layout"


def packed(layout: Path, *more: tuple[tarfile.TarInfo, bytes]) -> Path:
    target = layout.with_suffix(".tar")
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(layout.rglob("*")):
            tar.add(path, path.relative_to(layout).as_posix(), recursive=False)
        for member, data in more:
            tar.addfile(member, io.BytesIO(data))
    return target


def member(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), link
    return info, data


def test_a_layout_that_another_tool_packed_is_taken(layout: Path, other: Folder, tmp_path: Path) -> None:
    assert Bundled.read(packed(layout)).manifest == other.store.list()[0].manifest


STRANGERS = {
    "traversal": member("../../etc/cron.d/x", data=b"x"),
    "absolute": member("/etc/passwd", data=b"x"),
    "another file": member("README", data=b"x"),
    "below a blob": member(f"blobs/sha256/{'0' * 64}/x", data=b"x"),
    "symbolic link": member(f"blobs/sha256/{'0' * 64}", tarfile.SYMTYPE, link="/etc/passwd"),
    "hard link": member(f"blobs/sha256/{'0' * 64}", tarfile.LNKTYPE, link="index.json"),
    "device": member(f"blobs/sha256/{'0' * 64}", tarfile.CHRTYPE),
    "pipe": member("oci-layout", tarfile.FIFOTYPE),
    "folder": member("blobs/../..", tarfile.DIRTYPE),
    "extended header": member("x", tarfile.XHDTYPE, b"30 path=../../etc/cron.d/xxxxx\n"),
    "long name": member("x", tarfile.GNUTYPE_LONGNAME, b"a" * 300),
    "twice": member("index.json", data=b"{}"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_tar_file_with_anything_else_in_it_is_refused(layout: Path, tmp_path: Path, stranger: str) -> None:
    refused(packed(layout, STRANGERS[stranger]), "not part of an image layout|twice", tmp_path)


def test_a_size_beyond_the_end_of_the_file_is_refused(layout: Path, tmp_path: Path) -> None:
    path = packed(layout)
    data = path.read_bytes()
    header = tarfile.TarInfo("oci-layout")
    for size in (len(data) * 2, 2**62):
        header.size = size
        path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + data)
        refused(path, "bytes by its header", tmp_path)


def test_a_tar_file_cut_anywhere_is_refused(layout: Path, tmp_path: Path) -> None:
    path = packed(layout)
    whole = path.read_bytes()
    for end in range(0, len(whole.rstrip(b"\0")), 700):
        path.write_bytes(whole[:end])
        refused(path, "cannot be imported", tmp_path)


def bend(layout: Path, how: str) -> None:
    """Replace a file of the layout by something else."""
    name = layout / ("blobs" if how == "a linked folder" else "index.json")
    name.rename(layout.parent / "aside")
    match how:
        case "a linked file" | "a linked folder":
            name.symlink_to(layout.parent / "aside")
        case "a pipe":
            os.mkfifo(name)
        case "a folder for a file":
            name.mkdir()


@pytest.mark.parametrize("how", ["a linked file", "a linked folder", "a pipe", "a folder for a file"])
def test_a_folder_with_links_in_it_is_refused(layout: Path, tmp_path: Path, how: str) -> None:
    bend(layout, how)
    refused(layout, "link, or not a file", tmp_path)


def rewritten(layout: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A changed image manifest under its correct digest."""
    index = json.loads((layout / "index.json").read_text())
    (described,) = index["manifests"]
    image = json.loads((layout / "blobs/sha256" / described["digest"].removeprefix("sha256:")).read_text())
    change(image)
    blob = Blob.of(json.dumps(image).encode())
    (layout / blob_name(blob)).write_text(json.dumps(image))
    described |= {"digest": f"sha256:{blob.sha256}", "size": blob.size}
    (layout / "index.json").write_text(json.dumps(index))


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "config of another kind": (
        lambda image: image["config"].update(mediaType="application/x-sh"),
        "unknown media type",
    ),
    "layer of another kind": (lambda image: image["layers"][0].update(mediaType="text/html"), "unknown media type"),
    "artifact of another kind": (lambda image: image.update(artifactType="application/x"), "artifactType"),
    "later schema": (lambda image: image.update(schemaVersion=3), "schemaVersion"),
    "layer left out": (lambda image: image["layers"].pop(0), "1 of the 7 blobs"),
    "layer too many": (lambda image: image["layers"].append(image["config"] | {"mediaType": BLOB_TYPE}), "1 layers"),
    "absurd size": (lambda image: image["config"].update(size=2**53), "size"),
    "size that is not so": (lambda image: image["config"].update(size=7), "its size of 7 bytes"),
    "digest that is a path": (lambda image: image["config"].update(digest="sha256:../../x"), "digest"),
    "signature of another key": (
        lambda image: image["layers"][-1]["annotations"].update({KEY_ID: "../x"}),
        "not of '../x'",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_image_of_another_shape_is_refused(layout: Path, tmp_path: Path, change: str) -> None:
    rewritten(layout, lambda image: None)
    assert Bundled.read(layout)
    rewritten(layout, CHANGES[change][0])
    refused(layout, CHANGES[change][1], tmp_path)


def test_a_bundle_without_one_of_its_blobs_is_refused_before_anything_is_written(layout: Path, tmp_path: Path) -> None:
    blob = Bundled.read(layout).manifest.weights[0].blob
    data = (layout / blob_name(blob)).read_bytes()
    (layout / blob_name(blob)).unlink()
    refused(layout, f"{blob.sha256} of {blob.size} bytes is missing", tmp_path)
    (layout / blob_name(blob)).write_bytes(data + b"x")
    refused(layout, f"has {blob.size + 1} bytes", tmp_path)


@pytest.mark.parametrize("name", ["oci-layout", "index.json"])
@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 4000, b" " * (5 * 1024**2)])
def test_a_broken_document_is_refused(layout: Path, tmp_path: Path, name: str, data: bytes) -> None:
    (layout / name).write_bytes(data)
    refused(layout, "cannot be imported", tmp_path)


def test_two_artifacts_in_one_layout_are_refused(layout: Path, tmp_path: Path) -> None:
    index = json.loads((layout / "index.json").read_text())
    index["manifests"] *= 2
    (layout / "index.json").write_text(json.dumps(index))
    refused(layout, "2 images", tmp_path)


def test_no_bundle_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nxpipe store export"):
        Bundled.read(tmp_path / "none.tar")


@settings(max_examples=examples(60))
@given(st.data())
def test_no_flipped_bit_of_a_bundle_is_ever_published(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("bits")
    place, there = folder(root / "s"), folder(root / "t")
    published = signed(place)
    export_artifact(place.store, published, root / "b.tar")
    flipped = bytearray((root / "b.tar").read_bytes())
    at = data.draw(st.integers(0, len(flipped) - 1))
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    (root / "b.tar").write_bytes(flipped)
    try:
        arrived = Bundled.read(root / "b.tar").publish(there.store)
    except StoreError:
        assert list(there.store.list()) == []
        return
    # What is neither content nor a name, such as padding, carries nothing.
    assert arrived.manifest == published.manifest
    for blob in arrived.manifest.blobs():
        assert there.store.read_blob(blob) == place.store.read_blob(blob)
    signature = signature_folder(published.manifest_digest) + KEY
    assert there.objects()[signature] == place.objects()[signature]


def test_the_page_names_what_a_bundle_holds() -> None:
    page = (ROOT / "docs" / "reference" / "store-format.md").read_text().split("## 17. Bundles")[1]
    named = {value for name, value in vars(oci).items() if name.isupper() and isinstance(value, str)}
    assert named - set(re.findall(r"`([^`]+)`", page)) == set()


@settings(max_examples=examples(200))
@given(st.binary(max_size=400))
def test_bytes_of_a_stranger_are_no_image(data: bytes) -> None:
    with pytest.raises(StoreError):
        Image.from_bytes(data)
