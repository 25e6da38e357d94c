"""The workflows: permissions, called commands, and equality of ours with those of `nxpipe init`."""

import json
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import click
import pytest

from nxpipe.pipeline.cli.main import cli
from tests.conftest import ROOT
from tests.github.command_lines import command_lines, parse
from tests.github.documents import ACTION, ACTIONS, TEMPLATES, WORKFLOW, WORKFLOWS, jobs, read, steps
from tests.github.expressions import evaluate, holds

EXAMPLES = {
    "MODEL": "search",
    "SLOWER": "5%",
    "REASON": "v1.2",
    "APPROVED": f"3@{'0' * 64}",
    "key": "a" * 64,
    "only[@]": "--only=search",
}
LINTED = [*WORKFLOWS, *ACTIONS, *TEMPLATES.values()]
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}")
UNPRIVILEGED = {"contents": "read"}
NEEDED_FOR = {"id-token": {"plan", "build", "staging", "production"}, "attestations": {"build"}}
OF_A_PULL_REQUEST = {"models", "check", "plan"}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def scripts(path: Path) -> list[str]:
    return [step["run"] for step in steps(path) if "run" in step]


@pytest.mark.parametrize("path", LINTED, ids=named)
def test_every_command_line_of_ours_is_one_that_the_command_takes(path: Path) -> None:
    """Here documents are Python, and the composite action's own line is whatever its caller says."""
    shell = "\n".join(script for script in scripts(path) if "WORDS" not in script)
    lines = [line for script in scripts(path) if "WORDS" not in script for line in command_lines(script, EXAMPLES)]
    assert len(lines) == len(re.findall(r"^ *(?:.*[;{(] *|.* do )?nxpipe (?=\w)", shell, re.MULTILINE))
    for step in steps(path):
        if words := step.get("with", {}).get("run"):
            lines.append(words.split())
    for line in lines:
        parse(cli, ["nxpipe", *line])


def test_the_release_has_every_gate_in_its_order() -> None:
    lines = [line for script in scripts(WORKFLOW) for line in command_lines(script, EXAMPLES)]
    gates = ["check", "build", "verify", "bench", "store", "release"]
    assert list(dict.fromkeys(line[0] for line in lines if line[0] in gates)) == gates


@pytest.mark.parametrize(
    "line", ["build --onyl search", "promote --channel staging", "bulid", "bench --threshold slow", "config chekc"]
)
def test_a_line_that_the_command_would_refuse_is_found(line: str) -> None:
    (found,) = command_lines(f"if true; then nxpipe {line} | tee x; fi", {})
    with pytest.raises(click.UsageError):
        parse(cli, ["nxpipe", *found])


@pytest.mark.parametrize(("ours", "written"), TEMPLATES.items(), ids=[named(path) for path in TEMPLATES])
def test_what_init_writes_is_what_runs_here(ours: Path, written: Path) -> None:
    assert ours.read_bytes() == written.read_bytes()


def test_the_action_installs_by_hash_alone() -> None:
    (install,) = (script for script in scripts(ACTION) if "pip install" in script)
    assert "--isolated" in install  # from the index of the file or of pip alone, whatever variables say
    assert "--require-hashes" in install
    for path in (WORKFLOW, ACTION):
        assert "INDEX_URL" not in path.read_text()


HASHED = f"click==8.5.1 \\\n    --hash=sha256:{'0' * 64}\n"
COMMIT = f"nxpipe[compile] @ git+https://github.com/example/nxpipe@{'a' * 40}"
WHEEL = f"nxpipe @ https://example.com/nxpipe-0.1.0-py3-none-any.whl \\\n    --hash=sha256:{'0' * 64}\n"
PIP = 'printf "%s\\n" "$*" >> pip.log\nfor word; do [ ! -f "$word" ] || cat "$word" >> packages.log; done\n'


