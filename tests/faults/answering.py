"""Receipt of a request and sending of a response, complete or interrupted."""

from asyncio import StreamReader, StreamWriter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import IO, Final

from tests.faults.exchange import Exchange
from tests.faults.plan import CutUpload, Truncate
from tests.faults.wire import CONTINUE, Answer, Head, read_body, unpack_aws_chunks

_OF_THE_CONNECTION: Final = ("Connection", "Expect", "Transfer-Encoding")
_OF_AWS_CHUNKS: Final = ("Content-Encoding", "x-amz-trailer", "x-amz-decoded-content-length")


async def receive(head: Head, exchange: Exchange, body: IO[bytes], reader: StreamReader, writer: StreamWriter) -> None:
    """Read a request completely before anything is done with it: S3 never stores half an upload."""
    if (head.get("Expect") or "").lower() == "100-continue":
        writer.write(CONTINUE)
    cut = exchange.fault if isinstance(exchange.fault, CutUpload) else None
    limit = _cut_after(head, cut) if cut else None
    if limit != 0:
        async for chunk in read_body(reader, head):
            exchange.received += body.write(chunk)
            if limit is not None and exchange.received >= limit:
                break
    if limit is not None:
        exchange.received = min(exchange.received, limit)
        raise exchange.cut("cut while the request came in")


def _cut_after(head: Head, cut: CutUpload) -> int:
    return int(head.get("Content-Length") or 0) // 2 if cut.after is None else cut.after


def unpacked(head: Head, body: IO[bytes], plain: IO[bytes]) -> tuple[Head, IO[bytes], dict[str, str]]:
    """The request without its transport encoding: head, body, and all claims of its header or trailer fields."""
    trailers: dict[str, str] = {}
    if "aws-chunked" in (head.get("Content-Encoding") or ""):
        body.seek(0)
        trailers = unpack_aws_chunks(body, plain)
        head = head.without(*_OF_AWS_CHUNKS).having("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        body = plain
    size = body.seek(0, 2)
    head = head.without(*_OF_THE_CONNECTION)
    if size or head.get("Content-Length") is not None:
        head = head.having("Content-Length", str(size))
    return head, body, {**{name.lower(): value for name, value in head.fields}, **trailers}


def dated(answer: Answer, ahead: float) -> Answer:
    """The response with a Date, which S3 always sends."""
    now = datetime.now(UTC) + timedelta(seconds=ahead)
    return replace(answer, head=answer.head.having("Date", format_datetime(now, usegmt=True)))


async def send(answer: Answer, exchange: Exchange, writer: StreamWriter) -> None:
    """Send a response; record the outcome first, so that a test that has the response finds the record."""
    try:
        if isinstance(exchange.fault, Truncate):
            await _break_off(answer, exchange, exchange.fault, writer)
        unbounded = answer.head.get("Content-Length") is None and answer.head.status not in (204, 304)
        exchange.status = answer.head.status
        exchange.outcome = "answered"
        writer.write((answer.head.having("Connection", "close") if unbounded else answer.head).encode())
        if exchange.request.method != "HEAD":
            async for chunk in answer.body:
                writer.write(chunk)
                await writer.drain()
        await writer.drain()
        if unbounded:
            raise exchange.cut("answered")
    finally:
        answer.close()


async def _break_off(answer: Answer, exchange: Exchange, fault: Truncate, writer: StreamWriter) -> None:
    broken = exchange.cut("the answer broke off")
    length = int(answer.head.get("Content-Length") or 0)
    left = length // 2 if fault.keep is None else fault.keep
    if exchange.request.method == "HEAD" or length == 0:
        writer.write(answer.head.encode()[:6])
        raise broken
    exchange.status = answer.head.status
    writer.write(answer.head.encode())
    async for chunk in answer.body:
        writer.write(chunk[:left])
        await writer.drain()
        left -= len(chunk[:left])
        if left == 0:
            break
    raise broken
