"""Sealed documents of one backend, each at the path that its own fields give."""

from typing import Final, TypeVar

from nxpipe.artifact_store.backends.protocol import Backend, Payload
from nxpipe.artifact_store.blobs import read_at_most
from nxpipe.artifact_store.documents import Sealed
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument, NotUnderstood, StoreUnavailable

_REMOVE: Final = "remove that one object, then do again what made it"
_OTHER_VERSION: Final = "read it with the version of nxpipe that wrote it"

K = TypeVar("K", bound=Sealed)


class Records:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def read(self, kind: type[K], path: str) -> K | None:
        """The record at a path; `Corrupt` if it is damaged, or another's."""
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
        """Write a record where there is none, durably. True: this call made it."""
        return self._backend.create(record.path, Payload.of(record.to_bytes()), durable=True)

    def create_or_read(self, record: K) -> K:
        """The record that stands: ours, or that of somebody faster."""
        if self.create(record):
            return record
        winner = self.read(type(record), record.path)
        if winner is None:
            raise StoreUnavailable(f"{self._backend.url}/{record.path} appeared and vanished; a retry is safe")
        return winner

    def replace(self, record: Sealed) -> None:
        self._backend.replace(record.path, Payload.of(record.to_bytes()))

    def _corrupt(self, path: str, fault: InvalidDocument) -> Corrupt:
        way_out = _OTHER_VERSION if isinstance(fault, NotUnderstood) else _REMOVE
        return Corrupt(f"{self._backend.url}/{path}", str(fault), way_out)
