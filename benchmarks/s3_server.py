"""A small fast S3 server, for measuring clients and not the server.

    python benchmarks/s3_server.py FOLDER [--port N] [--latency MILLISECONDS] [--rate MB]

Bodies are files in FOLDER, sent by sendfile; names are in memory, so every start begins empty, and any bucket exists.
It supports the conditional writes, multipart uploads, ranges and listings that boto3, aws and s5cmd use. It verifies
nothing: a checksum is stored and returned unchecked, an ETag is not an MD5, a signature is ignored. The server in
tests/faults verifies.
"""

import argparse
import itertools
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Final
from urllib.parse import parse_qsl, quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from s3_objects import SHA256, Object, Objects, Refused, Segment, Upload, checksum, composite

_BUFFER: Final = 1024 * 1024
_PACED: Final = 8 * 1024 * 1024  # bytes between two waits


class Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, port: int, latency: float, rate: float | None) -> None:
        super().__init__(("127.0.0.1", port), Connection)
        self.objects = Objects(folder)
        self.latency = latency
        self._rate = rate  # bytes a second of all connections together; None: no limit
        self._free, self._lock = time.monotonic(), threading.Lock()

    def pace(self, count: int) -> None:
        """Wait until the network would have sent the bytes before these."""
        if self._rate is None:
            return
        with self._lock:
            begins = max(self._free, time.monotonic())
            self._free = begins + count / self._rate
        time.sleep(max(0.0, begins - time.monotonic()))


