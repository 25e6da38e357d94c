"""Files of many blobs: assembled once, shared by folders and versions, and resumed after a kill."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Changed, Corrupt, StoreUnavailable
from nxpipe.artifact_store.fetch import local_files, partial, ranges
from nxpipe.artifact_store.fetch.folder import WEIGHTS, fetch, size_of
from nxpipe.artifact_store.fetch.read_cache import ReadCache
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.weights import Elements, put_weights
from tests.artifact_store.afar import afar, counting, patch
from tests.artifact_store.samples import Folder, contents, folder, manifest, tree
from tests.faults.damage import DAMAGES

LARGE = 70_000  # bytes of a tensor: a blob of its own


@pytest.fixture
def tier(tmp_path: Path) -> ReadCache:
    return ReadCache(tmp_path / "cache")


@pytest.fixture
def place(tmp_path: Path) -> Folder:
    return folder(tmp_path / "store")


def model(place: Folder, *seeds: int, request: object = 1) -> Manifest:
    """A tensor of its own for each seed, one of them twice, and some small ones in a pack."""
    asked, program, *_, file = [place.store.put_blob(data) for data in contents("a", request)]
    large = [Elements(f"large.{seed}", "uint8", (LARGE,), _bytes(seed, LARGE)) for seed in seeds]
    tied = Elements("tied", "uint8", (LARGE,), _bytes(seeds[0], LARGE))
    small = [Elements(f"small.{number}", "uint8", (100,), _bytes(1000 + number, 100)) for number in range(5)]
    weights = put_weights(place.store.blobs, [*large, tied, *small])
    return place.store.publish(manifest([asked, program, file]).model_copy(update={"weights": weights})).manifest


def _bytes(seed: int, size: int) -> memoryview:
    return memoryview(Random(seed).randbytes(size))


def fetched_plainly(place: Folder, wanted: Manifest, tmp_path: Path) -> bytes:
    fetch(place.store.blobs, wanted, tmp_path / "plain")
    return (tmp_path / "plain" / WEIGHTS).read_bytes()


def test_a_second_folder_gets_a_link_and_asks_nobody(place: Folder, tier: ReadCache, tmp_path: Path) -> None:
    wanted = model(place, 1, 2, 3)
    backend = counting(place.backend)
    store = afar([backend], tier)
    for name in ("one", "two", "three"):
        result: list[int] = []
        fetch(store.blobs, wanted, tmp_path / name, result.append)
        assert sum(result) == size_of(wanted)
    assert len(backend.reads) == len(wanted.blobs()) - 1  # each once, and not the key inputs
    assert len({(tmp_path / name / WEIGHTS).stat().st_ino for name in ("one", "two", "three")}) == 1
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == fetched_plainly(place, wanted, tmp_path)
    assert fetch(store.blobs, wanted, tmp_path / "one").bytes_written == 0
    assert not tree(tier.partial.root)


def test_on_another_file_system_the_folder_gets_a_copy(
    place: Folder, tier: ReadCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    wanted = model(place, 1, 2)
    monkeypatch.setattr(os, "link", refuse)
    backend = counting(place.backend)
    store = afar([backend], tier)
    for name in ("one", "two"):
        fetch(store.blobs, wanted, tmp_path / name)
        assert fetch(store.blobs, wanted, tmp_path / name).bytes_written == 0
    monkeypatch.undo()
    assert len(backend.reads) == len(wanted.blobs()) - 1
    assert (tmp_path / "two" / WEIGHTS).read_bytes() == fetched_plainly(place, wanted, tmp_path)
    assert (tmp_path / "two" / WEIGHTS).stat().st_nlink == 1


def test_of_another_version_only_what_is_new_comes(place: Folder, tier: ReadCache, tmp_path: Path) -> None:
    old, new = model(place, 1, 2, 3), model(place, 4, 2, 3, request=2)
    backend = counting(place.backend)
    store = afar([backend], tier)
    fetch(store.blobs, old, tmp_path / "old")
    backend.reads.clear()
    fetch(store.blobs, new, tmp_path / "new")
    assert (tmp_path / "new" / WEIGHTS).read_bytes() == fetched_plainly(place, new, tmp_path)
    assert len(backend.reads) == len({*new.blobs()} - {*old.blobs()} - {new.key_inputs})


@pytest.mark.parametrize("at", ["served", "cache"])
def test_whoever_writes_to_a_file_that_is_shared_spoils_no_other_fetch(
    place: Folder, tier: ReadCache, tmp_path: Path, at: str
) -> None:
    """A folder's file and the tier's are one; every kind of damage is found before the next folder gets it."""
    wanted = model(place, 1, 2, 3)
    expected = fetched_plainly(place, wanted, tmp_path)
    store, chance = afar([place.backend], tier), Random(1)
    for number in range(40):
        fetch(store.blobs, wanted, tmp_path / "served")
        (held,) = (tier.root / "whole").glob("*/file")
        path = tmp_path / "served" / WEIGHTS if at == "served" else held
        path.write_bytes(chance.choice(DAMAGES)(expected, chance))
        fetch(store.blobs, wanted, tmp_path / f"new-{number}")
        assert (tmp_path / f"new-{number}" / WEIGHTS).read_bytes() == expected
        fetch(store.blobs, wanted, tmp_path / "served")
        assert (tmp_path / "served" / WEIGHTS).read_bytes() == expected


def test_notes_of_what_lies_where_are_believed_of_no_byte(place: Folder, tier: ReadCache, tmp_path: Path) -> None:
    old, new = model(place, 1, 2, 3), model(place, 4, 2, 3, request=2)
    fetch(afar([place.backend], tier).blobs, old, tmp_path / "old")
    expected = fetched_plainly(place, new, tmp_path)
    (notes,) = (tier.root / "whole").glob("*/pieces.json")
    (held,) = (tier.root / "whole").glob("*/file")
    places: dict[str, Any] = json.loads(notes.read_bytes())
    damaged: list[Callable[[], object]] = [
        lambda: notes.write_text(json.dumps({sha256: at + 1 for sha256, at in places.items()})),
        lambda: notes.write_text(json.dumps(dict.fromkeys(places, 2**62))),
        lambda: notes.write_text(json.dumps(dict.fromkeys(places, "0"))),
        lambda: notes.write_text("[1, 2"),
        lambda: notes.write_text("[]"),
        lambda: notes.unlink(),
        lambda: patch(held),
        lambda: held.unlink(),
    ]
    for number, damage in enumerate(damaged):
        damage()
        fetch(afar([place.backend], ReadCache(tier.root)).blobs, new, tmp_path / f"new-{number}")
        assert (tmp_path / f"new-{number}" / WEIGHTS).read_bytes() == expected
        for content in (tier.root / "whole").iterdir():
            if content != notes.parent:
                ReadCache(tier.root).local_files.remove(content.name)


def test_what_the_tier_threw_out_stays_in_its_folder_and_need_not_come_again(place: Folder, tmp_path: Path) -> None:
    wanted = model(place, 1, 2, 3)
    backend = counting(place.backend)
    tier = ReadCache(tmp_path / "cache", limit=1)
    fetch(afar([backend], tier).blobs, wanted, tmp_path / "served")
    assert not list((tier.root / "whole").glob("*/file"))
    backend.reads.clear()
    assert fetch(afar([backend], tier).blobs, wanted, tmp_path / "served").bytes_written == 0
    assert not backend.reads


def test_after_a_start_of_the_machine_files_are_hashed_and_not_fetched(
    place: Folder, tier: ReadCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = model(place, 1, 2, 3)
    backend = counting(place.backend)
    store = afar([backend], tier)
    fetch(store.blobs, wanted, tmp_path / "served")
    backend.reads.clear()
    monkeypatch.setattr(local_files, "_boot", lambda: "another")
    assert fetch(store.blobs, wanted, tmp_path / "served").bytes_written == 0
    fetch(store.blobs, wanted, tmp_path / "new")
    assert not backend.reads
    patch(tmp_path / "served" / "files" / wanted.files[0].path)
    assert fetch(store.blobs, wanted, tmp_path / "served").bytes_written == wanted.files[0].blob.size


def test_what_came_before_a_failure_does_not_come_again(place: Folder, tier: ReadCache, tmp_path: Path) -> None:
    wanted = model(place, *range(20))
    expected = fetched_plainly(place, wanted, tmp_path)
    backend = counting(place.backend)
    fatal = next(tensor.blob.sha256 for tensor in wanted.weights if tensor.name == "large.13")

    def fail(path: str, start: int) -> None:
        if path.endswith(fatal):
            raise StoreUnavailable("cut off")

    backend.before_read = fail
    result: list[int] = []
    with pytest.raises(StoreUnavailable, match="cut off"):
        fetch(afar([backend], tier).blobs, wanted, tmp_path / "served", result.append)
    backend.before_read = lambda path, start: None
    came = len(backend.reads)
    fetch(afar([backend], ReadCache(tier.root)).blobs, wanted, tmp_path / "served")
    assert (tmp_path / "served" / WEIGHTS).read_bytes() == expected
    assert len(backend.reads) == len(wanted.blobs()) - 1 + 1  # only what failed was asked for twice
    assert came > 13


_FETCH = """
import sys, time
from pathlib import Path
from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.fetch.folder import fetch
from nxpipe.artifact_store.fetch.cached_store import MirroredBlobs
from nxpipe.artifact_store.fetch.mirrors import Sources
from nxpipe.artifact_store.fetch.read_cache import ReadCache
root, key = Path(sys.argv[1]), sys.argv[2]
class Slow(LocalFolder):
    def read(self, path, start=0, stop=None, *, tag=None):
        time.sleep(0.05)
        return super().read(path, start, stop, tag=tag)
