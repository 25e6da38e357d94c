"""A cache miss is explained by the nearest artifact, and by exactly the fields that differ."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.index import leaves, segments
from nxpipe.artifact_store.index.leaves import Difference, differences, fields_of
from nxpipe.artifact_store.index.nearest import nearest_artifacts
from nxpipe.artifact_store.layout import INPUT_SEGMENTS, blob_path
from nxpipe.artifact_store.records import Published
from tests.artifact_store.samples import Place, contents, folder, manifest
from tests.artifact_store.test_index import told
from tests.tiers import examples


def publish(store: Store, inputs: dict[str, Any]) -> Published:
    """An artifact with these key inputs."""
    _, *rest = (store.put_blob(data) for data in contents())
    return store.publish(manifest([store.put_blob(canonical_json(inputs)), *rest]))


ASKED = {
    "format": "nxpipe.request/1",
    "config": {"layers": 12, "act": "gelu", "rope": {"theta": 10000.0}, "eos": [1, 2]},
    "shapes": [["forward", 1, 128]],
    "options": {"autocast": "matmult"},
}


def test_the_nearest_and_exactly_what_differs_are_named(place: Place) -> None:
    near = publish(place.store, ASKED)
    publish(place.store, {**ASKED, "config": {"layers": 24, "act": "relu"}})
    wanted = {
        **ASKED,
        "config": {"layers": 12, "act": None, "eos": [1, 2], "new": {}},
        "shapes": [["forward", 1, 128], ["forward", 1, 512]],
    }
    (found,) = nearest_artifacts(place.store, wanted, count=1)
    assert found.published == near
    assert found.fields == 7
    assert found.differences == (
        Difference("config.act", '"gelu"', "null"),
        Difference("config.new", None, "{}"),
        Difference("config.rope.theta", "10000.0", None),
        Difference("shapes", '[["forward",1,128]]', '[["forward",1,128],["forward",1,512]]'),
    )


def test_the_answer_itself_is_not_its_own_neighbour(place: Place) -> None:
    publish(place.store, ASKED)
    assert nearest_artifacts(place.store, ASKED, count=3) == []
    other = publish(place.store, {**ASKED, "target": "trn1"})
    assert [near.published for near in nearest_artifacts(place.store, ASKED, count=3)] == [other]


def test_an_empty_store_has_nothing_near_and_stays_empty(place: Place) -> None:
    assert nearest_artifacts(place.store, ASKED, count=3) == []
    assert place.objects() == {}


def test_the_second_search_reads_no_inputs_but_those_it_tells_of(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MANY_READ", 2)
    published = [publish(place.store, {**ASKED, "seed": seed}) for seed in range(4)]
    inputs = {blob_path(entry.manifest.key_inputs) for entry in published}
    wanted = {**ASKED, "seed": 2, "target": "trn1"}
    first, paths = told(place)
    (before,) = nearest_artifacts(first, wanted, count=1)
    assert inputs <= set(paths)
    second, paths = told(place)
    assert nearest_artifacts(second, wanted, count=1) == [before]
    assert inputs & set(paths) == {blob_path(published[2].manifest.key_inputs)}
    assert before.published == published[2]


def test_a_hint_reads_no_more_than_it_was_allowed(place: Place) -> None:
    for seed in range(4):
        publish(place.store, {**ASKED, "seed": seed})
    assert len(nearest_artifacts(place.store, ASKED, count=9, at_most=2)) == 2


def test_what_cannot_be_read_is_passed_over_and_told_of(place: Place) -> None:
    whole = publish(place.store, {**ASKED, "a": 1, "b": 2})
    torn, without_manifest = publish(place.store, {**ASKED, "a": 1}), publish(place.store, {**ASKED, "b": 2})
    place.write(blob_path(torn.manifest.key_inputs), b'{"a":1}')
    place.remove(blob_path(Blob.of(without_manifest.manifest.to_bytes())))
    result: list[str] = []
    found = nearest_artifacts(place.store, ASKED, count=3, report=result.append)
    assert [near.published for near in found] == [whole]
    assert len(result) == 2
    assert any(torn.request_key in sentence for sentence in result)
    assert any(without_manifest.request_key in sentence for sentence in result)


@pytest.mark.parametrize("text", ["0 9", "0 x", "-1", "\u0660"])
def test_a_segment_with_numbers_of_no_leaf_is_passed_over(
    place: Place, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(segments, "MANY_READ", 0)
    one = publish(place.store, ASKED)
    data = canonical_json({"format": "nxpipe.inputs/1", "leaves": ["a\t1"], "inputs": {one.request_key: text}})
    place.store.backend.create(INPUT_SEGMENTS + Blob.of(data).sha256, Payload.of(data))
    result: list[str] = []
    (found,) = nearest_artifacts(place.store, {**ASKED, "seed": 1}, count=1, report=result.append)
    assert found.published == one
    assert any("no leaf" in sentence for sentence in result)


_NAMES = st.sampled_from(["a", "b", "a.b", "0", "[0]", '"a"', "", "\t", "é", "a=b"])
_PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.floats(-1, 1), st.sampled_from(["", "a", "\t", "1"])
)
_VALUES = st.recursive(
    _PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3), max_leaves=8
)
_DOCUMENTS = st.dictionaries(_NAMES, _VALUES, max_size=4)


@settings(max_examples=examples(500))
@given(_DOCUMENTS, _DOCUMENTS)
def test_only_equal_documents_have_equal_fields(one: dict[str, object], other: dict[str, object]) -> None:
    same = canonical_json(one) == canonical_json(other)
    assert (fields_of(one) == fields_of(other)) == same
    assert (differences(one, other) == ()) == same
    assert differences(one, one) == ()


@settings(max_examples=25)
@given(st.lists(_DOCUMENTS, min_size=1, max_size=6, unique_by=canonical_json), _DOCUMENTS, st.booleans())
def test_no_entry_differs_in_fewer_fields_than_the_nearest(
    stored: list[dict[str, object]], wanted: dict[str, object], indexed: bool
) -> None:
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MANY_READ", 0 if indexed else 200)
        store = folder(Path(root)).store
        for inputs in stored:
            publish(store, inputs)
        others = [entry for entry in stored if canonical_json(entry) != canonical_json(wanted)]
        for _ in range(2):
            found = nearest_artifacts(store, wanted, count=len(stored))
            counts = [len(near.differences) for near in found]
            assert counts == sorted(len(differences(entry, wanted)) for entry in others)


def test_a_small_document_with_huge_fields_is_refused_and_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "MAX_CHARACTERS", 1000)
    with pytest.raises(InvalidDocument, match="more than 1000 characters"):
        fields_of({"x" * 200: {str(number): number for number in range(10)}})
