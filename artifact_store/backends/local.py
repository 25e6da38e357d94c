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
    Found,
    Payload,
    Probe,
    Sent,
    Stat,
    Violated,
    ignore_progress,
    insist,
)
from nxpipe.artifact_store.errors import Changed, Corrupt, Denied, StoreUnavailable
from nxpipe.artifact_store.layout import SCRATCH, is_object

_ENOUGH: Final = 1024**3  # bytes
_LONGEST_NAME: Final = 255


def local_probes(root: Path, folder: str) -> Iterator[Probe]:
    """Experiments in a folder of a store."""
    here = _Folder(root / folder)
    for name, why, run, vital in (
        ("a hard link refuses a taken name", "creation is atomic by it, without locks", here.links, True),
        ("a rename replaces a file in one piece", "readers see the old bytes or the new ones", here.renames, True),
        ("files and folders can be flushed to the disk", "what is published outlives a power loss", here.flushes, True),
        ("file times are fine", "a changed file is known by its time and number", here.times, False),
        ("names of 255 bytes are taken", "listings carry the model's name", here.names, False),
        ("there is free space", "a full disk ends every publish", here.space, False),
    ):
        yield Probe(name, why, _said(root / folder, run), vital)


def _said(folder: Path, run: Callable[[], str | None]) -> Callable[[], str | None]:
    """What no experiment foresees becomes the store's own sentence."""

    def experiment() -> str | None:
        with os_errors(f"write {folder}"):
            return run()

    return experiment


