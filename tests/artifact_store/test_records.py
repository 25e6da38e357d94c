"""Leases, known failures and pins: small records, each with one contract."""

import errno
import threading

import pytest

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.builds import Leases, failure_of, new_holder, record_failure
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, NotFound, Refused, StoreUnavailable
from nxpipe.artifact_store.layout import failure_path, lease_folder
from nxpipe.artifact_store.pins import Pins
from tests.artifact_store.samples import Place

KEY, OTHER = "a" * 64, "b" * 64


class Unsupported(Exception):
    deterministic = True


def test_one_of_many_takes_a_lease_and_the_others_learn_who(place: Place) -> None:
    leases, start = Leases(place.backend), threading.Barrier(16)
    taken = []

    def run() -> None:
        start.wait(timeout=60)
        if lease := leases.take(KEY, new_holder("builder")):
            taken.append(lease)

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [leases.current(KEY)] == taken
    assert leases.current(OTHER) is None


def test_a_lease_that_was_given_back_or_has_expired_is_taken_anew(place: Place) -> None:
    leases = Leases(place.backend)
    first = leases.take(KEY, "one")
    assert first is not None
    leases.give_back(first)
    hasty = Leases(place.backend, seconds=-1).take(KEY, "two")
    assert hasty is not None
    third = leases.take(KEY, "three")
    assert third is not None
    assert (first.term, hasty.term, third.term) == (1, 2, 3)
    assert leases.take(KEY, "four") is None


def test_a_lease_is_renewed_while_it_is_kept_and_given_back_at_the_end(place: Place) -> None:
    leases = Leases(place.backend, seconds=0.3)
    lease = leases.take(KEY, "one")
    assert lease is not None
    renewed = threading.Event()
    with leases.kept(lease):
        while not renewed.is_set():
            current = leases.current(KEY)
            if current is not None and current.expires_at > lease.expires_at:
                renewed.set()
    assert leases.current(KEY) is None


def test_a_damaged_lease_stops_nobody(place: Place) -> None:
    leases = Leases(place.backend)
    leases.take(KEY, "one")
    place.write(f"{lease_folder(KEY)}0000000001", b"rot")
    taken = leases.take(KEY, "two")
    assert taken is not None
    assert taken.term == 2


def test_a_failure_of_the_request_itself_is_remembered_with_its_log(store: Store) -> None:
    record_failure(store, KEY, Unsupported("aten.foo has\nno counterpart"), log=b"the whole story")
    found = failure_of(store, KEY)
    assert found is not None
    assert (found.kind, found.message) == ("Unsupported", "aten.foo has no counterpart")
    assert found.log is not None
    assert store.read_blob(found.log) == b"the whole story"
    assert failure_of(store, OTHER) is None


def test_a_failure_is_forgotten_when_its_time_is_over(store: Store) -> None:
    record_failure(store, KEY, Unsupported("no"), seconds=-1)
    assert failure_of(store, KEY) is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        KeyboardInterrupt(),
        TimeoutError(),
        OSError(errno.ENOSPC, "No space left on device"),
        StoreUnavailable("the network is down"),
        RuntimeError("nobody knows"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_another_attempt_may_be_spared_is_never_remembered(store: Store, error: Exception) -> None:
    assert record_failure(store, KEY, error) is None
    assert failure_of(store, KEY) is None


def test_a_message_of_any_length_and_content_is_kept_short_and_plain(store: Store) -> None:
    record_failure(store, KEY, Unsupported("\x1b[31m" + "x" * 100_000))
    found = failure_of(store, KEY)
    assert found is not None
    assert found.message.isprintable()
    assert len(found.message) == 4000


def test_the_longest_message_there_is_still_fits_into_a_record(store: Store) -> None:
    record_failure(store, KEY, Unsupported("\U0001f600" * 100_000))
    assert failure_of(store, KEY) is not None


def test_a_pin_keeps_one_manifest_under_a_name(store: Store) -> None:
    pins, one, other = Pins(store.backend), store.put_blob(b"one"), store.put_blob(b"other")
    assert pins.add("audit", one, actor="ann", reason="2026") == pins.add("audit", one, actor="bob", reason="again")
    with pytest.raises(Refused, match="already pins"):
        pins.add("audit", other, actor="bob", reason="mine")
    assert [pin.name for pin in pins.all()] == ["audit"]
    pins.remove("audit")
    assert pins.all() == []
    with pytest.raises(NotFound, match="no pin audit"):
        pins.remove("audit")


def test_a_pin_for_a_while_ends(store: Store) -> None:
    pins = Pins(store.backend)
    pin = pins.add("short", Blob.of(b""), actor="ann", reason="", seconds=60)
    now = store.backend.now()
    assert pin.holds(now)
    assert not pin.holds(now + 61)


def test_a_damaged_failure_is_corrupt_and_the_next_one_replaces_it(place: Place) -> None:
    record_failure(place.store, KEY, Unsupported("no"))
    place.write(failure_path(KEY), b"rot")
    with pytest.raises(Corrupt):
        failure_of(place.store, KEY)
    record_failure(place.store, KEY, Unsupported("no"))
    assert failure_of(place.store, KEY) is not None
