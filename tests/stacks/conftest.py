"""A local AWS of its own for each test that asks for one, and the line between tests of templates and the others.

`pytest tests/stacks -m "not runs"` reads templates only.
"""

import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import boto3
import pytest
from moto import mock_aws

from tests.localaws.install import install
from tests.stacks.local import REGION
from tests.stacks.matrix import Matrix, matrix_in_the_making

_MATRIX: Final = Path(__file__).parent / "test_matrix.py"
_BEGUN: Final = pytest.StashKey[Callable[[], Matrix]]()


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
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """The matrix takes longest. It is begun before the tests are known, and ended again if none of them asks for it."""
    with ExitStack() as unless_asked:
        if any(path in (_MATRIX, *_MATRIX.parents) for path in _asked_for(session.config)):
            session.config.stash[_BEGUN] = unless_asked.enter_context(matrix_in_the_making())
        collected = yield
        if any("matrix" in getattr(item, "fixturenames", ()) for item in session.items):
            session.config.add_cleanup(unless_asked.pop_all().close)
    return collected


def _asked_for(config: pytest.Config) -> list[Path]:
    return [(config.invocation_params.dir / each.partition("::")[0]).resolve() for each in config.args]


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest) -> Matrix:
    return request.config.stash[_BEGUN]()


@pytest.fixture(autouse=True)
def _no_commands_for_templates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("runs") is None:

        def refuse(command: object, **_: object) -> None:
            pytest.fail(f"{command} is run by a test of templates; mark it with pytest.mark.runs")

        monkeypatch.setattr(subprocess, "run", refuse)
