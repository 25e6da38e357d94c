"""Evidence: any number of documents beside a manifest, and the refusals of readers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.blobs import GRACE
from nxpipe.artifact_store.builds import keep_step_result, record_observation, step_result
from nxpipe.artifact_store.bundle.archive import Bundled, export_artifact
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Conflict, Corrupt, Incomplete, InvalidDocument
from nxpipe.artifact_store.evidence import (
    DEVICE,
    EMULATED,
    INSTRUCTIONS,
    KINDS,
    UNVERIFIED,
    XLA,
    Compared,
    Evidence,
    Figures,
    Limits,
    coverage_gap,
    document_gap,
    missing_kinds,
)
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, fsck, plan
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.trust.keys import make_key_file
from nxpipe.artifact_store.trust.policy import Policy, TrustedKey, evidence_verifier, has_signed_evidence, sign_evidence
from nxpipe.artifact_store.trust.signers import open_signer
from tests.artifact_store.samples import Place, evidence, folder, manifest, publish_verified, put
from tests.faults.turns import TimedFolder

KEY = sha256_hex(b"a question")


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return folder(tmp_path / "local")


def test_of_two_builders_with_other_figures_both_are_heard_and_the_artifact_is_one(store: Store) -> None:
    one = publish_verified(store, put(store), cosine=0.9999)
    again = publish_verified(store, put(store), cosine=0.9998)
    assert again.manifest_digest == one.manifest_digest
    cosines = {entry.programs[0].outputs[0].cosine for entry in store.evidence(one.manifest_digest)}
    assert cosines == {0.9999, 0.9998}


def test_the_same_said_again_changes_nothing(place: Place) -> None:
    publish_verified(place.store, put(place.store))
    before = place.objects()
    publish_verified(place.store, put(place.store))
    assert place.objects() == before


def test_an_artifact_is_seen_only_after_what_was_found_out_about_it(store: Store) -> None:
    made = put(store)
    store.attest(evidence(store, made))
    assert store.find(made.request_key) is None
    assert coverage_gap(made, store.evidence(made.digest)) is None


def test_evidence_whose_blobs_are_not_there_is_not_kept(store: Store) -> None:
    made = put(store)
    found = evidence(store, made)
    (program,) = found.programs
    lost = found.model_copy(update={"programs": (program.model_copy(update={"answers": Blob.of(b"lost")}),)})
    with pytest.raises(Incomplete, match="put every blob before the evidence that names it"):
        store.attest(lost)
    assert store.evidence(made.digest) == []


def _changed(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda value: change(value["programs"][0]["outputs"][0])


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "words for figures": lambda value: value["programs"][0].update(outputs="trust me"),
    "words for a program": lambda value: value.update(programs=["trust me"]),
    "words for a figure": _changed(lambda row: row.update(cosine="0.9999")),
    "a truth for a figure": _changed(lambda row: row.update(cosine=True)),
    "a figure left out": _changed(lambda row: row.pop("max_relative")),
    "a figure too many": _changed(lambda row: row.update(passed=True)),
    "a negative distance": _changed(lambda row: row.update(max_relative=-1.0)),
    "a share above one": _changed(lambda row: row.update(top1=2.0)),
    "no output": lambda value: value["programs"][0].update(outputs=[]),
    "no program": lambda value: value.update(programs=[]),
    "a program twice": lambda value: value.update(programs=value["programs"] * 2),
    "an output twice": lambda value: value["programs"][0].update(outputs=value["programs"][0]["outputs"] * 2),
    "a later format": lambda value: value.update(format="nxpipe.evidence/2"),
    "another manifest": lambda value: value.update(manifest="0" * 64),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_document_that_is_not_as_it_must_be_is_corrupt_and_not_passed_over(local: Place, forgery: str) -> None:
    store = local.store
    one = publish_verified(store, put(store))
    (found,) = store.evidence(one.manifest_digest)
    value = json.loads(json.dumps(found.model_dump()))
    FORGED[forgery](value)
    sealed = canonical_json(value | {"seal": sha256_hex(canonical_json(value))})
    store.backend.replace(found.path, Payload.of(sealed))
    with pytest.raises(Corrupt, match=f"evidence/{one.manifest_digest}/"):
        store.evidence(one.manifest_digest)


@pytest.mark.parametrize("figure", ["NaN", "Infinity", "-Infinity"])
def test_a_figure_that_is_no_number_cannot_be_read(store: Store, figure: str) -> None:
    found = evidence(store, put(store), cosine=0.125)
    with pytest.raises(InvalidDocument):
        Evidence.from_bytes(found.to_bytes().replace(b"0.125", figure.encode()))


def test_a_document_that_leaves_something_out_covers_nothing(store: Store) -> None:
    made = put(store)
    (program,) = made.executables
    two = made.model_copy(update={"executables": (program, program.model_copy(update={"name": "decode-b1-s128"}))})
    more = made.model_copy(update={"executables": (program.model_copy(update={"outputs": ("logits", "cache")}),)})
    found = evidence(store, made)
    assert document_gap(made, found) is None
    assert str(document_gap(two, found)).endswith("does not cover program decode-b1-s128")
    assert str(document_gap(more, found)).endswith("does not cover forward-b1-s128 cache")
    assert "is of kind device" in str(document_gap(made, found.model_copy(update={"kind": "device"})))
    assert coverage_gap(made, []) == UNVERIFIED
    assert coverage_gap(two, [found]) == document_gap(two, found)


@st.composite
def _documents(draw: st.DrawFn) -> list[Evidence]:
    """Evidence of an artifact of two programs, complete or not, of any kind."""
    documents = []
    for _ in range(draw(st.integers(0, 6))):
        names = draw(st.sets(st.sampled_from(("a", "b")), min_size=1))
        outputs = draw(st.sets(st.sampled_from(("logits", "cache")), min_size=1))
        documents.append(_document(draw(st.sampled_from(KINDS)), sorted(names), sorted(outputs)))
    return documents


def _document(kind: str, names: list[str], outputs: list[str]) -> Evidence:
    near: dict[str, float] = dict.fromkeys(("max_absolute", "mean_absolute", "max_relative"), 0.0)
    figures = tuple(Figures(output=output, cosine=1.0, kl=None, top1=None, **near) for output in outputs)
    blob = Blob.of(b"values")
    programs = tuple(
        Compared(program=name, yardstick="x", outputs=figures, inputs=blob, answers=blob, surroundings={})
        for name in names
    )
    limits = Limits(min_cosine=0.9, max_relative_error=0.1, max_kl=None, min_top1=None)
    return Evidence(manifest="0" * 64, kind=kind, programs=programs, limits=limits)


def _two_programs() -> Manifest:
    made = manifest([Blob.of(str(number).encode()) for number in range(4)])
    (program,) = made.executables
    programs = tuple(program.model_copy(update={"name": name, "outputs": ("logits", "cache")}) for name in ("a", "b"))
    return made.model_copy(update={"executables": programs})


@given(_documents(), _documents())
def test_more_documents_never_cover_less(some: list[Evidence], more: list[Evidence]) -> None:
    made = _two_programs()
    missing = missing_kinds(made, some, KINDS)
    assert missing_kinds(made, [*some, *more], KINDS).keys() <= missing.keys()
    assert missing_kinds(made, [*more, *some], KINDS).keys() <= missing.keys()
    covered = {found.kind for found in some if document_gap(made, found, found.kind) is None}
    assert missing.keys() == set(KINDS) - covered


def test_a_kind_is_not_covered_by_halves_nor_by_another_kind() -> None:
    made = _two_programs()
    halves = [_document(XLA, [name], ["logits", "cache"]) for name in ("a", "b")]
    whole = _document(DEVICE, ["a", "b"], ["logits", "cache"])
    assert missing_kinds(made, [*halves, whole], KINDS).keys() == {EMULATED, INSTRUCTIONS, XLA}
    assert "does not cover program b" in missing_kinds(made, halves, (XLA,))[XLA]


def test_evidence_stays_as_long_as_its_artifact_and_goes_with_it(local: Place) -> None:
    store = Store(local.backend, grace=-10.0)
    one, other = (publish_verified(store, put(store, str(seed), request=seed)) for seed in range(2))
    kept = {entry: store.evidence(entry.manifest_digest)[0] for entry in (one, other)}
    apply_plan(store, plan(store, Rules(), store.backend.now()))
    assert all(store.evidence(entry.manifest_digest) == [kept[entry]] for entry in (one, other))
    assert fsck(store).is_sound
    for _ in range(2):
        apply_plan(store, plan(store, Rules(max_age=-10.0), store.backend.now()))
    assert not [path for path in local.objects() if path.startswith(("evidence/", "cas/", "ac/"))]


def test_evidence_that_is_said_again_is_there_when_the_artifact_is_seen(tmp_path: Path) -> None:
    """An old artifact was given up; somebody builds it again while a collection is about to take what it left."""
    backend = TimedFolder(tmp_path)
    store = Store(backend)
    one = publish_verified(store, put(store))
    backend.time += 2 * GRACE
    apply_plan(store, plan(store, Rules(max_age=0.0), backend.now()))
    backend.time += 2 * GRACE
    made = put(store)
    store.attest(evidence(store, made))
    apply_plan(store, plan(store, Rules(), backend.now()))
    assert store.publish(made).manifest_digest == one.manifest_digest
    assert coverage_gap(made, store.evidence(made.digest)) is None


def test_a_lost_answer_is_a_finding(local: Place) -> None:
    one = publish_verified(local.store, put(local.store))
    (found,) = local.store.evidence(one.manifest_digest)
    local.remove(blob_path(found.programs[0].answers))
    (finding,) = fsck(local.store).findings
    assert finding.path == blob_path(found.programs[0].answers)


def test_a_bundle_carries_evidence_and_its_blobs(local: Place, tmp_path: Path) -> None:
    one = publish_verified(local.store, put(local.store), cosine=0.9999)
    publish_verified(local.store, put(local.store), cosine=0.9998)
    export_artifact(local.store, one, tmp_path / "bundle.tar")
    there = folder(tmp_path / "there").store
    Bundled.read(tmp_path / "bundle.tar").publish(there)
    assert there.evidence(one.manifest_digest) == local.store.evidence(one.manifest_digest)
    assert fsck(there).is_sound


def test_a_bundle_carries_the_signatures_of_evidence(local: Place, tmp_path: Path) -> None:
    make_key_file(tmp_path / "a.key")
    signer = open_signer("file:a.key", tmp_path)
    one = publish_verified(local.store, put(local.store))
    assert sign_evidence(local.store, one, signer, "nxpipe:local") == 1
    assert sign_evidence(local.store, one, signer, "nxpipe:local") == 0
    export_artifact(local.store, one, tmp_path / "bundle.tar")
    there = folder(tmp_path / "there").store
    arrived = Bundled.read(tmp_path / "bundle.tar").publish(there)
    assert has_signed_evidence(there, arrived, signer)
    policy = Policy((TrustedKey("a", signer.public),), frozenset({"prod"}))
    believe = evidence_verifier(policy, there, "prod")
    assert believe is not None
    assert believe(there.evidence(one.manifest_digest)[0])
    assert not believe(evidence(there, put(there), cosine=0.5))
    assert evidence_verifier(policy, there, "staging") is None


def test_a_bundle_with_evidence_of_another_artifact_is_refused(local: Place, tmp_path: Path) -> None:
    one = publish_verified(local.store, put(local.store))
    foreign = evidence(local.store, put(local.store, "b", request=2))
    local.store.attest(foreign)
    local.store.backend.replace(  # as somebody could lay it there
        f"evidence/{one.manifest_digest}/{foreign.digest}", Payload.of(foreign.to_bytes())
    )
    with pytest.raises(Corrupt, match="it is the record of"):
        export_artifact(local.store, one, tmp_path / "bundle.tar")


def test_what_was_observed_first_stands_and_another_result_is_no_conflict(store: Store) -> None:
    first = record_observation(store, KEY, {"answers": store.put_blob(b"0.1")}, {"cosine": 0.1})
    assert record_observation(store, KEY, {"answers": store.put_blob(b"0.2")}, {"cosine": 0.2}) == first
    assert step_result(store, KEY) == first
    with pytest.raises(Conflict):
        keep_step_result(store, KEY, {"answers": store.put_blob(b"0.2")}, {"cosine": 0.2})


def test_an_observation_that_lost_a_blob_gives_way_to_the_next(local: Place) -> None:
    store = local.store
    first = record_observation(store, KEY, {"answers": store.put_blob(b"0.1")}, {})
    local.remove(blob_path(first.blobs()[0]))
    assert step_result(store, KEY) is None
    second = record_observation(store, KEY, {"answers": store.put_blob(b"0.2")}, {})
    assert step_result(store, KEY) == second
    assert second.key != KEY
    local.remove(blob_path(second.blobs()[0]))
    third = record_observation(store, KEY, {"answers": store.put_blob(b"0.1")}, {})
    assert third == first  # its blob is back
