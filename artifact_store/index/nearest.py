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
from nxpipe.artifact_store.index.segments import Report, Segments, unheard
from nxpipe.artifact_store.layout import ACTIONS, INPUT_SEGMENTS, digest_path, is_key
from nxpipe.artifact_store.manifest import MAX_KEY_INPUTS_BYTES
from nxpipe.artifact_store.records import Published
from nxpipe.artifact_store.store import Store

_BETWEEN: Final = "\t"  # canonical JSON escapes it, and so do paths

Fields = frozenset[str]


def spelled_field(path: str, value: str) -> str:
    return f"{path}{_BETWEEN}{value}"


def path_of(field: str) -> str:
    return field.partition(_BETWEEN)[0]


class InputSegment(Document):
    """Equal fields are written once; a list of numbers is text, which JSON parsers read many times faster."""

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
        """What cannot be read is passed over: a search is no place to complain of one entry among thousands."""
        try:
            chunks = self._backend.read(digest_path(key))
            if chunks is None:
                raise InvalidDocument("they are missing")
            data = read_at_most(MAX_KEY_INPUTS_BYTES, chunks)
            if sha256_hex(data) != key:
                raise InvalidDocument("their bytes do not have the digest that names them")
            return _fields(parse_canonical_json(data, limit=MAX_KEY_INPUTS_BYTES))
        except InvalidDocument as fault:
            self._report(f"the key inputs {key} of {self._backend.url} are not searched: {fault}")
            return None

    def spelled(self, entries: Mapping[str, Fields]) -> bytes:
        every = sorted(frozenset[str]().union(*entries.values()))
        number = {field: str(place) for place, field in enumerate(every)}
        inputs = {
            key: " ".join(sorted((number[field] for field in fields), key=int)) for key, fields in entries.items()
        }
        return canonical_json({"format": "nxpipe.inputs/1", "leaves": every, "inputs": inputs})

    def parsed(self, data: bytes) -> Mapping[str, Fields]:
        try:
            segment = InputSegment.model_validate_json(data)
        except ValidationError as error:
            raise InvalidDocument(f"it is no index of inputs: {error.errors(include_url=False)[0]['msg']}") from None
        by_number = {str(place): field for place, field in enumerate(segment.leaves)}
        try:
            return {key: frozenset(map(by_number.__getitem__, text.split())) for key, text in segment.inputs.items()}
        except KeyError as unknown:
            raise InvalidDocument(f"it is no index of inputs: there is no leaf {unknown}") from None


def searchable(
    backend: Backend, keys: Iterable[str], *, at_most: int | None = None, report: Report = unheard
) -> dict[str, Fields]:
    """The fields of each key's inputs; of those that no segment holds, the first `at_most`."""
    keys = list(keys)
    return Segments(backend, _Kind(backend, keys, report), report).entries(keys, at_most=at_most) if keys else {}


def _fields(inputs: object) -> Fields:
    if not isinstance(inputs, dict):
        raise InvalidDocument("they are not a JSON object")
    return frozenset(spelled_field(path, value) for path, value in fields_of(inputs).items())


@dataclass(frozen=True)
class NearestArtifact:
    """An artifact that was asked for in almost these words; `before` of a difference is its word, `after` ours."""

    published: Published
    differences: tuple[Difference, ...]
    fields: int  # of its key inputs


def nearest_artifacts(
    store: Store,
    wanted: Mapping[str, object],
    *,
    count: int,
    at_most: int | None = None,
    report: Report = unheard,
) -> list[NearestArtifact]:
    """The `count` artifacts whose key inputs differ from these in the fewest fields, the nearest first.

    An index leads to them, and what is told of them is read from the store and verified. Of the inputs that are in no
    index, `at_most` so many are read.
    """
    key = sha256_hex(canonical_json(wanted))
    others = [name for name in _keys(store) if name != key]
    entries = searchable(store.backend, others, at_most=at_most, report=report)
    return list(islice(_verified(store, wanted, _ranked(wanted, entries), report), count))


def _keys(store: Store) -> Iterator[str]:
    return filter(is_key, (path.removeprefix(ACTIONS) for path in store.backend.paths(ACTIONS)))


def _ranked(wanted: Mapping[str, object], entries: Mapping[str, Fields]) -> list[str]:
    """Keys by the number of paths at which the two differ: those that either has, less those where both agree."""
    asked = fields_of(wanted)
    same = {spelled_field(path, value) for path, value in asked.items()}
    shared = {field for field in frozenset[str]().union(*entries.values()) if path_of(field) in asked}

    def distance(key: str) -> tuple[int, str]:
        fields = entries[key]
        return len(asked) + len(fields) - len(fields & shared) - len(fields & same), key

    return sorted(entries, key=distance)


def _verified(
    store: Store, wanted: Mapping[str, object], ranked: list[str], report: Report
) -> Iterator[NearestArtifact]:
    for key in ranked:
        try:
            published = store.find(key)
            inputs = store.key_inputs(published.manifest) if published else None
        except StoreError as error:
            report(f"{key} is passed over: {error}")
            continue
        if published is not None and inputs is not None:
            yield NearestArtifact(published, differences(inputs, wanted), len(fields_of(inputs)))
