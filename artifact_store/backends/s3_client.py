"""One place in one bucket: how S3 is asked about it, and what is said when it does not answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from nxpipe.artifact_store.backends.s3_body import Window
from nxpipe.artifact_store.backends.s3_faults import (
    ATTEMPTS,
    FAULTS,
    Fault,
    attempts,
    is_absent,
    is_garbled,
    is_nameless,
    refuse_redirects,
    unavailable,
)
from nxpipe.artifact_store.backends.s3_quick import Quick


@dataclass(frozen=True)
class S3Options:
    """What the AWS SDK's own settings do not say, or should not decide for this store."""

    kms_key: str | None = None  # without one, the bucket's default encryption
    bucket_key: bool = True  # one call of KMS for many objects
    endpoint: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    concurrency: int = 16  # requests at once

    @property
    def encryption(self) -> dict[str, Any]:
        if self.kms_key is None:
            return {}
        return {
            "ServerSideEncryption": "aws:kms",
            "SSEKMSKeyId": self.kms_key,
            "BucketKeyEnabled": self.bucket_key,
        }


DEFAULT: Final = S3Options()


def s3_client(options: S3Options = DEFAULT) -> Any:
    """Region and credentials come from where the AWS SDK always looks; boto3 above it would add to the start only."""
    from botocore.config import Config
    from botocore.session import Session

    config = Config(
        connect_timeout=5,
        read_timeout=60,
        max_pool_connections=2 * options.concurrency,  # for whole objects and for parts of others
        tcp_keepalive=True,
        # "standard" backs off with jitter, and stops repeating when most of what it repeats fails as well.
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        # Every body goes out with the SHA-256 that we know, which is signed; every one that comes in is hashed by us.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": options.addressing, "payload_signing_enabled": False},
    )
    client = Session().create_client("s3", endpoint_url=options.endpoint, config=config)
    client.meta.events.register_first("needs-retry.s3", refuse_redirects)
    return client


@dataclass(frozen=True)
class Place:
    """Objects below a prefix, which is empty or ends in `/`."""

    client: Any = field(repr=False)
    bucket: str
    prefix: str
    options: S3Options
    quick: Quick = field(repr=False)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, path: str) -> str:
        return self.prefix + path

    def where(self, path: str) -> str:
        return f"{self.url}/{path}"

    def ask(self, operation: str, path: str, **parameters: Any) -> dict[str, Any]:
        """One request about one object. The client repeats what failed on the way, this what arrived garbled."""
        body, key = parameters.get("Body"), self.key(path)

        def by_the_client() -> dict[str, Any]:
            if isinstance(body, Window):
                body.seek(0)
            answer: dict[str, Any] = getattr(self.client, operation)(Bucket=self.bucket, Key=key, **parameters)
            return answer

        for attempt in attempts():
            try:
                return self.quick.ask(operation, key, parameters) or self.quick.watch(key, by_the_client)
            except FAULTS as error:
                if not is_garbled(error) or attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def head(self, path: str) -> dict[str, Any] | None:
        """What S3 knows of an object; None when there is none."""
        try:
            return self.ask("head_object", path, ChecksumMode="ENABLED")
        except FAULTS as error:
            if is_absent(error):
                return None
            reason = self.reason(error, "get_object", Key=self.key(path), Range="bytes=0-0")
            raise unavailable(reason, f"look up {self.where(path)}") from error

    def reason(self, error: Fault, operation: str, **parameters: Any) -> Fault:
        """Why a HEAD was refused, by what a request of the same permission is told."""
        if is_nameless(error):
            try:
                getattr(self.client, operation)(Bucket=self.bucket, **parameters)
            except FAULTS as told:
                return told
        return error

    def pages(self, operation: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        yield from self.client.get_paginator(operation).paginate(Bucket=self.bucket, **parameters)

    @contextmanager
    def faults(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except FAULTS as error:
            raise unavailable(error, f"{verb} {self.where(path)}") from error
