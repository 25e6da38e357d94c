"""Differences between the local AWS and AWS, one test for each row of DIVERGENCES.md that is left. A failing test means
that the difference is gone."""

from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest

from tests.localaws.deployed import changed, create, physical, running, without
from tests.localaws.fleet import Template, fleet
from tests.localaws.moto_patches import capacity

_SOON = {"HeartbeatTimeout": 30, "DefaultResult": "ABANDON"}


def _hook(transition: str) -> dict[str, Any]:
    return {"LifecycleHookName": "h", "LifecycleTransition": f"autoscaling:EC2_INSTANCE_{transition}", **_SOON}


def _fleet(**blue: Any) -> Template:
    return changed(without(fleet(), "Mixed"), {"Blue1": blue})


def _instances(aws: Any) -> list[dict[str, Any]]:
    name = physical(aws)["Blue1"]
    response = boto3.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    instances: list[dict[str, Any]] = response["AutoScalingGroups"][0]["Instances"]
    return instances


def test_a_schedule_never_acts(aws: Any) -> None:
    create(aws, _fleet())
    when = datetime.now(UTC) - timedelta(minutes=1)
    group = {"AutoScalingGroupName": physical(aws)["Block"]}
    scaling = boto3.client("autoscaling")
    scaling.put_scheduled_update_group_action(**group, ScheduledActionName="now", StartTime=when, DesiredCapacity=2)
    (found,) = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=list(group.values()))["AutoScalingGroups"]
    assert found["DesiredCapacity"] == 0


def test_a_warm_pool_has_no_instances(aws: Any) -> None:
    create(aws, _fleet())
    response = boto3.client("autoscaling").describe_warm_pool(AutoScalingGroupName=physical(aws)["Blue1"])
    assert (response["WarmPoolConfiguration"]["MinSize"], response["Instances"]) == (1, [])


def test_an_instance_that_is_ended_does_not_wait_for_its_hook(aws: Any) -> None:
    create(aws, _fleet(LifecycleHookSpecificationList=[_hook("TERMINATING")]))
    name = physical(aws)["Blue1"]
    boto3.client("autoscaling").set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=0)
    assert _instances(aws) == []


def test_a_policy_makes_no_alarms(aws: Any) -> None:
    create(aws, _fleet())
    scaling_policies = boto3.client("autoscaling").describe_policies()["ScalingPolicies"]
    assert [entry.get("Alarms", []) for entry in scaling_policies] == [[]]
    assert boto3.client("cloudwatch").describe_alarms()["MetricAlarms"] == []


def test_every_target_in_service_is_healthy(aws: Any) -> None:
    create(aws, _fleet())
    response = boto3.client("elbv2").describe_target_health(TargetGroupArn=physical(aws)["Blue"])
    states = [description["TargetHealth"]["State"] for description in response["TargetHealthDescriptions"]]
    assert states == ["healthy", "healthy"]  # although no process listens on the port


def test_a_version_takes_nothing_from_its_source(aws: Any) -> None:
    create(aws, _fleet())
    ec2, template = boto3.client("ec2"), physical(aws)["Template"]
    response = ec2.create_launch_template_version(
        LaunchTemplateId=template, SourceVersion="1", LaunchTemplateData={"InstanceType": "inf2.24xlarge"}
    )
    assert "ImageId" not in response["LaunchTemplateVersion"]["LaunchTemplateData"]


def test_the_instances_of_a_block_outlive_it(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ec2 = boto3.client("ec2")
    document = {"InstanceType": "trn1.32xlarge", "InstanceCount": 1, "CapacityDurationHours": 24}
    (offer,) = ec2.describe_capacity_block_offerings(**document)["CapacityBlockOfferings"]
    result = {"CapacityBlockOfferingId": offer["CapacityBlockOfferingId"], "InstancePlatform": "Linux/UNIX"}
    block = ec2.purchase_capacity_block(**result)["CapacityReservation"]
    target = {"CapacityReservationTarget": {"CapacityReservationId": block["CapacityReservationId"]}}
    data = {"InstanceType": "trn1.32xlarge", "ImageId": "ami-12345678", "CapacityReservationSpecification": target}
    template = ec2.create_launch_template(LaunchTemplateName="t", LaunchTemplateData=data)["LaunchTemplate"]
    monkeypatch.setattr(capacity, "now", lambda: block["StartDate"])
    by = {"LaunchTemplateId": template["LaunchTemplateId"]}
    place = {"AvailabilityZone": block["AvailabilityZone"]}
    ec2.run_instances(LaunchTemplate=by, MinCount=1, MaxCount=1, Placement=place)
    monkeypatch.setattr(capacity, "now", lambda: block["EndDate"])
    assert len(running()) == 1
