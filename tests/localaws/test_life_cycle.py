"""A project from an empty account to a running one and back, with the user's commands."""

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

from tests.localaws.census import census, count_properties, inventory
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
image = "{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/train@sha256:{"0" * 64}"

[farm]
max_vcpus = {{vcpus}}
image = "{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/nxpipe@sha256:{"0" * 64}"
"""
OF_THE_NETWORK: Final = {
    f"cycle-{part}" for part in ("build-farm", "network", "observe", "rollout-search", "serve-search", "train-tune")
}
RELEASE: Final = """
[release]
repository = "example/models"
"""


@dataclass(frozen=True)
class Project:
    """An nxpipe.toml, and the command that deploys it."""

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
        """Deploy the last synthesised app: synthesising it again would only take time."""
        return self.deploy("--app", str(self.folder / "cdk.out"), within=self.folder)

    def destroy(self, *stacks: str) -> subprocess.CompletedProcess[str]:
        """Destroy the stacks of the last synthesised app."""
        how = ("--force", "--concurrency", "8", "--app", str(self.folder / "cdk.out"))
        return self.cdk("destroy", *stacks, *how, within=self.folder)


@pytest.fixture
def project(sealed_environment: None, tmp_path: Path) -> Iterator[Project]:
    with local_aws() as there:
        physical_ids = {
            key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_", "NXPIPE_"))
        }
        own = {
            "CDK_HOME": str(tmp_path / "cdk-home"),
            "CDK_VALIDATION": "false",  # its own test switches it on: it takes ten seconds
            "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(UNPACKED),  # by its digest: CDK is unpacked once, not per test
            "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
        }
        write_locks(tmp_path)
        certificate = boto3.client("acm").request_certificate(DomainName="search.example.com")["CertificateArn"]
        yield Project(tmp_path, {**physical_ids, **own, **there}, certificate)


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def states() -> dict[str, str]:
    stacks = boto3.client("cloudformation").describe_stacks()["Stacks"]
    return {entry["StackName"]: entry["StackStatus"] for entry in stacks}


def test_a_project_comes_changes_fails_recovers_and_goes_without_a_trace(project: Project) -> None:
    before = inventory(REGION)
    project.write()
    # Outside of the project's folder, so that the CDK does not run the app.
    succeeded(project.cdk("bootstrap", f"aws://{ACCOUNT}/{REGION}", within=project.folder))
    succeeded(project.deploy())
    stacks = {name for name in states() if name.startswith("cycle-")}
    assert stacks == {"cycle-storage", *OF_THE_NETWORK}
    assert (set(states().values()), [str(entry) for entry in census(REGION)]) == ({"CREATE_COMPLETE"}, [])
    assert count_properties(REGION) > 100
    again = succeeded(project.deploy_again())
    unchanged = set(re.findall(r"(cycle-[\w-]+) \(no changes\)", again))
    assert unchanged == stacks, again  # also those that read Parameter Store, for which there is a change set

    # A changed property updates its stack only. The other change is refused: an account has at most one OIDC provider
    # for GitHub, and in this account another stack's exists.
    stray = boto3.client("iam").create_open_id_connect_provider(Url=GITHUB, ThumbprintList=["f" * 40])
    project.write(vcpus=128, more=RELEASE)
    failed = project.deploy()
    output = failed.stdout + failed.stderr
    assert failed.returncode != 0
    assert re.search(r"CREATE_FAILED\s*\| AWS::IAM::OIDCProvider", output), output
    assert "EntityAlreadyExists" in output
    assert states()["cycle-release"] == "ROLLBACK_COMPLETE"

    # The obstacle is removed, and the same command completes the deployment.
    boto3.client("iam").delete_open_id_connect_provider(OpenIDConnectProviderArn=stray["OpenIDConnectProviderArn"])
    succeeded(project.deploy_again())
    environments = boto3.client("batch").describe_compute_environments()["computeEnvironments"]
    assert {environment["computeResources"]["maxvCpus"] for environment in environments} == {
        128,
        256,
    }  # the farm's, for two trn1
    assert states()["cycle-release"] == "CREATE_COMPLETE"
    assert states()["cycle-network"] == "CREATE_COMPLETE"  # unchanged
    assert [str(entry) for entry in census(REGION)] == []

    back_to_nothing(project)
    assert states() == {}
    assert inventory(REGION) == before


def back_to_nothing(project: Project) -> None:
    """Tear down as docs/guides/deleting.md describes: one command for hourly costs, by hand for stored artifacts."""
    succeeded(project.destroy("cycle-network"))  # with its content
    assert set(states()) == {"CDKToolkit", "cycle-release", "cycle-storage"}

    cloudformation = boto3.client("cloudformation")
    with pytest.raises(ClientError, match="TerminationProtection"):
        cloudformation.delete_stack(StackName="cycle-storage")
    physical_ids = _of("cycle-storage")
    cloudformation.update_termination_protection(StackName="cycle-storage", EnableTerminationProtection=False)
    succeeded(project.destroy("--all"))
    assert set(states()) == {"CDKToolkit"}
    assert "s3 " + physical_ids["AWS::S3::Bucket"][0] in inventory(REGION)  # the artifacts are still there
    _remove(physical_ids)

    physical_ids = _of("CDKToolkit")
    cloudformation.delete_stack(StackName="CDKToolkit")
    _remove(physical_ids)


def _of(stack: str) -> dict[str, list[str]]:
    """The physical ids of a stack's resources, by type."""
    document: dict[str, list[str]] = {}
    for stack_resource in boto3.client("cloudformation").describe_stack_resources(StackName=stack)["StackResources"]:
        document.setdefault(stack_resource["ResourceType"], []).append(stack_resource["PhysicalResourceId"])
    return document


def _remove(physical_ids: dict[str, list[str]]) -> None:
    """Remove the retained resources of a stack. A bucket with versions is empty when its versions are deleted."""
    s3, ecr, kms = boto3.resource("s3"), boto3.client("ecr"), boto3.client("kms")
    there = inventory(REGION)
    for name in physical_ids.get("AWS::S3::Bucket", []):
        if f"s3 {name}" in there:
            s3.Bucket(name).object_versions.delete()
            s3.Bucket(name).delete()
    for name in physical_ids.get("AWS::ECR::Repository", []):
        if f"ecr {name}" in there:
            ecr.delete_repository(repositoryName=name, force=True)
    for key in physical_ids.get("AWS::KMS::Key", []):
        if f"kms {key}" in there:
            kms.schedule_key_deletion(KeyId=key, PendingWindowInDays=7)
