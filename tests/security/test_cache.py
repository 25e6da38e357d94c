"""A cache into which other users may write, and a folder to which an artifact is fetched: what they put there is not
believed, not followed and not written to."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import StoreError, StoreUnavailable
from nxpipe.artifact_store.fetch import folder as folders
from nxpipe.artifact_store.fetch import ranges
from nxpipe.artifact_store.fetch.folder import WEIGHTS, fetch
from nxpipe.artifact_store.fetch.local_files import date, stamp
from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
from nxpipe.artifact_store.fetch.read_cache import ReadCache
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.url import open_offline
from tests.artifact_store.afar import afar, counting, first_generation
from tests.artifact_store.samples import Folder, contents, folder, put, tree
from tests.artifact_store.test_transfer_folders import weighty
from tests.artifact_store.test_transfer_whole import model
from tests.security.others import as_root, fingerprint, give

attempt = pytest.mark.attempt


@pytest.fixture
def place(tmp_path: Path) -> Folder:
    return folder(tmp_path / "store")


@pytest.fixture
def tier(tmp_path: Path) -> ReadCache:
    return ReadCache(tmp_path / "cache")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A private file of ours."""
    path = tmp_path / "victim"
    path.write_text("mine")
    path.chmod(0o600)
    return path


def stamp_path(tier: ReadCache, digest: str) -> Path:
    return tier.root / "stamps" / digest[:2] / digest


def vouch(tier: ReadCache, digest: str, hashed: str, path: Path) -> None:
    """Let the stamp of `hashed` apply to the file that exists now."""
    date(path)
    stamped = stamp_path(tier, digest)
    text = stamped.read_text()
    assert hashed in text
    stamped.write_text(text.replace(hashed, stamp(path.stat())))


# Forged content (B600)


@as_root
@pytest.mark.parametrize("whose", ["both", "the blob", "the stamp"])
@attempt("B600")
def test_a_forged_blob_with_a_forged_stamp_is_hashed(place: Folder, tier: ReadCache, whose: str) -> None:
    data = contents()[1]
    blob = place.store.put_blob(data)
    store = afar([place.backend], tier)
    assert store.read_blob(blob) == data
    path = tier.root / blob_path(blob)
    hashed = stamp(path.stat())
    path.write_bytes(b"?" * len(data))
    if whose != "the stamp":
        give(path)
    vouch(tier, blob.sha256, hashed, path)
    if whose != "the blob":
        give(stamp_path(tier, blob.sha256))
    assert store.read_blob(blob) == data


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
@attempt("B600", "B603")
def test_a_blob_that_others_may_write_to_is_hashed_each_time(place: Folder, tier: ReadCache, mode: int) -> None:
    data = contents()[1]
    blob = place.store.put_blob(data)
    backend = counting(place.backend)
    store = afar([backend], tier)
    store.read_blob(blob)
    path = tier.root / blob_path(blob)
    hashed = stamp(path.stat())
    path.chmod(mode)
    assert store.read_blob(blob) == data
    assert len(backend.reads) == 1  # it is right, and was taken
    path.write_bytes(b"?" * len(data))
    vouch(tier, blob.sha256, hashed, path)
    assert store.read_blob(blob) == data
    assert len(backend.reads) == 2


def test_a_stamp_of_ours_counts_under_its_own_name_only(place: Folder, tier: ReadCache) -> None:
    """Whoever may rename in a folder of the cache may give our file and our stamp another digest."""
    store = afar([place.backend], tier)
    ours, wanted = (place.store.put_blob(data) for data in (b"one content", b"two content"))
    for blob in (ours, wanted):
        store.read_blob(blob)
    hashed = stamp((tier.root / blob_path(ours)).stat())
    (tier.root / blob_path(ours)).replace(tier.root / blob_path(wanted))
    vouch(tier, ours.sha256, hashed, tier.root / blob_path(wanted))
    stamp_path(tier, ours.sha256).replace(stamp_path(tier, wanted.sha256))
    assert store.read_blob(wanted) == b"two content"


@as_root
@attempt("B600")
def test_what_another_user_may_change_is_read_from_a_copy(place: Folder, tier: ReadCache) -> None:
    """Between the hash and the use its owner may write to it."""
    data = contents()[1]
    blob = place.store.put_blob(data)
    store = afar([place.backend], tier)
    store.read_blob(blob)
    path = give(tier.root / blob_path(blob))
    opened = tier.open(blob)
    assert opened is not None
    path.write_bytes(b"?" * len(data))
    with opened:
        assert opened.read() == data