def install(folder: Path, lock: str | None, pip: str = PIP, **environment: str) -> tuple[int, str]:
    """Run the step "Install" with this lock and this script as pip; exit code and output."""
    if lock is not None:
        (folder / "lock.txt").write_text(lock)
    (folder / "pip").write_text(f"#!/bin/bash\n{pip}")
    (folder / "pip").chmod(0o755)
    (script,) = (script for script in scripts(ACTION) if "pip install" in script)
    path = f"{folder}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env={**environment, "REQUIREMENTS": "lock.txt", "PATH": path, "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("lock", "sentence"),
    [
        (None, "There is no lock.txt"),
        ("# No source is named yet\n", "lock.txt names no source of nxpipe"),
        (HASHED, "lock.txt names no source of nxpipe"),
        (HASHED + COMMIT.replace("a" * 40, "main"), "a branch or a tag can move"),
        (HASHED + COMMIT.replace("a" * 40, "a" * 39), "a branch or a tag can move"),
        (HASHED + COMMIT.replace("https", "http"), "a branch or a tag can move"),
    ],
)
def test_a_job_without_a_pinned_source_of_nxpipe_installs_nothing(
    tmp_path: Path, lock: str | None, sentence: str
) -> None:
    code, log = install(tmp_path, lock)
    assert (code, (tmp_path / "pip.log").exists()) == (1, False)
    assert log.startswith("::error::")
    assert log.count("\n") == 1
    assert sentence in log
    assert "nxpipe init --install SOURCE" in log


def test_a_lock_with_hashes_is_installed_as_it_is(tmp_path: Path) -> None:
    assert install(tmp_path, HASHED + WHEEL) == (0, "")
    (call,) = (tmp_path / "pip.log").read_text().splitlines()
    assert "--require-hashes" in call
    assert (tmp_path / "packages.log").read_text() == HASHED + WHEEL


def test_a_commit_is_installed_after_its_packages_and_without_a_download(tmp_path: Path) -> None:
    assert install(tmp_path, f"{HASHED}{COMMIT}\n    # via -r lock.in\n") == (0, "")
    packages, commit, check = (tmp_path / "pip.log").read_text().splitlines()
    assert {"--require-hashes", "--isolated"} <= set(packages.split())
    assert {"--isolated", "--no-cache-dir", "--no-index", "--no-deps", "--no-build-isolation"} <= set(commit.split())
    assert commit.endswith(COMMIT)
    assert check == "check"
    assert (tmp_path / "packages.log").read_text() == f"{HASHED}    # via -r lock.in\n"


BACKEND = """
import zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "nxpipe-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for file, text in {"METADATA": "Metadata-Version: 2.1\\nName: nxpipe\\nVersion: 0.1.0\\n",
                           "WHEEL": "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
                           "RECORD": ""}.items():
            wheel.writestr(f"nxpipe-0.1.0.dist-info/{file}", text)
        wheel.writestr("nxpipe.py", "commit = 1")
    return name
"""


@pytest.mark.slow
def test_pip_installs_the_commit_of_the_lock(tmp_path: Path) -> None:
    """With the real pip in a new environment; git reads the repository from this machine."""
    repository, environment = tmp_path / "nxpipe", tmp_path / "environment"
    repository.mkdir()
    (repository / "backend.py").write_text(BACKEND)
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (repository / "pyproject.toml").write_text(system)
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.com")
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "first"]):
        subprocess.run(["git", *who, *words], cwd=repository, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=repository, text=True).strip()
    venv.create(environment, with_pip=False)
    pip = f'exec "{sys.executable}" -m pip --python "{environment}/bin/python" "$@"\n'
    local = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{tmp_path}/.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/example/",
    }
    code, log = install(tmp_path, COMMIT.replace("a" * 40, commit).replace("[compile]", "") + "\n", pip, **local)
    assert code == 0, log
    (installed,) = environment.rglob("nxpipe-0.1.0.dist-info/direct_url.json")
    assert json.loads(installed.read_text())["vcs_info"]["commit_id"] == commit


@pytest.mark.parametrize("path", LINTED, ids=named)
def test_every_action_is_pinned_by_its_whole_digest_with_its_version_beside_it(path: Path) -> None:
    for line in path.read_text().splitlines():
        if uses := re.search(r"uses: (\S+)(.*)", line):
            action, beside = uses.groups()
            if action.startswith("$/"):
                assert (ROOT / action.removeprefix("$/") / "action.yml").is_file()
            else:
                assert PINNED.fullmatch(action), line
                assert re.fullmatch(r" # v\d+\.\d+\.\d+", beside), line


