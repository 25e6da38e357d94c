"""docs/guides/deploying.md works in the order it is written, from a repository of a user's own, in one region, without
a terminal.

Every block of commands runs with `bash -e` in one repository, with the installed wheel, against the local AWS in a
process of its own, as `make cloud-up` starts it. An added block is run without a change here. A block that cannot run
there has a comment with the reason on the line before it, `<!-- not on the local AWS: REASON -->`.

The walk takes four to seven minutes on two cores, and needs the AWS CLI and npm. Only the agent's dependencies are
downloaded.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import boto3
import pytest

from nxpipe.pipeline.util import exit_codes
from tests.conftest import ROOT
from tests.localaws.census import inventory
from tests.pipeline.conftest import BERT, write_model
from tests.wheel import build, environment_of, wheel_of

PAGE: Final = ROOT / "docs/guides/deploying.md"
REASONS: Final = frozenset(
    {
        "a test of its own rehearses it",
        "containers are pushed to a registry",
        "files of AWS are downloaded",
        "jobs run in containers",
        "releases of nodes and add-ons are those of EKS",
        "sessions need a plugin of the AWS CLI",
        "the cluster has no Kubernetes",
        "the command is of version 2 of the AWS CLI",
        "there is no network of a caller",
    }
)
REGION: Final = "us-east-2"
PROJECT, FLEET, ENDPOINT, GROUP = "walk", "bert-base-uncased", "answers", "/aws/eks/walk/cluster"
# A minute of a rollout's plan takes a second; the users of the local AWS publish their metrics each second.
FASTER: Final = ("nxpipe rollout start ", "nxpipe rollout start --minute 1 ")
# The unpacked CDK package, shared by digest: tests have a new HOME each, and unpacking takes nine seconds.
_PACKAGE_CACHE: Final = Path.home() / ".cache" / "aws" / "jsii" / "package-cache"


@dataclass(frozen=True)
class Block:
    """A block of commands of a page, and the reason why it is left out."""

    line: int
    commands: str
    reason: str | None


def blocks_of(text: str) -> list[Block]:
    assert not re.search(r"^ +```|^```(bash|console|shell)", text, re.MULTILINE), "write ```sh at the start of a line"
    pattern = r"(?:^<!--(?P<comment>[^\n]*)-->\n)?^```sh\n(?P<commands>.*?)^```$"
    result = []
    for block in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, block.start("commands"))
        comment = block["comment"]
        reason = comment and comment.strip().removeprefix("not on the local AWS: ")
        assert reason is None or reason in REASONS, f"{PAGE.name}:{line}: unknown reason: {comment}"
        result.append(Block(line, block["commands"], reason))
    return result


@dataclass
class Walk:
    """A user's repository and shell. What a block exports is there in the next one."""

    folder: Path
    environment: dict[str, str]
    noted: dict[str, str]  # what the page's placeholders stand for

    @property
    def shell(self) -> Path:
        return self.folder.parent / "shell.sh"

    @property
    def configuration(self) -> Path:
        return self.folder / "nxpipe.toml"

    def edit(self, *changes: tuple[str, str]) -> None:
        text = self.configuration.read_text()
        for pattern, line in changes:
            text, count = re.subn(pattern, line, text, flags=re.MULTILINE)
            assert count == 1, (pattern, count)
        self.configuration.write_text(text)

    def run(self, commands: str) -> tuple[int, str]:
        for word, value in self.noted.items():
            commands = re.sub(rf"\b{word}\b", value, commands)
        script = f". {self.shell}\n{commands.replace(*FASTER)}\nexport -p > {self.shell}\n"
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # no controlling terminal
            text=True,
            timeout=900,
            check=False,
        )
        return done.returncode, done.stdout

    def succeed(self, commands: str) -> str:
        code, output = self.run(commands)
        assert code == 0, f"{commands}: exit code {code}\n{output}"
        return output


# What the prose of the page has the user do before a block, and what it says of its outcome.


def describe_the_project(walk: Walk) -> None:
    write_model(walk.folder / "bert-base-uncased", BERT)
    walk.edit(
        ('^name = "my-models"', f'name = "{PROJECT}"'),
        ("^region = .*", f'region = "{REGION}"'),
        ("^id = .*", 'path = "bert-base-uncased"'),
        ("^task = .*", 'task = "feature-extraction"'),
        ("^buckets = .*", "buckets = [16]"),
        ("^# weights = .*", 'weights = "random:0"'),
    )


def use_the_bucket(walk: Walk) -> None:
    (stack,) = boto3.client("cloudformation").describe_stacks(StackName=f"{PROJECT}-storage")["Stacks"]
    (bucket,) = (entry["OutputValue"] for entry in stack["Outputs"] if entry["OutputKey"] == "BucketName")
    walk.noted["BUCKET"] = bucket
    walk.edit(("^url = .*", f'url = "s3://{bucket}"'))


