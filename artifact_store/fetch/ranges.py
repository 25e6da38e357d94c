"""Range reads: one blob into a file, in parallel ranges, hashed while they arrive."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from threading import Event, Lock
from typing import TYPE_CHECKING, Final, TypeVar

from nxpipe.artifact_store.backends.files import Scratch, scratch
from nxpipe.artifact_store.backends.no_symlinks import Subfolder
from nxpipe.artifact_store.backends.protocol import Backend, ReadsViews, Sent, ignore_progress
from nxpipe.artifact_store.blobs import PUBLISH_AGAIN
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Changed, Corrupt, NotFound
from nxpipe.artifact_store.fetch.partial import Partial, partial
from nxpipe.artifact_store.layout import blob_path

if TYPE_CHECKING:
    from concurrent.futures import Future


IN_RANGES_ABOVE: Final = 64 * 1024**2
RANGE: Final = 32 * 1024**2
STREAMS: Final = 6  # concurrent ranges that saturate one process
_RESERVED_FROM: Final = 1024**2  # bytes
_UNHASHED: Final = 8  # ranges ahead of the hash, which are then still in the page cache
_TRIES: Final = 3  # of a range whose object is replaced during the read


@dataclass(frozen=True)
class Piece:
    """A blob at offset `at` of a file; its first range is the file's range number `first`. With `stopped` its ranges
    are one stream, which is hashed while it arrives, and ends when the event is set."""

    blob: Blob
    at: int = 0
    first: int = 0
    stopped: Event | None = None

    @property
    def ranges(self) -> int:
        return ranges_of(self.blob)

    def span(self, number: int) -> tuple[int, int]:
        """Start and end of a range in the blob."""
        if self.ranges == 1:
            return 0, self.blob.size
        return number * RANGE, min((number + 1) * RANGE, self.blob.size)


def ranges_of(blob: Blob) -> int:
    return -(-blob.size // RANGE) if blob.size > IN_RANGES_ABOVE else 1


def receive(blob: Blob, spot: Subfolder, use: Callable[[str, int], None], place: Backend, sent: Sent) -> None:
    """Receive a blob, verified, into a temporary file, and pass to `use` its name in `spot`, for a rename, and its
    descriptor, for reading: another user of the folder could replace the file under its name."""
    if blob.size > IN_RANGES_ABOVE:
        with partial(spot, blob.sha256, blob.size, ranges_of(blob)) as file:
            fill(file, Piece(blob), place, sent)
            file.finish()
            use(file.path.name, file.descriptor)
        return
    with _reverted_on_errors(sent) as report, scratch(spot.root, 0o644, spot.files) as small:
        handle = os.dup(small.descriptor)
        try:
            _copy(small, blob, place, report)
            use(small.path.name, handle)
        finally:
            os.close(handle)


def fill(file: Partial, piece: Piece, place: Backend, sent: Sent) -> None:
    """Write a blob at its offset of a file, verified. Complete ranges of a large blob are not received again."""
    if piece.blob.size >= _RESERVED_FROM:
        file.reserve(piece.at, piece.blob.size)
    with _reverted_on_errors(sent) as report:
        if piece.ranges == 1:
            _stream(file, piece, place, report)
        elif piece.stopped:
            _stream_in_order(file, piece, piece.stopped, place, report)
        else:
            _join(file, piece, place, report)


@contextmanager
def _reverted_on_errors(sent: Sent) -> Iterator[Sent]:
    """A thread-safe progress callback that after an error reports the negative of its total."""
    lock, total = Lock(), 0

    def report(size: int) -> None:
        nonlocal total
        with lock:
            total += size
            sent(size)

    try:
        yield report
    except BaseException:
        report(-total)
        raise


def _copy(small: Scratch, blob: Blob, place: Backend, sent: Sent) -> None:
    for chunk in _chunks(blob, place, 0, blob.size + 1, 0):
        small.write(chunk)
        sent(len(chunk))
    payload = small.finish()
    _verify(blob, place, payload.sha256, payload.size)


def _stream(file: Partial, piece: Piece, place: Backend, sent: Sent) -> None:
    hasher, received = hashlib.sha256(), 0
    for size in _received(file, piece, 0, place, hasher, sent):
        received += size
    _verify(piece.blob, place, hasher.hexdigest(), received)
    file.complete(piece.first, piece.blob.size)


class _Stopped(Exception):
    """The fetch of another blob has failed, or the user has cancelled."""


def _stream_in_order(file: Partial, piece: Piece, stopped: Event, place: Backend, sent: Sent) -> None:
    for _ in range(_TRIES):
        # Every version of a blob should have the same bytes; the digest of the whole decides.
        with suppress(Changed), _reverted_on_errors(sent) as report:
            _stream_ranges(file, piece, stopped, place, report)
            return
    raise _replaced(piece.blob, place)


def _stream_ranges(file: Partial, piece: Piece, stopped: Event, place: Backend, sent: Sent) -> None:
    """Receive a blob in one stream, behind the ranges that an earlier attempt has completed in order. After a wrong
    digest with such ranges everything is received again."""
    blob, hasher, number = piece.blob, hashlib.sha256(), 0
    while number < piece.ranges and file.has(piece.first + number):
        start, stop = piece.span(number)
        file.feed(hasher, piece.at + start, piece.at + stop)
        sent(stop - start)
        number += 1
    resumed, position = number > 0, piece.span(number)[0] if number < piece.ranges else blob.size
    for size in _received(file, piece, position, place, hasher, sent):
        if stopped.is_set():
            raise _Stopped
        position += size
        while number < piece.ranges and (span := piece.span(number))[1] <= position:
            file.complete(piece.first + number, span[1] - span[0])
            number += 1
    if resumed and hasher.hexdigest() != blob.sha256:
        file.forget(piece.first, piece.ranges)
        sent(-position)
        _stream_ranges(file, piece, stopped, place, sent)
        return
    try:
        _verify(blob, place, hasher.hexdigest(), position)
    except BaseException:
        file.forget(piece.first, piece.ranges)
        raise


def _received(
    file: Partial, piece: Piece, position: int, place: Backend, hasher: "hashlib._Hash", sent: Sent
) -> Iterator[int]:
    """Receive a blob from a position on into its place in a file; yields the size of each part, which is then in the
    file and hashed. Excess bytes are counted, but not written: they would overwrite the next blob."""
    blob = piece.blob
    beyond = blob.size + 1  # which reveals a longer object
    for chunk in _chunks(blob, place, position, beyond, piece.at + position):
        file.write(memoryview(chunk)[: max(blob.size - position, 0)], piece.at + position)
        hasher.update(chunk)
        position += len(chunk)
        sent(len(chunk))
        yield len(chunk)


def _chunks(blob: Blob, place: Backend, start: int, stop: int, at: int) -> Iterator[bytes | memoryview]:
    """The bytes for offset `at` of a file, in chunks, each of which is valid until the next one."""
    path = blob_path(blob)
    chunks = place.read_views(path, start, stop, at) if isinstance(place, ReadsViews) else place.read(path, start, stop)
    if chunks is None:
        raise NotFound(f"{place.url} holds no blob {blob.sha256} of {blob.size} bytes; {PUBLISH_AGAIN}")
    return chunks


def _verify(blob: Blob, place: Backend, sha256: str, size: int) -> None:
    if (sha256, size) != (blob.sha256, blob.size):
        raise _corrupt(blob, place, f"{size} of its {blob.size} bytes were received, with the SHA-256 {sha256}")


def _join(file: Partial, piece: Piece, place: Backend, sent: Sent) -> None:
    """Receive a blob in ranges. After a wrong digest with resumed ranges all ranges are received again."""
    resumed = [piece.span(number) for number in range(piece.ranges) if file.has(piece.first + number)]
    sent(sum(stop - start for start, stop in resumed))
    digest = _fetch(file, piece, place, sent)
    if digest != piece.blob.sha256 and resumed:
        file.forget(piece.first, piece.ranges)
        digest = _fetch(file, piece, place, ignore_progress)
    if digest != piece.blob.sha256:
        file.forget(piece.first, piece.ranges)
        raise _corrupt(piece.blob, place, f"its {piece.blob.size} bytes have the SHA-256 {digest}")


def _fetch(file: Partial, piece: Piece, place: Backend, sent: Sent) -> str:
    """Receive the missing ranges concurrently and in order, while hashing the complete ones; return the digest."""
    from concurrent.futures import ThreadPoolExecutor  # slow to import, and not needed for a cache hit

    hasher = hashlib.sha256()
    stopped = Event()
    with ThreadPoolExecutor(STREAMS) as pool:
        missing = iter([number for number in range(piece.ranges) if not file.has(piece.first + number)])
        pending: dict[int, Future[None]] = {}

        def submit() -> None:
            for number in islice(missing, _UNHASHED - len(pending)):
                pending[number] = pool.submit(_fetch_range, file, piece, number, place, sent, stopped)

        try:
            submit()
            for number in range(piece.ranges):
                if number in pending:
                    pending.pop(number).result()
                start, stop = piece.span(number)
                file.feed(hasher, piece.at + start, piece.at + stop)
                submit()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return hasher.hexdigest()


def _fetch_range(file: Partial, piece: Piece, number: int, place: Backend, sent: Sent, stopped: Event) -> None:
    blob = piece.blob
    start, stop = piece.span(number)
    for _ in range(_TRIES):
        position = start
        try:
            for chunk in _chunks(blob, place, start, stop, piece.at + start):
                if stopped.is_set():
                    return
                file.write(memoryview(chunk)[: stop - position], piece.at + position)
                position += len(chunk)
                sent(len(chunk))
        except Changed:
            # Every version of a blob should have the same bytes; the digest of the whole decides.
            sent(start - position)
            continue
        if position != stop:
            received = position - start
            raise _corrupt(blob, place, f"{received} bytes were received for the range from {start} to {stop}")
        file.complete(piece.first + number, stop - start)
        return
    raise _replaced(blob, place)


def _replaced(blob: Blob, place: Backend) -> Changed:
    return Changed(f"{place.url}/{blob_path(blob)} was replaced {_TRIES} times while it was read; read it again")


def _corrupt(blob: Blob, place: Backend, fault: str) -> Corrupt:
    return Corrupt(f"{place.url}/{blob_path(blob)}", fault, PUBLISH_AGAIN)


T = TypeVar("T")

_SIGNAL_SEEN: Final = 1.0  # seconds: a Ctrl-C just before a wait of the interpreter does not end that wait
_SMALL: Final = 1024**2
_SMALL_AT_ONCE: Final = 16  # small blobs mostly wait for the network
_LARGE_AT_ONCE: Final = 2  # each has several streams; one is still hashed while the next is received
_IN_ORDER_AT_ONCE: Final = _LARGE_AT_ONCE * STREAMS  # each has one stream


def streamed(blobs: Iterable[Blob]) -> frozenset[Blob]:
    """The large blobs that get one stream each, hashed as it arrives and not read again from the file: as many as
    there are streams, or more, and none that would be received long after the others."""
    large = [blob for blob in blobs if blob.size > IN_RANGES_ABOVE]
    share = sum(blob.size for blob in large) / STREAMS
    even = frozenset(blob for blob in large if blob.size <= share)
    return even if len(even) >= STREAMS else frozenset()


def at_once(
    function: Callable[[T], None],
    items: Iterable[tuple[T, Blob]],
    in_order: Collection[Blob] = (),
    stopped: Event | None = None,
) -> None:
    """Call `function` for each item, concurrently by the size of its blob; small blobs first. Those `in_order` have
    one stream each; `stopped` is set when a call fails or the user cancels."""
    groups: dict[int, list[T]] = {_SMALL_AT_ONCE: [], STREAMS: [], _LARGE_AT_ONCE: [], _IN_ORDER_AT_ONCE: []}
    for item, blob in items:
        groups[_IN_ORDER_AT_ONCE if blob in in_order else _streams(blob)].append(item)
    for streams, group in groups.items():
        if len(group) < 2:
            for item in group:
                function(item)
            continue
        from concurrent.futures import ThreadPoolExecutor, wait

        pool = ThreadPoolExecutor(streams)
        try:
            for done in [pool.submit(function, item) for item in group]:
                while not done.done():
                    wait((done,), _SIGNAL_SEEN)
                done.result()
        except BaseException:
            if stopped:
                stopped.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _streams(blob: Blob) -> int:
    if blob.size > IN_RANGES_ABOVE:
        return _LARGE_AT_ONCE
    return STREAMS if blob.size > _SMALL else _SMALL_AT_ONCE
