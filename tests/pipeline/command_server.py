"""`nxpipe` processes without the start of an interpreter: a server imports the product once and forks for each run.

Contract: a run is a process of its own, with its own arguments, folder, environment, streams, signals and exit code.
It differs from the installed script in one way: modules are imported already. Tests of imports and of the
interpreter's own environment (PYTHON*, locale) run the installed script.

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

from tests.conftest import ROOT

_PACKET: Final = 2**17  # bytes; what the socket's buffer surely takes
_SERVER: Final = "import sys; from tests.pipeline.command_server import serve; serve(int(sys.argv[1]))"


class CommandServer:
    """The client's side. Threads may share it: a packet is sent whole or not at all."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def run(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout: float
    ) -> tuple[int, str, str]:
        """Exit code as of `subprocess`, stdout and stderr."""
        request = {"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment), "umask": _umask()}
        ours, theirs = socket.socketpair()
        with TemporaryFile() as out, TemporaryFile() as err, ours:
            with theirs:
                passed = [out.fileno(), err.fileno(), theirs.fileno()]
                socket.send_fds(self._control, [json.dumps(request).encode()], passed)
            code = _reply(ours, arguments, timeout)
            return code, _text(out), _text(err)

    def close(self) -> None:
        self._control.close()  # the server ends when its last client has gone
        self._process.wait(timeout=30)


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


def _reply(ours: socket.socket, arguments: Sequence[str], timeout: float) -> int:
    ours.settimeout(timeout)
    reply = b""
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
    for name in (*names, "boto3", "numpy", "cryptography.hazmat.primitives.asymmetric.ed25519"):
        if not name.endswith("__main__"):
            with suppress(ImportError):
                importlib.import_module(name)


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