def test_one_action_has_one_digest() -> None:
    found: dict[str, set[str]] = {}
    for path in (WORKFLOW, ACTION):
        for action, digest in re.findall(r"uses: ([^\s$@]+)@(\S+)", path.read_text()):
            found.setdefault(action, set()).add(digest)
    assert {action: digests for action, digests in found.items() if len(digests) > 1} == {}


def test_a_job_has_the_permissions_that_it_needs_and_no_other() -> None:
    assert read(WORKFLOW)["permissions"] == {}
    for name, job in jobs(WORKFLOW).items():
        needed = {permission: "write" for permission, who in NEEDED_FOR.items() if name in who}
        assert job["permissions"] == UNPRIVILEGED | needed, name
        takes_a_role = any("role" in step.get("with", {}) for step in job["steps"])
        assert takes_a_role == (name in NEEDED_FOR["id-token"]), name


def event(name: str, repository: str = "example/models") -> dict[str, Any]:
    head = {"head": {"repo": {"full_name": repository}}}
    github = {"event_name": name, "repository": "example/models", "event": {"pull_request": head}}
    return {"github": github, "vars": {"NXPIPE_READ_ROLE_ARN": "arn"}}


def begun(contexts: dict[str, Any]) -> set[str]:
    """The jobs that are not skipped by their own condition or that of a needed job."""
    found: set[str] = set()
    for name, job in jobs(WORKFLOW).items():
        needs = job.get("needs", [])
        well = {needs} <= found if isinstance(needs, str) else set(needs) <= found
        if holds(job.get("if"), contexts, ROOT, well=well):
            found.add(name)
    return found


def test_a_pull_request_gets_no_environment_no_role_that_writes_and_no_token_from_a_fork() -> None:
    assert begun(event("pull_request")) == OF_A_PULL_REQUEST
    assert begun(event("pull_request", "stranger/models")) == OF_A_PULL_REQUEST - {"plan"}
    assert begun(event("push")) == begun(event("workflow_dispatch")) == set(jobs(WORKFLOW)) - {"plan"}
    for name in OF_A_PULL_REQUEST:
        job = jobs(WORKFLOW)[name]
        assert "environment" not in job
        roles = [step["with"]["role"] for step in job["steps"] if "role" in step.get("with", {})]
        assert roles == (["${{ vars.NXPIPE_READ_ROLE_ARN }}"] if name == "plan" else [])


def test_each_of_the_jobs_that_write_has_an_environment_of_its_own() -> None:
    environments = {name: job.get("environment") for name, job in jobs(WORKFLOW).items()}
    assert {name: where for name, where in environments.items() if where} == {
        "build": "release",
        "staging": "staging",
        "production": "production",
    }


def test_no_key_is_stored_and_no_script_is_written_by_a_stranger() -> None:
    for path in (WORKFLOW, ACTION):
        assert "secrets." not in path.read_text()
        assert not [script for script in scripts(path) if "${{" in script]


def test_releases_come_one_after_another_and_pull_requests_only_cut_short_their_own() -> None:
    concurrency = read(WORKFLOW)["concurrency"]
    group, cut = (concurrency[name].split("${{")[1].removesuffix("}}") for name in ("group", "cancel-in-progress"))
    answers = {
        name: [
            evaluate(text, {"github": {"event_name": name, "ref": ref}}, ROOT)
            for ref in ("refs/one", "refs/other")
            for text in (group, cut)
        ]
        for name in ("pull_request", "push", "workflow_dispatch")
    }
    assert answers["pull_request"] == ["refs/one", True, "refs/other", True]
    assert answers["push"] == answers["workflow_dispatch"] == ["store", False, "store", False]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("'a' == 'A' && 1 != 2", True),
        ("github.nothing.more || 'else'", "else"),
        ("github.name && format('[{0}]', github.name)", "[it''s]"),
        ("!(github.off == false) || ''", ""),
        ("null == ''", True),
        ("fromJSON('[1]')", [1]),
    ],
)
def test_expressions_are_answered_as_github_does(text: str, answer: object) -> None:
    contexts = {"github": {"name": "it''s", "off": False}}
    assert evaluate(text, contexts, ROOT) == answer
