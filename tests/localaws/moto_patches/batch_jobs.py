"""Batch jobs: each attempt is a process of this machine, with the environment that its container would have.

A test sets the command for an image (`IMAGES`) and the number of jobs that run at once (`JOB_HOST.capacity`). Moto runs
jobs in Docker only, each in a waiting thread; its array jobs never fail, and it lists all of their children at once.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, Final

from moto.batch.models import BatchBackend, Job
from moto.batch.responses import BatchResponse
from moto.logs.exceptions import ResourceNotFoundException

from tests.localaws.moto_patches._around import around

IMAGES: Final[dict[str, list[str]]] = {}  # the program that replaces the first argument of a command, by image
_POLL: Final = 0.02  # seconds
_GRACE: Final = 1.0  # seconds from SIGTERM to SIGKILL; ECS has 30
_PAGE: Final = 1000
_MIB: Final = 1024**2
_NO_IMAGE: Final = "CannotPullContainerError: IMAGES has no program for the image"
_ENDED: Final = ("SUCCEEDED", "FAILED")


class JobHost:
    """The machine of a compute environment: a queue of waiting jobs and the running ones."""

    def __init__(self) -> None:
        self.capacity = 4
        self.status_reason: str | None = None  # the status reason of waiting jobs
        self._waiting: deque[Job] = deque()
        self._at_work: dict[str, Job] = {}
        self._lock = threading.RLock()

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()
            self.capacity, self.status_reason = 4, None
            for job in self._at_work.values():
                job.stop = True  # its process ends, and it is not retried in the next test

    def add(self, job: Job) -> None:
        job.status = "RUNNABLE"
        with self._lock:
            self._waiting.append(job)
        self.open()

    def open(self, capacity: int | None = None) -> None:
        """Start as many waiting jobs as the capacity permits."""
        with self._lock:
            self.capacity = self.capacity if capacity is None else capacity
            while self._waiting and len(self._at_work) < self.capacity:
                job = self._waiting.popleft()
                if job.status == "RUNNABLE":
                    self._at_work[job.job_id] = job
                    threading.Thread(target=self._attend, args=(job,), daemon=True).start()

    def _attend(self, job: Job) -> None:
        try:
            _run(job)
        finally:
            with self._lock:
                self._at_work.pop(job.job_id, None)
            self.open()


JOB_HOST: Final = JobHost()


def apply() -> None:
    around(Job, "start", _start)
    around(Job, "terminate", _terminate)
    around(Job, "describe_short", _describe_short)
    around(Job, "describe", _describe)
    around(BatchBackend, "reset", _reset)
    around(BatchResponse, "listjobs", _list)


def lose_machine(job: Job) -> None:
    """Simulate the loss of a spot instance: kill the job's process."""
    job.job_stopped_reason = "Host EC2 (instance i-0123456789abcdef0) terminated."
    _own(job)["process"].kill()


def _own(job: Job) -> dict[str, Any]:
    """Fields of a job that moto's class does not have."""
    own: dict[str, Any] = vars(job).setdefault("own", {})
    return own


def _start(stock: Any, job: Job) -> None:
    JOB_HOST.add(job)


def _reset(stock: Any, backend: BatchBackend) -> None:
    JOB_HOST.clear()
    stock(backend)


def _terminate(stock: Any, job: Job, reason: str) -> None:
    """Terminate a job and its children; a waiting child never starts."""
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
        status_reason = job.job_stopped_reason or ("" if code == 0 else "Essential container in task exited")
        job.job_stopped_reason = status_reason or None
        if code == 0 or job.stop or not _should_retry(retries, status_reason, reason or "", code):
            break
        job.status = "RUNNABLE"
    job._mark_stopped(success=job.exit_code == 0 and not job.stop)


def _should_retry(retries: dict[str, Any], status: str, reason: str, code: int | None) -> bool:
    """The action of the first rule whose patterns all match; without rules the job is retried."""
    actual = {"onStatusReason": status, "onReason": reason, "onExitCode": str(code)}
    for rule in retries.get("evaluateOnExit", ()):
        if all(fnmatchcase(actual[key], pattern) for key, pattern in rule.items() if key != "action"):
            return str(rule["action"]).lower() == "retry"
    return True


