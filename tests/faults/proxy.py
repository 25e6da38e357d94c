"""A proxy in front of moto that behaves as S3, with the faults of S3 and networks that a plan orders.

It records every request, so that a test can count the requests of an operation, and then repeat the operation with a
fault at each of them. truth.py lists the divergences of moto that it corrects, plan.py the faults.

    with Proxy(moto) as proxy:
        proxy.start_over(Plan(at(3, CutAfter())))
        ...                            # a client of proxy.url, in this process or another
        assert proxy.exchanges[2].outcome == "the answer was lost"

To kill a client at its n-th request: plan `at(n, Hold())`, start the client, `wait_held()`, kill it,
`release(drop=True)`, `settle()`. Another process controls the proxy by JSON over HTTP: see control.py.
"""

import asyncio
import threading
from collections.abc import Coroutine
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import IO, Any, Final, Self, TypeVar

from tests.faults.answering import dated, receive, send, unpacked
from tests.faults.control import PATH, steer
from tests.faults.exchange import UNDER_WAY, Cut, Exchange, Run
from tests.faults.moto_process import Moto
from tests.faults.plan import CutAfter, CutBefore, Delay, Hold, Plan, Refuse
from tests.faults.truth import TruthfulS3, Upload
from tests.faults.wire import Answer, BrokenOff, Head, error, read_body, read_head

T = TypeVar("T")

_IN_MEMORY: Final = 1024 * 1024  # bytes of a body in memory; the others are in a temporary file


class Proxy:
    def __init__(self, moto: Moto, uploads: dict[str, Upload] | None = None) -> None:
        """Proxies of one moto share its multipart uploads by `uploads`."""
        self._moto = moto
        self._uploads: dict[str, Upload] = {} if uploads is None else uploads
        self._run = Run(Plan())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)
        self.connections = 0  # number of opened connections
        self._open_connections: set[asyncio.Task[None]] = set()
        self._failures: list[Exception] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._in_loop(self._open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raise the proxy's own failures, which must not pass for ordered faults."""
        self._in_loop(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._failures:
            raise self._failures[0] from error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def exchanges(self) -> list[Exchange]:
        """All exchanges since the start of the plan, in order of arrival."""
        return list(self._run.exchanges)

    def start_over(self, plan: Plan) -> None:
        """Start another plan with an empty record; the next request has number 1."""
        self._in_loop(self.begin(plan))

    def wait_held(self, timeout: float = 30) -> Exchange:
        """Wait for the first request that a Hold has stopped."""
        return self._in_loop(asyncio.wait_for(self.until_held(), timeout))

    def release(self, *, drop: bool = False) -> None:
        """Continue all held requests, or drop their connections."""
        self._in_loop(self.let_go(drop=drop))

    def settle(self, timeout: float = 30) -> None:
        """Wait until no request is running: those of a killed client are then executed or lost."""
        self._in_loop(asyncio.wait_for(self.until_settled(), timeout))

    # The code below runs in the proxy's own thread.

    async def begin(self, plan: Plan) -> None:
        self._run = Run(plan)

    async def until_held(self) -> Exchange:
        while not self._run.held:
            await asyncio.sleep(0.002)
        return self._run.held[0]

    async def until_settled(self) -> None:
        while not self._run.settled:
            await asyncio.sleep(0.002)

    async def let_go(self, *, drop: bool) -> None:
        for entry in self._run.held:
            entry.held, entry.dropped = False, drop
            entry.let_go.set()

    async def _open(self) -> None:
        self._s3 = TruthfulS3(self._moto, self._uploads)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port: int = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for connection in self._open_connections:
            connection.cancel()
        await asyncio.gather(*self._open_connections, return_exceptions=True)

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open_connections.add(task)
        self.connections += 1
        try:
            while (head := await read_head(reader)) is not None:
                await self._handle(head, reader, writer)
        except (Cut, BrokenOff, ConnectionError, asyncio.CancelledError):
            return  # ended by the plan, the client or the test
        except Exception as failure:
            self._failures.append(failure)
        finally:
            self._open_connections.remove(task)
            writer.close()

    async def _handle(self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.start.split()[1] == PATH:
            order = b"".join([chunk async for chunk in read_body(reader, head)])
            shown = Answer(Head("HTTP/1.1 200 OK", (("Content-Type", "application/json"),)))
            writer.write((answer := shown.of(await steer(self, order))).head.encode())
            writer.writelines([chunk async for chunk in answer.body])
            await writer.drain()
            return
        run = self._run
        exchange = run.begin(head)
        try:
            with SpooledTemporaryFile(_IN_MEMORY) as body:
                await asyncio.sleep(run.plan.latency)
                await receive(head, exchange, body, reader, writer)
                answer = await self._answer(head, exchange, body)
            await send(dated(answer, run.plan.clock_ahead), exchange, writer)
        except (BrokenOff, ConnectionError):
            exchange.outcome = "the client went away"
            raise
        finally:
            if exchange.outcome == UNDER_WAY:
                exchange.outcome = "the proxy was stopped or failed"

    async def _answer(self, head: Head, exchange: Exchange, body: IO[bytes]) -> Answer:
        """Execute a request, with each possible fault in the order of a request's life."""
        fault = exchange.fault
        if isinstance(fault, Delay):
            await asyncio.sleep(fault.seconds)
        if fault == Hold("before"):
            await exchange.hold()
        if isinstance(fault, Refuse):
            return error(fault.status, fault.code, "The test's plan says so.")
        if isinstance(fault, CutBefore):
            raise exchange.cut("cut before anything was done")
        with SpooledTemporaryFile(_IN_MEMORY) as plain:
            answer = await self._s3.carry_out(exchange.request, *unpacked(head, body, plain))
        try:
            if fault == Hold("after"):
                await exchange.hold()
            if isinstance(fault, CutAfter):
                raise exchange.cut("the answer was lost")
        except BaseException:
            answer.close()
            raise
        return answer
