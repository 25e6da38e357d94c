"""Storage of the benchmark's S3 server: names in memory, bytes in files."""

import base64
import hashlib
import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SHA256: Final = "x-amz-checksum-sha256"


@dataclass(frozen=True)
class Segment:
    """The bytes of one request's body."""

    path: Path
    size: int
    etag: str
    fields: Mapping[str, str]  # headers of the request that responses repeat


@dataclass(frozen=True)
class Object:
    """One segment, or one for each part of a multipart upload: completing an upload copies nothing."""

    segments: tuple[Segment, ...]
    etag: str
    fields: Mapping[str, str]
    modified: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)


@dataclass
class Upload:
    bucket_and_key: str
    fields: Mapping[str, str]
    parts: dict[int, Segment] = field(default_factory=dict)


class Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class Objects:
    """The stored objects by `bucket/key`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._objects: dict[str, Object] = {}
        self.uploads: dict[str, Upload] = {}

    def new_name(self) -> str:
        return f"{next(self._numbers):08x}"

    def new_path(self) -> Path:
        return self._folder / self.new_name()

    def find(self, name: str) -> Object:
        result = self._objects.get(name)
        if result is None:
            raise Refused(404, "NoSuchKey")
        return result

    def put(self, name: str, new: Object, headers: Mapping[str, str]) -> None:
        with self._lock:
            self._check(name, headers)
            old = self._objects.get(name)
            self._objects[name] = new
        _remove(old)

    def delete(self, name: str, headers: Mapping[str, str]) -> None:
        with self._lock:
            self._check(name, headers)
            old = self._objects.pop(name, None)
        _remove(old)

    def _check(self, name: str, headers: Mapping[str, str]) -> None:
        existing = self._objects.get(name)
        if headers.get("if-none-match") == "*" and existing is not None:
            raise Refused(412, "PreconditionFailed")
        if (expected := headers.get("if-match")) is not None:
            if existing is None:
                raise Refused(404, "NoSuchKey")
            if expected.strip('"') not in ("*", existing.etag):
                raise Refused(412, "PreconditionFailed")

    def below(self, prefix: str) -> list[tuple[str, Object]]:
        with self._lock:
            return sorted(entry for entry in self._objects.items() if entry[0].startswith(prefix))


def _remove(old: Object | None) -> None:
    """Delete the file; a reader that has it open can still read it."""
    for segment in old.segments if old else ():
        segment.path.unlink()


def checksum(fields: Mapping[str, str]) -> dict[str, str]:
    stored = fields.get(SHA256)
    kind = "COMPOSITE" if stored and "-" in stored else "FULL_OBJECT"
    return {SHA256: stored, "x-amz-checksum-type": kind} if stored else {}


def composite(parts: tuple[Segment, ...]) -> dict[str, str]:
    sums = [part.fields.get(SHA256) for part in parts]
    if not all(sums):
        return {}
    digest = hashlib.sha256(b"".join(base64.b64decode(entry) for entry in sums if entry)).digest()
    return {SHA256: f"{base64.b64encode(digest).decode()}-{len(parts)}"}
