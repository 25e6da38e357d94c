"""`nxpipe init` creates all files of a project at once, and changes no existing one."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.cli import init
from nxpipe.pipeline.cli.init import configuration
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.cloud import Release
from nxpipe.pipeline.config.load import check_placement
from nxpipe.pipeline.util.files import write_changes
from tests.conftest import ROOT
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

WORKFLOW = ".github/workflows/nxpipe-release.yml"
ACTION = ".github/actions/nxpipe/action.yml"
SOURCES = ["requirements/nxpipe.in", "requirements/nxpipe-compile.in"]
FILES = ["nxpipe.toml", WORKFLOW, ACTION, *SOURCES, "cdk.json", "package.json", ".gitignore"]
GITHUB = ["--github", "--repository", "acme/models", "--owner-id", "12", "--repository-id", "34"]
ENTRIES = b".nxpipe/\ncdk.out/\nnode_modules/\n.venv/\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "My Search 2"
    folder.mkdir()
    return folder


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True)


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
    assert (model.name, model.task, model.phases) == ("smollm2-135m", "text-generation", ("prefill", "decode"))


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
    again = nxpipe("init", str(root))
    assert (again.code, snapshot(root)) == (0, before)
    assert again.out.startswith("Nothing to do: ")
    assert again.out.endswith("package.json are up to date.\n")
    assert json.loads(nxpipe("init", str(root), "--json").out)["written"] == []


def test_a_second_init_with_another_model_is_refused(nxpipe: InProcess, root: Path) -> None:
    nxpipe("init", str(root))
    before = snapshot(root)
    assert (nxpipe("init", str(root), "--model-id", "gpt2").code, snapshot(root)) == (5, before)


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
    assert "'gpu' is not one of serving, training" in answer.err


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


@pytest.mark.parametrize("option", ["--fleet=serving", "--model-id=bert-base-uncased", "--task=fill-mask", "--github"])
def test_an_option_about_an_nxpipe_toml_that_is_kept_is_refused(nxpipe: InProcess, root: Path, option: str) -> None:
    (root / "nxpipe.toml").write_text("mine = true\n")
    git(root, "init", "--quiet")
    git(root, "remote", "add", "origin", "https://github.com/acme/models")
    before = snapshot(root)
    answer = nxpipe("init", str(root), "--keep", option)
    assert (answer.code, snapshot(root)) == (2, before)
    assert option.partition("=")[0] in answer.err


COMMIT = "git+https://github.com/acme/nxpipe@" + 40 * "a"
WHEEL = "https://example.com/a/nxpipe-0.1.0-py3-none-any.whl#sha256=" + 64 * "b"
INDEX = "https://example.com/simple"


def requirements(root: Path) -> list[list[str]]:
    """The lines of both files of sources that are no comments."""
    texts = [(root / name).read_text() for name in SOURCES]
    return [[line.partition("  #")[0] for line in text.splitlines() if line[:1] != "#"] for text in texts]


def test_the_jobs_install_what_the_user_names_and_its_build_backend_for_a_commit(
    nxpipe: InProcess, root: Path, tmp_path: Path
) -> None:
    (backend,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    expected = {
        COMMIT: [[f"nxpipe{extra} @ {COMMIT}", backend] for extra in ("", "[compile]")],
        WHEEL: [[f"nxpipe{extra} @ {WHEEL}"] for extra in ("", "[compile]")],
        "nxpipe==0.1.0": [[f"--index-url {INDEX}", f"nxpipe{extra}==0.1.0"] for extra in ("", "[compile]")],
    }
    for number, (source, lines) in enumerate(expected.items()):
        index = ["--index-url", INDEX] if "==" in source else []
        assert nxpipe("init", str(tmp_path / str(number)), "--install", source, *index).code == 0
        assert requirements(tmp_path / str(number)) == lines


def test_without_a_source_no_package_is_named(nxpipe: InProcess, root: Path) -> None:
    """A public index has no nxpipe: somebody else could register the name."""
    nxpipe("init", str(root))
    assert requirements(root) == [[], []]
    assert "No source is named yet" in (root / SOURCES[0]).read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nxpipe"], "does not pin nxpipe"),
        (["nxpipe>=0.1"], "does not pin nxpipe"),
        (["nxpipe==0.1.0"], "--index-url"),
        (["nxpipe==0.1.0", "--index-url", "https://user:secret@example.com/simple"], "without a user"),
        ([WHEEL, "--index-url", INDEX], "--install nxpipe==VERSION"),
        ([WHEEL.partition("#")[0]], "#sha256=DIGEST"),
        ([WHEEL.replace("https://", "https://user:secret@")], "#sha256=DIGEST"),
        ([WHEEL.replace("https:", "http:")], "#sha256=DIGEST"),
        ([COMMIT.partition("nxpipe@")[0] + "nxpipe@main"], "a branch or a tag can move"),
        ([COMMIT[:-1]], "a branch or a tag can move"),
        ([COMMIT + "\nevil"], "a branch or a tag can move"),
    ],
)
def test_a_source_that_somebody_could_replace_is_refused(
    nxpipe: InProcess, root: Path, arguments: list[str], expected: str
) -> None:
    answer = nxpipe("init", str(root), "--install", *arguments)
    assert (answer.code, snapshot(root)) == (2, {})
    assert expected in answer.err


def test_github_is_the_repository_that_git_or_an_option_names_with_its_ids(
    nxpipe: InProcess, root: Path, tmp_path: Path
) -> None:
    for number, remote in enumerate(("https://github.com/acme/models.git", "git@github.com:acme/models")):
        folder = tmp_path / str(number)
        folder.mkdir()
        git(folder, "init", "--quiet")
        git(folder, "remote", "add", "origin", remote)
        answer = nxpipe("init", str(folder), "--github")
        assert load_config(folder / "nxpipe.toml", {}).release == Release(repository="acme/models")
        assert "gh api repos/acme/models --jq '.owner.id, .id'" in answer.err
    nxpipe("init", str(root), *GITHUB)
    config = load_config(root / "nxpipe.toml", {})
    assert config.release is not None
    assert config.release.subject == "repo:acme@12/models@34"
    assert config.project.region is not None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--github"], "pass --repository OWNER/NAME"),
        (["--github", "--repository", "models"], "OWNER/NAME"),
        (["--github", "--repository", "acme/models", "--owner-id", "1"], "repository_id"),
        (["--repository", "acme/models"], "pass --github too"),
    ],
)
def test_an_incomplete_repository_writes_nothing(
    nxpipe: InProcess, root: Path, arguments: list[str], expected: str
) -> None:
    answer = nxpipe("init", str(root), *arguments)
    assert (answer.code, snapshot(root)) == (2, {})
    assert expected in answer.err


RECORDER = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
words = sys.argv[1:]
if words[0] == "cloudformation":
    stack, query = words[words.index("--stack-name") + 1], words[words.index("--query") + 1]
    output = query.split("'")[1]
    print("" if output == {absent!r} else stack + ":" + output)
elif words[:2] == ["api", "user"]:
    print(7)
"""


