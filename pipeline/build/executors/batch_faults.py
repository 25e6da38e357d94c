"""Why a job has ended that left no outcome: what Batch and its agent say, as a fault of the item. And which faults of
AWS itself a driver may wait out.
"""

from typing import Final

from nxpipe.pipeline.build.events import Fault
from nxpipe.pipeline.build.executors.batch_array import Told
from nxpipe.pipeline.util.aws import is_no_answer
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.pipeline.util.exit_codes import AWS, SYSTEM

# How Batch and ECS begin these reasons.
_OUT_OF_MEMORY: Final = "OutOfMemory"
_TOO_LONG: Final = "Job attempt duration exceeded timeout"
_LIMITS: Final = {"OutOfMemory": "--memory-limit", "OutOfTime": "--timeout"}  # by kind, what allows more


def fault_of(told: Told) -> Fault:
    """Of a child that Batch does not list, its array may be told, of which less is known."""
    container = told.get("container", {})
    status, reason = told.get("statusReason", ""), container.get("reason", "")
    kind = _kind(status, reason)
    reasons = dict.fromkeys(each.rstrip(".") for each in (reason, status) if each)
    said = ", ".join(reasons) or "no reason is given"
    code = container.get("exitCode")
    ended = f"job {told['jobId']} of the build farm ended without an outcome" + (
        "" if code is None else f" and with exit code {code}"
    )
    stream = container.get("logStreamName")
    where = f"; its log is the stream {stream}" if stream else ""
    if kind in _LIMITS:
        return Fault("limit", kind, f"{ended}: {said}{where}; allow more with {_LIMITS[kind]}.", SYSTEM.number)
    return Fault("environmental", kind, f"{ended}: {said}{where}.", AWS.number)


def forgotten(job: str) -> Fault:
    """Batch keeps a job for a day after its end, or more."""
    message = f"job {job} of the build farm left no outcome, and AWS Batch does not know it any more."
    return Fault("environmental", "JobForgotten", message, AWS.number)


def may_pass(error: Exception) -> bool:
    from nxpipe.artifact_store.errors import Denied, StoreUnavailable

    if isinstance(error, StoreUnavailable):
        return not isinstance(error, Denied)
    return isinstance(error, AwsError) and is_no_answer(error)


def _kind(status: str, reason: str) -> str:
    if reason.startswith(_OUT_OF_MEMORY):
        return "OutOfMemory"
    return "OutOfTime" if status.startswith(_TOO_LONG) else "JobFailed"
