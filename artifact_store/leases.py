"""A note that somebody is at work on a key. It saves duplicate work; nothing is wrong without it."""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.documents import Count, Digest, Name, Sealed, Time, as_time, seconds_since_1970
from nxpipe.artifact_store.errors import Corrupt, StoreUnavailable
from nxpipe.artifact_store.layout import lease_folder, number_of, numbered
from nxpipe.artifact_store.records import Records

HELD: Final = 120.0  # seconds; renewed at a third of it
_LONGEST: Final = 3600.0  # seconds; who asked for more had a wrong clock, and would keep others waiting for ever


class Lease(Sealed):
    format: Literal["nxpipe.lease/1"] = "nxpipe.lease/1"
    request_key: Digest
    term: Count
    holder: Name
    acquired_at: Time
    expires_at: Time

    @property
    def path(self) -> str:
        return f"{lease_folder(self.request_key)}{numbered(self.term)}"

    def holds(self, now: float) -> bool:
        return 0 < seconds_since_1970(self.expires_at) - now <= _LONGEST


class Leases:
    def __init__(self, backend: Backend, seconds: float = HELD) -> None:
        self._backend = backend
        self._records = Records(backend)
        self._seconds = seconds

    def current(self, request_key: str) -> Lease | None:
        """Who is at work on this key, by the store's clock."""
        last = self._last(request_key)
        return last if last and last.holds(self._backend.now()) else None

    def take(self, request_key: str, holder: str) -> Lease | None:
        """The lease, or None when another has it. A holder is one attempt: a name with something random in it."""
        last, now = self._last(request_key), self._backend.now()
        if last is not None and last.holds(now):
            return None
        wanted = Lease(
            request_key=request_key,
            term=last.term + 1 if last else 1,
            holder=holder,
            acquired_at=as_time(now),
            expires_at=as_time(now + self._seconds),
        )
        return wanted if self._records.create_or_read(wanted).holder == holder else None

    def renew(self, lease: Lease) -> Lease:
        return self._until(lease, self._backend.now() + self._seconds)

    def give_back(self, lease: Lease) -> None:
        self._until(lease, self._backend.now())

    @contextmanager
    def kept(self, lease: Lease) -> Iterator[None]:
        """Renew a lease for as long as the block runs, then give it back."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(self._seconds / 3):
                try:
                    self.renew(lease)
                except StoreUnavailable:
                    continue  # an expired lease costs duplicate work, and nothing else

        keeper = threading.Thread(target=renew, name=f"lease {lease.request_key[:12]}", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            done.set()
            keeper.join()
            self.give_back(lease)

    def _until(self, lease: Lease, end: float) -> Lease:
        renewed = lease.model_copy(update={"expires_at": as_time(end)})
        self._records.replace(renewed)
        return renewed

    def _last(self, request_key: str) -> Lease | None:
        folder = lease_folder(request_key)
        names = (path.removeprefix(folder) for path in self._backend.paths(folder))
        terms = sorted(filter(None, map(number_of, names)))
        if not terms:
            return None
        try:
            return self._records.read(Lease, f"{folder}{numbered(terms[-1])}")
        except Corrupt:
            # Nothing depends on it: a damaged lease is one that has expired.
            long_ago = as_time(0.0)
            return Lease(
                request_key=request_key, term=terms[-1], holder="unknown", acquired_at=long_ago, expires_at=long_ago
            )


def new_holder(name: str) -> str:
    """One attempt's name, unlike that of any other."""
    return f"{name} {secrets.token_hex(8)}"
