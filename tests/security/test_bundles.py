"""Untrusted bundles: an import refuses them in one sentence, and leaves nothing but blobs."""

import gzip
import io
import json
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.bundle.archive import export_artifact
from nxpipe.artifact_store.bundle.oci import BLOB_TYPE, KEY_ID, SIGNATURE_TYPE
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.layout import signature_folder
from nxpipe.artifact_store.trust.envelope import PAYLOAD_TYPE, Envelope
from nxpipe.pipeline.util import exit_codes
from tests.artifact_store.samples import Folder, folder
from tests.pipeline.in_process import InProcess, nxpipe
from tests.security.signing_world import CHANNEL, RULES, WAYS, World, copied, make, trusted

__all__ = ["nxpipe"]

GOOD: Final = 0
BAD: Final = exit_codes.STORE.number
ROT: Final = exit_codes.CORRUPT.number
BLOBS: Final = "blobs/sha256/"
BLOB: Final = BLOBS + "a" * 64

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make(tmp_path_factory.mktemp("bundles") / "world", next(iter(RULES)), time.time())


@pytest.fixture
def world(whole: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    one = copied(whole, tmp_path / "project")
    monkeypatch.chdir(one.root)
    return one


@pytest.fixture
def layout(world: World, tmp_path: Path) -> Path:
    """A valid bundle as a folder."""
    export_artifact(world.store, world.artifact("b"), tmp_path / "layout")
    return tmp_path / "layout"


@pytest.fixture
def there(tmp_path: Path) -> Folder:
    return folder(tmp_path / "there")


def files_of(layout: Path) -> Files:
    return {path.relative_to(layout).as_posix(): path.read_bytes() for path in layout.rglob("*") if path.is_file()}


def packed(files: Files, *more: tuple[tarfile.TarInfo, bytes]) -> bytes:
    made = b""
    for name, data in files.items():
        header = tarfile.TarInfo(name)
        header.size = len(data)
        made += header.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)
    for header, data in more:
        made += header.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)
    return made + bytes(1024)


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, target, size
    return made


def with_member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> Callable[[Files], bytes]:
    return lambda files: packed(files, (member(name, kind, target), b""))


def _pax(files: Files) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        header = tarfile.TarInfo("oci-layout")
        header.pax_headers = {"comment": "x" * 200}
        header.size = len(files["oci-layout"])
        tar.addfile(header, io.BytesIO(files["oci-layout"]))
    return file.getvalue()


def _long_name(files: Files) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("x" * 300))
    return file.getvalue()


def _index_twice(files: Files) -> bytes:
    return packed(files, (member("index.json", size=2), b"{}"))


def _claims(size: int) -> Callable[[Files], bytes]:
    def made(files: Files) -> bytes:
        header = member(BLOB)
        header.size = size
        return packed(files)[:-1024] + header.tobuf(tarfile.GNU_FORMAT) + bytes(1024)

    return made


def _truncated(files: Files) -> bytes:
    return packed(files)[:-2000]


def _many(files: Files) -> bytes:
    header = bytearray(member(BLOB).tobuf(tarfile.GNU_FORMAT))
    made = bytearray()
    for number in range(500_005):
        # Only the name and the sum over all bytes differ.
        name = f"{BLOBS}{number:064x}".encode()
        header[: len(name)] = name
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        made += header
    return packed(files)[:-1024] + bytes(made) + bytes(1024)


def _blob(files: Files) -> str:
    """The largest blob, which is not a document."""
    return max((name for name in files if name.startswith(BLOBS)), key=lambda name: (files[name][:1] == b"p", name))


def _flipped(files: Files) -> bytes:
    name = _blob(files)
    data = bytearray(files[name])
    data[0] ^= 1
    return packed(files | {name: bytes(data)})


def _without(files: Files) -> bytes:
    return packed({name: data for name, data in files.items() if name != _blob(files)})


def _nested_index(files: Files) -> bytes:
    return packed(files | {"index.json": b"[" * 200_000})


