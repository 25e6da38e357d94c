"""A model server as a user would write it, which behaves as its one argument says, in JSON.

It is late, hangs or exits as a real one does, answers a prediction, and finishes its open requests on SIGTERM.
`artifacts` changes the behaviour for the artifact in NXPIPE_ARTIFACT, by the SHA-256 of its manifest.
"""

# ruff: noqa: T201

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BEHAVIOUR = json.loads(sys.argv[1])
MANIFEST = Path(os.environ.get("NXPIPE_ARTIFACT", "."), "manifest.json")
VERSION = hashlib.sha256(MANIFEST.read_bytes()).hexdigest() if MANIFEST.exists() else ""
BEHAVIOUR |= BEHAVIOUR.get("artifacts", {}).get(VERSION, {})
STARTED = time.monotonic()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/exit":
            print("the device is gone", file=sys.stderr, flush=True)
            os._exit(7)
        if self.path == "/slow":
            time.sleep(0.6)
        healthy = time.monotonic() - STARTED > BEHAVIOUR.get("late", 0)
        self._answer(200 if healthy or self.path != "/health" else 503, VERSION.encode())

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        labels = BEHAVIOUR.get("labels", ["capital", "heart"])
        self._answer(200, json.dumps({"labels": labels, "score": 0.912, "text": text}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, the library's name
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close waits for open requests


def main() -> None:
    print(sorted(path.name for path in Path(os.environ.get("NXPIPE_ARTIFACT", ".")).iterdir()), flush=True)
    print("notifies:", "NOTIFY_SOCKET" in os.environ, flush=True)
    if "ends" in BEHAVIOUR:
        print("loading the model\n\nno such tensor: \x1b[31mlayer.0", file=sys.stderr, flush=True)
        if BEHAVIOUR["ends"] == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(BEHAVIOUR["ends"])
    server = Server((BEHAVIOUR.get("address", "127.0.0.1"), BEHAVIOUR["port"]), Handler)
    if "child" in BEHAVIOUR:
        child = subprocess.Popen(["sleep", "60"])
        Path(BEHAVIOUR["child"]).write_text(str(child.pid))
    if BEHAVIOUR.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(0.01)
    server.server_close()
    print("drained", flush=True)


if __name__ == "__main__":
    main()
