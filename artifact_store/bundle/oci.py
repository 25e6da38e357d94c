"""OCI documents of a bundle: the manifest is the image's config; blobs, evidence and signatures are layers.

Registry tools can read and copy such an image. Other tools may add fields to these documents, so unknown fields are
ignored, unlike in the store's own documents; known fields are checked as strictly.
"""

import os
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Final, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nxpipe.artifact_store.backends.files import chunks_of, os_errors
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Blob, Size
from nxpipe.artifact_store.errors import InvalidDocument, NotFound

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
SUBJECT: Final = "dev.nxpipe.subject"  # digest of the document that a signature of evidence covers
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


class OciLayoutFile(_Foreign):
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
    """The content of an image: the manifest, evidence, the blobs that they name, the signatures of the manifest by key
    id, and those of evidence by digest of the evidence and key id."""

    manifest: Blob
    blobs: Sequence[Blob]
    evidence: Sequence[Blob]
    signatures: Mapping[str, Blob]
    evidence_signatures: Mapping[tuple[str, str], Blob] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        evidence = (_descriptor(blob, EVIDENCE_TYPE) for blob in self.evidence)
        signed = [
            _descriptor(blob, SIGNATURE_TYPE, annotations={KEY_ID: key_id})
            for key_id, blob in sorted(self.signatures.items())
        ]
        signed += [
            _descriptor(blob, SIGNATURE_TYPE, annotations={KEY_ID: key_id, SUBJECT: subject})
            for (subject, key_id), blob in sorted(self.evidence_signatures.items())
        ]
        return canonical_json(
            {
                "schemaVersion": 2,
                "mediaType": IMAGE_TYPE,
                "artifactType": ARTIFACT_TYPE,
                "config": _descriptor(self.manifest, MANIFEST_TYPE),
                "layers": [*(_descriptor(blob, BLOB_TYPE) for blob in self.blobs), *evidence, *signed],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Image":
        image = parse_foreign(ImageManifest, data)
        if image.config.media_type != MANIFEST_TYPE:
            raise InvalidDocument(f"its config has the unknown media type {image.config.media_type[:80]!r}")
        blobs: list[Blob] = []
        evidence: list[Blob] = []
        signatures: dict[str, Blob] = {}
        evidence_signatures: dict[tuple[str, str], Blob] = {}
        for layer in image.layers:
            if layer.media_type == BLOB_TYPE:
                blobs.append(layer.blob)
            elif layer.media_type == EVIDENCE_TYPE:
                evidence.append(layer.blob)
            elif layer.media_type == SIGNATURE_TYPE and SUBJECT in layer.annotations:
                evidence_signatures[layer.annotations[SUBJECT], layer.annotations.get(KEY_ID, "")] = layer.blob
            elif layer.media_type == SIGNATURE_TYPE:
                signatures[layer.annotations.get(KEY_ID, "")] = layer.blob
            else:
                raise InvalidDocument(f"layer {layer.digest} has the unknown media type {layer.media_type[:80]!r}")
        return cls(image.config.blob, blobs, evidence, signatures, evidence_signatures)


def layout_bytes() -> bytes:
    return canonical_json({"imageLayoutVersion": "1.0.0"})


def index_bytes(image: Blob, ref_name: str) -> bytes:
    descriptor = _descriptor(image, IMAGE_TYPE, artifactType=ARTIFACT_TYPE, annotations={REF_NAME: ref_name})
    return canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [descriptor]})


def blob_name(blob: Blob) -> str:
    return BLOBS_FOLDER + blob.sha256


