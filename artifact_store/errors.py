"""Errors of the store. Each message is one sentence: what, where, and the remedy."""

from collections.abc import Sequence


class StoreError(Exception):
    """Root of the store's errors."""


class BadUrl(StoreError):
    """A malformed store URL, or one of an unknown kind of store."""

    def __init__(self, url: str, fault: str) -> None:
        super().__init__(
            f"store URL {url!r} {fault}; allowed are file:///absolute/path, file://relative/path, a plain path, "
            "and s3://bucket/prefix"
        )


class StoreUnavailable(StoreError):
    """The folder or bucket cannot be reached, read or written; its content is not known to be damaged."""


class Denied(StoreUnavailable):
    """The folder or bucket exists, but this user or identity has no permission for the operation."""

    def __init__(self, message: str, permission: str, operation: str) -> None:
        super().__init__(message)
        self.permission = permission
        self.operation = operation


class NotFound(StoreError):
    """The store holds no object of that name."""


class ChannelEmpty(NotFound):
    """A channel without a generation."""


class Corrupt(StoreError):
    """Stored bytes do not match their name or seal; they were not used."""

    def __init__(self, where: str, fault: str, remedy: str) -> None:
        super().__init__(f"{where} is corrupt: {fault}; {remedy}")
        self.where = where


class Conflict(StoreError):
    """One cache key with two different results: an input that changes the bytes is missing from the key."""

    def __init__(self, key: str, stored: str, offered: str, url: str, how: str = "") -> None:
        differing = f", which differs in {how}" if how else ""
        super().__init__(
            f"this build differs from the stored one of the same key: {key} in {url} names {stored}, but this build "
            f"made {offered}{differing}; compare the two, and add the differing input to the key or make the step "
            "deterministic"
        )
        self.stored = stored
        self.offered = offered


class OutputLost(Conflict):
    """A published artifact names a blob that the store has lost, and a build of the same request made other bytes."""

    def __init__(self, record: str, stored: str, offered: str, lost: str, how: str) -> None:
        StoreError.__init__(
            self,
            f"lost output: {record} names {stored}, whose {lost} is missing or damaged, and this build made {offered}, "
            f"which differs in {how}; restore the blob with `nxpipe store fsck --repair-from URL`, or remove {record} "
            "and build again",
        )
        self.stored = stored
        self.offered = offered


class Incomplete(StoreError):
    """A manifest names blobs that the store does not hold."""


class TooLarge(StoreError):
    """More bytes than this kind of store allows in one object."""


class InvalidDocument(StoreError):
    """A value or bytes that cannot be a document of this store, such as JSON that is not canonical."""


class NotUnderstood(InvalidDocument):
    """Canonical JSON with a structure that this version does not know; perhaps a later version wrote it."""


class Changed(StoreError):
    """An object was replaced while it was read in parts; reading it again is safe."""


class Refused(StoreError):
    """A rule of the store or of the channel's policy forbids the operation; nothing was changed."""


class UnsafeBackend(StoreError):
    """This folder or bucket lacks a property without which a store would lose or mix up artifacts."""

    def __init__(self, url: str, failed: Sequence[str]) -> None:
        super().__init__(
            f"{url} cannot hold a store safely: it fails {len(failed)} of the required properties: "
            f"{'; '.join(failed)}; use another file system, bucket or server"
        )
