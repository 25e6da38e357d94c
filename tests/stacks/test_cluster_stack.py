"""A cluster: access for listed principals only, nodes as configured, and deletion without remains."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from aws_cdk import Validations
from cdk_nag import AwsSolutionsChecks, NIST80053R5Checks

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config import ConfigInvalid
from nxpipe.pipeline.config.capacity import DRAINED_BEFORE_THE_END
from nxpipe.pipeline.config.cluster import SYSTEM
from nxpipe.pipeline.config.locks import ADDONS
from nxpipe.pipeline.config.prices import Price, Prices, Purchase
from nxpipe.stacks.app import add_stacks, deployable
from nxpipe.stacks.lint.costs import estimate
from nxpipe.stacks.lint.finding import Facts, Window
from nxpipe.stacks.lint.template import Templates, read
from nxpipe.stacks.lint.validation import ACKNOWLEDGED, Guards
from nxpipe.stacks.names import NAMESPACE, SERVICE_ACCOUNT
from nxpipe.stacks.network import Endpoints
from tests.localaws.census import census
from tests.stacks.cluster_world import ADMIN, BLOCK, LOCK, SERVE, TRAIN, World, make
from tests.stacks.linting import complaints
from tests.stacks.local import REGION, deploy, destroy, new_app, outputs, template_of
from tests.stacks.permissions import allowed, statements_of, trust_of

RESERVED = {"kind": "reservation", "id": "cr-0a1b2c3d4e5f60718"}
BLOCKED = TRAIN | {"name": "block", "capacity": BLOCK, "size": {"min": 0, "max": 3}}


def of_type(template: dict[str, Any], type_: str) -> dict[str, dict[str, Any]]:
    return {id_: resource["Properties"] for id_, resource in template["Resources"].items() if resource["Type"] == type_}


def only(template: dict[str, Any], type_: str) -> dict[str, Any]:
    (found,) = of_type(template, type_).values()
    return found


def group(template: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (entry for entry in of_type(template, "AWS::EKS::Nodegroup").values() if entry["NodegroupName"] == name)
    return found


def launched(template: dict[str, Any], name: str) -> dict[str, Any]:
    """The launch data of a group's nodes."""
    id_ = group(template, name)["LaunchTemplate"]["Id"]["Ref"]
    data: dict[str, Any] = of_type(template, "AWS::EC2::LaunchTemplate")[id_]["LaunchTemplateData"]
    return data


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return template_of(make(SERVE, TRAIN, BLOCKED).cluster)


def test_the_api_is_closed_and_its_secrets_are_under_the_projects_key(whole: dict[str, Any]) -> None:
    cluster = only(whole, "AWS::EKS::Cluster")
    access = cluster["ResourcesVpcConfig"]
    assert (access["EndpointPrivateAccess"], access["EndpointPublicAccess"]) == (True, False)
    assert "PublicAccessCidrs" not in access
    assert len(access["SubnetIds"]) == 2
    assert cluster["EncryptionConfig"][0]["Resources"] == ["secrets"]
    assert "OutputFnGetAttKey" in json.dumps(cluster["EncryptionConfig"][0]["Provider"])
    assert len(cluster["Logging"]["ClusterLogging"]["EnabledTypes"]) == 5
    assert cluster["AccessConfig"] == {
        "AuthenticationMode": "API",
        "BootstrapClusterCreatorAdminPermissions": False,
    }
    assert only(whole, "AWS::EKS::AccessEntry")["PrincipalArn"] == ADMIN


def test_listed_addresses_may_call_the_api_from_outside() -> None:
    access = only(template_of(make(public=["203.0.113.0/24"]).cluster), "AWS::EKS::Cluster")["ResourcesVpcConfig"]
    assert (access["EndpointPrivateAccess"], access["EndpointPublicAccess"]) == (True, True)
    assert access["PublicAccessCidrs"] == ["203.0.113.0/24"]


def test_nothing_in_the_stack_runs_code_or_applies_objects(whole: dict[str, Any]) -> None:
    types = {resource["Type"] for resource in whole["Resources"].values()}
    assert not [entry for entry in types if "Lambda" in entry or "Custom" in entry]