place = Slow(root / "store")
tier = ReadCache(root / "cache") if sys.argv[3] == "tier" else None
wanted = Store(place).find(key).manifest
fetch(MirroredBlobs(place, Sources([place]), tier), wanted, root / "served", lambda n: print(n, flush=True))
"""


@pytest.mark.parametrize("with_tier", [True, False])
def test_a_process_goes_on_where_a_killed_one_stopped(place: Folder, tmp_path: Path, *, with_tier: bool) -> None:
    wanted = model(place, *range(150))
    tier = ReadCache(tmp_path / "cache") if with_tier else None
    command = [sys.executable, "-c", _FETCH, str(tmp_path), wanted.request_key, "tier" if with_tier else "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for _, line in zip(range(80), process.stdout, strict=False):
            assert line.strip()
        process.send_signal(signal.SIGKILL)
    backend = counting(place.backend)
    fetch(afar([backend], tier).blobs, wanted, tmp_path / "served")
    assert len(backend.reads) < 110
    assert (tmp_path / "served" / WEIGHTS).read_bytes() == fetched_plainly(place, wanted, tmp_path)
    assert not list(tmp_path.glob("served/.*.part"))
    assert not (tier and tree(tier.partial.root))


def test_the_oldest_file_goes_when_the_tier_is_full(place: Folder, tmp_path: Path) -> None:
    versions = [model(place, seed, request=seed) for seed in range(1, 5)]
    tier = ReadCache(tmp_path / "cache", limit=400_000)
    for age, version in enumerate(versions):
        fetch(afar([place.backend], tier).blobs, version, tmp_path / f"version-{age}")
        for stamped in (tier.root / "stamps").glob("??/*"):
            if stamped.stat().st_mtime > 10_000:
                os.utime(stamped, (age + 1, age + 1))
    backend = counting(place.backend)
    fetch(afar([backend], tier).blobs, versions[-1], tmp_path / "last")
    assert not backend.reads
    fetch(afar([backend], tier).blobs, versions[0], tmp_path / "first")
    assert Blob.of(bytes(_bytes(1, LARGE))).sha256 in {path.rpartition("/")[2] for path, _ in backend.reads}


def test_without_a_flush_a_power_loss_is_found_by_the_next_fetch(
    place: Folder, tier: ReadCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, flush = model(place, 1, 2), os.fsync
    flushed: list[int] = []

    def noted(file: int) -> None:
        flushed.append(os.fstat(file).st_size)
        flush(file)

    monkeypatch.setattr(os, "fsync", noted)
    store = afar([place.backend], tier)
    fetch(store.blobs, wanted, tmp_path / "to", flush=False)
    file = tmp_path / "to" / WEIGHTS
    whole = file.read_bytes()
    assert len(whole) not in flushed
    with file.open("r+b") as damaged:  # which the cache shares
        damaged.seek(len(whole) // 2)
        damaged.write(bytes(4096))
    local_files.date(file)
    monkeypatch.setattr(local_files, "_boot", lambda: "the next one")
    assert fetch(store.blobs, wanted, tmp_path / "to", flush=False).bytes_written
    assert file.read_bytes() == whole
    fetch(afar([place.backend], ReadCache(tmp_path / "another")).blobs, wanted, tmp_path / "flushed")
    assert len(whole) in flushed


@pytest.fixture
def in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large blobs of 18 ranges; a fetch of six of them has one stream for each."""
    monkeypatch.setattr(ranges, "RANGE", 4000)
    monkeypatch.setattr(ranges, "IN_RANGES_ABOVE", 4000)
    monkeypatch.setattr(partial, "NOTED_AFTER", 1)


