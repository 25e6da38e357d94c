"""Channels: a complete history, one state at a time, and only permitted artifacts served."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.channel.change import Author, Requirements, promote, rollback
from nxpipe.artifact_store.channel.generation import Generation, Head, Served, Signature
from nxpipe.artifact_store.channel.log import ChannelLog, channels
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument, NotFound, Refused
from nxpipe.artifact_store.layout import PINS, blob_path, generation_path, head_path
from tests.artifact_store.samples import Place, publish_verified, put, watched

ANYBODY = Author("ann", "because")
NOTHING = Requirements()


def published(store: Store, number: int = 1, *, model: str = "acme/tiny-bert", target: str = "inf2") -> Published:
    """A verified artifact."""
    manifest = put(store, f"{model} {number}", request=[model, target, number], model=model)
    return publish_verified(store, manifest.model_copy(update={"target": target}))


def serve(store: Store, *wanted: Published, channel: str = "prod", needs: Requirements = NOTHING) -> Generation:
    return promote(store, channel, wanted, ANYBODY, needs).generation


def served(generation: Generation | None) -> list[str]:
    return [artifact.manifest.sha256 for artifact in generation.artifacts] if generation else []


def test_a_promotion_is_what_the_channel_serves_and_says_who_and_why(store: Store) -> None:
    one = published(store)
    answer = promote(store, "prod", [one], Author("ann", "first release"), NOTHING)
    tip = ChannelLog(store.backend, "prod").tip()
    assert answer.changed
    assert answer.generation == tip
    assert tip is not None
    assert (tip.generation, tip.action, tip.actor, tip.reason) == (1, "promote", "ann", "first release")
    assert served(tip) == [one.manifest_digest]


def test_a_channel_that_nobody_promoted_to_serves_nothing(store: Store) -> None:
    assert ChannelLog(store.backend, "prod").tip() is None
    with pytest.raises(NotFound, match="empty"):
        rollback(store, "prod", ANYBODY)


def test_promoting_what_is_served_writes_nothing(store: Store) -> None:
    one = published(store)
    first = serve(store, one)
    again = promote(store, "prod", [one], ANYBODY, NOTHING)
    assert not again.changed
    assert again.generation == first


def test_each_model_and_target_of_a_channel_changes_alone(store: Store) -> None:
    bert, llama = published(store, model="acme/bert"), published(store, model="acme/llama")
    serve(store, bert)
    serve(store, llama)
    newer = published(store, 2, model="acme/bert")
    assert served(serve(store, newer)) == [newer.manifest_digest, llama.manifest_digest]


def test_a_rollback_brings_back_the_state_before_and_a_second_one_the_state_before_that(store: Store) -> None:
    first, second, third = (published(store, number) for number in range(3))
    for entry in (first, second, third):
        serve(store, entry)
    once = rollback(store, "prod", ANYBODY).generation
    assert (served(once), once.restores, once.generation) == ([second.manifest_digest], 2, 4)
    twice = rollback(store, "prod", ANYBODY).generation
    assert (served(twice), twice.restores) == ([first.manifest_digest], 1)
    with pytest.raises(NotFound, match="earlier state than that of generation 1"):
        rollback(store, "prod", ANYBODY)


def test_a_rollback_to_a_generation_serves_exactly_that(store: Store) -> None:
    first, second = published(store, 1), published(store, 2)
    serve(store, first)
    serve(store, second)
    assert served(rollback(store, "prod", ANYBODY, to=1).generation) == [first.manifest_digest]
    with pytest.raises(NotFound, match="no generation 9; it has 1 to 3"):
        rollback(store, "prod", ANYBODY, to=9)


def test_a_rollback_writes_two_small_objects_and_reads_no_blob_but_manifests(place: Place) -> None:
    for number in (1, 2):
        serve(place.store, published(place.store, number))
    writes: list[tuple[str, str]] = []
    rollback(Store(watched(place.backend, lambda verb, path: writes.append((verb, path)))), "prod", ANYBODY)
    assert writes == [("create durably", generation_path("prod", 3)), ("replace", head_path("prod"))]


def test_a_rollback_to_an_artifact_that_is_gone_is_refused(place: Place) -> None:
    first = published(place.store, 1)
    serve(place.store, first)
    serve(place.store, published(place.store, 2))
    place.remove(blob_path(first.record.manifest))
    with pytest.raises(Refused, match="is gone or damaged"):
        rollback(place.store, "prod", ANYBODY)


def test_history_is_a_chain_and_a_changed_or_missing_entry_is_noticed(place: Place) -> None:
    for number in range(4):
        serve(place.store, published(place.store, number))
    log = ChannelLog(place.backend, "prod")
    assert [entry.generation for entry in log.back_from(log.tip())] == [4, 3, 2, 1]
    second = log.read(2)
    assert second is not None
    place.write(generation_path("prod", 2), second.model_copy(update={"actor": "mallory"}).to_bytes())
    with pytest.raises(Corrupt, match="generation 3 follows"):
        list(log.back_from(log.tip()))
    place.remove(generation_path("prod", 2))
    with pytest.raises(Corrupt, match="is missing"):
        list(log.back_from(log.tip()))


def test_a_head_beyond_the_log_tells_of_a_generation_that_was_removed(place: Place) -> None:
    for number in range(3):
        serve(place.store, published(place.store, number))
    place.remove(generation_path("prod", 3))
    with pytest.raises(Corrupt, match=r"head is corrupt: it names generation 3, which is missing from the log; put it"):
        ChannelLog(place.backend, "prod").tip()
    place.remove(head_path("prod"))
    tip = ChannelLog(place.backend, "prod").tip()
    assert tip is not None
    assert tip.generation == 2


@pytest.mark.parametrize("head", [None, b"rot", Head(channel="prod", generation=1)])
def test_a_head_that_lags_is_lost_or_wrong_changes_nothing(place: Place, head: Head | bytes | None) -> None:
    for number in range(3):
        serve(place.store, published(place.store, number))
    if head is None:
        place.remove(head_path("prod"))
    else:
        place.write(head_path("prod"), head if isinstance(head, bytes) else head.to_bytes())
    tip = ChannelLog(place.backend, "prod").tip()
    assert tip is not None
    assert tip.generation == 3


def test_promoters_that_race_leave_a_linear_history_in_which_each_has_its_place(place: Place) -> None:
    artifacts = [published(place.store, model=f"acme/model-{number}") for number in range(8)]
    start, failures = threading.Barrier(len(artifacts)), list[BaseException]()

    def run(one: Published) -> None:
        try:
            start.wait(timeout=60)
            serve(place.store, one)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(artifact,)) for artifact in artifacts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    log = ChannelLog(place.backend, "prod")
    history = list(log.back_from(log.tip()))
    assert [entry.generation for entry in history] == list(range(len(artifacts), 0, -1))
    assert [len(entry.artifacts) for entry in history] == list(range(len(artifacts), 0, -1))


def test_a_promotion_that_expects_another_generation_is_refused(store: Store) -> None:
    serve(store, published(store, 1))
    with pytest.raises(Refused, match="is at generation 1, not 0"):
        promote(store, "prod", [published(store, 2)], ANYBODY, NOTHING, expected=0)


def test_a_rollback_that_expects_another_generation_is_refused(store: Store) -> None:
    for number in range(2):
        serve(store, published(store, number))
    with pytest.raises(Refused, match="is at generation 2, not 1"):
        rollback(store, "prod", ANYBODY, expected=1)


def test_a_rollback_that_another_one_overtook_finds_its_work_done(place: Place) -> None:
    artifacts = [published(place.store, number) for number in range(3)]
    for artifact in artifacts:
        serve(place.store, artifact)
    overtaken: list[str] = []

    def overtake(verb: str, path: str) -> None:
        if path == generation_path("prod", 4) and not overtaken:
            overtaken.append(path)
            rollback(place.store, "prod", ANYBODY)

    answer = rollback(Store(watched(place.backend, overtake)), "prod", ANYBODY)
    assert overtaken
    assert not answer.changed
    assert served(answer.generation) == [artifacts[1].manifest_digest]


def test_an_artifact_with_a_missing_blob_is_refused(place: Place) -> None:
    one = published(place.store)
    place.remove(blob_path(one.manifest.weights[0].blob))
    with pytest.raises(Refused, match="is incomplete"):
        serve(place.store, one)
    assert ChannelLog(place.backend, "prod").tip() is None


def test_an_artifact_that_was_not_verified_is_refused(store: Store) -> None:
    one = store.publish(put(store))
    with pytest.raises(Refused, match="cannot be served on channel prod: it has no evidence of a verification"):
        serve(store, one)


def test_an_artifact_without_a_trusted_signature_is_refused(store: Store) -> None:
    one, other = published(store, 1), published(store, 2)
    trusted = Requirements(check_artifact=lambda each: None if each == Served.of(other) else "nobody has signed it")
    with pytest.raises(Refused, match="nobody has signed it"):
        serve(store, one, needs=trusted)
    assert served(serve(store, other, needs=trusted)) == [other.manifest_digest]


def test_a_fleet_may_not_be_left_without_an_artifact_for_its_target(store: Store) -> None:
    inf2, trn1 = published(store, target="inf2"), published(store, target="trn1")
    both = Requirements(targets={inf2.model_id: {"inf2", "trn1"}})
    with pytest.raises(Refused, match="on trn1, and no artifact"):
        serve(store, inf2, needs=both)
    assert len(serve(store, inf2, trn1, needs=both).artifacts) == 2
    newer = published(store, 2, target="inf2")
    assert len(serve(store, newer, needs=both).artifacts) == 2


def test_a_promotion_leaves_no_pin_behind_even_when_it_is_refused(place: Place) -> None:
    serve(place.store, published(place.store))
    with pytest.raises(Refused):
        serve(place.store, place.store.publish(put(place.store)))
    assert place.backend.paths(PINS) == []


def test_a_signature_covers_every_field_of_a_generation(store: Store) -> None:
    signed: list[bytes] = []

    def sign(data: bytes) -> Signature:
        signed.append(data)
        return Signature(key_id="0" * 64, signature="c2lnbmF0dXJl")

    promote(store, "prod", [published(store)], replace(ANYBODY, sign=sign), NOTHING)
    tip = ChannelLog(store.backend, "prod").tip()
    assert tip is not None
    assert tip.signed_bytes() == signed[0]
    changes: dict[str, Any] = {
        "actor": "mallory",
        "reason": "x",
        "generation": 7,
        "write_id": "0" * 32,
        "artifacts": (),
    }
    for name, value in changes.items():
        assert tip.model_copy(update={name: value}).signed_bytes() != signed[0]


@pytest.mark.parametrize("name", ["", "Prod", "a/b", "..", "-x", "x" * 64, "a b", "prod\n"])
def test_a_name_that_is_no_name_of_a_channel_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidDocument):
        ChannelLog(store.backend, name)


def test_all_channels_are_listed(store: Store) -> None:
    one = published(store)
    for name in ("staging", "prod"):
        serve(store, one, channel=name)
    assert channels(store.backend) == ["prod", "staging"]


def faulty(tip: Generation) -> Sequence[Generation]:
    twice = (*tip.artifacts, *tip.artifacts)
    unsorted = tuple(served.model_copy(update={"without": ("xla", "device")}) for served in tip.artifacts)
    return [
        tip.model_copy(update=update)
        for update in (
            {"artifacts": twice},
            {"artifacts": unsorted},
            {"previous": "0" * 64},
            {"restores": 1},
            {"action": "rollback"},
        )
    ]


def test_an_artifact_that_lacks_no_evidence_has_one_form_only(place: Place) -> None:
    served = serve(place.store, published(place.store)).artifacts[0]
    assert "without" not in served.model_dump()
    lacking = served.model_copy(update={"without": ("device", "xla")})
    assert Served.model_validate(lacking.model_dump()) == lacking
    with pytest.raises(ValidationError):
        Served.model_validate({**served.model_dump(), "without": []})


def test_a_generation_that_contradicts_itself_is_refused(place: Place) -> None:
    tip = serve(place.store, published(place.store))
    for wrong in faulty(tip):
        place.write(tip.path, wrong.to_bytes())
        with pytest.raises(Corrupt):
            ChannelLog(place.backend, "prod").tip()
