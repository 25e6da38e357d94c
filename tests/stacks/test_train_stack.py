"""Capacity, network and schedule of a training fleet's nodes."""

import json
import subprocess
import sysconfig
from base64 import b64decode
from dataclasses import dataclass
from datetime import UTC, datetime
from email import message_from_bytes
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import boto3
import pytest
from aws_cdk import RemovalPolicy
from pydantic import ValidationError

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config import Config, Project, TrainingFleet
from nxpipe.pipeline.config.cloud import Budget, ClosedNetwork, Observe
from nxpipe.pipeline.config.load import check_placement
from nxpipe.pipeline.config.sections import Guards
from nxpipe.stacks.network import NetworkStack
from nxpipe.stacks.observability import ObserveStack
from nxpipe.stacks.storage import StoreStack
from nxpipe.stacks.training import TrainStack
from tests.localaws.census import census
from tests.stacks.local import ACCOUNT, HERE, REGION, deploy, destroy, new_app, outputs, template_of
from tests.stacks.permissions import allowed, statements_of

AMI = "ami-0a1b2c3d4e5f60718"
IMAGE = f"{ACCOUNT}.dkr.ecr.us-east-2.amazonaws.com/train@sha256:{'1' * 64}"
RESERVATION = {"kind": "reservation", "id": "cr-0a1b2c3d4e5f60718"}
BLOCK = {
    "kind": "capacity-block",
    "id": "cr-0a1b2c3d4e5f60718",
    "start": datetime(2098, 11, 1, 11, 30, tzinfo=UTC),
    "end": datetime(2098, 11, 8, 11, 30, tzinfo=UTC),
}


@dataclass(frozen=True)
class Made:
    network: NetworkStack
    store: StoreStack
    train: TrainStack


def fleet(**asked: Any) -> TrainingFleet:
    least = {
        "kind": "training",
        "name": "tune",
        "model": "bert",
        "channel": "next",
        "instance_types": ["trn1.32xlarge"],
        "zone": "us-east-2b",
        "capacity": {"kind": "on-demand"},
        "nodes": 4,
    }
    return TrainingFleet.model_validate(least | asked)


def make(**asked: Any) -> Made:
    return _made(fleet(**asked))


@cache
def _made(fleet: TrainingFleet) -> Made:
    """Read and deployed only: no test adds to it."""
    app = new_app()
    zones = ("us-east-2a", "us-east-2b")
    network = NetworkStack(app, "demo-network", project="demo", network=ClosedNetwork(), zones=zones, env=HERE)
    store = StoreStack(app, "demo-store", project="demo", env=HERE, removal_policy=RemovalPolicy.DESTROY)
    train = TrainStack(
        app,
        "demo-train-tune",
        project="demo",
        fleet=fleet,
        image=AMI,
        network=network.handle,
        store=store.handle,
        prefix="models/",
        env=HERE,
    )
    return Made(network, store, train)


def all_of(template: dict[str, Any], type_: str) -> list[dict[str, Any]]:
    return [resource["Properties"] for resource in template["Resources"].values() if resource["Type"] == type_]


def only(template: dict[str, Any], type_: str) -> dict[str, Any]:
    (found,) = all_of(template, type_)
    return found


def launched(template: dict[str, Any]) -> dict[str, Any]:
    return dict(only(template, "AWS::EC2::LaunchTemplate")["LaunchTemplateData"])


def resources_of(template: dict[str, Any]) -> dict[str, Any]:
    return dict(only(template, "AWS::Batch::ComputeEnvironment")["ComputeResources"])


