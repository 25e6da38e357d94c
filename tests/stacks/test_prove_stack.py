"""Queues of proofs on devices: their instances and jobs, the permissions of a job and of a submitter, deletion."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from aws_cdk import RemovalPolicy

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config import ConfigInvalid, load_config
from nxpipe.pipeline.config.cloud import ClosedNetwork, Prove, Release
from nxpipe.pipeline.fleet.batch_prove import find_queue
from nxpipe.stacks.iam import ReleaseStack
from nxpipe.stacks.network import NetworkStack
from nxpipe.stacks.prove import ProveStack
from nxpipe.stacks.storage import StoreStack
from tests.localaws.census import census
from tests.stacks.local import ACCOUNT, HERE, REGION, deploy, destroy, new_app, outputs, template_of
from tests.stacks.permissions import allowed, statements_of

IMAGE = f"{ACCOUNT}.dkr.ecr.us-east-2.amazonaws.com/prove@sha256:{'0' * 64}"
ASKED_FOR = Prove(image=IMAGE, instance_types=("inf2.xlarge", "trn1.32xlarge"))


@dataclass(frozen=True)
class Made:
    network: NetworkStack
    store: StoreStack
    release: ReleaseStack
    prove: ProveStack


def make(asked: Prove = ASKED_FOR) -> Made:
    app = new_app()
    zones = ("us-east-2a", "us-east-2b")
    network = NetworkStack(app, "demo-network", project="demo", network=ClosedNetwork(), zones=zones, env=HERE)
    store = StoreStack(app, "demo-store", project="demo", env=HERE, removal_policy=RemovalPolicy.DESTROY)
    named = Release(repository="example/models")
    release = ReleaseStack(
        app, "demo-release", project="demo", release=named, store=store.handle, prefix="models/", env=HERE
    )
    prove = ProveStack(
        app,
        "demo-prove",
        project="demo",
        prove=asked,
        image="ami-0123456789abcdef0",
        network=network.handle,
        store=store.handle,
        prefix="models/",
        release=release.handle,
        env=HERE,
    )
    return Made(network, store, release, prove)


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    return template_of(make().prove)


def of_type(template: dict[str, Any], type_: str) -> list[dict[str, Any]]:
    return [dict(each["Properties"]) for each in template["Resources"].values() if each["Type"] == type_]


def test_each_type_has_a_queue_with_at_most_one_instance_that_ends_with_its_job(template: dict[str, Any]) -> None:
    environments = of_type(template, "AWS::Batch::ComputeEnvironment")
    found = {each["ComputeResources"]["InstanceTypes"][0]: each["ComputeResources"] for each in environments}
    assert set(found) == {"inf2.xlarge", "trn1.32xlarge"}
    for name, resources in found.items():
        assert len(resources["InstanceTypes"]) == 1
        assert (resources["MinvCpus"], resources["MaxvCpus"]) == (0, INSTANCES[name].vcpus)
        assert "DesiredvCpus" not in resources
    queues = of_type(template, "AWS::Batch::JobQueue")
    assert {each["JobQueueName"] for each in queues} == {"demo-prove-inf2-xlarge", "demo-prove-trn1-32xlarge"}


def test_a_job_has_all_of_its_instance_so_that_no_two_run_at_once(template: dict[str, Any]) -> None:
    jobs = {each["JobDefinitionName"]: each for each in of_type(template, "AWS::Batch::JobDefinition")}
    for name in ASKED_FOR.instance_types:
        row, job = INSTANCES[name], jobs[f"demo-prove-{name.replace('.', '-')}"]
        container = job["ContainerProperties"]
        needs = {each["Type"]: int(each["Value"]) for each in container["ResourceRequirements"]}
        assert needs["VCPU"] == row.vcpus
        assert 0.9 * row.host_memory_gib * 1024 < needs["MEMORY"] < row.host_memory_gib * 1024
        devices = [each["HostPath"] for each in container["LinuxParameters"]["Devices"]]
        assert devices == [f"/dev/neuron{chip}" for chip in range(row.chips)]
        assert (container["Image"], container["Privileged"]) == (IMAGE, False)
        assert job["Timeout"]["AttemptDurationSeconds"] == 3600
        assert job["RetryStrategy"]["EvaluateOnExit"] == [
            {"Action": "RETRY", "OnStatusReason": "Host EC2*"},
            {"Action": "EXIT", "OnReason": "*"},
        ]


def test_instances_are_encrypted_speak_imdsv2_and_nobody_may_call_them(template: dict[str, Any]) -> None:
    (launch,) = of_type(template, "AWS::EC2::LaunchTemplate")
    data = launch["LaunchTemplateData"]
    assert data["ImageId"] == "ami-0123456789abcdef0"
    assert (data["MetadataOptions"]["HttpTokens"], data["MetadataOptions"]["HttpPutResponseHopLimit"]) == (
        "required",
        1,
    )
    assert all(each["Ebs"]["Encrypted"] for each in data["BlockDeviceMappings"])
    (group,) = of_type(template, "AWS::EC2::SecurityGroup")
    assert "SecurityGroupIngress" not in group
    assert [(each["FromPort"], each["ToPort"]) for each in group["SecurityGroupEgress"]] == [(443, 443)]
    (log,) = of_type(template, "AWS::Logs::LogGroup")
    assert (log["LogGroupName"], "RetentionInDays" in log) == ("/nxpipe/demo/proofs", True)


def test_spot_instances_are_asked_for_by_capacity() -> None:
    made = template_of(make(ASKED_FOR.model_copy(update={"capacity": "spot"})).prove)
    kinds = {
        (each["ComputeResources"]["Type"], each["ComputeResources"]["AllocationStrategy"])
        for each in of_type(made, "AWS::Batch::ComputeEnvironment")
    }
    assert kinds == {("SPOT", "SPOT_CAPACITY_OPTIMIZED")}


@pytest.mark.sample(3)
def test_deployed_a_job_adds_evidence_and_changes_nothing_else(aws: None) -> None:
    made = make()
    deploy(made.network, made.store, made.release, made.prove)
    assert census(REGION) == []
    bucket = outputs(made.store)["BucketName"]
    queue = find_queue("demo", "inf2.xlarge", REGION)
    assert (queue.store, queue.log_group, queue.seconds) == (f"s3://{bucket}/models/", "/nxpipe/demo/proofs", 3600)
    (job,) = boto3.client("batch").describe_job_definitions(jobDefinitions=[queue.definition])["jobDefinitions"]
    may = statements_of(job["containerProperties"]["jobRoleArn"].rpartition("/")[2])
    objects = f"arn:aws:s3:::{bucket}/models"
    once = {"s3:if-none-match": "*"}
    for path in ("evidence/x/y", "cas/sha256/x"):  # and the outputs that evidence names
        assert allowed(may, "s3:PutObject", f"{objects}/{path}", once)
        assert not allowed(may, "s3:PutObject", f"{objects}/{path}")
        assert allowed(may, "s3:GetObject", f"{objects}/{path}")
    for path in ("ac/x", "sig/x", "channels/production/head", "index/x", "leases/x", "parts/x"):
        assert not allowed(may, "s3:PutObject", f"{objects}/{path}", once)
    for action in ("s3:DeleteObject", "s3:DeleteObjectVersion"):
        assert not allowed(may, action, f"{objects}/evidence/x/y")
    submits = statements_of(outputs(made.release)["RoleArn"].rpartition("/")[2])
    for resource in (queue.queue, queue.definition):
        assert allowed(submits, "batch:SubmitJob", resource)
    assert not allowed(submits, "batch:SubmitJob", queue.queue.replace("demo-prove", "other-prove"))
    destroy(made.prove)
    batch = boto3.client("batch")
    assert batch.describe_compute_environments()["computeEnvironments"] == []
    assert batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('image = "prove:latest"', 'prove.image: found "prove:latest"; expected an image with its digest'),
        ('instance_types = ["m7i.large"]', 'prove.instance_types[0]: found "m7i.large"; expected'),
        ("instance_types = []", "prove.instance_types: found an empty list; expected"),
        ('time_limit = "2d"', 'prove.time_limit: found "2d"; expected'),
        ('capacity = "reserved"', 'prove.capacity: found "reserved"; expected one of "on-demand", "spot"'),
        ("devices = 1", "prove.devices: found"),
        ('instance_types = ["trn2u.48xlarge"]\ncapacity = "spot"', "EC2 sells no trn2u.48xlarge on the spot market"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_what_is_allowed(line: str, said: str, tmp_path: Path) -> None:
    path, image = tmp_path / "nxpipe.toml", "" if line.startswith("image") else f'image = "{IMAGE}"\n'
    path.write_text(f'[project]\nname = "demo"\nregion = "{REGION}"\n[prove]\n{image}{line}\n')
    with pytest.raises(ConfigInvalid) as refused:
        load_config(path, {})
    (sentence,) = refused.value.lines
    assert said in sentence
