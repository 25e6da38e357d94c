"""A store in a folder into which others may write, or that comes from a stranger: nothing is read, written or removed
outside of it, nothing hangs, and every refusal is one sentence."""

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.builds import Leases
from nxpipe.artifact_store.channel.change import Author, Requirements, promote
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, Denied
from nxpipe.artifact_store.fetch.folder import fetch
from nxpipe.artifact_store.layout import is_object
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, fsck, plan
from nxpipe.artifact_store.maintenance.reachability import Collectable
from nxpipe.pipeline.util.exit_codes import CORRUPT, OK, STORE
from tests.artifact_store.samples import tree
from tests.artifact_store.test_crashes import in_child
from tests.pipeline.command import Answer
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.saved_programs import write_onnx
from tests.pipeline.test_store_commands import MODEL, publish
from tests.security.others import NOBODY, Planted, as_root, fingerprint, give, long_ago

__all__ = ["nxpipe"]

attempt = pytest.mark.attempt


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder deep enough that `..` three times is still inside of the observed tree."""
    folder = tmp_path / "lab" / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def planted(here: Path) -> Planted:
    return Planted(here / "st", publish(here / "st").manifest)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "lab" / "victim"
    folder.mkdir(parents=True)
    for name in ("id_ed25519", "notes.txt"):
        (folder / name).write_text(f"mine: {name}")
    return folder


def is_one_sentence(answer: Answer, *codes: int) -> None:
    assert answer.code in codes, answer.err
    assert "Traceback" not in answer.err
    assert "internal error" not in answer.err
    assert not answer.code or answer.err.strip()


# What lies in tmp/ (finding 2)


def _name(planted: Planted) -> None:
    planted.removal(**{"..\\..\\..\\x.gone": "planted"})


def _name_with_folders(planted: Planted) -> None:
    planted.removal(**{"..\\..\\new\\folders\\x.gone": "planted"})


def _a_symlink(planted: Planted) -> None:
    folder = planted.removal()
    (folder / "..\\..\\link.gone").symlink_to("/etc/passwd")
    (folder / "ac\\link.gone").symlink_to("/etc/passwd")
    long_ago(folder)


def _names_in_the_store(planted: Planted) -> None:
    names = ("notes.gone", "ac\\..\\..\\y.gone", "neuron-artifacts\\..\\0123456789abcdef\\manifest.json.gone")
    planted.removal(**dict.fromkeys(names, "planted"))


PLANTED: dict[str, Callable[[Planted], None]] = {
    "a name that leads out": _name,
    "a name that makes folders": _name_with_folders,
    "a symlink": _a_symlink,
    "names of no object": _names_in_the_store,
}
COMMANDS = {
    "gc --dry-run": ("gc", "--dry-run"),
    "gc": ("gc",),
    "fsck": ("fsck",),
    "du": ("du",),
    "doctor": ("doctor",),
    "ls": ("ls",),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("plant", "command"),
    [
        pytest.param("a name that leads out", "gc --dry-run", marks=attempt("B500")),
        pytest.param("a name that leads out", "gc", marks=attempt("B501")),
        pytest.param("a name that makes folders", "gc --dry-run", marks=attempt("B502")),
        pytest.param("a symlink", "gc --dry-run", marks=attempt("B503")),
        pytest.param("a name that leads out", "fsck", marks=attempt("B504")),
        pytest.param("a name that leads out", "du", marks=attempt("B505")),
        pytest.param("a name that leads out", "doctor", marks=attempt("B506")),
        pytest.param("a name that leads out", "ls", marks=attempt("B507")),
        *((plant, "gc") for plant in PLANTED if plant != "a name that leads out"),
    ],
)
def test_a_name_in_tmp_becomes_no_path(
    nxpipe: InProcess, planted: Planted, tmp_path: Path, plant: str, command: str
) -> None:
    PLANTED[plant](planted)
    before = tree(tmp_path)
    is_one_sentence(nxpipe("store", *COMMANDS[command], "--store", "st"), OK.number)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("command", ["gc --dry-run", "gc"])
@attempt("B508")
def test_a_removal_that_is_a_link_is_no_removal(
    nxpipe: InProcess, planted: Planted, victim: Path, command: str
) -> None:
    (planted.root / "tmp" / "0123456789abcdef.removal").symlink_to(victim)
    long_ago(planted.root / "tmp" / "0123456789abcdef.removal")
    before = fingerprint(victim)
    is_one_sentence(nxpipe("store", *COMMANDS[command], "--store", "st"), OK.number)
    assert fingerprint(victim) == before
    assert "id_ed25519" not in {path.name for path in planted.root.rglob("*")}


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_removal_of_another_user_is_left_alone(nxpipe: InProcess, planted: Planted, mode: int) -> None:
    """Its file would become an object that its maker could write to at any time."""
    folder = planted.removal(**{f"ac\\{'0' * 64}.gone": "planted"})
    folder.chmod(mode)
    give(folder)
    before = tree(planted.root)
    is_one_sentence(nxpipe("store", "gc", "--store", "st"), OK.number)
    assert tree(planted.root) == before


def test_a_removal_of_ours_that_was_killed_is_put_back(nxpipe: InProcess, planted: Planted) -> None:
    data = planted.weight.read_bytes()
    folder = planted.removal()
    planted.weight.rename(folder / f"{planted.weight.relative_to(planted.root)}.gone".replace("/", "\\"))
    long_ago(folder)
    assert nxpipe("store", "gc", "--dry-run", "--store", "st").code == OK.number
    assert not planted.weight.exists()
    is_one_sentence(nxpipe("store", "gc", "--store", "st"), OK.number)
    assert planted.weight.read_bytes() == data
    assert not folder.exists()


HEX = "0" * 64
OBJECTS = {
    Collectable.RETIRED: f"retired/{HEX}",
    Collectable.LISTING: f"neuron-artifacts/acme-bert/{'0' * 16}/manifest.json",
    Collectable.SIGNATURE: f"sig/{HEX}/{HEX}",
    Collectable.EVIDENCE: f"evidence/{HEX}/{HEX}",
    Collectable.REPORT: f"reports/{HEX}/20260131T120000.000000Z.html",
    Collectable.PART: f"parts/{HEX}",
    Collectable.FAILURE: f"failures/{HEX}",
    Collectable.LEASE: f"leases/{HEX}/0000000001",
    Collectable.OUTCOME: f"runs/{HEX}/0000000000",
    Collectable.PIN: "pins/audit",
    Collectable.PROBE: "doctor-0123456789abcdef/first",
    Collectable.BLOB: f"cas/sha256/00/{HEX}",
}


@pytest.mark.parametrize("kind", Collectable, ids=lambda kind: kind.name)
def test_whatever_is_collected_can_be_put_back(kind: Collectable) -> None:
    assert kind.pattern.fullmatch(OBJECTS[kind])
    assert is_object(OBJECTS[kind])


@pytest.mark.parametrize(
    "path",
    ["../x", "ac/../../x", "neuron-artifacts/../0123456789abcdef/manifest.json", "tmp/x", "x", "", "/etc/x"],
)
def test_a_path_of_no_object_is_told(path: str) -> None:
    assert not is_object(path)


# That of `nxpipe release` is in tests/release/test_release.py.
DRY_RUNS: dict[str, tuple[str, ...]] = {
    "gc": ("store", "gc", "--dry-run", "--keep", "1", "--max-age", "1h"),
    "build": ("build", "--dry-run", "--model-id", "./m.onnx", "--axis", "batch=2", "--no-verify"),
    "init": ("init", "--dry-run", "--model-id", "acme/tiny-bert", "--task", "fill-mask"),
}


@pytest.mark.parametrize("command", DRY_RUNS)
@attempt("B500", "B508")
def test_a_dry_run_changes_nothing_at_all(nxpipe: InProcess, planted: Planted, here: Path, command: str) -> None:
    """Not a name, a mode, a byte or a time of the store, the working directory or the cache."""
    for number in range(3):
        publish(planted.root, note=str(number))
    planted.removal(**{f"ac\\{HEX}.gone": "x"})
    for path in planted.root.rglob("*"):
        long_ago(path)
    (here / "cache").mkdir()
    write_onnx(here / "m.onnx")
    if command != "init":
        (here / "nxpipe.toml").write_text('[project]\nname = "test"\n[store]\nurl = "file://st"\ncache = "cache"\n')
    before = fingerprint(here)
    is_one_sentence(nxpipe(*DRY_RUNS[command]), OK.number)
    assert fingerprint(here) == before


# Links below the root (finding 16)


@pytest.mark.parametrize("command", [("gc",), ("gc", "--keep", "1", "--max-age", "1h")], ids=["gc", "with rules"])
@pytest.mark.parametrize("name", ["cas", "cas/sha256", "ac", "channels"])
@attempt("B509")
def test_nothing_behind_a_link_in_a_store_is_collected(
    nxpipe: InProcess, here: Path, name: str, command: tuple[str, ...]
) -> None:
    publish(here / "real")
    orphan = open_store(str(here / "real")).put_blob(b"an orphan")
    (here / "real" / "channels").mkdir()
    for path in (here / "real").rglob("*"):
        long_ago(path)
    (here / "st" / name).parent.mkdir(parents=True)
    (here / "st" / name).symlink_to(here / "real" / name)
    before = fingerprint(here / "real")
    answer = nxpipe("store", *command, "--store", "st")
    is_one_sentence(answer, STORE.number)
    assert "is a symlink" in answer.err
    assert fingerprint(here / "real") == before
    assert orphan.sha256 in str(before)


@pytest.mark.parametrize("name", ["cas", "cas/sha256", "ac", "tmp", "neuron-artifacts"])
@attempt("B509")
def test_nothing_is_written_behind_a_link_in_a_store(here: Path, victim: Path, name: str) -> None:
    (here / "st" / name).parent.mkdir(parents=True)
    (here / "st" / name).symlink_to(victim)
    before = fingerprint(victim)
    with pytest.raises(Exception, match="is a symlink"):
        publish(here / "st")
    assert fingerprint(victim) == before


def test_the_root_itself_may_be_a_link(nxpipe: InProcess, planted: Planted, here: Path) -> None:
    (here / "current").symlink_to(planted.root)
    publish(here / "current", note="other")
    assert nxpipe("store", "fsck", "--store", "current").code == OK.number
    assert len(open_store("current").list()) == 2


@attempt("B510", "B511")
def test_a_blob_that_is_a_link_is_corrupt_whatever_it_leads_to(
    nxpipe: InProcess, planted: Planted, tmp_path: Path
) -> None:
    """Equal bytes today may be others tomorrow, and another user's to choose."""
    (tmp_path / "same").write_bytes(planted.weight.read_bytes())
    planted.in_place_of(planted.weight, lambda path: path.symlink_to(tmp_path / "same"))
    answer = nxpipe("store", "fetch", MODEL, "--to", "o", "--store", "st")
    is_one_sentence(answer, CORRUPT.number)
    assert "it is a symlink, not a file" in answer.err
    assert nxpipe("store", "fsck", "--store", "st").code == CORRUPT.number


