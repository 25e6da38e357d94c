"""The build farm: its resources, the permissions of its jobs, and deletion without remains."""

from dataclasses import dataclass
from typing import Any

import boto3
import pytest
from aws_cdk import RemovalPolicy

from nxpipe.pipeline.config.cloud import ClosedNetwork, Farm, Release
from nxpipe.stacks.build_farm import FarmStack
from nxpipe.stacks.iam import ReleaseStack
from nxpipe.stacks.names import PROJECT_TAG
from nxpipe.stacks.network import NetworkStack
from nxpipe.stacks.storage import StoreStack
from tests.localaws.census import census
from tests.stacks.local import ACCOUNT, HERE, REGION, deploy, destroy, new_app, outputs, template_of
from tests.stacks.permissions import allowed, statements_of, trust_of

ASKED_FOR = Farm(max_vcpus=128, image=f"{ACCOUNT}.dkr.ecr.us-east-2.amazonaws.com/nxpipe@sha256:{'0' * 64}")


@dataclass(frozen=True)
class Made:
    network: NetworkStack
    store: StoreStack
    farm: FarmStack
    release: ReleaseStack | None


def make(asked: Farm = ASKED_FOR, release: Release | None = None) -> Made:
    app = new_app()
    zones = ("us-east-2a", "us-east-2b")
    network = NetworkStack(app, "demo-network", project="demo", network=ClosedNetwork(), zones=zones, env=HERE)
    store = StoreStack(app, "demo-store", project="demo", env=HERE, removal_policy=RemovalPolicy.DESTROY)
    submits = (
        None
        if release is None
        else ReleaseStack(
            app, "demo-release", project="demo", release=release, store=store.handle, prefix="models/", env=HERE
        )
    )
    farm = FarmStack(
        app,
        "demo-build-farm",
        project="demo",
        farm=asked,
        network=network.handle,
        store=store.handle,
        prefix="models/",
        release=submits.handle if submits else None,
        env=HERE,
    )
    return Made(network, store, farm, submits)


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    return template_of(make().farm)


def of_type(template: dict[str, Any], type_: str) -> dict[str, Any]:
    (found,) = [resource["Properties"] for resource in template["Resources"].values() if resource["Type"] == type_]
    return dict(found)


def environment() -> dict[str, Any]:
    (found,) = boto3.client("batch").describe_compute_environments()["computeEnvironments"]
    return dict(found)


def jobs() -> list[dict[str, Any]]:
    return list(boto3.client("batch").describe_job_definitions(status="ACTIVE")["jobDefinitions"])


def test_machines_come_and_go_with_jobs_and_have_no_accelerator(template: dict[str, Any]) -> None:
    resources = of_type(template, "AWS::Batch::ComputeEnvironment")["ComputeResources"]
    assert resources["Type"] == "SPOT"
    assert resources["MinvCpus"] == 0
    assert "DesiredvCpus" not in resources  # Batch's own: a deployment must not send its machines home
    assert not [
        instance_type
        for instance_type in resources["InstanceTypes"]
        if instance_type.startswith(("inf", "trn", "g", "p"))
    ]


def test_a_change_of_the_machines_lets_jobs_that_run_come_to_their_end(template: dict[str, Any]) -> None:
    environment = of_type(template, "AWS::Batch::ComputeEnvironment")
    assert environment["ReplaceComputeEnvironment"] is False
    longest = of_type(template, "AWS::Batch::JobDefinition")["Timeout"]["AttemptDurationSeconds"]
    assert environment["UpdatePolicy"]["TerminateJobsOnUpdate"] is False
    assert environment["UpdatePolicy"]["JobExecutionTimeoutMinutes"] * 60 >= longest


def test_hosts_are_encrypted_speak_imdsv2_and_hide_their_role_from_jobs(template: dict[str, Any]) -> None:
    data = of_type(template, "AWS::EC2::LaunchTemplate")["LaunchTemplateData"]
    assert data["MetadataOptions"] == {
        "HttpEndpoint": "enabled",
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": 1,
    }
    assert all(block_device_mapping["Ebs"]["Encrypted"] for block_device_mapping in data["BlockDeviceMappings"])


