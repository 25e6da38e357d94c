"""Differences between S3 and moto 5.2.5; after each arrow the behaviour of a plain moto server with boto3 1.44.5.

test_truth.py tests both the proxy and plain moto, so that this list stays true.

- Bytes that contradict a checksum, `Content-MD5` or `x-amz-content-sha256` are refused with 400.
  -> PutObject of `hell0` with the digest of `hello`: 200, and stored.
- The checksum of an upload is kept.
  -> With ChecksumSHA256 and without ChecksumAlgorithm, HeadObject shows none.
- A checksum has its ChecksumType. -> HeadObject and GetObject of a single PUT show none.
- The checksum of an object of N parts reads `<digest>-N`.
  -> HeadObject shows it without `-N`, like that of the bytes.
- A part has the kind of checksum of its upload. -> A SHA256 upload accepts a part with a CRC32.
- CompleteMultipartUpload requires each part's correct checksum, and returns that of the object.
  -> Accepts wrong ones and none, and returns none.
- CompleteMultipartUpload evaluates If-Match. -> 200 for an ETag that does not exist; only If-None-Match is evaluated.
- A SHA-256 or SHA-1 of parts is never one of the whole bytes. -> Accepts ChecksumType=FULL_OBJECT for them.
- ListParts shows the parts' checksums. -> None.
- ListMultipartUploads shows when an upload began. -> 2010-11-10, for each.
- UploadPart to an upload that no longer exists: 404 NoSuchUpload. -> 500, from a KeyError.
- DeleteObjects evaluates the ETag of a key. -> Deletes any object.
- `If-Match: *` on DELETE matches any object. -> 412.
- `x-amz-version-id` is sent for versioned buckets. -> CompleteMultipartUpload sends `null` for all others.

Left as in moto: ListMultipartUploads ignores MaxUploads; an object uploaded without a checksum has none, where
S3 computes a CRC64NVME; CRC32C and CRC64NVME are kept but not checked; signatures are not verified.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from io import BytesIO
from typing import IO, Final
from urllib.parse import quote
from xml.etree import ElementTree

from tests.faults.digests import ALGORITHMS, PREFIX, checksum_of, composite, refusal
from tests.faults.moto_process import Moto, MotoFailed, whole
from tests.faults.plan import Request
from tests.faults.wire import Answer, Head, error

_NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
_UNMET: Final = "At least one of the pre-conditions you specified did not hold"
ElementTree.register_namespace("", _NAMESPACE)


@dataclass
class Upload:
    """Properties of a multipart upload that moto forgets."""

    algorithm: str | None
    full_object: bool
    parts: dict[int, str] = field(default_factory=dict)
    began: datetime = field(default_factory=lambda: datetime.now(UTC))


class TruthfulS3:
    """Executes requests on moto, and responds as S3."""

    def __init__(self, moto: Moto, uploads: dict[str, Upload]) -> None:
        """`uploads` outlives this object, as uploads do in moto."""
        self._moto = moto
        self._uploads = uploads
        # S3 serialises conditional writes of one key; moto checks and writes in two steps. Here one waits.
        self._writes = asyncio.Lock()
        self._special: dict[str, Callable[[Request, Head, IO[bytes]], Awaitable[Answer]]] = {
            "CreateMultipartUpload": self._create_upload,
            "UploadPart": self._upload_part,
            "CompleteMultipartUpload": self._complete_upload,
            "DeleteObject": self._delete,
            "DeleteObjects": self._delete_many,
        }

    async def carry_out(self, request: Request, head: Head, body: IO[bytes], claims: dict[str, str]) -> Answer:
        """Execute a request; `claims` are its header and trailer fields, by names in lower case."""
        if (refused := await asyncio.to_thread(refusal, claims, body)) is not None:
            return refused
        if request.method in ("GET", "HEAD"):
            return await self._read(request, head)
        if (checksum := checksum_of(claims)) is not None:
            # moto stores a checksum only if a field names its algorithm.
            algorithm, value = checksum
            head = head.having("x-amz-sdk-checksum-algorithm", algorithm.upper()).having(PREFIX + algorithm, value)
        async with self._writes:
            answer = await self._special.get(request.operation, self._write)(request, head, body)
            return answer.of(data) if (data := await whole(answer)) else answer

    async def _write(self, request: Request, head: Head, body: IO[bytes]) -> Answer:
        return await self._moto.ask(head, body)

    async def _read(self, request: Request, head: Head) -> Answer:
        answer = await self._moto.ask(head)
        if answer.head.status >= 400:
            return answer
        if request.operation == "ListParts":
            return await self._amended(answer, lambda root: self._show_checksums(root, request))
        if request.operation == "ListMultipartUploads":
            return await self._amended(answer, self._show_beginnings)
        return replace(answer, head=_with_checksum_type(answer.head))

    async def _create_upload(self, request: Request, head: Head, body: IO[bytes]) -> Answer:
        algorithm = head.get("x-amz-checksum-algorithm")
        full_object = head.get("x-amz-checksum-type") == "FULL_OBJECT"
        if full_object and algorithm in ("SHA1", "SHA256"):
            message = f"The FULL_OBJECT checksum type cannot be used with the {algorithm.lower()} checksum algorithm."
            return error(400, "InvalidRequest", message)
        answer = await self._moto.ask(head, body)
        data = await whole(answer)
        if answer.head.status == 200:
            upload = Upload(algorithm.lower() if algorithm else None, full_object)
            self._uploads[_text(ElementTree.fromstring(data), "UploadId")] = upload
        return answer.of(data)

    async def _upload_part(self, request: Request, head: Head, body: IO[bytes]) -> Answer:
        upload = self._uploads.get(request.parameters["uploadId"])
        sent = checksum_of({name.lower(): value for name, value in head.fields})
        if upload and upload.algorithm and (sent is None or sent[0] != upload.algorithm):
            actual = sent[0] if sent else "null"
            message = f"Checksum Type mismatch occurred, expected {upload.algorithm}, actual {actual}"
            return error(400, "InvalidRequest", message)
        answer = await self._moto.ask(head, body)
        if answer.head.status == 500:
            answer.close()
            return error(404, "NoSuchUpload", "The specified upload does not exist.")
        if upload and sent and answer.head.status == 200:
            upload.parts[int(request.parameters["partNumber"])] = sent[1]
            answer = replace(answer, head=answer.head.having(PREFIX + sent[0], sent[1]))
        return answer

    async def _complete_upload(self, request: Request, head: Head, body: IO[bytes]) -> Answer:
        upload = self._uploads.get(request.parameters["uploadId"])
        body.seek(0)
        parts = ElementTree.fromstring(body.read())
        refused = _wrong_parts(upload, parts) if upload else None
        if refused is None and (wanted := head.get("If-Match")) is not None:
            refused = await self._mismatch(request.path, wanted, head)
        if refused is not None:
            return refused
        answer = await self._moto.ask(head, body)
        if answer.head.status != 200:
            return answer
        if answer.head.get("x-amz-version-id") == "null":
            answer = replace(answer, head=answer.head.without("x-amz-version-id"))
        return await self._amended(answer, lambda root: _show_composite(root, upload, parts) if upload else None)

    async def _delete(self, request: Request, head: Head, body: IO[bytes]) -> Answer:
        wanted = head.get("If-Match")
        refused = await self._mismatch(request.path, wanted, head) if wanted else None
        return refused or await self._moto.ask(head.without("If-Match"), body)

    async def _delete_many(self, request: Request, head: Head, body: IO[bytes]) -> Answer:
        body.seek(0)
        root = ElementTree.fromstring(body.read())
        failed = []
        for item in root.findall("{*}Object"):
            path = f"{request.path.rstrip('/')}/{quote(_text(item, 'Key'))}"
            wanted = item.findtext("{*}ETag")
            if wanted and await self._mismatch(path, wanted, head) is not None:
                root.remove(item)
                failed.append(_text(item, "Key"))
        if not failed:
            return await self._moto.ask(head, body)
        data = ElementTree.tostring(root)
        answer = await self._moto.ask(head.having("Content-Length", str(len(data))), BytesIO(data))
        return await self._amended(answer, lambda root: _show_failures(root, failed))

    async def _mismatch(self, path: str, wanted: str, head: Head) -> Answer | None:
        """The error of a write whose If-Match fails; None if it holds."""
        identity = tuple(entry for entry in head.fields if entry[0].lower() in ("host", "authorization"))
        found = await self._moto.ask(Head(f"HEAD {path} HTTP/1.1", identity))
        found.close()
        if found.head.status == 404:
            return error(404, "NoSuchKey", "The specified key does not exist.")
        if found.head.status != 200:
            raise MotoFailed(f"moto answered {found.head.start} when asked for the ETag of {path}")
        if wanted != "*" and wanted.strip('"') != (found.head.get("ETag") or "").strip('"'):
            return error(412, "PreconditionFailed", _UNMET)
        return None

    async def _amended(self, answer: Answer, amend: Callable[[ElementTree.Element], None]) -> Answer:
        root = ElementTree.fromstring(await whole(answer))
        amend(root)
        return answer.of(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))

    def _show_checksums(self, root: ElementTree.Element, request: Request) -> None:
        upload = self._uploads.get(request.parameters["uploadId"])
        if upload is None or upload.algorithm is None:
            return
        _add(root, "ChecksumAlgorithm", upload.algorithm.upper())
        _add(root, "ChecksumType", "FULL_OBJECT" if upload.full_object else "COMPOSITE")
        for part in root.findall("{*}Part"):
            _add(part, _element(upload.algorithm), upload.parts[int(_text(part, "PartNumber"))])

    def _show_beginnings(self, root: ElementTree.Element) -> None:
        for entry in root.findall("{*}Upload"):
            upload = self._uploads.get(_text(entry, "UploadId"))
            began = entry.find("{*}Initiated")
            if upload is not None and began is not None:
                began.text = upload.began.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _with_checksum_type(head: Head) -> Head:
    """The head of a GET or HEAD response that has a checksum, with its type."""
    checksum = checksum_of({name.lower(): value for name, value in head.fields})
    if checksum is None:
        return head
    algorithm, value = checksum
    parts = re.search(r'-(\d+)"?$', head.get("ETag") or "")
    if parts is None or head.get("x-amz-checksum-type") == "FULL_OBJECT":
        return head.having("x-amz-checksum-type", "FULL_OBJECT")
    value = value if "-" in value else f"{value}-{parts[1]}"
    return head.having(PREFIX + algorithm, value).having("x-amz-checksum-type", "COMPOSITE")


def _wrong_parts(upload: Upload, parts: ElementTree.Element) -> Answer | None:
    """The error of a completion whose parts' checksums differ from those of the uploads, or are absent."""
    if upload.algorithm is None or upload.full_object:
        return None
    for part in parts.findall("{*}Part"):
        number = int(_text(part, "PartNumber"))
        claimed = part.findtext("{*}" + _element(upload.algorithm))
        if claimed is None:
            message = f"The upload was created using a {upload.algorithm} checksum. It was missing for part {number}."
            return error(400, "InvalidRequest", message)
        if claimed != upload.parts.get(number):
            return error(400, "InvalidPart", "One or more of the specified parts could not be found.")
    return None


def _show_composite(root: ElementTree.Element, upload: Upload, parts: ElementTree.Element) -> None:
    if upload.algorithm is not None and upload.algorithm in ALGORITHMS and not upload.full_object:
        sums = [upload.parts[int(_text(part, "PartNumber"))] for part in parts.findall("{*}Part")]
        _add(root, _element(upload.algorithm), composite(upload.algorithm, sums))
        _add(root, "ChecksumType", "COMPOSITE")


def _show_failures(root: ElementTree.Element, keys: list[str]) -> None:
    for key in keys:
        failure = ElementTree.SubElement(root, f"{{{_NAMESPACE}}}Error")
        _add(failure, "Key", key)
        _add(failure, "Code", "PreconditionFailed")
        _add(failure, "Message", _UNMET)


def _element(algorithm: str) -> str:
    return f"Checksum{algorithm.upper()}"


def _add(parent: ElementTree.Element, name: str, text: str) -> None:
    ElementTree.SubElement(parent, f"{{{_NAMESPACE}}}{name}").text = text


def _text(element: ElementTree.Element, name: str) -> str:
    found = element.findtext("{*}" + name)
    assert found is not None, f"<{element.tag}> has no <{name}>"
    return found
