"""The Python API: the examples of docs/reference/python-api.md run, its types hold, and importing it is cheap."""

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
from tests.serving import checkpoints

PAGE = (ROOT / "docs" / "reference" / "python-api.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
# Each compiles or verifies: another half of them on each commit.
builds = pytest.mark.sample(2)


def models(folder: Path) -> None:
    """The models of the page: a classifier and a language model with tokenizers."""
    labels = {"0": "negative", "1": "positive"}
    checkpoints.write(folder / "sentiment", "bert", id2label=labels, label2id={"negative": 0, "positive": 1})
    checkpoints.write(folder / "llama", "llama")


@pytest.mark.sample(8)
def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models(tmp_path)
    (tmp_path / "nxpipe.toml").write_text('[project]\nname = "demo"\nregion = "us-east-2"\n')
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) >= 9
    scope: dict[str, Any] = {}
    with mock_aws():
        for block in EXAMPLES:
            exec(compile(block, "docs/reference/python-api.md", "exec"), scope)
    assert [row.state for row in scope["preflight"].rows] == ["ok", "fails"]  # the region is not bootstrapped
    shown = [scope[name]._repr_html_() for name in ("report", "plan", "artifact", "answer", "store", "staging")]
    shown += [scope[name]._repr_html_() for name in ("profile", "capacity", "preflight")]
    assert all(html.startswith('<div class="nxpipe">') and "<script" not in html for html in shown)
    assert (tmp_path / "sentiment.html").read_bytes().startswith(b"<!doctype html>")


@pytest.mark.slow
def test_the_examples_of_the_page_are_typed(tmp_path: Path) -> None:
    """As a user's script that mypy --strict checks, with the annotations of the package."""
    (tmp_path / "examples.py").write_text("\n".join(EXAMPLES))
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path / "cache")]
    environment = {"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    options = ["--follow-imports=silent", "examples.py", "script.py"]
    done = subprocess.run([*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    # and what a checker infers, so that nothing is Any without anybody seeing it
    revealed = re.findall(r'Revealed type is "(.*?)"', done.stdout)
    assert len(revealed) == SCRIPT.count("reveal_type(")
    assert not [each for each in revealed if each == "Any"], revealed


SCRIPT = """
import nxpipe

report = nxpipe.check("x", buckets=(1,))
reveal_type(report)
(artifact,) = nxpipe.build("x", store="file://s")
reveal_type(artifact)
reveal_type(artifact.programs)
with nxpipe.load(artifact) as model:
    reveal_type(model)
    reveal_type(model.generate("x"))
    reveal_type(model.generate(["x", [1, 2]], seed=3))
    reveal_type(model.generate("x", stream=True, stop="y"))
    reveal_type(model.chat([{"role": "user", "content": "x"}], stream=True))
    reveal_type(model.classify(["x"]))
    reveal_type(model.answer("x", "y"))
    reveal_type(model.embed("x"))
store = nxpipe.open_store()
reveal_type([each.name for each in store])
reveal_type(store.channel("x").promote(artifact, expect=0))
reveal_type(nxpipe.profile(artifact).summary())
reveal_type(nxpipe.plan_serve("x", rate=1.0).best)
reveal_type(nxpipe.bench(artifact).regressions)
reveal_type(nxpipe.diff(artifact, artifact).is_empty)
reveal_type(nxpipe.verify(artifact)[0].program)
try:
    model.generate("x")
except nxpipe.PromptTooLong as error:
    reveal_type(error.longest)
"""


@pytest.mark.parametrize("name", nxpipe.__all__)
def test_every_public_name_has_a_docstring_and_stands_on_the_page_or_in_a_signature(name: str) -> None:
    assert getattr(nxpipe, name).__doc__
    assert name in dir(nxpipe)


def test_a_name_that_moved_says_where_and_another_one_does_not_exist() -> None:
    with pytest.raises(AttributeError, match=r"nxpipe.build_plan plans a build, and nxpipe.plan_serve a serving fleet"):
        nxpipe.plan  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'biuld'$"):
        nxpipe.biuld  # noqa: B018


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, nxpipe; print(*(name for name in sys.modules if name.startswith('nxpipe.')))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@builds
def test_a_failed_build_names_its_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "my-bert", BERT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nxpipe.BuildFailed, match="1024") as caught:
        nxpipe.build("my-bert", store="file://store", task="feature-extraction", weights="random:0", buckets=(1024,))
    assert len(caught.value.cells) == 1
    assert nxpipe.open_store("file://store").list() == []


@builds
def test_a_plan_names_what_a_build_would_do_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "my-bert", BERT)
    monkeypatch.chdir(tmp_path)
    model: dict[str, Any] = {"store": "file://store", "task": "feature-extraction", "weights": "random:0"}
    plan = nxpipe.build_plan("my-bert", buckets=(16,), **model)
    ((artifact, cell),) = plan.cells()
    assert (cell.status.value, plan.exit_code) == ("queued", 0)
    assert cell.why
    refused = nxpipe.build_plan("my-bert", buckets=(1024,), **model)
    assert [cell.failure is None for _, cell in refused.cells()] == [False]
    assert refused.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["my-bert"]
    (published,) = nxpipe.build("my-bert", buckets=(16,), **model)
    (artifact,) = nxpipe.build_plan("my-bert", buckets=(16,), **model).artifacts
    assert (artifact.key, artifact.is_published) == (published.request_key, True)


def test_findings_of_a_check_are_no_exceptions(tmp_path: Path) -> None:
    report = nxpipe.check(tmp_path / "nowhere")
    assert report.exit_code.name == "model-source"
    assert report.findings
