"""A substitute for the work of a job, for tests of its executor. The job's title selects the behaviour."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from nxpipe.pipeline.build.jobs import Event, Failure, FailureClass, Job, JobFinished, JobLog
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.thresholds import Thresholds

FAULT = Failure(FailureClass.DETERMINISTIC, "BuildRefused", "it cannot be lowered", 11, "Traceback:\n  a line\n")
_SPEC = ModelSpec("m", None, None, "inf2.xlarge", None, None, (1,), None, "none", "bf16")
_FOREVER = 600


def job(key: str, what: str, memory: int = 2**20) -> Job:
    return Job(key, what, _SPEC, None, "file:///nowhere", Thresholds(0.9, 0.1), False, 1.0, memory)


def work(job: Job, tell: Callable[[Event], None]) -> JobFinished:
    tell(JobLog(job.key, f"{os.environ['OMP_NUM_THREADS']} thread"))
    what, _, argument = job.title.partition(" ")
    if what == "fail":
        return JobFinished(job.key, 1.5, memory=7, failure=FAULT)
    if what == "break":
        raise ZeroDivisionError("around the work")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "grow":
        held = b"x" * int(argument)
        time.sleep(_FOREVER + len(held))
    if what == "hang":
        _tell_pids(argument)
        time.sleep(_FOREVER)
    for line in range(3):
        tell(JobLog(job.key, f"line {line}"))
    return JobFinished(job.key, 0.5, memory=7)


def _tell_pids(path: str) -> None:
    """Write the pids of this process and of a child, which stands for a compiler."""
    if path:
        child = subprocess.Popen(["sleep", str(_FOREVER)])
        Path(path).write_text(f"{os.getpid()} {child.pid}\n")
