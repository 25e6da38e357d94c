"""What the benchmark's S3 server stores: names in memory, bytes in files."""

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
    """Bytes as they came in with one request."""

    path: Path
    size: int
    etag: str
    fields: Mapping[str, str]  # of the request, that an answer repeats


@dataclass(frozen=True)
class Object:
    """One segment, or as many as parts were uploaded: nothing is copied when an upload is completed."""

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
    """What is stored. Names are `bucket/key`."""

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
        found = self._objects.get(name)
        if found is None:
            raise Refused(404, "NoSuchKey")
        return found

    def put(self, name: str, new: Object, asked: Mapping[str, str]) -> None:
        with self._lock:
            self._check(name, asked)
            old = self._objects.get(name)
            self._objects[name] = new
        _remove(old)

    def delete(self, name: str, asked: Mapping[str, str]) -> None:
        with self._lock:
            self._check(name, asked)
            old = self._objects.pop(name, None)
        _remove(old)

    def _check(self, name: str, asked: Mapping[str, str]) -> None:
        there = self._objects.get(name)
        if asked.get("if-none-match") == "*" and there is not None:
            raise Refused(412, "PreconditionFailed")
        if (wanted := asked.get("if-match")) is not None:
            if there is None:
                raise Refused(404, "NoSuchKey")
            if wanted.strip('"') not in ("*", there.etag):
                raise Refused(412, "PreconditionFailed")

    def below(self, prefix: str) -> list[tuple[str, Object]]:
        with self._lock:
            return sorted(each for each in self._objects.items() if each[0].startswith(prefix))


def _remove(old: Object | None) -> None:
    """Whoever is reading it has it open."""
    for segment in old.segments if old else ():
        segment.path.unlink()


def checksum(fields: Mapping[str, str]) -> dict[str, str]:
    kept = fields.get(SHA256)
    kind = "COMPOSITE" if kept and "-" in kept else "FULL_OBJECT"
    return {SHA256: kept, "x-amz-checksum-type": kind} if kept else {}


def composite(parts: tuple[Segment, ...]) -> dict[str, str]:
    sums = [part.fields.get(SHA256) for part in parts]
    if not all(sums):
        return {}
    digest = hashlib.sha256(b"".join(base64.b64decode(each) for each in sums if each)).digest()
    return {SHA256: f"{base64.b64encode(digest).decode()}-{len(parts)}"}
