"""Action record: the object that makes an artifact visible under its request key."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from nxpipe.artifact_store.documents import Blob, Digest, ModelId, Name, Sealed, Size, Time, WriteId, written_now
from nxpipe.artifact_store.layout import action_path
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.names import short_name


class ActionRecord(Sealed):
    """Which manifest answers a request key, with enough of it to list artifacts without loading one."""

    format: Literal["nxpipe.action/1"] = "nxpipe.action/1"
    request_key: Digest
    manifest: Blob
    model_id: ModelId
    target: Name
    executables: Size
    size_bytes: Size
    published_at: Time
    write_id: WriteId

    @property
    def path(self) -> str:
        return action_path(self.request_key)

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
            published_at=written_now(),
            write_id=secrets.token_hex(16),
        )


@dataclass(frozen=True)
class Published:
    """An artifact as a store knows it; the manifest is read, and verified, when it is first asked for."""

    record: ActionRecord
    load: Callable[[], Manifest] = field(repr=False, compare=False)

    @property
    def manifest_digest(self) -> str:
        return self.record.manifest.sha256

    @property
    def request_key(self) -> str:
        return self.record.request_key

    @property
    def model_id(self) -> str:
        return self.record.model_id

    @property
    def name(self) -> str:
        return short_name(self.model_id, self.request_key)

    @property
    def target(self) -> str:
        return self.record.target

    @property
    def executables(self) -> int:
        return self.record.executables

    @property
    def size_bytes(self) -> int:
        return self.record.size_bytes

    @property
    def published_at(self) -> str:
        return self.record.published_at

    @cached_property
    def manifest(self) -> Manifest:
        return self.load()