def _attempt(job: Job, attempt: int) -> tuple[int | None, str | None]:
    """Run one attempt: its exit code, and the reason that ECS reports."""
    container = job.job_definition.container_properties or {}
    _, *arguments = job.container_overrides.get("command") or container["command"]
    program = IMAGES.get(container["image"])
    if program is None:
        return None, _NO_IMAGE
    process = subprocess.Popen(
        [*program, *arguments],
        env=_environment(job, attempt),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    _own(job)["process"] = process
    log = threading.Thread(target=_keep_log, args=(job, process.stdout), daemon=True)
    log.start()
    job.job_started_at, job.status, job.log_stream_name = datetime.now(), "RUNNING", job._stream_name
    reason = _wait(job, process)
    log.join(_GRACE)  # longer lives only a process that the job has left behind with its output
    code = process.returncode
    return (code if code >= 0 else 128 - code), reason


def _wait(job: Job, process: "subprocess.Popen[str]") -> str | None:
    """Wait until the process ends, is terminated, exceeds its timeout or exceeds its memory limit."""
    memory_limit, longest = _memory(job) * _MIB, job._get_attempt_duration()
    start, terminating = time.monotonic(), False
    while process.poll() is None:
        if _resident(process.pid) > memory_limit:
            process.kill()
            process.wait()
            return "OutOfMemoryError: Container killed due to memory usage"
        late = longest is not None and time.monotonic() - start > longest
        if (job.stop or late) and not terminating:
            job.job_stopped_reason = job.job_stopped_reason or "Job attempt duration exceeded timeout"
            process.send_signal(signal.SIGTERM)
            terminating, start = True, time.monotonic()
        elif terminating and time.monotonic() - start > _GRACE:
            process.kill()
        time.sleep(_POLL)
    return None


def _memory(job: Job) -> int:
    overrides = job.container_overrides.get("resourceRequirements") or []
    default: Any = job.job_definition._get_resource_requirement("memory")
    return int(next((override["value"] for override in overrides if override["type"] == "MEMORY"), default))


def _resident(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (FileNotFoundError, ProcessLookupError, IndexError):  # the process has just ended
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _environment(job: Job, attempt: int) -> dict[str, str]:
    """The environment of an attempt: that of this process (for the image and the role's credentials) and the job's
    variables."""
    container = job.job_definition.container_properties or {}
    variables = [*container.get("environment", ()), *job.container_overrides.get("environment", ())]
    own = {"AWS_BATCH_JOB_ID": job.job_id, "AWS_BATCH_JOB_ATTEMPT": str(attempt)}
    if "index" in job.array_properties:
        own["AWS_BATCH_JOB_ARRAY_INDEX"] = str(job.array_properties["index"])
    return {**os.environ, **{variable["name"]: variable["value"] for variable in variables}, **own}


def _keep_log(job: Job, output: IO[str]) -> None:
    """Write each line to the job's log stream when it is there."""
    options = (job.job_definition.container_properties or {}).get("logConfiguration", {}).get("options", {})
    group, stream, backend = options.get("awslogs-group", job._log_group), job._stream_name, job._log_backend
    backend.ensure_log_group(group)
    backend.ensure_log_stream(group, stream)
    with output, suppress(ResourceNotFoundException):  # the account of a test that has ended is empty
        for line in output:
            event = {"timestamp": int(time.time() * 1000), "message": line.rstrip("\n")}
            backend.put_log_events(group, stream, [event])


def _describe_short(stock: Any, job: Job) -> dict[str, Any]:
    if job._child_jobs is not None and not job.job_stopped:
        _follow_children(job)
    description: dict[str, Any] = stock(job)
    if job.status == "RUNNABLE" and JOB_HOST.status_reason:
        description["statusReason"] = JOB_HOST.status_reason
    if container := _container(job):
        description["container"] = container
    if "index" in job.array_properties:
        description["arrayProperties"] = {"index": job.array_properties["index"]}
    return description


def _describe(stock: Any, job: Job) -> dict[str, Any]:
    description: dict[str, Any] = stock(job)
    return description | {"container": {**description["container"], **_container(job)}}


def _container(job: Job) -> dict[str, Any]:
    fields = {"exitCode": job.exit_code, "reason": _own(job).get("reason")}
    return {key: value for key, value in fields.items() if value is not None}


def _follow_children(job: Job) -> None:
    states = {child.status for child in job._child_jobs or ()}
    if states <= set(_ENDED):
        job._mark_stopped(success=states == {"SUCCEEDED"})
        if "FAILED" in states and job.job_stopped_reason is None:
            job.job_stopped_reason = "Array Child Job failed"
    else:
        job.status = "PENDING"


def _list(stock: Any, self: Any) -> str:
    """A page of jobs; of an array job without a status filter, the running children."""
    jobs = self.batch_backend.list_jobs(
        job_queue_name=self._get_param("jobQueue"),
        array_job_id=self._get_param("arrayJobId"),
        job_status=self._get_param("jobStatus") or "RUNNING",
        filters=self._get_param("filters"),
    )
    begin = int(self._get_param("nextToken") or 0)
    end = begin + min(int(self._get_param("maxResults") or _PAGE), _PAGE)
    response: dict[str, Any] = {"jobSummaryList": [job.describe_short() for job in jobs[begin:end]]}
    if end < len(jobs):
        response["nextToken"] = str(end)
    return json.dumps(response)
