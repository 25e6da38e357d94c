"""A local AWS of its own for each test that asks for one, and the line between tests of templates and the others.

`pytest tests/stacks -m "not runs"` reads templates only.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import boto3
import pytest
from moto import mock_aws

from tests.cloud.install import install
from tests.stacks.local import REGION


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    install()
    with mock_aws():
        boto3.client("ssm").put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Value="30", Type="String")
        yield


_RUNNING: Final = {"aws", "offline", "sandbox"}  # fixtures that a test of a template has no use for


@pytest.hookimpl(tryfirst=True)  # before -m has chosen
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and _RUNNING & set(item.fixturenames):
            item.add_marker("runs")


@pytest.fixture(autouse=True)
def _no_commands_for_templates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("runs") is None:

        def refuse(command: object, **_: object) -> None:
            pytest.fail(f"{command} is run by a test of templates; mark it with pytest.mark.runs")

        monkeypatch.setattr(subprocess, "run", refuse)
