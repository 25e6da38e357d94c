"""The compile cache: one way of access, and no failure without it."""

import json
from functools import partial

import boto3
import pytest
from aws_cdk import RemovalPolicy, Stack, aws_iam
from aws_cdk.assertions import Template

from nxpipe.pipeline.config.cloud import ClosedNetwork
from nxpipe.stacks.iam import mount_cache
from nxpipe.stacks.network import NetworkStack
from nxpipe.stacks.storage import CacheStack, StoreStack
from tests.stacks.local import HERE, deploy, destroy, new_app, outputs, resources
from tests.stacks.permissions import Statement, allowed, statements_of

ZONES = ("us-east-2a", "us-east-2b")
OLD, NEW = "2.31.0", "2.32.0"


def made(*versions: str) -> tuple[NetworkStack, StoreStack, CacheStack]:
    app = new_app()
    network = NetworkStack(app, "demo-network", project="demo", network=ClosedNetwork(), zones=ZONES, env=HERE)
    store = StoreStack(app, "demo-storage", project="demo", removal_policy=RemovalPolicy.DESTROY, env=HERE)
    cache = CacheStack(
        app,
        "demo-cache",
        project="demo",
        network=network.handle,
        store=store.handle,
        versions=versions,
        env=HERE,
    )
    return network, store, cache


@pytest.fixture(scope="module")
def template() -> Template:
    return Template.from_stack(made(OLD, NEW)[2])


def test_what_is_cached_is_encrypted_with_the_key_of_the_artifacts(template: Template) -> None:
    (cache,) = template.find_resources("AWS::EFS::FileSystem").values()
    assert cache["Properties"]["Encrypted"] is True
    assert cache["Properties"]["KmsKeyId"]["Fn::ImportValue"].startswith("demo-storage:ExportsOutputFnGetAttKey")


def test_each_zone_has_a_mount_target_and_nothing_outside_of_the_network_reaches_one(template: Template) -> None:
    template.resource_count_is("AWS::EFS::MountTarget", len(ZONES))
    (group,) = template.find_resources("AWS::EC2::SecurityGroup").values()
    (rule,) = group["Properties"]["SecurityGroupIngress"]
    assert (rule["CidrIp"], rule["FromPort"], rule["ToPort"]) == ("10.20.0.0/16", 2049, 2049)


def test_destroying_the_stack_leaves_nothing_behind_for_the_bucket_has_it_all(template: Template) -> None:
    template.all_resources("AWS::EFS::FileSystem", {"DeletionPolicy": "Delete"})


def policy_of(file_system: str) -> list[Statement]:
    text = boto3.client("efs").describe_file_system_policy(FileSystemId=file_system)["Policy"]
    found: list[Statement] = json.loads(text)["Statement"]
    return found


def test_a_role_mounts_its_version_with_tls_and_nobody_mounts_in_another_way(aws: None) -> None:
    network, store, cache = made(OLD, NEW)
    fleet = Stack(cache.node.root, "demo-fleet", env=HERE)
    role = aws_iam.Role(fleet, "Role", assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"))
    mount_cache(cache.handle, NEW, role)
    deploy(network, store, cache, fleet)
    efs = boto3.client("efs")
    id_ = outputs(cache)["FileSystemId"]
    (told,) = efs.describe_file_systems(FileSystemId=id_)["FileSystems"]
    points = {
        access_point["RootDirectory"]["Path"]: access_point
        for access_point in efs.describe_access_points(FileSystemId=id_)["AccessPoints"]
    }
    assert set(points) == {f"/{OLD}", f"/{NEW}"}
    statements = [*statements_of(resources(fleet, "AWS::IAM::Role")[0]), *policy_of(id_)]
    may = partial(allowed, statements, "elasticfilesystem:ClientMount", told["FileSystemArn"])
    right = {
        "aws:SecureTransport": "true",
        "elasticfilesystem:AccessPointArn": points[f"/{NEW}"]["AccessPointArn"],
        "elasticfilesystem:AccessedViaMountTarget": "true",
    }
    assert may(right)
    assert not may({**right, "aws:SecureTransport": "false"})
    assert not may({**right, "elasticfilesystem:AccessPointArn": points[f"/{OLD}"]["AccessPointArn"]})
    assert not may({key: value for key, value in right.items() if key != "elasticfilesystem:AccessPointArn"})
    assert not allowed(policy_of(id_), "elasticfilesystem:ClientMount", told["FileSystemArn"], right)


def test_a_new_version_gets_a_part_of_its_own_and_the_file_system_stays(aws: None) -> None:
    network, store, cache = made(OLD)
    deploy(network, store, cache)
    before, old = outputs(cache)["FileSystemId"], resources(cache, "AWS::EFS::AccessPoint")
    *_, changed = made(NEW, OLD)
    deploy(changed)
    assert outputs(changed)["FileSystemId"] == before
    assert set(old) < set(resources(changed, "AWS::EFS::AccessPoint"))
    destroy(changed, network)
    assert boto3.client("efs").describe_file_systems()["FileSystems"] == []
