"""Persistent HTTPS connections to one server, a strict parser of its responses, and request bodies read in chunks."""

import io
import os
import re
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import finalize

from botocore.exceptions import IncompleteReadError, ResponseStreamingError

from nxpipe.artifact_store.backends.files import os_errors
from nxpipe.artifact_store.backends.protocol import Payload, Sent
from nxpipe.artifact_store.errors import Changed


class Interrupted(BaseException):
    """A stream was stopped. Not an Exception, which the client would treat as a network fault and retry."""


class Source:
    """The bytes of a payload. Setting `stopped` ends its streams at once."""

    def __init__(self, payload: Payload, descriptor: int | None, sent: Sent) -> None:
        self._payload = payload
        self._descriptor = descriptor
        self._sent = sent
        self._lock = threading.Lock()
        self.stopped = threading.Event()

    def at(self, start: int, size: int) -> bytes:
        if self._descriptor is not None:
            with os_errors(f"read {self._payload.source}"):
                return os.pread(self._descriptor, size, start)
        assert isinstance(self._payload.source, memoryview)
        return bytes(self._payload.source[start : start + size])

    def report(self, size: int) -> None:
        """Report progress; calls of the callback are serialized."""
        with self._lock:
            self._sent(size)

    @contextmanager
    def stopping_on_errors(self) -> Iterator[None]:
        """Stop all streams after an error or Ctrl-C in the waiting thread."""
        try:
            yield
        except BaseException:
            self.stopped.set()
            raise

    def changed(self) -> Changed:
        return Changed(
            f"{self._payload.source if self._descriptor is not None else 'an array'} changed while it was being stored "
            f"as {self._payload.sha256}; stop all writers, and store it again"
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
    """A file object over a range of a source. Progress of bytes that are sent again is reported once."""

    def __init__(self, source: Source, start: int, size: int) -> None:
        self._source = source
        self._start = start
        self._size = size
        self._position = 0
        self._reported = 0

    def read(self, size: int | None = None) -> bytes:
        if self._source.stopped.is_set():
            raise Interrupted
        left = self._size - self._position
        data = self._source.at(self._start + self._position, left if size is None or size < 0 else min(size, left))
        if left and not data and size:
            self._source.stopped.set()
            raise Interrupted  # the file was truncated; the server would wait for the rest
        self._position += len(data)
        if self._position > self._reported:
            self._source.report(self._position - self._reported)
            self._reported = self._position
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position


_LONGEST_LINE: Final = 64 * 1024
_MOST_LINES: Final = 100
_LONGEST_ERROR: Final = 64 * 1024
_BUFFER: Final = 2 * 1024**2  # bytes of a part of a body: a large page of the kernel
_PATIENCE: Final = 1.0  # seconds in which a part is filled: progress and Ctrl-C do not wait longer
_REFUSED: Final = 300  # and above
_NO_BODY: Final = (204, 304)
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,8})(?:;[^\r]*)?\r\n")
_STATUS: Final = re.compile(rb"HTTP/1\.1 ([2-5]\d\d)[ \r]")


class FallBackToBotocore(Exception):
    """The fast path does not understand the response."""


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    tls: ssl.SSLContext | None
    connect_timeout: float
    read_timeout: float


