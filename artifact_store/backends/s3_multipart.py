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
    answer_may_be_lost,
    attempts,
    code_of,
    is_refused,
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
    checksum: str  # SHA-256, as S3 spells it


def spelled(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def stretches(size: int) -> list[tuple[int, int]]:
    """Start and size of each part: the same for everyone, so that anyone can continue anyone's upload."""
    step = _PART_BYTES
    while size > step * _MAX_PARTS:
        step *= 2
    return [(start, min(step, size - start)) for start in range(0, size, step)]


def hashed_in_parts(data: bytes | memoryview | Path, size: int) -> Payload:
    """The digests of the whole and of its parts: what the parts tie together are then the bytes that have the name."""
    unnamed = Payload("", size, data if isinstance(data, Path) else memoryview(data).cast("B"))
    with opened(unnamed, ignore_progress) as source:
        whole, parts = _digests(unnamed, source)
    return replace(unnamed, sha256=whole.hex(), parts=parts)


def parts_of(payload: Payload, source: Source) -> list[UploadPart]:
    """By their digests; where those were not taken with the whole's, it too is hashed again, which alone ties them."""
    digests = payload.parts
    if not digests:
        whole, digests = _digests(payload, source)
        if whole.hex() != payload.sha256:
            raise source.changed()
    return [
        UploadPart(number, start, size, spelled(digest))
        for number, ((start, size), digest) in enumerate(zip(stretches(payload.size), digests, strict=True), 1)
    ]


def composite(parts: Sequence[UploadPart]) -> str:
    """The checksum of checksums that S3 arrives at."""
    checksums = b"".join(base64.b64decode(part.checksum) for part in parts)
    return f"{spelled(hashlib.sha256(checksums).digest())}-{len(parts)}"


def is_stored(part: UploadPart, listed: Mapping[str, Any], source: Source) -> bool:
    """Whether S3 holds this part already. A server that lists no checksum has its ETag, where that is an MD5."""
    if listed["Size"] != part.size:
        return False
    if listed.get("ChecksumSHA256"):
        return bool(listed["ChecksumSHA256"] == part.checksum)
    md5 = hashlib.md5(usedforsecurity=False)
    _feed(md5, source, part.start, part.size)
    return bool(listed["ETag"].strip('"') == md5.hexdigest())


def proven_sha256(head: Mapping[str, Any]) -> str | None:
    """The digest of the bytes, if what S3 keeps proves it.

    A checksum over parts is one of checksums. It proves the digest that was noted beside it if it is the expected one.
    """
    kept = head.get("ChecksumSHA256") or ""
    noted = head.get("Metadata", {})
    expected = noted.get(PARTS, "")
    if (
        kept and WHOLE in noted and kept in (expected, expected.partition("-")[0])
    ):  # some servers leave out the number of parts
        return str(noted[WHOLE])
    if head.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    try:
        digest = base64.b64decode(kept, validate=True)
    except binascii.Error:
        return None
    return digest.hex() if len(digest) == hashlib.sha256().digest_size else None


def _digests(payload: Payload, source: Source) -> tuple[bytes, tuple[bytes, ...]]:
    """Of the whole and of each part, several at once."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, source.stopping_on_errors():
        whole = pool.submit(_digest, source, 0, payload.size)
        parts = tuple(pool.map(lambda piece: _digest(source, *piece), stretches(payload.size)))
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


_STREAMS: Final = 8  # enough for a fast line, few enough that a crash loses little
_OPEN_UPLOADS: Final = 8  # of one path, that are looked into for parts to keep

Stored: TypeAlias = dict[int, str]  # ETags by part number

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Upload:
    path: str
    id: str


@dataclass(frozen=True)
class Job:
    """One payload that is to become one object."""

    path: str
    payload: Payload
    source: Source
    parts: Sequence[UploadPart]
    windows: Mapping[int, Window]
    write_id: str
    overwrite: bool


class PartsUploader:
    def __init__(self, place: Place) -> None:
        self._place = place
        # One pool for all blobs under way: what is sent at once is bounded however many there are.
        self._pool = ThreadPoolExecutor(min(_STREAMS, place.options.concurrency))

    def store(self, path: str, payload: Payload, sent: Sent, *, overwrite: bool) -> bool:
        """False: there is an object that this call did not make.

        An upload that another process began carries that one's write-id: if the answer to its completion is lost, the
        object counts as that one's, and the caller judges it by content as after any lost race.
        """
        with opened(payload, sent) as source:
            parts = parts_of(payload, source)
            windows = {part.number: Window(source, part.start, part.size) for part in parts}
            job = Job(path, payload, source, parts, windows, secrets.token_hex(16), overwrite)
            return self._carry_out(job)

    def copy_onto_itself(self, path: str, head: Mapping[str, Any], keep: Mapping[str, Any]) -> None:
        """For objects that are too large for one CopyObject. `keep` is what the copy shall have from the original."""
        place = self._place
        begun = place.ask("create_multipart_upload", path, ChecksumAlgorithm="SHA256", **keep)
        upload = Upload(path, begun["UploadId"])

        def copy(piece: tuple[int, tuple[int, int]]) -> Mapping[str, Any]:
            number, (start, size) = piece
            answer = place.ask(
                "upload_part_copy",
                path,
                UploadId=upload.id,
                PartNumber=number,
                CopySource={"Bucket": place.bucket, "Key": place.key(path)},
                CopySourceIfMatch=head["ETag"],
                CopySourceRange=f"bytes={start}-{start + size - 1}",
            )
            copied = answer["CopyPartResult"]
            kept = {name: copied[name] for name in ("ETag", "ChecksumSHA256") if name in copied}
            return {"PartNumber": number, **kept}

        try:
            pieces = list(enumerate(stretches(head["ContentLength"]), 1))
            parts = self._in_parallel(copy, pieces, nullcontext())
            place.ask("complete_multipart_upload", path, UploadId=upload.id, MultipartUpload={"Parts": parts})
        except BaseException:
            self._abort(upload)
            raise

    def _carry_out(self, job: Job) -> bool:
        fresh = False
        for _ in attempts():
            upload, stored = (None if fresh else self._broken_off(job)) or (self._begin(job), {})
            open_question = self._send(job, upload, stored) or self._complete(job, upload, stored)
            if open_question is None:
                return True
            made_here = self._settled(job, open_question)
            if is_refused(open_question):
                self._abort(upload)
            if made_here is not None:
                return made_here
            if answer_may_be_lost(open_question):
                raise unavailable(open_question, self._writing(job)) from open_question
            fresh = status_of(open_question) == 409  # S3 wants a new upload then
        raise StoreUnavailable(
            f"cannot {self._writing(job)}: {ATTEMPTS} uploads ran into other writers, and none left an object; "
            "a retry is safe"
        )

    def _begin(self, job: Job) -> Upload:
        metadata = {WRITE_ID: job.write_id, WHOLE: job.payload.sha256, PARTS: composite(job.parts)}
        with self._place.faults("write", job.path):
            answer = self._place.ask(
                "create_multipart_upload",
                job.path,
                ChecksumAlgorithm="SHA256",
                Metadata=metadata,
                **self._place.options.encryption,
            )
        return Upload(job.path, answer["UploadId"])

    def _broken_off(self, job: Job) -> tuple[Upload, Stored] | None:
        """The upload of this path, by whomever, that has most of our parts, and those."""
        key = self._place.key(job.path)
        with self._place.faults("look for broken-off uploads of", job.path):
            pages = self._place.pages("list_multipart_uploads", Prefix=key)
            listed = [each for page in pages for each in page.get("Uploads", ()) if _is_like_ours(each, key)]
            listed.sort(key=lambda each: (each["Initiated"], each["UploadId"]))
            uploads = [Upload(job.path, each["UploadId"]) for each in listed[-_OPEN_UPLOADS:]]
            found = [(upload, self._stored(job, upload)) for upload in uploads]
        return max((each for each in found if each[1]), key=lambda each: len(each[1]), default=None)

    def _stored(self, job: Job, upload: Upload) -> Stored:
        """What S3 holds of our parts; nothing if the upload has ended meanwhile, which sending will find out."""
        try:
            pages = self._place.pages("list_parts", Key=self._place.key(upload.path), UploadId=upload.id)
            listed = {each["PartNumber"]: each for page in pages for each in page.get("Parts", ())}
        except FAULTS as error:
            if code_of(error) == "NoSuchUpload":
                return {}
            raise
        known = [(part, listed[part.number]) for part in job.parts if part.number in listed]
        return {part.number: each["ETag"] for part, each in known if is_stored(part, each, job.source)}

    def _send(self, job: Job, upload: Upload, stored: Stored) -> Fault | None:
        """Add what is missing to `stored`. A fault, if the upload is gone: perhaps it is an object by now."""
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
        answer = self._place.ask(
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
        """A fault, if it leaves open what became of the object."""
        parts = [
            {"PartNumber": part.number, "ETag": stored[part.number], "ChecksumSHA256": part.checksum}
            for part in job.parts
        ]
        try:
            self._place.ask(
                "complete_multipart_upload",
                job.path,
                UploadId=upload.id,
                MultipartUpload={"Parts": parts},
                MpuObjectSize=job.payload.size,
                **({} if job.overwrite else {"IfNoneMatch": "*"}),
            )
        except FAULTS as error:
            gone = code_of(error) in ("NoSuchUpload", "InvalidPart")  # a part that somebody else sent again
            if gone or is_refused(error) or answer_may_be_lost(error):
                return error
            raise unavailable(error, self._writing(job)) from error
        return None

    def _settled(self, job: Job, cause: Fault) -> bool | None:
        """Whether the object that is there was made by this call; None when the work is still to be done."""
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
        # What stays behind because this fails too is collected like any broken-off upload.
        with suppress(*FAULTS):
            self._place.ask("abort_multipart_upload", upload.path, UploadId=upload.id)

    def _in_parallel(
        self, function: Callable[[T], R], items: Iterable[T], watch: AbstractContextManager[object]
    ) -> list[R]:
        """The first error ends all: what waits is dropped, and what is under way is waited for."""
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