def the_preflight_fails_without_an_artifact(walk: Walk) -> None:
    code, output = walk.run("nxpipe infra preflight")
    assert code == exit_codes.FINDINGS.number, output
    assert re.findall(r"^fails +(\S+)", output, re.MULTILINE) == ["channel"], output


def build_another(walk: Walk, number: int) -> None:
    """Build the next version of the model, and note its key."""
    walk.edit(("^weights = .*", f'weights = "random:{number}"'))
    note_the_key(walk, walk.succeed("nxpipe build"))


def note_the_key(walk: Walk, output: str) -> None:
    walk.noted["KEY"] = re.findall(r"^built  bert-base-uncased@(\w+)", output, re.MULTILINE)[-1]


def served(walk: Walk) -> str:
    (channel,) = json.loads(walk.succeed("nxpipe channel show production --json --quiet"))
    key: str = channel["artifacts"][0]["request_key"]
    return key[:12]


def a_bad_version_goes_back(walk: Walk, output: str) -> None:
    good = walk.noted["KEY"]
    assert served(walk) == good, output
    assert "promoted" in output
    build_another(walk, 2)
    fail_requests(idle(), 0.03)
    start = "start FLEET bert-base-uncased@KEY --wait"
    for command in (start, start, "status FLEET --wait"):  # a repeated start reports the same rollout
        code, output = walk.run(f"nxpipe rollout {command}")
        assert code == exit_codes.ROLLED_BACK.number, output
    assert served(walk) == good


def fail_requests(group: str, share: float) -> None:
    tag = {"Key": "localaws:errors", "Value": str(share), "PropagateAtLaunch": False}
    on = {"ResourceType": "auto-scaling-group", "ResourceId": group}
    boto3.client("autoscaling").create_or_update_tags(Tags=[tag | on])


def idle() -> str:
    """The group without instances, where the next version goes."""
    names = [f"{PROJECT}-{FLEET}-{colour}" for colour in ("blue", "green")]
    groups = boto3.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=names)["AutoScalingGroups"]
    (name,) = (group["AutoScalingGroupName"] for group in groups if not group["DesiredCapacity"])
    return str(name)


def add_an_endpoint(walk: Walk) -> None:
    image = f"123456789012.dkr.ecr.{REGION}.amazonaws.com/serve@sha256:{'0' * 64}"
    table = f"""
[[endpoints]]
name = "{ENDPOINT}"
model = "bert-base-uncased"
artifact = "{"0" * 64}"
image = "{image}"
instance_type = "ml.inf2.xlarge"
instances = 1
shift = {{ kind = "all-at-once", bake = "10m" }}
rehearsal = true
"""
    walk.configuration.write_text(walk.configuration.read_text() + table)


def the_artifact_is_there(walk: Walk, output: str) -> None:
    listed = boto3.client("s3").list_objects_v2(Bucket=walk.noted["BUCKET"], Prefix=f"endpoints/{ENDPOINT}/")
    assert any(entry["Key"].endswith("/manifest.json") for entry in listed["Contents"]), output


def add_releases(walk: Walk) -> None:
    table = '\n[release]\nrepository = "acme/models"\nowner_id = 1\nrepository_id = 2\n'
    walk.configuration.write_text(walk.configuration.read_text() + table)


def the_script_reads_outputs_that_exist(walk: Walk, output: str) -> None:
    """The script runs to its end with a `gh` that only records its arguments."""
    programs = walk.folder.parent / "recorded"
    programs.mkdir()
    gh, calls = programs / "gh", programs / "calls"
    gh.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    gh.chmod(0o755)
    walk.succeed(f'PATH="{programs}:$PATH" bash setup-github.sh')
    roles = re.findall(r"variable set NXPIPE_\w*ROLE_ARN .*arn:aws:iam::123456789012:role/", calls.read_text())
    assert len(roles) == 4, (output, calls.read_text())


RETAINED: Final = {
    "AWS::S3::Bucket": ("ARTIFACT_BUCKET", "LOG_BUCKET"),
    "AWS::ECR::Repository": ("REPOSITORY",),
    "AWS::KMS::Key": ("KMS_KEY",),
}


def note_the_retained(walk: Walk, output: str) -> None:
    listed = [line.split() for line in output.splitlines() if line.startswith("AWS::")]
    for kind, words in RETAINED.items():
        names = [name for type_, name in listed if type_ == kind]
        walk.noted |= dict(zip(words, names, strict=True))


def logs_return(walk: Walk) -> None:
    boto3.client("logs").create_log_group(logGroupName=GROUP)  # as EKS does


