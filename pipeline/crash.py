"""What is said when nxpipe itself is at fault: one sentence for the person, everything else in a log."""

import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

from pipeline import VERSION


def report_crash(error: Exception, *, verbose: bool) -> str:
    """Write the traceback to a log (and to stderr when verbose); return the sentence that names the log."""
    trace = "".join(traceback.format_exception(error))
    if verbose:
        sys.stderr.write(trace)
    log = _write_log(trace)
    kept = f"the traceback is in {log}" if log else "the traceback could not be saved; run again with --verbose"
    return f"nxpipe met an error that it did not foresee: {type(error).__name__}: {error}; {kept}."


def _write_log(trace: str) -> Path | None:
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
    about = f"nxpipe {VERSION}, Python {platform.python_version()}, {platform.platform()}\n$ {' '.join(sys.argv)}\n\n"
    for folder in (state_folder() / "logs", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(about + trace)
        except OSError:
            continue  # a home that cannot be written is no reason to lose the sentence
        return folder / name
    return None


def state_folder() -> Path:
    """Where logs live: the user's state folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "nxpipe"
