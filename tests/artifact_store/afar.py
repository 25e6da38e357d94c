"""Remote stores, for tests that count, interrupt and damage reads."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.protocol import Backend, ReadsViews
from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.documents import written_now
from nxpipe.artifact_store.errors import StoreUnavailable
from nxpipe.artifact_store.fetch.cached_store import CachedStore, MirroredBlobs
from nxpipe.artifact_store.fetch.mirrors import Sources
from nxpipe.artifact_store.fetch.read_cache import ReadCache
from nxpipe.artifact_store.manifest import Manifest
from tests.artifact_store.samples import put


class Counting:
    """A backend that counts reads and applies a test's function to them."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.reads: list[tuple[str, int]] = []
        self.before_read: Callable[[str, int], None] = lambda path, start: None

    def read(self, path: str, start: int = 0, stop: int | None = None, *, tag: str | None = None) -> Any:
        self._count(path, start)
        return self.inner.read(path, start, stop, tag=tag)

    def _count(self, path: str, start: int) -> None:
        self.reads.append((path, start))
        self.before_read(path, start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class CountingViews(Counting):
    """The same for a backend that reads in views of one buffer."""

    def read_views(self, path: str, start: int, stop: int, at: int) -> Any:
        self._count(path, start)
        return self.inner.read_views(path, start, stop, at)  # type: ignore[attr-defined]


def counting(inner: Backend) -> Any:
    return CountingViews(inner) if isinstance(inner, ReadsViews) else Counting(inner)


def refuse(path: str, start: int) -> None:
    raise StoreUnavailable("the network is down; mend it")


def afar(places: list[Any], tier: ReadCache | None = None, heard: list[str] | None = None) -> CachedStore:
    sources = Sources(places, (heard if heard is not None else []).append)
    return CachedStore(places[0], MirroredBlobs(places[0], sources, tier), sources)


def promoted(store: Store) -> tuple[Manifest, str]:
    published = store.publish(put(store))
    tip = ChannelLog(store.backend, "prod").append(lambda tip: first_generation("prod", [Served.of(published)]))
    assert tip.changed
    return published.manifest, "prod"


def first_generation(channel: str, served: list[Served]) -> Generation:
    return Generation(
        channel=channel,
        generation=1,
        previous=None,
        action="promote",
        artifacts=tuple(served),
        restores=None,
        actor="somebody",
        reason="a test",
        at=written_now(),
        write_id=secrets.token_hex(16),
        signatures=(),
    )


def patch(path: Path) -> None:
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
