"""The guides of a deployment work in their order, from a repository of a user's own, in one region, without a terminal.

Every block of commands runs with `bash -e` in one repository, with the installed wheel, against the local AWS in a
process of its own, as `make cloud-up` starts it. An added block is run without a change here. A block that cannot run
there has a comment with the reason on the line before it (tests/doc_blocks.py).

The walk takes four to seven minutes on two cores, and needs the AWS CLI and npm. Only the agent's dependencies are
downloaded.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import boto3
import pytest

from nxpipe.pipeline.util import exit_codes
from tests.conftest import ROOT
from tests.doc_blocks import WALK, blocks_of
from tests.localaws.census import inventory
from tests.pipeline.conftest import BERT, write_model
from tests.user import Repository, cloud_up, download_cdk, new_repository
from tests.wheel import wheel_of

REGION: Final = "us-east-2"
PROJECT, FLEET, ENDPOINT, GROUP = "walk", "bert-base-uncased", "answers", "/aws/eks/walk/cluster"
FASTER: Final = ("nxpipe rollout start ", "nxpipe rollout start --minute 1 ")


class Walk(Repository):
    def fill_in(self, commands: str) -> str:
        return super().fill_in(commands).replace(*FASTER)


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


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Walk]:
    wheel = wheel_of(ROOT, tmp_path / "wheel")
    noted = {"SOURCE": wheel.as_uri(), "NAME": PROJECT, "FLEET": FLEET, "ENDPOINT": ENDPOINT, "GROUP": GROUP}
    repository = new_repository(tmp_path / "My models", None, noted)
    download_cdk(repository.folder)
    with cloud_up(tmp_path / "server.txt") as exports:
        for name, value in re.findall("^export (.*?)=(.*)$", exports, re.MULTILINE):
            monkeypatch.setenv(name, value)
        walk = Walk(repository.folder, repository.environment, repository.noted)
        walk.shell.write_text(exports)
        yield walk


@pytest.mark.timeout(1800)
def test_the_guides_work_in_their_order_from_a_users_repository_without_a_terminal(walk: Walk) -> None:
    blocks = [block for page in WALK for block in blocks_of(page) if block.kind == "sh"]
    for command in {*BEFORE, *AFTER}:
        assert sum(command in block.text for block in blocks) == 1, f"no block, or several: {command}"
    empty: set[str] = set()
    for block in blocks:
        if block.reason:
            sys.stdout.write(f"{block.place}: left out: {block.reason}\n")
            continue
        for command, act in BEFORE.items():
            if command in block.text:
                act(walk)
        began = time.monotonic()
        code, output = walk.run(block.text)
        sys.stdout.write(f"{block.place}: {time.monotonic() - began:.0f} s\n")
        assert code == 0, f"{block.place}: exit code {code}\n{block.text}\n{output}"
        for command, check in AFTER.items():
            if command in block.text:
                check(walk, output)
        if "cdk bootstrap" in block.text:
            empty = inventory(REGION)
    assert empty
    assert sorted(inventory(REGION) ^ empty) == []  # an account with the CDK's own stack only
    assert any(block.reason for block in blocks)