@pytest.mark.parametrize("with_tier", [True, False])
def test_many_large_blobs_are_streams_that_go_on_where_they_were_cut(
    place: Folder, tmp_path: Path, in_ranges: None, *, with_tier: bool
) -> None:
    wanted = model(place, *range(8))
    backend, cut, chance = counting(place.backend), 20_000, Random(5)
    whole_read = backend.read

    def read(path: str, start: int = 0, stop: int | None = None, **more: Any) -> Any:
        chunks = whole_read(path, start, stop, **more)
        if not cutting or stop is None or stop - start < cut:
            return chunks
        return _cut(chunks, chance.randrange(1000, cut))

    backend.read = read
    tier = ReadCache(tmp_path / "cache") if with_tier else None
    cutting = True
    result: list[int] = []
    with pytest.raises(StoreUnavailable):
        fetch(afar([backend], tier).blobs, wanted, tmp_path / "served", result.append)
    cutting = False
    backend.reads.clear()
    fetch(afar([backend], tier and ReadCache(tier.root)).blobs, wanted, tmp_path / "served")
    assert (tmp_path / "served" / WEIGHTS).read_bytes() == fetched_plainly(place, wanted, tmp_path)
    starts = [start for _, start in backend.reads]
    assert any(start > 0 for start in starts)
    assert all(start % 4000 == 0 for start in starts)


