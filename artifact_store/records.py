"""Sealed documents of one backend, and the action record, which makes an artifact visible under its request key."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from nxpipe.artifact_store.backends.protocol import Backend, Payload
from nxpipe.artifact_store.blobs import read_at_most
from nxpipe.artifact_store.documents import Blob, Digest, ModelId, Name, Sealed, Size, Time, WriteId, written_now
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument, NotUnderstood, StoreUnavailable
from nxpipe.artifact_store.layout import action_path
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.names import short_name

_REMOVE: Final = "remove that object, then repeat the operation that wrote it"
_OTHER_VERSION: Final = "read it with the version of nxpipe that wrote it"

K = TypeVar("K", bound=Sealed)


class Records:
    """Sealed documents of one backend, read and written by path."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def read(self, kind: type[K], path: str) -> K | None:
        """The record at a path; `Corrupt` if it is damaged or belongs to another path."""
        chunks = self._backend.read(path)
        if chunks is None:
            return None
        try:
            return self.parse(kind, path, read_at_most(kind.max_bytes, chunks))
        except InvalidDocument as fault:
            raise self._corrupt(path, fault) from fault

    def parse(self, kind: type[K], path: str, data: bytes) -> K:
        try:
            record = kind.from_bytes(data)
            if record.path != path:
                raise InvalidDocument(f"it is the record of {record.path}")
        except InvalidDocument as fault:
            raise self._corrupt(path, fault) from fault
        return record

    def create(self, record: Sealed) -> bool:
        """Write a record durably if its path is free. True if this call wrote it."""
        return self._backend.create(record.path, Payload.of(record.to_bytes()), durable=True)

    def create_or_read(self, record: K) -> K:
        """Create the record, or read the one that another process created first."""
        if self.create(record):
            return record
        winner = self.read(type(record), record.path)
        if winner is None:
            raise StoreUnavailable(f"{self._backend.url}/{record.path} appeared and vanished; a retry is safe")
        return winner

    def replace(self, record: Sealed) -> None:
        self._backend.replace(record.path, Payload.of(record.to_bytes()))

    def _corrupt(self, path: str, fault: InvalidDocument) -> Corrupt:
        remedy = _OTHER_VERSION if isinstance(fault, NotUnderstood) else _REMOVE
        return Corrupt(f"{self._backend.url}/{path}", str(fault), remedy)


class ActionRecord(Sealed):
    """The pointer from a request key to a manifest, with the fields that a listing shows."""

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
        """A record with the current time and a random write id, unique to this attempt to publish."""
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
    """A published artifact; its manifest is read and verified on first access."""

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

    @property
    def manifest(self) -> Manifest:
        """The manifest, loaded once. A cached_property of Python 3.11 holds one lock for all instances while it loads:
        threads would read manifests one after the other, and could deadlock."""
        manifest: Manifest = self.__dict__.get("_manifest") or self.__dict__.setdefault("_manifest", self.load())
        return manifest