# What is no file


def _socket(path: Path) -> None:
    bound = Path(tempfile.mkdtemp()) / "s"
    socket.socket(socket.AF_UNIX).bind(str(bound))
    bound.rename(path) if bound.stat().st_dev == path.parent.stat().st_dev else os.mkfifo(path)


def _link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_suffix(".fifo"))
    path.symlink_to(path.with_suffix(".fifo"))


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to a FIFO": _link_to_a_fifo,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("command", [("fetch", MODEL, "--to", "o"), ("fsck",)], ids=["fetch", "fsck"])
@pytest.mark.parametrize("what", NO_FILES)
@attempt("B512", "B515")
def test_a_blob_that_is_no_file_is_corrupt_and_nobody_waits_for_it(
    nxpipe: InProcess, planted: Planted, here: Path, what: str, command: tuple[str, ...]
) -> None:
    planted.in_place_of(planted.weight, NO_FILES[what])
    code = STORE if what == "a folder" else CORRUPT  # which no repair can replace: move it away
    is_one_sentence(nxpipe("store", *command, "--store", "st"), code.number)
    assert not (here / "o" / "manifest.json").exists()


@pytest.mark.parametrize("command", [("ls",), ("gc",), ("gc", "--dry-run")], ids=" ".join)
@pytest.mark.parametrize("what", [what for what in NO_FILES if what != "a folder"])
@attempt("B513", "B514")
def test_a_record_that_is_no_file_is_corrupt_and_nothing_is_collected(
    nxpipe: InProcess, planted: Planted, what: str, command: tuple[str, ...]
) -> None:
    """Passed over, it would hold nothing any more, and its artifact would be collected."""
    for path in planted.root.rglob("*"):
        long_ago(path)
    planted.in_place_of(planted.record, NO_FILES[what])
    before = tree(planted.root)
    is_one_sentence(nxpipe("store", *command, "--store", "st"), CORRUPT.number)
    assert tree(planted.root) == before


