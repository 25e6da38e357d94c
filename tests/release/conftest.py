"""One release, performed once, and copies of it for tests."""

import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from nxpipe.pipeline.cli.main import cli
from nxpipe.pipeline.util.console import Console
from tests.pipeline.command import Answer
from tests.pipeline.in_process import InProcess, nxpipe
from tests.release.world import Team, make_project

__all__ = ["nxpipe"]


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """A project after its first release, and the report. Tests must not write to it."""
    folder, home = (tmp_path_factory.mktemp(name) for name in ("released", "home-of-the-first"))
    make_project(folder)
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        for name, value in {"HF_HUB_OFFLINE": "1", **dict.fromkeys(("HOME", "XDG_CACHE_HOME"), str(home))}.items():
            patch.setenv(name, value)
        words = ["release", "--jobs", "1", "--json"]
        code = cli.main(words, prog_name="nxpipe", obj=Console(), standalone_mode=False)
    return folder, Answer(code, out.getvalue(), err.getvalue())


@pytest.fixture
def team(first: tuple[Path, Answer], nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Team:
    """A copy of the first release, which is another store for a machine that has verified the first."""
    folder, answer = first
    assert answer.code == 0, answer.err
    shutil.copytree(folder, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return Team(nxpipe)