def _two_images(files: Files) -> bytes:
    index = json.loads(files["index.json"])
    index["manifests"] *= 2
    return packed(files | {"index.json": json.dumps(index).encode()})


def with_image(change: Callable[[dict[str, Any], Files], None]) -> Callable[[Files], bytes]:
    """The image manifest changed, and the index to match."""

    def made(files: Files) -> bytes:
        files = dict(files)
        index = json.loads(files["index.json"])
        image = json.loads(files[BLOBS + index["manifests"][0]["digest"].removeprefix("sha256:")])
        change(image, files)
        data = json.dumps(image).encode()
        files[BLOBS + sha256_hex(data)] = data
        index["manifests"][0] |= {"digest": f"sha256:{sha256_hex(data)}", "size": len(data)}
        return packed(files | {"index.json": json.dumps(index).encode()})

    return made


def signature(key_id: str, data: bytes) -> Callable[[Files], bytes]:
    """One more layer, with a signature under this key's id."""

    def change(image: dict[str, Any], files: Files) -> None:
        files[BLOBS + sha256_hex(data)] = data
        described = {"mediaType": SIGNATURE_TYPE, "digest": f"sha256:{sha256_hex(data)}", "size": len(data)}
        image["layers"].append(described | {"annotations": {KEY_ID: key_id}})

    return with_image(change)


def _shaped(key_id: str, payload: str = "e30=") -> bytes:
    signatures = [{"keyid": key_id, "sig": "AA=="}]
    return canonical_json({"payload": payload, "payloadType": PAYLOAD_TYPE, "signatures": signatures})


TARS: Final[list[tuple[str, Callable[[Files], bytes], int, str]]] = [
    ("B400", packed, GOOD, ""),
    ("B401", with_member("../../PWN1"), BAD, "it holds '../../PWN1' of tar type"),
    ("B402", with_member("/tmp/PWN2"), BAD, "it holds '/tmp/PWN2' of tar type"),
    ("B403", with_member("blobs/sha256", tarfile.SYMTYPE, "/etc"), BAD, "of tar type b'2'"),
    ("B404", with_member(BLOB, tarfile.SYMTYPE, "/etc/shadow"), BAD, "of tar type b'2'"),
    ("B405", with_member(BLOB, tarfile.LNKTYPE, "/etc/shadow"), BAD, "of tar type b'1'"),
    ("B406", with_member(BLOB, tarfile.CHRTYPE), BAD, "of tar type b'3'"),
    ("B407", with_member(BLOB, tarfile.FIFOTYPE), BAD, "of tar type b'6'"),
    ("B408", _pax, BAD, "of tar type b'x'"),
    ("B409", _long_name, BAD, "of tar type b'L'"),
    ("B410", _index_twice, BAD, "it holds index.json twice"),
    ("B411", _claims(2**62), BAD, "has 4611686018427387904 bytes by its header"),
    ("B412", _claims(-1), BAD, "has -1 bytes by its header"),
    ("B413", _truncated, BAD, "bytes by its header, but only"),
    ("B417", _flipped, ROT, "is corrupt"),
    ("B418", _without, BAD, "bytes is missing"),
    ("B419", _nested_index, BAD, "recursion limit exceeded"),
    ("B420", _two_images, BAD, "its index names 2 images"),
    ("B421", signature("../../../PWNsig", b"{}"), BAD, "is not of this artifact"),
    ("B421", signature("../../../PWNsig", _shaped("ab" * 32)), BAD, "not of '../../../PWNsig'"),
    ("B422", signature("ab" * 32, _shaped("ab" * 32)), BAD, "is not of this artifact"),
]