def test_add_ons_and_releases_are_those_of_the_lock(whole: dict[str, Any]) -> None:
    made = of_type(whole, "AWS::EKS::Addon").values()
    assert {entry["AddonName"]: entry["AddonVersion"] for entry in made} == LOCK.addons
    assert LOCK.addons.keys() == set(ADDONS)
    kinds = {name: (group(whole, name)["AmiType"], group(whole, name)["ReleaseVersion"]) for name in (SYSTEM, "train")}
    assert kinds == {
        SYSTEM: ("AL2023_x86_64_STANDARD", LOCK.system.release),
        "train": ("AL2023_x86_64_NEURON", LOCK.neuron.release),
    }


def test_nodes_wait_for_what_makes_them_ready_and_the_rest_waits_for_nodes(whole: dict[str, Any]) -> None:
    resources = whole["Resources"]
    addons = {
        resource["Properties"]["AddonName"]: id_
        for id_, resource in resources.items()
        if resource["Type"] == "AWS::EKS::Addon"
    }
    system = group(whole, SYSTEM)
    (id_,) = (value for value, resource in resources.items() if resource["Properties"] is system)
    assert {addons[entry] for entry in ("eks-pod-identity-agent", "kube-proxy", "vpc-cni")} <= set(
        resources[id_]["DependsOn"]
    )
    assert id_ in resources[addons["coredns"]]["DependsOn"]


def test_failures_of_accelerators_are_reported_and_their_nodes_are_repaired(whole: dict[str, Any]) -> None:
    repaired = [entry["NodeRepairConfig"] for entry in of_type(whole, "AWS::EKS::Nodegroup").values()]
    assert repaired == [{"Enabled": True}] * 4
    assert "eks-node-monitoring-agent" in {entry["AddonName"] for entry in of_type(whole, "AWS::EKS::Addon").values()}


def test_logical_cores_are_configured_by_the_nodes_user_data(whole: dict[str, Any]) -> None:
    data = launched(template_of(make(TRAIN | {"instance_type": "trn2.48xlarge", "lnc": 1}).cluster), "train")
    text = str(data["UserData"]["Fn::Base64"])
    assert text.startswith("MIME-Version: 1.0\n"), "EKS adds its part to nothing else"
    assert "NEURON_LOGICAL_NC_CONFIG=1" in text
    assert "UserData" not in launched(whole, "train")


def test_nodes_are_launched_as_their_row_of_the_catalogue_says() -> None:
    types = {f"nodes-{place}": name for place, (name, row) in enumerate(INSTANCES.items()) if row.servers == 1}
    template = template_of(
        make(*(TRAIN | {"name": name, "instance_type": type_} for name, type_ in types.items())).cluster
    )
    for name, type_ in types.items():
        data, cards = launched(template, name), INSTANCES[type_].efa_interfaces or 0
        interfaces = data.get("NetworkInterfaces", [])
        assert data["InstanceType"] == type_
        assert [interface["NetworkCardIndex"] for interface in interfaces] == list(range(cards))
        assert all(len(interface["Groups"]) == 2 and "SubnetId" not in interface for interface in interfaces)
        assert ("SecurityGroupIds" in data, "Placement" in data) == (cards == 0, cards > 0)
        assert data["MetadataOptions"]["HttpTokens"] == "required"
        assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 2
        assert not {"IamInstanceProfile", "ImageId"} & data.keys(), "EKS brings both"
        nodes = group(template, name)
        assert len(nodes["Subnets"]) == 1
        assert nodes["Taints"] == [{"Key": "aws.amazon.com/neuron", "Value": "true", "Effect": "NO_SCHEDULE"}]


def test_a_group_says_how_its_nodes_are_bought() -> None:
    bought: dict[str, tuple[dict[str, str], str, bool]] = {
        "asked": ({"kind": "on-demand"}, "ON_DEMAND", True),
        "apart": ({"kind": "on-demand", "placement": "none"}, "ON_DEMAND", False),
        "spare": ({"kind": "spot"}, "SPOT", True),
        "kept": (RESERVED, "ON_DEMAND", False),
        "near": (RESERVED | {"placement": "cluster"}, "ON_DEMAND", True),
    }
    groups = [TRAIN | {"name": name, "capacity": capacity} for name, (capacity, _, _) in bought.items()]
    template = template_of(make(*groups).cluster)
    for name, (capacity, kind, near) in bought.items():
        data = launched(template, name)
        assert group(template, name)["CapacityType"] == kind
        assert ("Placement" in data) == near
        assert "InstanceMarketOptions" not in data
        assert ("CapacityReservationSpecification" in data) == ("id" in capacity)