class Connections:
    """A pool of connections to one server. Each thread takes an idle connection or opens a new one."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle: deque[Connection] = deque()
        finalize(self, _close_all, self._idle)

    def send(self, method: str, request: bytes) -> "Answer":
        """Send one request, without retries. The caller reads the body of the answer to its end or closes it."""
        connection = self._take()
        try:
            return connection.exchange(method, request)
        except (OSError, ValueError) as error:
            connection.close()
            raise FallBackToBotocore(str(error)) from error
        except BaseException:
            connection.close()
            raise

    def _take(self) -> "Connection":
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.is_open:
                return connection
            connection.close()
        try:
            return Connection(self._server, self._idle)
        except OSError as error:
            raise FallBackToBotocore(str(error)) from error


class Connection:
    """One connection; it returns to the pool when a response has been read to its end."""

    def __init__(self, server: Server, idle: "deque[Connection]") -> None:
        self._idle = idle
        self._socket = socket.create_connection((server.host, server.port), server.connect_timeout)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if server.tls:
                self._socket = server.tls.wrap_socket(self._socket, server_hostname=server.host)
            self._socket.settimeout(server.read_timeout)
        except BaseException:
            self._socket.close()
            raise
        self._file = self._socket.makefile("rb")
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    @property
    def is_open(self) -> bool:
        """False if data is waiting before a request: the server has then closed the connection."""
        return not self._poll.poll(0)

    def exchange(self, method: str, request: bytes) -> "Answer":
        self._socket.sendall(request)
        status = self._status()
        headers = self._headers()
        in_chunks = "transfer-encoding" in headers and method != "HEAD"
        body = Body(self, self._file, 0 if in_chunks else _length(method, status, headers), headers)
        error = b""
        if in_chunks:
            error = self._in_chunks(status, headers)
        elif status >= _REFUSED:
            error = body.error()
        if not body.left:
            body.finish()
        return Answer(status, headers, body, error)

    def release(self) -> None:
        self._idle.append(self)

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _status(self) -> int:
        match = _STATUS.match(self._file.readline(_LONGEST_LINE))
        if match is None:
            raise FallBackToBotocore("malformed status line")
        return int(match[1])

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for _ in range(_MOST_LINES):
            line = self._file.readline(_LONGEST_LINE)
            if line == b"\r\n":
                return headers
            name, colon, value = line.partition(b":")
            key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
            if not colon or not line.endswith(b"\r\n") or key != key.strip():
                raise FallBackToBotocore("malformed header")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        raise FallBackToBotocore("too many headers")

    def _in_chunks(self, status: int, headers: Mapping[str, str]) -> bytes:
        """The body of an error response with chunked encoding; S3 never sends an object with it."""
        if status < _REFUSED or "content-length" in headers or headers["transfer-encoding"].lower() != "chunked":
            raise FallBackToBotocore("a body of unknown length")
        error = b""
        while size := self._chunk_size(_LONGEST_ERROR - len(error)):
            error += self._file.read(size)
            self._end_of_line()
        self._end_of_line()
        return error

    def _chunk_size(self, most: int) -> int:
        match = _CHUNK_SIZE.fullmatch(self._file.readline(_LONGEST_LINE))
        if match is None or int(match[1], 16) > most:
            raise FallBackToBotocore("malformed chunk")
        return int(match[1], 16)

    def _end_of_line(self) -> None:
        if self._file.readline(_LONGEST_LINE) != b"\r\n":
            raise FallBackToBotocore("malformed end of a chunk")


class Body:
    """The body of a response, with the interface of botocore's streams."""

    def __init__(self, connection: Connection, file: io.BufferedReader, size: int, headers: Mapping[str, str]) -> None:
        self.left = size
        self._size = size
        self._file = file
        self._connection: Connection | None = connection
        self._closes = headers.get("connection", "").lower() == "close"

    def iter_chunks(self, chunk_size: int) -> Iterator[bytes]:
        while self.left:
            try:
                chunk = self._file.read(min(chunk_size, self.left))
            except (OSError, ValueError) as error:
                raise ResponseStreamingError(error=error) from error
            self.left -= len(chunk)
            if not chunk:
                raise IncompleteReadError(actual_bytes=self._size - self.left, expected_bytes=self._size)
            if not self.left:
                self.finish()
            yield chunk

    def views(self, at: int) -> Iterator[memoryview]:
        """The body in parts, which are views of one buffer and hold until the next one. They end at multiples of the
        buffer's size in a file that gets the body at offset `at`, or after a second with a slow server."""
        buffer = memoryview(bytearray(min(_BUFFER, self.left)))
        while self.left:
            part = buffer[: self._fill(buffer[: min(self.left, _BUFFER - at % _BUFFER)])]
            at += len(part)
            self.left -= len(part)
            if not part:
                raise IncompleteReadError(actual_bytes=self._size - self.left, expected_bytes=self._size)
            if not self.left:
                self.finish()
            yield part

    def _fill(self, buffer: memoryview) -> int:
        """The number of bytes that were received. An error after the first bytes is raised by the next call."""
        size, until = 0, time.monotonic() + _PATIENCE
        while size < len(buffer):
            try:
                read = self._file.readinto1(buffer[size:])
            except (OSError, ValueError) as error:
                if size:
                    break
                raise ResponseStreamingError(error=error) from error
            size += read
            if not read or time.monotonic() > until:
                break
        return size

    def error(self) -> bytes:
        """The whole body of an error response."""
        if self.left > _LONGEST_ERROR:
            raise FallBackToBotocore("error response too long")
        return b"".join(self.iter_chunks(_LONGEST_ERROR))

    def finish(self) -> None:
        """Return the connection to the pool after the whole body was read."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close() if self._closes else connection.release()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


@dataclass(frozen=True)
class Answer:
    """A response; `error` is the whole body of an error response."""

    status: int
    headers: Mapping[str, str]
    body: Body
    error: bytes = b""


def _length(method: str, status: int, headers: Mapping[str, str]) -> int:
    if method == "HEAD" or status in _NO_BODY:
        return 0
    text = headers.get("content-length", "")
    if not text.isdecimal():
        raise FallBackToBotocore("a body of unknown length")
    return int(text)


def _close_all(idle: "deque[Connection]") -> None:
    while idle:
        idle.pop().close()
