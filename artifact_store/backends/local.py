"""Local backend: a store in a folder, safe for concurrent processes without a lock; probes of its file system."""

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from nxpipe.artifact_store.backends.files import chunks_of, flush_to_disk, new_file, os_errors, scratch, write_at
from nxpipe.artifact_store.backends.no_symlinks import NotAFile, SafeFolder
from nxpipe.artifact_store.backends.protocol import (
    Clock,
    ListedObject,
    Payload,
    Probe,
    Sent,
    Stat,
    Violated,
    ignore_progress,
    require,
)
from nxpipe.artifact_store.errors import Changed, Corrupt, Denied, StoreUnavailable
from nxpipe.artifact_store.layout import SCRATCH, is_object

_ENOUGH: Final = 1024**3  # bytes
_LONGEST_NAME: Final = 255


def local_probes(root: Path, folder: str) -> Iterator[Probe]:
    """Probes of the file system, run in a folder of a store."""
    probes = _Probes(root / folder)
    for name, why, run, vital in (
        ("a hard link refuses a taken name", "creation is atomic by it, without locks", probes.links, True),
        (
            "a rename replaces a file in one piece",
            "readers see either the old bytes or the new ones",
            probes.renames,
            True,
        ),
        (
            "files and folders can be flushed to the disk",
            "published objects survive a power loss",
            probes.flushes,
            True,
        ),
        ("file times are fine", "a changed file is detected by its time and inode", probes.times, False),
        ("names of 255 bytes are taken", "listings include the model's name", probes.names, False),
        ("there is free space", "publishing fails on a full disk", probes.space, False),
    ):
        yield Probe(name, why, _with_store_errors(root / folder, run), vital)


def _with_store_errors(folder: Path, run: Callable[[], str | None]) -> Callable[[], str | None]:
    """The probe, with unexpected OSErrors turned into errors of the store."""

    def experiment() -> str | None:
        with os_errors(f"write {folder}"):
            return run()

    return experiment


