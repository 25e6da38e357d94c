"""A store in a folder and a store on S3, for contracts of both."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends import s3_client
from nxpipe.artifact_store.backends.s3 import Bucket
from nxpipe.artifact_store.backends.s3_quick import FastPath
from tests.artifact_store.samples import Place, bucket, folder, s3_server
from tests.artifact_store.wire import Wire, impatient_client


@pytest.fixture(scope="package")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.sample(2))])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "local":
        return folder(tmp_path / "store")
    for name, value in request.getfixturevalue("server").items():
        monkeypatch.setenv(name, value)
    return bucket(f"test-{secrets.token_hex(8)}")


@pytest.fixture
def store(place: Place) -> Store:
    return place.store


@pytest.fixture
def client(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3_client, "_FIRST_PAUSE", 0.001)
    return impatient_client()


@pytest.fixture
def backend(client: Any) -> Bucket:
    name = f"test-{secrets.token_hex(8)}"
    client.create_bucket(Bucket=name)
    return Bucket(name, "p", client)


@pytest.fixture
def by_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every request through botocore's client, so that a test can replace it."""
    monkeypatch.setattr(FastPath, "request", lambda *_: None)


@pytest.fixture
def wire(client: Any) -> Wire:
    return Wire(client)
