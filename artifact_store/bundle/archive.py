"""Export of an artifact to a bundle, reproducible byte for byte, and import, which verifies before it writes."""

import secrets
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, Protocol, TypeAlias

from nxpipe.artifact_store.backends.files import Scratch, flush_to_disk, os_errors, scratch
from nxpipe.artifact_store.backends.protocol import Payload, Sent, ignore_progress
from nxpipe.artifact_store.blobs import checked, read_at_most
from nxpipe.artifact_store.bundle.oci import (
    INDEX_FILE,
    LAYOUT_FILE,
    MAX_IMAGE_BYTES,
    MAX_INDEX_BYTES,
    MAX_LAYOUT_BYTES,
    BadBundle,
    Bundle,
    Image,
    Index,
    OciLayoutFile,
    blob_name,
    index_bytes,
    layout_bytes,
    open_bundle,
    parse_foreign,
)
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument, Refused
from nxpipe.artifact_store.evidence import MAX_EVIDENCE_BYTES, Evidence
from nxpipe.artifact_store.layout import signature_folder
from nxpipe.artifact_store.manifest import MAX_MANIFEST_BYTES, Manifest
from nxpipe.artifact_store.names import SHOWN
from nxpipe.artifact_store.records import Published
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.trust.envelope import MAX_SIGNATURE_BYTES, Envelope
from nxpipe.artifact_store.trust.keys import PublicKey
from nxpipe.artifact_store.trust.signatures import Signatures

TAR: Final = ".tar"


class _Sink(Protocol):
    def add(self, name: str, size: int, chunks: Iterable[bytes]) -> None: ...


def export_artifact(store: Store, published: Published, target: Path, sent: Sent = ignore_progress) -> Image:
    """Write an artifact with evidence and signatures to a new tar file (if named `.tar`) or folder, atomically."""
    if target.exists():
        raise Refused(f"cannot export to {target}, which exists; remove it, or name another file or folder")
    manifest = published.manifest
    signatures = dict(_signatures(store, published.manifest_digest))
    evidence = store.evidence(published.manifest_digest)
    evidence_data = [document.to_bytes() for document in evidence]
    evidence_signatures = {
        (document.digest, key): data for document in evidence for key, data in _signatures(store, document.digest)
    }
    blobs = _named(manifest, evidence)
    image = Image(
        published.record.manifest,
        blobs,
        [Blob.of(data) for data in evidence_data],
        {key_id: Blob.of(data) for key_id, data in signatures.items()},
        {signed: Blob.of(data) for signed, data in evidence_signatures.items()},
    )
    image_data = image.to_bytes()
    index = index_bytes(Blob.of(image_data), published.request_key[:SHOWN])
    # A file of the model may have the content of one of these documents: an image holds each blob once.
    datas = (image_data, manifest.to_bytes(), *evidence_data, *evidence_signatures.values(), *signatures.values())
    documents = {blob_name(Blob.of(data)): data for data in datas}
    with _tar(target) if target.suffix == TAR else _folder(target) as sink:
        for name, data in {LAYOUT_FILE: layout_bytes(), INDEX_FILE: index, **documents}.items():
            sink.add(name, len(data), [data])
        for blob in sorted(blobs, key=lambda blob: blob.sha256):
            if blob_name(blob) not in documents:
                sink.add(blob_name(blob), blob.size, store.blobs.chunks(blob, sent))
    return image


def _signatures(store: Store, manifest_digest: str) -> Iterator[tuple[str, bytes]]:
    """Signatures by key id. A damaged one is left out: imports refuse it, and `fsck` reports it."""
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


_COPY_AGAIN: Final = "copy the bundle again"
_Known: TypeAlias = Mapping[str, PublicKey]  # by key id


@dataclass(frozen=True)
class Bundled:
    """An artifact in a bundle, with verified documents and every blob present in its size."""

    bundle: Bundle
    manifest: Manifest
    evidence: tuple[Evidence, ...]
    signatures: Mapping[str, bytes]  # by key id
    evidence_signatures: Mapping[tuple[str, str], bytes]  # by digest of the evidence and key id

    @classmethod
    def read(cls, where: Path, known: Iterable[PublicKey] = ()) -> "Bundled":
        return cls.of(open_bundle(where), known)

    @classmethod
    def of(cls, bundle: Bundle, known: Iterable[PublicKey] = ()) -> "Bundled":
        """Read a bundle. Signatures by `known` keys are verified."""
        try:
            image = _image(bundle)
            manifest = Manifest.from_bytes(_document(bundle, image.manifest, MAX_MANIFEST_BYTES))
            evidence = _evidence(bundle, image)
            _require_blobs(bundle, image, _named(manifest, evidence))
            keys = {key.key_id: key for key in known}
            signatures = _load_signatures(bundle, image, manifest, keys)
            evidence_signatures = _evidence_signatures(bundle, image, evidence, keys)
            return cls(bundle, manifest, evidence, signatures, evidence_signatures)
        except BadBundle:
            raise
        except InvalidDocument as fault:
            raise BadBundle(bundle.where, str(fault)) from fault

    @property
    def size_bytes(self) -> int:
        return sum(blob.size for blob in _named(self.manifest, self.evidence))

    def publish(self, store: Store, sent: Sent = ignore_progress) -> Published:
        """Copy the artifact into a store and publish it. A repetition resumes: existing blobs are not copied again."""
        lock = Lock()

        def copy(blob: Blob) -> None:
            if not store.blobs.is_intact(blob):
                name = blob_name(blob)
                where = f"{self.bundle.where}: {name}"
                store.blobs.put_stream(checked(self.bundle.chunks(name), blob, where, _COPY_AGAIN))
            with lock:
                sent(blob.size)

        for _ in store.backend.each(copy, _named(self.manifest, self.evidence)):
            pass
        for evidence in self.evidence:
            store.attest(evidence)
        self._keep_signatures(store)
        return store.publish(self.manifest)

    def _keep_signatures(self, store: Store) -> None:
        """Store signatures before the record, so that no reader sees it unsigned. An existing signature is kept."""
        folder = signature_folder(Blob.of(self.manifest.to_bytes()).sha256)
        for key_id, data in self.signatures.items():
            store.backend.create(folder + key_id, Payload.of(data), durable=True)
        for (evidence, key_id), data in self.evidence_signatures.items():
            store.backend.create(signature_folder(evidence) + key_id, Payload.of(data), durable=True)


