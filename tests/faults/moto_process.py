"""moto's S3 server in a process of its own, with a movable clock and one request at a time."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Final

from tests.faults.wire import CHUNK, Answer, BrokenOff, Head, nothing, read_body, read_head

# It ends with its parent, because its standard input is then closed. Each line on its standard input
# is a number of seconds by which objects written from then on are younger.
_SERVER: Final = """
import datetime, logging, sys
from moto.s3 import models
from moto.server import ThreadedMotoServer
ahead, utcnow = datetime.timedelta(), models.utcnow
models.utcnow = lambda: utcnow() + ahead
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
for line in sys.stdin:
    ahead += datetime.timedelta(seconds=float(line))
    print("moved", flush=True)
"""


class MotoFailed(Exception):
    """The server behind the proxy failed; such a test has proved nothing."""


@dataclass(frozen=True)
class Moto:
    host: str
    port: int
    advance: Callable[[float], None]  # offset in seconds

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def ask(self, head: Head, body: IO[bytes] | None = None) -> Answer:
        """Send one request on one connection, as moto's server requires; the response's body may still arrive."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            answer = await self._exchange(head, body, reader, writer)
        except (OSError, BrokenOff) as problem:
            writer.close()
            raise MotoFailed(f"moto broke off at {head.start}: {problem}") from problem
        silent = head.start.startswith("HEAD ") or answer.status in (204, 304)
        content = nothing() if silent else _content(reader, answer)
        return Answer(answer.without("Connection"), content, writer.close)

    async def _exchange(
        self, head: Head, body: IO[bytes] | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Head:
        writer.write(head.having("Connection", "close").encode())
        if body is not None:
            body.seek(0)
            while data := body.read(CHUNK):
                writer.write(data)
                await writer.drain()
        answer = await read_head(reader)
        if answer is None:
            raise MotoFailed(f"moto closed the connection without an answer to {head.start}")
        return answer


async def _content(reader: asyncio.StreamReader, answer: Head) -> AsyncIterator[bytes]:
    try:
        async for chunk in read_body(reader, answer, until_close=True):
            yield chunk
    except (OSError, BrokenOff) as problem:
        raise MotoFailed(f"moto broke off in an answer: {problem}") from problem


async def whole(answer: Answer) -> bytes:
    """The small responses that are read and amended."""
    try:
        return b"".join([chunk async for chunk in answer.body])
    finally:
        answer.close()


@contextmanager
def moto_process() -> Iterator[Moto]:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout

        def advance(seconds: float) -> None:
            print(seconds, file=orders, flush=True)
            if not answers.readline():
                raise MotoFailed("moto ended when its clock was to be moved")

        host, port = answers.readline().split()
        try:
            yield Moto(host, int(port), advance)
        finally:
            process.kill()
