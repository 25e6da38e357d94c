"""A server that responds to each request with the next bytes of a script, valid or not, and records the requests."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Final

OK: Final = b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n'


@dataclass(frozen=True)
class Asked:
    start: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def by_the_sdk(self) -> bool:
        """Whether botocore sent the request: it marks its attempts; the fast path does not."""
        return "amz-sdk-request" in self.headers


@dataclass
class Script:
    """The responses; `None` closes the connection without one."""

    url: str
    answers: list[bytes | None] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    @property
    def ways(self) -> list[str]:
        return ["sdk" if entry.by_the_sdk else "quick" for entry in self.asked]


class _Server(ThreadingTCPServer):
    """A server that ignores clients which break off the handshake."""

    allow_reuse_address = True
    daemon_threads = True
    script: Script
    one_at_a_time: threading.Lock
    connections = 0


class _Connection(StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        self.server.connections += 1
        number = self.server.connections
        with suppress(ConnectionError, ssl.SSLError):
            while (request := self._request(number)) is not None:
                with self.server.one_at_a_time:
                    self.server.script.asked.append(request)
                    answer = self.server.script.answers.pop(0)
                if answer is None:
                    return
                self.wfile.write(answer)
                if b"Connection: close" in answer or not answer.startswith(b"HTTP/1.1"):
                    return

    def _request(self, connection: int) -> Asked | None:
        start = self.rfile.readline().decode().strip()
        if not start:
            return None
        headers: dict[str, str] = {}
        while line := self.rfile.readline().decode("latin-1").strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("expect") == "100-continue":  # the SDK would wait a second for it
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return Asked(start, headers, self.rfile.read(int(headers.get("content-length", 0))), connection)


@contextmanager
def scripted(certificate: Path | None = None) -> Iterator[Script]:
    """Run a scripted server; with a certificate file (key included), over TLS."""
    with _Server(("127.0.0.1", 0), _Connection) as server:
        scheme = "http"
        if certificate:
            scheme, context = "https", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.script = Script(f"{scheme}://127.0.0.1:{server.server_address[1]}")
        server.one_at_a_time = threading.Lock()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.script
        finally:
            server.shutdown()
            thread.join()
