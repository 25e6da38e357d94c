"""Backend protocol: the operations that a folder and a bucket both offer, their clock, and named probes.

Paths are relative, with `/`, and come from `layout`. A backend moves bytes without interpreting them, and raises
`StoreUnavailable` on failure. Its only conditional operation is `create`, which decides every race of the store.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, Protocol, TypeVar, runtime_checkable

from nxpipe.artifact_store.canonical import sha256_hex, sha256_of_chunks

_HOLDS: Final = 60.0  # seconds; the drift of two clocks in that time is negligible


class Clock:
    """A backend's clock: read once a minute and extrapolated with this machine's monotonic clock."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._read_at = -_HOLDS
        self._value = 0.0

    def now(self) -> float:
        if time.monotonic() - self._read_at >= _HOLDS:
            self._value, self._read_at = self._read(), time.monotonic()
        return self._value + time.monotonic() - self._read_at


class NotApplicable(Exception):
    """The property does not exist for this kind of backend, and is not needed."""


class Violated(Exception):
    """The backend lacks the property; the message is the observation."""


@dataclass(frozen=True)
class Probe:
    """A named property of a backend and its purpose. `run` raises `Violated`, or returns a remark or None.

    A store on a backend without a vital property may lose or mix up artifacts; the other properties are desirable.
    """

    name: str
    why: str
    run: Callable[[], str | None]
    vital: bool = True


@runtime_checkable
class Probed(Protocol):
    """A backend with probes of its own, beyond those that all backends share."""

    def probes(self, folder: str) -> Iterable[Probe]:
        """Probes that write below `folder`, which ends in `/`; the caller removes it."""


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violated(otherwise)


CHUNK: Final = 1024**2  # bytes; large enough that hashing dominates the overhead of calls, small enough for any machine

T = TypeVar("T")
R = TypeVar("R")

Sent = Callable[[int], None]  # progress callback: the number of bytes that were sent or received


def ignore_progress(_: int) -> None:
    """A progress callback that does nothing."""


def serialized(sent: Sent) -> Sent:
    """A thread-safe wrapper of a progress callback."""
    lock = Lock()

    def report(size: int) -> None:
        with lock:
            sent(size)

    return report


@dataclass(frozen=True)
class Payload:
    """Bytes to store, with their digest. A source file is not moved.

    `parts` are the digests of the parts of a multipart upload, if they were computed together with the digest.
    """

    sha256: str
    size: int
    source: memoryview | Path
    parts: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, data: "bytes | memoryview | Path") -> "Payload":
        """The payload of bytes, of a buffer of any shape, or of a file, which is read."""
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
        """The bytes if they are immutable, so that they need not be verified after writing."""
        return self.source if isinstance(self.source, memoryview) and _is_constant(self.source) else None


def _is_constant(view: memoryview) -> bool:
    return type(view.obj) is bytes


@dataclass(frozen=True)
class Stat:
    """Status of an object, known without reading it.

    `sha256` is None if the backend stores no digest that proves the content. `tag` identifies the version: every write
    changes it. `modified` is in seconds since 1970, by the backend's own clock.
    """

    size: int
    sha256: str | None
    tag: str
    modified: float


@dataclass(frozen=True)
class ListedObject:
    """An object in a listing."""

    path: str
    size: int
    tag: str
    modified: float


@runtime_checkable
class ReadsViews(Protocol):
    """A backend that receives all parts of an object in one buffer, which saves an allocation and a copy of each."""

    def read_views(self, path: str, start: int, stop: int, at: int) -> Iterator[bytes | memoryview] | None:
        """As `read`, but a part is valid only until the next one, which may overwrite it. `at` is the offset of `start`
        in the file that they are written to. Where they can, parts end at multiples of 2 MiB of that file: the kernel
        then takes one page of 2 MiB from its cache for each, not 512 small ones."""


class Backend(Protocol):
    """Storage of named objects: a folder or a bucket."""

    @property
    def url(self) -> str: ...

    @property
    def scratch_folder(self) -> Path:
        """The best folder for a temporary file that becomes an object."""

    @property
    def lookup_threshold(self) -> int:
        """Bytes; a payload of at least this size is looked up before it is sent."""

    def hashed(self, data: bytes | memoryview | Path) -> Payload:
        """A payload of bytes or of a file, with every digest that this backend needs to store it."""

    def create(self, path: str, payload: Payload, *, durable: bool = False, sent: Sent = ignore_progress) -> bool:
        """Store an object atomically, unless the path exists. True: this call created it.

        Without `durable` a power loss may remove or damage it until `make_durable`.
        """

    def replace(self, path: str, payload: Payload, *, sent: Sent = ignore_progress) -> None:
        """Store an object atomically and durably; an existing one is replaced."""

    def read(
        self, path: str, start: int = 0, stop: int | None = None, *, tag: str | None = None
    ) -> Iterator[bytes] | None:
        """The bytes of an object, or the range from `start` to before `stop`, in chunks, unverified; None if absent.

        With a `tag`, a different version raises `Changed`.
        """

    def stat(self, path: str) -> Stat | None:
        """The status of an object; None if absent."""

    def has_just_proved(self, path: str, sha256: str, size: int) -> bool:
        """True if a look-up of the object is unnecessary.

        Less than an hour ago this backend created the object, and the server confirmed this digest of the stored bytes.
        """

    def paths(self, prefix: str) -> Sequence[str]:
        """Every object directly below a prefix that ends in `/`."""

    def walk(self, prefix: str) -> Iterator[ListedObject]:
        """Every object at any depth below a prefix that is empty or ends in `/`, ordered by path.

        `StoreUnavailable` is raised after everything readable was listed.
        """

    def touch(self, path: str) -> bool:
        """Refresh an object: set its modification time to now. False: it is gone."""

    def remove(self, item: ListedObject) -> bool:
        """Remove this version of an object. False: it is gone, or has changed and is kept."""

    def abandoned(self, older_than: float) -> Iterator[ListedObject]:
        """Remains of interrupted writes, which have no path in the store, last written before `older_than`."""

    def remove_abandoned(self, item: ListedObject) -> bool:
        """Remove the remains of an interrupted write. False: they are gone."""

    def recover(self) -> None:
        """Restore objects that an interrupted removal has renamed; called before garbage collection."""

    def now(self, *, read_only: bool = False) -> float:
        """The backend's clock, in seconds since 1970, by which its objects have ages.

        `read_only`: write nothing to read the clock; a folder may then use this machine's clock.
        """

    def make_durable(self, paths: Iterable[str]) -> None:
        """Flush these objects, so that they survive a power loss."""

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """`function` of every item, in order; concurrent where calls wait for a network."""
