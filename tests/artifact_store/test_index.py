"""An index shortens a listing and never changes it: records prevail over damaged segments."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.protocol import Backend, Payload
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.errors import Corrupt, StoreUnavailable
from nxpipe.artifact_store.index import segments
from nxpipe.artifact_store.layout import ACTIONS, RECORD_SEGMENTS, action_path
from nxpipe.artifact_store.records import Published
from tests.artifact_store.samples import MODEL, Folder, Place, folder, put


class Told:
    """A backend that records reads, and may refuse writes."""

    def __init__(self, inner: Backend, *, read_only: bool = False) -> None:
        self._inner = inner
        self._read_only = read_only
        self.url = inner.url
        self.read_paths: list[str] = []

    def read(self, path: str, *where: Any, **how: Any) -> Iterator[bytes] | None:
        self.read_paths.append(path)
        return self._inner.read(path, *where, **how)

    def create(self, path: str, payload: Payload, **how: Any) -> bool:
        if self._read_only:
            raise StoreUnavailable(f"cannot write {path}: not allowed")
        return self._inner.create(path, payload, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def told(place: Place, *, read_only: bool = False) -> tuple[Store, list[str]]:
    backend = Told(place.backend, read_only=read_only)
    return Store(cast(Backend, backend)), backend.read_paths


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Low thresholds of an index, for tests."""
    monkeypatch.setattr(segments, "MANY_READ", 2)
    monkeypatch.setattr(segments, "MANY_SEGMENTS", 2)


def publish(place: Place, *requests: int) -> list[Published]:
    return [place.store.publish(put(place.store, request=request)) for request in requests]


def segment_paths(place: Place) -> list[str]:
    return sorted(path for path in place.objects() if path.startswith(RECORD_SEGMENTS))


def records_read(paths: list[str]) -> list[str]:
    return [path for path in paths if path.startswith(ACTIONS)]


def test_whoever_read_many_records_spares_the_next_reader(place: Place) -> None:
    published = publish(place, 1, 2, 3)
    first, paths = told(place)
    assert list(first.list()) == published[::-1]
    assert len(records_read(paths)) == 3
    second, paths = told(place)
    assert list(second.list()) == published[::-1]
    assert records_read(paths) == []
    published += publish(place, 4)
    third, paths = told(place)
    assert list(third.list()) == published[::-1]
    assert records_read(paths) == [action_path(published[3].request_key)]


def test_a_small_store_has_no_index(place: Place) -> None:
    publish(place, 1, 2)
    place.store.list()
    assert segment_paths(place) == []


def test_two_readers_of_the_same_records_write_one_segment(place: Place) -> None:
    publish(place, 1, 2, 3)
    place.store.list()
    (path,) = segment_paths(place)
    data = place.objects()[path]
    place.remove(path)
    place.store.list()
    assert {path: place.objects()[path] for path in segment_paths(place)} == {path: data}
    assert path == RECORD_SEGMENTS + sha256_hex(data)


def test_an_artifact_that_was_removed_or_published_anew_is_told_as_it_is_now(place: Place) -> None:
    published = publish(place, 1, 2, 3)
    place.store.list()
    for entry in published[:2]:
        place.remove(action_path(entry.request_key))
    (again,) = publish(place, 2)
    assert again.record != published[1].record
    assert list(place.store.list()) == [again, published[2]]


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b"[" * 100_000])
def test_a_damaged_segment_is_passed_over_told_of_and_mended(place: Place, damage: bytes) -> None:
    published = publish(place, 1, 2, 3)
    place.store.list()
    (path,) = segment_paths(place)
    whole = place.objects()[path]
    place.write(path, damage)
    result: list[str] = []
    assert list(place.store.list(result.append)) == published[::-1]
    assert len(result) == 1
    assert path in result[0]
    assert place.objects()[path] == whole


def forged(place: Place, **changes: object) -> str:
    """A segment with a correct name and a wrong content."""
    (path,) = segment_paths(place)
    document = json.loads(place.objects()[path])
    for key in document["records"]:
        document["records"][key]["record"].update(changes)
    data = canonical_json(document)
    place.remove(path)
    place.write(RECORD_SEGMENTS + sha256_hex(data), data)
    return RECORD_SEGMENTS + sha256_hex(data)


