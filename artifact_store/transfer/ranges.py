"""One blob out of one place into a file: large ones in parallel ranges, hashed while they arrive."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Event, Lock
from typing import Final

from artifact_store.backends.files import Scratch, scratch
from artifact_store.backends.protocol import Backend, Sent, nobody
from artifact_store.blobs import PUBLISH_AGAIN
from artifact_store.documents import Blob
from artifact_store.errors import Changed, Corrupt, NotFound
from artifact_store.layout import blob_path
from artifact_store.transfer.partial import Partial, partial

IN_RANGES_ABOVE: Final = 64 * 1024**2
STREAMS: Final = 6  # ranges at once: what one process can take in
_UNHASHED: Final = 8  # ranges: hashing keeps up, while they are in memory, instead of coming last
_TRIES: Final = 3  # of a range whose object is written anew under our hands


def receive(blob: Blob, folder: Path, use: Callable[[Path], None], place: Backend, sent: Sent) -> None:
    """Hand a file in `folder` with these bytes, proved right, to `use`, which moves it where it belongs."""
    with _taken_back_on_errors(sent) as tell:
        if blob.size > IN_RANGES_ABOVE:
            with partial(folder, blob) as file:
                _fill(file, blob, place, tell)
                use(file.path)
            return
        with scratch(folder) as small:
            _copy(small, blob, place, tell)
            use(small.path)


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
    # One byte more than it should have tells a longer one, without taking all of that in.
    chunks = place.read(blob_path(blob), 0, blob.size + 1)
    if chunks is None:
        raise _absent(blob, place)
    for chunk in chunks:
        small.write(chunk)
        sent(len(chunk))
    found = small.finish()
    if (found.sha256, found.size) != (blob.sha256, blob.size):
        raise _corrupt(blob, place, f"{found.size} of its {blob.size} bytes came, with the SHA-256 {found.sha256}")


def _fill(file: Partial, blob: Blob, place: Backend, sent: Sent) -> None:
    """If it comes out wrong, and part of it came from elsewhere, that part may be to blame: all of it comes again."""
    missing = {*file.missing()}
    resumed = [file.span(number) for number in range(file.ranges) if number not in missing]
    sent(sum(stop - start for start, stop in resumed))
    digest = _fetch(file, blob, place, sent)
    if digest != blob.sha256 and resumed:
        file.forget()
        digest = _fetch(file, blob, place, nobody)
    if digest != blob.sha256:
        file.forget()
        raise _corrupt(blob, place, f"its {blob.size} bytes have the SHA-256 {digest}")
    file.finish()


def _fetch(file: Partial, blob: Blob, place: Backend, sent: Sent) -> str:
    """Get the missing ranges, several at once and the first ones first; the digest of the whole follows behind."""
    hasher = hashlib.sha256()
    stopped = Event()
    with ThreadPoolExecutor(STREAMS) as pool:
        missing = iter(file.missing())
        coming: dict[int, Future[None]] = {}

        def begin() -> None:
            for number in islice(missing, _UNHASHED - len(coming)):
                coming[number] = pool.submit(_fetch_range, file, number, blob, place, sent, stopped)

        try:
            begin()
            for number in range(file.ranges):
                if number in coming:
                    coming.pop(number).result()
                file.feed(hasher, number)
                begin()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return hasher.hexdigest()


def _fetch_range(file: Partial, number: int, blob: Blob, place: Backend, sent: Sent, stopped: Event) -> None:
    start, stop = file.span(number)
    for _ in range(_TRIES):
        at = start
        try:
            chunks = place.read(blob_path(blob), start, stop)
            if chunks is None:
                raise _absent(blob, place)
            for chunk in chunks:
                if stopped.is_set():
                    return
                file.write(chunk[: stop - at], at)
                at += len(chunk)
                sent(len(chunk))
        except Changed:
            # Equal names mean equal bytes, whichever version; the digest of the whole decides.
            sent(start - at)
            continue
        if at != stop:
            raise _corrupt(blob, place, f"its bytes from {start} to {stop} are {at - start}")
        file.complete(number)
        return
    raise Changed(f"{place.url}/{blob_path(blob)} was written anew {_TRIES} times while it was read; read it again")


def _absent(blob: Blob, place: Backend) -> NotFound:
    return NotFound(f"{place.url} holds no blob {blob.sha256} of {blob.size} bytes; {PUBLISH_AGAIN}")


def _corrupt(blob: Blob, place: Backend, fault: str) -> Corrupt:
    return Corrupt(f"{place.url}/{blob_path(blob)}", fault, PUBLISH_AGAIN)