@pytest.mark.parametrize("type_", ["trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge"])
def test_every_card_of_a_node_has_its_interface_and_the_environment_names_no_group(type_: str) -> None:
    template = template_of(make(instance_types=[type_]).train)
    cards = [
        (network_interface["NetworkCardIndex"], network_interface["DeviceIndex"])
        for network_interface in launched(template)["NetworkInterfaces"]
    ]
    assert cards == [(card, min(card, 1)) for card in range(INSTANCES[type_].efa_interfaces or 0)]
    assert all(len(network_interface["Groups"]) == 2 for network_interface in launched(template)["NetworkInterfaces"])
    assert "SecurityGroupIds" not in resources_of(template)
    assert len(resources_of(template)["Subnets"]) == 1
    job = only(template, "AWS::Batch::JobDefinition")
    (nodes,) = job["NodeProperties"]["NodeRangeProperties"]
    devices = [device["HostPath"] for device in nodes["Container"]["LinuxParameters"]["Devices"]]
    assert len([path for path in devices if "neuron" in path]) == INSTANCES[type_].chips
    assert len([path for path in devices if "uverbs" in path]) == len(cards)


def test_a_job_has_as_many_nodes_as_the_fleet_and_the_environment_room_for_one_job() -> None:
    template = template_of(make(nodes=4).train)
    job = only(template, "AWS::Batch::JobDefinition")
    assert (job["Type"], job["NodeProperties"]["NumNodes"]) == ("multinode", 4)
    assert job["NodeProperties"]["NodeRangeProperties"][0]["TargetNodes"] == "0:3"
    assert resources_of(template)["MinvCpus"] == 0
    assert resources_of(template)["MaxvCpus"] == 4 * INSTANCES["trn1.32xlarge"].vcpus


def test_nodes_on_demand_are_placed_together_unless_told_otherwise() -> None:
    near = template_of(make().train)
    assert only(near, "AWS::EC2::PlacementGroup")["Strategy"] == "cluster"
    assert "PlacementGroup" in resources_of(near)
    for asked in ({"capacity": {"kind": "on-demand", "placement": "none"}}, {"capacity": RESERVATION}, {"nodes": 1}):
        apart = template_of(make(**asked).train)
        assert all_of(apart, "AWS::EC2::PlacementGroup") == []
        assert "PlacementGroup" not in resources_of(apart)


