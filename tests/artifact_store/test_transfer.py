"""Remote reads: mirrors, the read-through cache, and large blobs in resumable ranges."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, NotFound, StoreUnavailable
from nxpipe.artifact_store.fetch import partial, ranges
from nxpipe.artifact_store.fetch.read_cache import ReadCache
from nxpipe.artifact_store.fetch.selection import by_channel
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.trust.channel_trust import ALL
from tests.artifact_store.afar import afar, counting, patch, promoted, refuse
from tests.artifact_store.samples import Place, contents, folder, put, tree
from tests.tiers import examples


@pytest.fixture
def tier(tmp_path: Path) -> ReadCache:
    return ReadCache(tmp_path / "cache")


# Mirrors


def test_what_the_store_lacks_or_has_damaged_comes_from_a_mirror_object_by_object(tmp_path: Path) -> None:
    places = [folder(tmp_path / name) for name in ("store", "mirror", "other")]
    blobs = [Blob.of(data) for data in contents()]
    for place in places:
        place.store.publish(put(place.store))
    lost, damaged, worse = blobs[1:4]
    places[0].remove(blob_path(lost))
    places[0].write(blob_path(damaged), b"x" * damaged.size)
    for place in places[:2]:
        place.write(blob_path(worse), b"")
    heard: list[str] = []
    store = afar([place.backend for place in places], heard=heard)
    found = store.find(blobs[0].sha256)
    assert found
    assert [store.read_blob(blob) for blob in found.manifest.blobs()] == contents()
    for blob, answered in ((lost, "mirror"), (damaged, "mirror"), (worse, "other")):
        assert any(blob.sha256 in said and f"was read from file://{tmp_path}/{answered}" in said for said in heard)


def test_a_store_out_of_reach_is_read_from_its_mirror_and_asked_last_for_a_while(tmp_path: Path) -> None:
    place = folder(tmp_path / "mirror")
    wanted = place.store.publish(put(place.store)).manifest
    down = counting(folder(tmp_path / "store").backend)
    down.before_read = refuse
    store = afar([down, place.backend])
    found = store.find(wanted.request_key)
    assert found
    assert found.manifest == wanted
    assert [store.read_blob(blob) for blob in wanted.blobs()] == contents()
    assert len(down.reads) == 1


def test_when_no_place_has_it_the_stores_own_fault_is_told(tmp_path: Path) -> None:
    places = [counting(folder(tmp_path / name).backend) for name in ("store", "mirror")]
    places[0].before_read = refuse
    with pytest.raises(StoreUnavailable, match="the network is down"):
        afar(places).read_blob(Blob.of(b"nowhere"))
    places[0].before_read, places[1].before_read = places[1].before_read, refuse
    with pytest.raises(NotFound, match=f"{tmp_path}/store holds no blob"):
        afar(places).read_blob(Blob.of(b"nowhere"))
    assert afar(places).find("0" * 64) is None


def test_writes_go_to_the_store_whatever_mirrors_and_tier_hold(tmp_path: Path, tier: ReadCache) -> None:
    """A copy elsewhere proves nothing: what is published must be in the store."""
    place, mirror = folder(tmp_path / "store"), folder(tmp_path / "mirror")
    store = afar([place.backend, mirror.backend], tier)
    put(mirror.store)
    for data in contents():
        store.read_blob(Blob.of(data))
    wanted = put(store)
    assert place.objects() == {blob_path(blob): data for blob, data in zip(wanted.blobs(), contents(), strict=True)}
    place.write(blob_path(wanted.key_inputs), b"damaged")
    store.publish(put(store))
    assert place.store.find(wanted.request_key)
    assert place.store.read_blob(wanted.key_inputs) == contents()[0]


def test_a_channel_that_is_empty_in_the_store_is_not_looked_for_in_a_mirror(tmp_path: Path) -> None:
    place, mirror = folder(tmp_path / "store"), folder(tmp_path / "mirror")
    promoted(mirror.store)
    with pytest.raises(NotFound, match="is empty"):
        by_channel(afar([place.backend, mirror.backend]), "prod", None, None, ALL)


# The tier


def test_what_was_read_once_is_not_read_again(place: Place, tier: ReadCache) -> None:
    backend = counting(place.backend)
    store = afar([backend], tier)
    blobs = [place.store.put_blob(data) for data in contents()]
    for _ in range(3):
        assert [store.read_blob(blob) for blob in blobs] == contents()
    assert len(backend.reads) == len(blobs)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: path.write_bytes(b""),
    "made longer": lambda path: path.write_bytes(path.read_bytes() + b"!"),
    "another file": lambda path: path.rename(path.with_suffix(".old")) and path.write_bytes(b"?" * 100),
    "gone": lambda path: path.unlink(),
    "patched in place": lambda path: patch(path),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_copy_is_thrown_away_and_read_from_the_store(
    tmp_path: Path, tier: ReadCache, damage: Callable[[Path], object]
) -> None:
    place = folder(tmp_path / "store")
    backend = counting(place.backend)
    store = afar([backend], tier)
    blob = place.store.put_blob(contents()[1])
    for _ in range(20):  # at once after it was hashed, within one tick of the file system's clock
        store.read_blob(blob)
        damage(tier.root / blob_path(blob))
        assert store.read_blob(blob) == contents()[1]
    assert len(backend.reads) == 21


def test_a_copy_without_a_stamp_is_hashed_and_stamped(tmp_path: Path, tier: ReadCache) -> None:
    place = folder(tmp_path / "store")
    backend = counting(place.backend)
    blob = place.store.put_blob(contents()[1])
    store = afar([backend], tier)
    store.read_blob(blob)
    for stamp in (tier.root / "stamps").rglob("*"):
        if stamp.is_file():
            stamp.write_text("torn")
    assert store.read_blob(blob) == contents()[1]
    assert len(backend.reads) == 1
    assert "torn" not in (tier.root / "stamps" / blob.sha256[:2] / blob.sha256).read_text()


def test_above_the_limit_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    place = folder(tmp_path / "store")
    tier = ReadCache(tmp_path / "cache", limit=5000)
    store = afar([place.backend], tier)
    blobs = [place.store.put_blob(bytes([number]) * 1000) for number in range(5)]
    for age, blob in enumerate(blobs):
        store.read_blob(blob)
        used = time.time() - 3600 * (5 - age)
        os.utime(tier.root / "stamps" / blob.sha256[:2] / blob.sha256, (used, used))
    store.read_blob(blobs[0])  # and so the second is now the oldest
    store.read_blob(place.store.put_blob(b"x" * 1000))
    left = {name.rpartition("/")[2] for name in tree(tier.root / "cas")}
    assert {blobs[1].sha256, blobs[2].sha256}.isdisjoint(left)
    assert {blobs[0].sha256, blobs[4].sha256} <= left


def test_a_blob_beyond_the_limit_is_read_all_the_same(tmp_path: Path) -> None:
    place = folder(tmp_path / "store")
    store = afar([place.backend], ReadCache(tmp_path / "cache", limit=10))
    data = secrets.token_bytes(5000)
    assert store.read_blob(place.store.put_blob(data)) == data


# Large blobs


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(ranges, "RANGE", 1000)
    monkeypatch.setattr(partial, "NOTED_AFTER", 1000)
    monkeypatch.setattr(ranges, "IN_RANGES_ABOVE", 1000)
    return 1000


def test_a_large_blob_comes_in_ranges_and_is_right(place: Place, tier: ReadCache, small_ranges: int) -> None:
    data = secrets.token_bytes(12_345)
    backend = counting(place.backend)
    blob = place.store.put_blob(data)
    result: list[int] = []
    store = afar([backend], tier)
    store.blobs.copy_to(blob, tier.root / "copy", result.append)
    assert (tier.root / "copy").read_bytes() == data
    assert sorted(start for _, start in backend.reads) == list(range(0, 12_345, small_ranges))
    assert sum(result) == blob.size
    assert not tree(tier.partial.root)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1001, 9000), fails_at=st.sets(st.integers(0, 8), min_size=1, max_size=5), rot=st.booleans())
def test_what_has_come_before_a_failure_does_not_come_again(
    tmp_path: Path, small_ranges: int, size: int, fails_at: set[int], rot: bool
) -> None:
    root = tmp_path / secrets.token_hex(4)
    place, data = folder(root / "store"), secrets.token_bytes(size)
    blob = place.store.put_blob(data)
    backend = counting(place.backend)

    def fail(path: str, start: int) -> None:
        if start // small_ranges in fails_at:
            raise StoreUnavailable("cut off")

    backend.before_read = fail
    count = -(-size // small_ranges)
    store = afar([backend])
    result: list[int] = []
    if fails_at & set(range(count)):
        with pytest.raises(StoreUnavailable, match="cut off"):
            store.blobs.copy_to(blob, root / "copy", result.append)
        assert sum(result) == 0
        assert not (root / "copy").exists()
    left = list(root.glob(".*.part"))
    kept = {number for number in range(count) if left and left[0].read_bytes()[size + number] == 1}
    if rot and left:
        left[0].write_bytes(secrets.token_bytes(size) + left[0].read_bytes()[size:])
    backend.before_read = lambda path, start: None
    backend.reads.clear()
    store.blobs.copy_to(blob, root / "again", result.append)
    assert (root / "again").read_bytes() == data
    assert sum(result) == size
    if left and not rot:
        assert {start // small_ranges for _, start in backend.reads} == set(range(count)) - kept
    assert not list(root.glob(".*.part"))


def test_a_damaged_large_blob_is_never_left_under_its_name(tmp_path: Path, tier: ReadCache, small_ranges: int) -> None:
    place, mirror = folder(tmp_path / "store"), folder(tmp_path / "mirror")
    data = secrets.token_bytes(5000)
    blob = place.store.put_blob(data)
    for damaged in (data[:-1] + b"!", data[:-700], data + b"!"):
        place.write(blob_path(blob), damaged)
        if len(damaged) <= blob.size:
            with pytest.raises(Corrupt, match=blob.sha256):
                afar([place.backend], tier).read_blob(blob)
            assert not tree(tier.root / "cas")
    mirror.store.put_blob(data)
    assert afar([place.backend, mirror.backend], tier).read_blob(blob) == data
    assert not tree(tier.partial.root)


_FETCH = """
import sys
from pathlib import Path
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.fetch import partial, ranges
from nxpipe.artifact_store.fetch.cached_store import MirroredBlobs
from nxpipe.artifact_store.fetch.mirrors import Sources
from nxpipe.artifact_store.fetch.read_cache import ReadCache
import time
ranges.RANGE = ranges.IN_RANGES_ABOVE = partial.NOTED_AFTER = 1000
root, sha256, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
class Slow(LocalFolder):
    def read(self, path, start=0, stop=None, *, tag=None):
        time.sleep(0.02)
        return super().read(path, start, stop, tag=tag)
place = Slow(root / "store")
blobs = MirroredBlobs(place, Sources([place]), ReadCache(root / "cache"))
print("ready", flush=True)
blobs.copy_to(Blob(sha256=sha256, size=size), root / "copy", lambda n: print(n, flush=True))
"""


def test_a_process_goes_on_where_a_killed_one_stopped(tmp_path: Path, small_ranges: int) -> None:
    place, data = folder(tmp_path / "store"), secrets.token_bytes(200_000)
    blob = place.store.put_blob(data)
    command = [sys.executable, "-c", _FETCH, str(tmp_path), blob.sha256, str(blob.size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for _, line in zip(range(60), process.stdout, strict=False):
            assert line.strip()
        process.send_signal(signal.SIGKILL)
    tier = ReadCache(tmp_path / "cache")
    assert len(tree(tier.partial.root)) == 1
    assert not tree(tier.root / "cas")
    backend = counting(place.backend)
    assert afar([backend], tier).read_blob(blob) == data
    assert len(backend.reads) <= 200 - 50
    assert not tree(tier.partial.root)
