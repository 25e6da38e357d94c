"""A local AWS for each test."""

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from tests.localaws.install import install


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    install()
    with mock_aws():
        yield boto3.client("cloudformation")
