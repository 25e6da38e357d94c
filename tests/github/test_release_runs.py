"""The release workflow that `nxpipe init` writes, for a repository of two models: each of its scripts runs.

The store is a bucket of the local AWS, the signing key one of its KMS keys.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import boto3
import pytest

from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.layout import signature_folder
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.url import open_store
from nxpipe.pipeline.cli import init
from nxpipe.pipeline.util.files import write_changes
from tests.github.documents import read
from tests.github.runner import Machine, Outcome, Run, Step, carry_out, carry_out_job
from tests.github.stand_ins import STAND_INS, configure_aws_credentials
from tests.localaws.server import local_aws
from tests.pipeline.conftest import BERT, LLAMA, write_model

pytestmark = pytest.mark.slow

STORE = "s3://artifacts/models"
WORKFLOW = ".github/workflows/nxpipe-release.yml"
ROLES = {name: f"arn:aws:iam::123456789012:role/{name}" for name in ("read", "release", "staging", "production")}
Objects: TypeAlias = set[tuple[str, str, object]]  # path, content, time
TINY = {"num_hidden_layers": 1}
MODEL = """
[[models]]
name = "{name}"
path = "models/{name}"
task = "{task}"
target = "inf2.xlarge"
buckets = [16]
phases = ["{phase}"]
weights = "random:0"
"""


def described(*models: str) -> str:
    known = {"search": ("feature-extraction", "forward"), "chat": ("text-generation", "prefill")}
    tables = (MODEL.format(name=name, task=known[name][0], phase=known[name][1]) for name in models)
    return '[project]\nname = "demo"\n' + "".join(tables)


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.com")
    subprocess.run(["git", *who, *words], cwd=folder, check=True)


def commit(root: Path, configuration: str) -> None:
    (root / "nxpipe.toml").write_text(configuration)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "described")


@pytest.fixture(scope="module")
def aws() -> Iterator[dict[str, str]]:
    with local_aws() as environment, pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        place: Any = {"LocationConstraint": environment["AWS_REGION"]}
        boto3.client("s3").create_bucket(Bucket="artifacts", CreateBucketConfiguration=place)
        yield environment


@pytest.fixture(scope="module")
def ours(aws: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run for a tag, in a repository with the files of `nxpipe init`."""
    folder = tmp_path_factory.mktemp("github")
    root = folder / "repository"
    root.mkdir()
    write_model(root / "models/search", BERT | TINY)
    write_model(root / "models/chat", LLAMA | TINY)
    write_changes(init.plan(root, str(root / "models/search"), None))
    for name in ("nxpipe", "nxpipe-compile"):
        (root / "requirements").mkdir(exist_ok=True)
        (root / f"requirements/{name}.txt").write_text(f"nxpipe==0.1.0 --hash=sha256:{'0' * 64}\n")
    git(root, "init", "--quiet")
    commit(root, described("search", "chat"))
    key = boto3.client("kms").create_key(KeyUsage="SIGN_VERIFY", KeySpec="ECC_NIST_P256")["KeyMetadata"]["Arn"]
    github = {
        "event_name": "push",
        "ref": "refs/tags/v1",
        "ref_name": "v1",
        "repository": "example/models",
        "run_id": "1",
        "run_attempt": "1",
        "event": {"pull_request": {"head": {"repo": {"full_name": "example/models"}}}},
    }
    everywhere = {
        "AWS_REGION": aws["AWS_REGION"],
        "NXPIPE_STORE_URL": STORE,
        "NXPIPE_READ_ROLE_ARN": ROLES["read"],
        "NXPIPE_SIGNING_KEY": f"kms:{key}",
    }
    own = {name: {"NXPIPE_ROLE_ARN": ROLES[name]} for name in ("release", "staging", "production")}
    surroundings = {
        "AWS_ENDPOINT_URL": aws["AWS_ENDPOINT_URL"],
        "AWS_EC2_METADATA_DISABLED": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return Run(root, folder / "tag", WORKFLOW, github, {"": everywhere, **own}, surroundings, STAND_INS)


@pytest.fixture(scope="module")
def seen() -> dict[str, Objects]:
    """The content of the bucket at each role assumption, and at the end."""
    return {}


@pytest.fixture(scope="module")
def released(ours: Run, seen: dict[str, Objects]) -> Outcome:
    def looking(machine: Machine, inputs: Mapping[str, str]) -> None:
        seen[machine.name] = objects()
        configure_aws_credentials(machine, inputs)

    looked = {"aws-actions/configure-aws-credentials": looking}
    outcome = carry_out(replace(ours, stand_ins={**STAND_INS, **looked}))
    seen["end"] = objects()
    return outcome


@pytest.fixture
def store(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in aws.items():
        monkeypatch.setenv(name, value)
    return open_store(STORE)


def objects() -> Objects:
    listed = boto3.client("s3").list_objects_v2(Bucket="artifacts")
    assert not listed["IsTruncated"]
    return {(content["Key"], content["ETag"], content["LastModified"]) for content in listed.get("Contents", [])}


def failed(outcome: Outcome) -> list[Step]:
    return [step for step in outcome.steps if step.result == "failure"]


def machines(outcome: Outcome, job: str) -> list[Machine]:
    return [machine for machine in outcome.machines if machine.name.startswith(f"{job}-")]


def test_a_tag_goes_through_every_gate_of_every_model_to_production(released: Outcome, store: Store) -> None:
    assert failed(released) == []
    assert {job for job, result in released.results.items() if result == "skipped"} == {"plan"}
    (names,) = {machine.contexts["needs"]["models"]["outputs"]["names"] for machine in machines(released, "build")}
    assert json.loads(names) == ["search", "chat"]
    published = {entry.manifest_digest for entry in store.list()}
    assert len(published) == 2
    for channel in ("staging", "production"):
        tip = ChannelLog(store.backend, channel).tip()
        assert tip is not None
        assert {artifact.manifest.sha256 for artifact in tip.artifacts} == published
        assert tip.actor == "ann (GitHub, example/models run 1)"
        assert tip.reason == "v1"
    for digest in published:
        assert list(store.backend.paths(signature_folder(digest)))


def test_what_is_attested_are_the_manifests_that_are_served(released: Outcome, store: Store) -> None:
    attested = [digest for machine in machines(released, "build") for digest in machine.noted["attested"]]
    assert sorted(attested) == sorted(entry.manifest_digest for entry in store.list())


def test_who_promotes_writes_to_its_channel_alone(released: Outcome, seen: dict[str, Objects]) -> None:
    """So that its role need allow no more; pins are gone when a promotion has ended."""
    for channel, before, after in (("staging", "staging-0", "production-0"), ("production", "production-0", "end")):
        written = {path for path, *_ in seen[after] - seen[before]}
        assert written == {f"models/channels/{channel}/{name}" for name in ("head", "log/0000000001")}


def test_each_job_takes_the_role_of_its_environment_for_as_long_as_it_may_last(released: Outcome) -> None:
    for job, role in (("build", "release"), ("staging", "staging"), ("production", "production")):
        for machine in machines(released, job):
            assert machine.noted["role"] == [ROLES[role]]
            assert machine.noted["seconds"] == ["21600"]


def test_each_machine_installs_this_release_once_and_what_its_job_needs(released: Outcome) -> None:
    asked_for = {machine.name: (machine.folder / "home/pip").read_text().split() for machine in released.machines}
    for name, words in asked_for.items():
        extras = "" if name.startswith(("models", "production")) else "-compile"
        assert words[-2:] == ["--requirement", f"requirements/nxpipe{extras}.txt"], name
        assert "--require-hashes" in words, name


def test_a_build_leaves_its_summary_and_its_report(ours: Run, released: Outcome) -> None:
    for machine in machines(released, "build"):
        assert machine.summary.startswith("## ✅ nxpipe build")
        (kept,) = (ours.folder / "artifacts" / f"build-{machine.contexts['matrix']['model']}").rglob("report.json")
        assert json.loads(kept.read_bytes())


def test_a_pull_request_is_planned_and_changes_nothing_in_the_store(ours: Run, released: Outcome, store: Store) -> None:
    """Its check is the same as a tag's, and as slow: it is spared."""
    before = objects()
    commit(ours.repository, described("search").replace("[16]", "[16, 32]"))
    github = {**ours.github, "event_name": "pull_request", "ref": "refs/pull/1/merge", "ref_name": "1/merge"}
    out = carry_out(replace(ours, folder=ours.folder.parent / "pull", github=github), spared="check")
    git(ours.repository, "reset", "--quiet", "--hard", "HEAD~1")
    assert failed(out) == []
    assert {job for job, result in out.results.items() if result == "success"} == {"models", "check", "plan"}
    (plan,) = machines(out, "plan")
    assert plan.noted["role"] == [ROLES["read"]]
    assert "1 committed, 1 queued" in plan.summary
    assert objects() == before


def test_production_refuses_what_nobody_has_approved(ours: Run, released: Outcome, store: Store) -> None:
    """Staging has moved on between the approval and the job."""
    before = ChannelLog(store.backend, "production").tip()
    outcome, job = Outcome(), read(ours.repository / WORKFLOW)["jobs"]["production"]
    approved = {"staging": {"result": "success", "outputs": {"approved": f"7@{'0' * 64}"}}}
    carry_out_job(replace(ours, folder=ours.folder.parent / "late"), "production", job, approved, outcome)
    (step,) = failed(outcome)
    assert f"expected 7@{'0' * 64}" in step.log
    assert ChannelLog(store.backend, "production").tip() == before


def test_a_model_that_is_not_there_ends_the_run_before_anything_is_built(ours: Run) -> None:
    outcome = carry_out(replace(ours, folder=ours.folder.parent / "other", inputs={"model": "serach"}))
    assert outcome.results.pop("models") == "failure"
    assert set(outcome.results.values()) == {"skipped"}
    (step,) = failed(outcome)
    assert "nxpipe.toml has no such model; it has ['search', 'chat']" in step.log


def test_a_store_in_a_folder_of_the_runner_ends_a_release_before_anything_is_built(ours: Run) -> None:
    variables = {**ours.variables, "": {**ours.variables[""], "NXPIPE_STORE_URL": ""}}
    outcome = carry_out(replace(ours, folder=ours.folder.parent / "local", variables=variables))
    assert outcome.results.pop("models") == "failure"
    assert set(outcome.results.values()) == {"skipped"}
    (step,) = failed(outcome)
    assert "GitHub deletes it at the end of the job" in step.log
    github = {**ours.github, "event_name": "pull_request"}
    checked = carry_out(
        replace(ours, folder=ours.folder.parent / "local-pull", variables=variables, github=github), spared="check"
    )
    assert checked.results["models"] == "success"


def test_a_repository_without_a_source_of_nxpipe_ends_the_run_with_its_first_job(ours: Run, tmp_path: Path) -> None:
    """The files are those of `nxpipe init` without --install: a lock of them has no package."""
    root = tmp_path / "repository"
    git(tmp_path, "clone", "--quiet", str(ours.repository), str(root))
    (root / "requirements/nxpipe.txt").write_text((root / "requirements/nxpipe.in").read_text())
    commit(root, described("search"))
    outcome = carry_out(replace(ours, repository=root, folder=tmp_path / "run"))
    assert outcome.results.pop("models") == "failure"
    assert set(outcome.results.values()) == {"skipped"}
    (step,) = failed(outcome)
    assert "::error::requirements/nxpipe.txt names no source of nxpipe" in step.log
