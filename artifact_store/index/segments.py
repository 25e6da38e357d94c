"""Index segments: copies of many small objects in a few large ones, with the index of action records.

No key is written often. A segment is named by the digest of its bytes, readers read all segments, and an entry is used
only if its kind confirms that it is current. The loss of a segment costs time, never correctness: only a failed read of
the objects themselves is an error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, Protocol, TypeVar

from pydantic import ValidationError

from nxpipe.artifact_store.backends.protocol import Backend, ListedObject, Payload
from nxpipe.artifact_store.blobs import read_at_most
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.documents import Digest, Document, Name
from nxpipe.artifact_store.errors import InvalidDocument, StoreUnavailable
from nxpipe.artifact_store.layout import ACTIONS, RECORD_SEGMENTS, action_path, is_key
from nxpipe.artifact_store.records import ActionRecord, Records

MAX_SEGMENT_BYTES: Final = 64 * 1024**2
MANY_READ: Final = 200  # objects; a reader that reads more of them one by one writes a segment
MANY_SEGMENTS: Final = 8
MERGED_KEPT: Final = 3600.0  # seconds; another process may still read a segment that was merged

E = TypeVar("E")
Report = Callable[[str], None]


def ignore_report(_: str) -> None:
    """A Report that discards its messages."""


class Kind(Protocol[E]):
    """The kind of entry in the segments of one folder: one entry for each request key."""

    @property
    def folder(self) -> str: ...

    def is_current(self, key: str, entry: E) -> bool:
        """True if the entry still matches the store."""

    def read(self, key: str) -> E | None:
        """The entry, read from the object itself; None if there is no readable object."""

    def spelled(self, entries: Mapping[str, E]) -> bytes:
        """The canonical segment of these entries."""

    def parsed(self, data: bytes) -> Mapping[str, E]:
        """The inverse of `spelled`; `InvalidDocument` for other bytes."""


@dataclass(frozen=True)
class _Segment(Generic[E]):
    listed: ListedObject
    entries: Mapping[str, E]
    is_damaged: bool = False


class Segments(Generic[E]):
    """All segments of one kind in a store."""

    def __init__(self, backend: Backend, kind: Kind[E], report: Report = ignore_report) -> None:
        self._backend = backend
        self._kind = kind
        self._report = report

    def entries(self, keys: Iterable[str], *, at_most: int | None = None) -> dict[str, E]:
        """The entry of each key, from a segment or from the object; at most `at_most` objects are read."""
        segments = self._segments()
        known: dict[str, E] = {}
        redundant = [segment for segment in segments if not self._adds_to(known, segment)]
        missing = [key for key in keys if key not in known][:at_most]
        entries = zip(missing, self._backend.each(self._kind.read, missing), strict=True)
        read = {key: entry for key, entry in entries if entry is not None}
        try:
            self._maintain(segments, redundant, known, read)
        except StoreUnavailable as error:  # such as for a user with read access only
            self._report(f"the index of {self._backend.url} is not updated: {error}")
        return known | read

    def _segments(self) -> list[_Segment[E]]:
        """All segments, largest first: a merged segment includes every entry of its sources."""
        try:
            listed = [item for item in self._backend.walk(self._kind.folder) if is_key(self._name(item))]
            read = [segment for segment in self._backend.each(self._segment, listed) if segment is not None]
        except StoreUnavailable as error:
            self._report(f"the index of {self._backend.url} is not used: {error}")
            return []
        return sorted(read, key=lambda segment: (-len(segment.entries), segment.listed.path))

    def _segment(self, item: ListedObject) -> _Segment[E] | None:
        """A segment; None if it was removed meanwhile or has an unknown format version."""
        try:
            chunks = self._backend.read(item.path)
            data = None if chunks is None else read_at_most(MAX_SEGMENT_BYTES, chunks)
        except InvalidDocument as fault:
            return self._damaged(item, str(fault))
        if data is None:
            return None
        if sha256_hex(data) != self._name(item):
            return self._damaged(item, "its bytes do not match its digest")
        try:
            return _Segment(item, self._kind.parsed(data))
        except InvalidDocument as fault:
            self._report(f"{self._backend.url}/{item.path} is skipped: {fault}")
            return None

    def _damaged(self, item: ListedObject, fault: str) -> _Segment[E]:
        self._report(f"{self._backend.url}/{item.path} is damaged and not used: {fault}")
        return _Segment(item, {}, is_damaged=True)

    def _adds_to(self, known: dict[str, E], segment: _Segment[E]) -> bool:
        before = len(known)
        for key, entry in segment.entries.items():
            if key not in known and self._kind.is_current(key, entry):
                known[key] = entry
        return len(known) > before

    def _maintain(
        self,
        segments: Sequence[_Segment[E]],
        redundant: Sequence[_Segment[E]],
        known: Mapping[str, E],
        read: Mapping[str, E],
    ) -> None:
        """Write a segment of the entries that were read, merge too many segments, remove redundant ones."""
        damaged = {segment.listed.path for segment in segments if segment.is_damaged}
        if len(segments) - len(redundant) > MANY_SEGMENTS:
            self._write({**known, **read}, damaged)
        elif len(read) > MANY_READ:
            self._write(read, damaged)
        if redundant:
            old = self._backend.now() - MERGED_KEPT
            for segment in redundant:
                if segment.listed.modified < old:
                    self._backend.remove(segment.listed)

    def _write(self, entries: Mapping[str, E], damaged: set[str]) -> None:
        data = self._kind.spelled(entries)
        if len(data) > MAX_SEGMENT_BYTES and len(entries) > 1:
            keys = sorted(entries)
            for half in (keys[::2], keys[1::2]):
                self._write({key: entries[key] for key in half}, damaged)
            return
        payload = Payload.of(data)
        path = self._kind.folder + payload.sha256
        # A damaged segment under this name is replaced, since these bytes have the digest of the name.
        if not self._backend.create(path, payload) and path in damaged:
            self._backend.replace(path, payload)

    def _name(self, item: ListedObject) -> str:
        return item.path.removeprefix(self._kind.folder)


class Entry(Document):
    """A record without its seal, since the digest of the segment covers it."""

    tag: Name
    record: ActionRecord


class RecordSegment(Document):
    format: Literal["nxpipe.index/1"] = "nxpipe.index/1"
    records: dict[Digest, Entry]


class _Kind:
    folder: Final = RECORD_SEGMENTS

    def __init__(self, records: Records, tags: Mapping[str, str]) -> None:
        self._records = records
        self._tags = tags

    def is_current(self, key: str, entry: Entry) -> bool:
        return self._tags.get(key) == entry.tag and entry.record.request_key == key

    def read(self, key: str) -> Entry | None:
        record = self._records.read(ActionRecord, action_path(key))
        return None if record is None else Entry(tag=self._tags[key], record=record)

    def spelled(self, entries: Mapping[str, Entry]) -> bytes:
        return canonical_json(RecordSegment(records=dict(entries)).model_dump())

    def parsed(self, data: bytes) -> Mapping[str, Entry]:
        # Parsed directly from JSON: a detour through Python objects takes three times as long for thousands of records.
        try:
            segment = RecordSegment.model_validate_json(data)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]["msg"]
            raise InvalidDocument(f"it is not an index of records: {fault}") from None
        return segment.records


def all_records(backend: Backend, records: Records, report: Report = ignore_report) -> list[ActionRecord]:
    """All action records, unordered. A damaged record that is in no segment raises `Corrupt`."""
    listed = ((item.path.removeprefix(ACTIONS), item.tag) for item in backend.walk(ACTIONS))
    tags = {name: tag for name, tag in listed if is_key(name)}
    if not tags:
        return []
    return [entry.record for entry in Segments(backend, _Kind(records, tags), report).entries(tags).values()]