def calls_of(script: str, folder: Path, absent: str = "") -> tuple[int, list[list[str]]]:
    """The exit code of a script in bash and the arguments of its calls of gh, with an aws that knows all outputs."""
    folder.mkdir()
    for name in ("gh", "aws"):
        text = RECORDER.format(python=sys.executable, log=str(folder / f"{name}.log"), absent=absent)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=False)
    return done.returncode, [json.loads(line) for line in (folder / "gh.log").read_text().splitlines()]


def variables_of(calls: list[list[str]]) -> dict[tuple[str, str], str]:
    """Values by environment ("": the repository) and name."""
    found = {}
    for words in calls:
        if words[:2] == ["variable", "set"]:
            options = dict(zip(words[3::2], words[4::2], strict=True))
            assert options["--repo"] == "acme/models"
            found[options.get("--env", ""), words[2]] = options["--body"]
    return found


def test_the_commands_for_github_set_what_the_workflow_reads_from_outputs_of_the_stacks(
    nxpipe: InProcess, root: Path, tmp_path: Path
) -> None:
    answer = nxpipe("init", str(root), *GITHUB)
    script = nxpipe("infra", "github", "--config", str(root / "nxpipe.toml")).out
    assert script.strip() in answer.err
    code, calls = calls_of(script, tmp_path / "tools")
    variables = variables_of(calls)
    assert code == 0
    assert variables == {
        ("", "AWS_REGION"): "us-east-2",
        ("", "NXPIPE_STORE_URL"): "s3://my-search-2-storage:BucketName",
        ("", "NXPIPE_READ_ROLE_ARN"): "my-search-2-release:ReadRoleArn",
        ("release", "NXPIPE_ROLE_ARN"): "my-search-2-release:RoleArn",
        ("staging", "NXPIPE_ROLE_ARN"): "my-search-2-release:PromoteStagingRoleArn",
        ("production", "NXPIPE_ROLE_ARN"): "my-search-2-release:PromoteProductionRoleArn",
    }
    read = set(re.findall(r"vars\.(\w+)", (root / WORKFLOW).read_text()))
    assert {name for _, name in variables} == read - {"NXPIPE_SIGNING_KEY"}  # optional
    created = [words[4].rpartition("/")[2] for words in calls if "PUT" in words]
    assert created == ["release", "staging", "production"]
    assert next(words for words in calls if "reviewers[][id]=7" in words)[4].endswith("environments/production")
    restricted = [words[4] for words in calls if "POST" in words and "name=v*" in words]
    assert len(restricted) == 3


def test_a_stack_that_is_not_deployed_ends_the_commands_for_github(
    nxpipe: InProcess, root: Path, tmp_path: Path
) -> None:
    nxpipe("init", str(root), *GITHUB)
    script = nxpipe("infra", "github", "--config", str(root / "nxpipe.toml")).out
    code, calls = calls_of(script, tmp_path / "tools", absent="PromoteStagingRoleArn")
    assert code == 1
    assert ("staging", "NXPIPE_ROLE_ARN") not in variables_of(calls)


def test_the_commands_for_github_need_a_release_table(nxpipe: InProcess, root: Path) -> None:
    nxpipe("init", str(root))
    answer = nxpipe("infra", "github", "--config", str(root / "nxpipe.toml"))
    assert (answer.code, answer.out) == (2, "")
    assert "no [release]" in answer.err


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({}, 26),
        ({"NXPIPE_STORE_URL": "s3://bucket/models"}, 0),
        ({"RUNNER_ENVIRONMENT": "self-hosted"}, 26),  # in the workspace
        ({"RUNNER_ENVIRONMENT": "self-hosted", "NXPIPE_STORE_URL": "file:///srv/models"}, 0),
        ({"RUNNER_ENVIRONMENT": "github-hosted", "NXPIPE_STORE_URL": "file:///srv/models"}, 26),
    ],
)
def test_a_release_needs_a_store_that_outlives_a_job_of_github(
    nxpipe: InProcess, root: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], code: int
) -> None:
    nxpipe("init", str(root))
    monkeypatch.chdir(root)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answer = nxpipe("config", "check", "--for-release")
    assert answer.code == code
    assert ("set `url` in [store]" in answer.err) == (code == 26)
    assert nxpipe("config", "check").code == 0


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
        write_changes(planned)
    assert len(done) > survivors
    assert snapshot(root) == before