def test_a_reservation_is_named_and_a_block_has_its_market_and_no_placement() -> None:
    target = {"CapacityReservationTarget": {"CapacityReservationId": RESERVATION["id"]}}
    reserved = launched(template_of(make(capacity=RESERVATION).train))
    assert reserved["CapacityReservationSpecification"] == target
    assert "InstanceMarketOptions" not in reserved
    template = template_of(make(capacity=BLOCK).train)
    assert launched(template)["CapacityReservationSpecification"] == target
    assert launched(template)["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    assert all_of(template, "AWS::EC2::PlacementGroup") == []


def test_spot_nodes_keep_checkpoints_in_a_bucket_that_outlives_the_fleet() -> None:
    template = template_of(make(capacity={"kind": "spot"}, nodes=1).train)
    (bucket,) = [resource for resource in template["Resources"].values() if resource["Type"] == "AWS::S3::Bucket"]
    assert bucket["DeletionPolicy"] == "Retain"
    assert resources_of(template)["Type"] == "SPOT"
    container = only(template, "AWS::Batch::JobDefinition")["ContainerProperties"]
    assert "NXPIPE_CHECKPOINTS" in [entry["Name"] for entry in container["Environment"]]
    assert all_of(template_of(make(nodes=1).train), "AWS::S3::Bucket") == []


def test_spot_nodes_that_should_train_together_are_refused_in_one_sentence() -> None:
    spot = fleet(capacity={"kind": "spot"}, nodes=4)
    config = Config(project=Project(name="demo", region="us-east-2"), fleets=(spot,))
    (finding,) = check_placement(config)
    assert finding.path == ("fleets", 0, "nodes")
    assert "does not run multi-node jobs on spot instances" in finding.allowed
    one_node = fleet(capacity={"kind": "spot"}, nodes=1)
    assert list(check_placement(config.model_copy(update={"fleets": (one_node,)}))) == []


def test_hosts_speak_imdsv2_one_hop_far_and_their_disks_are_encrypted() -> None:
    data = launched(template_of(make().train))
    assert (data["MetadataOptions"]["HttpTokens"], data["MetadataOptions"]["HttpPutResponseHopLimit"]) == (
        "required",
        1,
    )
    assert all(block_device_mapping["Ebs"]["Encrypted"] for block_device_mapping in data["BlockDeviceMappings"])


def test_scratch_is_in_the_nodes_subnet_mounted_on_hosts_and_seen_by_jobs() -> None:
    template = template_of(make(scratch={"size": 2400}).train)
    scratch = only(template, "AWS::FSx::FileSystem")
    assert scratch["StorageCapacity"] == 2400
    assert scratch["SubnetIds"] == resources_of(template)["Subnets"]
    user_data = json.dumps(launched(template)["UserData"])
    assert "multipart/mixed" in user_data
    assert "mount -t lustre" in user_data
    (nodes,) = only(template, "AWS::Batch::JobDefinition")["NodeProperties"]["NodeRangeProperties"]
    assert {"ContainerPath": "/scratch", "SourceVolume": "scratch"} in nodes["Container"]["MountPoints"]


def test_the_disks_of_hosts_that_have_some_are_seen_by_jobs() -> None:
    template = template_of(make(nodes=1).train)
    assert "mdadm" in json.dumps(launched(template)["UserData"])
    container = container_of(nodes=1)
    assert container["MountPoints"] == [{"ContainerPath": "/local", "SourceVolume": "local"}]
    assert container["Volumes"] == [{"Host": {"SourcePath": "/local"}, "Name": "local"}]
    assert {"Name": "NXPIPE_LOCAL", "Value": "/local"} in container["Environment"]


def test_the_root_volume_is_a_setting_within_the_limits_of_gp3() -> None:
    (volume,) = launched(template_of(make(disk=1000, iops=6000, throughput=1000).train))["BlockDeviceMappings"]
    assert {"VolumeSize": 1000, "Iops": 6000, "Throughput": 1000}.items() <= volume["Ebs"].items()
    with pytest.raises(ValidationError, match="at most 750, or `iops` of at least 4000"):
        fleet(throughput=1000)
    with pytest.raises(ValidationError, match="at most 50000; EBS allows 500 for each GiB"):
        fleet(disk=100, iops=60000)


def statements(made: Made) -> list[dict[str, Any]]:
    policies = template_of(made.train)["Resources"]
    (policy,) = (policy for id_, policy in policies.items() if id_.startswith("InstanceRoleDefaultPolicy"))
    found: list[dict[str, Any]] = policy["Properties"]["PolicyDocument"]["Statement"]
    return found


def test_hosts_write_into_the_log_of_their_fleet_alone() -> None:
    """AWS's managed policy of ECS instances permits every log."""
    made = make()
    (group,) = all_of(template_of(made.train), "AWS::Logs::LogGroup")
    assert (group["LogGroupName"], group["RetentionInDays"]) == ("/nxpipe/demo/tune", 90)
    (denied,) = (entry for entry in statements(made) if entry["Effect"] == "Deny")
    assert denied["Action"] == ["logs:CreateLogStream", "logs:PutLogEvents"]
    assert denied["NotResource"] == f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/nxpipe/demo/tune:*"
    assert set(denied) == {"Action", "Effect", "NotResource"}


def test_hosts_that_do_not_join_the_cluster_sound_an_alarm_and_are_one_notification() -> None:
    made = make(scratch={"size": 1200})
    template = template_of(made.train)
    counted = only(template, "AWS::Logs::MetricFilter")
    sentence = counted["FilterPattern"].strip('"')
    assert counted["FilterPattern"] == f'"{sentence}"'  # the words in this order
    assert sentence.removeprefix("nxpipe: ") in json.dumps(launched(template)["UserData"])
    assert template["Resources"][counted["LogGroupName"]["Ref"]]["Properties"]["LogGroupName"] == "/nxpipe/demo/tune"
    (metric,) = counted["MetricTransformations"]
    assert metric["MetricValue"] == "1"
    alarm = only(template_of(observed(made)), "AWS::CloudWatch::Alarm")
    assert (alarm["Namespace"], alarm["MetricName"]) == (metric["MetricNamespace"], metric["MetricName"])
    assert (alarm["Statistic"], alarm["Threshold"], alarm["ComparisonOperator"]) == ("Sum", 0, "GreaterThanThreshold")
    assert (alarm["Period"], alarm["DatapointsToAlarm"], alarm["EvaluationPeriods"]) == (60, 1, 60)
    assert (alarm["AlarmName"], len(alarm["AlarmActions"])) == ("demo-tune-failed-hosts", 1)
    assert alarm["AlarmDescription"].endswith("; see the log group /nxpipe/demo/tune")


def observed(made: Made) -> ObserveStack:
    """In an app of its own: it takes no resource of the fleet."""
    return ObserveStack(
        new_app(),
        "demo-observe",
        project="demo",
        observe=Observe(),
        budget=Budget(),
        guards=Guards(),
        fleets=(),
        training=[made.train.handle],
        hourly={},
        env=HERE,
    )


def test_sessions_of_ssm_are_allowed_if_the_fleet_says_so() -> None:
    assert "ssm" not in json.dumps(statements(make()))
    assert "ssmmessages:OpenDataChannel" in json.dumps(statements(make(ssm=True)))


def container_of(**asked: Any) -> dict[str, Any]:
    job = only(template_of(make(**asked).train), "AWS::Batch::JobDefinition")
    if "ContainerProperties" in job:
        return dict(job["ContainerProperties"])
    return dict(job["NodeProperties"]["NodeRangeProperties"][0]["Container"])


def test_nodes_that_train_together_install_efa_and_a_single_node_has_no_efa_device() -> None:
    together = template_of(make(nodes=4).train)
    user_data = json.dumps(launched(together)["UserData"])
    assert "EFA_CARDS=8\\n" in user_data
    assert "/models/efa/aws-efa-installer-1.49.0.tar.gz" in user_data
    apart = container_of(nodes=1)
    assert [device["HostPath"] for device in apart["LinuxParameters"]["Devices"]] == [
        f"/dev/neuron{chip}" for chip in range(INSTANCES["trn1.32xlarge"].chips)
    ]


def test_a_fleet_may_pin_another_version_of_the_efa_installer_together_with_its_digest() -> None:
    pinned = make(efa={"version": "1.50.0", "sha256": "a" * 64})
    user_data = json.dumps(launched(template_of(pinned.train))["UserData"])
    assert "aws-efa-installer-1.50.0.tar.gz" in user_data
    assert f"EFA_SHA256={'a' * 64}" in user_data
    with pytest.raises(ValidationError, match="sha256"):
        fleet(efa={"version": "1.50.0"})


@pytest.mark.parametrize(
    ("asked", "size"),
    [({}, 256), ({"shared_memory": 64}, 64), ({"instance_types": ["trn1.2xlarge"], "nodes": 1}, 16)],
    ids=["half of the host", "as configured", "half of a small host"],
)
def test_shared_memory_is_half_of_the_hosts_memory_unless_the_fleet_sets_it(asked: dict[str, Any], size: int) -> None:
    assert container_of(**asked)["LinuxParameters"]["SharedMemorySize"] == size * 1024


def test_more_shared_memory_than_a_job_has_memory_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValidationError, match=r"at most 481 \(GiB\), the memory of a job on trn1\.32xlarge"):
        fleet(shared_memory=482)


