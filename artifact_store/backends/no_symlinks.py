"""Files below one folder that are opened without following symlinks.

Other users may write into a shared store or cache, and a folder may come from an untrusted source: a link below the
root could redirect reads and writes anywhere. Therefore each folder on the path is opened with O_NOFOLLOW, relative to
its parent, and the file relative to the last folder; a link that appears meanwhile is never followed. The root is
given by the user, and may be a link. A walk costs a microsecond for each folder. Handles are not kept open, since a
handle would refer to the old folder after a replacement.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

# O_PATH opens a folder on the path without the permission to list it.
_ROOT: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER: Final = _ROOT | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a FIFO waits for a writer.
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

PRIVATE: Final = 0o700  # mode of a new cache folder: weights are private to the user

_UP: Final = (".", "..")

_KINDS: Final = {
    stat.S_IFLNK: "a symlink",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotAFile(Exception):
    """The path exists, but is not a file; the message is its kind, such as "a symlink"."""


@dataclass(frozen=True)
class FolderEntry:
    """An entry of a folder. `status` is that of the entry itself, not of a link's target."""

    name: str
    status: os.stat_result
    links_to_folder: bool = False

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.status.st_mode)


class SafeFolder:
    """File operations below a root without following symlinks.

    Paths are relative to the root, with `/`. Errors of the system are OSErrors, as those of `os`.
    """

    def __init__(self, root: Path, mode: int = 0o777, base: str = "") -> None:
        """`mode` applies if the root has to be created. Paths are relative to the folder `base` below the root, which
        is reached without following symlinks too."""
        self.root = root / base
        self._top = root
        self._base = base.split("/") if base else []
        self._mode = mode

    def relative(self, folder: Path, name: str) -> str:
        """The path of a file in a folder below the root."""
        outer, inner = os.fspath(self.root), os.fspath(folder)
        if inner == outer:
            return name
        if not inner.startswith(f"{outer}/"):
            raise ValueError(f"{folder} is not below {self.root}")
        return f"{inner[len(outer) + 1 :]}/{name}"

    def create(self, path: str, mode: int = 0o666) -> int:
        """Create a file, open for writing and reading, and its missing folders; return its descriptor."""
        with self._at(path, make=True) as (folder, name):
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, mode, dir_fd=folder)

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        """Open an existing regular file. Another kind of entry raises `NotAFile`; a folder raises an OSError, since no
        file can replace it."""
        with self._at(path) as (folder, name):
            try:
                descriptor = os.open(name, flags | _FILE, dir_fd=folder)
            except OSError as error:
                # ELOOP: a link; ENXIO: a socket, or a FIFO without a reader.
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise NotAFile(_kind(os.stat(name, dir_fd=folder, follow_symlinks=False))) from error
                raise
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            raise NotAFile(_kind(status))
        return descriptor

    def reader(self, path: str) -> IO[bytes]:
        return os.fdopen(self.open(path), "rb", buffering=0)

    def status(self, path: str) -> os.stat_result:
        """The status of the entry itself, of any kind."""
        with self._at(path) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def list(self, path: str) -> Sequence[FolderEntry]:
        """The entries of a folder; the root's own path is empty."""
        folder = self._folder(path, make=False)
        try:
            listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            with os.scandir(listed) as entries:
                return [entry for listed in entries for entry in _entry(listed)]
        finally:
            os.close(listed)

    def link(self, source: str, target: str) -> None:
        """Hard-link a file; FileExistsError if the target exists."""
        with self._at(source) as (old_folder, old), self._at(target, make=True) as (new_folder, new):
            os.link(old, new, src_dir_fd=old_folder, dst_dir_fd=new_folder, follow_symlinks=False)

    def link_from(self, source: Path, target: str) -> None:
        """Hard-link a file from outside the root."""
        with self._at(target, make=True) as (folder, name):
            os.link(source, name, dst_dir_fd=folder, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        """Rename a file; an existing target is replaced."""
        with self._at(source) as (old_folder, old), self._at(target, make=True) as (new_folder, new):
            os.replace(old, new, src_dir_fd=old_folder, dst_dir_fd=new_folder)

    def remove(self, path: str) -> None:
        with self._at(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        """Create a folder, which must not exist, and its missing parents."""
        with self._at(path, make=True) as (folder, name):
            os.mkdir(name, mode, dir_fd=folder)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        with self._at(path) as (folder, name):
            os.rmdir(name, dir_fd=folder)

    def touch(self, path: str) -> None:
        with self._at(path) as (folder, name):
            os.utime(name, dir_fd=folder, follow_symlinks=False)

    def time(self) -> float:
        """The clock of the file system, read from an unnamed temporary file; an OSError if that is not supported."""
        if not hasattr(os, "O_TMPFILE"):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        descriptor = os.open(self._top, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)

    def flush(self, path: str) -> None:
        """fsync of a file or a folder."""
        folder, _, name = path.rpartition("/")
        self.flush_all(folder, [name or "."])

    def flush_all(self, folder: str, names: Iterable[str]) -> None:
        """fsync of several entries of one folder."""
        handle = self._folder(folder, make=False)
        try:
            for name in names:
                descriptor = os.open(name, os.O_RDONLY | _FILE, dir_fd=handle)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        finally:
            os.close(handle)

    def _at(self, path: str, *, make: bool = False) -> "_At":
        """A handle of the parent folder of a path, and the last part of the path."""
        folder, _, name = path.rpartition("/")
        if name in _UP:
            raise OSError(errno.EINVAL, f"{name!r} is not a file name", path)
        return _At(self._folder(folder, make=make), name)

    def _folder(self, path: str, *, make: bool) -> int:
        try:
            handle = os.open(self._top, _ROOT)
        except FileNotFoundError:
            if not make:
                raise
            self._top.parent.mkdir(parents=True, exist_ok=True)
            self._top.mkdir(self._mode, exist_ok=True)
            handle = os.open(self._top, _ROOT)
        for name in (*self._base, *path.split("/")):
            if name:
                parent = handle
                try:
                    handle = (
                        os.open(name, _FOLDER, dir_fd=parent) if name not in _UP else _enter(parent, name, make=make)
                    )
                except OSError:
                    handle = _enter(parent, name, make=make)
                finally:
                    os.close(parent)
        return handle


class _At:
    """Context of an open folder. Not a generator, which is too slow for several uses on each of many small objects."""

    __slots__ = ("_at",)

    def __init__(self, folder: int, name: str) -> None:
        self._at = (folder, name)

    def __enter__(self) -> tuple[int, str]:
        return self._at

    def __exit__(self, *_: object) -> None:
        os.close(self._at[0])


@dataclass(frozen=True)
class Subfolder:
    """A folder below a root, or the root itself."""

    files: SafeFolder
    folder: str = ""

    @property
    def root(self) -> Path:
        return self.files.root / self.folder

    def at(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name


def is_ours(status: os.stat_result) -> bool:
    """True for a file that only this user and root can have written and can write."""
    return stat.S_ISREG(status.st_mode) and status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def is_same(first: os.stat_result, second: os.stat_result) -> bool:
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def _enter(folder: int, name: str, *, make: bool) -> int:
    """Open a folder, or raise an OSError with the reason. A missing folder is created if `make`."""
    if name in _UP:
        raise OSError(errno.EINVAL, f"{name!r} is not a folder name", name)
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(folder, name):
            raise OSError(errno.ELOOP, f"{name} is a symlink, which is not followed below a store's folder") from error
        raise
    with suppress(FileExistsError):  # another process was faster
        os.mkdir(name, dir_fd=folder)
    return os.open(name, _FOLDER, dir_fd=folder)


def _is_link(folder: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _entry(entry: "os.DirEntry[str]") -> Iterator[FolderEntry]:
    with suppress(FileNotFoundError):  # it was removed meanwhile
        yield FolderEntry(entry.name, entry.stat(follow_symlinks=False), entry.is_symlink() and _links_to_folder(entry))


def _links_to_folder(link: "os.DirEntry[str]") -> bool:
    try:
        return link.is_dir()
    except OSError:  # a loop, or below a folder without read permission
        return True


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
