"""What is said when nxpipe itself is at fault: one sentence for the person, everything else in a log."""

import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

from nxpipe.pipeline import VERSION
from nxpipe.pipeline.util.escape import for_log
from nxpipe.pipeline.util.folders import log_folder


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
