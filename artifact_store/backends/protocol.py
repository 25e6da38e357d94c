"""Backend protocol: the operations that a folder and a bucket both offer, their clock, and named probes.

Paths are relative, with `/`, and come from `layout`. A backend knows nothing of manifests or of what is valid: it moves
bytes, and raises `StoreUnavailable` when it cannot. Its one conditional operation is `create`: every race of the store
is settled by it.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, Protocol, TypeVar, runtime_checkable

from nxpipe.artifact_store.canonical import sha256_hex, sha256_of_chunks

_HOLDS: Final = 60.0  # seconds; no two steady clocks drift apart in that time


class Clock:
    def __init__(self, look: Callable[[], float]) -> None:
        self._look = look
        self._looked = -_HOLDS
        self._seen = 0.0

    def now(self) -> float:
        if time.monotonic() - self._looked >= _HOLDS:
            self._seen, self._looked = self._look(), time.monotonic()
        return self._seen + time.monotonic() - self._looked


class NotApplicable(Exception):
    """This kind of backend has no such property, and needs none."""


class Violated(Exception):
    """The experiment came out wrong; says what was seen."""


@dataclass(frozen=True)
class Probe:
    """A property by name, and why it matters. `run` raises, or tells what is worth telling.

    A store on a backend without a vital property may lose or mix up artifacts; without another one it is worse to
    live with.
    """

    name: str
    why: str
    run: Callable[[], str | None]
    vital: bool = True


@runtime_checkable
class Probed(Protocol):
    """A backend with properties of its own beyond those that all of them share."""

    def probes(self, folder: str) -> Iterable[Probe]:
        """Experiments below `folder`, which ends in `/`; whoever makes them cleans up."""


def insist(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violated(otherwise)


CHUNK: Final = 1024**2  # large enough that hashing, not calling, takes the time; small enough for any machine

T = TypeVar("T")
R = TypeVar("R")

Sent = Callable[[int], None]  # told of every few bytes that went out or came in


def ignore_progress(_: int) -> None:
    """For those who do not watch."""


def in_turn(sent: Sent) -> Sent:
    """Watchers need not expect several threads."""
    one_at_a_time = Lock()

    def tell(size: int) -> None:
        with one_at_a_time:
            sent(size)

    return tell


@dataclass(frozen=True)
class Payload:
    """Bytes to be stored, with their digest. A file as source is left where it is.

    `parts` are the digests of the parts in which a backend will send them, where it has hashed both together.
    """

    sha256: str
    size: int
    source: memoryview | Path
    parts: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, data: "bytes | memoryview | Path") -> "Payload":
        """`data` may have any shape, as an array's buffer has; what counts is its bytes. Those of a file are read."""
        if isinstance(data, Path):
            with data.open("rb", buffering=0) as file:
                sha256 = sha256_of_chunks(iter(lambda: file.read(CHUNK), b""))
                return cls(sha256, os.fstat(file.fileno()).st_size, data)
        view = memoryview(data)
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        if flat.nbytes <= CHUNK and not _is_constant(flat):
            flat = memoryview(flat.tobytes())
        return cls(sha256_hex(flat), flat.nbytes, flat)

    @property
    def constant(self) -> memoryview | None:
        """The bytes if nobody can change them any more, so that what is written needs no second look."""
        return self.source if isinstance(self.source, memoryview) and _is_constant(self.source) else None


def _is_constant(view: memoryview) -> bool:
    return type(view.obj) is bytes


@dataclass(frozen=True)
class Stat:
    """What a backend knows of an object without reading it.

    `sha256` is None where the backend keeps no digest that proves the content. `tag` names this very version: it
    changes with whatever is written there. `modified` is in seconds since 1970, by the backend's own clock.
    """

    size: int
    sha256: str | None
    tag: str
    modified: float


@dataclass(frozen=True)
class Found:
    """An object in a listing."""

    path: str
    size: int
    tag: str
    modified: float


class Backend(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def scratch_folder(self) -> Path:
        """Where a file is best written that is to become an object."""

    @property
    def sent_unasked_below(self) -> int:
        """Bytes from which on an object is worth a look, whether it is there, before it is sent."""

    def hashed(self, data: bytes | memoryview | Path) -> Payload:
        """These bytes, or a file's, with every digest that storing them here takes."""

    def create(self, path: str, payload: Payload, *, durable: bool = False, sent: Sent = ignore_progress) -> bool:
        """Store an object, whole or not at all, unless the path is taken. True: this call made it.

        Without `durable` a power loss may still take or tear it, until `make_durable`.
        """

    def replace(self, path: str, payload: Payload, *, sent: Sent = ignore_progress) -> None:
        """Store an object over whatever is there, whole, and durably."""

    def read(
        self, path: str, start: int = 0, stop: int | None = None, *, tag: str | None = None
    ) -> Iterator[bytes] | None:
        """An object, or its bytes from `start` to before `stop`, in chunks, unverified; None when there is none.

        With a `tag`, another version than that one is `Changed`.
        """

    def stat(self, path: str) -> Stat | None:
        """None when there is no such object."""

    def has_just_proved(self, path: str, sha256: str, size: int) -> bool:
        """Whether a look would tell nothing new.

        True: less than an hour ago this backend itself made the object, and its keeper answered with the digest that it
        had computed of the bytes that it kept, which was this one.
        """

    def paths(self, prefix: str) -> Sequence[str]:
        """Every object directly below a prefix that ends in `/`."""

    def walk(self, prefix: str) -> Iterator[Found]:
        """Every object at any depth below a prefix that is empty or ends in `/`, in the order of their paths.

        `StoreUnavailable` comes after all that could be listed.
        """

    def touch(self, path: str) -> bool:
        """Make an object young, with the same bytes. False: it is gone."""

    def remove(self, found: Found) -> bool:
        """Remove this version of an object. False: it was gone, or has changed and stays."""

    def abandoned(self, older_than: float) -> Iterator[Found]:
        """What broken-off writes left that no path shows, last written before a time of the backend's clock."""

    def remove_abandoned(self, found: Found) -> bool:
        """Remove one of those. False: it was gone."""

    def recover(self) -> None:
        """Before a collection: put back what a removal that was killed has left out of sight."""

    def now(self, *, looking: bool = False) -> float:
        """The backend's clock, in seconds since 1970: the one by which its objects have ages.

        `looking`: nothing may be written to find it out; a folder's is then that of this machine.
        """

    def make_durable(self, paths: Iterable[str]) -> None:
        """Return when these objects would survive a power loss."""

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """`function` of every item in order: at once, where each waits for a network."""
