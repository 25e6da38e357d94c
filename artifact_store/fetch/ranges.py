"""Range reads: one blob into a file, in parallel ranges, hashed while they arrive."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from threading import Event, Lock
from typing import TYPE_CHECKING, Final, TypeVar

from nxpipe.artifact_store.backends.files import Scratch, scratch
from nxpipe.artifact_store.backends.no_symlinks import Spot
from nxpipe.artifact_store.backends.protocol import Backend, Sent, ignore_progress
from nxpipe.artifact_store.blobs import PUBLISH_AGAIN
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Changed, Corrupt, NotFound
from nxpipe.artifact_store.fetch.partial import Partial, partial
from nxpipe.artifact_store.layout import blob_path

if TYPE_CHECKING:
    from concurrent.futures import Future


IN_RANGES_ABOVE: Final = 64 * 1024**2
RANGE: Final = 32 * 1024**2
STREAMS: Final = 6  # ranges at once: what one process can take in
_UNHASHED: Final = 8  # ranges: hashing keeps up, while they are in memory, instead of coming last
_TRIES: Final = 3  # of a range whose object is written anew under our hands


@dataclass(frozen=True)
class Piece:
    """A blob that comes into a file at `at`; the first of its ranges is the file's stretch `first`."""

    blob: Blob
    at: int = 0
    first: int = 0

    @property
    def ranges(self) -> int:
        return ranges_of(self.blob)

    def span(self, number: int) -> tuple[int, int]:
        """Where in the blob a range begins and ends."""
        if self.ranges == 1:
            return 0, self.blob.size
        return number * RANGE, min((number + 1) * RANGE, self.blob.size)


def ranges_of(blob: Blob) -> int:
    return -(-blob.size // RANGE) if blob.size > IN_RANGES_ABOVE else 1


def receive(blob: Blob, spot: Spot, use: Callable[[str, int], None], place: Backend, sent: Sent) -> None:
    """Hand a file with these bytes, proved right, to `use`: its name in `spot`, to be moved where it belongs, and its
    handle, to be read. By its name alone another user of that folder could exchange it."""
    if blob.size > IN_RANGES_ABOVE:
        with partial(spot, blob.sha256, blob.size, ranges_of(blob)) as file:
            fill(file, Piece(blob), place, sent)
            file.finish()
            use(file.path.name, file.descriptor)
        return
    with _taken_back_on_errors(sent) as tell, scratch(spot.root, 0o644, spot.files) as small:
        handle = os.dup(small.descriptor)
        try:
            _copy(small, blob, place, tell)
            use(small.path.name, handle)
        finally:
            os.close(handle)


def fill(file: Partial, piece: Piece, place: Backend, sent: Sent) -> None:
    """Bring a blob to its place in a file, proved right; of a large one, what has come before does not come again."""
    with _taken_back_on_errors(sent) as tell:
        if piece.ranges == 1:
            _stream(file, piece, place, tell)
        else:
            _join(file, piece, place, tell)


@contextmanager
def _taken_back_on_errors(sent: Sent) -> Iterator[Sent]:
    """What is told from several threads, one at a time; what came to nothing is told again, as less than nothing."""
    one_at_a_time, told = Lock(), 0

    def tell(size: int) -> None:
        nonlocal told
        with one_at_a_time:
            told += size
            sent(size)

    try:
        yield tell
    except BaseException:
        tell(-told)
        raise


def _copy(small: Scratch, blob: Blob, place: Backend, sent: Sent) -> None:
    for chunk in _chunks(blob, place, sent):
        small.write(chunk)
    found = small.finish()
    _insist(blob, place, found.sha256, found.size)


def _stream(file: Partial, piece: Piece, place: Backend, sent: Sent) -> None:
    hasher, came = hashlib.sha256(), 0
    for chunk in _chunks(piece.blob, place, sent):
        hasher.update(chunk)
        # What is too long is found out below, and must not touch what comes behind it in the file.
        file.write(memoryview(chunk)[: max(piece.blob.size - came, 0)], piece.at + came)
        came += len(chunk)
    _insist(piece.blob, place, hasher.hexdigest(), came)
    file.complete(piece.first, piece.blob.size)


def _chunks(blob: Blob, place: Backend, sent: Sent) -> Iterator[bytes]:
    # One byte more than it should have tells a longer one, without taking all of that in.
    chunks = place.read(blob_path(blob), 0, blob.size + 1)
    if chunks is None:
        raise _absent(blob, place)
    for chunk in chunks:
        yield chunk
        sent(len(chunk))


def _insist(blob: Blob, place: Backend, sha256: str, size: int) -> None:
    if (sha256, size) != (blob.sha256, blob.size):
        raise _corrupt(blob, place, f"{size} of its {blob.size} bytes came, with the SHA-256 {sha256}")


def _join(file: Partial, piece: Piece, place: Backend, sent: Sent) -> None:
    """If it comes out wrong, and part of it came from elsewhere, that part may be to blame: all of it comes again."""
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
    """Get the missing ranges, several at once and the first ones first; the digest of the whole follows behind."""
    from concurrent.futures import ThreadPoolExecutor  # takes a while, and a hit needs none

    hasher = hashlib.sha256()
    stopped = Event()
    with ThreadPoolExecutor(STREAMS) as pool:
        missing = iter([number for number in range(piece.ranges) if not file.has(piece.first + number)])
        coming: dict[int, Future[None]] = {}

        def begin() -> None:
            for number in islice(missing, _UNHASHED - len(coming)):
                coming[number] = pool.submit(_fetch_range, file, piece, number, place, sent, stopped)

        try:
            begin()
            for number in range(piece.ranges):
                if number in coming:
                    coming.pop(number).result()
                start, stop = piece.span(number)
                file.feed(hasher, piece.at + start, piece.at + stop)
                begin()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return hasher.hexdigest()


def _fetch_range(file: Partial, piece: Piece, number: int, place: Backend, sent: Sent, stopped: Event) -> None:
    blob = piece.blob
    start, stop = piece.span(number)
    for _ in range(_TRIES):
        at = start
        try:
            chunks = place.read(blob_path(blob), start, stop)
            if chunks is None:
                raise _absent(blob, place)
            for chunk in chunks:
                if stopped.is_set():
                    return
                file.write(memoryview(chunk)[: stop - at], piece.at + at)
                at += len(chunk)
                sent(len(chunk))
        except Changed:
            # Equal names mean equal bytes, whichever version; the digest of the whole decides.
            sent(start - at)
            continue
        if at != stop:
            raise _corrupt(blob, place, f"its bytes from {start} to {stop} are {at - start}")
        file.complete(piece.first + number, stop - start)
        return
    raise Changed(f"{place.url}/{blob_path(blob)} was written anew {_TRIES} times while it was read; read it again")


def _absent(blob: Blob, place: Backend) -> NotFound:
    return NotFound(f"{place.url} holds no blob {blob.sha256} of {blob.size} bytes; {PUBLISH_AGAIN}")


def _corrupt(blob: Blob, place: Backend, fault: str) -> Corrupt:
    return Corrupt(f"{place.url}/{blob_path(blob)}", fault, PUBLISH_AGAIN)


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
