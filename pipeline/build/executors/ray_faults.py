"""Why a Ray task came to no end of its own, as the fault of its item."""

from nxpipe.pipeline.build.events import Fault
from nxpipe.pipeline.util.exit_codes import COMPILE, INTERNAL, SOFTWARE, SYSTEM
from nxpipe.pipeline.util.text import human_bytes


def over_time(title: str, seconds: float) -> Fault:
    return Fault(
        "limit", "OutOfTime", f"{title}: not done after {seconds:.0f} s; allow more with --timeout", COMPILE.number
    )


def over_memory(title: str, held: int, allowed: int) -> Fault:
    text = (
        f"{title}: its worker took {human_bytes(held)} of memory, and {human_bytes(allowed)} are allowed; "
        "allow more with --memory-limit"
    )
    return Fault("limit", "OutOfMemory", text, SYSTEM.number)


def fault_of(error: Exception, title: str, worker: str) -> Fault:
    """`error` is what `ray.get` raised; a failure of the work itself is none, for it is in the task's answer."""
    from ray import exceptions

    log = str(error).strip()
    if isinstance(error, exceptions.RayTaskError):
        return _of_our_own(error.cause, f"{title}: {worker}", log)
    if isinstance(error, exceptions.OutOfMemoryError):
        message = f"{title}: Ray ended {worker}, for its node was out of memory; give nodes more of it, or fewer CPUs"
        return Fault("environmental", "OutOfMemory", message, SYSTEM.number, log)
    message = f"{title}: {worker} or its node was lost; what it had not committed is lost"
    return Fault("environmental", "WorkerDied", message, SYSTEM.number, log)


def _of_our_own(cause: BaseException, worker: str, log: str) -> Fault:
    """No item fares better with an error around the work: the node has no nxpipe, another one, or ours is broken."""
    kind, said = type(cause).__name__, " ".join(str(cause).split())
    if isinstance(cause, ImportError):
        message = f"{worker} lacks software: {said}; install the same nxpipe on every node of the cluster"
        return Fault("here", kind, message, SOFTWARE.number, log)
    message = f"{worker} failed outside of the work: {said}; is the same nxpipe installed on every node?"
    return Fault("here", kind, message, INTERNAL.number, log)
