"""Files that another user may create in a shared folder: regular files, links, FIFOs."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.manifest import Manifest

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def give(path: Path) -> Path:
    """Give the entry to the user nobody, without a change of the folders above it."""
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return path


def fingerprint(root: Path) -> dict[str, tuple[object, ...]]:
    """Every entry with its kind, mode, owner, times and bytes, without the access time."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (root, *sorted(root.rglob("*"))):
        seen = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            content = sha256(path.read_bytes()).hexdigest()
        name = path.relative_to(root).as_posix()
        found[name] = (oct(seen.st_mode), seen.st_uid, seen.st_nlink, seen.st_mtime_ns, seen.st_ctime_ns, content)
    return found


@dataclass(frozen=True)
class Planted:
    """A store with one artifact, and files of another user in it."""

    root: Path
    manifest: Manifest

    @property
    def store(self) -> Store:
        return open_store(str(self.root))

    @property
    def record(self) -> Path:
        return self.root / "ac" / self.manifest.request_key

    @property
    def weight(self) -> Path:
        return self.root / blob_path(self.manifest.weights[0].blob)

    def in_place_of(self, path: Path, plant: Callable[[Path], object]) -> Path:
        path.unlink()
        plant(path)
        return path

    def removal(self, name: str = "0123456789abcdef.removal", **files: str) -> Path:
        """The remains of a killed removal, an hour old."""
        folder = self.root / "tmp" / name
        folder.mkdir(parents=True)
        folder.chmod(0o700)
        for value, text in files.items():
            (folder / value).write_text(text)
        long_ago(folder)
        return folder


def long_ago(path: Path, seconds: float = 1_000_000_000) -> None:
    os.utime(path, (seconds, seconds), follow_symlinks=False)
