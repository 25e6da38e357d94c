"""Multipart uploads of large blobs: part sizes and checksums, concurrent parts, resumption of an interrupted upload."""

import base64
import binascii
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from nxpipe.artifact_store.backends.protocol import CHUNK, Payload, Sent, ignore_progress
from nxpipe.artifact_store.backends.s3_client import (
    ATTEMPTS,
    FAULTS,
    Fault,
    Place,
    attempts,
    code_of,
    is_refused,
    response_may_be_lost,
    status_of,
    unavailable,
    unknown,
)
from nxpipe.artifact_store.backends.s3_connection import Interrupted, Source, Window, opened
from nxpipe.artifact_store.errors import StoreUnavailable

WRITE_ID: Final = "nxpipe-write-id"
WHOLE: Final = "nxpipe-sha256"
PARTS: Final = "nxpipe-parts"

IN_PARTS_ABOVE: Final = 64 * 1024**2
MAX_BLOB_BYTES: Final = 5 * 1024**4
_PART_BYTES: Final = 32 * 1024**2
_MAX_PARTS: Final = 10_000


@dataclass(frozen=True)
class UploadPart:
    number: int  # from 1
    start: int
    size: int
    checksum: str  # SHA-256 in base64, S3's format


def spelled(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def part_ranges(size: int) -> list[tuple[int, int]]:
    """Start and size of each part, a function of the size alone, so that any process can resume any upload."""
    step = _PART_BYTES
    while size > step * _MAX_PARTS:
        step *= 2
    return [(start, min(step, size - start)) for start in range(0, size, step)]


def hashed_in_parts(data: bytes | memoryview | Path, size: int) -> Payload:
    """A payload with the digests of the whole and of its parts, computed together from the same bytes."""
    unnamed = Payload("", size, data if isinstance(data, Path) else memoryview(data).cast("B"))
    with opened(unnamed, ignore_progress) as source:
        whole, parts = _digests(unnamed, source)
    return replace(unnamed, sha256=whole.hex(), parts=parts)


def parts_of(payload: Payload, source: Source) -> list[UploadPart]:
    """The parts of a payload with their checksums. Missing part digests are computed together with the whole digest,
    which must match the payload's."""
    digests = payload.parts
    if not digests:
        whole, digests = _digests(payload, source)
        if whole.hex() != payload.sha256:
            raise source.changed()
    return [
        UploadPart(number, start, size, spelled(digest))
        for number, ((start, size), digest) in enumerate(zip(part_ranges(payload.size), digests, strict=True), 1)
    ]


def composite(parts: Sequence[UploadPart]) -> str:
    """The checksum of checksums that S3 computes for a multipart upload."""
    checksums = b"".join(base64.b64decode(part.checksum) for part in parts)
    return f"{spelled(hashlib.sha256(checksums).digest())}-{len(parts)}"


def is_stored(part: UploadPart, listed: Mapping[str, Any], source: Source) -> bool:
    """True if S3 already holds this part. If a server lists no checksum, its ETag is compared with the MD5."""
    if listed["Size"] != part.size:
        return False
    if listed.get("ChecksumSHA256"):
        return bool(listed["ChecksumSHA256"] == part.checksum)
    md5 = hashlib.md5(usedforsecurity=False)
    _feed(md5, source, part.start, part.size)
    return bool(listed["ETag"].strip('"') == md5.hexdigest())


def proven_sha256(head: Mapping[str, Any]) -> str | None:
    """The digest of an object's bytes, if the checksum that S3 stores proves it.

    A multipart checksum is a checksum of checksums. It proves the digest in the metadata if it equals the composite
    checksum in the metadata.
    """
    stored = head.get("ChecksumSHA256") or ""
    metadata = head.get("Metadata", {})
    expected = metadata.get(PARTS, "")
    if (
        stored and WHOLE in metadata and stored in (expected, expected.partition("-")[0])
    ):  # some servers leave out the number of parts
        return str(metadata[WHOLE])
    if head.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    try:
        digest = base64.b64decode(stored, validate=True)
    except binascii.Error:
        return None
    return digest.hex() if len(digest) == hashlib.sha256().digest_size else None


def _digests(payload: Payload, source: Source) -> tuple[bytes, tuple[bytes, ...]]:
    """The digests of the whole and of each part, computed concurrently."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, source.stopping_on_errors():
        whole = pool.submit(_digest, source, 0, payload.size)
        parts = tuple(pool.map(lambda piece: _digest(source, *piece), part_ranges(payload.size)))
        return whole.result(), parts


def _digest(source: Source, start: int, size: int) -> bytes:
    hasher = hashlib.sha256()
    _feed(hasher, source, start, size)
    return hasher.digest()


def _feed(hasher: Any, source: Source, start: int, size: int) -> None:
    end = start + size
    while start < end and not source.stopped.is_set() and (chunk := source.at(start, min(CHUNK, end - start))):
        hasher.update(chunk)
        start += len(chunk)


_STREAMS: Final = 8  # saturates a fast network; few enough that a crash loses little
_OPEN_UPLOADS: Final = 8  # open uploads of one path that are searched for reusable parts

Stored: TypeAlias = dict[int, str]  # ETags by part number

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Upload:
    path: str
    id: str


@dataclass(frozen=True)
class Job:
    """The upload of one payload as one object."""

    path: str
    payload: Payload
    source: Source
    parts: Sequence[UploadPart]
    windows: Mapping[int, Window]
    write_id: str
    overwrite: bool


class PartsUploader:
    """Multipart uploads to one bucket."""

    def __init__(self, place: Place) -> None:
        self._place = place
        # One pool for all blobs bounds the number of concurrent requests.
        self._pool = ThreadPoolExecutor(min(_STREAMS, place.options.concurrency))

    def store(self, path: str, payload: Payload, sent: Sent, *, overwrite: bool) -> bool:
        """Store an object. False: another process created it.

        A resumed upload has the write id of the process that began it. If the response to its completion is lost, the
        object counts as created by that process, and the caller verifies its content as after any lost race.
        """
        with opened(payload, sent) as source:
            parts = parts_of(payload, source)
            windows = {part.number: Window(source, part.start, part.size) for part in parts}
            job = Job(path, payload, source, parts, windows, secrets.token_hex(16), overwrite)
            return self._upload(job)

    def copy_onto_itself(self, path: str, head: Mapping[str, Any], keep: Mapping[str, Any]) -> None:
        """Copy an object that is too large for one CopyObject onto itself; `keep` are its parameters to preserve."""
        place = self._place
        created = place.request("create_multipart_upload", path, ChecksumAlgorithm="SHA256", **keep)
        upload = Upload(path, created["UploadId"])

        def copy(piece: tuple[int, tuple[int, int]]) -> Mapping[str, Any]:
            number, (start, size) = piece
            answer = place.request(
                "upload_part_copy",
                path,
                UploadId=upload.id,
                PartNumber=number,
                CopySource={"Bucket": place.bucket, "Key": place.key(path)},
                CopySourceIfMatch=head["ETag"],
                CopySourceRange=f"bytes={start}-{start + size - 1}",
            )
            copied = answer["CopyPartResult"]
            fields = {name: copied[name] for name in ("ETag", "ChecksumSHA256") if name in copied}
            return {"PartNumber": number, **fields}

        try:
            pieces = list(enumerate(part_ranges(head["ContentLength"]), 1))
            parts = self._in_parallel(copy, pieces, nullcontext())
            place.request("complete_multipart_upload", path, UploadId=upload.id, MultipartUpload={"Parts": parts})
        except BaseException:
            self._abort(upload)
            raise

    def _upload(self, job: Job) -> bool:
        fresh = False
        for _ in attempts():
            upload, stored = (None if fresh else self._interrupted(job)) or (self._begin(job), {})
            fault = self._send(job, upload, stored) or self._complete(job, upload, stored)
            if fault is None:
                return True
            created = self._was_created(job, fault)
            if is_refused(fault):
                self._abort(upload)
            if created is not None:
                return created
            if response_may_be_lost(fault):
                raise unavailable(fault, self._writing(job)) from fault
            fresh = status_of(fault) == 409  # S3 requires a new upload then
        raise StoreUnavailable(
            f"cannot {self._writing(job)}: {ATTEMPTS} uploads conflicted with other writers, none of which left an "
            "object; a retry is safe"
        )

    def _begin(self, job: Job) -> Upload:
        metadata = {WRITE_ID: job.write_id, WHOLE: job.payload.sha256, PARTS: composite(job.parts)}
        with self._place.faults("write", job.path):
            answer = self._place.request(
                "create_multipart_upload",
                job.path,
                ChecksumAlgorithm="SHA256",
                Metadata=metadata,
                **self._place.options.encryption,
            )
        return Upload(job.path, answer["UploadId"])

    def _interrupted(self, job: Job) -> tuple[Upload, Stored] | None:
        """The open upload of this path, by any process, with the most reusable parts, and those parts."""
        key = self._place.key(job.path)
        with self._place.faults("look for interrupted uploads of", job.path):
            pages = self._place.pages("list_multipart_uploads", Prefix=key)
            listed = [entry for page in pages for entry in page.get("Uploads", ()) if _is_like_ours(entry, key)]
            listed.sort(key=lambda entry: (entry["Initiated"], entry["UploadId"]))
            uploads = [Upload(job.path, entry["UploadId"]) for entry in listed[-_OPEN_UPLOADS:]]
            candidates = [(upload, self._stored(job, upload)) for upload in uploads]
        return max((pair for pair in candidates if pair[1]), key=lambda pair: len(pair[1]), default=None)

    def _stored(self, job: Job, upload: Upload) -> Stored:
        """The parts of the job that S3 holds; none if the upload has ended meanwhile, which sending detects."""
        try:
            pages = self._place.pages("list_parts", Key=self._place.key(upload.path), UploadId=upload.id)
            listed = {entry["PartNumber"]: entry for page in pages for entry in page.get("Parts", ())}
        except FAULTS as error:
            if code_of(error) == "NoSuchUpload":
                return {}
            raise
        known = [(part, listed[part.number]) for part in job.parts if part.number in listed]
        return {part.number: entry["ETag"] for part, entry in known if is_stored(part, entry, job.source)}

    def _send(self, job: Job, upload: Upload, stored: Stored) -> Fault | None:
        """Send the missing parts and add them to `stored`. A fault if the upload is gone, perhaps completed."""
        missing = [part for part in job.parts if part.number not in stored]
        try:
            send = partial(self._send_part, job, upload)
            stored.update(self._in_parallel(send, missing, job.source.stopping_on_errors()))
        except Interrupted:
            raise job.source.changed() from None
        except FAULTS as error:
            if code_of(error) != "NoSuchUpload" and status_of(error) < 500:
                raise unavailable(error, self._writing(job)) from error
            job.source.stopped.clear()
            return error
        return None

    def _send_part(self, job: Job, upload: Upload, part: UploadPart) -> tuple[int, str]:
        answer = self._place.request(
            "upload_part",
            job.path,
            UploadId=upload.id,
            PartNumber=part.number,
            Body=job.windows[part.number],
            ContentLength=part.size,
            ChecksumAlgorithm="SHA256",
            ChecksumSHA256=part.checksum,
        )
        return part.number, answer["ETag"]

    def _complete(self, job: Job, upload: Upload, stored: Stored) -> Fault | None:
        """Complete the upload. A fault if it is unknown whether the object was created."""
        parts = [
            {"PartNumber": part.number, "ETag": stored[part.number], "ChecksumSHA256": part.checksum}
            for part in job.parts
        ]
        try:
            self._place.request(
                "complete_multipart_upload",
                job.path,
                UploadId=upload.id,
                MultipartUpload={"Parts": parts},
                MpuObjectSize=job.payload.size,
                **({} if job.overwrite else {"IfNoneMatch": "*"}),
            )
        except FAULTS as error:
            gone = code_of(error) in ("NoSuchUpload", "InvalidPart")  # another process replaced a part
            if gone or is_refused(error) or response_may_be_lost(error):
                return error
            raise unavailable(error, self._writing(job)) from error
        return None

    def _was_created(self, job: Job, cause: Fault) -> bool | None:
        """True if this call created the existing object, False if another process did; None if there is no object."""
        try:
            head = self._place.head(job.path)
        except StoreUnavailable as error:
            raise unknown(self._place.where(job.path), cause, error) from cause
        if head is None:
            return None
        if job.overwrite:
            return True if proven_sha256(head) == job.payload.sha256 else None
        return bool(head.get("Metadata", {}).get(WRITE_ID) == job.write_id)

    def _abort(self, upload: Upload) -> None:
        # If this fails too, garbage collection removes the upload later.
        with suppress(*FAULTS):
            self._place.request("abort_multipart_upload", upload.path, UploadId=upload.id)

    def _in_parallel(
        self, function: Callable[[T], R], items: Iterable[T], watch: AbstractContextManager[object]
    ) -> list[R]:
        """`function` of every item. After the first error, pending calls are cancelled and running ones awaited."""
        futures: list[Future[R]] = [self._pool.submit(function, item) for item in items]
        try:
            with watch:
                for future in as_completed(futures):
                    future.result()
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def _writing(self, job: Job) -> str:
        return f"write {self._place.where(job.path)}"


def _is_like_ours(upload: Mapping[str, Any], key: str) -> bool:
    return upload["Key"] == key and upload.get("ChecksumAlgorithm") in (None, "SHA256")
