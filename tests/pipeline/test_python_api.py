"""The Python API: the examples of docs/reference/python-api.md run, and importing nxpipe imports no heavy library."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws

import nxpipe
from tests.conftest import ROOT
from tests.pipeline.conftest import BERT, write_model

PAGE = (ROOT / "docs" / "reference" / "python-api.md").read_text()


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "my-bert", BERT)
    (tmp_path / "nxpipe.toml").write_text('[project]\nname = "demo"\nregion = "us-east-2"\n')
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    scope: dict[str, Any] = {}
    with mock_aws():
        for block in blocks:
            exec(compile(block, "docs/reference/python-api.md", "exec"), scope)
    assert [row.state for row in scope["preflight"].rows] == ["ok", "fails"]  # the region is not bootstrapped


@pytest.mark.parametrize("name", nxpipe.__all__)
def test_every_public_name_has_a_docstring_and_stands_on_the_page_or_in_a_signature(name: str) -> None:
    assert getattr(nxpipe, name).__doc__
    assert name in dir(nxpipe)


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, nxpipe; print(*(name for name in sys.modules if name.startswith('nxpipe.')))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_failed_build_names_its_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "my-bert", BERT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nxpipe.BuildFailed, match="1024") as caught:
        nxpipe.build("my-bert", store="file://store", task="feature-extraction", weights="random:0", buckets=(1024,))
    assert len(caught.value.cells) == 1
    assert nxpipe.open_store("file://store").list() == []


def test_a_plan_names_what_a_build_would_do_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "my-bert", BERT)
    monkeypatch.chdir(tmp_path)
    model: dict[str, Any] = {"store": "file://store", "task": "feature-extraction", "weights": "random:0"}
    plan = nxpipe.plan("my-bert", buckets=(16,), **model)
    ((artifact, cell),) = plan.cells()
    assert (cell.status.value, plan.exit_code) == ("queued", 0)
    assert cell.why
    refused = nxpipe.plan("my-bert", buckets=(1024,), **model)
    assert [cell.failure is None for _, cell in refused.cells()] == [False]
    assert refused.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["my-bert"]
    (published,) = nxpipe.build("my-bert", buckets=(16,), **model)
    (artifact,) = nxpipe.plan("my-bert", buckets=(16,), **model).artifacts
    assert (artifact.key, artifact.is_published) == (published.request_key, True)


def test_findings_of_a_check_are_no_exceptions(tmp_path: Path) -> None:
    report = nxpipe.check(tmp_path / "nowhere")
    assert report.exit_code.name == "model-source"
    assert report.findings