def test_a_blocks_group_is_empty_filled_at_its_start_and_emptied_45_minutes_before_its_end(
    whole: dict[str, Any],
) -> None:
    template = whole
    nodes, data = group(template, "block"), launched(template, "block")
    assert nodes["CapacityType"] == "CAPACITY_BLOCK"
    assert nodes["ScalingConfig"] == {"MinSize": 0, "DesiredSize": 0, "MaxSize": 3}
    assert data["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    assert "Placement" not in data
    result = {
        entry["Name"]: (
            entry["ScheduleExpression"],
            json.loads(entry["Target"]["Input"])["ScalingConfig"]["DesiredSize"],
        )
        for entry in of_type(template, "AWS::Scheduler::Schedule").values()
    }
    assert result == {
        "demo-nodes-block-opens": ("at(2098-11-01T11:30:00)", 3),
        "demo-nodes-block-drains": ("at(2098-11-08T10:45:00)", 0),
    }


@pytest.mark.parametrize(
    ("now", "desired", "names"),
    [
        ("2098-11-01T11:30:00Z", 3, {"demo-nodes-block-drains"}),
        ("2098-11-08T10:45:00Z", 0, set()),
    ],
)
def test_a_group_made_in_an_open_block_is_full_and_nothing_is_scheduled_in_the_past(
    monkeypatch: pytest.MonkeyPatch, now: str, desired: int, names: set[str]
) -> None:
    for module in ("project", "eks", "capacity_block"):
        monkeypatch.setattr(f"nxpipe.stacks.{module}.current_time", lambda: datetime.fromisoformat(now))
    template = template_of(make(BLOCKED).cluster)
    assert group(template, "block")["ScalingConfig"] == {"MinSize": 0, "DesiredSize": desired, "MaxSize": 3}
    assert {entry["Name"] for entry in of_type(template, "AWS::Scheduler::Schedule").values()} == names


def test_a_closed_network_leads_to_what_nodes_and_pods_call_and_every_judge_is_content() -> None:
    """Our rules, both packs of cdk-nag, and cfn-lint."""
    world = make(SERVE, TRAIN, BLOCKED, public=["203.0.113.0/24"])
    app = world.cluster.node.root
    network = world.network
    callers = [world.store, world.cache, world.cluster]
    endpoints = Endpoints(network, "Endpoints", network=network.handle, callers=callers)
    window = Window(BLOCK["start"], BLOCK["end"] - DRAINED_BEFORE_THE_END)
    facts = Facts(blocks={BLOCK["id"]: window}, images={})
    packs = (AwsSolutionsChecks(app), NIST80053R5Checks(app))
    Validations.of(app).add_plugins(Guards(facts, ACKNOWLEDGED, packs))
    assembly = app.synth()
    led = {child.node.id for child in endpoints.node.children} - {"Group"}
    assert led == {"ec2", "ecr.api", "ecr.dkr", "eks", "eks-auth", "elasticfilesystem", "s3"}
    assert complaints(assembly.get_stack_by_name("demo-cluster").template, REGION) == []


def test_an_estimate_counts_nodes_at_their_desired_sizes_and_the_control_plane(
    whole: dict[str, Any],
) -> None:
    known = {"inf2.xlarge": 3.0, "m7i.large": 0.5, "trn1.32xlarge": 100.0, "AWS::EKS::Cluster": 0.25}
    date = BLOCK["start"].date()
    prices = Prices({(REGION, what, Purchase.ON_DEMAND): Price(hourly, date, "test") for what, hourly in known.items()})
    found = estimate(Templates((read("demo-cluster", whole, REGION),)), prices)
    assert found.hourly == 1 * 3.0 + 2 * 0.5 + 0.25
    assert "a capacity block of trn1.32xlarge" in str(found)


def role_of(what: str) -> str:
    roles = boto3.client("iam").list_roles(PathPrefix="/nxpipe/")["Roles"]
    (found,) = (role["RoleName"] for role in roles if role.get("Description") == what)
    return str(found)


def pods_read_artifacts_and_nodes_do_not(made: World) -> None:
    artifact = f"arn:aws:s3:::{outputs(made.store)['BucketName']}/models/cas/sha256/x"
    reader, files = role_of("Reads artifacts in pods"), role_of("Mounts the compile cache in pods")
    may = statements_of(reader)
    assert allowed(may, "s3:GetObject", artifact)
    assert not allowed(may, "s3:GetObject", artifact.replace("models", "elsewhere"))
    assert not allowed(may, "s3:PutObject", artifact)
    assert not allowed(statements_of(role_of("Nodes of demo")), "s3:GetObject", artifact)
    assert any("elasticfilesystem:ClientMount" in entry["Action"] for entry in statements_of(files))
    for name in (reader, files):
        (trust,) = trust_of(name)
        assert trust["Principal"] == {"Service": "pods.eks.amazonaws.com"}
        assert trust["Condition"]["ArnEquals"]["aws:SourceArn"].endswith(":cluster/demo")
    (identity,) = of_type(template_of(made.cluster), "AWS::EKS::PodIdentityAssociation").values()
    assert (identity["Namespace"], identity["ServiceAccount"]) == (NAMESPACE, SERVICE_ACCOUNT)


_TOML = f"""
[project]
name = "demo"
region = "{REGION}"
account = "123456789012"
[cluster]
kubernetes = "1.34"
admins = ["{ADMIN}"]
[[cluster.groups]]
name = "serve"
instance_type = "inf2.xlarge"
zone = "{REGION}a"
capacity = {{ kind = "spot" }}
size = {{ min = 1, max = 4 }}
"""


def test_a_project_of_nothing_but_a_cluster_has_a_network_and_a_cache_and_asks_for_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "nxpipe.toml"
    path.write_text(_TOML)
    config = deployable(path)
    with pytest.raises(ConfigInvalid, match=r"nxpipe\.cluster\.lock: found no such file.*nxpipe infra lock"):
        add_stacks(new_app(), config, tmp_path)
    (tmp_path / "nxpipe.cluster.lock").write_text(LOCK.text())
    app = new_app()
    add_stacks(app, config, tmp_path)
    assert [child.node.id for child in app.node.children] == [
        "demo-storage",
        "demo-network",
        "demo-cache",
        "demo-cluster",
    ]


def test_deployed_changed_and_destroyed_it_is_what_was_asked_for(aws: None) -> None:
    made = make()
    before = boto3.client("ec2").describe_launch_templates()["LaunchTemplates"]
    deploy(made.network, made.store, made.cache, made.cluster)
    assert census(REGION) == []
    eks, name = boto3.client("eks"), outputs(made.cluster)["ClusterName"]
    assert sorted(eks.list_nodegroups(clusterName=name)["nodegroups"]) == ["serve", SYSTEM, "train"]
    pods_read_artifacts_and_nodes_do_not(made)

    newer = LOCK.model_copy(update={"neuron": LOCK.neuron.model_copy(update={"release": "1.34.2-20261120"})})
    changed = make(SERVE | {"size": {"min": 2, "max": 4}}, lock=newer)
    deploy(changed.cluster)
    assert census(REGION) == []
    nodes = eks.describe_nodegroup(clusterName=name, nodegroupName="serve")["nodegroup"]
    assert (nodes["releaseVersion"], nodes["scalingConfig"]["desiredSize"]) == ("1.34.2-20261120", 2)
    assert sorted(eks.list_nodegroups(clusterName=name)["nodegroups"]) == ["serve", SYSTEM]

    destroy(changed.cluster)
    assert eks.list_clusters()["clusters"] == []
    assert boto3.client("logs").describe_log_groups(logGroupNamePrefix="/aws/eks/")["logGroups"] == []
    assert boto3.client("ec2").describe_launch_templates()["LaunchTemplates"] == before
    assert boto3.client("ec2").describe_placement_groups()["PlacementGroups"] == []