def test_an_image_is_always_named_by_digest_and_a_deployment_without_one_lacks_a_parameter() -> None:
    template = template_of(make().train)
    parameter = template["Parameters"]["ImageDigest"]
    assert "Default" not in parameter
    assert parameter["AllowedPattern"] == "sha256:[0-9a-f]{64}"
    assert {"Ref": "ImageDigest"} in container_of()["Image"]["Fn::Join"][1]
    assert ":train" not in json.dumps(template)
    named = make(image=IMAGE)
    assert "ImageDigest" not in template_of(named.train).get("Parameters", {})
    assert container_of(image=IMAGE)["Image"] == IMAGE


@pytest.mark.parametrize(
    ("now", "state", "names"),
    [
        ("2098-11-01T11:29:00Z", "DISABLED", {"demo-tune-opens", "demo-tune-closes", "demo-tune-drains"}),
        ("2098-11-01T11:30:00Z", "ENABLED", {"demo-tune-closes", "demo-tune-drains"}),
        ("2098-11-08T10:45:00Z", "DISABLED", set()),
    ],
)
def test_a_queue_made_in_an_open_block_is_open_and_nothing_is_scheduled_in_the_past(
    monkeypatch: pytest.MonkeyPatch, now: str, state: str, names: set[str]
) -> None:
    for module in ("project", "training", "capacity_block"):
        monkeypatch.setattr(f"nxpipe.stacks.{module}.current_time", lambda: datetime.fromisoformat(now))
    another = BLOCK | {"id": f"cr-{sha256(now.encode()).hexdigest()[:17]}"}  # equal arguments share a template
    made = template_of(make(capacity=another).train)
    schedules = [entry for entry in made["Resources"].values() if entry["Type"] == "AWS::Scheduler::Schedule"]
    assert (only(made, "AWS::Batch::JobQueue")["State"], {entry["Properties"]["Name"] for entry in schedules}) == (
        state,
        names,
    )


