"""Ctrl-C and SIGTERM: the work is unwound, so that its temporary files go; nobody waits for a server that is silent.

A thread cannot be stopped while it waits for an answer, which takes minutes to time out. What it leaves behind is what
a killed process leaves: nothing that a reader sees, and nothing that a retry stumbles over.
"""

import gc
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from nxpipe.pipeline import VERSION
from nxpipe.pipeline.util.escape import for_log
from nxpipe.pipeline.util.exit_codes import INTERRUPTED, TERMINATED
from nxpipe.pipeline.util.files import log_folder

_PATIENCE: Final = 3  # seconds
_CUT_SHORT: Final = b"\nInterrupted, and a request was not waited for; a retry is safe.\n"


def heed_interrupts() -> None:
    """One that was to be ignored, as a shell has it for what runs in the background, stays ignored."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def unwound(code: int) -> None:
    """The last word has been said; threads that still wait have no more to say."""
    if left := signal.alarm(0):
        signal.signal(signal.SIGALRM, lambda *_: os._exit(code))
        signal.alarm(left)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    _be_gone_soon(INTERRUPTED.number)
    raise KeyboardInterrupt


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    _be_gone_soon(TERMINATED.number)
    raise SystemExit(TERMINATED.number)


def _be_gone_soon(code: int) -> None:
    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        os.write(2, _CUT_SHORT)
        os._exit(code)

    if signal.alarm(_PATIENCE):
        leave(signal.SIGALRM, None)  # whoever asks twice means it
    signal.signal(signal.SIGALRM, leave)


def report_crash(error: Exception) -> str:
    """Write the traceback to a log; return the sentence that names it."""
    trace = "".join(traceback.format_exception(error))
    log = _write_log(trace)
    kept = f"the traceback is in {log}" if log else "the traceback could not be saved; run again with --verbose"
    return f"nxpipe met an error that it did not foresee: {type(error).__name__}: {error}; {kept}."


def _write_log(trace: str) -> Path | None:
    """In the user's folder, else beside temporary files. A home that cannot be written is no reason to lose the
    sentence."""
    about = f"nxpipe {VERSION}, Python {platform.python_version()}, {platform.platform()}\n"
    lines = [f"$ {' '.join(sys.argv)}", "", *trace.split("\n")]
    text = (about + "\n".join(map(for_log, lines))).encode()  # somebody will look at it on a terminal
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
    """One that only the user can read, of a name that nobody can foresee: others may write into a temporary folder."""
    handle, name = tempfile.mkstemp(".log", f"nxpipe-{time.strftime('%Y%m%dT%H%M%S')}-", folder)
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    return Path(name)


def available_memory() -> int:
    """Bytes that can be taken without swapping: the kernel's own estimate, where it gives one."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def no_collection() -> Iterator[None]:
    """For work that makes thousands of small objects and drops none: looking for garbage takes as long as the work."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
