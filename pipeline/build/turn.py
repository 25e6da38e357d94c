"""Two builders of one key do not both compile: the second waits for the first, and finds what it made.

The lease guards nothing. Where it is lost, work is done twice, and the store settles who published.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.builds import Leases, new_holder

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
