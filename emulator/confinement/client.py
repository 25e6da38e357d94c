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
# All that it is told of this process's environment. No credentials, no token, no path of a user.
_PASSED_ON: Final = (
    "PATH",
    "LANG",
    "TZ",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
)
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_PATIENCE: Final = 5.0  # seconds
_LEAST: Final = 2**28  # of memory, whatever is allowed: the libraries alone take as much
_HOME: Final = Path(__file__).parents[3]

_lock = threading.Lock()
_server: "Server | None" = None
_peak = 0


def peak() -> int:
    """The most memory in bytes that a confined process of ours took so far."""
    return _peak


def call(name: str, arguments: tuple[Any, ...], limits: Limits, about: ModelAccess) -> Any:
    """An answer from the process that reads this model. Questions about one model go to one process."""
    with _lock:
        return _running().session(about, limits, CALLS[name].before).ask(name, arguments)


def close() -> None:
    """End all that was started."""
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
        """Neither ended nor that of a process that this one was forked from."""
        return self._owner == os.getpid() and self._process.poll() is None

    def session(self, about: ModelAccess, limits: Limits, before: tuple[str, ...]) -> "Session":
        wanted = (about, limits)
        if self._session is None or self._session.wanted != wanted or not self._session.is_open:
            self._end_session()
            self._session = Session(self, wanted, before)
        return self._session

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.end()
            self._session = None

    def fork(self, order: dict[str, Any], theirs: socket.socket) -> int:
        socket.send_fds(self._control, [wire.dumps(order)], [theirs.fileno()])
        return int(self._reply()["pid"])

    def status(self, pid: int) -> int:
        """How a process ended that was killed, or closed its socket."""
        self._control.sendall(wire.dumps({"ended": pid}))
        return int(self._reply()["status"])

    def _reply(self) -> Any:
        reply = self._control.recv(2**16)
        if not reply:
            raise ReaderFailed("the process that starts the readers of models has ended")
        return wire.loads(reply)

    def scratch(self) -> str:
        return tempfile.mkdtemp(dir=self._folder)

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._owner != os.getpid():
            return
        with suppress(OSError, ReaderFailed):
            self._end_session()
        self._control.close()  # which is its end
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Session:
    """One confined process, from this side."""

    def __init__(self, server: Server, wanted: tuple[ModelAccess, Limits], before: tuple[str, ...]) -> None:
        self.wanted = wanted
        self.is_open = True
        self._server, self._scratch = server, server.scratch()
        about, self._limits = wanted
        memory = self._limits.memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._memory = max(memory, _LEAST)
        told = replace(self._limits, memory=self._memory)
        order = {
            "limits": asdict(told),
            "reads": list(map(str, about.reads)),
            "scratch": self._scratch,
            "before": list(before),
            "kind": about.kind,
        }
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._pid = server.fork(order, theirs)

    def ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return self._asked(name, arguments)
        except BaseException:
            if not self._idle:
                self.end()
            raise

    def _asked(self, name: str, arguments: tuple[Any, ...]) -> Any:
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
            raise ReaderFailed(f"the process that reads models answered nonsense: {fault}") from fault
        self._idle = True
        _peak = max(_peak, int(reply["memory"]))
        if "fault" in reply:
            raise self._fault(reply["fault"])
        found = reply["answer"]
        if not CALLS[name].fits(found):
            raise ReaderFailed(f"the process that reads models answered {name} with {type(found).__name__}")
        return found

    def _fault(self, document: Any) -> Exception:
        fault = deserialize_error(document)
        return self._too_large() if isinstance(fault, MemoryError) else fault

    def _too_large(self) -> LimitExceeded:
        return LimitExceeded(
            f"the model takes more than {self._memory / 2**30:.1f} GiB of memory to be read; "
            "allow more with --memory-limit"
        )

    def _ended(self) -> Exception:
        """What to say of a process that is gone."""
        status = self.end()
        if status is not None and status < 0:
            return LimitExceeded(
                f"the process that read the model was ended by {signal.Signals(-status).name}; "
                "it may have run out of memory"
            )
        return ReaderFailed(f"the process that read the model ended with {status}")

    def end(self) -> int | None:
        """Kill it, if it lives, and say how it ended."""
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
    passed = {name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("LC_")}
    return {**passed, **_OFFLINE, "HOME": folder, "TMPDIR": folder}


def _import_path() -> list[str]:
    """What this process imports from, without the folder that it happens to run in, unless this program lies there."""
    here = Path.cwd()
    known = [Path(entry) for entry in sys.path if entry]
    return list(dict.fromkeys(str(path) for path in (*known, _HOME) if path != here or path == _HOME))
