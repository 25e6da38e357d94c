"""Errors that the same request will meet again, so that nobody waits for them twice."""

from typing import Final, Literal

from nxpipe.artifact_store.documents import Blob, Digest, Name, Sealed, Text, Time, as_time, seconds_since_1970
from nxpipe.artifact_store.layout import failure_path
from nxpipe.artifact_store.store import Store

REMEMBERED: Final = 7 * 24 * 3600.0  # seconds
_SHOWN: Final = 4000  # characters of a message; the log has all of it


class Failure(Sealed):
    format: Literal["nxpipe.failure/1"] = "nxpipe.failure/1"
    request_key: Digest
    kind: Name
    message: Text
    log: Blob | None
    at: Time
    expires_at: Time

    @property
    def path(self) -> str:
        return failure_path(self.request_key)


def failure_of(store: Store, request_key: str) -> Failure | None:
    """What this request died of, unless that was too long ago."""
    found = store.records.read(Failure, failure_path(request_key))
    return found if found and seconds_since_1970(found.expires_at) > store.backend.now() else None


def remember_failure(
    store: Store, request_key: str, error: Exception, *, log: bytes | None = None, seconds: float = REMEMBERED
) -> Failure | None:
    """Keep the failure of a request; None for one that another attempt may be spared."""
    if may_pass(error):
        return None
    now = store.backend.now()
    text = " ".join(str(error).split()) or type(error).__name__
    failure = Failure(
        request_key=request_key,
        kind=type(error).__qualname__,
        message="".join(each for each in text if each.isprintable())[:_SHOWN],
        log=None if log is None else store.put_blob(log),
        at=as_time(now),
        expires_at=as_time(now + seconds),
    )
    store.records.replace(failure)
    return failure


def may_pass(error: BaseException) -> bool:
    """Whether the cause may be gone at the next attempt: the machine's, the store's, or a person's.

    Whatever is not known to be the request's own fault is of this kind; an error says so by `deterministic`.
    """
    return not getattr(error, "deterministic", False)
