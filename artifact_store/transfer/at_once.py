"""Many objects at a time: as many as their size leaves sense in."""

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.transfer.ranges import IN_RANGES_ABOVE, STREAMS

T = TypeVar("T")

_SMALL: Final = 1024**2
_SMALL_AT_ONCE: Final = 16  # each of them mostly waits
_LARGE_AT_ONCE: Final = 2  # each has several streams; one is hashed to its end while the next comes


def at_once(function: Callable[[T], None], items: Iterable[tuple[T, Blob]]) -> None:
    """`function` of each item, by the blob that it takes: small ones first, each being one request."""
    groups: dict[int, list[T]] = {_SMALL_AT_ONCE: [], STREAMS: [], _LARGE_AT_ONCE: []}
    for item, blob in items:
        groups[_streams(blob)].append(item)
    for streams, group in groups.items():
        if len(group) < 2:
            for item in group:
                function(item)
            continue
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(streams)
        try:
            for done in [pool.submit(function, item) for item in group]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _streams(blob: Blob) -> int:
    if blob.size > IN_RANGES_ABOVE:
        return _LARGE_AT_ONCE
    return STREAMS if blob.size > _SMALL else _SMALL_AT_ONCE
