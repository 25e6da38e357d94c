"""Every action record of a store, without reading each: a record in a segment counts while its object has that tag."""

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import ValidationError

from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Digest, Document, Name
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.index.segments import Report, Segments, unheard
from nxpipe.artifact_store.layout import ACTIONS, RECORD_SEGMENTS, action_path, is_key
from nxpipe.artifact_store.record import ActionRecord
from nxpipe.artifact_store.records import Records


class Entry(Document):
    """A record without its seal, which the segment's own digest stands in for."""

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
        # In one go: through Python's own values it takes three times as long, which a listing of thousands would feel.
        try:
            segment = RecordSegment.model_validate_json(data)
        except ValidationError as error:
            raise InvalidDocument(f"it is no index of records: {error.errors(include_url=False)[0]['msg']}") from None
        return segment.records


def all_records(backend: Backend, records: Records, report: Report = unheard) -> list[ActionRecord]:
    """In no particular order. A damaged record that no segment has is `Corrupt`."""
    listed = ((found.path.removeprefix(ACTIONS), found.tag) for found in backend.walk(ACTIONS))
    tags = {name: tag for name, tag in listed if is_key(name)}
    if not tags:
        return []
    return [entry.record for entry in Segments(backend, _Kind(records, tags), report).entries(tags).values()]