@as_root
@attempt("B600")
def test_no_folder_gets_a_link_to_a_file_of_another_user(place: Folder, tier: ReadCache, tmp_path: Path) -> None:
    wanted = model(place, 1, 2, 3)
    backend = counting(place.backend)
    store = afar([backend], tier)
    fetch(store.blobs, wanted, tmp_path / "one")
    (held,) = (tier.root / "whole").glob("*/file")
    right = held.read_bytes()
    give(held)
    backend.reads.clear()
    fetch(store.blobs, wanted, tmp_path / "two")
    assert (tmp_path / "two" / WEIGHTS).stat().st_uid == os.geteuid()
    assert (tmp_path / "two" / WEIGHTS).stat().st_ino != held.stat().st_ino or held.stat().st_uid == os.geteuid()
    assert not backend.reads  # its bytes are right, and were taken
    held.write_bytes(b"?" * len(right))
    give(held)
    fetch(store.blobs, wanted, tmp_path / "three")
    assert (tmp_path / "three" / WEIGHTS).read_bytes() == right


@as_root
def test_offline_what_another_user_says_a_channel_serves_is_not_believed(place: Folder, tmp_path: Path) -> None:
    url, cache = "s3://a-bucket/p", tmp_path / "cache"
    tip = first_generation("prod", [Served.of(place.store.publish(put(place.store)))])
    OfflineIndex(cache, url).keep_channel(tip)
    assert ChannelLog(open_offline(url, cache).backend, "prod").tip() == tip
    seen = [path for path in (cache / "seen").rglob("*") if path.is_file()]
    assert len(seen) == 2  # the generation and the head
    for path in seen:
        give(path)
    assert ChannelLog(open_offline(url, cache).backend, "prod").tip() is None


# Planted names (B601)


@pytest.fixture
def in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "RANGE", 1000)
    monkeypatch.setattr(ranges, "IN_RANGES_ABOVE", 1000)


def _symlink(part: Path, victim: Path) -> None:
    part.symlink_to(victim)


def _hard_link(part: Path, victim: Path) -> None:
    part.hardlink_to(victim)


def _fifo(part: Path, victim: Path) -> None:
    os.mkfifo(part)


def _folder(part: Path, victim: Path) -> None:
    part.mkdir()


def _writable(part: Path, victim: Path) -> None:
    part.write_bytes(b"?" * 50)
    part.chmod(0o666)


def _of_another_user(part: Path, victim: Path) -> None:
    part.write_bytes(b"?" * 50)
    if os.geteuid() == 0:
        give(part)


PARTS: dict[str, Callable[[Path, Path], None]] = {
    "a symlink": _symlink,
    "a hard link": _hard_link,
    "a FIFO": _fifo,
    "a folder": _folder,
    "a file that others may write to": _writable,
    "a file of another user": _of_another_user,
}


