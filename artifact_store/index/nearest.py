"""Nearest artifacts: an index of cache-key inputs, searched to explain a cache miss."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

from pydantic import ValidationError

from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.blobs import read_at_most
from nxpipe.artifact_store.canonical import canonical_json, parse_canonical_json, sha256_hex
from nxpipe.artifact_store.documents import Digest, Document
from nxpipe.artifact_store.errors import InvalidDocument, StoreError
from nxpipe.artifact_store.index.leaves import Difference, differences, fields_of
from nxpipe.artifact_store.index.segments import Report, Segments, ignore_report
from nxpipe.artifact_store.layout import ACTIONS, INPUT_SEGMENTS, digest_path, is_key
from nxpipe.artifact_store.manifest import MAX_KEY_INPUTS_BYTES
from nxpipe.artifact_store.records import Published
from nxpipe.artifact_store.store import Store

_SEPARATOR: Final = "\t"  # cannot occur in a path or a value: canonical JSON and paths escape it

Fields = frozenset[str]


def spelled_field(path: str, value: str) -> str:
    return f"{path}{_SEPARATOR}{value}"


def path_of(field: str) -> str:
    return field.partition(_SEPARATOR)[0]


class InputSegment(Document):
    """Key inputs of many artifacts. Equal fields are stored once, lists of numbers as text, which parses faster."""

    format: Literal["nxpipe.inputs/1"] = "nxpipe.inputs/1"
    leaves: list[str]
    inputs: dict[Digest, str]


class _Kind:
    folder: Final = INPUT_SEGMENTS

    def __init__(self, backend: Backend, keys: Iterable[str], report: Report) -> None:
        self._backend = backend
        self._keys = set(keys)
        self._report = report

    def is_current(self, key: str, entry: Fields) -> bool:
        return key in self._keys

    def read(self, key: str) -> Fields | None:
        """The fields of one artifact; None if they cannot be read, which is reported and does not stop the search."""
        try:
            chunks = self._backend.read(digest_path(key))
            if chunks is None:
                raise InvalidDocument("they are missing")
            data = read_at_most(MAX_KEY_INPUTS_BYTES, chunks)
            if sha256_hex(data) != key:
                raise InvalidDocument("their bytes do not match their digest")
            return _fields(parse_canonical_json(data, limit=MAX_KEY_INPUTS_BYTES))
        except InvalidDocument as fault:
            self._report(f"the key inputs {key} of {self._backend.url} are not searched: {fault}")
            return None

    def spelled(self, entries: Mapping[str, Fields]) -> bytes:
        leaves = sorted(frozenset[str]().union(*entries.values()))
        number = {field: str(index) for index, field in enumerate(leaves)}
        inputs = {
            key: " ".join(sorted((number[field] for field in fields), key=int)) for key, fields in entries.items()
        }
        return canonical_json({"format": "nxpipe.inputs/1", "leaves": leaves, "inputs": inputs})

    def parsed(self, data: bytes) -> Mapping[str, Fields]:
        try:
            segment = InputSegment.model_validate_json(data)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]["msg"]
            raise InvalidDocument(f"it is not an index of inputs: {fault}") from None
        by_number = {str(index): field for index, field in enumerate(segment.leaves)}
        try:
            return {key: frozenset(map(by_number.__getitem__, text.split())) for key, text in segment.inputs.items()}
        except KeyError as unknown:
            raise InvalidDocument(f"it is not an index of inputs: it has no leaf {unknown}") from None


def searchable(
    backend: Backend, keys: Iterable[str], *, at_most: int | None = None, report: Report = ignore_report
) -> dict[str, Fields]:
    """The fields of each key's inputs; at most `at_most` inputs that are in no segment are read."""
    keys = list(keys)
    return Segments(backend, _Kind(backend, keys, report), report).entries(keys, at_most=at_most) if keys else {}


def _fields(inputs: object) -> Fields:
    if not isinstance(inputs, dict):
        raise InvalidDocument("they are not a JSON object")
    return frozenset(spelled_field(path, value) for path, value in fields_of(inputs).items())


@dataclass(frozen=True)
class NearestArtifact:
    """An artifact with similar key inputs; in a difference `before` is its value and `after` the requested one."""

    published: Published
    differences: tuple[Difference, ...]
    fields: int  # of its key inputs


def nearest_artifacts(
    store: Store,
    requested: Mapping[str, object],
    *,
    count: int,
    at_most: int | None = None,
    report: Report = ignore_report,
) -> list[NearestArtifact]:
    """The `count` artifacts whose key inputs differ from `requested` in the fewest fields, nearest first.

    An index finds them; their inputs are read from the store and verified. At most `at_most` inputs that are in no
    index are read.
    """
    key = sha256_hex(canonical_json(requested))
    others = [name for name in _keys(store) if name != key]
    entries = searchable(store.backend, others, at_most=at_most, report=report)
    return list(islice(_verified(store, requested, _ranked(requested, entries), report), count))


def _keys(store: Store) -> Iterator[str]:
    return filter(is_key, (path.removeprefix(ACTIONS) for path in store.backend.paths(ACTIONS)))


def _ranked(requested: Mapping[str, object], entries: Mapping[str, Fields]) -> list[str]:
    """Keys by the number of paths at which they differ from `requested`: the union of paths less the equal ones."""
    request = fields_of(requested)
    same = {spelled_field(path, value) for path, value in request.items()}
    shared = {field for field in frozenset[str]().union(*entries.values()) if path_of(field) in request}

    def distance(key: str) -> tuple[int, str]:
        fields = entries[key]
        return len(request) + len(fields) - len(fields & shared) - len(fields & same), key

    return sorted(entries, key=distance)


def _verified(
    store: Store, requested: Mapping[str, object], ranked: list[str], report: Report
) -> Iterator[NearestArtifact]:
    for key in ranked:
        try:
            published = store.find(key)
            inputs = store.key_inputs(published.manifest) if published else None
        except StoreError as error:
            report(f"{key} is skipped: {error}")
            continue
        if published is not None and inputs is not None:
            yield NearestArtifact(published, differences(inputs, requested), len(fields_of(inputs)))