class Connection(StreamRequestHandler):
    """A client connection with sequential requests."""

    disable_nagle_algorithm = True
    rbufsize = 64 * 1024

    def handle(self) -> None:
        assert isinstance(self.server, Server)
        self.objects, self.pace = self.server.objects, self.server.pace
        try:
            while self._request():
                time.sleep(self.server.latency)
                self._answer_it()
        except (BrokenPipeError, ConnectionResetError):
            return  # a client may disconnect at any time

    def _request(self) -> bool:
        line = self.rfile.readline().decode("latin-1")
        if not line.strip():
            return False
        self.method, target, _ = line.split()
        path, _, query = target.partition("?")
        self.name = unquote(path).strip("/") if path.count("/") < 2 else unquote(path).lstrip("/")
        self.query = dict(parse_qsl(query, keep_blank_values=True))
        self.headers: dict[str, str] = {}
        while line := self.rfile.readline().decode("latin-1").strip():
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()
        self.unread = int(self.headers.get("content-length", 0))
        if self.headers.get("expect", "").lower() == "100-continue":
            self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _answer_it(self) -> None:
        try:
            if "transfer-encoding" in self.headers or "aws-chunked" in self.headers.get("content-encoding", ""):
                self.request.shutdown(socket.SHUT_RD)  # its body cannot be separated from the next request
                raise Refused(501, "NotImplemented")
            self._operation()()
        except Refused as refused:
            while self.unread:
                self._read_into(memoryview(bytearray(_BUFFER)))
            self._xml(f"<Error><Code>{refused.code}</Code></Error>", refused.status)

    def _operation(self) -> Callable[[], None]:
        of_bucket = "/" not in self.name
        about = next((entry for entry in ("uploads", "uploadId", "delete") if entry in self.query), "")
        operations: dict[tuple[str, str], Callable[[], None]] = {
            ("PUT", ""): self._empty if of_bucket else self._put,
            ("HEAD", ""): self._empty if of_bucket else self._get,
            ("GET", ""): self._list if of_bucket else self._get,
            ("DELETE", ""): self._delete,
            ("POST", "delete"): self._delete_many,
            ("POST", "uploads"): self._create_upload,
            ("GET", "uploads"): self._list_uploads,
            ("PUT", "uploadId"): self._put_part,
            ("GET", "uploadId"): self._list_parts,
            ("POST", "uploadId"): self._complete_upload,
            ("DELETE", "uploadId"): self._abort_upload,
        }
        result = operations.get((self.method, about))
        if result is None:
            raise Refused(501, "NotImplemented")
        return result

    # Whole objects

    def _put(self) -> None:
        segment = self._body_to_disk()
        try:
            self.objects.put(self.name, Object((segment,), segment.etag, segment.fields), self.headers)
        except Refused:
            segment.path.unlink()
            raise
        self._empty({"ETag": f'"{segment.etag}"', **checksum(segment.fields)})

    def _get(self) -> None:
        result = self.objects.find(self.name)
        wanted = self.headers.get("if-match")
        if wanted is not None and wanted.strip('"') != result.etag:
            raise Refused(412, "PreconditionFailed")
        first, last = self._range(result.size)
        fields = {
            "ETag": f'"{result.etag}"',
            "Last-Modified": formatdate(result.modified, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Length": str(last - first + 1),
            **{name: value for name, value in result.fields.items() if not name.startswith("x-amz-checksum-")},
        }
        if "range" in self.headers:
            fields["Content-Range"] = f"bytes {first}-{last}/{result.size}"
        elif self.headers.get("x-amz-checksum-mode") == "ENABLED":
            fields |= checksum(result.fields)
        self._head(206 if "range" in self.headers else 200, fields)
        if self.method == "GET":
            self._send(result, first, last + 1)

    def _send(self, found: Object, begin: int, end: int) -> None:
        for segment in found.segments:
            count = min(end, segment.size) - begin
            if count > 0:
                with segment.path.open("rb") as file:
                    for start in range(begin, begin + count, _PACED):
                        size = min(_PACED, begin + count - start)
                        self.pace(size)
                        self.request.sendfile(file, start, size)
            begin, end = max(begin - segment.size, 0), end - segment.size

    def _range(self, size: int) -> tuple[int, int]:
        """The first and the last byte of the requested range."""
        requested = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", "bytes=0-"))
        if requested is None or requested[0] == "bytes=-":
            raise Refused(416, "InvalidRange")
        if not requested[1]:
            return max(size - int(requested[2]), 0), size - 1
        first, last = int(requested[1]), min(int(requested[2] or size), size - 1)
        if "range" in self.headers and first >= size:
            raise Refused(416, "InvalidRange")
        return first, last

    def _delete(self) -> None:
        self.objects.delete(self.name, self.headers)
        self._head(204, {})

    def _delete_many(self) -> None:
        for key in ElementTree.fromstring(self._body()).iterfind("{*}Object/{*}Key"):
            self.objects.delete(f"{self.name}/{key.text}", {})
        self._xml("<DeleteResult/>")

    # Uploads in parts

    def _create_upload(self) -> None:
        number = self.objects.new_name()
        self.objects.uploads[number] = Upload(self.name, self._stored())
        bucket, _, key = self.name.partition("/")
        self._xml(
            f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
            f"<UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
        )

    def _list_uploads(self) -> None:
        """Always empty: clients list uploads to resume one, and this server starts without any."""
        self._xml("<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>")

    def _put_part(self) -> None:
        upload = self._upload()
        segment = self._body_to_disk()
        replaced = upload.parts.get(number := int(self.query["partNumber"]))
        upload.parts[number] = segment
        if replaced:
            replaced.path.unlink()
        self._empty({"ETag": f'"{segment.etag}"', **checksum(segment.fields)})

    def _list_parts(self) -> None:
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>&quot;{part.etag}&quot;</ETag><Size>{part.size}</Size>"
            f"<ChecksumSHA256>{part.fields.get(SHA256, '')}</ChecksumSHA256></Part>"
            for number, part in sorted(self._upload().parts.items())
        )
        self._xml(f"<ListPartsResult><IsTruncated>false</IsTruncated>{parts}</ListPartsResult>")

    def _complete_upload(self) -> None:
        named = ElementTree.fromstring(self._body()).iterfind("{*}Part/{*}PartNumber")
        upload = self._upload()
        try:
            parts = tuple(upload.parts[int(number.text or 0)] for number in named)
        except KeyError:
            raise Refused(400, "InvalidPart") from None
        etag = f"{self.objects.new_name()}-{len(parts)}"
        self.objects.put(self.name, Object(parts, etag, {**upload.fields, **composite(parts)}), self.headers)
        del self.objects.uploads[self.query["uploadId"]]
        bucket, _, key = self.name.partition("/")
        self._xml(
            f"<CompleteMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
            f"<ETag>&quot;{etag}&quot;</ETag></CompleteMultipartUploadResult>"
        )

    def _abort_upload(self) -> None:
        for part in self._upload().parts.values():
            part.path.unlink()
        del self.objects.uploads[self.query["uploadId"]]
        self._head(204, {})

    def _upload(self) -> Upload:
        upload = self.objects.uploads.get(self.query["uploadId"])
        if upload is None or upload.bucket_and_key != self.name:
            raise Refused(404, "NoSuchUpload")
        return upload

    # Listings

    def _list(self) -> None:
        if "location" in self.query:
            self._xml("<LocationConstraint/>")
            return
        if "list-type" not in self.query:
            raise Refused(501, "NotImplemented")
        most = int(self.query.get("max-keys", 1000))
        spelling = "<EncodingType>url</EncodingType>" if self.query.get("encoding-type") == "url" else ""
        rows = list(itertools.islice(self._rows(), most + 1))
        more = f"<NextContinuationToken>{quote(rows[most - 1][0])}</NextContinuationToken>" if len(rows) > most else ""
        self._xml(
            f"<ListBucketResult><Name>{self.name}</Name><KeyCount>{len(rows[:most])}</KeyCount>"
            f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{spelling}"
            f"{''.join(row for _, row in rows[:most])}</ListBucketResult>"
        )

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Each key or common prefix after the token, as XML."""
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = unquote(self.query.get("continuation-token", "")) or self.query.get("start-after", "")
        spelled: Callable[[str], str] = quote if self.query.get("encoding-type") == "url" else escape
        last = ""
        for name, found in self.objects.below(f"{self.name}/{prefix}"):
            key = name.removeprefix(f"{self.name}/")
            folder, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            shown = prefix + folder + cut if cut else key
            if shown <= after or shown == last:
                continue
            last = shown
            if cut:
                yield shown, f"<CommonPrefixes><Prefix>{spelled(shown)}</Prefix></CommonPrefixes>"
            else:
                modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified))
                yield (
                    shown,
                    f"<Contents><Key>{spelled(key)}</Key><LastModified>{modified}</LastModified>"
                    f"<ETag>&quot;{found.etag}&quot;</ETag><Size>{found.size}</Size>"
                    "<StorageClass>STANDARD</StorageClass></Contents>",
                )

    # Bytes in, bytes out

    def _read_into(self, buffer: memoryview) -> int:
        count = self.rfile.readinto(buffer[: min(self.unread, len(buffer))])
        if not count:
            raise ConnectionResetError
        self.unread -= count
        return count

    def _body(self) -> bytes:
        data = self.rfile.read(self.unread)
        self.unread = 0
        return data

    def _body_to_disk(self) -> Segment:
        size, path = self.unread, self.objects.new_path()
        buffer = memoryview(bytearray(min(_BUFFER, size)))
        with path.open("wb", buffering=0) as file:
            while self.unread:
                file.write(buffer[: self._read_into(buffer)])
        return Segment(path, size, path.name, self._stored())

    def _stored(self) -> dict[str, str]:
        kept = ("content-type", SHA256)
        return {name: value for name, value in self.headers.items() if name in kept or name.startswith("x-amz-meta-")}

    def _empty(self, fields: Mapping[str, str] | None = None) -> None:
        self._body()
        self._head(200, {"Content-Length": "0", **(fields or {})})

    def _xml(self, text: str, status: int = 200) -> None:
        data = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
        fields = {"Content-Type": "application/xml", "Content-Length": str(len(data))}
        self._head(status, fields, b"" if self.method == "HEAD" else data)

    def _head(self, status: int, fields: Mapping[str, str], data: bytes = b"") -> None:
        date = formatdate(usegmt=True)
        lines = [f"HTTP/1.1 {status} -", f"Date: {date}", *(f"{name}: {value}" for name, value in fields.items())]
        self.request.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder for bodies; new or empty")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--latency", type=float, default=0.0, help="milliseconds before each response")
    parser.add_argument("--rate", type=float, help="MB a second that all downloads have together; default: no limit")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty and would be overwritten; pass a new folder")
    rate = options.rate * 1e6 if options.rate else None
    with Server(options.folder, options.port, options.latency / 1000, rate) as server, suppress(KeyboardInterrupt):
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
