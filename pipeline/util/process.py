"""The process of a command: signals, crash reports, memory and processors of the machine.

Ctrl-C and SIGTERM unwind the stack, so that temporary files are removed. A thread that waits for a server cannot be
interrupted and may take minutes to time out, so an alarm ends the process after a few seconds. That is safe, because
stores publish atomically: a retry finds no partial state.
"""

import gc
import os
import platform
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from nxpipe.pipeline import VERSION
from nxpipe.pipeline.util.exit_codes import INTERRUPTED, TERMINATED
from nxpipe.pipeline.util.files import log_folder
from nxpipe.pipeline.util.text import for_log

_GRACE: Final = 3  # seconds
_ABANDONED: Final = b"\nInterrupted; a pending request was abandoned; a retry is safe.\n"


def handle_signals() -> None:
    """Install the handlers. An ignored SIGINT, as in a background job, stays ignored."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def exit_quietly(code: int) -> None:
    """Let the pending alarm end the process without a message; for use after the stack is unwound."""
    if left := signal.alarm(0):
        signal.signal(signal.SIGALRM, lambda *_: os._exit(code))
        signal.alarm(left)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle signals after the block: a process that was started in it is then known, and can be ended. Only handlers
    are deferred, which the child of a fork does not keep; what is ignored stays ignored."""
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        held = {}  # no handler runs in another thread
    for number in held:
        signal.signal(number, lambda each, _: came.append(each))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for each in came:
            signal.raise_signal(each)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    _set_alarm(INTERRUPTED.number)
    raise KeyboardInterrupt


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    _set_alarm(TERMINATED.number)
    raise SystemExit(TERMINATED.number)


def _set_alarm(code: int) -> None:
    def exit_now(signum: int, frame: FrameType | None) -> NoReturn:
        os.write(2, _ABANDONED)
        os._exit(code)

    if signal.alarm(_GRACE):
        exit_now(signal.SIGALRM, None)  # the second signal ends the process at once
    signal.signal(signal.SIGALRM, exit_now)


def report_crash(error: Exception) -> str:
    """Write the traceback to a log file; return the sentence that names the file."""
    trace = "".join(traceback.format_exception(error))
    log = _write_log(trace)
    location = f"the traceback is in {log}" if log else "the traceback could not be saved; rerun with --verbose"
    return f"internal error: {type(error).__name__}: {error}; {location}."


def _write_log(trace: str) -> Path | None:
    """Write to the log folder, else to the temporary folder; None if neither is writable."""
    header = f"nxpipe {VERSION}, Python {platform.python_version()}, {platform.platform()}\n"
    lines = [f"$ {' '.join(sys.argv)}", "", *trace.split("\n")]
    text = (header + "\n".join(map(for_log, lines))).encode()  # escaped for terminals
    for folder in (_own_folder, tempfile.gettempdir):
        try:
            return _new_file(str(folder()), text)
        except OSError:
            continue
    return None


def _own_folder() -> Path:
    folder = log_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _new_file(folder: str, text: bytes) -> Path:
    """Create a file with a random name that only the user can read, because temporary folders are shared."""
    handle, name = tempfile.mkstemp(".log", f"nxpipe-{time.strftime('%Y%m%dT%H%M%S')}-", folder)
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    return Path(name)


def available_memory() -> int:
    """Bytes available without swapping: the kernel's MemAvailable, else the physical memory."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def no_collection() -> Iterator[None]:
    """Suspend the garbage collector for work that allocates many objects and drops none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
