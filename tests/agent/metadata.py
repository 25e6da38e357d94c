"""The instance metadata service, version 2: a token, and the entries that a test sets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "a-session"


@dataclass
class Metadata:
    values: dict[str, str | bytes] = field(default_factory=dict)
    url: str = ""


@contextmanager
def metadata_service() -> Iterator[Metadata]:
    held = Metadata({"local-ipv4": "127.0.0.1"})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or each answer waits 40 ms for an acknowledgement of its headers

        def do_PUT(self) -> None:
            lifetime = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            self._say(*((200, TOKEN) if self.path == "/latest/api/token" and lifetime else (400, "")))

        def do_GET(self) -> None:
            name = self.path.removeprefix("/latest/meta-data/")
            if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
                self._say(401, "")
            else:
                self._say(*((200, held.values[name]) if name in held.values else (404, "")))

        def _say(self, status: int, said: str | bytes) -> None:
            body = said.encode() if isinstance(said, str) else said
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):  # the client may have disconnected
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002, the library's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    held.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield held
    finally:
        server.shutdown()
        server.server_close()