class _Folder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def links(self) -> None:
        first, second = self._file("first", b"first"), self._file("second", b"second")
        name = self._folder / "linked"
        try:
            name.hardlink_to(first)
        except OSError as error:
            raise Violated(f"a link to a free name fails: {error.strerror}") from error
        insist(name.stat().st_nlink == 2, "a linked file has one name only")
        try:
            name.hardlink_to(second)
        except FileExistsError:
            insist(name.read_bytes() == b"first", "a refused link changed the file")
            return
        raise Violated("a link was made over a taken name")

    def renames(self) -> None:
        old, new = self._file("old", b"old bytes"), self._file("new", b"new bytes")
        with old.open("rb", buffering=0) as reader:
            seen = reader.read(4)
            new.replace(old)
            seen += reader.read()
        insist(seen == b"old bytes", f"a reader of the old file got {seen!r}")
        insist(old.read_bytes() == b"new bytes", "the old bytes stand under the name after the rename")

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
        insist(abs(kept - 1_800_000_000_123_456_789) < 1_000_000, "times are kept in less than milliseconds")
        return "nanoseconds" if kept % 1000 else "microseconds or less"

    def names(self) -> None:
        try:
            self._file("n" * _LONGEST_NAME, b"").unlink()
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise Violated(f"{error.strerror}; ids of models must be shorter here") from error

    def space(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        insist(free >= _ENOUGH, f"{free} bytes are free")
        return f"{free} bytes are free"

    def _file(self, name: str, content: bytes) -> Path:
        path = self._folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


T = TypeVar("T")
R = TypeVar("R")

_NO_HARD_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# Where a removed file lies while it is looked at, under its path with the one character that no path of ours has.
_GONE: Final = ".gone"
_REMOVAL: Final = re.compile(r"[0-9a-f]{16}\.removal")
_ABANDONED: Final = re.compile(r"\..+\.part")
_MANY: Final = 64  # files to flush
_FLUSHED_AT_ONCE: Final = 8
_UNDER_WAY: Final = 60.0  # seconds after which a removal is not under way any more
_NO_OBJECT: Final = "remove that one object, then do again what made it"


class LocalFolder:
    """Objects are files; creating one is hard-linking a finished file to its name, which fails if the name is taken."""

    sent_unasked_below = 0  # a look costs nothing

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
            except NotAFile as what:
                raise Corrupt(f"{self.url}/{path}", f"it is {what}, and no file", _NO_OBJECT) from what
            seen = os.fstat(file.fileno())
            if tag is not None and _tag(seen) != tag:
                file.close()
                raise Changed(f"{target} was written anew while it was read; read it again")
            if not self._counts(seen):
                file.close()
                return None
            file.seek(start)
            return _readable(target, chunks_of(file, None if stop is None else stop - start))

    def stat(self, path: str) -> Stat | None:
        """None for what is no file, too: it is in the way of an object, and a repair replaces it."""
        seen = self._look(path)
        if seen is None or not stat.S_ISREG(seen.st_mode) or not self._counts(seen):
            return None
        return Stat(seen.st_size, None, _tag(seen), seen.st_mtime)

    def has_just_proved(self, path: str, sha256: str, size: int) -> bool:
        return False

    def paths(self, prefix: str) -> Sequence[str]:
        with os_errors(f"list {self._file(prefix)}"):
            try:
                return [prefix + seen.name for seen in self._files.list(prefix) if seen.is_file]
            except FileNotFoundError:
                return []

    def walk(self, prefix: str) -> Iterator[Found]:
        """What is no file is listed as well: it stands where an object should be, and is `Corrupt` to whoever reads it.

        A symlink to a folder hides what should be there, so that nothing can be told of the whole.
        """
        with os_errors(f"list {self._file(prefix)}"):
            try:
                listed = sorted(self._files.list(prefix), key=lambda seen: seen.name + "/" * seen.is_folder)
            except FileNotFoundError:
                return
        unread: StoreUnavailable | None = None
        for seen in listed:
            path = prefix + seen.name
            if seen.leads_to_a_folder:
                unread = unread or StoreUnavailable(
                    f"cannot list {self._file(path)}: it is a symlink, and none is followed; put a real folder in its "
                    "place"
                )
            elif not seen.is_folder:
                yield Found(path, seen.status.st_size, _tag(seen.status), seen.status.st_mtime)
            elif path != SCRATCH:
                try:
                    yield from self.walk(f"{path}/")
                except StoreUnavailable as error:
                    unread = unread or error
        if unread:  # when all that can be listed has been
            raise unread

    def touch(self, path: str) -> bool:
        with os_errors(f"write {self._file(path)}"):
            try:
                self._files.touch(path)
            except FileNotFoundError:
                return False
        return True

    def remove(self, found: Found) -> bool:
        """Under its name a file may be made young at any moment; once renamed it can be looked at in peace."""
        with os_errors(f"remove {self._file(found.path)}"), self._aside() as folder:
            aside = f"{folder}/{found.path.replace('/', chr(92))}{_GONE}"
            try:
                self._files.rename(found.path, aside)
            except FileNotFoundError:
                return False
            same = _tag(self._files.status(aside)) == found.tag
            if not same:
                self._link(aside, found.path)
            self._files.remove(aside)
        return same

    def abandoned(self, older_than: float) -> Iterator[Found]:
        with os_errors(f"list {self._file(SCRATCH)}"):
            try:
                listed = sorted(self._files.list(SCRATCH), key=lambda seen: seen.name)
            except FileNotFoundError:
                return
        for seen in listed:
            if _ABANDONED.fullmatch(seen.name) and seen.is_file and seen.status.st_mtime < older_than:
                yield Found(f"{SCRATCH}/{seen.name}", seen.status.st_size, _tag(seen.status), seen.status.st_mtime)

    def remove_abandoned(self, found: Found) -> bool:
        with os_errors(f"remove {self._file(found.path)}"):
            try:
                self._files.remove(found.path)
            except FileNotFoundError:
                return False
        return True

    def recover(self) -> None:
        """A removal that was killed may have had a file in hand that was young again.

        Only our own removals are taken up: their folders are closed to other users, so that what is in them was put
        there by us. Whatever else lies in `tmp/` may be a stranger's, and its name may lead anywhere.
        """
        with os_errors(f"list {self._file(SCRATCH)}"), suppress(FileNotFoundError):
            for seen in self._files.list(SCRATCH):
                ours = _REMOVAL.fullmatch(seen.name) and seen.is_folder and _is_closed(seen.status)
                if ours and seen.status.st_mtime <= self.now() - _UNDER_WAY:  # else somebody may be at it
                    self._put_back(f"{SCRATCH}/{seen.name}")

    def now(self, *, looking: bool = False) -> float:
        """Looking, by a file without a name: no folder's time shows it. Not every file system makes one."""
        if not looking:
            return self._clock.now()
        try:
            return self._files.time()
        except OSError:
            return time.time()

    def make_durable(self, paths: Iterable[str]) -> None:
        """One flush a file and folder, here and not at each write: the kernel has written most of it out by now."""
        named = list(paths)
        with os_errors(f"flush {self._root} to disk"):
            self._flush(named)
            self._flush_folders(named)

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return map(function, items)

    def _time_of_a_new_file(self) -> float:
        """Who may not write there may change nothing by the clock either, and looks at the store by that of here."""
        try:
            with scratch(self._scratch, within=self._files) as file, os_errors(f"read {file.path}"):
                return os.fstat(file.descriptor).st_mtime
        except Denied:
            return time.time()

    def probes(self, folder: str) -> "Iterable[Probe]":

        return local_probes(self._root, folder)

    def _counts(self, seen: os.stat_result) -> bool:
        """Whether a file is one of the store's, by whose it is."""
        return True

    def _file(self, path: str) -> str:
        """For messages. Text, not a `Path`: thousands of small objects should take no longer than their writing."""
        return f"{self._root}/{path}"

    def _look(self, path: str) -> os.stat_result | None:
        with os_errors(f"read {self._file(path)}"):
            try:
                return self._files.status(path)
            except FileNotFoundError:
                return None

    @contextmanager
    def _aside(self) -> Iterator[str]:
        """A folder that no other removal uses, even of the same file, and no other user."""
        folder = f"{SCRATCH}/{secrets.token_hex(8)}.removal"
        self._files.make_folder(folder, 0o700)
        try:
            yield folder
        finally:
            with suppress(OSError):  # what went wrong before matters more, and may have left a file
                self._files.remove_folder(folder)

    def _put_back(self, removal: str) -> None:
        with suppress(FileNotFoundError):  # somebody else is at it
            for seen in self._files.list(removal):
                path = seen.name.removesuffix(_GONE).replace("\\", "/")
                if seen.is_file and seen.name.endswith(_GONE) and is_object(path):
                    self._link(f"{removal}/{seen.name}", path)
                    self._files.remove(f"{removal}/{seen.name}")
            with suppress(OSError):  # something else lies in it, and is left alone
                self._files.remove_folder(removal)

    @contextmanager
    def _as_file(self, payload: Payload) -> Iterator[str]:
        """A file to be linked: it becomes the object, so one that may still be written by others is copied."""
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
                raise StoreUnavailable(f"{payload.source} was written while it was being stored; store it again")
            yield f"{SCRATCH}/{file.path.name}"

    def _link(self, source: str, path: str) -> bool:
        try:
            self._files.link(source, path)
        except FileExistsError:
            # A network file system may lose the answer of a link that it made, and refuse the repetition.
            return self._files.status(source).st_nlink > 1
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise StoreUnavailable(
                    f"cannot create {self._file(path)}: this file system makes no hard links ({error.strerror}), which "
                    "the store needs to create a file without overwriting another; put the store on a file system that "
                    "does, or on S3"
                ) from error
            raise
        return True

    def _flush_folders(self, paths: Iterable[str]) -> None:
        """A new name is durable when every folder on its way is, and the root's own entry."""
        folders: set[str] = set()
        for path in paths:
            while (path := path.rpartition("/")[0]) not in folders:
                folders.add(path)
        self._flush(sorted(folders, reverse=True))
        # A folder that we may pass through but not read cannot be flushed by us.
        with suppress(PermissionError):
            flush_to_disk(self._root.parent)

    def _flush(self, paths: Sequence[str]) -> None:
        """Many at once where there are many: a disk confirms those together in half the time or less."""

        together: dict[str, list[str]] = {}
        for path in paths:
            folder, _, name = path.rpartition("/")
            together.setdefault(folder, []).append(name or ".")
        folders = list(together)

        def flush(lane: int, lanes: int) -> None:
            for folder in folders[lane::lanes]:
                self._files.flush_all(folder, together[folder])

        if len(paths) < _MANY:
            flush(0, 1)
            return
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_FLUSHED_AT_ONCE) as pool:
            for flushed in [pool.submit(flush, lane, _FLUSHED_AT_ONCE) for lane in range(_FLUSHED_AT_ONCE)]:
                flushed.result()


def _tag(found: os.stat_result) -> str:
    # Not the device: its number differs between the machines that share a file system, and their index with it.
    return f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"


def _is_closed(folder: os.stat_result) -> bool:
    """Made by this user, and nobody else may write there."""
    return folder.st_uid == os.geteuid() and not folder.st_mode & 0o022


def _readable(target: str | Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    with os_errors(f"read {target}"):
        yield from chunks
