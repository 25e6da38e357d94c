"""The seam between the store's protocol and where the bytes lie: what a folder and a bucket must both be able to do.

Paths are relative, with `/`, and come from `layout`. A backend knows nothing of manifests or of what is valid: it
moves bytes, and raises `StoreUnavailable` when it cannot.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from artifact_store.digest import sha256_hex

CHUNK: Final = 1024**2  # large enough that hashing, not calling, takes the time; small enough for any machine

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Payload:
    """Bytes to be stored, with their digest. A file as source lies in the backend's own scratch folder."""

    sha256: str
    size: int
    source: memoryview | Path

    @classmethod
    def of(cls, data: bytes | memoryview) -> "Payload":
        """`data` may have any shape, as an array's buffer has; what counts is its bytes."""
        view = memoryview(data)
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        return cls(sha256_hex(flat), flat.nbytes, flat)


@dataclass(frozen=True)
class Stat:
    """What a backend knows of an object without reading it; a folder keeps no digests."""

    size: int
    sha256: str | None


class Backend(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def scratch_folder(self) -> Path:
        """Where a file must be written that is to become an object."""

    def create(self, path: str, payload: Payload, *, durable: bool = False) -> bool:
        """Store an object, whole or not at all, unless the path is taken. True: this call made it.

        Without `durable` a power loss may still take or tear it, until `make_durable`.
        """

    def replace(self, path: str, payload: Payload) -> None:
        """Store an object over whatever is there, whole, and durably."""

    def read(self, path: str) -> Iterator[bytes] | None:
        """An object in chunks, unverified; None when there is none."""

    def stat(self, path: str) -> Stat | None:
        """None when there is no such object."""

    def paths(self, prefix: str) -> Sequence[str]:
        """Every object directly below a prefix that ends in `/`."""

    def make_durable(self, paths: Iterable[str]) -> None:
        """Return when these objects would survive a power loss."""

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """`function` of every item in order: at once, where each waits for a network."""
