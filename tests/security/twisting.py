"""An HTTP server in front of an S3 server that hands each request to a twist: it may pass it on, as often as it
likes, and answers what it likes. The faults of tests/faults are those of an honest server; here it lies as well."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Broken(Exception):
    """Closes the connection without a response."""


@dataclass(frozen=True)
class Asked:
    number: int  # the first is 1
    method: str
    path: str  # with the query
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def lists(self) -> bool:
        return self.method == "GET" and "list-type" in self.path

    @property
    def reads_a_blob(self) -> bool:
        return self.method == "GET" and "/cas/sha256/" in unquote(urlsplit(self.path).path)

    @property
    def key(self) -> tuple[str, str]:
        return self.method, self.path


@dataclass(frozen=True)
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes
    promised: int | None = None  # Content-Length; None: the length of the body
    chunks: int = 1  # number of pieces of the body

    def having(self, **headers: str) -> "Answered":
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        kept = {name: value for name, value in self.headers.items() if name.lower() not in named}
        return replace(self, headers={**kept, **named})

    def without(self, name: str) -> "Answered":
        return replace(self, headers={key: value for key, value in self.headers.items() if key.lower() != name})


Forward = Callable[[], Answered]
Twist = Callable[[Asked, Forward], Answered]


def refusal(status: int, code: str, message: str = "as told by the test") -> Answered:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()
    return Answered(status, {"Content-Type": "application/xml"}, body)


def page(body: bytes) -> Answered:
    return Answered(200, {"Content-Type": "application/xml"}, body)


def honest(asked: Asked, forward: Forward) -> Answered:
    return forward()


class Twisting:
    """A proxy; `twist` can be replaced at any time."""

    def __init__(self, behind: str) -> None:
        self.behind = behind.removeprefix("http://")
        self.twist: Twist = honest
        self.asked: list[Asked] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as http.server names it
                """No log on the terminal of the tests."""

            def handle(self) -> None:
                try:
                    super().handle()
                except (ConnectionError, TimeoutError):
                    self.close_connection = True

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    outer.answer(self, body)
                except Broken:
                    self.close_connection = True

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve  # noqa: N815 - the names of http.server

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def under(self, twist: Twist) -> None:
        self.twist, self.asked = twist, []

    def answer(self, to: BaseHTTPRequestHandler, body: bytes) -> None:
        with self._lock:
            result = Asked(len(self.asked) + 1, to.command, to.path, dict(to.headers.items()), body)
            self.asked.append(result)
        answer = self.twist(result, lambda: self._forwarded(result))
        self._send(to, result, answer)

    def _forwarded(self, asked: Asked) -> Answered:
        connection = http.client.HTTPConnection(self.behind, timeout=60)
        headers = {name: value for name, value in asked.headers.items() if name.lower() not in ("connection", "expect")}
        connection.request(asked.method, asked.path, asked.body, headers)
        answer = connection.getresponse()
        data = answer.read()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in ("connection", "server")}
        if asked.method == "HEAD":
            return Answered(answer.status, kept, b"", promised=int(kept.get("Content-Length") or 0))
        return Answered(answer.status, kept, data)

    def _send(self, to: BaseHTTPRequestHandler, asked: Asked, answer: Answered) -> None:
        to.send_response_only(answer.status)
        dropped = ("content-length", "transfer-encoding")
        for name, value in answer.headers.items():
            if name.lower() not in dropped:
                to.send_header(name, value)
        length = len(answer.body) if answer.promised is None else answer.promised
        to.send_header("Content-Length", str(length))
        to.end_headers()
        if asked.method != "HEAD":
            step = max(-(-len(answer.body) // answer.chunks), 1)
            for at in range(0, len(answer.body), step):
                to.wfile.write(answer.body[at : at + step])
                to.wfile.flush()
        if length > len(answer.body) and asked.method != "HEAD":
            raise Broken

    def __enter__(self) -> "Twisting":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def twisting(behind: str) -> Iterator[Twisting]:
    with Twisting(behind) as server:
        yield server
