"""`nxpipe init` creates all files of a project at once, and changes no existing one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.cli import init
from nxpipe.pipeline.cli.init import configuration
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.load import check_placement
from tests.conftest import ROOT
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

WORKFLOW = ".github/workflows/nxpipe-release.yml"
ACTION = ".github/actions/nxpipe/action.yml"
FILES = ["nxpipe.toml", WORKFLOW, ACTION, "cdk.json", "package.json", ".gitignore"]
ENTRIES = b".nxpipe/\ncdk.out/\nnode_modules/\n.venv/\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "My Search 2"
    folder.mkdir()
    return folder


def snapshot(root: Path) -> dict[str, bytes | None]:
    """Every file and folder below, hidden ones included."""
    paths = sorted(root.rglob("*"))
    return {path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None for path in paths}


def test_what_init_writes_passes_check(nxpipe: InProcess, root: Path) -> None:
    answer = nxpipe("init", str(root))
    assert answer.code == 0
    assert answer.out.splitlines() == [f"wrote {root / name}" for name in FILES]
    assert nxpipe("config", "check", "--config", str(root / "nxpipe.toml")).code == 0
    config = load_config(root / "nxpipe.toml", {})
    assert config.project.name == "my-search-2"
    assert [(model.name, model.id, model.task) for model in config.models] == [
        ("bert-base-uncased", "bert-base-uncased", "fill-mask")
    ]


def test_the_task_of_a_well_known_model_is_known(nxpipe: InProcess, root: Path) -> None:
    nxpipe("init", str(root), "--model-id", "HuggingFaceTB/SmolLM2-135M")
    model = load_config(root / "nxpipe.toml", {}).models[0]
    assert (model.name, model.task, model.phases) == ("smollm2-135m", "text-generation", ("prefill",))


def test_the_task_of_another_model_can_be_said(nxpipe: InProcess, root: Path) -> None:
    nxpipe("init", str(root), "--model-id", "somebody/unheard-of", "--task", "text-classification")
    assert load_config(root / "nxpipe.toml", {}).models[0].task == "text-classification"


def test_a_folder_is_written_relative_to_the_configuration(nxpipe: InProcess, root: Path, llama: Path) -> None:
    nxpipe("init", str(root), "--model-id", str(llama))
    model = load_config(root / "nxpipe.toml", {}).models[0]
    assert model.path is not None
    assert ((root / model.path).resolve(), model.task) == (llama.resolve(), "text-generation")


def test_an_id_that_cannot_be_one_is_refused_before_anything_is_written(nxpipe: InProcess, root: Path) -> None:
    answer = nxpipe("init", str(root), "--model-id", 'a "b"')
    assert (answer.code, snapshot(root)) == (10, {})
    assert "expected a hub id" in answer.err


@given(folder=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50))
def test_a_folder_of_any_name_gives_a_valid_project(folder: str) -> None:
    """The text is made without touching the folder, and checked before it is returned."""
    if "\0" not in folder and "/" not in folder and folder not in {".", ".."}:
        assert "[project]" in configuration(Path("/nowhere") / folder, "bert-base-uncased", None)


def test_a_folder_that_is_not_there_is_made(nxpipe: InProcess, root: Path) -> None:
    assert nxpipe("init", str(root / "new" / "deep")).code == 0
    assert (root / "new" / "deep" / "nxpipe.toml").is_file()


def test_nothing_is_overwritten_and_every_file_in_the_way_is_named(nxpipe: InProcess, root: Path) -> None:
    (root / "nxpipe.toml").write_text("mine")
    (root / WORKFLOW).parent.mkdir(parents=True)
    (root / WORKFLOW).symlink_to("nowhere")  # even a link that leads nowhere is the user's
    before = snapshot(root)
    answer = nxpipe("init", str(root))
    assert (answer.code, answer.out, snapshot(root)) == (5, "", before)
    assert str(root / "nxpipe.toml") in answer.err
    assert str(root / WORKFLOW) in answer.err


def test_a_second_init_changes_nothing(nxpipe: InProcess, root: Path) -> None:
    nxpipe("init", str(root))
    before = snapshot(root)
    assert (nxpipe("init", str(root)).code, snapshot(root)) == (5, before)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", ENTRIES),
        (b"*.o\n", b"*.o\n" + ENTRIES),
        (b"*.o", b"*.o\n" + ENTRIES),
        (b"*.o\r\n", b"*.o\r\n" + ENTRIES.replace(b"\n", b"\r\n")),
        (b"node_modules\n/cdk.out\n*.o", b"node_modules\n/cdk.out\n*.o\n.nxpipe/\n.venv/\n"),
        (b".venv\n/.nxpipe\ncdk.out\n/node_modules/\n*.o", b".venv\n/.nxpipe\ncdk.out\n/node_modules/\n*.o"),
        (ENTRIES, ENTRIES),
        (b"caf\xe9\n", b"caf\xe9\n" + ENTRIES),
    ],
)
def test_each_ignore_entry_is_added_once_and_the_rest_kept(
    nxpipe: InProcess, root: Path, before: bytes, after: bytes
) -> None:
    (root / ".gitignore").write_bytes(before)
    assert nxpipe("init", str(root), "--dry-run").code == 0
    assert nxpipe("init", str(root)).code == 0
    assert (root / ".gitignore").read_bytes() == after


@pytest.mark.parametrize("ignored", [None, "*.o\n", "no newline at the end"])
def test_a_dry_run_writes_nothing_and_its_diff_makes_just_what_init_writes(
    nxpipe: InProcess, root: Path, tmp_path: Path, ignored: str | None
) -> None:
    if ignored is not None:
        (root / ".gitignore").write_text(ignored)
    before = snapshot(root)
    shown = nxpipe("init", str(root), "--dry-run")
    assert (shown.code, snapshot(root)) == (0, before)
    assert json.loads(nxpipe("init", str(root), "--dry-run", "--json").out)["diff"] == shown.out.removesuffix("\n")
    twin = tmp_path / "twin"
    twin.mkdir()
    if ignored is not None:
        (twin / ".gitignore").write_text(ignored)
    subprocess.run(["git", "apply", "-"], cwd=twin, input=shown.out, text=True, check=True)
    nxpipe("init", str(root))
    assert snapshot(twin) == snapshot(root)


def test_a_dry_run_shows_the_difference_to_a_file_in_the_way(nxpipe: InProcess, root: Path) -> None:
    (root / "nxpipe.toml").write_text("mine = true\n")
    answer = nxpipe("init", str(root), "--dry-run")
    assert answer.code == 0
    assert "--- a/nxpipe.toml\n+++ b/nxpipe.toml\n" in answer.out
    assert "\n-mine = true\n" in answer.out


@pytest.mark.parametrize("kinds", [["serving"], ["training"], ["training", "serving"], ["serving", "serving"]])
@pytest.mark.parametrize("model_id", ["bert-base-uncased", "acme/tuning", "acme/" + 45 * "x"])
def test_the_fleets_that_init_writes_are_deployable(
    nxpipe: InProcess, root: Path, kinds: list[str], model_id: str
) -> None:
    answer = nxpipe("init", str(root), "--model-id", model_id, *(f"--fleet={kind}" for kind in kinds))
    assert answer.code == 0
    assert nxpipe("config", "check", "--config", str(root / "nxpipe.toml")).code == 0
    config = load_config(root / "nxpipe.toml", {})
    assert [fleet.kind for fleet in config.fleets] == list(dict.fromkeys(kinds))
    assert [*check_placement(config)] == []


def test_an_unknown_kind_of_fleet_writes_nothing(nxpipe: InProcess, root: Path) -> None:
    answer = nxpipe("init", str(root), "--fleet", "gpu")
    assert (answer.code, snapshot(root)) == (2, {})
    assert "'serving', 'training'" in answer.err


def test_the_next_commands_include_those_of_the_cdk_cli(nxpipe: InProcess, root: Path) -> None:
    answer = nxpipe("init", str(root))
    assert f"Next in {root}: nxpipe config check" in answer.err
    assert "npm install, then npx cdk synth" in answer.err


def test_keep_writes_the_files_that_are_missing_and_no_other(nxpipe: InProcess, root: Path) -> None:
    mine = {"nxpipe.toml": "mine = true\n", "package.json": '{"name": "mine"}\n'}
    for name, text in mine.items():
        (root / name).write_text(text)
    refused = nxpipe("init", str(root))
    assert refused.code == 5
    assert "--keep" in refused.err
    assert set(snapshot(root)) == set(mine)
    answer = nxpipe("init", str(root), "--keep")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        *(f"wrote {root / name}" for name in FILES if name not in mine),
        *(f"kept  {root / name}" for name in mine),
    ]
    assert {name: (root / name).read_text() for name in mine} == mine
    version = json.loads((ROOT / "package.json").read_text())["devDependencies"]["aws-cdk"]
    assert f"npm install --save-dev aws-cdk@{version}, then npx cdk synth" in answer.err


def test_a_second_init_that_keeps_writes_nothing(nxpipe: InProcess, root: Path) -> None:
    nxpipe("init", str(root))
    before = snapshot(root)
    answer = nxpipe("init", str(root), "--keep", "--json")
    kept = [str(root / name) for name in FILES if name != ".gitignore"]
    assert (answer.code, json.loads(answer.out), snapshot(root)) == (0, {"written": [], "kept": kept}, before)


def test_a_cdk_json_of_another_app_is_kept_and_named(nxpipe: InProcess, root: Path) -> None:
    (root / "cdk.json").write_text('{"app": "node bin/app.js"}')
    answer = nxpipe("init", str(root), "--keep")
    assert (answer.code, (root / "cdk.json").read_text()) == (0, '{"app": "node bin/app.js"}')
    assert "cdk.json differs from the one that nxpipe requires" in answer.err


@pytest.mark.parametrize("option", ["--fleet=serving", "--model-id=bert-base-uncased", "--task=fill-mask"])
def test_an_option_about_an_nxpipe_toml_that_is_kept_is_refused(nxpipe: InProcess, root: Path, option: str) -> None:
    (root / "nxpipe.toml").write_text("mine = true\n")
    before = snapshot(root)
    answer = nxpipe("init", str(root), "--keep", option)
    assert (answer.code, snapshot(root)) == (2, before)
    assert option.partition("=")[0] in answer.err


@pytest.mark.parametrize(
    ("environment", "named"),
    [("venv", "venv"), ("tools/my env", ".venv"), ("../elsewhere", ".venv"), (".", ".venv")],
)
def test_the_app_starts_in_the_virtual_environment_of_the_repository(
    nxpipe: InProcess, root: Path, monkeypatch: pytest.MonkeyPatch, environment: str, named: str
) -> None:
    """Another one is the user's who ran this command, or has a name that a shell would split."""
    monkeypatch.setattr(sys, "prefix", os.path.normpath(root / environment))
    nxpipe("init", str(root))
    assert f"{named}/" in (root / ".gitignore").read_text().splitlines()
    command = json.loads((root / "cdk.json").read_text())["app"]
    assert command == f"PATH=${{VIRTUAL_ENV:-{named}}}/bin:$PATH python3 -P -m nxpipe.stacks"


@pytest.mark.parametrize("interruption", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("survivors", range(2 * len(FILES)))
def test_an_init_that_fails_anywhere_leaves_the_repository_as_it_was(
    root: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException, survivors: int
) -> None:
    """Each file is staged, then each is moved into place; any of the steps may be the one that fails."""
    (root / ".gitignore").write_text("*.o\n")
    before = snapshot(root)
    done: list[Path] = []

    def failing(real: Any) -> Any:
        def step(self: Path, *arguments: Any) -> Any:
            if len(done) == survivors:
                done.append(self)
                raise interruption
            done.append(self)
            return real(self, *arguments)

        return step

    planned = init.plan(root, "bert-base-uncased", None)
    for name in ("write_bytes", "replace"):
        monkeypatch.setattr(Path, name, failing(getattr(Path, name)))
    with pytest.raises(type(interruption)):
        init.write(planned)
    assert len(done) > survivors
    assert snapshot(root) == before
