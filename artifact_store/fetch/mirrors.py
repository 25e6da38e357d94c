"""Mirrors: an ordered list of backends with the same content, the store first."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.errors import Changed, Corrupt, NotFound, StoreError, StoreUnavailable

R = TypeVar("R")

Notice = Callable[[str], None]  # told, in one sentence, when it was not the store that answered

_OFFLINE: Final = "connect once and fetch it without --offline"
_ASKED_LAST_FOR: Final = 30.0  # seconds


def unnoticed(_: str) -> None:
    """For those who do not care which place it was."""


class Sources:
    """Asks one place after the other, object by object. With no place at all it is the answer of a machine offline."""

    def __init__(self, places: Sequence[Backend], notice: Notice = unnoticed) -> None:
        self._places = tuple(places)
        self._notice = notice
        self._silent_until: dict[Backend, float] = {}

    def first(self, what: str, read: Callable[[Backend], R | None]) -> R | None:
        """What the first place gives that has it whole. When none has, the store's own fault counts, or its None."""
        if not self._places:
            raise StoreUnavailable(f"offline: this machine's cache does not hold {what}; {_OFFLINE}")
        faults: dict[Backend, StoreError | None] = {}
        for place in self._in_order():
            try:
                value = read(place)
            except (NotFound, Corrupt, Changed, StoreUnavailable) as fault:
                faults[place] = fault
                if isinstance(fault, StoreUnavailable):
                    self._silent_until[place] = time.monotonic() + _ASKED_LAST_FOR
                continue
            if value is not None:
                self._tell(what, place, faults)
                return value
            faults[place] = None
        own_fault = faults[self._places[0]]
        if own_fault is not None:
            raise own_fault
        return None

    def _in_order(self) -> Iterator[Backend]:
        """Who did not answer a moment ago is asked last: its time-outs would otherwise be waited for at each object."""
        now = time.monotonic()
        yield from sorted(self._places, key=lambda place: self._silent_until.get(place, now) > now)

    def _tell(self, what: str, place: Backend, faults: dict[Backend, StoreError | None]) -> None:
        for silent, fault in faults.items():
            self._notice(f"{what} was read from {place.url}: {fault or f'{silent.url} does not hold it'}")