def test_a_blocks_queue_opens_at_its_start_and_is_drained_45_minutes_before_its_end(aws: None) -> None:
    made = make(capacity=BLOCK, image=IMAGE)
    deploy(made.network, made.store, made.train)
    assert census(REGION) == []
    batch, scheduler = boto3.client("batch"), boto3.client("scheduler")
    (queue,) = batch.describe_job_queues()["jobQueues"]
    (environment,) = batch.describe_compute_environments()["computeEnvironments"]
    assert queue["state"] == "DISABLED"
    result = {
        schedule["Name"]: scheduler.get_schedule(Name=schedule["Name"], GroupName="default")
        for schedule in scheduler.list_schedules()["Schedules"]
    }
    does = {
        name: (
            value["ScheduleExpression"],
            value["Target"]["Arn"].rpartition(":")[2],
            json.loads(value["Target"]["Input"]),
        )
        for name, value in result.items()
    }
    arn, place = queue["jobQueueArn"], environment["computeEnvironmentArn"]
    assert does == {
        "demo-tune-opens": ("at(2098-11-01T11:30:00)", "updateJobQueue", {"JobQueue": arn, "State": "ENABLED"}),
        "demo-tune-closes": ("at(2098-11-08T10:45:00)", "updateJobQueue", {"JobQueue": arn, "State": "DISABLED"}),
        "demo-tune-drains": (
            "at(2098-11-08T10:45:00)",
            "updateComputeEnvironment",
            {"ComputeEnvironment": place, "State": "DISABLED"},
        ),
    }
    (role,) = {entry["Target"]["RoleArn"].rpartition("/")[2] for entry in result.values()}
    may = statements_of(role)
    assert allowed(may, "batch:UpdateJobQueue", arn)
    assert allowed(may, "batch:UpdateComputeEnvironment", place)
    assert not allowed(may, "batch:UpdateJobQueue", f"{arn}-of-another")
    assert not allowed(may, "batch:SubmitJob", arn)