@pytest.mark.parametrize("what", [what for what in NO_FILES if what != "a folder"])
def test_publishing_again_repairs_what_is_no_file(planted: Planted, what: str) -> None:
    data = planted.weight.read_bytes()
    planted.in_place_of(planted.weight, NO_FILES[what])
    publish(planted.root)
    assert planted.weight.read_bytes() == data
    assert not planted.weight.is_symlink()


@attempt("B516")
def test_a_flipped_bit_in_any_object_is_noticed(planted: Planted, here: Path) -> None:
    unnoticed = []
    needed = [path for path in planted.root.rglob("*") if path.is_file() and "neuron-artifacts" not in path.parts]
    for number, path in enumerate(needed):
        before, data = path.stat(), path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 4]) + data[1:])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with suppress(Corrupt):  # noticed, by the first who read it
            fetch(planted.store.blobs, planted.store.resolve(MODEL).manifest, here / f"o{number}")
            if fsck(planted.store).is_sound:
                unnoticed.append(path.name)
        path.write_bytes(data)
    assert not unnoticed


# No room, and no right


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    mounted: list[Path] = []

    def mount(kilobytes: int) -> Path:
        folder = tmp_path / f"disk{kilobytes}"
        folder.mkdir()
        if os.system(f"mount -t tmpfs -o size={kilobytes}k none {folder} 2>/dev/null"):
            pytest.skip("only root, and not in every container, may mount a file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        os.system(f"umount -l {folder}")


def _fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@attempt("B522", "B523", "B524")
def test_a_full_disk_is_one_sentence_and_room_makes_it_good(
    nxpipe: InProcess, planted: Planted, here: Path, small_disk: Callable[[int], Path]
) -> None:
    big = planted.store.put_blob(os.urandom(200_000))
    made = planted.manifest.model_copy(update={"files": (planted.manifest.files[0].model_copy(update={"blob": big}),)})
    made = made.model_copy(update={"key_inputs": planted.store.put_blob(b'{"other":1}')})
    one = planted.store.publish(made)
    assert nxpipe("store", "export", one.request_key, "--to", "bundle.tar", "--store", "st").code == OK.number
    for kilobytes in (60, 140, 220, 400):
        disk = small_disk(kilobytes)
        answer = nxpipe("store", "import", "bundle.tar", "--store", str(disk / "st"))
        is_one_sentence(answer, OK.number, STORE.number)
        listed = open_store(str(disk / "st")).list()
        assert bool(listed) == (answer.code == OK.number)
        assert not listed or fsck(open_store(str(disk / "st"))).is_sound
    full = small_disk(100)
    answer = nxpipe("store", "fetch", one.request_key, "--to", str(full / "o"), "--store", "st")
    is_one_sentence(answer, STORE.number)
    assert not (full / "o" / "manifest.json").exists()
    # B524: a full disk under a store that is whole
    disk = small_disk(900)
    shutil.copytree(planted.root, disk / "st", dirs_exist_ok=True)
    with pytest.raises(OSError, match="No space left"):
        _fill(disk / "filler")
    is_one_sentence(nxpipe("store", "pin", one.request_key, "--as", "a", "--store", str(disk / "st")), STORE.number)
    is_one_sentence(nxpipe("store", "gc", "--dry-run", "--store", str(disk / "st")), OK.number)
    (disk / "filler").unlink()
    is_one_sentence(nxpipe("store", "gc", "--store", str(disk / "st")), OK.number)
    assert fsck(open_store(str(disk / "st"))).is_sound


@as_root
@attempt("B525")
def test_a_store_that_may_only_be_read_is_read_by_another_user_and_not_written() -> None:
    """In a folder that everybody may enter; in a child, since a user cannot be taken back."""
    shared = Path(tempfile.mkdtemp(prefix="nxpipe-shared-"))
    try:
        shared.chmod(0o755)
        (shared / "home").mkdir()
        give(shared / "home")
        one = publish(shared / "st")
        store = open_store(str(shared / "st"))

        def read_and_fail_to_write() -> None:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            assert [entry.request_key for entry in store.list()] == [one.request_key]
            fetch(store.blobs, one.manifest, shared / "home" / "o")
            assert fsck(store).is_sound
            orphan = plan(store, Rules(max_age=-10.0), store.backend.now() + 3 * 86400.0)
            for write in (
                lambda: store.put_blob(b"more"),
                lambda: promote(store, "prod", [one], Author("eve", "why"), Requirements()),
                lambda: apply_plan(store, orphan),
            ):
                try:
                    write()
                except Denied:
                    continue
                raise AssertionError("a store that may only be read was written")

        before = fingerprint(shared / "st")
        assert in_child(read_and_fail_to_write) == 0
        assert fingerprint(shared / "st") == before
    finally:
        shutil.rmtree(shared)


def test_many_threads_read_and_write_one_folder(here: Path) -> None:
    """Handles are opened and closed by each call, none is another's."""
    backend = LocalFolder(here / "st")
    store = open_store(str(here / "st"))
    wrong: list[bytes] = []

    def work(name: int) -> None:
        for number in range(50):
            data = f"{name} {number}".encode()
            if store.read_blob(store.put_blob(data)) != data or backend.stat(f"ac/{name}") is not None:
                wrong.append(data)

    threads = [threading.Thread(target=partial(work, name)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.read_blob(Blob.of(b"7 49")) == b"7 49"


def test_a_lease_of_a_wrong_clock_keeps_nobody_waiting(planted: Planted) -> None:
    """Taken in 2100, or until then: nobody knows how long that really is."""
    key, leases = "0" * 64, Leases(planted.store.backend)
    assert leases.take(key, "ann") is not None
    assert leases.take(key, "bob") is None
    assert Leases(planted.store.backend, seconds=9e9).take("1" * 64, "ann") is not None
    assert leases.current("1" * 64) is None
    assert leases.take("1" * 64, "bob") is not None
