"""HTTP/1.1 messages: heads, chunked bodies, and AWS's chunk framing inside a body."""

from asyncio import IncompleteReadError, StreamReader
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import IO, Final

CHUNK: Final = 64 * 1024
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 409: "Conflict", 412: "Precondition Failed"}


class BrokenOff(Exception):
    """The other side closed the connection within a message."""


@dataclass(frozen=True)
class Head:
    """The start line of a request or response, and its fields in order."""

    start: str
    fields: tuple[tuple[str, str], ...] = ()

    def get(self, name: str) -> str | None:
        return next((value for item, value in self.fields if item.lower() == name.lower()), None)

    def without(self, *names: str) -> "Head":
        dropped = {name.lower() for name in names}
        return replace(self, fields=tuple(entry for entry in self.fields if entry[0].lower() not in dropped))

    def having(self, name: str, value: str) -> "Head":
        """The head with one field of this name."""
        return replace(self, fields=(*self.without(name).fields, (name, value)))

    @property
    def status(self) -> int:
        return int(self.start.split()[1])

    def encode(self) -> bytes:
        lines = (self.start, *(f"{name}: {value}" for name, value in self.fields))
        return "\r\n".join((*lines, "", "")).encode("latin-1")


async def nothing() -> AsyncIterator[bytes]:
    return
    yield


@dataclass(frozen=True)
class Answer:
    head: Head
    body: AsyncIterator[bytes] = field(default_factory=nothing)
    close: Callable[[], None] = lambda: None

    def of(self, data: bytes) -> "Answer":
        """The same response with another body."""

        async def once() -> AsyncIterator[bytes]:
            yield data

        return replace(self, head=self.head.having("Content-Length", str(len(data))), body=once())


def error(status: int, code: str, message: str) -> Answer:
    """An error response of S3; a HEAD request gets it without the body."""
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    head = Head(f"HTTP/1.1 {status} {_REASONS.get(status, code)}", (("Content-Type", "application/xml"),))
    return Answer(head).of(text.encode())


async def read_head(reader: StreamReader) -> Head | None:
    """The next head; None at the end of the connection."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except IncompleteReadError as gone:
        if gone.partial:
            raise BrokenOff("in a head") from gone
        return None
    start, *lines = text.rstrip("\r\n").split("\r\n")
    fields = (line.partition(":") for line in lines)
    return Head(start, tuple((name.strip(), value.strip()) for name, _, value in fields))


async def read_body(reader: StreamReader, head: Head, *, until_close: bool = False) -> AsyncIterator[bytes]:
    """The bytes of a body. `until_close` applies to responses without a length; requests then have no body."""
    length = head.get("Content-Length")
    if (head.get("Transfer-Encoding") or "").lower() == "chunked":
        async for chunk in _chunked(reader):
            yield chunk
    elif length is not None:
        async for chunk in _exactly(reader, int(length)):
            yield chunk
    elif until_close:
        while chunk := await reader.read(CHUNK):
            yield chunk


async def _exactly(reader: StreamReader, length: int) -> AsyncIterator[bytes]:
    while length:
        chunk = await reader.read(min(CHUNK, length))
        if not chunk:
            raise BrokenOff(f"with {length} bytes of a body outstanding")
        length -= len(chunk)
        yield chunk


async def _chunked(reader: StreamReader) -> AsyncIterator[bytes]:
    try:
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            async for chunk in _exactly(reader, size):
                yield chunk
            await reader.readexactly(2)
        while (await reader.readuntil(b"\r\n")) != b"\r\n":
            continue  # a trailer of HTTP; AWS's trailers are inside of the body
    except IncompleteReadError as gone:
        raise BrokenOff("between two chunks") from gone


def unpack_aws_chunks(packed: IO[bytes], plain: IO[bytes]) -> dict[str, str]:
    """Copy the content of an `aws-chunked` body, and return its trailers."""
    while size := int(packed.readline().split(b";")[0], 16):
        while size:
            data = packed.read(min(CHUNK, size))
            if not data:
                raise BrokenOff("in an aws-chunked body")
            size -= plain.write(data)
        packed.readline()
    lines = (line.decode().partition(":") for line in packed.read().splitlines() if b":" in line)
    return {name.strip().lower(): value.strip() for name, _, value in lines}
