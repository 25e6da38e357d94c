"""A project from an empty account to a running one and back to nothing, with the command that users have."""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.localaws.census import census, counted, inventory
from tests.localaws.server import local_aws
from tests.stacks.whole import write_locks

REGION: Final = "us-east-2"
ACCOUNT: Final = "123456789012"
ROOT: Final = Path(__file__).parents[2]
CDK: Final = ROOT / "node_modules" / ".bin" / "cdk"
UNPACKED: Final = Path.home() / ".cache" / "aws" / "jsii" / "package-cache"
GITHUB: Final = "https://token.actions.githubusercontent.com"

CONFIG: Final = f"""\
[project]
name = "cycle"
account = "{ACCOUNT}"
region = "{REGION}"

[[models]]
name = "bert"
id = "bert-base-uncased"
task = "fill-mask"
target = "inf2.xlarge"

[[models]]
name = "llama"
id = "acme/llama"
task = "text-generation"
target = "trn1.32xlarge"

[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = ["inf2.xlarge", "inf2.8xlarge"]
capacity = {{{{ kind = "on-demand" }}}}
size = {{{{ min = 1, desired = 2, max = 4 }}}}
command = ["python", "-m", "server"]
certificate = "{{certificate}}"

[[fleets]]
kind = "training"
name = "tune"
model = "llama"
channel = "experiments"
instance_types = ["trn1.32xlarge"]
zone = "{REGION}a"
nodes = 2
capacity = {{{{ kind = "on-demand" }}}}

[farm]
max_vcpus = {{vcpus}}
image = "{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/nxpipe@sha256:{"0" * 64}"
"""
OF_THE_NETWORK: Final = {
    f"cycle-{part}"
    for part in ("build-farm", "cache", "network", "observe", "rollout-search", "serve-search", "train-tune")
}
RELEASE: Final = """
[release]
repository = "example/models"
"""


@dataclass(frozen=True)
class Project:
    """One nxpipe.toml, and the command that deploys it."""

    folder: Path
    environment: dict[str, str]
    certificate: str

    def write(self, *, vcpus: int = 64, more: str = "") -> None:
        (self.folder / "nxpipe.toml").write_text(CONFIG.format(vcpus=vcpus, certificate=self.certificate) + more)

    def cdk(self, *arguments: str, within: Path = ROOT) -> subprocess.CompletedProcess[str]:
        settings = ("-c", f"config={self.folder / 'nxpipe.toml'}", "-o", str(self.folder / "cdk.out"))
        command = [str(CDK), *arguments, *settings]
        return subprocess.run(
            command, cwd=within, env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )

    def deploy(self, *what: str, within: Path = ROOT) -> subprocess.CompletedProcess[str]:
        how = ("--concurrency", "8", "--require-approval", "never", "--progress", "events")
        return self.cdk("deploy", "--all", *how, *what, within=within)

    def deploy_again(self) -> subprocess.CompletedProcess[str]:
        """What was read last: the same app once more would only take its time."""
        return self.deploy("--app", str(self.folder / "cdk.out"), within=self.folder)

    def destroy(self, *stacks: str) -> subprocess.CompletedProcess[str]:
        """By what was read last, too."""
        how = ("--force", "--concurrency", "8", "--app", str(self.folder / "cdk.out"))
        return self.cdk("destroy", *stacks, *how, within=self.folder)


@pytest.fixture
def project(sealed_environment: None, tmp_path: Path) -> Iterator[Project]:
    with local_aws() as there:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_", "NXPIPE_"))}
        own = {
            "CDK_HOME": str(tmp_path / "cdk-home"),
            "CDK_VALIDATION": "false",  # its own test switches it on: it costs ten seconds
            "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(UNPACKED),  # by its digest: CDK is unpacked once, and not per test
            "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
        }
        write_locks(tmp_path)
        certificate = boto3.client("acm").request_certificate(DomainName="search.example.com")["CertificateArn"]
        yield Project(tmp_path, {**kept, **own, **there}, certificate)


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told


def states() -> dict[str, str]:
    found = boto3.client("cloudformation").describe_stacks()["Stacks"]
    return {one["StackName"]: one["StackStatus"] for one in found}


