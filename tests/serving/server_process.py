"""`nxpipe serve` as a process of its own, and artifacts for it."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from click.testing import CliRunner

from nxpipe.pipeline.cli.main import cli
from nxpipe.pipeline.util.console import Console
from tests.pipeline.command import NXPIPE
from tests.serving import checkpoints

_START_LIMIT: Final = 60.0


def build(
    folder: Path, kind: str, *words: str, seed: int = 0, store: Path | None = None, **changes: Any
) -> tuple[str, Path]:
    """Build a tiny model with weights of a seed, in this process; its name, and the store."""
    model, store = checkpoints.write(folder / kind, kind, **changes), store or folder / "store"
    options = ("--weights", f"random:{seed}", "--target", "inf2.xlarge", "--no-verify", "--store", str(store))
    command = ["build", "--model-id", str(model), *words, *options, "--json"]
    answer = CliRunner().invoke(cli, command, obj=Console(quiet=True), catch_exceptions=False)
    assert answer.exit_code == 0, answer.stderr
    (found,) = json.loads(answer.stdout)
    return f"{kind}@{found['request_key'][:12]}", store


class Running:
    """A server that accepts requests."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self.process, self.port = process, port
        self.url = f"http://127.0.0.1:{port}"

    def request(self, method: str, path: str, body: Any = None, timeout: float = 60) -> tuple[int, Any, dict[str, str]]:
        """The status, the document or text, and the headers of a response."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as connection:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            headers = {name.lower(): value for name, value in response.getheaders()}
        is_json = headers.get("content-type", "").startswith("application/json")
        return response.status, json.loads(text) if is_json else text.decode(), headers

    def get(self, path: str) -> Any:
        return self.request("GET", path)[1]

    def post(self, path: str, **body: Any) -> Any:
        status, document, _ = self.request("POST", path, body)
        assert status == 200, document
        return document

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def terminate(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)


@contextmanager
def serving(artifact: str, store: Path, *words: str, pause: float = 0.05, **environment: str) -> Iterator[Running]:
    """A server on a free port, which is asked every `pause` seconds whether it is ready."""
    port = free_port()
    process = subprocess.Popen(
        [str(NXPIPE), "serve", artifact, "--store", str(store), "--port", str(port), *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        running = Running(process, port)
        await_ready(running, pause)
        yield running
    finally:
        process.kill()
        process.communicate()


def await_ready(running: Running, pause: float = 0.05) -> None:
    """Wait until the server accepts requests; its log if it ends before."""
    ends = time.monotonic() + _START_LIMIT
    while time.monotonic() < ends:
        if running.process.poll() is not None:
            raise AssertionError(running.process.communicate()[1])
        try:
            if running.request("GET", "/readyz")[0] == 200:
                return
        except OSError:
            time.sleep(pause)
    raise AssertionError("the server did not become ready")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
