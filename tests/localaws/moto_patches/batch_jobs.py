"""Jobs of Batch run: each attempt is a process of this machine, with the environment that its container would have.

What stands for the image is said by a test (`IMAGES`), and so is how many run at once (`FLOOR.room`). Moto runs jobs
in Docker only, each in a thread that waits; its arrays never fail, and list all of their children at once.
"""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from moto.batch.models import BatchBackend, Job
from moto.batch.responses import BatchResponse

from tests.localaws.moto_patches._around import around

IMAGES: Final[dict[str, list[str]]] = {}  # what is run in the place of a command's first word, by image
_LOOK: Final = 0.02  # seconds
_PATIENCE: Final = 1.0  # seconds from SIGTERM to SIGKILL; ECS has 30
_PAGE: Final = 1000
_MIB: Final = 1024**2
_NO_IMAGE: Final = "CannotPullContainerError: nothing stands for the image"
_ENDED: Final = ("SUCCEEDED", "FAILED")


class Floor:
    """Where jobs wait for a machine, and run."""

    def __init__(self) -> None:
        self.room = 4
        self.why_not: str | None = None  # what jobs are told that wait
        self._waiting: deque[Job] = deque()
        self._at_work: set[str] = set()
        self._lock = threading.RLock()

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()
            self.room, self.why_not = 4, None

    def add(self, job: Job) -> None:
        job.status = "RUNNABLE"
        with self._lock:
            self._waiting.append(job)
        self.open()

    def open(self, room: int | None = None) -> None:
        """As many as there is room for begin."""
        with self._lock:
            self.room = self.room if room is None else room
            while self._waiting and len(self._at_work) < self.room:
                job = self._waiting.popleft()
                if job.status == "RUNNABLE":
                    self._at_work.add(job.job_id)
                    threading.Thread(target=self._attend, args=(job,), daemon=True).start()

    def _attend(self, job: Job) -> None:
        try:
            _run(job)
        finally:
            with self._lock:
                self._at_work.discard(job.job_id)
            self.open()


FLOOR: Final = Floor()


def mend() -> None:
    around(Job, "start", _start)
    around(Job, "terminate", _terminate)
    around(Job, "describe_short", _describe_short)
    around(Job, "describe", _describe)
    around(BatchBackend, "reset", _reset)
    around(BatchResponse, "listjobs", _list)


def lose_machine(job: Job) -> None:
    """A spot instance is taken away, with what runs on it."""
    job.job_stopped_reason = "Host EC2 (instance i-0123456789abcdef0) terminated."
    _own(job)["process"].kill()


def _own(job: Job) -> dict[str, Any]:
    """What moto's job has no room for."""
    own: dict[str, Any] = vars(job).setdefault("own", {})
    return own


def _start(stock: Any, job: Job) -> None:
    FLOOR.add(job)


def _reset(stock: Any, backend: BatchBackend) -> None:
    FLOOR.clear()
    stock(backend)


def _terminate(stock: Any, job: Job, reason: str) -> None:
    """The children of an array go with it; what has not begun never does."""
    for child in job._child_jobs or ():
        _terminate(stock, child, reason)
    if job.job_stopped:
        return
    stock(job, reason)
    if job.status == "RUNNABLE" and job._child_jobs is None:
        job._mark_stopped(success=False)


def _run(job: Job) -> None:
    retries = job.job_definition.retry_strategy or {}
    for attempt in range(1, int(retries.get("attempts", 1)) + 1):
        job.status, job.job_stopped_reason, _own(job)["attempts"] = "STARTING", None, attempt
        code, reason = _attempt(job, attempt)
        job.exit_code, _own(job)["reason"] = code, reason
        told = job.job_stopped_reason or ("" if code == 0 else "Essential container in task exited")
        job.job_stopped_reason = told or None
        if code == 0 or job.stop or not _again(retries, told, reason or "", code):
            break
        job.status = "RUNNABLE"
    job._mark_stopped(success=job.exit_code == 0 and not job.stop)


def _again(retries: dict[str, Any], status: str, reason: str, code: int | None) -> bool:
    """The first rule of which all patterns fit decides; without any rule it is tried again."""
    found = {"onStatusReason": status, "onReason": reason, "onExitCode": str(code)}
    for rule in retries.get("evaluateOnExit", ()):
        if all(fnmatchcase(found[key], pattern) for key, pattern in rule.items() if key != "action"):
            return str(rule["action"]).lower() == "retry"
    return True


