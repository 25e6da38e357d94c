"""What lies in a cache, whoever wrote it."""

from collections.abc import Iterator
from dataclasses import dataclass

from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.pipeline.compile.neuronx.cache_entry import State, folder_of, state_of


@dataclass(frozen=True)
class FoundEntry:
    folder: str
    state: State
    size: int  # bytes of all its files


def entries_in(cache: Backend) -> Iterator[FoundEntry]:
    """In the order of their folders; strangers' files are passed over."""
    sizes: dict[str, dict[str, int]] = {}
    for found in cache.walk(""):
        if folder := folder_of(found.path):
            sizes.setdefault(folder, {})[found.path] = found.size
    for folder in sorted(sizes):
        names = [path.rpartition("/")[2] for path in sizes[folder]]
        yield FoundEntry(folder, state_of(names), sum(sizes[folder].values()))
