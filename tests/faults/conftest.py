"""S3 with and without faults: one moto server per session, proxies in front of it, fresh buckets."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.faults.moto_process import Moto, moto_process
from tests.faults.plan import Plan
from tests.faults.proxy import Proxy
from tests.faults.truth import Upload


@dataclass(frozen=True)
class S3:
    """A moto server, and the shared state of its proxies."""

    moto: Moto
    uploads: dict[str, Upload] = field(default_factory=dict)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    with moto_process() as moto:
        yield S3(moto)


@pytest.fixture(autouse=True)
def credentials(sealed_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for this process and its children, set after all AWS_* variables are removed."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)


@pytest.fixture
def faulty_s3(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Plan], Proxy]]:
    """A proxy with this plan. AWS_ENDPOINT_URL points to the last one; it is stopped at the end of the test."""
    with ExitStack() as proxies:

        def start(plan: Plan) -> Proxy:
            proxy = proxies.enter_context(Proxy(s3.moto, s3.uploads))
            proxy.start_over(plan)
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            return proxy

        yield start


@pytest.fixture
def new_bucket(s3: S3) -> Callable[..., str]:
    """Create an empty bucket, `versioned` or not, without passing a proxy."""

    def make(*, versioned: bool = False) -> str:
        name = f"test-{secrets.token_hex(8)}"
        client = client_of(s3.moto.url)
        client.create_bucket(Bucket=name)
        if versioned:
            client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
        return name

    return make


@pytest.fixture
def bucket(new_bucket: Callable[..., str]) -> str:
    return new_bucket()


def client_of(url: str, **settings: Any) -> Any:
    """A client without retries, so that a test sees each fault."""
    config = Config(retries={"total_max_attempts": 1}, max_pool_connections=64, **settings)
    return boto3.client("s3", endpoint_url=url, config=config)


@pytest.fixture
def proxy(faulty_s3: Callable[[Plan], Proxy]) -> Proxy:
    return faulty_s3(Plan())


@pytest.fixture
def client(proxy: Proxy) -> Any:
    return client_of(proxy.url)


@pytest.fixture
def behind(s3: S3) -> Any:
    """A client for the stored objects that does not pass a proxy."""
    return client_of(s3.moto.url)
