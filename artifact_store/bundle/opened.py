"""A bundle that came from somewhere else: its files by name, whatever else somebody put into it.

Nothing is unpacked: files are read where they lie, so no name in a bundle ever becomes a path of this machine.
"""

import os
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, Protocol

from nxpipe.artifact_store.backends.files import chunks_of, os_errors
from nxpipe.artifact_store.bundle.oci import BLOBS_FOLDER, INDEX_FILE, LAYOUT_FILE
from nxpipe.artifact_store.errors import InvalidDocument, NotFound

MAX_MEMBERS: Final = 500_000
MAX_BLOB_BYTES: Final = 5 * 1024**4  # as large as an object of S3 may be

_FILE: Final = re.compile(rf"{LAYOUT_FILE}|{re.escape(INDEX_FILE)}|{BLOBS_FOLDER}[0-9a-f]{{64}}")
_FOLDERS: Final = ("", ".", "blobs", "blobs/sha256")


class BadBundle(InvalidDocument):
    """A file or folder that is no bundle of nxpipe's, or not a whole one; nothing of it was published."""

    def __init__(self, where: Path, fault: str) -> None:
        super().__init__(f"{where} cannot be imported: {fault}; export the artifact again, and carry it over whole")


class Bundle(Protocol):
    where: Path

    def size(self, name: str) -> int | None:
        """None when there is no such file."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a file that is there; any number may be read at once."""


def open_bundle(where: Path) -> Bundle:
    with os_errors(f"read {where}"):
        if where.is_dir():
            return _Folder(where)
        if not where.exists():
            raise NotFound(f"there is no bundle {where}; make one with `nxpipe store export`")
        if not where.is_file():
            raise BadBundle(where, "it is neither a folder nor a file")
        return _Tar(where)


class _Folder:
    def __init__(self, where: Path) -> None:
        self.where = where

    def size(self, name: str) -> int | None:
        path = self.where / name
        with os_errors(f"read {path}"):
            try:
                found = path.lstat()
            except FileNotFoundError:
                return None
            if not stat.S_ISREG(found.st_mode) or any(parent.is_symlink() for parent in self._folders_above(path)):
                raise BadBundle(self.where, f"{name} is a link, or no file")
        return found.st_size

    def chunks(self, name: str) -> Iterator[bytes]:
        path = self.where / name
        with os_errors(f"read {path}"):
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0)
        return chunks_of(file)

    def _folders_above(self, path: Path) -> Iterator[Path]:
        for parent in path.parents:
            if parent == self.where:
                return
            yield parent


class _Tar:
    def __init__(self, where: Path) -> None:
        self.where = where
        with os_errors(f"read {where}"), where.open("rb") as file:
            self._members = dict(_members(file, where))

    def size(self, name: str) -> int | None:
        return self._members[name][1] if name in self._members else None

    def chunks(self, name: str) -> Iterator[bytes]:
        start, size = self._members[name]
        with os_errors(f"read {self.where}"):
            file = self.where.open("rb", buffering=0)
            file.seek(start)
        return chunks_of(file, size)


def _members(file: IO[bytes], where: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each file's name, start and size, by the headers alone: what follows one is stepped over, never interpreted."""
    end = file.seek(0, os.SEEK_END)
    seen: set[str] = set()
    start = 0
    while header := _header(file, start, where):
        start += tarfile.BLOCKSIZE
        name = header.name.removeprefix("./")
        if header.type == tarfile.DIRTYPE and name in _FOLDERS:
            continue
        if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not _FILE.fullmatch(name):
            raise BadBundle(
                where, f"it holds {header.name[:120]!r} of tar type {header.type!r}, and no image layout does"
            )
        if name in seen or len(seen) == MAX_MEMBERS:
            raise BadBundle(where, f"it holds {name} twice, or more than {MAX_MEMBERS} files")
        if not 0 <= header.size <= min(MAX_BLOB_BYTES, end - start):
            raise BadBundle(where, f"{name} has {header.size} bytes by its header, and {end - start} are left")
        seen.add(name)
        yield name, (start, header.size)
        start += -(-header.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _header(file: IO[bytes], start: int, where: Path) -> tarfile.TarInfo | None:
    """None at the end of the archive."""
    file.seek(start)
    block = file.read(tarfile.BLOCKSIZE)
    if block == bytes(tarfile.BLOCKSIZE):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise BadBundle(where, f"it is no tar file, or breaks off: {error} at byte {start}") from None