def parse_foreign(kind: type[D], data: bytes) -> D:
    """A document that another tool may have written, in any JSON form."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"])) or kind.__name__
        raise InvalidDocument(f"{where}: {fault['msg']}") from None


def _descriptor(blob: Blob, media_type: str, **more: object) -> dict[str, object]:
    return {"mediaType": media_type, "digest": f"sha256:{blob.sha256}", "size": blob.size, **more}


MAX_MEMBERS: Final = 500_000
MAX_BLOB_BYTES: Final = 5 * 1024**4  # the limit of an S3 object

_FILE: Final = re.compile(rf"{LAYOUT_FILE}|{re.escape(INDEX_FILE)}|{BLOBS_FOLDER}[0-9a-f]{{64}}")
_FOLDERS: Final = ("", ".", "blobs", "blobs/sha256")


class BadBundle(InvalidDocument):
    """A file or folder that is not a complete bundle of nxpipe; nothing was published."""

    def __init__(self, where: Path, fault: str) -> None:
        super().__init__(f"{where} cannot be imported: {fault}; export the artifact again, and copy all of it")


class Bundle(Protocol):
    """An image layout as a folder or a tar file."""

    where: Path

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None if it is absent."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of an existing file; several files may be read concurrently."""


def open_bundle(where: Path) -> Bundle:
    with os_errors(f"read {where}"):
        if where.is_dir():
            return _Folder(where)
        if not where.exists():
            raise NotFound(f"there is no bundle {where}; create it with `nxpipe store export`")
        if not where.is_file():
            raise BadBundle(where, "it is neither a folder nor a file")
        return _Tar(where)


class _Folder:
    def __init__(self, where: Path) -> None:
        self.where = where

    def size(self, name: str) -> int | None:
        path = self.where / name
        with os_errors(f"read {path}"):
            try:
                status = path.lstat()
            except FileNotFoundError:
                return None
            if not stat.S_ISREG(status.st_mode) or any(parent.is_symlink() for parent in self._folders_above(path)):
                raise BadBundle(self.where, f"{name} is a link, or not a file")
        return status.st_size

    def chunks(self, name: str) -> Iterator[bytes]:
        path = self.where / name
        with os_errors(f"read {path}"):
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0)
        return chunks_of(file)

    def _folders_above(self, path: Path) -> Iterator[Path]:
        for parent in path.parents:
            if parent == self.where:
                return
            yield parent


class _Tar:
    def __init__(self, where: Path) -> None:
        self.where = where
        with os_errors(f"read {where}"), where.open("rb") as file:
            self._members = dict(_members(file, where))

    def size(self, name: str) -> int | None:
        return self._members[name][1] if name in self._members else None

    def chunks(self, name: str) -> Iterator[bytes]:
        start, size = self._members[name]
        with os_errors(f"read {self.where}"):
            file = self.where.open("rb", buffering=0)
            file.seek(start)
        return chunks_of(file, size)


def _members(file: IO[bytes], where: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each file's name, start and size, from the headers alone; the content is skipped, never interpreted."""
    end = file.seek(0, os.SEEK_END)
    seen: set[str] = set()
    start = 0
    while header := _header(file, start, where):
        start += tarfile.BLOCKSIZE
        name = header.name.removeprefix("./")
        if header.type == tarfile.DIRTYPE and name in _FOLDERS:
            continue
        if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not _FILE.fullmatch(name):
            raise BadBundle(
                where,
                f"it holds {header.name[:120]!r} of tar type {header.type!r}, which is not part of an image layout",
            )
        if name in seen or len(seen) == MAX_MEMBERS:
            raise BadBundle(where, f"it holds {name} twice, or more than {MAX_MEMBERS} files")
        if not 0 <= header.size <= min(MAX_BLOB_BYTES, end - start):
            raise BadBundle(where, f"{name} has {header.size} bytes by its header, but only {end - start} follow")
        seen.add(name)
        yield name, (start, header.size)
        start += -(-header.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _header(file: IO[bytes], start: int, where: Path) -> tarfile.TarInfo | None:
    """None at the end of the archive."""
    file.seek(start)
    block = file.read(tarfile.BLOCKSIZE)
    if block == bytes(tarfile.BLOCKSIZE):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise BadBundle(where, f"it is not a tar file, or truncated: {error} at byte {start}") from None
