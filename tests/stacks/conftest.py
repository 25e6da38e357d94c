"""A local AWS of its own for each test that asks for one, and the line between tests of templates and the others.

`pytest tests/stacks -m "not runs"` reads templates only.
"""

import gc
import subprocess
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import boto3
import pytest
from moto import mock_aws

from tests.cloud.install import install
from tests.stacks.local import REGION
from tests.stacks.matrix import Matrix, matrix_in_the_making


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
    items.sort(key=lambda item: "matrix" in item.fixturenames)  # last come those that wait for another process


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported now stays: CDK, cfn-lint and moto are a lot for the collector to go through again and again."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.fixture(scope="session", autouse=True)
def _matrix(request: pytest.FixtureRequest) -> Iterator[Future[Matrix] | None]:
    """Begun before the first test, if any waits for it."""
    if any("matrix" in getattr(item, "fixturenames", ()) for item in request.session.items):
        with matrix_in_the_making() as begun:
            yield begun
    else:
        yield None


@pytest.fixture(scope="session")
def matrix(_matrix: Future[Matrix] | None) -> Matrix:
    assert _matrix is not None
    return _matrix.result()


@pytest.fixture(autouse=True)
def _no_commands_for_templates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("runs") is None:

        def refuse(command: object, **_: object) -> None:
            pytest.fail(f"{command} is run by a test of templates; mark it with pytest.mark.runs")

        monkeypatch.setattr(subprocess, "run", refuse)