def test_a_project_comes_changes_fails_recovers_and_goes_without_a_trace(project: Project) -> None:
    before = inventory(REGION)
    project.write()
    # Outside of the project's folder, so that the app is not read for it.
    succeeded(project.cdk("bootstrap", f"aws://{ACCOUNT}/{REGION}", within=project.folder))
    succeeded(project.deploy())
    stacks = {name for name in states() if name.startswith("cycle-")}
    assert stacks == {"cycle-storage", *OF_THE_NETWORK}
    assert (set(states().values()), [str(one) for one in census(REGION)]) == ({"CREATE_COMPLETE"}, [])
    assert counted(REGION) > 100

    # A property changes, and nothing but its stack. The other change is refused: an account has one provider for
    # GitHub's word at most, and this account has it from somebody else.
    stray = boto3.client("iam").create_open_id_connect_provider(Url=GITHUB, ThumbprintList=["f" * 40])
    project.write(vcpus=128, more=RELEASE)
    failed = project.deploy()
    told = failed.stdout + failed.stderr
    assert failed.returncode != 0
    assert re.search(r"CREATE_FAILED\s*\| AWS::IAM::OIDCProvider", told), told
    assert "EntityAlreadyExists" in told
    assert states()["cycle-release"] == "ROLLBACK_COMPLETE"

    # What stood in the way goes, and the same command does the rest.
    boto3.client("iam").delete_open_id_connect_provider(OpenIDConnectProviderArn=stray["OpenIDConnectProviderArn"])
    succeeded(project.deploy_again())
    environments = boto3.client("batch").describe_compute_environments()["computeEnvironments"]
    assert {one["computeResources"]["maxvCpus"] for one in environments} == {128, 256}  # of the farm, of two trn1
    assert states()["cycle-release"] == "CREATE_COMPLETE"
    assert states()["cycle-network"] == "CREATE_COMPLETE"  # nobody touched it
    assert [str(one) for one in census(REGION)] == []

    back_to_nothing(project)
    assert states() == {}
    assert inventory(REGION) == before


def back_to_nothing(project: Project) -> None:
    """As docs/guides/deploying.md tells it: what costs by the hour goes by one command, what holds artifacts by
    hand.
    """
    succeeded(project.destroy("cycle-network"))  # and all that is in it
    assert set(states()) == {"CDKToolkit", "cycle-release", "cycle-storage"}

    cloudformation = boto3.client("cloudformation")
    with pytest.raises(ClientError, match="TerminationProtection"):
        cloudformation.delete_stack(StackName="cycle-storage")
    kept = _of("cycle-storage")
    cloudformation.update_termination_protection(StackName="cycle-storage", EnableTerminationProtection=False)
    succeeded(project.destroy("--all"))
    assert set(states()) == {"CDKToolkit"}
    assert "s3 " + kept["AWS::S3::Bucket"][0] in inventory(REGION)  # the artifacts are still there
    _remove(kept)

    kept = _of("CDKToolkit")
    cloudformation.delete_stack(StackName="CDKToolkit")
    _remove(kept)


def _of(stack: str) -> dict[str, list[str]]:
    """The physical ids of a stack's resources, by type."""
    found: dict[str, list[str]] = {}
    for one in boto3.client("cloudformation").describe_stack_resources(StackName=stack)["StackResources"]:
        found.setdefault(one["ResourceType"], []).append(one["PhysicalResourceId"])
    return found


def _remove(kept: dict[str, list[str]]) -> None:
    """What a stack has left behind. A bucket with versions is empty when its versions are gone."""
    s3, ecr, kms = boto3.resource("s3"), boto3.client("ecr"), boto3.client("kms")
    there = inventory(REGION)
    for name in kept.get("AWS::S3::Bucket", []):
        if f"s3 {name}" in there:
            s3.Bucket(name).object_versions.delete()
            s3.Bucket(name).delete()
    for name in kept.get("AWS::ECR::Repository", []):
        if f"ecr {name}" in there:
            ecr.delete_repository(repositoryName=name, force=True)
    for key in kept.get("AWS::KMS::Key", []):
        if f"kms {key}" in there:
            kms.schedule_key_deletion(KeyId=key, PendingWindowInDays=7)
