"""The pointer from a request key to its manifest, and what it tells. Section 5 of docs/store-format.md."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Final, Literal

from pydantic import Field

from artifact_store.canonical import canonical_json, parse_canonical_json
from artifact_store.digest import sha256_hex
from artifact_store.errors import InvalidDocument
from artifact_store.manifest import Blob, Digest, Document, Manifest, ModelId, Name, Size, parse_document

MAX_RECORD_BYTES: Final = 16 * 1024


class ActionRecord(Document):
    """Which manifest answers a request key, with enough of it to list artifacts without loading one."""

    format: Literal["nxpipe.action/1"] = "nxpipe.action/1"
    request_key: Digest
    manifest: Blob
    model_id: ModelId
    target: Name
    executables: Size
    size_bytes: Size
    published_at: Annotated[str, Field(pattern=r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\z")]
    write_id: Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]

    @classmethod
    def of(cls, manifest: Manifest, blob: Blob) -> "ActionRecord":
        """A record of this moment, unlike any other attempt to publish."""
        return cls(
            request_key=manifest.request_key,
            manifest=blob,
            model_id=manifest.model.id,
            target=manifest.target,
            executables=len(manifest.executables),
            size_bytes=sum(blob.size for blob in manifest.blobs()),
            published_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            write_id=secrets.token_hex(16),
        )

    def to_bytes(self) -> bytes:
        fields = self.model_dump()
        return canonical_json(fields | {"seal": sha256_hex(canonical_json(fields))})

    @classmethod
    def from_bytes(cls, data: bytes) -> "ActionRecord":
        fields = parse_canonical_json(data, limit=MAX_RECORD_BYTES)
        if not isinstance(fields, dict):
            raise InvalidDocument("it is not a JSON object")
        seal = fields.pop("seal", None)
        if seal != sha256_hex(canonical_json(fields)):
            raise InvalidDocument("its seal does not match its content")
        return parse_document(cls, fields)


@dataclass(frozen=True)
class Published:
    """An artifact as a store knows it; the manifest is read, and verified, when it is first asked for."""

    manifest_digest: str
    request_key: str
    model_id: str
    target: str
    executables: int
    size_bytes: int
    published_at: str
    load: Callable[[], Manifest] = field(repr=False, compare=False)

    @cached_property
    def manifest(self) -> Manifest:
        return self.load()
