"""The router of the demonstration of rollouts: it follows weights, and counts what a load balancer counts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

import pytest

from tests.localaws.router import Router, Second, message, read_message

Request: TypeAlias = Callable[[], Awaitable[str]]

pytestmark = pytest.mark.sample(4, "router")


@dataclass
class Target:
    """A server that answers with a status, breaks off (0), and counts its requests."""

    status: int
    requests: int = 0
    address: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await read_message(reader)
        self.requests += 1
        if self.status:
            writer.write(message(f"HTTP/1.1 {self.status} X", b"echo " + body))
            await writer.drain()
        writer.close()


@asynccontextmanager
async def routed(
    *targets: Target, weights: dict[str, int]
) -> AsyncIterator[tuple[Router, Callable[[], Awaitable[str]]]]:
    """A router in front of a target of each colour, and a client's request, which returns status line and body."""
    servers = []
    for target in targets:
        servers.append(await asyncio.start_server(target.handle, "127.0.0.1", 0))
        target.address = f"127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"
    named = {colour: [target.address] for colour, target in zip(weights, targets, strict=False)}
    router = Router(weights, named)
    front = await asyncio.start_server(router.handle, "127.0.0.1", 0)

    async def request() -> str:
        reader, writer = await asyncio.open_connection(*front.sockets[0].getsockname()[:2])
        writer.write(message("POST /v1/completions HTTP/1.1", b"{}"))
        head, body = await asyncio.wait_for(read_message(reader), 10)
        writer.close()
        return f"{head.splitlines()[0].decode()} {body.decode()}"

    try:
        yield router, request
    finally:
        for server in (*servers, front):
            server.close()


def total(router: Router, colour: str) -> Second:
    own = [second for (_, name), second in router.seconds.items() if name == colour]
    return Second(
        sum(each.requests for each in own),
        sum((each.kinds for each in own), start=type(own[0].kinds)()),
        [time for each in own for time in each.times],
        sum((each.own for each in own), start=type(own[0].own)()),
    )


def test_requests_are_shared_by_the_weights_and_answers_are_passed_on_and_timed() -> None:
    async def play() -> None:
        blue, green = Target(200), Target(200)
        async with routed(blue, green, weights={"blue": 80, "green": 20}) as (router, request):
            answers = [await request() for _ in range(300)]
            assert set(answers) == {"HTTP/1.1 200 X echo {}"}
            assert blue.requests + green.requests == 300
            assert 20 <= green.requests <= 110
            router.weights = {"blue": 0, "green": 100}
            before = blue.requests
            for _ in range(20):
                await request()
            assert blue.requests == before
            counted = total(router, "green")
            assert (counted.requests, counted.kinds["2XX"], len(counted.times)) == (green.requests,) * 3

    asyncio.run(play())


def test_a_target_that_breaks_off_or_refuses_is_a_502_and_none_a_503_of_the_load_balancer() -> None:
    async def play() -> None:
        broken, failing = Target(0), Target(500)
        async with routed(broken, failing, weights={"blue": 100, "green": 0}) as (router, request):
            assert (await request()).startswith("HTTP/1.1 502")
            router.targets = {**router.targets, "blue": ["127.0.0.1:1"]}
            assert (await request()).startswith("HTTP/1.1 502")
            router.targets = {**router.targets, "blue": []}
            assert (await request()).startswith("HTTP/1.1 503")
            router.weights = {"blue": 0, "green": 100}
            assert (await request()).startswith("HTTP/1.1 500")
            blue, green = total(router, "blue"), total(router, "green")
            assert (blue.requests, blue.own["502"], blue.own["503"], blue.times) == (2, 2, 1, [])
            assert (green.requests, green.kinds["5XX"], len(green.times)) == (1, 1, 1)

    asyncio.run(play())
