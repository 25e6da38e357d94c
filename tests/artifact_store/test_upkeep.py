"""Maintenance of a store in a folder and on S3: collection, retention, repair and sizes."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.backends.protocol import Backend, ListedObject
from nxpipe.artifact_store.builds import keep_step_result, record_failure
from nxpipe.artifact_store.channel.change import Author, Requirements, promote
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, NotFound, StoreUnavailable
from nxpipe.artifact_store.layout import (
    CHANNELS,
    PINS,
    action_path,
    blob_path,
    head_path,
    listing_path,
    retired_path,
)
from nxpipe.artifact_store.maintenance.collection import Plan, Rules, apply_plan, fsck, plan
from nxpipe.artifact_store.maintenance.reachability import usage
from nxpipe.artifact_store.manifest import Tensor
from nxpipe.artifact_store.pins import Pins
from nxpipe.artifact_store.weights import packed
from tests.artifact_store.samples import Place, folder, publish_verified, put

PASSED = -5.0  # a grace for which everything is old


@pytest.fixture
def aged(place: Place) -> Store:
    """The same store, long after."""
    return Store(place.backend, grace=PASSED)


def published(store: Store, number: int, *, model: str = "acme/tiny-bert") -> Published:
    made = put(store, f"{model} {number}", request=[model, number], model=model)
    return publish_verified(store, made)


def planned(store: Store, keep: int | None = None, budget: int | None = None) -> Plan:
    return plan(store, Rules(keep=keep, budget=budget), store.backend.now())


def collect(store: Store, keep: int | None = None) -> set[str]:
    """The collected paths."""
    return {step.listed.path for step in apply_plan(store, planned(store, keep)).done}


def everything_of(store: Store, one: Published) -> set[str]:
    found_out = store.evidence(one.manifest_digest)
    blobs = (one.record.manifest, *one.manifest.blobs(), *(blob for entry in found_out for blob in entry.blobs()))
    return {listing_path(one.manifest), *map(blob_path, blobs), *(entry.path for entry in found_out)}


def test_a_store_in_use_gives_nothing_up_without_being_told_to(place: Place, aged: Store) -> None:
    published(place.store, 1)
    before = place.objects()
    assert collect(aged) == set()
    assert place.objects() == before


def test_nothing_young_is_collected_though_nothing_holds_it(place: Place) -> None:
    put(place.store)
    assert not planned(place.store).steps


def test_what_a_killed_publisher_left_goes(place: Place, aged: Store) -> None:
    one = published(place.store, 1)
    lost = put(place.store, "lost", request="lost")
    manifest = place.store.put_blob(lost.to_bytes())
    assert collect(aged) == {blob_path(blob) for blob in (manifest, *lost.blobs())}
    assert aged.find(one.request_key) is not None


def test_an_artifact_that_is_given_up_is_out_of_sight_at_once_and_gone_after_the_grace(place: Place) -> None:
    store = place.store
    older, newer = published(store, 1), published(store, 2)
    found = next(entry for entry in store.backend.walk("ac/") if older.request_key in entry.path)
    later = plan(store, Rules(keep=1), found.modified + store.grace + 100)
    retire = [step for step in later.steps if step.action == "retire"]
    assert [step.listed.path for step in retire] in ([found.path], [action_path(newer.request_key)])
    gone, stays = (older, newer) if retire[0].listed.path == found.path else (newer, older)
    apply_plan(store, replace(later, steps=tuple(retire)))
    assert store.find(gone.request_key) is None
    going = everything_of(store, gone) - everything_of(store, stays)
    assert going <= set(place.objects())
    assert collect(Store(place.backend, grace=PASSED)) == {retired_path(gone.request_key), *going}
    assert fsck(store).is_sound


def test_pins_and_channels_keep_what_the_rules_give_up(place: Place, aged: Store) -> None:
    store = place.store
    pinned, served, _ = (published(store, number) for number in range(3))
    Pins(store.backend).add("audit", pinned.record.manifest, actor="ann", reason="figures")
    promote(store, "prod", [served], Author("ann", "because"), Requirements())
    collect(aged, keep=1)
    collect(aged)
    assert {pinned.request_key, served.request_key} <= {entry.request_key for entry in store.list()}
    Pins(store.backend).remove("audit")
    collect(aged, keep=1)
    collect(aged)
    left = set(place.objects())
    assert everything_of(store, served) <= left
    assert fsck(store).is_sound


def test_a_budget_keeps_the_newest_that_fit(place: Place, aged: Store) -> None:
    for number in range(4):
        published(place.store, number)
    size = usage(place.store).artifacts_stored // 4
    assert [step.action for step in planned(aged, budget=5 * size).steps] == []
    assert len([step for step in planned(aged, budget=2 * size + size // 2).steps if step.action == "retire"]) == 2


def test_a_dry_run_shows_the_plan_and_changes_nothing(place: Place, aged: Store) -> None:
    for number in range(3):
        published(place.store, number)
    put(place.store, "lost", request="lost")
    before = place.objects()
    shown = planned(aged, keep=1)
    assert place.objects() == before
    assert apply_plan(aged, shown).done == shown.steps


def test_a_key_that_is_given_up_twice_waits_until_its_first_record_is_swept(place: Place, aged: Store) -> None:
    one = published(place.store, 1)
    everything = Rules(max_age=PASSED)
    first = plan(aged, everything, aged.backend.now())
    apply_plan(aged, replace(first, steps=tuple(step for step in first.steps if step.action == "retire")))
    assert aged.find(one.request_key) is None
    assert place.objects()[retired_path(one.request_key)]
    again = place.store.publish(one.manifest)
    for taken_back in (False, True):
        shown = plan(aged, everything, aged.backend.now())
        outcome = apply_plan(aged, shown)
        assert outcome.done == shown.steps
        assert not outcome.spared
        assert {step.listed.path for step in shown.steps} == {
            action_path(again.request_key) if taken_back else retired_path(again.request_key)
        }
        assert (aged.find(again.request_key) is None) == taken_back


def test_a_removal_spares_what_somebody_needs_again(place: Place, aged: Store) -> None:
    lost = put(place.store, "lost", request="lost")
    made = planned(aged)
    place.store.publish(lost)
    outcome = apply_plan(aged, made)
    assert not outcome.done
    assert len(outcome.spared) == len(lost.blobs())


@pytest.mark.parametrize("what", ["record", "manifest", "generation", "part"])
def test_nothing_is_collected_from_a_store_that_is_not_understood(place: Place, aged: Store, what: str) -> None:
    one = published(place.store, 1)
    promote(place.store, "prod", [one], Author("ann", "because"), Requirements())
    part = keep_step_result(place.store, "e" * 64, {}, {})
    put(place.store, "lost", request="lost")
    path = {
        "part": part.path,
        "record": action_path(one.request_key),
        "manifest": blob_path(one.record.manifest),
        "generation": f"{CHANNELS}prod/log/0000000001",
    }[what]
    place.write(path, b"{}")
    before = place.objects()
    with pytest.raises(Corrupt):
        planned(aged)
    assert place.objects() == before


def test_parts_and_failures_go_with_what_they_name(place: Place, aged: Store) -> None:
    class NoSuchOperator(Exception):
        deterministic = True

    store = place.store
    one = published(store, 1)
    program = one.manifest.executables[0]
    keep_step_result(store, "e" * 64, {"program": program.blob}, {})
    keep_step_result(store, "f" * 64, {"program": store.put_blob(b"a program of no artifact")}, {})
    record_failure(store, "a" * 64, NoSuchOperator("no"), log=b"a log that is kept", seconds=1000)
    record_failure(store, "b" * 64, NoSuchOperator("no"), log=b"a log that has expired", seconds=-1000)
    gone = {Blob.of(b"a program of no artifact"), Blob.of(b"a log that has expired")}
    assert collect(aged) == {f"parts/{'f' * 64}", f"failures/{'b' * 64}", *map(blob_path, gone)}


def test_a_sound_store_has_no_findings(place: Place) -> None:
    one = published(place.store, 1)
    promote(place.store, "prod", [one], Author("ann", "because"), Requirements())
    put(place.store, "lost", request="lost")
    read: list[int] = []

    def begin(total: int) -> object:
        read.append(-total)
        return read.append

    health = fsck(place.store, begin=begin)  # type: ignore[arg-type]
    assert health.is_sound
    assert not health.findings
    assert health.orphans == 5
    assert sum(read) == 0


@pytest.mark.sample(12)
@pytest.mark.parametrize("damage", ["missing", "changed", "cut"])
@pytest.mark.parametrize("which", ["manifest", "weight"])
def test_what_is_missing_or_damaged_is_found_and_mended_from_another_store(
    place: Place, tmp_path: Path, damage: str, which: str
) -> None:
    replica = folder(tmp_path / "replica").store
    one, _ = published(place.store, 1), published(replica, 1)
    blob = one.record.manifest if which == "manifest" else one.manifest.weights[0].blob
    path = blob_path(blob)
    good = place.objects()[path]
    if damage == "missing":
        place.remove(path)
    else:
        place.write(path, good[:-1] + (b"?" if damage == "changed" else b""))
    found = fsck(place.store)
    assert not found.is_sound
    assert len(found.findings) == 1
    mended = fsck(place.store, source=replica)
    assert mended.is_sound
    assert [finding.path for finding in mended.findings] == [path]
    assert place.objects()[path] == good
    assert not fsck(place.store).findings


def test_a_source_with_bad_copies_mends_nothing(place: Place, tmp_path: Path) -> None:
    other = folder(tmp_path / "replica")
    one, _ = published(place.store, 1), published(other.store, 1)
    path = blob_path(one.manifest.weights[0].blob)
    place.write(path, b"bad here")
    other.write(path, b"and bad there")
    assert not fsck(place.store, source=other.store).is_sound
    assert place.objects()[path] == b"bad here"


class Denying:
    """A backend on which some objects and folders are unreadable until they are replaced."""

    def __init__(self, inner: Backend, *paths: str) -> None:
        self._inner = inner
        self.denied = set(paths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, path: str, *arguments: Any, **named: Any) -> Iterator[bytes] | None:
        self._insist(path)
        return self._inner.read(path, *arguments, **named)

    def walk(self, prefix: str) -> Iterator[ListedObject]:
        yield from (found for found in self._inner.walk(prefix) if not self._below(found.path))
        if any(folder.startswith(prefix) for folder in self.denied if folder.endswith("/")):
            raise StoreUnavailable("cannot list a folder")

    def paths(self, prefix: str) -> Sequence[str]:
        self._insist("")
        return self._inner.paths(prefix)

    def replace(self, path: str, *arguments: Any, **named: Any) -> None:
        self.denied.discard(path)
        self._inner.replace(path, *arguments, **named)

    def _below(self, path: str) -> bool:
        return any(folder.endswith("/") and path.startswith(folder) for folder in self.denied)

    def _insist(self, path: str) -> None:
        if path in self.denied or self._below(path):
            raise StoreUnavailable(f"cannot read {path}: Permission denied")


def denying(place: Place, *paths: str) -> Store:
    return Store(cast(Backend, Denying(place.backend, *paths)))


def test_what_cannot_be_read_is_named_beside_all_other_faults_and_mended_from_another_store(
    place: Place, tmp_path: Path
) -> None:
    replica = folder(tmp_path / "replica").store
    first, second, third = (published(place.store, number) for number in range(3))
    for number in range(2):
        published(replica, number)
    promote(place.store, "prod", [third], Author("ann", "because"), Requirements())
    weight, other = (blob_path(tensor.blob) for tensor in first.manifest.weights)
    records = {action_path(third.request_key), f"{CHANNELS}prod/log/0000000001", "pins/audit"}
    Pins(place.store.backend).add("audit", second.record.manifest, actor="ann", reason="figures")
    document = blob_path(second.record.manifest)
    place.write(other, b"damaged")
    store = denying(place, weight, document, *records)
    found = {finding.path: finding for finding in fsck(store).findings}
    assert set(found) == {weight, other, document, *records}
    assert not found[other].unreadable
    assert all(finding.unreadable for path, finding in found.items() if path != other)
    mended = fsck(store, source=replica)
    assert {finding.path for finding in mended.findings if finding.repaired} == {weight, other, document}
    assert {finding.path for finding in mended.unrepaired} == records
    store.backend.denied.clear()  # type: ignore[attr-defined]
    assert not fsck(store).findings


def test_a_folder_that_cannot_be_listed_is_a_finding_and_the_others_are_examined(place: Place) -> None:
    one = published(place.store, 1)
    place.store.put_blob(b"orphan")
    weight = blob_path(one.manifest.weights[0].blob)
    place.write(weight, b"damaged")
    health = fsck(denying(place, PINS))
    assert {(finding.path, finding.unreadable) for finding in health.findings} == {(".", True), (weight, False)}
    assert health.orphans == 1


def test_a_store_that_stops_answering_ends_the_examination(place: Place) -> None:
    one = published(place.store, 1)
    with pytest.raises(StoreUnavailable):
        fsck(denying(place, "", blob_path(one.record.manifest)))


def test_a_folder_lists_what_it_can_before_it_says_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder(tmp_path).store
    blobs = [store.put_blob(bytes([number])) for number in range(8)]
    listed, closed = os.scandir, os.open((tmp_path / blob_path(blobs[3])).parent, os.O_RDONLY)

    def scandir(handle: int) -> Any:
        if os.path.sameopenfile(handle, closed):
            raise PermissionError(13, "Permission denied")
        return listed(handle)

    monkeypatch.setattr(os, "scandir", scandir)
    seen: list[str] = []
    with pytest.raises(StoreUnavailable, match="Permission denied"):
        seen.extend(found.path for found in store.backend.walk("cas/"))
    os.close(closed)
    assert set(seen) == {blob_path(blob) for blob in blobs} - {blob_path(blobs[3])}


def with_packs(store: Store, *, lost: bool = False, garbled: bool = False) -> Published:
    """An artifact with two small tensors in one pack, of which the pack may lack one, or may be none."""
    made = put(store, "packed", request="packed")
    parts = {Blob.of(data): data for data in (b"one", b"other")}
    weights = [(blob, f"small.{number}") for number, blob in enumerate(parts)]
    pack = packed(dict(list(parts.items())[:1]) if lost else parts)
    kept = store.put_blob(pack[:-1] + b"?" if garbled else pack)
    tensors = tuple(
        Tensor(name=name, dtype="uint8", shape=(blob.size,), blob=blob, pack=kept) for blob, name in weights
    )
    return store.publish(made.model_copy(update={"weights": (*made.weights, *tensors)}))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("lost", r"lacks 1 of 2 tensors, the first is small\.1 of acme/tiny-bert@"),
        ("garbled", "has a different digest"),
    ],
)
def test_a_pack_is_proved_tensor_by_tensor_and_against_the_manifests_that_name_it(
    place: Place, tmp_path: Path, how: str, words: str
) -> None:
    pack = with_packs(place.store, **{how: True}).manifest.weights[-1].pack
    assert pack is not None
    (finding,) = fsck(place.store).findings
    assert finding.path == blob_path(pack)
    assert re.search(words, finding.fault)
    replica = folder(tmp_path / "replica").store
    with_packs(replica, **{how: True})
    assert not fsck(place.store, source=replica).is_sound  # a copy of it is no better


def test_a_damaged_pack_is_mended_like_any_other_blob(place: Place, tmp_path: Path) -> None:
    replica = folder(tmp_path / "replica").store
    pack = with_packs(place.store).manifest.weights[-1].pack
    with_packs(replica)
    assert pack is not None
    assert not fsck(place.store).findings
    place.write(blob_path(pack), b"damaged")
    assert not fsck(place.store).is_sound
    assert fsck(place.store, source=replica).is_sound
    assert not fsck(place.store).findings


def test_every_damaged_record_is_reported_and_not_only_the_first(place: Place) -> None:
    first, second = published(place.store, 1), published(place.store, 2)
    promote(place.store, "prod", [first], Author("ann", "because"), Requirements())
    paths = {action_path(first.request_key), action_path(second.request_key), head_path("prod")}
    for path in paths:
        place.write(path, b"{}")
    assert {finding.path for finding in fsck(place.store).findings} == paths


def test_shared_and_orphaned_bytes_are_told_apart(place: Place) -> None:
    store = place.store
    one, other = published(store, 1, model="acme/a"), published(store, 1, model="acme/b")
    orphan = store.put_blob(b"orphan" * 100)
    found = usage(store)
    sizes = {one.model_id: one, other.model_id: other}
    assert [model.model_id for model in found.models] == ["acme/a", "acme/b"]
    for model in found.models:
        artifact = sizes[model.model_id]
        (found_out,) = store.evidence(artifact.manifest_digest)
        beside = sum(blob.size for blob in found_out.blobs())
        assert model.logical == artifact.size_bytes + artifact.record.manifest.size + beside
        assert model.stored == model.logical
    assert found.orphaned == orphan.size
    assert found.shared == found.logical - found.artifacts_stored
    assert found.stored == sum(map(len, place.objects().values()))


def test_a_pin_that_was_removed_is_not_there(store: Store) -> None:
    with pytest.raises(NotFound, match="no pin"):
        Pins(store.backend).remove("audit")
