"""Probes of a local folder: hard links, renames and flushes of its file system."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.backends.files import flush_to_disk, os_errors
from nxpipe.artifact_store.backends.protocol import Probe, Violated, insist

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
