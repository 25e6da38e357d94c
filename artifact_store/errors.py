"""Errors of the store. Each message is one sentence: what, where, and the remedy."""

from collections.abc import Sequence


class StoreError(Exception):
    """Root of the store's errors."""


class BadUrl(StoreError):
    """A store URL that names no kind of store."""

    def __init__(self, url: str, fault: str) -> None:
        super().__init__(
            f"store URL {url!r} {fault}; allowed are file:///absolute/path, file://relative/path, a plain path, "
            "and s3://bucket/prefix"
        )


class StoreUnavailable(StoreError):
    """The folder or bucket cannot be reached, read or written; nothing is known to be wrong with what it holds."""


class Denied(StoreUnavailable):
    """The folder or bucket is there, and this user or identity may not do this with it."""

    def __init__(self, message: str, permission: str, operation: str) -> None:
        super().__init__(message)
        self.permission = permission
        self.operation = operation


class NotFound(StoreError):
    """The store holds nothing of that name."""


class ChannelEmpty(NotFound):
    """A channel to which nothing was ever promoted."""


class Corrupt(StoreError):
    """Stored bytes are not what their name or seal says; they were not used."""

    def __init__(self, where: str, fault: str, way_out: str) -> None:
        super().__init__(f"{where} is corrupt: {fault}; {way_out}")
        self.where = where


class Conflict(StoreError):
    """One key, two different answers: something that decides the bytes is missing from the key."""

    def __init__(self, key: str, stored: str, offered: str, url: str, how: str = "") -> None:
        differing = f", which differs in {how}" if how else ""
        super().__init__(
            f"non-reproducible output: {key} in {url} names {stored}, but this build made {offered}{differing}; "
            "compare the two, and add what differs to the key's inputs or make it deterministic"
        )
        self.stored = stored
        self.offered = offered


class Incomplete(StoreError):
    """A manifest names blobs that the store does not hold."""


class TooLarge(StoreError):
    """More bytes than this kind of store takes in one object."""


class InvalidDocument(StoreError):
    """A value or bytes that cannot be a document of this store, such as JSON that is not canonical."""


class NotUnderstood(InvalidDocument):
    """Canonical JSON of a shape that this version does not know; perhaps a later one wrote it."""


class Changed(StoreError):
    """An object was written anew while it was being read in parts; reading it again is safe."""


class Refused(StoreError):
    """A rule of the store, or of the channel's policy, forbids what was asked for; nothing was changed."""


class UnsafeBackend(StoreError):
    """This folder or bucket lacks a property without which a store would lose or mix up artifacts."""

    def __init__(self, url: str, failed: Sequence[str]) -> None:
        super().__init__(
            f"{url} cannot hold a store safely, for it fails {len(failed)} of the vital properties: "
            f"{'; '.join(failed)}; use another file system, bucket or server"
        )
