"""A store in a folder, safe for any number of processes without a lock. Section 13 of docs/store-format.md."""

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from artifact_store.backends.clock import Clock
from artifact_store.backends.files import chunks_of, flush_to_disk, new_file, os_errors, scratch, write_at
from artifact_store.backends.protocol import Found, Payload, Sent, Stat, nobody
from artifact_store.errors import Changed, Denied, StoreUnavailable
from artifact_store.layout import SCRATCH

if TYPE_CHECKING:
    from artifact_store.backends.probes import Probe

T = TypeVar("T")
R = TypeVar("R")

_NO_HARD_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# Where a removed file lies while it is looked at, under its path with the one character that no path of ours has.
_GONE: Final = ".gone"
_REMOVAL: Final = ".removal"
_MANY: Final = 64  # files to flush
_FLUSHED_AT_ONCE: Final = 8
_UNDER_WAY: Final = 60.0  # seconds after which a removal is not under way any more


class LocalFolder:
    """Objects are files; creating one is hard-linking a finished file to its name, which fails if the name is taken."""

    sent_unasked_below = 0  # a look costs nothing

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = f"file://{root}"
        self.scratch_folder = root / SCRATCH
        self._clock = Clock(self._time_of_a_new_file)

    def hashed(self, data: bytes | memoryview | Path) -> Payload:
        return Payload.of(data)

    def create(self, path: str, payload: Payload, *, durable: bool = False, sent: Sent = nobody) -> bool:
        target = self._file(path)
        with self._as_file(payload) as source, os_errors(f"write {target}"):
            if durable:
                flush_to_disk(source)
            created = _link(source, target)
            if durable:
                self._flush_folders([path])
        sent(payload.size)
        return created

    def replace(self, path: str, payload: Payload, *, sent: Sent = nobody) -> None:
        target = self._root / path
        with self._as_file(payload) as source, os_errors(f"write {target}"):
            flush_to_disk(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
            self._flush_folders([path])
        sent(payload.size)

    def read(
        self, path: str, start: int = 0, stop: int | None = None, *, tag: str | None = None
    ) -> Iterator[bytes] | None:
        target = self._root / path
        with os_errors(f"read {target}"):
            try:
                file = target.open("rb", buffering=0)
            except FileNotFoundError:
                return None
            if tag is not None and _tag(os.fstat(file.fileno())) != tag:
                file.close()
                raise Changed(f"{target} was written anew while it was read; read it again")
            file.seek(start)
            return _readable(target, chunks_of(file, None if stop is None else stop - start))

    def stat(self, path: str) -> Stat | None:
        found = self._look(self._file(path))
        return None if found is None else Stat(found.st_size, None, _tag(found), found.st_mtime)

    def has_just_proved(self, path: str, sha256: str, size: int) -> bool:
        return False

    def paths(self, prefix: str) -> Sequence[str]:
        folder = self._root / prefix
        with os_errors(f"list {folder}"):
            try:
                return [prefix + entry.name for entry in os.scandir(folder) if entry.is_file()]
            except FileNotFoundError:
                return []

    def walk(self, prefix: str) -> Iterator[Found]:
        folder = self._root / prefix
        with os_errors(f"list {folder}"):
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name + "/" * entry.is_dir())
            except FileNotFoundError:
                return
        unread: StoreUnavailable | None = None
        for entry in entries:
            path = prefix + entry.name
            if not entry.is_dir():
                yield from self._found(path, entry)
            elif path != SCRATCH:
                try:
                    yield from self.walk(f"{path}/")
                except StoreUnavailable as error:
                    unread = unread or error
        if unread:  # when all that can be listed has been
            raise unread

    def touch(self, path: str) -> bool:
        target = self._root / path
        with os_errors(f"write {target}"):
            try:
                os.utime(target)
            except FileNotFoundError:
                return False
        return True

    def remove(self, found: Found) -> bool:
        """Under its name a file may be made young at any moment; once renamed it can be looked at in peace."""
        target = self._root / found.path
        with os_errors(f"remove {target}"), self._aside() as folder:
            aside = folder / (found.path.replace("/", "\\") + _GONE)
            try:
                target.rename(aside)
            except FileNotFoundError:
                return False
            same = _tag(aside.stat()) == found.tag
            if not same:
                _link(aside, self._file(found.path))
            aside.unlink()
        return same

    def abandoned(self, older_than: float) -> Iterator[Found]:
        with os_errors(f"list {self.scratch_folder}"):
            self._put_back_the_removed()
            entries = sorted(self.scratch_folder.glob(".*.part"))
        for entry in entries:
            for found in self._found(f"{SCRATCH}/{entry.name}", entry):
                if found.modified < older_than:
                    yield found

    def remove_abandoned(self, found: Found) -> bool:
        target = self._root / found.path
        with os_errors(f"remove {target}"):
            try:
                target.unlink()
            except FileNotFoundError:
                return False
        return True

    def now(self) -> float:
        return self._clock.now()

    def make_durable(self, paths: Iterable[str]) -> None:
        """One flush a file and folder, here and not at each write: the kernel has written most of it out by now."""
        named = list(paths)
        with os_errors(f"flush {self._root} to disk"):
            _flush([self._file(path) for path in named])
            self._flush_folders(named)

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return map(function, items)

    def _time_of_a_new_file(self) -> float:
        """Who may not write there may change nothing by the clock either, and looks at the store by that of here."""
        try:
            with scratch(self.scratch_folder) as file, os_errors(f"read {file.path}"):
                return file.path.stat().st_mtime
        except Denied:
            return time.time()

    def probes(self, folder: str) -> "Iterable[Probe]":
        from artifact_store.backends.local_probes import local_probes

        return local_probes(self._root, folder)

    def _file(self, path: str) -> str:
        """Text, not a `Path`: what is done for thousands of small objects should take no longer than their writing."""
        return f"{self._root}/{path}"

    def _look(self, target: str | os.PathLike[str]) -> os.stat_result | None:
        with os_errors(f"read {os.fspath(target)}"):
            try:
                return os.stat(target)  # noqa: PTH116 - as above
            except FileNotFoundError:
                return None

    def _found(self, path: str, target: "Path | os.DirEntry[str]") -> Iterator[Found]:
        seen = self._look(target)
        if seen is not None:
            yield Found(path, seen.st_size, _tag(seen), seen.st_mtime)

    @contextmanager
    def _aside(self) -> Iterator[Path]:
        """A folder that no other removal uses, even of the same file."""
        folder = self.scratch_folder / f"{secrets.token_hex(8)}{_REMOVAL}"
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            with suppress(OSError):  # what went wrong before matters more, and may have left a file
                folder.rmdir()

    def _put_back_the_removed(self) -> None:
        """Whoever was killed while removing may have had a file in hand that was young again."""
        for folder in self.scratch_folder.glob(f"*{_REMOVAL}"):
            with suppress(FileNotFoundError):
                if folder.stat().st_mtime > self.now() - _UNDER_WAY:
                    continue  # somebody may be at it
                for aside in folder.iterdir():
                    _link(aside, self._file(aside.name.removesuffix(_GONE).replace("\\", "/")))
                    aside.unlink()
                folder.rmdir()

    @contextmanager
    def _as_file(self, payload: Payload) -> Iterator[Path]:
        """A file to be linked: it becomes the object, so one that may still be written by others is copied."""
        if isinstance(payload.source, Path) and payload.source.parent == self.scratch_folder:
            yield payload.source
            return
        if (constant := payload.constant) is not None:
            with new_file(self.scratch_folder) as written:
                with os_errors(f"write {written.path}"):
                    write_at(written.descriptor, constant, 0)
                    written.close()
                yield written.path
            return
        with scratch(self.scratch_folder) as file:
            if isinstance(payload.source, Path):
                with os_errors(f"read {payload.source}"):
                    opened = payload.source.open("rb", buffering=0)
                for chunk in _readable(payload.source, chunks_of(opened)):
                    file.write(chunk)
            else:
                file.write(payload.source)
            if file.finish().sha256 != payload.sha256:
                raise StoreUnavailable(f"{payload.source} was written while it was being stored; store it again")
            yield file.path

    def _flush_folders(self, paths: Iterable[str]) -> None:
        """A new name is durable when every folder on its way is, and the root's own entry."""
        folders: set[str] = set()
        for path in paths:
            while (path := path.rpartition("/")[0]) not in folders:
                folders.add(path)
        _flush([self._file(folder) for folder in sorted(folders, reverse=True)])
        # A folder that we may pass through but not read cannot be flushed by us.
        with suppress(PermissionError):
            flush_to_disk(self._root.parent)


