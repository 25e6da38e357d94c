"""The model server as a child of the agent: its start, its readiness, its signals and its end; messages to systemd.

The agent stays the main process of its unit. An instance that is in service therefore has a server that answers.
"""

import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

from nxpipe.pipeline.config.load_balancer import HEALTHY_STATUS
from nxpipe.pipeline.util.console import unguarded
from nxpipe.pipeline.util.errors import NotReady, cause_of
from nxpipe.pipeline.util.exit_codes import NOT_READY, TERMINATED

if TYPE_CHECKING:
    from nxpipe.pipeline.config.load_balancer import ProbeRequest
    from nxpipe.pipeline.config.serving_fleet import ServingFleet

_SOCKET: Final = "NOTIFY_SOCKET"  # set by systemd for units of Type=notify


class ServiceManager:
    """systemd, by the protocol of sd_notify(3). Without NOTIFY_SOCKET, as in a shell, messages are dropped."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get(_SOCKET, "")

    def notify(self, **state: str) -> None:
        """Send assignments such as READY="1" and STATUS="...", in one message."""
        if not self._address:
            return
        message = "\n".join(f"{name}={' '.join(value.split())}" for name, value in state.items())
        abstract = self._address.startswith("@")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.connect("\0" + self._address[1:] if abstract else self._address)
                channel.sendall(message.encode())
        except OSError as failed:
            raise NotReady(
                f"systemd cannot be notified at {_SOCKET}={self._address}: {failed}; start the agent by its unit, or "
                f"unset {_SOCKET}"
            ) from failed


_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT)
_HANDLED: Final = (*_FORWARDED, signal.SIGALRM)

_CHUNK: Final = 64 * 1024
_KEPT: Final = 4096  # bytes of each stream
_LONGEST_LINE: Final = 64 * 1024
_LINES, _COLUMNS = 5, 200  # of the output in a message


class _Stream:
    """One output stream of the server, which is passed on as it comes; its end is kept for a message."""

    def __init__(self, source: IO[bytes], sink: int | None, take: Callable[[str], None] | None) -> None:
        self._source, self._sink, self._end = source, sink, b""
        self._take, self._line = take, b""
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """The last lines that are not blank."""
        text = self._end.decode(errors="replace")
        return [line.strip()[:_COLUMNS] for line in text.splitlines() if line.strip()][-_LINES:]

    def finish(self, within: float) -> None:
        """Wait for the end of the stream, which a process outside of the server's group may hold open."""
        self._thread.join(within)

    def _pass_on(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # so that they interrupt the main thread
        with self._source:
            while chunk := os.read(self._source.fileno(), _CHUNK):
                self._end = (self._end + chunk)[-_KEPT:]
                self._take_lines(chunk)
                while chunk and self._sink is not None:
                    try:
                        chunk = chunk[os.write(self._sink, chunk) :]
                    except OSError:  # the reader is gone: the server goes on, and must not block on a full pipe
                        self._sink = None

    def _take_lines(self, chunk: bytes) -> None:
        if self._take is None:
            return
        *lines, self._line = (self._line + chunk).split(b"\n")
        self._line = self._line[-_LONGEST_LINE:]
        for line in lines:
            self._take(line.decode(errors="replace"))


def _descriptor(stream: Any) -> int | None:
    """The file of stdout or stderr; None if it is closed, or no file."""
    try:
        return int(unguarded(stream).fileno()) if stream is not None else None
    except (OSError, ValueError):
        return None


_UNREADY_STOP: Final = 10.0  # seconds to stop for a server that has no requests
_POLL: Final = 0.05


Fault: TypeAlias = Callable[[], str | None]  # a sentence about a server that must not go on; None while it may


class ModelServer:
    """The server's process, in a process group of its own, from the start of the `with` block to its end.

    SIGTERM and SIGINT go to the server. If it does not exit in time, its group is killed: in `draining` seconds once it
    has requests. An exited server stays a zombie until the end of the block, so that no other process gets its id.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        environ: Mapping[str, str],
        draining: float,
        take: Callable[[str], None] | None = None,
    ) -> None:
        """`take` gets each line of the server's output, on a thread."""
        self._command, self._take = command, take
        self._environ = {name: value for name, value in environ.items() if name != _SOCKET}
        self._draining, self._stop_within = draining, _UNREADY_STOP
        self._stopped_by: int | None = None
        self._signalled = False
        self._required: tuple[Fault, ...] = ()
        self._look: tuple[Sequence[Fault], float] | None = None
        self._hung: str | None = None
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[_Stream, ...] = ()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "ModelServer":
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._forward)
        self._handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._kill)
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        except OSError as failed:
            self._restore_handlers()
            raise NotReady(
                f"the server does not start: {self._command[0]}: {failed.strerror}; correct the fleet's command"
            ) from failed
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._streams = (
            _Stream(self._process.stderr, _descriptor(sys.stderr), self._take),
            _Stream(self._process.stdout, _descriptor(sys.stdout), self._take),
        )
        if self._stopped_by is not None and not self._signalled:  # before there was a process
            self._stop(self._stopped_by)
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        self._over.set()
        if not self.has_ended():
            self._stop(signal.SIGTERM)
            self._await_end()
        signal.setitimer(signal.ITIMER_REAL, 0)
        with suppress(ProcessLookupError):  # the server has left its group
            os.killpg(process.pid, signal.SIGKILL)  # what the server started and left behind
        self._process = None  # from here on the id may become another process's
        process.wait()
        for stream in self._streams:
            stream.finish(1)
        self._restore_handlers()

    def has_ended(self, within: float = 0) -> bool:
        """True once the server has exited; waits for that at most `within` seconds."""
        until = time.monotonic() + within
        while not (ended := self._status(os.WNOHANG)) and time.monotonic() < until:
            time.sleep(_POLL)
        return ended is not None

    def require_alive(self) -> None:
        """Raise if the server has exited, or if the agent was stopped: then once the server has exited."""
        if self._stopped_by is not None:
            self._await_end()
            if self._stopped_by == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(TERMINATED.number)
        if fault := _first(fault() for fault in self._required):
            raise NotReady(fault)
        if self.has_ended():
            raise NotReady(f"the server {self._end_text()} before it was ready; {self._remedy()}; {self._last_lines()}")

    def require(self, *faults: Fault) -> None:
        """Count a server with one of these faults as one that cannot get ready."""
        self._required = faults

    def watched_by(self, faults: Sequence[Fault], *, every: float) -> None:
        """In service, end the server as soon as one of `faults` says why; they are called on a thread, every so many
        seconds."""
        self._look = (faults, every) if faults else None

    def begin_service(self) -> None:
        """From now on the server has requests."""
        self._stop_within = self._draining
        if self._look is not None:
            threading.Thread(target=self._watch, args=self._look, daemon=True).start()

    def end(self) -> None:
        """End a server in service for a successor: it has the time of `draining` for its requests. On any thread."""
        if self._process is not None and self._stopped_by is None:
            self._stop(signal.SIGTERM)

    @property
    def is_stopped(self) -> bool:
        """True if the agent was stopped, and the server with it."""
        return self._stopped_by is not None

    def _watch(self, faults: Sequence[Fault], every: float) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # so that they interrupt the main thread
        while not self._over.wait(every) and self._stopped_by is None:
            if (hung := _first(fault() for fault in faults)) and self._stopped_by is None and not self._over.is_set():
                self._hung, self._stop_within = hung, _UNREADY_STOP  # its requests are lost already
                self._stop(signal.SIGTERM)
                return

    def wait(self) -> tuple[int, str | None]:
        """Wait for the server's end. Its exit code, 128 and the number for a signal, and the sentence about an end
        that was not requested."""
        self._await_end()
        self._over.set()
        if self._hung is not None:
            return NOT_READY.number, f"{self._hung}; it was stopped, and starts again; {self._last_lines()}"
        status = self._status()
        assert status is not None
        code = status.si_status if status.si_code == os.CLD_EXITED else 128 + status.si_status
        return code, f"the server {self._end_text()}; {self._last_lines()}" if self._stopped_by is None else None

    def _status(self, options: int = 0) -> "os.waitid_result | None":
        assert self._process is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | options)

    def _await_end(self) -> None:
        self._status()  # Python repeats the call after a signal

    def _end_text(self) -> str:
        status = self._status()
        assert status is not None
        if status.si_code == os.CLD_EXITED:
            return f"exited with code {status.si_status}"
        return f"was ended by {signal.Signals(status.si_status).name}"

    def _remedy(self) -> str:
        status = self._status()
        if status is not None and status.si_code != os.CLD_EXITED and status.si_status == signal.SIGKILL:
            return "if the kernel reports that memory is out, choose a larger instance type"
        return "correct the server or the fleet's command"

    def _last_lines(self) -> str:
        """What a server that has exited printed at last."""
        for stream in self._streams:
            stream.finish(1)
        lines = next((lines for stream in self._streams if (lines := stream.lines())), [])
        return f"its last lines: {' | '.join(lines)}" if lines else "it printed nothing"

    def _forward(self, number: int, frame: FrameType | None) -> None:
        first, self._stopped_by = self._stopped_by is None, self._stopped_by or number
        if self._process is not None:
            self._stop(number, timed=first)

    def _stop(self, number: int, *, timed: bool = True) -> None:
        assert self._process is not None
        self._signalled = True
        os.kill(self._process.pid, number)
        if timed:
            signal.setitimer(signal.ITIMER_REAL, self._stop_within)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        os.kill(self._process.pid, signal.SIGKILL)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


