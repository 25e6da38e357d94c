"""`python -m tests.localaws.router`: the load balancer of a fleet on the local AWS, and the clients of the fleet.

An HTTP proxy follows the weights of the listener's rule, as it reads them from the AWS of its environment, to servers
whose addresses are in a file, by colour. A target that breaks off or refuses the connection is a 502 of the load
balancer; without a target it is a 503. Counts and response times of each second are published as a load balancer
publishes those of a minute, and are written to a file.
"""

import argparse
import asyncio
import json
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.localaws.formation.provider import client_of
from tests.localaws.visitors import Fleet, counted, returned

_LOOK: Final = 0.2  # seconds between two looks at weights and targets
_PROMPTS: Final = ("the river", "the town was dark", "hello world", "how are you today", "in the night")
_BROKEN: Final = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)


@dataclass
class Second:
    """The requests of one second to one colour."""

    requests: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)
    own: Counter[str] = field(default_factory=Counter)  # answers of the load balancer itself


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of a request or response whose length is stated."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
    length = next((int(value) for name, _, value in lines if name == b"content-length"), 0)
    return head, await reader.readexactly(length)


def message(start: str, body: bytes = b"") -> bytes:
    return (
        f"{start}\r\nhost: fleet\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


@dataclass
class Router:
    """The proxy. `weights` and `targets` may be changed at any time."""

    weights: Mapping[str, int]
    targets: Mapping[str, list[str]]
    seconds: dict[tuple[int, str], Second] = field(default_factory=lambda: defaultdict(Second))

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The requests of one connection."""
        with suppress(*_BROKEN):
            while True:
                head, body = await read_message(reader)
                writer.write(await self._answer(head + body))
                await writer.drain()
        writer.close()

    async def _answer(self, request: bytes) -> bytes:
        weights = dict(self.weights)
        (colour,) = random.choices([*weights], [*weights.values()])
        second, began = self.seconds[int(time.time()), colour], time.monotonic()  # of the request
        hosts = self.targets.get(colour)
        if not hosts:
            second.own["503"] += 1
            return message("HTTP/1.1 503 Service Unavailable")
        second.requests += 1
        try:
            answer = await _forward(random.choice(hosts), request)
        except _BROKEN:
            self.seconds[int(time.time()), colour].own["502"] += 1
            return message("HTTP/1.1 502 Bad Gateway")
        second = self.seconds[int(time.time()), colour]  # of the response
        second.kinds[f"{answer[9:10].decode()}XX"] += 1
        second.times.append(time.monotonic() - began)
        return answer


async def _forward(address: str, request: bytes) -> bytes:
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        head, body = await read_message(reader)
        return head + body
    finally:
        writer.close()


async def call(port: int, rate: float, number: int) -> None:
    """A client: a request for one token, again and again."""
    body = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    while True:
        with suppress(*_BROKEN):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while True:
                due = time.monotonic() + random.expovariate(rate)
                prompt = f"{random.choice(_PROMPTS)} {number}"
                writer.write(message("POST /v1/completions HTTP/1.1", json.dumps({"prompt": prompt, **body}).encode()))
                await read_message(reader)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.sleep(0.05)


@dataclass
class Account:
    """The load balancer's side of AWS: rules and targets to the router, counts to CloudWatch. Runs on a thread."""

    router: Router
    fleet: Fleet
    targets: Path
    counts: Path
    _published: int = 0

    def run(self) -> None:
        self._published = int(time.time())
        while True:
            self.router.weights = self.fleet.weights()
            self.router.targets = json.loads(self.targets.read_text())
            if self._published < (done := int(time.time()) - 1):
                for at in range(self._published + 1, done + 1):
                    self._publish(at)
                self._published = done
            time.sleep(_LOOK)

    def _publish(self, at: int) -> None:
        data: list[dict[str, Any]] = []
        for colour in self.fleet.targets:
            if (second := self.router.seconds.pop((at, colour), None)) is None:
                continue
            data += counted(self.fleet, colour, at, second.requests, second.kinds, second.times)
            data += [returned(self.fleet, code, at, count) for code, count in second.own.items()]
            failed = second.kinds["5XX"] + second.kinds["4XX"] + sum(second.own.values())
            line = {"at": at, "colour": colour, "requests": second.requests, "failed": failed, "times": second.times}
            with self.counts.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if data:
            client_of("cloudwatch", self.fleet.region).put_metric_data(Namespace="AWS/ApplicationELB", MetricData=data)


async def serve(options: argparse.Namespace) -> None:
    fleet = Fleet.find(options.region, options.fleet)
    router = Router(fleet.weights(), json.loads(options.targets.read_text()))
    account = Account(router, fleet, options.targets, options.counts)
    threading.Thread(target=account.run, daemon=True).start()
    server = await asyncio.start_server(router.handle, "127.0.0.1", options.port)
    port = server.sockets[0].getsockname()[1]
    clients = [call(port, options.rate / options.clients, number) for number in range(options.clients)]
    await asyncio.gather(*clients, server.serve_forever())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--region", required=True)
    parser.add_argument("--fleet", required=True, help="PROJECT-FLEET")
    parser.add_argument("--targets", type=Path, required=True)
    parser.add_argument("--counts", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rate", type=float, default=80.0, help="requests a second of all clients")
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))
    sys.exit(0)


if __name__ == "__main__":
    main()
