"""Requests that failed for good: the store remembers them, so that nobody compiles for the same answer twice."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Final

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.builds import Failure, failure_of, record_failure
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.errors import StoreError
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, PipelineError, VerificationFailed
from nxpipe.pipeline.util.files import json_of
from nxpipe.pipeline.verify.verify import Thresholds

# Behind an error of the request's own may stand one of this machine: no memory, no disk, a package that is missing.
_OF_THE_MACHINE = (MemoryError, OSError, ImportError)
# Those that are met again as what they were, for their exit codes; all others as a refusal.
_KINDS: Final[dict[str, type[PipelineError]]] = {kind.__qualname__: kind for kind in (VerificationFailed, DoesNotFit)}


def refuse_what_failed_before(store: Store, request_key: str, thresholds: Thresholds) -> None:
    """Answer with the remembered failure, if this request would end in it again."""
    try:
        failure = failure_of(store, request_key)
        if failure is None or not _stands(store, failure, thresholds):
            return
    except (StoreError, ValueError):  # a record or a log that cannot be read spares nobody the work
        return
    kind = _KINDS.get(failure.kind, BuildRefused)
    when = failure.at[:16].replace("T", " ")
    raise kind(f"{failure.message.rstrip('.')} (found out on {when} UTC and remembered; --force tries again)")


@contextmanager
def remembering(store: Store, request_key: str, thresholds: Thresholds) -> Iterator[None]:
    """Keep what the block dies of, where the same request would die of it again."""
    try:
        yield
    except Exception as error:
        if not is_of_the_machine(error):
            log = {"verify": _asked(thresholds), "traceback": "".join(traceback.format_exception(error))}
            with suppress(StoreError):  # what happened matters more than that it could not be noted
                record_failure(store, request_key, error, log=canonical_json(log))
        raise


def is_of_the_machine(error: BaseException) -> bool:
    """Whether this machine's state is behind it, however it was wrapped."""
    return any(isinstance(cause, _OF_THE_MACHINE) for cause in _causes(error))


def _stands(store: Store, failure: Failure, thresholds: Thresholds) -> bool:
    """Thresholds are not part of a request's key: an answer beyond some may be within others."""
    if failure.kind != VerificationFailed.__qualname__:
        return True
    return failure.log is not None and json_of(store.read_blob(failure.log))["verify"] == _asked(thresholds)


def _asked(thresholds: Thresholds) -> dict[str, object]:
    return asdict(thresholds)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
