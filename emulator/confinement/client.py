"""Client side: one zygote process for the lifetime of this process, which forks a confined child for each model."""

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from nxpipe.emulator.confinement import Limits, ModelAccess, wire
from nxpipe.emulator.confinement.calls import CALLS
from nxpipe.emulator.confinement.faults import ReaderFailed, deserialize_error
from nxpipe.emulator.errors import CaptureError, LimitExceeded

_START: Final = (
    "import json, socket, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from nxpipe.emulator.confinement.server import serve; serve(socket.socket(fileno=int(sys.argv[1])))"
)
# The environment variables that the zygote inherits: no credentials, no token, no path of a user.
_INHERITED: Final = (
    "PATH",
    "LANG",
    "TZ",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
)
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_EXIT_TIMEOUT: Final = 5.0  # seconds
_LEAST_MEMORY: Final = 2**28  # bytes: the libraries alone need as much
_HOME: Final = Path(__file__).parents[3]

_lock = threading.Lock()
_server: "Server | None" = None
_peak = 0


def peak() -> int:
    """The peak memory of the confined processes so far, in bytes."""
    return _peak


def call(name: str, arguments: tuple[Any, ...], limits: Limits, access: ModelAccess) -> Any:
    """The result of a call, executed in the confined process of this model. Calls about one model share a process."""
    with _lock:
        return _running().session(access, limits, CALLS[name].preload).call(name, arguments)


def close() -> None:
    """End the zygote and its children."""
    global _server
    with _lock:
        if _server is not None:
            _server.close()
            _server = None


def _running() -> "Server":
    global _server
    if _server is None or not _server.is_ours():
        _server = Server()
    return _server


class Server:
    """The zygote process, as seen by its client."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="nxpipe-models-")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._session: Session | None = None
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, str(theirs.fileno()), json.dumps(_import_path())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(self._folder),
                pass_fds=(theirs.fileno(),),
                cwd=self._folder,
                start_new_session=True,
            )
        atexit.register(self.close)

    def is_ours(self) -> bool:
        """True if the zygote is running and was started by this process, not by one that this process was forked
        from."""
        return self._owner == os.getpid() and self._process.poll() is None

    def session(self, access: ModelAccess, limits: Limits, preload: tuple[str, ...]) -> "Session":
        key = (access, limits)
        if self._session is None or self._session.key != key or not self._session.is_open:
            self._end_session()
            self._session = Session(self, key, preload)
        return self._session

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.end()
            self._session = None

    def fork(self, request: dict[str, Any], theirs: socket.socket) -> int:
        socket.send_fds(self._control, [wire.dumps(request)], [theirs.fileno()])
        return int(self._reply()["pid"])

    def status(self, pid: int) -> int:
        """Wait for a child that was killed or closed its socket; its exit code."""
        self._control.sendall(wire.dumps({"ended": pid}))
        return int(self._reply()["status"])

    def _reply(self) -> Any:
        reply = self._control.recv(2**16)
        if not reply:
            raise ReaderFailed("the zygote process, which starts the confined processes, has ended")
        return wire.loads(reply)

    def scratch(self) -> str:
        return tempfile.mkdtemp(dir=self._folder)

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._owner != os.getpid():
            return
        with suppress(OSError, ReaderFailed):
            self._end_session()
        self._control.close()  # the zygote ends when its socket is closed
        try:
            self._process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Session:
    """The client side of one confined process."""

    def __init__(self, server: Server, key: tuple[ModelAccess, Limits], preload: tuple[str, ...]) -> None:
        self.key = key
        self.is_open = True
        self._server, self._scratch = server, server.scratch()
        access, self._limits = key
        memory = self._limits.memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._memory = max(memory, _LEAST_MEMORY)
        request = {
            "limits": asdict(replace(self._limits, memory=self._memory)),
            "reads": list(map(str, access.reads)),
            "scratch": self._scratch,
            "before": list(preload),
            "kind": access.kind,
        }
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._pid = server.fork(request, theirs)

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return self._exchange(name, arguments)
        except BaseException:
            if not self._idle:
                self.end()
            raise

    def _exchange(self, name: str, arguments: tuple[Any, ...]) -> Any:
        global _peak
        deadline = time.monotonic() + self._limits.seconds

        def wait() -> None:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))

        self._idle = False
        wait()
        try:
            wire.send(self._socket, (name, arguments))
            reply = wire.receive(self._socket, self._memory, wait)
        except TimeoutError:
            seconds = f"{self._limits.seconds:g} s"
            raise LimitExceeded(f"the model was not read after {seconds}; allow more with --timeout") from None
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise self._ended() from None
        except RecursionError:
            raise CaptureError("the model's configuration is nested too deep") from None
        except wire.BadMessage as fault:
            raise ReaderFailed(f"the confined process sent an invalid message: {fault}") from fault
        self._idle = True
        _peak = max(_peak, int(reply["memory"]))
        if "fault" in reply:
            raise self._fault(reply["fault"])
        result = reply["answer"]
        if not CALLS[name].is_valid(result):
            raise ReaderFailed(f"the confined process answered {name} with {type(result).__name__}")
        return result

    def _fault(self, document: Any) -> Exception:
        fault = deserialize_error(document)
        return self._too_large() if isinstance(fault, MemoryError) else fault

    def _too_large(self) -> LimitExceeded:
        return LimitExceeded(
            f"reading the model takes more than {self._memory / 2**30:.1f} GiB of memory; "
            "allow more with --memory-limit"
        )

    def _ended(self) -> Exception:
        """The error for a confined process that ended."""
        status = self.end()
        if status is not None and status < 0:
            return LimitExceeded(
                f"the confined process was ended by {signal.Signals(-status).name}; it may have run out of memory"
            )
        return ReaderFailed(f"the confined process ended with exit code {status}")

    def end(self) -> int | None:
        """Kill the confined process if it is running; its exit code, None if it was ended before."""
        if not self.is_open:
            return None
        self.is_open = False
        self._socket.close()
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        status = self._server.status(self._pid)
        shutil.rmtree(self._scratch, ignore_errors=True)
        return status

    _idle = True


def _environment(folder: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith("LC_")}
    return {**inherited, **_OFFLINE, "HOME": folder, "TMPDIR": folder}


def _import_path() -> list[str]:
    """This process's import path without the current folder, unless this program is in it."""
    current = Path.cwd()
    entries = [Path(entry) for entry in sys.path if entry]
    return list(dict.fromkeys(str(path) for path in (*entries, _HOME) if path != current or path == _HOME))
