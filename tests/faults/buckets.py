"""Stores in a bucket for sweeps: clients that do not sleep, and snapshots of all objects in one request."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from botocore.config import Config
from botocore.session import Session

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.s3 import Bucket
from nxpipe.artifact_store.backends.s3_client import S3Options

PREFIX: Final = "team/nxpipe/"
# Sequential requests: the n-th is the same in each run.
_IN_ORDER: Final = S3Options(concurrency=1)


def client(url: str, *, attempts: int) -> Any:
    """A client as the store creates it, but with this number of attempts."""
    config = Config(
        retries={"mode": "standard", "total_max_attempts": attempts},
        max_pool_connections=64,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path", "payload_signing_enabled": False},
    )
    return Session().create_client(
        "s3",
        endpoint_url=url,
        config=config,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


class Punctual(Bucket):
    """A backend that asks S3 for the time at each use, so that a test can move the clock."""

    def now(self, *, read_only: bool = False) -> float:
        return self._time_of_an_answer()


def punctual(client: Any, bucket: str) -> Bucket:
    return Punctual(bucket, PREFIX.rstrip("/"), client, _IN_ORDER)


def store(client: Any, bucket: str) -> Store:
    return Store(Bucket(bucket, PREFIX.rstrip("/"), client, _IN_ORDER))


class Snapshots:
    """All objects of a store. Bytes are fetched once per ETag, which is their MD5 in moto."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._by_etag: dict[str, bytes] = {}

    def of(self, bucket: str) -> Mapping[str, bytes]:
        return {key.removeprefix(PREFIX): self._bytes(bucket, key, etag) for key, etag in self._listed(bucket)}

    def _listed(self, bucket: str) -> Iterator[tuple[str, str]]:
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=PREFIX):
            for found in page.get("Contents", ()):
                yield found["Key"], found["ETag"]

    def _bytes(self, bucket: str, key: str, etag: str) -> bytes:
        if etag not in self._by_etag:
            self._by_etag[etag] = self._client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return self._by_etag[etag]