def test_volumes_and_network_interfaces_of_builders_count_in_the_projects_budget(template: dict[str, Any]) -> None:
    data = of_type(template, "AWS::EC2::LaunchTemplate")["LaunchTemplateData"]
    tagged = {each["ResourceType"]: each["Tags"] for each in data["TagSpecifications"]}
    assert set(tagged) == {"instance", "volume", "network-interface"}
    assert all({"Key": PROJECT_TAG, "Value": "demo"} in tags for tags in tagged.values())


def test_nobody_may_call_a_builder(template: dict[str, Any]) -> None:
    group = of_type(template, "AWS::EC2::SecurityGroup")
    assert "SecurityGroupIngress" not in group
    assert [(entry["FromPort"], entry["ToPort"]) for entry in group["SecurityGroupEgress"]] == [(443, 443)]
    assert not [
        resource for resource in template["Resources"].values() if resource["Type"] == "AWS::EC2::SecurityGroupIngress"
    ]


def test_only_an_interruption_is_tried_again(template: dict[str, Any]) -> None:
    retried = of_type(template, "AWS::Batch::JobDefinition")["RetryStrategy"]
    assert retried["Attempts"] > 1
    assert retried["EvaluateOnExit"] == [
        {"Action": "RETRY", "OnStatusReason": "Host EC2*"},
        {"Action": "EXIT", "OnReason": "*"},
    ]


def test_deployed_a_job_publishes_under_the_prefix_and_deletes_nothing(aws: None) -> None:
    made = make()
    deploy(made.network, made.store, made.farm)
    (job,) = jobs()
    container = job["containerProperties"]
    bucket = outputs(made.store)["BucketName"]
    assert container["image"] == ASKED_FOR.image
    assert {"name": "NXPIPE_STORE_URL", "value": f"s3://{bucket}/models/"} in container["environment"]
    role = container["jobRoleArn"].rpartition("/")[2]
    may, objects = statements_of(role), f"arn:aws:s3:::{bucket}/models"
    assert allowed(may, "s3:PutObject", f"{objects}/cas/sha256/x", {"s3:if-none-match": "*"})
    assert not allowed(may, "s3:PutObject", f"{objects}/cas/sha256/x")
    assert allowed(may, "s3:PutObject", f"{objects}/ac/x", {"s3:if-none-match": "*"})
    for action in ("s3:DeleteObject", "s3:DeleteObjectVersion"):
        assert not allowed(may, action, f"{objects}/cas/sha256/x")
    assert not allowed(may, "s3:PutObject", f"{objects}/channels/production/head")
    trusted = trust_of(role)
    assert allowed(trusted, "sts:AssumeRole", "", {"aws:SourceAccount": ACCOUNT})
    assert not allowed(trusted, "sts:AssumeRole", "", {"aws:SourceAccount": "999999999999"})
    (queue,) = boto3.client("batch").describe_job_queues()["jobQueues"]
    assert queue["jobQueueName"] == "demo-builds"
    assert [entry["computeEnvironment"] for entry in queue["computeEnvironmentOrder"]] == [
        environment()["computeEnvironmentArn"]
    ]


def test_a_change_is_made_in_place_and_destroying_leaves_nothing(aws: None) -> None:
    made = make()
    deploy(made.network, made.store, made.farm)
    assert census(REGION) == []
    before, (job,) = environment(), jobs()
    other = f"{ACCOUNT}.dkr.ecr.us-east-2.amazonaws.com/nxpipe@sha256:{'1' * 64}"
    changed = make(Farm(max_vcpus=512, image=other))
    deploy(changed.farm)
    assert census(REGION) == []
    assert environment()["computeEnvironmentArn"] == before["computeEnvironmentArn"]
    assert environment()["computeResources"]["maxvCpus"] == 512
    (now,) = jobs()
    assert (now["containerProperties"]["image"], now["revision"]) == (other, job["revision"] + 1)
    destroy(changed.farm)
    batch = boto3.client("batch")
    assert batch.describe_compute_environments()["computeEnvironments"] == []
    assert batch.describe_job_queues()["jobQueues"] == []
    assert jobs() == []
    assert boto3.client("iam").list_instance_profiles()["InstanceProfiles"] == []
    assert boto3.client("logs").describe_log_groups(logGroupNamePrefix="/nxpipe/demo/builds")["logGroups"] == []
