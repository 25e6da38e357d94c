"""The store: blobs in and out, and one protocol for publishing. docs/store-format.md is what this file carries out."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from artifact_store.backends.files import flush_to_disk, os_errors, scratch
from artifact_store.backends.protocol import Backend, Payload
from artifact_store.digest import sha256_of_chunks
from artifact_store.errors import (
    Conflict,
    Corrupt,
    Incomplete,
    InvalidDocument,
    NotFound,
    NotUnderstood,
    StoreUnavailable,
)
from artifact_store.layout import ACTIONS, action_path, blob_path, is_key, listing_path
from artifact_store.manifest import MAX_MANIFEST_BYTES, Blob, Manifest
from artifact_store.names import choose
from artifact_store.record import MAX_RECORD_BYTES, ActionRecord, Published
from artifact_store.verified import checked, read_at_most

_PUBLISH_AGAIN = "publish the artifact again to repair it"
_REMOVE = "remove that one object, then publish the artifact again"
_OTHER_VERSION = "read it with the version of nxpipe that wrote it"


class Store:
    """A content-addressed store. Every call may be repeated, and any number of processes may call at once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def url(self) -> str:
        return self._backend.url

    # Blobs

    def put_blob(self, data: bytes | memoryview) -> Blob:
        """Keep these bytes. Nothing is written when the store holds them intact."""
        return self._keep(Payload.of(data))

    def put_stream(self, chunks: Iterable[bytes]) -> Blob:
        """Keep bytes that need not fit in memory."""
        with scratch(self._backend.scratch_folder) as file:
            for chunk in chunks:
                file.write(chunk)
            return self._keep(file.finish())

    def read_blob(self, blob: Blob) -> bytes:
        """The bytes, verified."""
        return b"".join(self._chunks(blob))

    def copy_blob_to(self, blob: Blob, path: Path) -> None:
        """Write the bytes to a file, which appears when they have proved right; its folder is made if need be."""
        with scratch(path.parent) as file:
            for chunk in self._chunks(blob):
                file.write(chunk)
            file.finish()
            with os_errors(f"write {path}"):
                flush_to_disk(file.path)
                file.path.replace(path)

    # Artifacts

    def publish(self, manifest: Manifest) -> Published:
        """Make an artifact visible, after all that it names is safe; the steps of section 6."""
        document = Payload.of(manifest.to_bytes())
        blob = Blob(sha256=document.sha256, size=document.size)
        stored = self._record(manifest.request_key)
        self._refuse_other(stored, manifest.request_key, blob)
        self._insist_on_blobs(manifest)
        self._backend.make_durable(blob_path(part) for part in manifest.blobs())
        self._keep(document)
        self._backend.make_durable([blob_path(blob)])
        self._write_listing(manifest)
        return self._published(stored or self._commit(ActionRecord.of(manifest, blob)), manifest)

    def find(self, request_key: str) -> Published | None:
        """The artifact that answers a key, its manifest verified; blobs are verified when they are read."""
        # What is not a key answers nothing; least of all may it be taken for a path.
        record = self._record(request_key) if is_key(request_key) else None
        return self._published(record, self._manifest(record)) if record else None

    def list(self) -> Sequence[Published]:
        """Every artifact, newest first, without reading a manifest."""
        keys = filter(is_key, (path.removeprefix(ACTIONS) for path in self._backend.paths(ACTIONS)))
        records = [record for record in self._backend.each(self._record, keys) if record]
        records.sort(key=lambda record: (record.published_at, record.request_key), reverse=True)
        return [self._published(record) for record in records]

    def resolve(self, name: str) -> Published:
        """The one artifact that is named `MODEL`, `MODEL@KEYPREFIX` or `KEYPREFIX` (6 hex digits or more)."""
        return choose(name, self.list(), self.url)

    # How

    def _where(self, path: str) -> str:
        return f"{self.url}/{path}"

    def _keep(self, payload: Payload) -> Blob:
        blob = Blob(sha256=payload.sha256, size=payload.size)
        path = blob_path(blob)
        # Looking again after a lost race: the winner may be a damaged file, of which only a repair gets rid.
        if not self._is_intact(blob) and not self._backend.create(path, payload) and not self._is_intact(blob):
            self._backend.replace(path, payload)
        return blob

    def _is_intact(self, blob: Blob) -> bool:
        """Present, and by its content: a name alone proves nothing after a power loss."""
        path = blob_path(blob)
        stat = self._backend.stat(path)
        if stat is None or stat.size != blob.size:
            return False
        if stat.sha256 is not None:
            return stat.sha256 == blob.sha256
        return sha256_of_chunks(self._backend.read(path) or ()) == blob.sha256

    def _chunks(self, blob: Blob) -> Iterator[bytes]:
        path = blob_path(blob)
        chunks = self._backend.read(path)
        if chunks is None:
            raise NotFound(f"{self.url} holds no blob {blob.sha256} of {blob.size} bytes; {_PUBLISH_AGAIN}")
        return checked(chunks, blob, self._where(path), _PUBLISH_AGAIN)

    def _insist_on_blobs(self, manifest: Manifest) -> None:
        blobs = manifest.blobs()
        stats = self._backend.each(self._backend.stat, (blob_path(blob) for blob in blobs))
        for blob, stat in zip(blobs, stats, strict=True):
            if stat is None or stat.size != blob.size or stat.sha256 not in (None, blob.sha256):
                found = "is missing" if stat is None else f"has {stat.size} bytes, SHA-256 {stat.sha256 or 'not kept'}"
                raise Incomplete(
                    f"cannot publish {manifest.model.id}: blob {blob.sha256} of {blob.size} bytes {found} in "
                    f"{self.url}; put every blob before the manifest that names it"
                )

    def _write_listing(self, manifest: Manifest) -> None:
        path = listing_path(manifest)
        text = manifest.to_text().encode()
        if b"".join(self._backend.read(path) or ()) != text:
            self._backend.replace(path, Payload.of(text))

    def _commit(self, record: ActionRecord) -> ActionRecord:
        """The moment of publication; gives the record that stands, ours or an equal one of somebody faster."""
        path = action_path(record.request_key)
        if self._backend.create(path, Payload.of(record.to_bytes()), durable=True):
            return record
        winner = self._record(record.request_key)
        if winner is None:
            raise StoreUnavailable(f"{self._where(path)} appeared and vanished while publishing; a retry is safe")
        self._refuse_other(winner, record.request_key, record.manifest)
        return winner

    def _refuse_other(self, stored: ActionRecord | None, request_key: str, offered: Blob) -> None:
        if stored is not None and stored.manifest != offered:
            raise Conflict(request_key, stored.manifest.sha256, offered.sha256, self.url)

    def _record(self, request_key: str) -> ActionRecord | None:
        path = action_path(request_key)
        chunks = self._backend.read(path)
        if chunks is None:
            return None
        try:
            record = ActionRecord.from_bytes(read_at_most(MAX_RECORD_BYTES, chunks))
            if record.request_key != request_key:
                raise InvalidDocument(f"it is the record of {record.request_key}")
        except InvalidDocument as fault:
            way_out = _OTHER_VERSION if isinstance(fault, NotUnderstood) else _REMOVE
            raise Corrupt(self._where(path), str(fault), way_out) from fault
        return record

    def _manifest(self, record: ActionRecord) -> Manifest:
        where = self._where(blob_path(record.manifest))
        try:
            manifest = Manifest.from_bytes(read_at_most(MAX_MANIFEST_BYTES, self._chunks(record.manifest)))
            if manifest.request_key != record.request_key:
                raise InvalidDocument(f"it answers {manifest.request_key}, not {record.request_key}")
        except NotFound as error:
            raise Corrupt(self._where(action_path(record.request_key)), str(error), _PUBLISH_AGAIN) from error
        except InvalidDocument as fault:
            raise Corrupt(where, str(fault), _OTHER_VERSION) from fault
        return manifest

    def _published(self, record: ActionRecord, manifest: Manifest | None = None) -> Published:
        return Published(
            manifest_digest=record.manifest.sha256,
            request_key=record.request_key,
            model_id=record.model_id,
            target=record.target,
            executables=record.executables,
            size_bytes=record.size_bytes,
            published_at=record.published_at,
            load=lambda: manifest or self._manifest(record),
        )