class _Probes:
    """The probes of a local file system. Each raises Violated, or returns a remark or None."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def links(self) -> None:
        first, second = self._file("first", b"first"), self._file("second", b"second")
        name = self._folder / "linked"
        try:
            name.hardlink_to(first)
        except OSError as error:
            raise Violated(f"a link to a free name fails: {error.strerror}") from error
        require(name.stat().st_nlink == 2, "a linked file has a link count other than 2")
        try:
            name.hardlink_to(second)
        except FileExistsError:
            require(name.read_bytes() == b"first", "a refused link changed the file")
            return
        raise Violated("a link replaced an existing file")

    def renames(self) -> None:
        old, new = self._file("old", b"old bytes"), self._file("new", b"new bytes")
        with old.open("rb", buffering=0) as reader:
            content = reader.read(4)
            new.replace(old)
            content += reader.read()
        require(content == b"old bytes", f"a reader of the old file got {content!r}")
        require(old.read_bytes() == b"new bytes", "the file has the old bytes after the rename")

    def flushes(self) -> None:
        file = self._file("flushed", b"bytes")
        try:
            flush_to_disk(file)
            flush_to_disk(self._folder)
        except OSError as error:
            raise Violated(f"fsync fails: {error.strerror}") from error

    def times(self) -> str:
        file = self._file("time", b"")
        os.utime(file, ns=(1_800_000_000_123_456_789,) * 2)
        kept = file.stat().st_mtime_ns
        require(
            abs(kept - 1_800_000_000_123_456_789) < 1_000_000,
            "the resolution of file times is coarser than a millisecond",
        )
        return "nanoseconds" if kept % 1000 else "microseconds or less"

    def names(self) -> None:
        try:
            self._file("n" * _LONGEST_NAME, b"").unlink()
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise Violated(f"{error.strerror}; use shorter model ids in this store") from error

    def space(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        require(free >= _ENOUGH, f"{free} bytes are free")
        return f"{free} bytes are free"

    def _file(self, name: str, content: bytes) -> Path:
        path = self._folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


T = TypeVar("T")
R = TypeVar("R")

_NO_HARD_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# Suffix of a file that is being removed, named by its path with backslashes, which no path of a store contains.
_GONE: Final = ".gone"
_REMOVAL: Final = re.compile(r"[0-9a-f]{16}\.removal")
_ABANDONED: Final = re.compile(r"\..+\.part")
_MANY: Final = 64  # files to flush
_FLUSHED_AT_ONCE: Final = 8
_UNDER_WAY: Final = 60.0  # seconds after which a removal counts as interrupted
_NO_OBJECT: Final = "remove that object, then repeat the operation that wrote it"


class LocalFolder:
    """A store in a folder. An object is created by hard-linking a finished file, which fails if the name exists."""

    lookup_threshold = 0  # a look-up is cheap

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = SafeFolder(root)
        self._scratch = root / SCRATCH
        self.url = f"file://{root}"
        self._clock = Clock(self._time_of_a_new_file)

    @property
    def scratch_folder(self) -> Path:
        folder = self._root / SCRATCH
        if folder.is_symlink():
            raise StoreUnavailable(f"cannot write {folder}: it is a symlink; put a real folder in its place")
        return folder

    def hashed(self, data: bytes | memoryview | Path) -> Payload:
        return Payload.of(data)

    def create(self, path: str, payload: Payload, *, durable: bool = False, sent: Sent = ignore_progress) -> bool:
        with self._as_file(payload) as source, os_errors(f"write {self._file(path)}"):
            if durable:
                self._files.flush(source)
            created = self._link(source, path)
            if durable:
                self._flush_folders([path])
        sent(payload.size)
        return created

    def replace(self, path: str, payload: Payload, *, sent: Sent = ignore_progress) -> None:
        with self._as_file(payload) as source, os_errors(f"write {self._file(path)}"):
            self._files.flush(source)
            self._files.rename(source, path)
            self._flush_folders([path])
        sent(payload.size)

    def read(
        self, path: str, start: int = 0, stop: int | None = None, *, tag: str | None = None
    ) -> Iterator[bytes] | None:
        target = self._file(path)
        with os_errors(f"read {target}"):
            try:
                file = self._files.reader(path)
            except FileNotFoundError:
                return None
            except NotAFile as kind:
                raise Corrupt(f"{self.url}/{path}", f"it is {kind}, not a file", _NO_OBJECT) from kind
            status = os.fstat(file.fileno())
            if tag is not None and _tag(status) != tag:
                file.close()
                raise Changed(f"{target} was replaced while it was read; read it again")
            if not self._counts(status):
                file.close()
                return None
            file.seek(start)
            return _readable(target, chunks_of(file, None if stop is None else stop - start))

    def stat(self, path: str) -> Stat | None:
        """None also if the entry is not a regular file; a repair replaces it."""
        status = self._status(path)
        if status is None or not stat.S_ISREG(status.st_mode) or not self._counts(status):
            return None
        return Stat(status.st_size, None, _tag(status), status.st_mtime)

    def has_just_proved(self, path: str, sha256: str, size: int) -> bool:
        return False

    def paths(self, prefix: str) -> Sequence[str]:
        with os_errors(f"list {self._file(prefix)}"):
            try:
                return [prefix + entry.name for entry in self._files.list(prefix) if entry.is_file]
            except FileNotFoundError:
                return []

    def walk(self, prefix: str) -> Iterator[ListedObject]:
        """Every object below a prefix. Entries that are not files are listed too; reading one raises `Corrupt`.

        A symlink to a folder makes the listing incomplete: it raises StoreUnavailable at the end.
        """
        with os_errors(f"list {self._file(prefix)}"):
            try:
                listed = sorted(self._files.list(prefix), key=lambda entry: entry.name + "/" * entry.is_folder)
            except FileNotFoundError:
                return
        failure: StoreUnavailable | None = None
        for entry in listed:
            path = prefix + entry.name
            if entry.links_to_folder:
                failure = failure or StoreUnavailable(
                    f"cannot list {self._file(path)}: it is a symlink, which is not followed; put a real folder in its "
                    "place"
                )
            elif not entry.is_folder:
                yield ListedObject(path, entry.status.st_size, _tag(entry.status), entry.status.st_mtime)
            elif path != SCRATCH:
                try:
                    yield from self.walk(f"{path}/")
                except StoreUnavailable as error:
                    failure = failure or error
        if failure:  # raised after everything readable is listed
            raise failure

    def touch(self, path: str) -> bool:
        with os_errors(f"write {self._file(path)}"):
            try:
                self._files.touch(path)
            except FileNotFoundError:
                return False
        return True

    def remove(self, item: ListedObject) -> bool:
        """Remove this version. The file is renamed before its tag is compared, since another process may touch it."""
        with os_errors(f"remove {self._file(item.path)}"), self._removal_folder() as folder:
            renamed = f"{folder}/{item.path.replace('/', chr(92))}{_GONE}"
            try:
                self._files.rename(item.path, renamed)
            except FileNotFoundError:
                return False
            same = _tag(self._files.status(renamed)) == item.tag
            if not same:
                self._link(renamed, item.path)
            self._files.remove(renamed)
        return same

    def abandoned(self, older_than: float) -> Iterator[ListedObject]:
        with os_errors(f"list {self._file(SCRATCH)}"):
            try:
                listed = sorted(self._files.list(SCRATCH), key=lambda entry: entry.name)
            except FileNotFoundError:
                return
        for entry in listed:
            if _ABANDONED.fullmatch(entry.name) and entry.is_file and entry.status.st_mtime < older_than:
                yield ListedObject(
                    f"{SCRATCH}/{entry.name}", entry.status.st_size, _tag(entry.status), entry.status.st_mtime
                )

    def remove_abandoned(self, item: ListedObject) -> bool:
        with os_errors(f"remove {self._file(item.path)}"):
            try:
                self._files.remove(item.path)
            except FileNotFoundError:
                return False
        return True

    def recover(self) -> None:
        """Restore files of interrupted removals, since another process may have touched them before the removal.

        Only removals by this user are restored: their folders are closed to other users, so their content is ours.
        Other entries of `tmp/` may come from other users, and their names are not trusted.
        """
        with os_errors(f"list {self._file(SCRATCH)}"), suppress(FileNotFoundError):
            for entry in self._files.list(SCRATCH):
                ours = _REMOVAL.fullmatch(entry.name) and entry.is_folder and _is_closed(entry.status)
                if ours and entry.status.st_mtime <= self.now() - _UNDER_WAY:  # a younger removal may be in progress
                    self._put_back(f"{SCRATCH}/{entry.name}")

    def now(self, *, read_only: bool = False) -> float:
        """The file system's clock. `read_only` uses an unnamed file, where supported, or this machine's clock."""
        if not read_only:
            return self._clock.now()
        try:
            return self._files.time()
        except OSError:
            return time.time()

    def make_durable(self, paths: Iterable[str]) -> None:
        """Flush each file and folder once, not at each write: by now the kernel has written most of the data."""
        listed = list(paths)
        with os_errors(f"flush {self._root} to disk"):
            self._flush(listed)
            self._flush_folders(listed)

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return map(function, items)

    def _time_of_a_new_file(self) -> float:
        """The modification time of a new file; this machine's clock for a user without write access."""
        try:
            with scratch(self._scratch, within=self._files) as file, os_errors(f"read {file.path}"):
                return os.fstat(file.descriptor).st_mtime
        except Denied:
            return time.time()

    def probes(self, folder: str) -> "Iterable[Probe]":
        return local_probes(self._root, folder)

    def _counts(self, status: os.stat_result) -> bool:
        """True if a file belongs to the store, by its owner; overridden by stores with untrusted files."""
        return True

    def _file(self, path: str) -> str:
        """The file's name for messages. A string, since a `Path` is slow for thousands of small objects."""
        return f"{self._root}/{path}"

    def _status(self, path: str) -> os.stat_result | None:
        with os_errors(f"read {self._file(path)}"):
            try:
                return self._files.status(path)
            except FileNotFoundError:
                return None

    @contextmanager
    def _removal_folder(self) -> Iterator[str]:
        """A temporary folder for one removal, closed to other users."""
        folder = f"{SCRATCH}/{secrets.token_hex(8)}.removal"
        self._files.make_folder(folder, 0o700)
        try:
            yield folder
        finally:
            with suppress(OSError):  # an earlier error matters more, and may have left a file
                self._files.remove_folder(folder)

    def _put_back(self, removal: str) -> None:
        with suppress(FileNotFoundError):  # another process restores it
            for entry in self._files.list(removal):
                path = entry.name.removesuffix(_GONE).replace("\\", "/")
                if entry.is_file and entry.name.endswith(_GONE) and is_object(path):
                    self._link(f"{removal}/{entry.name}", path)
                    self._files.remove(f"{removal}/{entry.name}")
            with suppress(OSError):  # other entries are left alone
                self._files.remove_folder(removal)

    @contextmanager
    def _as_file(self, payload: Payload) -> Iterator[str]:
        """A file to link. It becomes the object, so a file that others may still write is copied."""
        if isinstance(payload.source, Path) and payload.source.parent == self._scratch:
            yield f"{SCRATCH}/{payload.source.name}"
            return
        if (constant := payload.constant) is not None:
            with new_file(self._scratch, within=self._files) as written:
                with os_errors(f"write {written.path}"):
                    write_at(written.descriptor, constant, 0)
                    written.close()
                yield f"{SCRATCH}/{written.path.name}"
            return
        with scratch(self._scratch, within=self._files) as file:
            if isinstance(payload.source, Path):
                with os_errors(f"read {payload.source}"):
                    opened = payload.source.open("rb", buffering=0)
                for chunk in _readable(payload.source, chunks_of(opened)):
                    file.write(chunk)
            else:
                file.write(payload.source)
            if file.finish().sha256 != payload.sha256:
                raise StoreUnavailable(f"{payload.source} changed while it was being stored; store it again")
            yield f"{SCRATCH}/{file.path.name}"

    def _link(self, source: str, path: str) -> bool:
        try:
            self._files.link(source, path)
        except FileExistsError:
            # A network file system may lose the reply to a successful link, and refuse its repetition.
            return self._files.status(source).st_nlink > 1
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise StoreUnavailable(
                    f"cannot create {self._file(path)}: this file system has no hard links ({error.strerror}), which "
                    "the store needs to create a file without overwriting another; put the store on a file system with "
                    "hard links, or on S3"
                ) from error
            raise
        return True

    def _flush_folders(self, paths: Iterable[str]) -> None:
        """Flush every folder on the paths and the parent of the root: only then are new names durable."""
        folders: set[str] = set()
        for path in paths:
            while (path := path.rpartition("/")[0]) not in folders:
                folders.add(path)
        self._flush(sorted(folders, reverse=True))
        # Flushing a folder needs read permission, which this user may lack.
        with suppress(PermissionError):
            flush_to_disk(self._root.parent)

    def _flush(self, paths: Sequence[str]) -> None:
        """Flush files; many files concurrently, which halves the time or better."""

        by_folder: dict[str, list[str]] = {}
        for path in paths:
            folder, _, name = path.rpartition("/")
            by_folder.setdefault(folder, []).append(name or ".")
        folders = list(by_folder)

        def flush(lane: int, lanes: int) -> None:
            for folder in folders[lane::lanes]:
                self._files.flush_all(folder, by_folder[folder])

        if len(paths) < _MANY:
            flush(0, 1)
            return
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_FLUSHED_AT_ONCE) as pool:
            for flushed in [pool.submit(flush, lane, _FLUSHED_AT_ONCE) for lane in range(_FLUSHED_AT_ONCE)]:
                flushed.result()


def _tag(status: os.stat_result) -> str:
    # Without the device number, which differs between machines that share a file system and its index.
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _is_closed(folder: os.stat_result) -> bool:
    """True if this user owns the folder and no other user may write to it."""
    return folder.st_uid == os.geteuid() and not folder.st_mode & 0o022


def _readable(target: str | Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    with os_errors(f"read {target}"):
        yield from chunks