_PAUSES: Final = (0.05, 0.5)  # seconds between two health checks: the first, and the longest, doubled at each failure
_MAX_BYTES: Final = 1 << 20  # of a response
_SHOWN: Final = 200  # characters of a response in a message


@dataclass(frozen=True)
class Readiness:
    """What the server must answer before the instance goes into service, by the fleet's settings."""

    fleet: "ServingFleet"
    address: str  # the one to which the load balancer sends requests
    deadline: float  # by time.monotonic

    def require_free_port(self) -> None:
        """Refuse to start a server whose health checks another process would answer."""
        with suppress(OSError), socket.create_connection((self.address, self.fleet.port), timeout=1):
            raise NotReady(
                f"another process listens on port {self.fleet.port} of {self.address} before the server starts; stop "
                "it, or disable its unit in the AMI"
            )

    def await_health(self, server: ModelServer) -> None:
        """Wait for as many successful health checks in a row as the load balancer requires."""
        check, healthy, last = self.fleet.health_check, 0, "no response"
        pause, longest = _PAUSES
        while healthy < check.healthy:
            server.require_alive()
            if time.monotonic() > self.deadline:
                raise NotReady(
                    f"the server did not answer GET {self.fleet.health} on {self.address}:{self.fleet.port} with "
                    f"{HEALTHY_STATUS} within the fleet's ready_within; the last check: {last}; see its log, have it "
                    "listen on 0.0.0.0, or raise ready_within"
                )
            last = self._check(check.timeout.total_seconds())
            healthy = healthy + 1 if last == str(HEALTHY_STATUS) else 0
            server.has_ended(within=pause if healthy < check.healthy else 0)
            pause = min(2 * pause, longest)
        server.require_alive()

    def _check(self, timeout: float) -> str:
        """The status code of one health check, or why there is none."""
        try:
            return str(self._answer("GET", self.fleet.health, timeout)[0])
        except (OSError, http.client.HTTPException) as failed:
            return cause_of(failed)

    def require_probe(self, server: ModelServer) -> None:
        """Send the fleet's probe and compare the response."""
        probe = self.fleet.probe
        if probe is None:
            return
        request = f"{probe.method} {probe.path}"
        remedy = "correct the server, or the fleet's probe"
        try:
            status, body = self._answer(probe.method, probe.path, probe.timeout.total_seconds(), probe.body)
        except (OSError, http.client.HTTPException) as failed:
            server.has_ended(within=1)
            server.require_alive()
            raise NotReady(f"the server does not answer the probe {request}: {cause_of(failed)}; {remedy}") from failed
        server.require_alive()
        if fault := _fault_of(probe, status, body):
            raise NotReady(f"the response to the probe {request} {fault}; {remedy}")

    def _answer(self, method: str, path: str, timeout: float, body: str | None = None) -> tuple[int, bytes]:
        left = max(1.0, self.deadline - time.monotonic())
        headers = {"User-Agent": "nxpipe-agent", **({"Content-Type": "application/json"} if body is not None else {})}
        connection = http.client.HTTPConnection(self.address, self.fleet.port, timeout=min(timeout, left))
        with closing(connection):
            connection.request(method, path, body=None if body is None else body.encode(), headers=headers)
            response = connection.getresponse()
            return response.status, response.read(_MAX_BYTES + 1)


