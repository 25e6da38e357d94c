"""The list of items that an array job carries out: one blob of the store, in which every child has a place."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.build.asked import Asked
from nxpipe.pipeline.build.jobs import Event, Job, JobFinished, JobLog, JobStarted, to_document
from nxpipe.pipeline.build.status import failure_from
from nxpipe.pipeline.request import digest_of
from nxpipe.pipeline.util.documents import json_of
from nxpipe.pipeline.util.errors import BuildRefused, MissingSoftware

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.documents import Blob


_FORMAT: Final = "nxpipe.items/1"
_INSTEAD: Final = "publish it to the hub and name it by its id there, or take another executor"


def put_jobs(store: "Store", jobs: Sequence[Job]) -> "Blob":
    """No two lists are alike, so that nobody takes the outcome of an earlier attempt for that of this one."""
    from nxpipe.artifact_store.canonical import canonical_json

    document = {"format": _FORMAT, "run": secrets.token_hex(16), "items": [job.document() for job in jobs]}
    return store.put_blob(canonical_json(document))


def read_job(store: "Store", digest: str, place: int) -> Job:
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.errors import InvalidDocument, NotFound
    from nxpipe.artifact_store.layout import digest_path

    where = f"{store.url}/{digest_path(digest)}"
    stat = store.backend.stat(digest_path(digest))
    if stat is None:
        raise NotFound(f"{where}: no such list of items; it is collected a day after its build, which makes a new one")
    document = json_of(store.read_blob(Blob(sha256=digest, size=stat.size)))
    if document.get("format") != _FORMAT or not 0 <= place < len(document["items"]):
        raise InvalidDocument(f"{where}: it is no list of items with a place {place}; only a build writes such lists")
    return Job.from_document(document["items"][place])


def require_remote_sources(asked: Asked) -> None:
    """A worker elsewhere has the hub, the store and what it is told; no file that lies here."""
    from nxpipe.pipeline.models.source import looks_like_folder
    from nxpipe.pipeline.saved import is_saved

    model, weights = asked.order.model_id, asked.order.weights
    if is_saved(model):
        raise BuildRefused(
            f"{model}: a program in a file of this machine, which no worker of the build farm has; "
            f"build it by another executor"
        )
    if looks_like_folder(model):
        raise BuildRefused(f"{model}: a folder of this machine, which no worker of the build farm has; {_INSTEAD}")
    if weights is not None and weights != "hub" and not weights.startswith("random:"):
        raise BuildRefused(
            f"{model}: its weights are in {Path(weights)} of this machine, which no worker of the build farm has; "
            f"{_INSTEAD}"
        )


_LOG: Final = 64 * 1024  # characters of a log that go into the outcome: its end; all of it is in the job's output
_MESSAGE: Final = 4096


def run_array_job(url: str, jobs: str, place: int, say: Callable[[str], None]) -> JobFinished:
    """`url` is the store as this machine sees it; that of the driver stands in the item."""
    from nxpipe.artifact_store.runs import keep_outcome
    from nxpipe.artifact_store.url import open_store
    from nxpipe.pipeline.build.worker import run_job

    job = replace(read_job(open_store(url), jobs, place), store=url)
    say(f"{job.title}: item {place} of {jobs[:12]}")

    def tell(event: Event) -> None:
        if isinstance(event, JobLog):
            say(event.text)
        elif isinstance(event, JobStarted):
            say(f"begun by {event.worker}")

    try:
        _require_the_same_question(job)
    except Exception as error:
        ended = JobFinished(job.key, 0.0, failure=failure_from(error))
    else:
        ended = run_job(job, tell)
    say(_last_words(ended))
    keep_outcome(open_store(url, kms_key=job.kms_key), jobs, place, to_document(_brief(ended)))
    return ended


def _require_the_same_question(job: Job) -> None:
    """An image of another version would answer another question than was asked, and commit it under another key."""
    request = job.asked.request()
    if job.shape is None:
        own = digest_of(request.key_inputs())
    else:
        own = request.evidence_key(job.shape) if request.verified else request.program_key(job.shape)
    if own != job.key:
        raise MissingSoftware(
            "what it was planned with (the version of nxpipe, its libraries, or the revision that the hub has)",
            f"{job.title} of the build farm",
            "deploy an image of [farm] that is made of what the build runs with, and name the revision of a model",
        )


def _last_words(ended: JobFinished) -> str:
    if ended.failure is None:
        return f"{'found' if ended.cached else 'done'} after {ended.seconds:.1f} s"
    return f"{ended.failure.log}\n{ended.failure.kind}: {ended.failure.message}".lstrip()


def _brief(ended: JobFinished) -> JobFinished:
    """So that it fits into a record, and can be spelled in it: a file's name may hold what UTF-8 cannot."""
    failure = ended.failure
    if failure is None:
        return ended
    message, log = (text.encode(errors="replace").decode() for text in (failure.message, failure.log))
    return replace(ended, failure=replace(failure, message=message[:_MESSAGE], log=log[-_LOG:]))