@pytest.mark.parametrize(
    "changes", [{"format": "nxpipe.action/2"}, {"size_bytes": -1}, {"model_id": "../x"}, {"more": 1}, {"target": None}]
)
def test_a_segment_that_this_version_does_not_know_is_passed_over_and_stays(
    place: Place, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish(place, 1, 2, 3)
    place.store.list()
    path = forged(place, **changes)
    monkeypatch.setattr(segments, "MERGED_KEPT", -60.0)
    result: list[str] = []
    assert list(place.store.list(result.append)) == published[::-1]
    assert any(path in sentence for sentence in result)
    assert path in segment_paths(place)


def test_what_is_acted_on_is_the_record_and_not_what_an_index_says_of_it(place: Place) -> None:
    published = publish(place, 1, 2, 3)
    place.store.list()
    forged(place, manifest={"sha256": "0" * 64, "size": 1})
    assert place.store.list()[0].manifest_digest == "0" * 64
    for entry in published:
        assert place.store.resolve(entry.request_key[:12]) == entry


def test_a_damaged_record_that_no_segment_has_is_corrupt(place: Place) -> None:
    published = publish(place, 1, 2, 3)
    place.write(action_path(published[0].request_key), b"{}")
    with pytest.raises(Corrupt):
        place.store.list()


def test_whoever_may_not_write_lists_all_the_same(place: Place) -> None:
    published = publish(place, 1, 2, 3)
    reader, _ = told(place, read_only=True)
    result: list[str] = []
    assert list(reader.list(result.append)) == published[::-1]
    assert "not allowed" in result[0]
    assert segment_paths(place) == []


def test_many_segments_become_one_and_the_old_ones_go_when_they_are_old(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[Published] = []
    for start in (0, 3, 6):
        published += publish(place, start, start + 1, start + 2)
        place.store.list()
    three = segment_paths(place)
    assert len(three) == 3
    place.store.list()
    merged = set(segment_paths(place)) - set(three)
    assert len(merged) == 1
    place.store.list()
    assert set(segment_paths(place)) == {*three, *merged}, "somebody may still be reading the young ones"
    monkeypatch.setattr(segments, "MERGED_KEPT", -60.0)
    place.store.list()
    assert set(segment_paths(place)) == merged
    reader, paths = told(place)
    assert list(reader.list()) == published[::-1]
    assert records_read(paths) == []


def test_a_segment_never_grows_beyond_what_a_reader_takes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_SEGMENT_BYTES", 1200)  # room for two of these records
    published = publish(place, *range(5))
    place.store.list()
    assert len(segment_paths(place)) >= 3
    assert all(len(place.objects()[path]) <= 1200 for path in segment_paths(place))
    reader, paths = told(place)
    assert list(reader.list()) == published[::-1]
    assert records_read(paths) == []


_STEP = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 9)),
    st.tuples(st.just("retire"), st.integers(0, 9)),
    st.tuples(st.just("list"), st.just(0)),
    st.tuples(st.sampled_from(["tear", "lose", "swap"]), st.integers(0, 9)),
)


@settings(max_examples=30)
@given(st.lists(_STEP, max_size=30), st.sampled_from([3600.0, -60.0]))
def test_a_listing_is_what_the_records_say_after_any_history(steps: list[tuple[str, int]], kept: float) -> None:
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MERGED_KEPT", kept)
        place = folder(Path(root))
        standing: dict[str, Published] = {}
        for step, number in [*steps, ("list", 0)]:
            if step == "publish":
                (one,) = publish(place, number)
                standing[one.request_key] = one
            elif step == "retire" and standing:
                place.remove(action_path(standing.pop(sorted(standing)[number % len(standing)]).request_key))
            elif step == "list":
                assert {entry.request_key: entry for entry in place.store.list()} == standing
            else:
                _spoil(place, step, number)


def _spoil(place: Folder, how: str, number: int) -> None:
    paths = segment_paths(place)
    if not paths:
        return
    path = paths[number % len(paths)]
    if how == "tear":
        place.write(path, place.objects()[path][: 100 * number])
    elif how == "lose":
        place.remove(path)
    else:
        place.write(path, place.objects()[paths[0]])


def test_a_name_is_found_through_an_index(place: Place) -> None:
    published = publish(place, 1, 2, 3)
    place.store.list()
    reader, paths = told(place)
    assert reader.resolve(f"{MODEL}@{published[1].request_key[:8]}") == published[1]
    assert records_read(paths) == [action_path(published[1].request_key)]
