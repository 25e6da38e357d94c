"""The OCI documents around one artifact: its manifest is the image's config, its blobs, evidence and signatures are the
layers.

Registries' tools can read and copy such an image. Other tools may add fields to these documents, so unlike our own
they may hold more than we know; what we use of them is checked as strictly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Blob, Size
from nxpipe.artifact_store.errors import InvalidDocument

LAYOUT_FILE: Final = "oci-layout"
INDEX_FILE: Final = "index.json"
BLOBS_FOLDER: Final = "blobs/sha256/"

ARTIFACT_TYPE: Final = "application/vnd.nxpipe.artifact.v3"
MANIFEST_TYPE: Final = "application/vnd.nxpipe.manifest.v3+json"
BLOB_TYPE: Final = "application/vnd.nxpipe.blob"
EVIDENCE_TYPE: Final = "application/vnd.nxpipe.evidence.v1+json"
SIGNATURE_TYPE: Final = "application/vnd.dsse.envelope.v1+json"
IMAGE_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE: Final = "application/vnd.oci.image.index.v1+json"
KEY_ID: Final = "dev.nxpipe.key-id"
SUBJECT: Final = "dev.nxpipe.subject"  # of a signature of evidence: the document's digest
REF_NAME: Final = "org.opencontainers.image.ref.name"

MAX_LAYOUT_BYTES: Final = 4096
MAX_INDEX_BYTES: Final = 4 * 1024**2
MAX_IMAGE_BYTES: Final = 64 * 1024**2


class _Foreign(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, populate_by_name=True)


class Descriptor(_Foreign):
    media_type: str = Field(alias="mediaType")
    digest: Annotated[str, Field(pattern=r"\Asha256:[0-9a-f]{64}\z")]
    size: Size
    artifact_type: str | None = Field(default=None, alias="artifactType")
    annotations: dict[str, str] = {}

    @property
    def blob(self) -> Blob:
        return Blob(sha256=self.digest.removeprefix("sha256:"), size=self.size)


class Layout(_Foreign):
    version: Literal["1.0.0"] = Field(alias="imageLayoutVersion")


class Index(_Foreign):
    schema_version: Literal[2] = Field(alias="schemaVersion")
    manifests: tuple[Descriptor, ...] = Field(strict=False, max_length=1000)


class ImageManifest(_Foreign):
    schema_version: Literal[2] = Field(alias="schemaVersion")
    media_type: Literal["application/vnd.oci.image.manifest.v1+json"] = Field(alias="mediaType")
    artifact_type: Literal["application/vnd.nxpipe.artifact.v3"] = Field(alias="artifactType")
    config: Descriptor
    layers: tuple[Descriptor, ...] = Field(strict=False, max_length=300_000)


D = TypeVar("D", bound=_Foreign)


@dataclass(frozen=True)
class Image:
    """What an image holds: the manifest, evidence, the blobs that either names, each signature of the manifest by its
    key's id, and each of evidence (`vouched`) by that document's digest and its key's id."""

    manifest: Blob
    blobs: Sequence[Blob]
    evidence: Sequence[Blob]
    signatures: Mapping[str, Blob]
    vouched: Mapping[tuple[str, str], Blob] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        evidence = (_described(blob, EVIDENCE_TYPE) for blob in self.evidence)
        signed = [
            _described(blob, SIGNATURE_TYPE, annotations={KEY_ID: key_id})
            for key_id, blob in sorted(self.signatures.items())
        ]
        signed += [
            _described(blob, SIGNATURE_TYPE, annotations={KEY_ID: key_id, SUBJECT: subject})
            for (subject, key_id), blob in sorted(self.vouched.items())
        ]
        return canonical_json(
            {
                "schemaVersion": 2,
                "mediaType": IMAGE_TYPE,
                "artifactType": ARTIFACT_TYPE,
                "config": _described(self.manifest, MANIFEST_TYPE),
                "layers": [*(_described(blob, BLOB_TYPE) for blob in self.blobs), *evidence, *signed],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Image":
        image = parse_foreign(ImageManifest, data)
        if image.config.media_type != MANIFEST_TYPE:
            raise InvalidDocument(f"its config is of the unknown media type {image.config.media_type[:80]!r}")
        blobs: list[Blob] = []
        evidence: list[Blob] = []
        signatures: dict[str, Blob] = {}
        vouched: dict[tuple[str, str], Blob] = {}
        for layer in image.layers:
            if layer.media_type == BLOB_TYPE:
                blobs.append(layer.blob)
            elif layer.media_type == EVIDENCE_TYPE:
                evidence.append(layer.blob)
            elif layer.media_type == SIGNATURE_TYPE and SUBJECT in layer.annotations:
                vouched[layer.annotations[SUBJECT], layer.annotations.get(KEY_ID, "")] = layer.blob
            elif layer.media_type == SIGNATURE_TYPE:
                signatures[layer.annotations.get(KEY_ID, "")] = layer.blob
            else:
                raise InvalidDocument(f"layer {layer.digest} is of the unknown media type {layer.media_type[:80]!r}")
        return cls(image.config.blob, blobs, evidence, signatures, vouched)


def layout_bytes() -> bytes:
    return canonical_json({"imageLayoutVersion": "1.0.0"})


def index_bytes(image: Blob, ref_name: str) -> bytes:
    described = _described(image, IMAGE_TYPE, artifactType=ARTIFACT_TYPE, annotations={REF_NAME: ref_name})
    return canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [described]})


def blob_name(blob: Blob) -> str:
    return BLOBS_FOLDER + blob.sha256


def parse_foreign(kind: type[D], data: bytes) -> D:
    """A document that another tool may have spelled in its own way."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"])) or kind.__name__
        raise InvalidDocument(f"{where}: {fault['msg']}") from None


def _described(blob: Blob, media_type: str, **more: object) -> dict[str, object]:
    return {"mediaType": media_type, "digest": f"sha256:{blob.sha256}", "size": blob.size, **more}