def nothing_is_refused(walk: Walk, output: str) -> None:
    assert not re.search("^(fail|fails|unknown) ", output, re.MULTILINE), output


BEFORE: Final[dict[str, Callable[[Walk], None]]] = {
    "nxpipe config check\n": describe_the_project,
    "nxpipe store doctor\n": use_the_bucket,
    "nxpipe promote ": the_preflight_fails_without_an_artifact,
    "nxpipe rollout start ": lambda walk: build_another(walk, 1),
    "nxpipe infra github ": add_releases,
    "--endpoint ENDPOINT": add_an_endpoint,
    "aws logs delete-log-group ": logs_return,
}
AFTER: Final[dict[str, Callable[[Walk, str], None]]] = {
    "nxpipe store doctor\n": nothing_is_refused,
    "nxpipe build\n": note_the_key,
    "nxpipe infra preflight\n": nothing_is_refused,
    "nxpipe rollout start ": a_bad_version_goes_back,
    "nxpipe infra github ": the_script_reads_outputs_that_exist,
    "--endpoint ENDPOINT": the_artifact_is_there,
    "[ResourceType,PhysicalResourceId]": note_the_retained,
}


@contextmanager
def cloud_up(errors: Path) -> Iterator[str]:
    """The local AWS in a process of its own; the `export` lines that it prints."""
    command = [sys.executable, "-m", "tests.localaws.server"]
    with (
        errors.open("w") as file,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            lines: list[str] = []
            while not lines or not lines[-1].startswith("export AWS_REGION="):
                lines.append(server.stdout.readline())
                assert lines[-1], errors.read_text()
            yield "".join(lines)
        finally:
            server.send_signal(signal.SIGTERM)


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Walk]:
    folder, programs = tmp_path / "My models", tmp_path / "bin"
    prepare(folder)
    programs.mkdir()
    (programs / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    wheel = wheel_of(ROOT, tmp_path / "wheel")
    inherited = [entry for entry in os.environ["PATH"].split(os.pathsep) if Path(entry) != Path(sys.executable).parent]
    own = {
        "PATH": os.pathsep.join([str(programs), *inherited]),
        "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(_PACKAGE_CACHE),
        "npm_config_offline": "true",
    }
    with cloud_up(tmp_path / "server.txt") as exports:
        for name, value in re.findall("^export (.*?)=(.*)$", exports, re.MULTILINE):
            monkeypatch.setenv(name, value)
        noted = {"SOURCE": wheel.as_uri(), "NAME": PROJECT, "FLEET": FLEET, "ENDPOINT": ENDPOINT, "GROUP": GROUP}
        walk = Walk(folder, environment_of(folder) | own, noted)
        walk.shell.write_text(exports)
        yield walk


def prepare(folder: Path) -> None:
    """What the page has the user download, as far as this environment has it; `venv` and `npm install` keep it."""
    build("venv", str(folder / ".venv"))
    (packages,) = (folder / ".venv/lib").glob("python*/site-packages")
    # The .pth files there, such as one that leads to this checkout, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    shutil.copytree(ROOT / "node_modules", folder / "node_modules", symlinks=True)


def test_a_block_is_left_out_for_a_known_reason_only() -> None:
    page = "<!-- not on the local AWS: {} -->\n```sh\nfalse\n```\n"
    assert [block.reason for block in blocks_of(page.format("jobs run in containers"))] == ["jobs run in containers"]
    with pytest.raises(AssertionError, match="unknown reason"):
        blocks_of(page.format("too slow"))


@pytest.mark.timeout(1800)
def test_the_page_works_in_its_order_from_a_users_repository_without_a_terminal(walk: Walk) -> None:
    blocks = blocks_of(PAGE.read_text())
    for command in {*BEFORE, *AFTER}:
        assert sum(command in block.commands for block in blocks) == 1, f"no block, or several: {command}"
    empty: set[str] = set()
    for block in blocks:
        if block.reason:
            sys.stdout.write(f"{PAGE.name}:{block.line}: left out: {block.reason}\n")
            continue
        for command, act in BEFORE.items():
            if command in block.commands:
                act(walk)
        began = time.monotonic()
        code, output = walk.run(block.commands)
        sys.stdout.write(f"{PAGE.name}:{block.line}: {time.monotonic() - began:.0f} s\n")
        assert code == 0, f"{PAGE.name}:{block.line}: exit code {code}\n{block.commands}\n{output}"
        for command, check in AFTER.items():
            if command in block.commands:
                check(walk, output)
        if "cdk bootstrap" in block.commands:
            empty = inventory(REGION)
    assert empty
    assert sorted(inventory(REGION) ^ empty) == []  # an account with the CDK's own stack only
    assert any(block.reason for block in blocks)
