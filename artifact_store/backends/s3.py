"""A store in an S3 bucket, without a server of its own. Section 10 of docs/store-format.md."""

import base64
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, FlexibleChecksumError

from artifact_store.backends.protocol import CHUNK, Payload, Stat
from artifact_store.backends.s3_faults import answer_may_be_lost, code_of, unavailable
from artifact_store.digest import sha256_of_chunks
from artifact_store.errors import Corrupt, StoreUnavailable, TooLarge

T = TypeVar("T")
R = TypeVar("R")

MAX_PUT_BYTES: Final = 5 * 1024**3
WRITE_ID: Final = "nxpipe-write-id"
_PARALLEL: Final = 16
_ATTEMPTS: Final = 4
_ABSENT: Final = ("404", "NoSuchKey")
_FAULTS: Final = (BotoCoreError, ClientError)


class Bucket:
    """Objects are S3 objects below a prefix; creating one is a conditional PUT."""

    def __init__(self, bucket: str, prefix: str, client: Any) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.scratch_folder = Path(tempfile.gettempdir())
        self._client = client

    def create(self, path: str, payload: Payload, *, durable: bool = False) -> bool:
        """S3 answers when the object is durable, whether or not that was asked for."""
        write_id = secrets.token_hex(16)
        for attempt in range(_ATTEMPTS):
            time.sleep(0.1 * (2**attempt - 1))
            try:
                self._put(path, payload, {WRITE_ID: write_id}, IfNoneMatch="*")
                return True
            except _FAULTS as error:
                refused = code_of(error) in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
                if not refused and not answer_may_be_lost(error):
                    raise unavailable(error, self._doing("write", path)) from error
                holder = self._holder(path, error)
                if holder is not None:
                    return holder == write_id
                if not refused:
                    raise unavailable(error, self._doing("write", path)) from error
        raise StoreUnavailable(
            f"cannot {self._doing('write', path)}: {_ATTEMPTS} attempts ran into other writers, and none left "
            "an object; a retry is safe"
        )

    def replace(self, path: str, payload: Payload) -> None:
        with self._faults("write", path):
            self._put(path, payload, {WRITE_ID: secrets.token_hex(16)})

    def read(self, path: str) -> Iterator[bytes] | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + path, ChecksumMode="ENABLED")
        except _FAULTS as error:
            if code_of(error) in _ABSENT:
                return None
            raise unavailable(error, self._doing("read", path)) from error
        return self._body(path, answer["Body"])

    def stat(self, path: str) -> Stat | None:
        found = self._head(path)
        if found is None:
            return None
        kept = found.get("ChecksumSHA256")
        # The checksum of an object that was uploaded in parts is one of checksums, not of bytes.
        if kept and found.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" and "-" not in kept:
            return Stat(found["ContentLength"], base64.b64decode(kept).hex())
        return Stat(found["ContentLength"], sha256_of_chunks(self.read(path) or ()))

    def paths(self, prefix: str) -> Sequence[str]:
        with self._faults("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix, Delimiter="/"
            )
            return [found["Key"].removeprefix(self._prefix) for page in pages for found in page.get("Contents", ())]

    def make_durable(self, paths: Iterable[str]) -> None:
        """S3 had them safe before it answered."""

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            return list(pool.map(function, items))

    def _put(self, path: str, payload: Payload, metadata: dict[str, str], **conditions: str) -> None:
        if payload.size > MAX_PUT_BYTES:
            raise TooLarge(
                f"cannot {self._doing('write', path)}: it has {payload.size} bytes, and one S3 PUT takes at most "
                f"{MAX_PUT_BYTES}; split it into smaller blobs, or use a file:// store"
            )
        with _opened(payload.source) as body:
            self._client.put_object(
                Bucket=self._bucket,
                Key=self._prefix + path,
                Body=body,
                ContentLength=payload.size,
                ChecksumSHA256=base64.b64encode(bytes.fromhex(payload.sha256)).decode(),
                Metadata=metadata,
                **conditions,
            )

    def _holder(self, path: str, cause: Exception) -> str | None:
        """The write-id of the object that is there: who won. None when there is no object."""
        try:
            found = self._head(path)
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"it is unknown whether {self._where(path)} was written: the answer was "
                f"{str(cause).rstrip('.')}, and then {error}"
            ) from cause
        return None if found is None else found.get("Metadata", {}).get(WRITE_ID, "")

    def _head(self, path: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._client.head_object(
                Bucket=self._bucket, Key=self._prefix + path, ChecksumMode="ENABLED"
            )
        except _FAULTS as error:
            if code_of(error) in _ABSENT:
                return None
            raise unavailable(error, self._doing("look up", path)) from error
        return found

    def _body(self, path: str, body: Any) -> Iterator[bytes]:
        with self._faults("read", path):
            try:
                yield from body.iter_chunks(CHUNK)
            except FlexibleChecksumError as error:
                raise Corrupt(self._where(path), str(error), "publish the artifact again to repair it") from error

    def _where(self, path: str) -> str:
        return f"{self.url}/{path}"

    def _doing(self, verb: str, path: str) -> str:
        return f"{verb} {self._where(path)}"

    @contextmanager
    def _faults(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except _FAULTS as error:
            raise unavailable(error, self._doing(verb, path)) from error


def connect(bucket: str, prefix: str) -> Bucket:
    """Region, endpoint and credentials come from where the AWS SDK always looks."""
    config = Config(
        connect_timeout=5,
        read_timeout=60,
        max_pool_connections=_PARALLEL,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
    )
    try:
        return Bucket(bucket, prefix, boto3.client("s3", config=config))
    except BotoCoreError as error:
        raise unavailable(error, f"open s3://{bucket}") from error


def _opened(source: memoryview | Path) -> IO[bytes]:
    return source.open("rb") if isinstance(source, Path) else BytesIO(source)
