"""From a store to a bundle: equal artifacts with equal evidence and signatures make equal bytes."""

import secrets
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from nxpipe.artifact_store.backends.files import Scratch, flush_to_disk, os_errors, scratch
from nxpipe.artifact_store.backends.protocol import Sent, nobody
from nxpipe.artifact_store.bundle.oci import INDEX_FILE, LAYOUT_FILE, Image, blob_name, index_bytes, layout_bytes
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, Refused
from nxpipe.artifact_store.names import SHOWN
from nxpipe.artifact_store.record import Published
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.trust.signatures import Signatures

TAR: Final = ".tar"


class _Sink(Protocol):
    def add(self, name: str, size: int, chunks: Iterable[bytes]) -> None: ...


def export_artifact(store: Store, published: Published, target: Path, sent: Sent = nobody) -> Image:
    """Write an artifact, with its evidence and signatures, to a tar file (by its name's end) or a folder, whole."""
    if target.exists():
        raise Refused(f"{target} is in the way of the export; remove it, or name another file or folder")
    manifest = published.manifest
    signatures = dict(_signatures(store, published.manifest_digest))
    evidence = store.evidence(published.manifest_digest)
    found_out = [each.to_bytes() for each in evidence]
    vouched = {(each.digest, key): data for each in evidence for key, data in _signatures(store, each.digest)}
    blobs = tuple(dict.fromkeys([*manifest.blobs(), *(blob for each in evidence for blob in each.blobs())]))
    image = Image(
        published.record.manifest,
        blobs,
        [Blob.of(data) for data in found_out],
        {key_id: Blob.of(data) for key_id, data in signatures.items()},
        {signed: Blob.of(data) for signed, data in vouched.items()},
    )
    image_data = image.to_bytes()
    index = index_bytes(Blob.of(image_data), published.request_key[:SHOWN])
    # A file of the model may happen to be one of these: an image holds each blob once.
    every = (image_data, manifest.to_bytes(), *found_out, *vouched.values(), *signatures.values())
    documents = {blob_name(Blob.of(data)): data for data in every}
    with _tar(target) if target.suffix == TAR else _folder(target) as sink:
        for name, data in {LAYOUT_FILE: layout_bytes(), INDEX_FILE: index, **documents}.items():
            sink.add(name, len(data), [data])
        for blob in sorted(blobs, key=lambda blob: blob.sha256):
            if blob_name(blob) not in documents:
                sink.add(blob_name(blob), blob.size, store.blobs.chunks(blob, sent))
    return image


def _signatures(store: Store, manifest_digest: str) -> Iterator[tuple[str, bytes]]:
    """One that is damaged stays behind: no import would take it, and `fsck` tells of it."""
    signatures = Signatures(store)
    for key_id in signatures.key_ids(manifest_digest):
        with suppress(Corrupt):
            data = signatures.well_formed(manifest_digest, key_id)
            if data is not None:
                yield key_id, data


class _Tar:
    def __init__(self, file: Scratch) -> None:
        self._file = file

    def add(self, name: str, size: int, chunks: Iterable[bytes]) -> None:
        header = tarfile.TarInfo(name)
        header.size = size
        self._file.write(header.tobuf(tarfile.GNU_FORMAT))
        for chunk in chunks:
            self._file.write(chunk)
        self._file.write(bytes(-size % tarfile.BLOCKSIZE))


@contextmanager
def _tar(target: Path) -> Iterator[_Sink]:
    with scratch(target.parent) as file:
        yield _Tar(file)
        file.write(bytes(2 * tarfile.BLOCKSIZE))
        file.finish()
        with os_errors(f"write {target}"):
            flush_to_disk(file.path)
            file.path.replace(target)


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def add(self, name: str, size: int, chunks: Iterable[bytes]) -> None:
        path = self._root / name
        with os_errors(f"write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                for chunk in chunks:
                    file.write(chunk)
            flush_to_disk(path)


@contextmanager
def _folder(target: Path) -> Iterator[_Sink]:
    unfinished = target.parent / f".{secrets.token_hex(8)}.part"
    try:
        yield _Folder(unfinished)
        with os_errors(f"write {target}"):
            unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
