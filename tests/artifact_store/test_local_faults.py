"""A folder under errors of the operating system: one sentence, no partial file, and a successful retry."""

import ctypes
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from nxpipe.artifact_store.backends.files import copy_into, reserve
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.backends.protocol import CHUNK, Payload
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import StoreUnavailable
from tests.artifact_store.samples import contents, folder, manifest, put, tree


def refusing(code: int) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return refuse


def test_a_store_below_a_plain_file_is_one_sentence_for_every_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = folder(tmp_path / "file" / "store").store
    blob = Blob.of(b"abc")
    calls: list[Callable[[], object]] = [
        lambda: store.put_blob(b"abc"),
        lambda: store.put_stream([b"abc"]),
        lambda: store.read_blob(blob),
        lambda: store.find("0" * 64),
        lambda: store.list(),
        lambda: store.publish(manifest([Blob.of(data) for data in contents()])),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match=r"file/store.*Not a directory; move the file.*a retry is safe"):
            call()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which even root may not write")
def test_a_folder_that_nobody_may_write_in_is_one_sentence() -> None:
    with pytest.raises(StoreUnavailable, match="/proc/nxpipe"):
        folder(Path("/proc/nxpipe")).store.put_blob(b"abc")


def test_a_full_disk_leaves_nothing_behind_and_a_retry_succeeds(tmp_path: Path) -> None:
    """A limit on the size of a file stands in for the disk: the write itself fails, half-way through a blob."""
    store = folder(tmp_path / "store").store
    data = bytes(range(256)) * 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, hard))
    try:
        with pytest.raises(StoreUnavailable, match="File too large; free some space"):
            store.put_blob(data)
        with pytest.raises(StoreUnavailable, match="File too large; free some space"):
            store.put_stream([data[:1000], data[1000:]])
        assert tree(tmp_path) == set()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.read_blob(store.put_blob(data)) == data


@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EACCES, "writable for this user"),
        (errno.EROFS, "writable for this user"),
        (errno.EIO, "fix that"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_a_refusal_is_told_with_its_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, way_out: str
) -> None:
    store = folder(tmp_path).store
    with monkeypatch.context() as broken:
        broken.setattr(os, "link", refusing(code))
        with pytest.raises(StoreUnavailable, match=way_out) as caught:
            store.put_blob(b"abc")
    assert os.strerror(code) in str(caught.value)
    assert tree(tmp_path) == set()
    assert store.read_blob(store.put_blob(b"abc")) == b"abc"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_hard_links_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", refusing(code))
    with pytest.raises(StoreUnavailable, match="has no hard links"):
        folder(tmp_path).store.put_blob(b"abc")


def test_a_link_whose_answer_was_lost_counts_as_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS: the server makes the link, the answer is lost, and the client's repetition meets its own file."""
    really_link = os.link

    def link_and_forget(*args: Any, **named: Any) -> NoReturn:
        really_link(*args, **named)
        raise FileExistsError(errno.EEXIST, "File exists")

    backend = LocalFolder(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "link", link_and_forget)
        assert backend.create("ac/x", Payload.of(b"ours"), durable=True)
    assert not backend.create("ac/x", Payload.of(b"theirs"), durable=True)
    assert (tmp_path / "ac" / "x").read_bytes() == b"ours"


def test_nothing_is_published_when_the_disk_does_not_confirm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder(tmp_path).store
    ready = put(store)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refusing(errno.EIO))
        with pytest.raises(StoreUnavailable, match="flush"):
            store.publish(ready)
    assert store.find(ready.request_key) is None
    store.publish(ready)
    assert store.find(ready.request_key) is not None


@pytest.mark.parametrize("inside", [0, 1000], ids=["refused", "given up half-way"])
def test_what_the_kernel_does_not_copy_inside_is_copied_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: int
) -> None:
    def copy(source: int, target: int, size: int, at: int, to: int) -> int:
        if at >= inside:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return os.pwrite(target, os.pread(source, inside - at, at), to)

    monkeypatch.setattr(os, "copy_file_range", copy)
    (tmp_path / "source").write_bytes(data := os.urandom(3000))
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("wb") as target:
        copy_into(target.fileno(), source, 5)
    assert (tmp_path / "target").read_bytes() == bytes(5) + data


needs_fallocate = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "fallocate"), reason="needs fallocate of Linux")


@needs_fallocate
def test_bytes_that_are_to_be_received_have_their_blocks(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"kept")
        file.truncate(3 * CHUNK)
        file.flush()
        reserve(file.fileno(), 0, 2 * CHUNK)
        status = os.fstat(file.fileno())
    assert (tmp_path / "file").read_bytes() == b"kept" + bytes(3 * CHUNK - 4)
    assert 2 * CHUNK <= status.st_blocks * 512 < 3 * CHUNK


@needs_fallocate
def test_a_full_disk_is_reported_before_a_blob_is_received(tmp_path: Path) -> None:
    """A limit on the size of a file stands in for the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "file").open("wb") as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                reserve(file.fileno(), 0, 2 * CHUNK)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@needs_fallocate
@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM], ids=errno.errorcode.get)
def test_a_file_system_that_does_not_allocate_in_advance_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    class Lacking:
        def fallocate(self, *_: object) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Lacking())
    with (tmp_path / "file").open("wb") as file:
        reserve(file.fileno(), 0, CHUNK)
    assert (tmp_path / "file").stat().st_size == 0


def test_a_copy_to_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder(tmp_path / "store").store
    blob = store.put_blob(b"abc")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "copy").write_bytes(b"older")
    monkeypatch.setattr(os, "fsync", refusing(errno.ENOSPC))
    with pytest.raises(StoreUnavailable, match="free some space"):
        store.copy_blob_to(blob, tmp_path / "out" / "copy")
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == [b"older"]


def test_a_small_buffer_is_stored_as_it_was_when_it_was_given(tmp_path: Path) -> None:
    data = bytearray(b"before")
    payload = Payload.of(memoryview(data))
    data[:] = b"after!"
    assert LocalFolder(tmp_path).create("ac/x", payload)
    assert (tmp_path / "ac" / "x").read_bytes() == b"before"


def test_a_large_buffer_that_changes_while_it_is_stored_is_refused(tmp_path: Path) -> None:
    data = bytearray(CHUNK + 1)
    payload = Payload.of(memoryview(data))
    data[-1] = 1
    with pytest.raises(StoreUnavailable, match="store it again"):
        LocalFolder(tmp_path).create("ac/x", payload)
    assert tree(tmp_path) == set()
