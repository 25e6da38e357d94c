"""Mirrors: an ordered list of backends with the same content, the store first."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.errors import Changed, Corrupt, NotFound, StoreError, StoreUnavailable

R = TypeVar("R")

Notice = Callable[[str], None]  # receives one sentence for each object that was not read from the store itself

_OFFLINE: Final = "connect once and fetch it without --offline"
_DEMOTED_FOR: Final = 30.0  # seconds


def ignore_notice(_: str) -> None:
    """A Notice that discards its messages."""


class Sources:
    """Backends that are tried in order, for each object. Without any backend every read fails as offline."""

    def __init__(self, backends: Sequence[Backend], notice: Notice = ignore_notice) -> None:
        self._backends = tuple(backends)
        self._notice = notice
        self._demoted_until: dict[Backend, float] = {}

    def first(self, what: str, read: Callable[[Backend], R | None]) -> R | None:
        """The value of the first backend that has it intact; else the store's own error is raised, or None returned."""
        if not self._backends:
            raise StoreUnavailable(f"offline: this machine's cache does not hold {what}; {_OFFLINE}")
        faults: dict[Backend, StoreError | None] = {}
        for backend in self._in_order():
            try:
                value = read(backend)
            except (NotFound, Corrupt, Changed, StoreUnavailable) as fault:
                faults[backend] = fault
                if isinstance(fault, StoreUnavailable):
                    self._demoted_until[backend] = time.monotonic() + _DEMOTED_FOR
                continue
            if value is not None:
                self._report(what, backend, faults)
                return value
            faults[backend] = None
        own_fault = faults[self._backends[0]]
        if own_fault is not None:
            raise own_fault
        return None

    def _in_order(self) -> Iterator[Backend]:
        """The backends, recently unavailable ones last, to avoid their time-out for each object."""
        now = time.monotonic()
        yield from sorted(self._backends, key=lambda backend: self._demoted_until.get(backend, now) > now)

    def _report(self, what: str, backend: Backend, faults: dict[Backend, StoreError | None]) -> None:
        for failed, fault in faults.items():
            self._notice(f"{what} was read from {backend.url}: {fault or f'{failed.url} does not hold it'}")
