"""Build cache of a store: the lease on a cache key, and the negative cache of known failures.

A lease keeps two builders from compiling the same key at once: the second waits, and has a cache hit. It is an
optimisation and guards nothing: if it is lost, the work is done twice, and the store's conditional create decides who
published.
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
from nxpipe.artifact_store.builds import Failure as KnownFailure
from nxpipe.artifact_store.builds import Leases, failure_of, new_holder
from nxpipe.artifact_store.builds import record_failure as store_failure
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.errors import StoreError
from nxpipe.pipeline.build.status import is_caused_by_machine
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, PipelineError, VerificationFailed
from nxpipe.pipeline.util.files import json_of

_POLL: Final = 1.0  # seconds between two attempts to acquire a lease
# Known failures that are raised again as what they were, for their exit codes; all others as BuildRefused.
_KINDS: Final[dict[str, type[PipelineError]]] = {kind.__qualname__: kind for kind in (VerificationFailed, DoesNotFit)}


@contextmanager
def hold_lease(store: Store, key: str, log: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease on a cache key; wait while another builder holds it."""
    leases = Leases(store.backend)
    own = new_holder(f"{socket.gethostname()}:{os.getpid()}")
    logged = ""
    while (lease := leases.take(key, own)) is None:
        other = leases.current(key)
        if other is not None and _is_dead(other.holder):
            leases.give_back(other)
            continue
        if other is not None and other.holder != logged:
            logged = other.holder
            name, since = logged.rpartition(" ")[0], other.acquired_at[:16].replace("T", " ")
            log(f"  waiting for {name}, which has held the lease since {since} UTC (--force does not wait)")
        time.sleep(_POLL)
    with leases.kept(lease):
        yield


def _is_dead(holder: str) -> bool:
    """True for a process of this machine that has ended. Processes of other machines cannot be checked: their leases
    expire."""
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


def raise_known_failure(store: Store, key: str, thresholds: Thresholds) -> None:
    """Raise the recorded failure of this cache key, if it would fail again in the same way."""
    try:
        failure = failure_of(store, key)
        if failure is None or not _is_valid(store, failure, thresholds):
            return
    except (StoreError, ValueError):  # an unreadable record saves no work
        return
    kind = _KINDS.get(failure.kind, BuildRefused)
    when = failure.at[:16].replace("T", " ")
    raise kind(f"{failure.message.rstrip('.')} (known failure of {when} UTC; --force tries again)")


@contextmanager
def record_failure(store: Store, key: str, thresholds: Thresholds) -> Iterator[None]:
    """Record a deterministic error of the block as a known failure of the cache key."""
    try:
        yield
    except Exception as error:
        if not is_caused_by_machine(error):
            log = {"verify": asdict(thresholds), "traceback": "".join(traceback.format_exception(error))}
            with suppress(StoreError):  # the error itself matters more
                store_failure(store, key, error, log=canonical_json(log))
        raise


def _is_valid(store: Store, failure: KnownFailure, thresholds: Thresholds) -> bool:
    """A failed verification is known for its thresholds only, which are not part of the key."""
    if failure.kind != VerificationFailed.__qualname__:
        return True
    return failure.log is not None and json_of(store.read_blob(failure.log))["verify"] == asdict(thresholds)
