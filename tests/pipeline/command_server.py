"""`nxpipe` processes without the start of an interpreter: a server imports the product once and forks for each run.

Contract: a run is a process of its own, with its own arguments, folder, environment, streams, signals and exit code.
It differs from the installed script in one way: modules are imported and botocore's descriptions of S3 read already.
Tests of imports and of the interpreter's own environment (PYTHON*, locale) run the installed script.

One request is one packet: the run as JSON, with the descriptors of stdout, stderr and a pipe for the reply. The reply
is the process id and then the exit code, a line each. The server forks an attendant, which forks the command and waits.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, NoReturn

from boto3.session import Session

from tests.botocore_descriptions import share_descriptions

_PACKET: Final = 2**17  # bytes; what the socket's buffer surely takes
_SERVER: Final = "import sys; from tests.pipeline.command_server import serve; serve(int(sys.argv[1]))"


class CommandServer:
    """The client's side. Threads may share it: a packet is sent whole or not at all."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(theirs.fileno())],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def run(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout: float
    ) -> tuple[int, str, str]:
        """Exit code as of `subprocess`, stdout and stderr."""
        with TemporaryFile() as out, TemporaryFile() as err:
            code = self.start(arguments, cwd, environment, out.fileno(), err.fileno()).wait(timeout)
            return code, _text(out), _text(err)

    def start(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], out: int, err: int
    ) -> "Running":
        """A process whose streams are the given descriptors, which the caller closes."""
        request = {"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment), "umask": _umask()}
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [json.dumps(request).encode()], [out, err, theirs.fileno()])
        return Running(ours, arguments)

    def close(self) -> None:
        self._control.close()  # the server ends when its last client has gone
        self._process.wait(timeout=30)


class Running:
    """A process that was started and is waited for once."""

    def __init__(self, reply: socket.socket, arguments: Sequence[str]) -> None:
        self._reply, self._arguments = reply, arguments
        self._lines = b""
        while b"\n" not in self._lines:  # the process id, which the server sends at once
            self._lines += reply.recv(64)

    def send_signal(self, number: int) -> None:
        """To a process that has not ended, so that its id is its own."""
        os.kill(int(self._lines.split()[0]), number)

    def wait(self, timeout: float) -> int:
        with self._reply:
            return _reply(self._reply, self._lines, self._arguments, timeout)


@cache
def command_server() -> CommandServer:
    """The one of this process, started by the first run."""
    server = CommandServer()
    atexit.register(server.close)
    return server


def _umask() -> int:
    """Of this process; the system tells it only to who sets it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _reply(ours: socket.socket, reply: bytes, arguments: Sequence[str], timeout: float) -> int:
    ours.settimeout(timeout)
    try:
        while data := ours.recv(64):
            reply += data
    except TimeoutError:
        os.kill(int(reply.split()[0]), signal.SIGKILL)
        raise subprocess.TimeoutExpired(list(arguments), timeout) from None
    _, code = reply.split()
    return int(code)


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())


def serve(control: int) -> NoReturn:
    _import_all()
    gc.freeze()
    requests = socket.socket(fileno=control)
    while True:
        request, passed, _, _ = socket.recv_fds(requests, _PACKET, 3)
        _reap()
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            _attend(json.loads(request), *passed)
        for descriptor in passed:
            os.close(descriptor)


def _reap() -> None:
    """Wait for the attendants that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _import_all() -> None:
    """Every module of the command line, and the libraries that they import when a run needs them."""
    from nxpipe.pipeline import __path__
    from nxpipe.pipeline.cli import entry

    entry.skip_plugins()  # as the installed script does before pydantic is imported
    names = [module.name for module in pkgutil.walk_packages(__path__, "nxpipe.pipeline.")]
    for name in (*names, "numpy", "cryptography.hazmat.primitives.asymmetric.ed25519"):
        if not name.endswith("__main__"):
            with suppress(ImportError):
                importlib.import_module(name)
    share_descriptions()
    Session().client("s3", region_name="us-east-1")  # reads them


def _attend(request: dict[str, Any], out: int, err: int, reply: int) -> NoReturn:
    """Fork the command, wait for it and reply."""
    child = os.fork()
    if child:
        os.write(reply, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(reply, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(reply)
    _become_command(request, out, err)


def _become_command(request: dict[str, Any], out: int, err: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for descriptor, number in ((out, 1), (err, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = request["arguments"]
    from nxpipe.pipeline.cli.entry import main

    try:
        main()
    except SystemExit as ended:
        code = ended.code
    # The end of an interpreter without its last step, which would touch, and so copy, every page of the server's.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else 0)