def scripts_of_hosts() -> list[str]:
    """The parts of the user data, as cloud-init separates them."""
    ec2 = boto3.client("ec2")
    (template,) = ec2.describe_launch_templates()["LaunchTemplates"]
    response = ec2.describe_launch_template_versions(
        LaunchTemplateId=template["LaunchTemplateId"], Versions=["$Latest"]
    )
    data = b64decode(response["LaunchTemplateVersions"][0]["LaunchTemplateData"]["UserData"])
    whole = message_from_bytes(data)
    assert whole.is_multipart()
    parts = [part for part in whole.walk() if part.get_content_type() == "text/x-shellscript"]
    return [str(part.get_payload()) for part in parts]


def shellcheck(script: str, folder: Path) -> tuple[int, str]:
    path = folder / "script.sh"
    path.write_text(script)
    program = Path(sysconfig.get_path("scripts"), "shellcheck")
    done = subprocess.run([str(program), str(path)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_deployed_changed_and_destroyed_it_is_what_was_asked_for(aws: None, tmp_path: Path) -> None:
    made = make(scratch={"size": 1200}, image=IMAGE)
    alarms = observed(made)
    deploy(made.network, made.store, made.train, alarms)
    assert census(REGION) == []
    (alarm,) = boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    (counted,) = boto3.client("logs").describe_metric_filters()["metricFilters"]
    assert alarm["MetricName"] == counted["metricTransformations"][0]["metricName"]
    batch = boto3.client("batch")
    (environment,) = batch.describe_compute_environments()["computeEnvironments"]
    (job,) = batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    container = job["nodeProperties"]["nodeRangeProperties"][0]["container"]
    assert container["image"] == IMAGE
    assert container["linuxParameters"]["sharedMemorySize"] == 256 * 1024
    (profile,) = boto3.client("iam").list_instance_profiles()["InstanceProfiles"]
    host = statements_of(profile["Roles"][0]["RoleName"])
    bucket = f"arn:aws:s3:::{outputs(made.store)['BucketName']}"
    assert allowed(host, "s3:GetObject", f"{bucket}/models/efa/aws-efa-installer-1.49.0.tar.gz")
    assert not allowed(host, "s3:GetObject", f"{bucket}/models/cas/sha256/x")
    may = statements_of(container["jobRoleArn"].rpartition("/")[2])
    objects = f"arn:aws:s3:::{outputs(made.store)['BucketName']}/models"
    assert allowed(may, "s3:GetObject", f"{objects}/cas/sha256/x")
    assert not allowed(may, "s3:PutObject", f"{objects}/cas/sha256/x")

    (script,) = scripts_of_hosts()
    (scratch,) = boto3.client("fsx").describe_file_systems()["FileSystems"]
    assert f"FILE_SYSTEM={scratch['DNSName']}\n" in script
    assert f"MOUNT_NAME={scratch['LustreConfiguration']['MountName']}\n" in script
    assert shellcheck(script, tmp_path) == (0, "")

    image = IMAGE.replace("1" * 64, "2" * 64)
    changed = make(scratch={"size": 1200}, nodes=8, image=image)
    deploy(changed.train)
    assert census(REGION) == []
    (now,) = batch.describe_compute_environments()["computeEnvironments"]
    assert now["computeEnvironmentArn"] == environment["computeEnvironmentArn"]
    assert now["computeResources"]["maxvCpus"] == 8 * INSTANCES["trn1.32xlarge"].vcpus
    (job,) = batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    assert job["nodeProperties"]["numNodes"] == 8
    assert job["nodeProperties"]["nodeRangeProperties"][0]["container"]["image"] == image

    destroy(changed.train)
    assert boto3.client("logs").describe_metric_filters()["metricFilters"] == []
    assert batch.describe_compute_environments()["computeEnvironments"] == []
    assert batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"] == []
    assert boto3.client("fsx").describe_file_systems()["FileSystems"] == []
    assert boto3.client("ec2").describe_placement_groups()["PlacementGroups"] == []
    assert boto3.client("ec2").describe_launch_templates()["LaunchTemplates"] == []
