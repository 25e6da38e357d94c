"""S3 backend: a store in a bucket, without a server. Section 13 of docs/reference/store-format.md."""

import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from nxpipe.artifact_store.backends import s3 as listing
from nxpipe.artifact_store.backends.protocol import (
    CHUNK,
    Clock,
    ListedObject,
    Payload,
    Probe,
    Sent,
    Stat,
    ignore_progress,
)
from nxpipe.artifact_store.backends.s3_client import (
    ATTEMPTS,
    DEFAULT,
    FAULTS,
    Fault,
    Place,
    S3Options,
    attempts,
    code_of,
    is_absent,
    is_changed,
    is_refused,
    response_may_be_lost,
    s3_client,
    status_of,
    unavailable,
    unknown,
)
from nxpipe.artifact_store.backends.s3_connection import Body, Interrupted, Window, opened
from nxpipe.artifact_store.backends.s3_multipart import (
    IN_PARTS_ABOVE,
    MAX_BLOB_BYTES,
    WRITE_ID,
    PartsUploader,
    hashed_in_parts,
    proven_sha256,
    spelled,
)
from nxpipe.artifact_store.backends.s3_probes import s3_probes
from nxpipe.artifact_store.backends.s3_quick import FastPath
from nxpipe.artifact_store.canonical import sha256_of_chunks
from nxpipe.artifact_store.errors import Changed, StoreUnavailable, TooLarge


def tag_of(item: Mapping[str, Any]) -> str:
    """The tag of an object's version, equal in a listing and a look-up; listings have no version ids.

    Equal bytes written again have the same ETag, so the tag includes the time of the write in seconds.
    """
    etag = item["ETag"].strip('"')
    return f"{etag}@{modified(item):.0f}"


def etag_of(tag: str) -> str:
    return f'"{tag.partition("@")[0]}"'


def modified(item: Mapping[str, Any]) -> float:
    """The time of the last write in whole seconds, the precision of a look-up."""
    return _seconds(item["LastModified"])


def directly_below(place: Place, prefix: str) -> Sequence[str]:
    with place.faults("list", prefix):
        pages = place.pages("list_objects_v2", Prefix=place.key(prefix), Delimiter="/")
        return [item["Key"].removeprefix(place.prefix) for page in pages for item in page.get("Contents", ())]


def walk(place: Place, prefix: str) -> Iterator[ListedObject]:
    with place.faults("list", prefix):
        for page in place.pages("list_objects_v2", Prefix=place.key(prefix)):
            for item in page.get("Contents", ()):
                path = item["Key"].removeprefix(place.prefix)
                yield ListedObject(path, item["Size"], tag_of(item), modified(item))


def broken_uploads(place: Place, older_than: float) -> Iterator[ListedObject]:
    """Abandoned multipart uploads. An upload has the age of its newest part, so a slow active one is not listed."""
    with place.faults("list the uploads below", ""):
        for page in place.pages("list_multipart_uploads", Prefix=place.prefix):
            for upload in page.get("Uploads", ()):
                if _seconds(upload["Initiated"]) < older_than:
                    item = _with_its_parts(place, upload)
                    if item.modified < older_than:
                        yield item


def end_upload(place: Place, item: ListedObject) -> bool:
    try:
        place.request("abort_multipart_upload", item.path.rpartition("#")[0], UploadId=item.tag)
    except FAULTS as error:
        if code_of(error) == "NoSuchUpload":
            return False
        raise
    return True


def other_versions(place: Place, path: str, version: str) -> Sequence[str] | None:
    """The other versions of an object, one of which a deletion of `version` would expose. None: it is not current."""
    key = place.key(path)
    pages = place.pages("list_object_versions", Prefix=key)
    entries = [entry for page in pages for kind in ("Versions", "DeleteMarkers") for entry in page.get(kind, ())]
    versions = [entry for entry in entries if entry["Key"] == key]
    if not any(entry["VersionId"] == version and entry["IsLatest"] for entry in versions):
        return None
    return [entry["VersionId"] for entry in versions if entry["VersionId"] != version]