@pytest.mark.parametrize("what", PARTS)
@attempt("B601")
def test_a_planted_partial_file_is_not_written_to(
    place: Folder, tier: ReadCache, tmp_path: Path, victim: Path, in_ranges: None, what: str
) -> None:
    data = os.urandom(5000)
    blob = place.store.put_blob(data)
    (tier.root / "partial").mkdir(parents=True)
    planted = tier.root / "partial" / f".{blob.sha256}.nobody.abcd.part"
    PARTS[what](planted, victim)
    before = fingerprint(victim)
    afar([place.backend], tier).blobs.copy_to(blob, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    assert fingerprint(victim) == before
    if what in ("a file that others may write to", "a file of another user") and planted.exists():
        assert planted.read_bytes() == b"?" * 50
    assert (tier.root / blob_path(blob)).stat().st_uid == os.geteuid()
    assert not (tier.root / blob_path(blob)).stat().st_mode & 0o022


@pytest.mark.parametrize("what", PARTS)
@attempt("B601")
def test_a_partial_file_of_weights_that_was_planted_is_not_written_to(
    place: Folder, tier: ReadCache, tmp_path: Path, victim: Path, what: str
) -> None:
    wanted = model(place, 1, 2, 3)
    fetch(afar([place.backend], tier).blobs, wanted, tmp_path / "one")
    (content,) = (path.name for path in (tier.root / "whole").iterdir())
    shutil.rmtree(tier.root)
    (tier.root / "partial").mkdir(parents=True)
    PARTS[what](tier.root / "partial" / f".{content}.nobody.abcd.part", victim)
    before = fingerprint(victim)
    fetch(afar([place.backend], ReadCache(tier.root)).blobs, wanted, tmp_path / "two")
    assert fingerprint(victim) == before
    assert (tmp_path / "two" / WEIGHTS).read_bytes() == (tmp_path / "one" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("name", ["cas", "cas/sha256", "stamps", "partial", "whole", "seen"])
@attempt("B601")
def test_no_link_in_a_cache_is_followed(place: Folder, tier: ReadCache, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (outside / "ab").mkdir(parents=True)
    for entry in ("file", "pieces.json", f".{'0' * 64}.nobody.abcd.part"):
        (outside / "ab" / entry).write_text("mine")
    wanted = weighty(place.store)
    before = fingerprint(outside)
    (tier.root / name).parent.mkdir(parents=True, exist_ok=True)
    (tier.root / name).symlink_to(outside)
    small = ReadCache(tier.root, limit=1)  # what is over it is thrown out, at once
    try:
        fetch(afar([place.backend], small).blobs, wanted, tmp_path / "served")
        OfflineIndex(tier.root, "s3://b/p").keep(place.store.publish(wanted).record)
    except StoreUnavailable as refused:
        if "is a symlink" not in str(refused):
            raise
    assert fingerprint(outside) == before


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["a FIFO", "a link"])
@pytest.mark.parametrize("where", ["blob", "stamp", "whole", "pieces"])
@attempt("B512", "B601")
def test_what_is_no_file_in_a_cache_is_passed_over_and_nobody_waits(
    place: Folder, tier: ReadCache, tmp_path: Path, where: str, plant: Callable[[Path], object]
) -> None:
    wanted = model(place, 1, 2)
    fetch(afar([place.backend], tier).blobs, wanted, tmp_path / "one")
    blob = wanted.executables[0].blob
    (held,) = (tier.root / "whole").iterdir()
    path = {
        "blob": tier.root / blob_path(blob),
        "stamp": stamp_path(tier, blob.sha256),
        "whole": held / "file",
        "pieces": held / "pieces.json",
    }[where]
    path.unlink()
    plant(path)
    fetch(afar([place.backend], ReadCache(tier.root)).blobs, wanted, tmp_path / "two")
    assert (tmp_path / "two" / WEIGHTS).read_bytes() == (tmp_path / "one" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("notes", ["[" * 100_000, '{"x": 1e400}', f'{{"{"0" * 64}": {10**40}}}', '{"x": -1}', "[1]"])
def test_notes_of_pieces_that_make_no_sense_say_nothing(
    place: Folder, tier: ReadCache, tmp_path: Path, notes: str
) -> None:
    fetch(afar([place.backend], tier).blobs, model(place, 1, 2), tmp_path / "one")
    (pieces,) = (tier.root / "whole").glob("*/pieces.json")
    blob = model(place, 3, 2, request=2).weights[0].blob
    pieces.write_text(notes.replace("0" * 64, blob.sha256))
    other = model(place, 3, 2, request=2)
    fetch(afar([place.backend], ReadCache(tier.root)).blobs, other, tmp_path / "two")
    fetch(place.store.blobs, other, tmp_path / "plain")
    assert (tmp_path / "two" / WEIGHTS).read_bytes() == (tmp_path / "plain" / WEIGHTS).read_bytes()


# Modes


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077], ids=oct)
@attempt("B602", "B603")
def test_a_cache_that_we_make_is_ours_alone_whatever_the_umask(
    place: Folder, tier: ReadCache, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        wanted = model(place, 1, 2)
        fetch(afar([place.backend], tier).blobs, wanted, tmp_path / "served")
        OfflineIndex(tier.root, "s3://b/p").keep(place.store.publish(wanted).record)
    finally:
        os.umask(before)
    assert stat.S_IMODE(tier.root.stat().st_mode) == 0o700
    files = [path for root in (tier.root, tmp_path / "served") for path in root.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert not [path for path in files if path.stat().st_mode & 0o022]


def test_the_mode_of_a_cache_that_is_there_is_left_to_those_who_made_it(place: Folder, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    afar([place.backend], ReadCache(tmp_path / "cache")).read_blob(place.store.put_blob(b"bytes"))
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o1777


# Fetched folders


def _overwrite(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def _overwrite_and_put_the_time_back(path: Path) -> None:
    before = path.stat()
    _overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("damage", "again"),
    [
        pytest.param(_overwrite, "elsewhere", marks=attempt("B604")),
        pytest.param(_overwrite_and_put_the_time_back, "elsewhere", marks=attempt("B605")),
        pytest.param(_overwrite_and_put_the_time_back, "there", marks=attempt("B606")),
    ],
)
def test_a_fetched_file_that_was_written_to_spoils_no_fetch(
    place: Folder, tier: ReadCache, tmp_path: Path, damage: Callable[[Path], None], again: str
) -> None:
    wanted = model(place, 1, 2, 3)
    store = afar([place.backend], tier)
    fetch(store.blobs, wanted, tmp_path / "there")
    right = (tmp_path / "there" / WEIGHTS).read_bytes()
    for path in tree(tmp_path / "there"):
        if path not in (".nxpipe", "manifest.json"):
            damage(tmp_path / "there" / path)
    fetch(store.blobs, wanted, tmp_path / again)
    assert (tmp_path / again / WEIGHTS).read_bytes() == right
    for file in wanted.files:
        assert Blob.of((tmp_path / again / "files" / file.path).read_bytes()) == file.blob


@as_root
@attempt("B606")
def test_notes_of_another_user_in_a_fetched_folder_are_not_believed(place: Folder, tmp_path: Path) -> None:
    wanted, root = model(place, 1, 2), tmp_path / "served"
    fetch(place.store.blobs, wanted, root)
    right = (root / WEIGHTS).read_bytes()
    for whose in ("the file", "the notes"):
        (root / WEIGHTS).write_bytes(b"?" * len(right))
        if whose == "the file":
            give(root / WEIGHTS)
        date(root / WEIGHTS)
        notes = json.loads((root / ".nxpipe").read_text())
        notes["files"][WEIGHTS]["stamp"] = stamp((root / WEIGHTS).stat())
        (root / ".nxpipe").write_text(json.dumps(notes))
        if whose == "the notes":
            give(root / ".nxpipe")
        fetch(place.store.blobs, wanted, root)
        assert (root / WEIGHTS).read_bytes() == right


@pytest.mark.parametrize("name", ["executables", "files", "files/tokenizer"])
def test_a_link_in_a_fetched_folder_is_neither_read_nor_written_through(
    place: Folder, tmp_path: Path, name: str
) -> None:
    wanted, root, outside = weighty(place.store), tmp_path / "served", tmp_path / "outside"
    fetch(place.store.blobs, wanted, root)
    shutil.move(root / name, outside)
    (root / name).symlink_to(outside)
    before = fingerprint(outside)
    with pytest.raises(StoreError, match="a symlink"):
        fetch(place.store.blobs, wanted, root)
    assert fingerprint(outside) == before


@pytest.mark.parametrize("name", [".nxpipe", "manifest.json", WEIGHTS, "files/tokenizer/config.json"])
@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["a FIFO", "a link"])
@attempt("B512")
def test_what_is_no_file_in_a_fetched_folder_is_replaced(
    place: Folder, tmp_path: Path, name: str, plant: Callable[[Path], object]
) -> None:
    wanted, root = weighty(place.store), tmp_path / "served"
    fetch(place.store.blobs, wanted, root)
    (root / name).unlink()
    plant(root / name)
    fetch(place.store.blobs, wanted, root)
    assert not (root / name).is_symlink()
    assert (root / name).is_file()
    fetch(place.store.blobs, wanted, tmp_path / "other")
    for path in tree(root) - {".nxpipe"}:
        assert (root / path).read_bytes() == (tmp_path / "other" / path).read_bytes()


def test_the_names_of_half_written_files_cannot_be_foreseen(
    place: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is made there is made with O_EXCL, and has 64 random bits in its name."""
    seen: list[tuple[str, int]] = []
    really = os.open

    def watch(path: str, flags: int, *arguments: int, **named: int) -> int:
        if flags & os.O_CREAT:
            seen.append((str(path), flags))
        return really(path, flags, *arguments, **named)

    monkeypatch.setattr(os, "open", watch)
    for name in ("one", "two"):
        fetch(afar([place.backend], ReadCache(tmp_path / f"cache-{name}")).blobs, weighty(place.store), tmp_path / name)
    assert len(seen) > 10
    assert len({path for path, _ in seen}) == len(seen)
    assert all(flags & os.O_EXCL and flags & os.O_NOFOLLOW for _, flags in seen)
    assert folders.MANIFEST not in {path for path, _ in seen}


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
place = LocalFolder(root / "store")
wanted = Store(place).find(key).manifest
print("begin", flush=True)
fetch(MirroredBlobs(place, Sources([place]), ReadCache(root / "cache")), wanted, root / "served")
"""


def _killed_fetches(place: Folder, wanted: Manifest, root: Path, times: int) -> None:
    chance = Random(1)
    for _ in range(times):
        command = [sys.executable, "-c", _FETCH, str(root), wanted.request_key]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stdout.readline()
            time.sleep(chance.uniform(0, 0.03))
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("times", [4, pytest.param(40, marks=pytest.mark.slow)])
@attempt("B526")
def test_a_fetch_that_is_killed_at_any_moment_is_finished_by_the_next(
    place: Folder, tier: ReadCache, tmp_path: Path, times: int
) -> None:
    wanted = model(place, *range(30))
    _killed_fetches(place, wanted, tmp_path, times)
    if (tmp_path / "served" / "manifest.json").exists():
        assert fetch(place.store.blobs, wanted, tmp_path / "served").bytes_written == 0
    fetch(afar([place.backend], tier).blobs, wanted, tmp_path / "served")
    fetch(place.store.blobs, wanted, tmp_path / "plain")
    for path in tree(tmp_path / "plain") - {".nxpipe"}:
        assert (tmp_path / "served" / path).read_bytes() == (tmp_path / "plain" / path).read_bytes()
