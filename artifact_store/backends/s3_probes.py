"""Probes of an S3 server: checksums, multipart uploads, versioning, conditional writes."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any, Final

from nxpipe.artifact_store.backends.protocol import NotApplicable, Probe, Violated, require
from nxpipe.artifact_store.backends.s3_client import FAULTS, Place, code_of, is_refused, status_of
from nxpipe.artifact_store.backends.s3_multipart import WRITE_ID, spelled

_CONTENT: Final = b"bytes of an experiment"  # content of every probe object
_CHECKSUM: Final = spelled(sha256(_CONTENT).digest())
_WRONG: Final = spelled(sha256(b"other bytes").digest())


def s3_probes(place: Place, folder: str) -> Iterator[Probe]:
    """Probes of S3 below a prefix of a bucket."""
    probes = _Probes(place, folder)
    for name, why, run, vital in (
        ("a wrong SHA-256 is refused", "bytes that change in transit must not be stored", probes.wrong_checksum, True),
        ("a stored SHA-256 is given back", "without it publishing reads every blob again", probes.kept_checksum, False),
        ("metadata is kept", "after a lost response the write id in it identifies the writer", probes.metadata, True),
        ("an upload in parts arrives whole", "large blobs are sent in parts", probes.parts, True),
        (
            "completing an upload refuses a taken path",
            "creation must be exclusive for large blobs too",
            probes.complete,
            True,
        ),
        ("open uploads and their parts are listed", "an interrupted upload is resumed from them", probes.listed, False),
        ("aborting ends an upload", "collection removes interrupted uploads", probes.abort, False),
        (
            "deletion honours If-Match",
            "collection must not remove an object written meanwhile",
            probes.delete_tag,
            True,
        ),
        ("deletion of a version leaves the others", "the same, in a bucket with versions", probes.delete_version, True),
        ("the bucket keeps versions", "without them a removal may hit a copy made that moment", probes.versions, False),
    ):
        yield Probe(name, why, _with_store_errors(place, folder, run), vital)


def _with_store_errors(place: Place, folder: str, run: Callable[[], None]) -> Callable[[], None]:
    """The probe, with unexpected faults of S3 turned into errors of the store."""

    def experiment() -> None:
        with place.faults("probe", folder):
            run()

    return experiment


class _Probes:
    """The probes of an S3 server. Each raises Violated or NotApplicable, or returns None."""

    def __init__(self, place: Place, folder: str) -> None:
        self._place = place
        self._folder = folder

    def wrong_checksum(self) -> None:
        try:
            # Not through `request`, which retries a wrong checksum.
            key = self._place.key(self._path("garbled"))
            self._place.client.put_object(Bucket=self._place.bucket, Key=key, Body=_CONTENT, ChecksumSHA256=_WRONG)
        except FAULTS as error:
            if status_of(error) != 400:
                raise
            return
        raise Violated("an object was stored with a wrong SHA-256")

    def kept_checksum(self) -> None:
        path = self._path("checksum")
        self._request("put_object", path, Body=_CONTENT, ChecksumSHA256=_CHECKSUM)
        stored = (self._place.head(path) or {}).get("ChecksumSHA256")
        require(stored == _CHECKSUM, f"the look-up returns {stored or 'none'}")

    def metadata(self) -> None:
        path = self._path("metadata")
        self._request("put_object", path, Body=_CONTENT, Metadata={WRITE_ID: "0123"})
        stored = (self._place.head(path) or {}).get("Metadata", {}).get(WRITE_ID)
        require(stored == "0123", f"the look-up returns {stored or 'none'}")

    def parts(self) -> None:
        path = self._path("parts")
        self._complete(path, self._begin(path))
        content = self._request("get_object", path)["Body"].read()
        require(content == _CONTENT, f"the object has {len(content)} bytes with other content")

    def complete(self) -> None:
        path = self._path("taken")
        self._request("put_object", path, Body=b"first")
        upload = self._begin(path)
        try:
            self._complete(path, upload, IfNoneMatch="*")
        except FAULTS as error:
            if not is_refused(error):
                raise
            self._request("abort_multipart_upload", path, UploadId=upload)
            return
        raise Violated("a completed upload replaced an existing object")

    def listed(self) -> None:
        path = self._path("listed")
        upload_id = self._begin(path)
        try:
            pages = self._place.pages("list_multipart_uploads", Prefix=self._place.key(path))
            ids = [upload["UploadId"] for page in pages for upload in page.get("Uploads", ())]
            require(upload_id in ids, "an open upload is not listed")
            parts = self._request("list_parts", path, UploadId=upload_id).get("Parts", [])
            require([part["Size"] for part in parts] == [len(_CONTENT)], f"{len(parts)} parts of 1 are listed")
        finally:
            self._request("abort_multipart_upload", path, UploadId=upload_id)

    def abort(self) -> None:
        path = self._path("aborted")
        upload = self._begin(path)
        self._request("abort_multipart_upload", path, UploadId=upload)
        try:
            self._request("list_parts", path, UploadId=upload)
        except FAULTS as error:
            if code_of(error) != "NoSuchUpload":
                raise
            return
        raise Violated("an aborted upload has parts")

    def delete_tag(self) -> None:
        path = self._path("deleted")
        if "VersionId" in self._request("put_object", path, Body=_CONTENT):
            raise NotApplicable("deletion by version is used instead")
        try:
            self._request("delete_object", path, IfMatch=f'"{"0" * 32}"')
        except FAULTS as error:
            if not is_refused(error):
                raise
        require(self._place.head(path) is not None, "a deletion with a wrong ETag removed the object")

    def delete_version(self) -> None:
        path = self._path("superseded")
        version = self._request("put_object", path, Body=b"older").get("VersionId")
        if version is None:
            raise NotApplicable("the bucket keeps no versions")
        current = self._request("put_object", path, Body=_CONTENT)["VersionId"]
        self._request("delete_object", path, VersionId=version)
        head = self._place.head(path)
        require(
            head is not None and head["VersionId"] == current,
            "the deletion of an older version removed the current one",
        )

    def versions(self) -> None:
        answer = self._request("put_object", self._path("version"), Body=_CONTENT)
        require("VersionId" in answer, "it keeps none; turn versioning on")

    def _begin(self, path: str) -> str:
        """An upload with one part, which may be small since it is the last."""
        upload: str = self._request("create_multipart_upload", path, ChecksumAlgorithm="SHA256")["UploadId"]
        self._request("upload_part", path, UploadId=upload, PartNumber=1, Body=_CONTENT, ChecksumSHA256=_CHECKSUM)
        return upload

    def _complete(self, path: str, upload: str, **condition: str) -> None:
        listed = self._request("list_parts", path, UploadId=upload)["Parts"]
        parts = [{"PartNumber": 1, "ETag": listed[0]["ETag"], "ChecksumSHA256": _CHECKSUM}]
        self._request("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts}, **condition)

    def _request(self, operation: str, path: str, **parameters: Any) -> dict[str, Any]:
        if operation in ("put_object", "create_multipart_upload"):
            parameters |= self._place.options.encryption
        return self._place.request(operation, path, **parameters)

    def _path(self, name: str) -> str:
        return f"{self._folder}s3/{name}"
