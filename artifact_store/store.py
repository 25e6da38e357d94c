"""Store: reads and the publish protocol of docs/reference/store-format.md (blobs, manifest, action record)."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nxpipe.artifact_store.backends.protocol import Backend, Payload
from nxpipe.artifact_store.blobs import GRACE, PUBLISH_AGAIN, Blobs, read_at_most
from nxpipe.artifact_store.canonical import parse_canonical_json
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import (
    Conflict,
    Corrupt,
    Incomplete,
    InvalidDocument,
    NotFound,
    OutputLost,
    StoreError,
)
from nxpipe.artifact_store.evidence import Evidence
from nxpipe.artifact_store.index.segments import Report, all_records, ignore_report
from nxpipe.artifact_store.layout import (
    CHANNELS,
    action_path,
    blob_path,
    evidence_folder,
    generation_path,
    head_path,
    is_key,
    listing_path,
)
from nxpipe.artifact_store.manifest import MAX_KEY_INPUTS_BYTES, MAX_MANIFEST_BYTES, Manifest
from nxpipe.artifact_store.names import choose
from nxpipe.artifact_store.records import ActionRecord, Published, Records

_OTHER_VERSION = "read it with the version of nxpipe that wrote it"


class Store:
    """A content-addressed store. Every call may be repeated, and any number of processes may call at once."""

    def __init__(self, backend: Backend, *, grace: float = GRACE) -> None:
        self.backend = backend
        self.grace = grace
        self.blobs = Blobs(backend, grace)
        self.records = Records(backend)

    @property
    def url(self) -> str:
        return self.backend.url

    # Blobs

    def put_blob(self, data: bytes | memoryview) -> Blob:
        """Store bytes. Nothing is written if the store holds them intact."""
        return self.blobs.put(data)

    def put_stream(self, chunks: Iterable[bytes]) -> Blob:
        """Store bytes that need not fit in memory."""
        return self.blobs.put_stream(chunks)

    def read_blob(self, blob: Blob) -> bytes:
        """The bytes, verified."""
        return self.blobs.read(blob)

    def copy_blob_to(self, blob: Blob, path: Path) -> None:
        """Write the bytes to a file, which appears once they are verified; create its folder if necessary."""
        self.blobs.copy_to(blob, path)

    # Artifacts

    def publish(self, manifest: Manifest) -> Published:
        """Make an artifact visible after every blob that it names is durable.

        docs/reference/store-format.md, section 7, lists the steps."""
        document = Payload.of(manifest.to_bytes())
        blob = Blob(sha256=document.sha256, size=document.size)
        stored = self._record(manifest.request_key)
        self._refuse_other(stored, manifest, document)
        self._require_blobs(manifest.blobs(), f"publish {manifest.model.id}", "manifest")
        self.backend.make_durable(blob_path(part) for part in manifest.blobs())
        self.blobs.keep(document)
        self.backend.make_durable([blob_path(blob)])
        self._write_listing(manifest)
        winner = stored or self.records.create_or_read(ActionRecord.of(manifest, blob))
        self._refuse_other(winner, manifest, document)
        return self._published(winner, manifest)

    def attest(self, evidence: Evidence) -> Evidence:
        """Store evidence beside a manifest, which may be published later; idempotent."""
        self._require_blobs(evidence.blobs(), f"keep evidence of manifest {evidence.manifest}", "evidence")
        self.backend.make_durable(blob_path(blob) for blob in evidence.blobs())
        stored = self.records.create_or_read(evidence)
        # An existing document may belong to an abandoned artifact and be due for garbage collection.
        if not self.blobs.keep_young(stored.path):
            self.records.create(stored)
        return stored

    def evidence(self, manifest_digest: str) -> Sequence[Evidence]:
        """All evidence of an artifact, ordered by the documents' names."""
        return evidence_in(self.backend, manifest_digest)

    def find(self, request_key: str) -> Published | None:
        """The artifact under a request key, its manifest verified; blobs are verified when they are read."""
        # A string that is no key has no artifact, and must never become part of a path.
        record = self._find_record(request_key) if is_key(request_key) else None
        return self._published(record, self._manifest_of(record)) if record else None

    def list(self, report: Report = ignore_report) -> Sequence[Published]:
        """Every artifact, newest first, without reading a manifest; `report` receives the progress of the index."""
        records = all_records(self.backend, self.records, report)
        records.sort(key=lambda record: (record.published_at, record.request_key), reverse=True)
        return [self._published(record) for record in records]

    def resolve(self, name: str) -> Published:
        """The only artifact that matches `MODEL`, `MODEL@KEYPREFIX` or `KEYPREFIX` (6 hex digits or more)."""
        match = choose(name, self.list(), self.url, self.serving_channels)
        # The index finds the artifact; the record decides, since the index may be stale.
        published = self.find(match.request_key)
        if published is None:
            raise NotFound(f"{name!r} was removed from {self.url} a moment ago; list the artifacts and name another")
        return published

    def serving_channels(self) -> Mapping[str, Sequence[str]]:
        """The channels whose newest generation serves an artifact, by its manifest's digest. Logs that cannot be read
        are left out: this is for listings, and decides nothing."""
        from nxpipe.artifact_store.channel.generation import Generation, Head

        served: defaultdict[str, deque[str]] = defaultdict(deque)
        names = {item.path.split("/")[1] for item in self.backend.walk(CHANNELS) if item.path.count("/") > 1}
        for channel in sorted(names):
            with suppress(StoreError):
                head = self.records.read(Head, head_path(channel))
                newest = self.records.read(Generation, generation_path(channel, head.generation)) if head else None
                for artifact in newest.artifacts if newest else ():
                    served[artifact.manifest.sha256].append(channel)
        return served

    def manifest(self, blob: Blob) -> Manifest:
        """The manifest that a record or a channel names, verified. Any other blob raises InvalidDocument."""
        return Manifest.from_bytes(read_at_most(MAX_MANIFEST_BYTES, self.blobs.chunks(blob)))

    def key_inputs(self, manifest: Manifest) -> dict[str, object]:
        """The complete inputs of the request key, which is their digest."""
        data = read_at_most(MAX_KEY_INPUTS_BYTES, self.blobs.chunks(manifest.key_inputs))
        inputs = parse_canonical_json(data, limit=MAX_KEY_INPUTS_BYTES)
        if not isinstance(inputs, dict):
            raise InvalidDocument(f"the key inputs {manifest.request_key} are not a JSON object")
        return inputs

    # Implementation

    def _where(self, path: str) -> str:
        return f"{self.url}/{path}"

    def _require_blobs(self, blobs: Sequence[Blob], what: str, document: str) -> None:
        for blob, fault in self.blobs.settle(blobs, sent_by_us=True):
            raise Incomplete(
                f"cannot {what}: blob {blob.sha256} of {blob.size} bytes {fault} in {self.url}; put every blob before "
                f"the {document} that names it"
            )

    def _write_listing(self, manifest: Manifest) -> None:
        path = listing_path(manifest)
        text = manifest.to_text().encode()
        if b"".join(self.backend.read(path) or ()) != text:
            self.backend.replace(path, Payload.of(text))

    def _refuse_other(self, stored: ActionRecord | None, offered: Manifest, document: Payload) -> None:
        if stored is None or stored.manifest.sha256 == document.sha256:
            return
        from nxpipe.artifact_store.difference import ManifestDifference

        self.blobs.keep(document)  # so that `store diff` can read it until garbage collection removes it
        found, digests = self._manifest_of(stored), (stored.manifest.sha256, document.sha256)
        how = ManifestDifference.between(found, offered).in_short()
        reproduced = set(offered.blobs())
        for blob in found.blobs():
            if blob not in reproduced and not self.blobs.is_intact(blob):
                lost = f"blob {blob.sha256} of {blob.size} bytes"
                raise OutputLost(self._where(stored.path), *digests, lost, how)
        raise Conflict(f"request key {stored.request_key}", *digests, self.url, how)

    def _find_record(self, request_key: str) -> ActionRecord | None:
        """The record for a reader, perhaps from a cache; writes are decided by `_record`."""
        return self._record(request_key)

    def _record(self, request_key: str) -> ActionRecord | None:
        return self.records.read(ActionRecord, action_path(request_key))

    def _manifest_of(self, record: ActionRecord) -> Manifest:
        where = self._where(blob_path(record.manifest))
        try:
            manifest = self.manifest(record.manifest)
            if manifest.request_key != record.request_key:
                raise InvalidDocument(f"its request key is {manifest.request_key}, not {record.request_key}")
        except NotFound as error:
            raise Corrupt(self._where(action_path(record.request_key)), str(error), PUBLISH_AGAIN) from error
        except InvalidDocument as fault:
            raise Corrupt(where, str(fault), _OTHER_VERSION) from fault
        return manifest

    def _published(self, record: ActionRecord, manifest: Manifest | None = None) -> Published:
        return Published(record, load=lambda: manifest or self._manifest_of(record))


def evidence_in(backend: Backend, manifest_digest: str) -> Sequence[Evidence]:
    folder = evidence_folder(manifest_digest)
    paths = sorted(path for path in backend.paths(folder) if is_key(path.removeprefix(folder)))
    documents = backend.each(lambda path: Records(backend).read(Evidence, path), paths)
    return [document for document in documents if document is not None]
