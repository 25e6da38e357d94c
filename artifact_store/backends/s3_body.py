"""Request bodies of uploads: read in chunks from where they lie, by several threads at once."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nxpipe.artifact_store.backends.files import os_errors
from nxpipe.artifact_store.backends.protocol import Payload, Sent
from nxpipe.artifact_store.errors import Changed


class Interrupted(BaseException):
    """A stream was told to stop. No Exception: the client would take one for a fault of the network, and repeat."""


class Source:
    """The bytes of a payload. Its streams end at once when it is told to stop."""

    def __init__(self, payload: Payload, descriptor: int | None, sent: Sent) -> None:
        self._payload = payload
        self._descriptor = descriptor
        self._sent = sent
        self._one_at_a_time = threading.Lock()
        self.stopped = threading.Event()

    def at(self, start: int, size: int) -> bytes:
        if self._descriptor is not None:
            with os_errors(f"read {self._payload.source}"):
                return os.pread(self._descriptor, size, start)
        assert isinstance(self._payload.source, memoryview)
        return bytes(self._payload.source[start : start + size])

    def tell(self, size: int) -> None:
        """Watchers need not expect several threads."""
        with self._one_at_a_time:
            self._sent(size)

    @contextmanager
    def stopping_on_errors(self) -> Iterator[None]:
        """An error, or Ctrl-C, in the thread that waits for the others ends their work too."""
        try:
            yield
        except BaseException:
            self.stopped.set()
            raise

    def changed(self) -> Changed:
        return Changed(
            f"{self._payload.source if self._descriptor is not None else 'an array'} changed while it was being stored "
            f"as {self._payload.sha256}; let nobody write to it, and store it again"
        )


@contextmanager
def opened(payload: Payload, sent: Sent) -> Iterator[Source]:
    if not isinstance(payload.source, Path):
        yield Source(payload, None, sent)
        return
    with os_errors(f"read {payload.source}"):
        descriptor = os.open(payload.source, os.O_RDONLY)
    try:
        source = Source(payload, descriptor, sent)
        if os.fstat(descriptor).st_size != payload.size:
            raise source.changed()
        yield source
    finally:
        os.close(descriptor)


class Window:
    """A file object over a stretch of a source. Bytes that have to be sent again are told of once."""

    def __init__(self, source: Source, start: int, size: int) -> None:
        self._source = source
        self._start = start
        self._size = size
        self._position = 0
        self._told = 0

    def read(self, size: int | None = None) -> bytes:
        if self._source.stopped.is_set():
            raise Interrupted
        left = self._size - self._position
        data = self._source.at(self._start + self._position, left if size is None or size < 0 else min(size, left))
        if left and not data and size:
            self._source.stopped.set()
            raise Interrupted  # the file was cut; the receiver would wait for the rest
        self._position += len(data)
        if self._position > self._told:
            self._source.tell(self._position - self._told)
            self._told = self._position
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position
