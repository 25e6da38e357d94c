"""Probes of an S3 server: checksums, multipart uploads, versioning, conditional writes."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any, Final

from nxpipe.artifact_store.backends.protocol import NotApplicable, Probe, Violated, insist
from nxpipe.artifact_store.backends.s3_client import FAULTS, Place, code_of, is_refused, status_of
from nxpipe.artifact_store.backends.s3_multipart import WRITE_ID, spelled

_CONTENT: Final = b"bytes of an experiment"
_CHECKSUM: Final = spelled(sha256(_CONTENT).digest())
_WRONG: Final = spelled(sha256(b"other bytes").digest())


def s3_probes(place: Place, folder: str) -> Iterator[Probe]:
    """Experiments below a prefix of a bucket."""
    here = _Prefix(place, folder)
    for name, why, run, vital in (
        ("a wrong SHA-256 is refused", "bytes that changed on their way must not be kept", here.wrong_checksum, True),
        ("a stored SHA-256 is given back", "else publishing reads everything again", here.kept_checksum, False),
        ("metadata is kept", "a lost answer is settled by the write-id in it", here.metadata, True),
        ("an upload in parts arrives whole", "large blobs are sent in parts", here.parts, True),
        (
            "completing an upload refuses a taken path",
            "creation must be exclusive for large blobs too",
            here.complete,
            True,
        ),
        ("open uploads and their parts are listed", "a broken-off upload is resumed by them", here.listed, False),
        ("aborting ends an upload", "collection removes what was broken off", here.abort, False),
        ("deletion honours If-Match", "collection must not remove what came meanwhile", here.delete_tag, True),
        ("deletion of a version leaves the others", "the same, in a bucket with versions", here.delete_version, True),
        ("the bucket keeps versions", "without them a removal may hit a copy made that moment", here.versions, False),
    ):
        yield Probe(name, why, _said(place, folder, run), vital)


def _said(place: Place, folder: str, run: Callable[[], None]) -> Callable[[], None]:
    """Faults that no experiment foresees become the store's own sentence."""

    def experiment() -> None:
        with place.faults("examine", folder):
            run()

    return experiment


class _Prefix:
    def __init__(self, place: Place, folder: str) -> None:
        self._place = place
        self._folder = folder

    def wrong_checksum(self) -> None:
        try:
            # Not through `ask`, which repeats what arrives garbled.
            key = self._place.key(self._path("garbled"))
            self._place.client.put_object(Bucket=self._place.bucket, Key=key, Body=_CONTENT, ChecksumSHA256=_WRONG)
        except FAULTS as error:
            if status_of(error) != 400:
                raise
            return
        raise Violated("an object was kept under the SHA-256 of other bytes")

    def kept_checksum(self) -> None:
        path = self._path("checksum")
        self._ask("put_object", path, Body=_CONTENT, ChecksumSHA256=_CHECKSUM)
        kept = (self._place.head(path) or {}).get("ChecksumSHA256")
        insist(kept == _CHECKSUM, f"the look-up tells {kept or 'none'}")

    def metadata(self) -> None:
        path = self._path("metadata")
        self._ask("put_object", path, Body=_CONTENT, Metadata={WRITE_ID: "0123"})
        kept = (self._place.head(path) or {}).get("Metadata", {}).get(WRITE_ID)
        insist(kept == "0123", f"the look-up tells {kept or 'none'}")

    def parts(self) -> None:
        path = self._path("parts")
        self._complete(path, self._begin(path))
        seen = self._ask("get_object", path)["Body"].read()
        insist(seen == _CONTENT, f"{len(seen)} other bytes are there")

    def complete(self) -> None:
        path = self._path("taken")
        self._ask("put_object", path, Body=b"first")
        upload = self._begin(path)
        try:
            self._complete(path, upload, IfNoneMatch="*")
        except FAULTS as error:
            if not is_refused(error):
                raise
            self._ask("abort_multipart_upload", path, UploadId=upload)
            return
        raise Violated("an upload was completed over an object")

    def listed(self) -> None:
        path = self._path("listed")
        upload = self._begin(path)
        try:
            pages = self._place.pages("list_multipart_uploads", Prefix=self._place.key(path))
            ids = [each["UploadId"] for page in pages for each in page.get("Uploads", ())]
            insist(upload in ids, "an open upload is not listed")
            parts = self._ask("list_parts", path, UploadId=upload).get("Parts", [])
            insist([part["Size"] for part in parts] == [len(_CONTENT)], f"{len(parts)} parts of 1 are listed")
        finally:
            self._ask("abort_multipart_upload", path, UploadId=upload)

    def abort(self) -> None:
        path = self._path("aborted")
        upload = self._begin(path)
        self._ask("abort_multipart_upload", path, UploadId=upload)
        try:
            self._ask("list_parts", path, UploadId=upload)
        except FAULTS as error:
            if code_of(error) != "NoSuchUpload":
                raise
            return
        raise Violated("an aborted upload has parts")

    def delete_tag(self) -> None:
        path = self._path("deleted")
        if "VersionId" in self._ask("put_object", path, Body=_CONTENT):
            raise NotApplicable("versions are named instead")
        try:
            self._ask("delete_object", path, IfMatch=f'"{"0" * 32}"')
        except FAULTS as error:
            if not is_refused(error):
                raise
        insist(self._place.head(path) is not None, "a deletion that named another content was carried out")

    def delete_version(self) -> None:
        path = self._path("superseded")
        version = self._ask("put_object", path, Body=b"older").get("VersionId")
        if version is None:
            raise NotApplicable("the bucket keeps no versions")
        current = self._ask("put_object", path, Body=_CONTENT)["VersionId"]
        self._ask("delete_object", path, VersionId=version)
        head = self._place.head(path)
        insist(
            head is not None and head["VersionId"] == current, "the deletion of an older version took the current one"
        )

    def versions(self) -> None:
        answer = self._ask("put_object", self._path("version"), Body=_CONTENT)
        insist("VersionId" in answer, "it keeps none; turn versioning on")

    def _begin(self, path: str) -> str:
        """An upload with one part, the last one, which may be small."""
        upload: str = self._ask("create_multipart_upload", path, ChecksumAlgorithm="SHA256")["UploadId"]
        self._ask("upload_part", path, UploadId=upload, PartNumber=1, Body=_CONTENT, ChecksumSHA256=_CHECKSUM)
        return upload

    def _complete(self, path: str, upload: str, **condition: str) -> None:
        listed = self._ask("list_parts", path, UploadId=upload)["Parts"]
        parts = [{"PartNumber": 1, "ETag": listed[0]["ETag"], "ChecksumSHA256": _CHECKSUM}]
        self._ask("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts}, **condition)

    def _ask(self, operation: str, path: str, **parameters: Any) -> dict[str, Any]:
        if operation in ("put_object", "create_multipart_upload"):
            parameters |= self._place.options.encryption
        return self._place.ask(operation, path, **parameters)

    def _path(self, name: str) -> str:
        return f"{self._folder}s3/{name}"
