"""A local AWS for each test that needs one, and the separation of template tests from others.

`pytest tests/stacks -m "not runs"` reads templates only.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeGuard

import boto3
import pytest
from moto import mock_aws

from tests.localaws.install import install
from tests.stacks.local import REGION
from tests.stacks.matrix import POSSIBLE, Matrix, make_matrix


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    install()
    with mock_aws():
        boto3.client("ssm").put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Value="30", Type="String")
        yield


_RUNNING: Final = {"aws", "offline", "sandbox"}  # fixtures that template tests do not use


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and _RUNNING & set(item.fixturenames):
            item.add_marker("runs")


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """The matrix of the fleets whose tests are selected."""
    fleets = {item.callspec.params.get("fleet") for item in request.session.items if _uses_matrix(item)}
    return make_matrix([fleet for fleet in POSSIBLE if fleet in fleets], tmp_path_factory.mktemp("matrix"))


def _uses_matrix(item: pytest.Item) -> TypeGuard[pytest.Function]:
    return isinstance(item, pytest.Function) and "matrix" in item.fixturenames


@pytest.fixture(autouse=True)
def _no_commands_for_templates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("runs") is None:

        def refuse(command: object, **_: object) -> None:
            pytest.fail(f"{command} is run by a test of templates; mark it with pytest.mark.runs")

        monkeypatch.setattr(subprocess, "run", refuse)