def _with_its_parts(place: Place, upload: Mapping[str, Any]) -> ListedObject:
    """An upload as a listing entry. Its path is `KEY#ID`; no path of a store contains `#`."""
    parts: list[Mapping[str, Any]] = []
    try:
        for page in place.pages("list_parts", Key=upload["Key"], UploadId=upload["UploadId"]):
            parts += page.get("Parts", ())
    except FAULTS as error:
        if code_of(error) != "NoSuchUpload":  # the upload ended meanwhile
            raise
    return ListedObject(
        path=f"{upload['Key'].removeprefix(place.prefix)}#{upload['UploadId']}",
        size=sum(part["Size"] for part in parts),
        tag=upload["UploadId"],
        modified=max([_seconds(upload["Initiated"]), *(_seconds(part["LastModified"]) for part in parts)]),
    )


def _seconds(time: datetime) -> float:
    return float(int(time.timestamp()))


T = TypeVar("T")
R = TypeVar("R")
P = TypeVar("P", bytes, bytes | memoryview)

_PROOF_HOLDS: Final = 3600.0  # seconds; younger objects are not collected
MAX_COPY_BYTES: Final = 5 * 1024**3  # limit of one CopyObject


class Bucket:
    """A store in an S3 bucket, below a prefix. An object is created by a conditional PUT."""

    lookup_threshold = 256 * 1024 + 1  # sending fewer bytes takes no longer than a look-up

    def __init__(self, bucket: str, prefix: str, client: Any, options: S3Options = DEFAULT) -> None:
        self._place = Place(client, bucket, f"{prefix}/" if prefix else "", options, FastPath(client))
        self._uploader = PartsUploader(self._place)
        self._clock = Clock(self._time_of_an_answer)
        self._proved: dict[str, tuple[str, int, float]] = {}  # by path: digest, size, when
        self.url = self._place.url
        self.scratch_folder = Path(tempfile.gettempdir())

    def hashed(self, data: bytes | memoryview | Path) -> Payload:
        size = data.stat().st_size if isinstance(data, Path) else memoryview(data).nbytes
        return hashed_in_parts(data, size) if size > IN_PARTS_ABOVE else Payload.of(data)

    def create(self, path: str, payload: Payload, *, durable: bool = False, sent: Sent = ignore_progress) -> bool:
        """Create an object. S3 objects are always durable when the request succeeds."""
        if self._in_parts(path, payload):
            return self._uploader.store(path, payload, sent, overwrite=False)
        write_id = secrets.token_hex(16)
        for _ in attempts():
            try:
                self._put(path, payload, write_id, sent, IfNoneMatch="*")
                return True
            except FAULTS as error:
                if not is_refused(error) and not response_may_be_lost(error):
                    raise unavailable(error, self._writing(path)) from error
                holder = self._holder(path, error)
                if holder is not None:
                    if payload.size <= CHUNK:  # for larger payloads progress was reported while sending
                        sent(payload.size)
                    return holder == write_id
                if not is_refused(error):
                    raise unavailable(error, self._writing(path)) from error
        raise StoreUnavailable(
            f"cannot {self._writing(path)}: {ATTEMPTS} attempts conflicted with other writers, none of which left "
            "an object; a retry is safe"
        )

    def has_just_proved(self, path: str, sha256: str, size: int) -> bool:
        proof = self._proved.get(path)
        return proof is not None and proof[:2] == (sha256, size) and time.monotonic() - proof[2] < _PROOF_HOLDS

    def replace(self, path: str, payload: Payload, *, sent: Sent = ignore_progress) -> None:
        self._proved.pop(path, None)
        if self._in_parts(path, payload):
            self._uploader.store(path, payload, sent, overwrite=True)
            return
        with self._place.faults("write", path):
            self._put(path, payload, secrets.token_hex(16), sent)

    def read(
        self, path: str, start: int = 0, stop: int | None = None, *, tag: str | None = None
    ) -> Iterator[bytes] | None:
        answer = self._get(path, start, stop, listing.etag_of(tag) if tag else None)
        return None if answer is None else self._parts(path, answer, start, stop, _chunks)

    def read_views(self, path: str, start: int, stop: int, at: int) -> Iterator[bytes | memoryview] | None:
        def views(body: Any, position: int) -> Iterator[bytes | memoryview]:
            return body.views(at + position - start) if isinstance(body, Body) else _chunks(body, position)

        answer = self._get(path, start, stop, None)
        return None if answer is None else self._parts(path, answer, start, stop, views)

    def stat(self, path: str) -> Stat | None:
        head = self._place.head(path)
        if head is None:
            return None
        tag = listing.tag_of(head)
        sha256 = proven_sha256(head)
        if sha256 is None:
            chunks = self.read(path, tag=tag)
            if chunks is None:
                return None
            sha256 = sha256_of_chunks(chunks)
        return Stat(head["ContentLength"], sha256, tag, listing.modified(head))

    def paths(self, prefix: str) -> Sequence[str]:
        return listing.directly_below(self._place, prefix)

    def walk(self, prefix: str) -> Iterator[ListedObject]:
        return listing.walk(self._place, prefix)

    def touch(self, path: str) -> bool:
        """Refresh an object by copying it onto itself, the only S3 write without sending the bytes."""
        for _ in attempts():
            head = self._place.head(path)
            if head is None:
                return False
            try:
                self._copy_onto_itself(path, head)
                return True
            except FAULTS as error:
                if is_absent(error):
                    return False
                if not is_refused(error):
                    raise unavailable(error, f"refresh {self._place.where(path)}") from error
        raise StoreUnavailable(
            f"cannot refresh {self._place.where(path)}: other writers replaced it {ATTEMPTS} times meanwhile; "
            "a retry is safe"
        )

    def remove(self, item: ListedObject) -> bool:
        """Remove this version of an object. In a versioned bucket all versions are deleted, since an older one would
        become current.

        The version id protects a version created meanwhile. Without versioning only the ETag can be given, which is
        equal for a copy of the same bytes.
        """
        self._proved.pop(item.path, None)
        for _ in attempts():
            try:
                return self._remove_unchanged(item)
            except FAULTS as error:
                if is_absent(error) or is_changed(error):
                    return False
                # After a conflict the object may be unchanged. False would mean to a collection that a writer has
                # refreshed the object and the blobs that it names.
                if not is_refused(error):
                    raise unavailable(error, f"remove {self._place.where(item.path)}") from error
        raise StoreUnavailable(
            f"cannot remove {self._place.where(item.path)}: {ATTEMPTS} attempts conflicted with other writers; "
            "a retry is safe"
        )

    def abandoned(self, older_than: float) -> Iterator[ListedObject]:
        return listing.broken_uploads(self._place, older_than)

    def remove_abandoned(self, item: ListedObject) -> bool:
        with self._place.faults("end the upload", item.path):
            return listing.end_upload(self._place, item)

    def recover(self) -> None:
        """Nothing to restore: a removal is one request."""

    def now(self, *, read_only: bool = False) -> float:
        return self._clock.now()

    def make_durable(self, paths: Iterable[str]) -> None:
        """Nothing to do: S3 objects are durable once written."""

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        with ThreadPoolExecutor(self._place.options.concurrency) as pool:
            return list(pool.map(function, items))

    def _time_of_an_answer(self) -> float:
        try:
            answer = self._place.client.head_bucket(Bucket=self._place.bucket)
        except FAULTS as error:
            reason = self._place.reason(error, "list_objects_v2", Prefix=self._place.prefix, MaxKeys=1)
            raise unavailable(reason, f"read the clock of {self.url}") from error
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date is None:
            raise StoreUnavailable(
                f"cannot read the clock of {self.url}: its responses have no Date; use a server that sends one"
            )
        try:
            return parsedate_to_datetime(date).timestamp()
        except (ValueError, TypeError, OverflowError) as error:
            raise StoreUnavailable(
                f"cannot read the clock of {self.url}: the Date of its responses is {date[:64]!r}; "
                "use a server that sends a date"
            ) from error

    def probes(self, folder: str) -> Iterable[Probe]:
        return s3_probes(self._place, folder)

    def _in_parts(self, path: str, payload: Payload) -> bool:
        if payload.size > MAX_BLOB_BYTES:
            raise TooLarge(
                f"cannot {self._writing(path)}: it has {payload.size} bytes, and an S3 object has at most "
                f"{MAX_BLOB_BYTES}; split it into smaller blobs, or use a file:// store"
            )
        return payload.size > IN_PARTS_ABOVE

    def _put(self, path: str, payload: Payload, write_id: str, sent: Sent, **conditions: str) -> None:
        checksum = spelled(bytes.fromhex(payload.sha256))
        with opened(payload, sent) as source:
            # Small payloads as bytes: with a file object the client first waits for a 100-continue response.
            small = payload.size <= CHUNK
            body = source.at(0, payload.size) if small else Window(source, 0, payload.size)
            try:
                answer = self._place.request(
                    "put_object",
                    path,
                    Body=body,
                    ContentLength=payload.size,
                    ChecksumAlgorithm="SHA256",
                    ChecksumSHA256=checksum,
                    Metadata={WRITE_ID: write_id},
                    **conditions,
                    **self._place.options.encryption,
                )
            except Interrupted:
                raise source.changed() from None
            if small:
                sent(payload.size)
        if answer.get("ChecksumSHA256") == checksum:
            self._proved[path] = (payload.sha256, payload.size, time.monotonic())

    def _holder(self, path: str, cause: Fault) -> str | None:
        """The write id of the existing object, which identifies its writer. None if there is no object."""
        try:
            head = self._place.head(path)
        except StoreUnavailable as error:
            raise unknown(self._place.where(path), cause, error) from cause
        return None if head is None else head.get("Metadata", {}).get(WRITE_ID, "")

    def _get(self, path: str, start: int, stop: int | None, etag: str | None) -> Mapping[str, Any] | None:
        """S3's response, without a body if the range is empty; None if there is no object."""
        condition = {} if etag is None else {"IfMatch": etag}
        # HTTP has no empty range: one byte is requested and ignored.
        last = "" if stop is None else max(stop - 1, start)
        span = {} if start == 0 and stop is None else {"Range": f"bytes={start}-{last}"}
        try:
            return self._place.request("get_object", path, **condition, **span)
        except FAULTS as error:
            if is_absent(error):
                return None
            if status_of(error) == 412:
                raise self._changed(path) from error
            if code_of(error) == "InvalidRange":
                return {}
            raise unavailable(error, f"read {self._place.where(path)}") from error

    def _parts(
        self,
        path: str,
        answer: Mapping[str, Any] | None,
        start: int,
        stop: int | None,
        parts: Callable[[Any, int], Iterator[P]],
    ) -> Iterator[P]:
        """The parts of a body from a position on; after an interrupted response the rest of the same version is
        requested."""
        for attempt in attempts():
            if answer is None:
                raise self._changed(path)
            if "Body" not in answer or (stop is not None and stop <= start):
                return
            etag = answer["ETag"]
            try:
                with closing(answer["Body"]) as body:
                    for part in parts(body, start):
                        start += len(part)
                        yield part
                return
            except FAULTS as error:
                if attempt == ATTEMPTS - 1:
                    raise unavailable(error, f"read {self._place.where(path)}") from error
            answer = self._get(path, start, stop, etag)

    def _copy_onto_itself(self, path: str, head: Mapping[str, Any]) -> None:
        keep = {"Metadata": head.get("Metadata", {}), **self._place.options.encryption}
        if "StorageClass" in head:
            keep["StorageClass"] = head["StorageClass"]
        if head["ContentLength"] > MAX_COPY_BYTES:
            self._uploader.copy_onto_itself(path, head, keep)
            return
        self._place.request(
            "copy_object",
            path,
            CopySource={"Bucket": self._place.bucket, "Key": self._place.key(path)},
            CopySourceIfMatch=head["ETag"],
            MetadataDirective="REPLACE",
            ChecksumAlgorithm="SHA256",
            **keep,
        )

    def _remove_unchanged(self, item: ListedObject) -> bool:
        head = self._place.head(item.path)
        if head is None or listing.tag_of(head) != item.tag:
            return False
        if head.get("VersionId") is not None:
            return self._remove_version(item.path, head["VersionId"])
        self._place.request("delete_object", item.path, IfMatch=head["ETag"])
        return True

    def _remove_version(self, path: str, version: str) -> bool:
        others = listing.other_versions(self._place, path, version)
        if others is None:
            return False
        for version_id in (*others, version):
            self._place.request("delete_object", path, VersionId=version_id)
        return True

    def _changed(self, path: str) -> Changed:
        return Changed(f"{self._place.where(path)} was replaced or removed while it was being read; read it again")

    def _writing(self, path: str) -> str:
        return f"write {self._place.where(path)}"


def _chunks(body: Any, _: int) -> Iterator[bytes]:
    return cast(Iterator[bytes], body.iter_chunks(CHUNK))


def connect(bucket: str, prefix: str, options: S3Options = DEFAULT) -> Bucket:
    """The backend of a store in a bucket; sends no request."""
    try:
        return Bucket(bucket, prefix, s3_client(options), options)
    except FAULTS as error:
        raise unavailable(error, f"open s3://{bucket}") from error
    except ValueError as error:  # raised by the SDK for an invalid AWS_ENDPOINT_URL
        raise StoreUnavailable(f"cannot open s3://{bucket}: {error}; correct AWS_ENDPOINT_URL") from error
