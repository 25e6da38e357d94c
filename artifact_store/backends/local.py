"""A store in a folder, safe for any number of processes without a lock. Section 9 of docs/store-format.md."""

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from artifact_store.backends.files import chunks_of, flush_to_disk, os_errors, scratch
from artifact_store.backends.protocol import Payload, Stat
from artifact_store.errors import StoreUnavailable
from artifact_store.layout import SCRATCH

T = TypeVar("T")
R = TypeVar("R")

_NO_HARD_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class LocalFolder:
    """Objects are files; creating one is hard-linking a finished file to its name, which fails if the name is taken."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = f"file://{root}"
        self.scratch_folder = root / SCRATCH

    def create(self, path: str, payload: Payload, *, durable: bool = False) -> bool:
        target = self._root / path
        with self._as_file(payload) as source, os_errors(f"write {target}"):
            if durable:
                flush_to_disk(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            created = _link(source, target)
            if durable:
                self._flush_folders([target])
            return created

    def replace(self, path: str, payload: Payload) -> None:
        target = self._root / path
        with self._as_file(payload) as source, os_errors(f"write {target}"):
            flush_to_disk(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
            self._flush_folders([target])

    def read(self, path: str) -> Iterator[bytes] | None:
        target = self._root / path
        with os_errors(f"read {target}"):
            try:
                return _readable(target, chunks_of(target.open("rb", buffering=0)))
            except FileNotFoundError:
                return None

    def stat(self, path: str) -> Stat | None:
        target = self._root / path
        with os_errors(f"read {target}"):
            try:
                return Stat(target.stat().st_size, sha256=None)
            except FileNotFoundError:
                return None

    def paths(self, prefix: str) -> Sequence[str]:
        folder = self._root / prefix
        with os_errors(f"list {folder}"):
            try:
                return [prefix + child.name for child in folder.iterdir()]
            except FileNotFoundError:
                return []

    def make_durable(self, paths: Iterable[str]) -> None:
        """One flush a file and folder, here and not at each write: the kernel has written most of it out by now."""
        targets = [self._root / path for path in paths]
        with os_errors(f"flush {self._root} to disk"):
            for target in targets:
                flush_to_disk(target)
            self._flush_folders(targets)

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return map(function, items)

    @contextmanager
    def _as_file(self, payload: Payload) -> Iterator[Path]:
        if isinstance(payload.source, Path):
            yield payload.source
            return
        with scratch(self.scratch_folder) as file:
            file.write(payload.source)
            file.finish()
            yield file.path

    def _flush_folders(self, targets: Iterable[Path]) -> None:
        """A new name is durable when every folder on its way is, and the root's own entry."""
        folders: set[Path] = set()
        for target in targets:
            for folder in target.parents:
                folders.add(folder)
                if folder == self._root:
                    break
        for folder in sorted(folders, reverse=True):
            flush_to_disk(folder)
        # A folder that we may pass through but not read cannot be flushed by us.
        with suppress(PermissionError):
            flush_to_disk(self._root.parent)


def _link(source: Path, target: Path) -> bool:
    try:
        target.hardlink_to(source)
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


def _readable(target: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    with os_errors(f"read {target}"):
        yield from chunks