@pytest.mark.parametrize(
    ("made", "code", "said"),
    [pytest.param(*row[1:], marks=pytest.mark.attempt(row[0]), id=f"{row[0]}-{at}") for at, row in enumerate(TARS)],
)
def test_a_tar_is_taken_whole_or_refused(
    layout: Path,
    there: Folder,
    tmp_path: Path,
    nxpipe: InProcess,
    made: Callable[[Files], bytes],
    code: int,
    said: str,
) -> None:
    bundle = tmp_path / "stranger" / "b.tar"
    bundle.parent.mkdir()
    bundle.write_bytes(made(files_of(layout)))
    answer = imported(nxpipe, bundle, there)
    assert answer == code
    if code:
        assert said in nxpipe("store", "import", str(bundle), "--store", str(there.root)).err
        assert published(there) == []
    assert not list(tmp_path.rglob("PWN*"))


def imported(nxpipe: InProcess, bundle: Path, there: Folder) -> int:
    """The result of an import, which must be one sentence."""
    answer = nxpipe("store", "import", str(bundle), "--store", str(there.root))
    assert answer.err.count("\n") <= 1
    return answer.code


def published(there: Folder) -> list[str]:
    return [entry.name for entry in Store(there.backend).list()]


@pytest.mark.slow
@pytest.mark.attempt("B414")
def test_a_tar_of_half_a_million_members_is_refused(
    layout: Path, there: Folder, tmp_path: Path, nxpipe: InProcess
) -> None:
    bundle = tmp_path / "many.tar"
    bundle.write_bytes(_many(files_of(layout)))
    assert imported(nxpipe, bundle, there) == BAD


@pytest.mark.attempt("B415", "B416")
@pytest.mark.parametrize("name", ["index.json", None])
def test_a_terabyte_that_is_not_there_is_not_read(
    there: Folder, tmp_path: Path, nxpipe: InProcess, name: str | None
) -> None:
    bundle = tmp_path / "sparse.tar"
    with bundle.open("wb") as file:
        if name:
            file.write(member(name, size=2**40).tobuf(tarfile.GNU_FORMAT))
        file.truncate(2**40 + 1024)
    assert imported(nxpipe, bundle, there) == BAD
    assert published(there) == []


def _link_out(layout: Path) -> None:
    name = _blob(files_of(layout))
    (layout / name).rename(layout.parent / "outside")
    (layout / name).symlink_to(layout.parent / "outside")


def _linked_folder(layout: Path) -> None:
    (layout / "blobs").rename(layout.parent / "outside")
    (layout / "blobs").symlink_to(layout.parent / "outside")


def _pipe(name: Callable[[Files], str]) -> Callable[[Path], None]:
    def change(layout: Path) -> None:
        path = layout / name(files_of(layout))
        path.unlink()
        os.mkfifo(path)

    return change


FOLDERS: Final[list[tuple[str, Callable[[Path], None]]]] = [
    ("B423", _link_out),
    ("B424", _linked_folder),
    ("B425", _pipe(_blob)),
    ("B426", _pipe(lambda _: "index.json")),
]


@pytest.mark.parametrize(
    "change", [pytest.param(change, marks=pytest.mark.attempt(key), id=key) for key, change in FOLDERS]
)
def test_a_folder_holds_files_and_no_links(
    layout: Path, there: Folder, nxpipe: InProcess, change: Callable[[Path], None]
) -> None:
    change(layout)
    answer = nxpipe("store", "import", str(layout), "--store", str(there.root))
    assert (answer.code, published(there)) == (BAD, [])
    assert "is a link, or not a file" in answer.err


@pytest.mark.attempt("B427", "B428")
@pytest.mark.parametrize("device", ["fifo", "/dev/zero"])
def test_what_is_neither_file_nor_folder_is_not_opened(
    there: Folder, tmp_path: Path, nxpipe: InProcess, device: str
) -> None:
    path = tmp_path / device  # an absolute name stays what it is
    if not path.exists():
        os.mkfifo(path)
    answer = nxpipe("store", "import", str(path), "--store", str(there.root))
    assert answer.code == BAD
    assert "it is neither a folder nor a file" in answer.err


