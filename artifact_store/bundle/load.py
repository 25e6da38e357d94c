"""From a bundle into a store: nothing is believed, all of it is looked for before anything is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from artifact_store.backends.protocol import Payload, Sent, nobody
from artifact_store.bundle.oci import (
    INDEX_FILE,
    LAYOUT_FILE,
    MAX_IMAGE_BYTES,
    MAX_INDEX_BYTES,
    MAX_LAYOUT_BYTES,
    Image,
    Index,
    Layout,
    blob_name,
    parse_foreign,
)
from artifact_store.bundle.opened import BadBundle, Bundle, open_bundle
from artifact_store.documents import Blob
from artifact_store.errors import InvalidDocument
from artifact_store.evidence import MAX_EVIDENCE_BYTES, Evidence
from artifact_store.layout import signature_folder
from artifact_store.manifest import MAX_MANIFEST_BYTES, Manifest
from artifact_store.record import Published
from artifact_store.store import Store
from artifact_store.trust.envelope import MAX_SIGNATURE_BYTES, Envelope
from artifact_store.verified import checked, read_at_most

_CARRY_AGAIN: Final = "carry the bundle over again"


@dataclass(frozen=True)
class Bundled:
    """An artifact in a bundle whose documents are proved, and whose blobs are all there with their sizes."""

    bundle: Bundle
    manifest: Manifest
    evidence: tuple[Evidence, ...]
    signatures: Mapping[str, bytes]  # by key id
    vouched: Mapping[tuple[str, str], bytes]  # signatures of evidence, by its digest and key id

    @classmethod
    def read(cls, where: Path) -> "Bundled":
        return cls.of(open_bundle(where))

    @classmethod
    def of(cls, bundle: Bundle) -> "Bundled":
        try:
            image = _image(bundle)
            manifest = Manifest.from_bytes(_document(bundle, image.manifest, MAX_MANIFEST_BYTES))
            evidence = _evidence(bundle, image)
            _insist_on_blobs(bundle, image, _named(manifest, evidence))
            return cls(bundle, manifest, evidence, _signatures(bundle, image), _vouched(bundle, image, evidence))
        except BadBundle:
            raise
        except InvalidDocument as fault:
            raise BadBundle(bundle.where, str(fault)) from fault

    @property
    def size_bytes(self) -> int:
        return sum(blob.size for blob in _named(self.manifest, self.evidence))

    def publish(self, store: Store, sent: Sent = nobody) -> Published:
        """A repetition goes on where the last attempt ended: blobs that are there are not copied again."""
        one_at_a_time = Lock()

        def take(blob: Blob) -> None:
            if not store.blobs.is_intact(blob):
                name = blob_name(blob)
                where = f"{self.bundle.where}: {name}"
                store.blobs.put_stream(checked(self.bundle.chunks(name), blob, where, _CARRY_AGAIN))
            with one_at_a_time:
                sent(blob.size)

        for _ in store.backend.each(take, _named(self.manifest, self.evidence)):
            pass
        for evidence in self.evidence:
            store.attest(evidence)
        self._keep_signatures(store)
        return store.publish(self.manifest)

    def _keep_signatures(self, store: Store) -> None:
        """Before the record: whoever sees the artifact sees it signed. One that is there may be newer, and stays."""
        folder = signature_folder(Blob.of(self.manifest.to_bytes()).sha256)
        for key_id, data in self.signatures.items():
            store.backend.create(folder + key_id, Payload.of(data), durable=True)
        for (evidence, key_id), data in self.vouched.items():
            store.backend.create(signature_folder(evidence) + key_id, Payload.of(data), durable=True)


def _image(bundle: Bundle) -> Image:
    parse_foreign(Layout, _file(bundle, LAYOUT_FILE, MAX_LAYOUT_BYTES))
    index = parse_foreign(Index, _file(bundle, INDEX_FILE, MAX_INDEX_BYTES))
    if len(index.manifests) != 1:
        raise InvalidDocument(f"its index names {len(index.manifests)} images, and one artifact is one image")
    return Image.from_bytes(_document(bundle, index.manifests[0].blob, MAX_IMAGE_BYTES))


def _signatures(bundle: Bundle, image: Image) -> dict[str, bytes]:
    """Well-formed, and each under its key's id; what they prove is for whoever has the keys to ask."""
    found: dict[str, bytes] = {}
    for key_id, blob in image.signatures.items():
        found[key_id] = _document(bundle, blob, MAX_SIGNATURE_BYTES)
        signed_by = Envelope.from_bytes(found[key_id]).key_id
        if signed_by != key_id:
            raise InvalidDocument(f"signature {blob.sha256} is one of key {signed_by}, not of {key_id[:80]!r}")
    return found


def _evidence(bundle: Bundle, image: Image) -> tuple[Evidence, ...]:
    """Documents about this manifest; whether they are believed is for whoever serves it to say."""
    found = tuple(Evidence.from_bytes(_document(bundle, blob, MAX_EVIDENCE_BYTES)) for blob in image.evidence)
    for each in found:
        if each.manifest != image.manifest.sha256:
            raise InvalidDocument(f"evidence {each.digest} is of manifest {each.manifest}, not of its own")
    return found


def _vouched(bundle: Bundle, image: Image, evidence: Sequence[Evidence]) -> dict[tuple[str, str], bytes]:
    """Signatures of evidence that is in the bundle; what they prove is for whoever has the keys to ask."""
    digests = {each.digest for each in evidence}
    found = {signed: _document(bundle, blob, MAX_SIGNATURE_BYTES) for signed, blob in image.vouched.items()}
    for (digest, key_id), data in found.items():
        if digest not in digests or Envelope.from_bytes(data).key_id != key_id:
            raise InvalidDocument(
                f"a signature of evidence {digest[:80]!r} by key {key_id[:80]!r} is none of this bundle's"
            )
    return found


def _named(manifest: Manifest, evidence: Sequence[Evidence]) -> tuple[Blob, ...]:
    return tuple(dict.fromkeys([*manifest.blobs(), *(blob for each in evidence for blob in each.blobs())]))


def _insist_on_blobs(bundle: Bundle, image: Image, blobs: Sequence[Blob]) -> None:
    named, carried = set(blobs), set(image.blobs)
    if named != carried:
        raise InvalidDocument(
            f"{len(named - carried)} of the {len(named)} blobs that its documents name are no layers of its image, and "
            f"{len(carried - named)} layers are no such blobs"
        )
    for blob in blobs:
        size = bundle.size(blob_name(blob))
        if size != blob.size:
            found = "is missing" if size is None else f"has {size} bytes"
            raise InvalidDocument(f"blob {blob.sha256} of {blob.size} bytes {found}")


def _document(bundle: Bundle, blob: Blob, limit: int) -> bytes:
    data = _file(bundle, blob_name(blob), limit)
    if Blob.of(data) != blob:
        raise InvalidDocument(f"{blob_name(blob)} does not have the {blob.size} bytes and the digest of its name")
    return data


def _file(bundle: Bundle, name: str, limit: int) -> bytes:
    size = bundle.size(name)
    if size is None or size > limit:
        fault = "is missing" if size is None else f"has {size} bytes, and at most {limit} are allowed"
        raise InvalidDocument(f"{name} {fault}")
    return read_at_most(limit, bundle.chunks(name))