def _image(bundle: Bundle) -> Image:
    parse_foreign(OciLayoutFile, _file(bundle, LAYOUT_FILE, MAX_LAYOUT_BYTES))
    index = parse_foreign(Index, _file(bundle, INDEX_FILE, MAX_INDEX_BYTES))
    if len(index.manifests) != 1:
        raise InvalidDocument(f"its index names {len(index.manifests)} images instead of one")
    return Image.from_bytes(_document(bundle, index.manifests[0].blob, MAX_IMAGE_BYTES))


def _load_signatures(bundle: Bundle, image: Image, manifest: Manifest, known: _Known) -> dict[str, bytes]:
    """The signatures of the manifest, by key id."""
    digest = Blob.of(manifest.to_bytes()).sha256
    return {key_id: _signature(bundle, blob, key_id, digest, known) for key_id, blob in image.signatures.items()}


def _signature(bundle: Bundle, blob: Blob, key_id: str, digest: str, known: _Known) -> bytes:
    """An envelope of this key over this digest. The signature is verified if the key is known."""
    data = _document(bundle, blob, MAX_SIGNATURE_BYTES)
    try:
        envelope = Envelope.from_bytes(data)
        if envelope.key_id != key_id:
            raise InvalidDocument(f"it is of key {envelope.key_id}, not of {key_id[:80]!r}")
        envelope.require_subject(digest)
        if key_id in known:
            envelope.statement(known[key_id], digest)
    except InvalidDocument as fault:
        raise InvalidDocument(f"signature {blob.sha256} is not of this artifact: {fault}") from fault
    return data


def _evidence(bundle: Bundle, image: Image) -> tuple[Evidence, ...]:
    """The evidence of this manifest; its signatures are verified when the artifact is promoted."""
    evidence = tuple(Evidence.from_bytes(_document(bundle, blob, MAX_EVIDENCE_BYTES)) for blob in image.evidence)
    for document in evidence:
        if document.manifest != image.manifest.sha256:
            raise InvalidDocument(f"evidence {document.digest} is of manifest {document.manifest}, not of its own")
    return evidence


def _evidence_signatures(
    bundle: Bundle, image: Image, evidence: Sequence[Evidence], known: _Known
) -> dict[tuple[str, str], bytes]:
    """The signatures of the bundle's evidence, by digest of the evidence and key id."""
    unknown = sorted({digest for digest, _ in image.evidence_signatures} - {document.digest for document in evidence})
    if unknown:
        raise InvalidDocument(f"it holds a signature of evidence {unknown[0][:80]!r}, which it does not include")
    return {
        (digest, key_id): _signature(bundle, blob, key_id, digest, known)
        for (digest, key_id), blob in image.evidence_signatures.items()
    }


def _named(manifest: Manifest, evidence: Sequence[Evidence]) -> tuple[Blob, ...]:
    return tuple(dict.fromkeys([*manifest.blobs(), *(blob for document in evidence for blob in document.blobs())]))


def _require_blobs(bundle: Bundle, image: Image, blobs: Sequence[Blob]) -> None:
    named, layers = set(blobs), set(image.blobs)
    if named != layers:
        raise InvalidDocument(
            f"{len(named - layers)} of the {len(named)} blobs that its documents name are not layers of its image, and "
            f"{len(layers - named)} layers are not named by its documents"
        )
    for blob in blobs:
        size = bundle.size(blob_name(blob))
        if size != blob.size:
            fault = "is missing" if size is None else f"has {size} bytes"
            raise InvalidDocument(f"blob {blob.sha256} of {blob.size} bytes {fault}")


def _document(bundle: Bundle, blob: Blob, limit: int) -> bytes:
    data = _file(bundle, blob_name(blob), limit)
    if Blob.of(data) != blob:
        raise InvalidDocument(f"{blob_name(blob)} does not match its digest or its size of {blob.size} bytes")
    return data


def _file(bundle: Bundle, name: str, limit: int) -> bytes:
    size = bundle.size(name)
    if size is None or size > limit:
        fault = "is missing" if size is None else f"has {size} bytes, and at most {limit} are allowed"
        raise InvalidDocument(f"{name} {fault}")
    return read_at_most(limit, bundle.chunks(name))
