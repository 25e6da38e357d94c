"""Files below one folder that are opened without following symlinks.

Others may write into a shared store or cache, and a folder may come from an untrusted source: a link below the root
could redirect reads and writes anywhere. So each folder on the path is opened by itself with O_NOFOLLOW, relative
to its parent, and the file relative to the last; a link that appears meanwhile is never followed. The root is what
the user named, and may be a link. A walk costs a microsecond for each folder; handles are not kept open, since a
kept handle would stay with a folder that was replaced.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

# O_PATH asks for no right to list a folder that is only passed through.
_ROOT: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER: Final = _ROOT | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a FIFO waits for somebody to write to it.
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

PRIVATE: Final = 0o700  # a folder of one user's, as of a cache that we make: weights are nobody else's business

_UP: Final = (".", "..")

_KINDS: Final = {
    stat.S_IFLNK: "a symlink",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotAFile(Exception):
    """What stands in a file's place, such as "a symlink"."""


@dataclass(frozen=True)
class Seen:
    """An entry of a folder. `status` is its own, not that of what a link leads to."""

    name: str
    status: os.stat_result
    leads_to_a_folder: bool = False

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.status.st_mode)


class SafeFolder:
    """Paths are relative to the root, with `/`. What the system refuses is an OSError, as by `os` itself."""

    def __init__(self, root: Path, mode: int = 0o777, base: str = "") -> None:
        """`mode` is that of the root, where it is not there yet and has to be made. Paths start at the folder `base`
        below it, to which no symlink leads either."""
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
        """A new file, open for writing and reading; its folders are made if need be."""
        with self._at(path, make=True) as (folder, name):
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, mode, dir_fd=folder)

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        """A regular file that is there; `NotAFile` for what may stand in its place, but a folder, which is an OSError:
        no file can replace that."""
        with self._at(path) as (folder, name):
            try:
                descriptor = os.open(name, flags | _FILE, dir_fd=folder)
            except OSError as error:
                # ELOOP: a link; ENXIO: a socket, or a FIFO that nobody reads.
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise NotAFile(_what(os.stat(name, dir_fd=folder, follow_symlinks=False))) from error
                raise
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode):
            os.close(descriptor)
            if stat.S_ISDIR(seen.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            raise NotAFile(_what(seen))
        return descriptor

    def reader(self, path: str) -> IO[bytes]:
        return os.fdopen(self.open(path), "rb", buffering=0)

    def status(self, path: str) -> os.stat_result:
        """Of the entry itself, whatever it is."""
        with self._at(path) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def list(self, path: str) -> Sequence[Seen]:
        """What is directly in a folder; the root's own path is empty."""
        folder = self._folder(path, make=False)
        try:
            listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            with os.scandir(listed) as entries:
                return [seen for entry in entries for seen in _seen(entry)]
        finally:
            os.close(listed)

    def link(self, source: str, target: str) -> None:
        """Another name for a file; FileExistsError where the name is taken."""
        with self._at(source) as (here, name), self._at(target, make=True) as (there, other):
            os.link(name, other, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)

    def take_in(self, source: Path, target: str) -> None:
        """The same of a file that lies elsewhere."""
        with self._at(target, make=True) as (folder, name):
            os.link(source, name, dst_dir_fd=folder, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        """Over whatever file has that name."""
        with self._at(source) as (here, name), self._at(target, make=True) as (there, other):
            os.replace(name, other, src_dir_fd=here, dst_dir_fd=there)

    def remove(self, path: str) -> None:
        with self._at(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        """A new one."""
        with self._at(path, make=True) as (folder, name):
            os.mkdir(name, mode, dir_fd=folder)

    def remove_folder(self, path: str) -> None:
        """An empty one."""
        with self._at(path) as (folder, name):
            os.rmdir(name, dir_fd=folder)

    def touch(self, path: str) -> None:
        with self._at(path) as (folder, name):
            os.utime(name, dir_fd=folder, follow_symlinks=False)

    def time(self) -> float:
        """By the clock of the file system, which nothing is left on; an OSError where that cannot be."""
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
        """The same of several in one folder."""
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
        """The folder that a path lies in, as a handle, and the path's last part."""
        folder, _, name = path.rpartition("/")
        if name in _UP:
            raise OSError(errno.EINVAL, f"{name!r} is no name of a file", path)
        return _At(self._folder(folder, make=make), name)

    def _folder(self, path: str, *, make: bool) -> int:
        try:
            here = os.open(self._top, _ROOT)
        except FileNotFoundError:
            if not make:
                raise
            self._top.parent.mkdir(parents=True, exist_ok=True)
            self._top.mkdir(self._mode, exist_ok=True)
            here = os.open(self._top, _ROOT)
        for name in (*self._base, *path.split("/")):
            if name:
                outer = here
                try:
                    here = os.open(name, _FOLDER, dir_fd=outer) if name not in _UP else _entered(outer, name, make=make)
                except OSError:
                    here = _entered(outer, name, make=make)
                finally:
                    os.close(outer)
        return here


class _At:
    """Not a generator: this is done several times for each of thousands of small objects."""

    __slots__ = ("_at",)

    def __init__(self, folder: int, name: str) -> None:
        self._at = (folder, name)

    def __enter__(self) -> tuple[int, str]:
        return self._at

    def __exit__(self, *_: object) -> None:
        os.close(self._at[0])


@dataclass(frozen=True)
class Spot:
    """A folder below a root, or the root itself."""

    files: SafeFolder
    folder: str = ""

    @property
    def root(self) -> Path:
        return self.files.root / self.folder

    def at(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name


def is_ours(seen: os.stat_result) -> bool:
    """A file that no other user can have written or can write to, but root, who can do anything as well."""
    return stat.S_ISREG(seen.st_mode) and seen.st_uid in (os.geteuid(), 0) and not seen.st_mode & 0o022


def is_same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _entered(folder: int, name: str, *, make: bool) -> int:
    """Or why not. A folder that is not there yet is made if `make` says so."""
    if name in _UP:
        raise OSError(errno.EINVAL, f"{name!r} is no name of a folder", name)
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(folder, name):
            raise OSError(errno.ELOOP, f"{name} is a symlink, and below a store's folder none is followed") from error
        raise
    with suppress(FileExistsError):  # somebody else was faster
        os.mkdir(name, dir_fd=folder)
    return os.open(name, _FOLDER, dir_fd=folder)


def _is_link(folder: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _seen(entry: "os.DirEntry[str]") -> Iterator[Seen]:
    with suppress(FileNotFoundError):  # it went away meanwhile
        yield Seen(entry.name, entry.stat(follow_symlinks=False), entry.is_symlink() and _leads_to_a_folder(entry))


def _leads_to_a_folder(link: "os.DirEntry[str]") -> bool:
    try:
        return link.is_dir()
    except OSError:  # a loop, or behind a folder that is closed to us
        return True


def _what(seen: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(seen.st_mode), "something else")
