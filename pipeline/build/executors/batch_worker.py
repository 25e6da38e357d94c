"""Worker of the batch executor: a child of an array job runs one job of a list and stores its outcome.

The list is one blob of the store; a child's index is its place in it.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.build.jobs import Event, Job, JobFinished, JobLog, JobStarted, failure_from, to_document
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.util.errors import BuildRefused, MissingSoftware
from nxpipe.pipeline.util.files import json_of

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.documents import Blob


_FORMAT: Final = "nxpipe.items/1"
_REMEDY: Final = "publish it to the hub and pass its id there, or use another executor"


def put_jobs(store: "Store", jobs: Sequence[Job]) -> "Blob":
    """Store a list of jobs. Its random id separates the outcomes of this attempt from those of earlier ones."""
    from nxpipe.artifact_store.canonical import canonical_json

    document = {"format": _FORMAT, "run": secrets.token_hex(16), "items": [job.document() for job in jobs]}
    return store.put_blob(canonical_json(document))


def read_job(store: "Store", digest: str, place: int) -> Job:
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.errors import InvalidDocument, NotFound
    from nxpipe.artifact_store.layout import digest_path

    location = f"{store.url}/{digest_path(digest)}"
    stat = store.backend.stat(digest_path(digest))
    if stat is None:
        raise NotFound(
            f"{location}: no such list of jobs; gc removes it a day after its build; build again for a new one"
        )
    document = json_of(store.read_blob(Blob(sha256=digest, size=stat.size)))
    if document.get("format") != _FORMAT or not 0 <= place < len(document["items"]):
        raise InvalidDocument(
            f"{location}: not a list of jobs with an index {place}; only `nxpipe build` writes such lists"
        )
    return Job.from_document(document["items"][place])


def require_remote_sources(spec: ModelSpec) -> None:
    """Raise BuildRefused for files of this machine: a remote worker reaches only the hub and the store."""
    model, folder = spec.model_id, spec.weights.folder
    if spec.kind == "file":
        raise BuildRefused(
            f"{model}: a program in a file of this machine, which the build farm cannot read; use another executor"
        )
    if spec.kind == "folder":
        raise BuildRefused(f"{model}: a folder of this machine, which the build farm cannot read; {_REMEDY}")
    if folder is not None:
        raise BuildRefused(
            f"{model}: its weights are in {folder} of this machine, which the build farm cannot read; {_REMEDY}"
        )


_LOG: Final = 64 * 1024  # characters of the end of a log in the outcome; the job's output has all of it
_MESSAGE: Final = 4096


def run_array_job(url: str, jobs: str, place: int, log: Callable[[str], None]) -> JobFinished:
    """Run one job of a list, and store its outcome. `url` is the store as this machine reaches it, which replaces the
    scheduler's. `jobs` is the digest of the list."""
    from nxpipe.artifact_store.builds import record_outcome
    from nxpipe.artifact_store.url import open_store
    from nxpipe.pipeline.build.worker import run_job

    job = replace(read_job(open_store(url), jobs, place), store=url)
    log(f"{job.title}: job {place} of {jobs[:12]}")

    def send(event: Event) -> None:
        if isinstance(event, JobLog):
            log(event.text)
        elif isinstance(event, JobStarted):
            log(f"started by {event.worker}")

    try:
        _require_same_key(job)
    except Exception as error:
        finished = JobFinished(job.key, 0.0, failure=failure_from(error))
    else:
        finished = run_job(job, send)
    log(_result(finished))
    record_outcome(open_store(url, kms_key=job.kms_key), jobs, place, to_document(_shorten(finished)))
    return finished


def _require_same_key(job: Job) -> None:
    """Raise MissingSoftware if this image computes another cache key, as an image of another version does."""
    request = BuildSpec.of(job.spec)
    key = request.request_key if job.shape is None else request.cell_keys(job.shape)[-1]
    if key != job.key:
        raise MissingSoftware(
            "the versions of the plan (nxpipe, its libraries, or the model's revision on the hub)",
            f"{job.title} of the build farm",
            "deploy an image of [farm] with the versions of this build, and pass --revision for a model of the hub",
        )


def _result(finished: JobFinished) -> str:
    if finished.failure is None:
        return f"{'cached' if finished.cached else 'done'} after {finished.seconds:.1f} s"
    return f"{finished.failure.log}\n{finished.failure.kind}: {finished.failure.message}".lstrip()


def _shorten(finished: JobFinished) -> JobFinished:
    """Shorten the failure's texts to the size of a record and replace lone surrogates, which a file name may contain
    and UTF-8 cannot encode."""
    failure = finished.failure
    if failure is None:
        return finished
    message, log = (text.encode(errors="replace").decode() for text in (failure.message, failure.log))
    return replace(finished, failure=replace(failure, message=message[:_MESSAGE], log=log[-_LOG:]))