def test_a_stream_of_a_replaced_object_goes_on_behind_its_complete_ranges(
    place: Folder, tmp_path: Path, in_ranges: None
) -> None:
    wanted = model(place, *range(8))
    backend, replaced = counting(place.backend), set[str]()
    whole_read = backend.read

    def read(path: str, start: int = 0, stop: int | None = None, **more: Any) -> Any:
        chunks = whole_read(path, start, stop, **more)
        if stop is None or stop < LARGE or path in replaced:
            return chunks
        replaced.add(path)
        return _cut(chunks, 9000, Changed("replaced"))

    backend.read = read
    result: list[int] = []
    fetch(afar([backend], ReadCache(tmp_path / "cache")).blobs, wanted, tmp_path / "served", result.append)
    assert (tmp_path / "served" / WEIGHTS).read_bytes() == fetched_plainly(place, wanted, tmp_path)
    assert sum(result) == size_of(wanted)
    assert sorted(start for path, start in backend.reads if path in replaced) == [0] * 8 + [8000] * 8


def test_streams_end_at_their_next_chunk_when_the_user_cancels(place: Folder, tmp_path: Path, in_ranges: None) -> None:
    wanted = model(place, *range(8))
    backend, began, ended = counting(place.backend), set[str](), list[str]()
    whole_read = backend.read

    def read(path: str, start: int = 0, stop: int | None = None, **more: Any) -> Any:
        chunks = whole_read(path, start, stop, **more)
        return chunks if stop is None or stop < LARGE else slow(path, chunks)

    def slow(path: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
        began.add(path)
        if len(began) == 8 and not interrupted.is_set():
            interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)
        for _ in range(6000):  # a minute
            yield b""
            time.sleep(0.01)
        ended.append(path)
        yield from chunks

    interrupted = Event()
    backend.read = read
    with pytest.raises(KeyboardInterrupt):
        fetch(afar([backend], ReadCache(tmp_path / "cache")).blobs, wanted, tmp_path / "served")
    assert interrupted.is_set()
    assert not ended


def test_a_blob_larger_than_its_share_keeps_its_parallel_ranges(in_ranges: None) -> None:
    even = [Blob(sha256=f"{number:064x}", size=8000) for number in range(6)]
    small, huge = Blob(sha256="a" * 64, size=100), Blob(sha256="b" * 64, size=100_000)
    assert ranges.streamed([small, *even]) == set(even)
    assert ranges.streamed([small, *even, huge]) == set(even)
    assert not ranges.streamed([small, *even[:5], huge])


def _cut(chunks: Iterator[bytes], after: int, error: Exception | None = None) -> Iterator[bytes]:
    left = after
    for chunk in chunks:
        yield chunk[:left]
        left -= len(chunk)
        if left <= 0:
            raise error or StoreUnavailable("cut off")


@pytest.mark.parametrize("fault", ["longer", "shorter", "changed", "changed after a resume"])
def test_a_stream_of_other_bytes_is_corrupt_and_leaves_no_range_behind(
    place: Folder, tmp_path: Path, in_ranges: None, fault: str
) -> None:
    wanted = model(place, *range(8))
    tier = ReadCache(tmp_path / "cache")
    (path,) = (
        found
        for found in (place.root / "cas").rglob("*")
        if found.name == next(tensor.blob.sha256 for tensor in wanted.weights if tensor.name == "large.5")
    )
    right = path.read_bytes()
    wrong = {"longer": right + b"x", "shorter": right[:-1]}.get(fault, right[:9000] + b"\0" + right[9001:])
    path.chmod(0o644)
    path.write_bytes(wrong)
    with pytest.raises(Corrupt):
        fetch(afar([place.backend], tier).blobs, wanted, tmp_path / "served")
    if fault != "changed after a resume":
        path.write_bytes(right)
    else:  # the second attempt finds ranges that are complete, and wrong as a whole
        with pytest.raises(Corrupt):
            fetch(afar([place.backend], tier).blobs, wanted, tmp_path / "served")
        path.write_bytes(right)
    result: list[int] = []
    fetch(afar([place.backend], ReadCache(tier.root)).blobs, wanted, tmp_path / "served", result.append)
    assert (tmp_path / "served" / WEIGHTS).read_bytes() == fetched_plainly(place, wanted, tmp_path)
    assert sum(result) == size_of(wanted)
