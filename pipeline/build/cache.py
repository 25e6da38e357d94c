"""Two builders of one key do not both compile: the second waits for the first, and finds what it made.

The lease guards nothing. Where it is lost, work is done twice, and the store settles who published.
"""

import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Final

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.errors import StoreError
from nxpipe.artifact_store.failures import Failure, failure_of, remember_failure
from nxpipe.artifact_store.leases import Leases, new_holder
from nxpipe.pipeline.build.status import is_of_the_machine
from nxpipe.pipeline.util.documents import json_of
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, PipelineError, VerificationFailed
from nxpipe.pipeline.verify.verify import Thresholds

_LOOK_AGAIN: Final = 1.0  # seconds


@contextmanager
def turn(store: Store, request_key: str, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until nobody else is at work on this key, and be at work on it."""
    leases = Leases(store.backend)
    me = new_holder(f"{socket.gethostname()}:{os.getpid()}")
    told = ""
    while (lease := leases.take(request_key, me)) is None:
        other = leases.current(request_key)
        if other is not None and _is_dead(other.holder):
            leases.give_back(other)
            continue
        if other is not None and other.holder != told:
            told = other.holder
            name, since = told.rpartition(" ")[0], other.acquired_at[:16].replace("T", " ")
            say(f"  {name} builds the same since {since} UTC; waiting for it (--force does not wait)")
        time.sleep(_LOOK_AGAIN)
    with leases.kept(lease):
        yield


def _is_dead(holder: str) -> bool:
    """Whether it was a process of this machine, and is no more; of another machine's nobody can tell."""
    host, _, number = holder.rpartition(" ")[0].rpartition(":")
    if host != socket.gethostname() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


# Those that are met again as what they were, for their exit codes; all others as a refusal.
_KINDS: Final[dict[str, type[PipelineError]]] = {kind.__qualname__: kind for kind in (VerificationFailed, DoesNotFit)}


def refuse_what_failed_before(store: Store, request_key: str, thresholds: Thresholds) -> None:
    """Answer with the remembered failure, if this request would end in it again."""
    try:
        failure = failure_of(store, request_key)
        if failure is None or not _stands(store, failure, thresholds):
            return
    except (StoreError, ValueError):  # a record or a log that cannot be read spares nobody the work
        return
    kind = _KINDS.get(failure.kind, BuildRefused)
    when = failure.at[:16].replace("T", " ")
    raise kind(f"{failure.message.rstrip('.')} (found out on {when} UTC and remembered; --force tries again)")


@contextmanager
def remembering(store: Store, request_key: str, thresholds: Thresholds) -> Iterator[None]:
    """Keep what the block dies of, where the same request would die of it again."""
    try:
        yield
    except Exception as error:
        if not is_of_the_machine(error):
            log = {"verify": _asked(thresholds), "traceback": "".join(traceback.format_exception(error))}
            with suppress(StoreError):  # what happened matters more than that it could not be noted
                remember_failure(store, request_key, error, log=canonical_json(log))
        raise


def _stands(store: Store, failure: Failure, thresholds: Thresholds) -> bool:
    """Thresholds are not part of a request's key: an answer beyond some may be within others."""
    if failure.kind != VerificationFailed.__qualname__:
        return True
    return failure.log is not None and json_of(store.read_blob(failure.log))["verify"] == _asked(thresholds)


def _asked(thresholds: Thresholds) -> dict[str, object]:
    return asdict(thresholds)