def _attempt(job: Job, attempt: int) -> tuple[int | None, str | None]:
    """Its exit code, and what ECS says about it."""
    given = job.job_definition.container_properties or {}
    _, *rest = job.container_overrides.get("command") or given["command"]
    if given["image"] not in IMAGES:
        return None, _NO_IMAGE
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [*IMAGES[given["image"]], *rest],
            env=_environment(job, attempt),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _own(job)["process"] = process
        job.job_started_at, job.status, job.log_stream_name = datetime.now(), "RUNNING", job._stream_name
        reason = _wait(job, process)
        output.seek(0)
        _keep_log(job, output.read())
    code = process.returncode
    return (code if code >= 0 else 128 - code), reason


def _wait(job: Job, process: "subprocess.Popen[bytes]") -> str | None:
    """Until it ends, is ended, takes too long or takes more memory than it was promised."""
    promised, longest = _memory(job) * _MIB, job._get_attempt_duration()
    began, asked = time.monotonic(), False
    while process.poll() is None:
        if _resident(process.pid) > promised:
            process.kill()
            process.wait()
            return "OutOfMemoryError: Container killed due to memory usage"
        late = longest is not None and time.monotonic() - began > longest
        if (job.stop or late) and not asked:
            job.job_stopped_reason = job.job_stopped_reason or "Job attempt duration exceeded timeout"
            process.send_signal(signal.SIGTERM)
            asked, began = True, time.monotonic()
        elif asked and time.monotonic() - began > _PATIENCE:
            process.kill()
        time.sleep(_LOOK)
    return None


def _memory(job: Job) -> int:
    asked = job.container_overrides.get("resourceRequirements") or []
    given: Any = job.job_definition._get_resource_requirement("memory")
    return int(next((one["value"] for one in asked if one["type"] == "MEMORY"), given))


def _resident(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (FileNotFoundError, ProcessLookupError, IndexError):  # it has just ended
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _environment(job: Job, attempt: int) -> dict[str, str]:
    """This process's own stands for the image's, and for the credentials that ECS gives to a task's role."""
    given = job.job_definition.container_properties or {}
    said = [*given.get("environment", ()), *job.container_overrides.get("environment", ())]
    own = {"AWS_BATCH_JOB_ID": job.job_id, "AWS_BATCH_JOB_ATTEMPT": str(attempt)}
    if "index" in job.array_properties:
        own["AWS_BATCH_JOB_ARRAY_INDEX"] = str(job.array_properties["index"])
    return {**os.environ, **{one["name"]: one["value"] for one in said}, **own}


def _keep_log(job: Job, text: str) -> None:
    group, stream = job._log_group, job._stream_name
    job._log_backend.ensure_log_group(group)
    job._log_backend.ensure_log_stream(group, stream)
    now = int(time.time() * 1000)
    if lines := [{"timestamp": now, "message": line} for line in text.splitlines()]:
        job._log_backend.put_log_events(group, stream, lines)


def _describe_short(stock: Any, job: Job) -> dict[str, Any]:
    if job._child_jobs is not None and not job.job_stopped:
        _follow_children(job)
    told: dict[str, Any] = stock(job)
    if job.status == "RUNNABLE" and FLOOR.why_not:
        told["statusReason"] = FLOOR.why_not
    if container := _container(job):
        told["container"] = container
    if "index" in job.array_properties:
        told["arrayProperties"] = {"index": job.array_properties["index"]}
    return told


def _describe(stock: Any, job: Job) -> dict[str, Any]:
    told: dict[str, Any] = stock(job)
    return told | {"container": {**told["container"], **_container(job)}}


def _container(job: Job) -> dict[str, Any]:
    said = {"exitCode": job.exit_code, "reason": _own(job).get("reason")}
    return {key: value for key, value in said.items() if value is not None}


def _follow_children(job: Job) -> None:
    states = {child.status for child in job._child_jobs or ()}
    if states <= set(_ENDED):
        job._mark_stopped(success=states == {"SUCCEEDED"})
        if "FAILED" in states and job.job_stopped_reason is None:
            job.job_stopped_reason = "Array Child Job failed"
    else:
        job.status = "PENDING"


def _list(stock: Any, self: Any) -> str:
    """A page; of an array, those that run where no status is asked for."""
    jobs = self.batch_backend.list_jobs(
        job_queue_name=self._get_param("jobQueue"),
        array_job_id=self._get_param("arrayJobId"),
        job_status=self._get_param("jobStatus") or "RUNNING",
        filters=self._get_param("filters"),
    )
    begin = int(self._get_param("nextToken") or 0)
    end = begin + min(int(self._get_param("maxResults") or _PAGE), _PAGE)
    told: dict[str, Any] = {"jobSummaryList": [job.describe_short() for job in jobs[begin:end]]}
    if end < len(jobs):
        told["nextToken"] = str(end)
    return json.dumps(told)
