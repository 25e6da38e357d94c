"""Bundles with one forged document and the correct digests that lead to it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.bundle.archive import Bundled, export_artifact
from nxpipe.artifact_store.bundle.oci import INDEX_FILE, LAYOUT_FILE, Image, blob_name, index_bytes
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.layout import signature_folder
from nxpipe.artifact_store.records import Published

KEY = "ab" * 32
Read = Callable[[bytes], object]


@dataclass
class InMemory:
    """The files of an image layout, in memory."""

    files: Mapping[str, bytes]
    where: Path = Path("bundle")

    def size(self, name: str) -> int | None:
        return len(self.files[name]) if name in self.files else None

    def chunks(self, name: str) -> Iterator[bytes]:
        yield self.files[name]


def readers(store: Store, published: Published) -> dict[str, tuple[Read, bytes]]:
    """For each document of a bundle, its reader and an example."""
    signature = {"keyid": KEY, "sig": "AA=="}
    envelope = {"payload": "e30=", "payloadType": "application/vnd.in-toto+json", "signatures": [signature]}
    store.backend.replace(signature_folder(published.manifest_digest) + KEY, Payload.of(canonical_json(envelope)))
    with TemporaryDirectory() as folder:
        root, tar = Path(folder) / "bundle", Path(folder) / "bundle.tar"
        image = export_artifact(store, published, root)
        export_artifact(store, published, tar)
        files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        packed = tar.read_bytes()

    def with_file(name: str) -> Read:
        return lambda data: Bundled.of(InMemory({**files, name: data}))

    def of_image(data: bytes, more: Mapping[str, bytes] = files) -> Bundled:
        document = Blob.of(data)
        return Bundled.of(InMemory({**more, INDEX_FILE: index_bytes(document, "latest"), blob_name(document): data}))

    def of_config(data: bytes) -> Bundled:
        config = Blob.of(data)
        around = Image(config, image.blobs, image.evidence, image.signatures)
        return of_image(around.to_bytes(), {**files, blob_name(config): data})

    return {
        "OCI layout": (with_file(LAYOUT_FILE), files[LAYOUT_FILE]),
        "OCI index": (with_file(INDEX_FILE), files[INDEX_FILE]),
        "OCI image": (of_image, image.to_bytes()),
        "OCI config": (of_config, published.manifest.to_bytes()),
        "OCI tar": (of_tar, packed),
    }


def of_tar(data: bytes) -> Bundled:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "bundle.tar"
        path.write_bytes(data)
        return Bundled.read(path)