def _tag(found: os.stat_result) -> str:
    # Not the device: its number differs between the machines that share a file system, and their index with it.
    return f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"


def _flush(files: Sequence[str]) -> None:
    """Many at once where there are many: a disk confirms those together in half the time or less."""

    def flush(lane: int, lanes: int) -> None:
        for file in files[lane::lanes]:
            flush_to_disk(file)

    if len(files) < _MANY:
        flush(0, 1)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_FLUSHED_AT_ONCE) as pool:
        for flushed in [pool.submit(flush, lane, _FLUSHED_AT_ONCE) for lane in range(_FLUSHED_AT_ONCE)]:
            flushed.result()


def _link(source: Path, target: str) -> bool:
    try:
        _linked(source, target)
    except FileExistsError:
        # A network file system may lose the answer of a link that it made, and refuse the repetition.
        return source.stat().st_nlink > 1
    except OSError as error:
        if error.errno in _NO_HARD_LINKS:
            raise StoreUnavailable(
                f"cannot create {target}: this file system makes no hard links ({error.strerror}), which the store "
                "needs to create a file without overwriting another; put the store on a file system that does, or on S3"
            ) from error
        raise
    return True


def _linked(source: Path, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        os.link(source, target)


def _readable(target: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    with os_errors(f"read {target}"):
        yield from chunks