@pytest.mark.attempt("B429")
def test_a_compressed_tar_is_not_unpacked(layout: Path, there: Folder, tmp_path: Path, nxpipe: InProcess) -> None:
    bundle = tmp_path / "g.tar.gz"
    bundle.write_bytes(gzip.compress(packed(files_of(layout))))
    answer = nxpipe("store", "import", str(bundle), "--store", str(there.root))
    assert answer.code == BAD
    assert "it is not a tar file" in answer.err


# Signatures that a bundle brings


@pytest.mark.attempt("B430")
def test_an_import_cannot_take_a_served_artifact_down(
    world: World, layout: Path, tmp_path: Path, nxpipe: InProcess
) -> None:
    """Nothing is new in it but nonsense for a trusted key that has not signed."""
    world.config_path.write_text(world.config_path.read_text() + trusted("stranger"))
    key_id = world.key("stranger").public.key_id
    bundle = tmp_path / "evil.tar"
    bundle.write_bytes(signature(key_id, _shaped(key_id))(files_of(layout)))
    answer = nxpipe("store", "import", str(bundle))
    assert answer.code == BAD
    assert not (world.root / "store" / world.signature("b", "stranger")).exists()
    assert nxpipe("store", "fetch", "--channel", CHANNEL, "--to", "out").code == GOOD


def test_a_trusted_keys_signature_must_be_good_and_a_strangers_must_be_of_this_artifact(
    world: World, layout: Path, there: Folder, tmp_path: Path, nxpipe: InProcess
) -> None:
    """A forged one names the right manifest, so that only its key can tell."""
    world.config_path.write_text(world.config_path.read_text() + trusted("stranger"))
    good = Envelope.from_bytes((world.root / "store" / world.signature("b", "good")).read_bytes())
    bundle = tmp_path / "evil.tar"
    for name, code in (("stranger", BAD), ("old", BAD), ("nobody", GOOD)):
        key_id = "ab" * 32 if name == "nobody" else world.key(name).public.key_id
        bundle.write_bytes(signature(key_id, _shaped(key_id, good.payload))(files_of(layout)))
        assert imported(nxpipe, bundle, there) == code, name
    other = Envelope.from_bytes((world.root / "store" / world.signature("a", "good")).read_bytes())
    bundle.write_bytes(signature("cd" * 32, _shaped("cd" * 32, other.payload))(files_of(layout)))
    answer = nxpipe("store", "import", str(bundle), "--store", str(there.root))
    assert answer.code == BAD
    assert "it is a signature of manifest" in answer.err


def test_a_damaged_signature_is_not_exported(world: World, tmp_path: Path, there: Folder, nxpipe: InProcess) -> None:
    world.write(world.signature("b", "second"), b"garbage")
    name = world.artifact("b").name
    assert nxpipe("store", "export", name, "--to", str(tmp_path / "b.tar")).code == GOOD
    assert imported(nxpipe, tmp_path / "b.tar", there) == GOOD
    folder_of = signature_folder(world.artifact("b").manifest_digest)
    assert {path.removeprefix(folder_of) for path in there.backend.paths(folder_of)} == {
        world.key("good").public.key_id
    }


def test_an_imported_artifact_is_served_by_its_own_signatures(world: World, layout: Path, nxpipe: InProcess) -> None:
    assert nxpipe("store", "import", str(layout)).code == GOOD
    assert WAYS["agent run"](world) == world.artifact("b").manifest_digest


def test_the_blob_layers_of_a_bundle_are_those_of_its_manifest(
    layout: Path, there: Folder, tmp_path: Path, nxpipe: InProcess
) -> None:
    def change(image: dict[str, Any], files: Files) -> None:
        files[BLOBS + sha256_hex(b"more")] = b"more"
        image["layers"].append({"mediaType": BLOB_TYPE, "digest": f"sha256:{sha256_hex(b'more')}", "size": 4})

    (tmp_path / "more.tar").write_bytes(with_image(change)(files_of(layout)))
    assert imported(nxpipe, tmp_path / "more.tar", there) == BAD