def _fault_of(probe: "ProbeRequest", status: int, body: bytes) -> str | None:
    """What differs from the expected response; None if nothing does."""
    start = body[:_SHOWN].decode(errors="replace")
    if status != probe.status:
        return f"has status {status}, and {probe.status} is expected; it begins with {start!r}"
    if probe.expect is None:
        return None
    if len(body) > _MAX_BYTES:
        return f"has more than {_MAX_BYTES} bytes"
    try:
        found = json.loads(body)
        return difference(json.loads(probe.expect), found, probe.tolerance)
    except (ValueError, RecursionError):
        return f"is no JSON; it begins with {start!r}"


def difference(expected: Any, found: Any, tolerance: float, place: str = "$") -> str | None:
    """The first place where JSON differs from what is expected, as in "has 2 at $.a[0], and 1 is expected".

    Objects may have further keys. Numbers are equal within the relative tolerance.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        for missing in expected.keys() - found.keys():
            return f"has no {place}.{missing}"
        return _first(difference(expected[key], found[key], tolerance, f"{place}.{key}") for key in expected)
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return _first(difference(one, other, tolerance, f"{place}[{index}]") for index, (one, other) in pairs)
    if _is_number(expected) and _is_number(found):
        equal = expected == found or _are_close(expected, found, tolerance)
    else:
        equal = type(expected) is type(found) and expected == found
    return None if equal else f"has {_shown(found)} at {place}, and {_shown(expected)} is expected"


def _first(faults: Iterable[str | None]) -> str | None:
    return next((fault for fault in faults if fault), None)


def _are_close(one: float, other: float, tolerance: float) -> bool:
    try:
        return math.isclose(one, other, rel_tol=tolerance)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
