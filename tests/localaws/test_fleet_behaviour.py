"""A fleet on the local AWS: launches, lifecycle hooks, instance refreshes and traffic shifts."""

import json
from datetime import timedelta
from typing import Any, Final

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.localaws.census import census
from tests.localaws.deployed import changed, create, physical, running, settled, update, without
from tests.localaws.fleet import Template, balancing, fleet, launch_data, network, ref
from tests.localaws.moto_patches import capacity
from tests.localaws.moto_patches.refreshes import hosts_answer

REGION = "us-east-2"


def test_instances_inherit_their_template_and_spread_over_the_zones(aws: Any) -> None:
    create(aws, without(fleet(), "Warm"))
    name = physical(aws)["Blue1"]
    response = boto3.client("ec2").describe_instances(
        Filters=[{"Name": "tag:aws:autoscaling:groupName", "Values": [name]}]
    )
    reservations = [instance for reservation in response["Reservations"] for instance in reservation["Instances"]]
    assert {entry["Placement"]["AvailabilityZone"] for entry in reservations} == {"us-east-2a", "us-east-2b"}
    for entry in reservations:
        assert entry["MetadataOptions"]["HttpTokens"] == "required"
        assert entry["IamInstanceProfile"]["Arn"].endswith(physical(aws)["Profile"])
        assert {group["GroupId"] for group in entry["SecurityGroups"]} == {physical(aws)["Group"]}
        assert {"Key": "project", "Value": "nxpipe"} in entry["Tags"]


def test_a_trainium_instance_has_all_interfaces_of_its_template_and_its_placement_group(aws: Any) -> None:
    create(aws, fleet())
    ids = physical(aws)
    scaling = boto3.client("autoscaling")
    scaling.set_desired_capacity(AutoScalingGroupName=ids["Block"], DesiredCapacity=1)
    desired = [{"Name": "instance-type", "Values": ["trn2.48xlarge"]}]
    (one,) = boto3.client("ec2").describe_instances(Filters=desired)["Reservations"][0]["Instances"]
    assert len(one["NetworkInterfaces"]) == 16
    assert sorted({network_interface["InterfaceType"] for network_interface in one["NetworkInterfaces"]}) == [
        "efa",
        "efa-only",
    ]
    assert one["Placement"]["GroupName"] == ids["Cluster"]
    with pytest.raises(ClientError, match="in use"):
        boto3.client("ec2").delete_placement_group(GroupName=ids["Cluster"])


def test_a_mixed_group_takes_spot_beyond_its_base(aws: Any) -> None:
    create(aws, fleet())
    desired = [{"Name": "tag:aws:autoscaling:groupName", "Values": [physical(aws)["Mixed"]]}]
    reservations = boto3.client("ec2").describe_instances(Filters=desired)["Reservations"]
    markets = [
        instance.get("InstanceLifecycle", "on-demand") for entry in reservations for instance in entry["Instances"]
    ]
    assert sorted(markets) == ["on-demand", "spot", "spot"]


def test_a_block_has_instances_within_its_window_alone(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ec2, scaling = boto3.client("ec2"), boto3.client("autoscaling")
    document = {"InstanceType": "trn2.48xlarge", "InstanceCount": 1, "CapacityDurationHours": 24}
    (offer,) = ec2.describe_capacity_block_offerings(**document)["CapacityBlockOfferings"]
    result = {"CapacityBlockOfferingId": offer["CapacityBlockOfferingId"], "InstancePlatform": "Linux/UNIX"}
    bought = ec2.purchase_capacity_block(**result)["CapacityReservation"]
    assert (bought["State"], bought["ReservationType"]) == ("scheduled", "capacity-block")
    data = launch_data(
        InstanceType="trn2.48xlarge",
        InstanceMarketOptions={"MarketType": "capacity-block"},
        CapacityReservationSpecification={
            "CapacityReservationTarget": {"CapacityReservationId": bought["CapacityReservationId"]}
        },
    )
    create(aws, changed(fleet(), {"Training": {"LaunchTemplateData": data}}))
    name = physical(aws)["Block"]
    scaling.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=1)
    (last, *_) = scaling.describe_scaling_activities(AutoScalingGroupName=name)["Activities"]
    assert (last["StatusCode"], "is in state scheduled" in last["StatusMessage"]) == ("Failed", True)
    monkeypatch.setattr(capacity, "now", lambda: bought["StartDate"] + timedelta(hours=1))
    scaling.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=1)
    assert set(states(name).values()) == {"Pending:Wait"}
    scaling.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=2)
    (last, *_) = scaling.describe_scaling_activities(AutoScalingGroupName=name)["Activities"]
    assert "has 0 instances left" in last["StatusMessage"]
    monkeypatch.setattr(capacity, "now", lambda: bought["EndDate"])
    response = ec2.describe_capacity_reservations(CapacityReservationIds=[bought["CapacityReservationId"]])
    assert response["CapacityReservations"][0]["State"] == "expired"
    with pytest.raises(ClientError, match="cannot be cancelled"):
        ec2.cancel_capacity_reservation(CapacityReservationId=bought["CapacityReservationId"])


def test_inferentia_is_not_offered_in_blocks(aws: Any) -> None:
    document = {"InstanceType": "inf2.xlarge", "InstanceCount": 1, "CapacityDurationHours": 24}
    assert boto3.client("ec2").describe_capacity_block_offerings(**document)["CapacityBlockOfferings"] == []


HOOK: Final = {
    "LifecycleHookName": "ready",
    "LifecycleTransition": "autoscaling:EC2_INSTANCE_LAUNCHING",
    "DefaultResult": "ABANDON",
    "HeartbeatTimeout": 1800,
}


def hooked(**more: Any) -> Template:
    """A fleet whose instances wait until their lifecycle hook is completed."""
    result = without(fleet(), "Warm", "Mixed")
    return changed(result, {"Blue1": {"LifecycleHookSpecificationList": [HOOK], **more}})


def states(group: str) -> dict[str, str]:
    response = boto3.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[group])
    return {
        instance["InstanceId"]: instance["LifecycleState"] for instance in response["AutoScalingGroups"][0]["Instances"]
    }


def targets(arn: str) -> set[str]:
    descriptions = boto3.client("elbv2").describe_target_health(TargetGroupArn=arn)["TargetHealthDescriptions"]
    return {entry["Target"]["Id"] for entry in descriptions}


def test_an_instance_serves_when_its_hook_is_completed_and_another_comes_if_it_is_abandoned(aws: Any) -> None:
    create(aws, hooked())
    group, arn, scaling = physical(aws)["Blue1"], physical(aws)["Blue"], boto3.client("autoscaling")
    one, other = states(group)
    assert (set(states(group).values()), targets(arn)) == ({"Pending:Wait"}, set())
    say = {"AutoScalingGroupName": group, "LifecycleHookName": "ready"}
    scaling.complete_lifecycle_action(**say, InstanceId=one, LifecycleActionResult="CONTINUE")
    assert (states(group)[one], targets(arn)) == ("InService", {one})
    scaling.complete_lifecycle_action(**say, InstanceId=other, LifecycleActionResult="ABANDON")
    assert other not in states(group)
    assert sorted(states(group).values()) == ["InService", "Pending:Wait"]
    with pytest.raises(ClientError, match="No active Lifecycle Action found"):
        scaling.complete_lifecycle_action(**say, InstanceId=one, LifecycleActionResult="CONTINUE")


def test_an_instance_on_standby_is_no_target_and_counts_again_when_it_returns(aws: Any) -> None:
    create(aws, hooked(MinSize="1"))
    group, arn, scaling = physical(aws)["Blue1"], physical(aws)["Blue"], boto3.client("autoscaling")
    for id_ in states(group):
        scaling.complete_lifecycle_action(
            AutoScalingGroupName=group, LifecycleHookName="ready", InstanceId=id_, LifecycleActionResult="CONTINUE"
        )
    one, other = states(group)
    leave = {"AutoScalingGroupName": group, "ShouldDecrementDesiredCapacity": True}
    scaling.enter_standby(**leave, InstanceIds=[one])
    assert (states(group)[one], targets(arn)) == ("Standby", {other})
    assert len(states(group)) == 2, "no other one is launched"
    with pytest.raises(ClientError, match="is not in InService"):
        scaling.enter_standby(**leave, InstanceIds=[one])
    with pytest.raises(ClientError, match="min-size=1"):
        scaling.enter_standby(**leave, InstanceIds=[other])
    scaling.exit_standby(AutoScalingGroupName=group, InstanceIds=[one])
    assert (states(group), targets(arn)) == ({one: "InService", other: "InService"}, {one, other})


def test_a_hook_that_nobody_answers_in_time_gives_its_own_answer(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    create(aws, hooked())
    group, now = physical(aws)["Blue1"], capacity.now()
    one, other = states(group)
    monkeypatch.setattr(capacity, "now", lambda: now + timedelta(minutes=29))
    say = {"AutoScalingGroupName": group, "LifecycleHookName": "ready"}
    boto3.client("autoscaling").record_lifecycle_action_heartbeat(**say, InstanceId=one)
    monkeypatch.setattr(capacity, "now", lambda: now + timedelta(minutes=31))
    assert one in states(group)
    assert other not in states(group)
    assert set(states(group).values()) == {"Pending:Wait"}


def test_a_hook_tells_its_own_settings(aws: Any) -> None:
    create(aws, fleet())
    group = physical(aws)["Block"]
    (found,) = boto3.client("autoscaling").describe_lifecycle_hooks(AutoScalingGroupName=group)["LifecycleHooks"]
    assert found["NotificationMetadata"] == "fleet=chat"
    assert "RoleARN" not in found
    assert "NotificationTargetARN" not in found


def refreshed(alarms: list[Any] | None = None, **data: Any) -> Template:
    """A fleet with an instance refresh as update policy and a changed launch template."""
    result = changed(hooked(), {"Template": {"LaunchTemplateData": launch_data(**data)}})
    alarm = {"AlarmName": "bad", "MetricName": "m", "Namespace": "n", "Statistic": "Sum", "Period": 60, "Threshold": 1}
    more = {"EvaluationPeriods": 1, "ComparisonOperator": "GreaterThanThreshold"}
    result["Bad"] = {"Type": "AWS::CloudWatch::Alarm", "Properties": {**alarm, **more}}
    preferences = {"MinHealthyPercentage": 50, "AlarmSpecification": {"Alarms": alarms or [ref("Bad")]}}
    refresh = {"Strategy": "Rolling", "Preferences": preferences}
    result["Blue1"]["UpdatePolicy"] = {
        "AutoScalingInstanceRefresh": refresh,
        "AutoScalingScheduledAction": {"IgnoreUnmodifiedGroupSizeProperties": True},
    }
    return result


@pytest.mark.parametrize(("size", "limit"), [(-1, "below min value"), (99, "above max value")])
def test_a_capacity_beyond_the_limits_of_its_group_is_refused(aws: Any, size: int, limit: str) -> None:
    create(aws, refreshed())
    scaling, group = boto3.client("autoscaling"), physical(aws)["Blue1"]
    with pytest.raises(ClientError, match=limit):
        scaling.set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=size)
    scaling.update_auto_scaling_group(AutoScalingGroupName=group, MinSize=0, DesiredCapacity=0)
    assert states(group) == {}


def launched_by(group: str) -> set[str]:
    response = boto3.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[group])
    return {instance["LaunchTemplate"]["Version"] for instance in response["AutoScalingGroups"][0]["Instances"]}


def test_a_new_template_replaces_the_instances_one_after_another_and_leaves_the_sizes_alone(aws: Any) -> None:
    create(aws, refreshed())
    group = physical(aws)["Blue1"]
    boto3.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=4)
    before = states(group)
    assert update(aws, refreshed(InstanceType="inf2.8xlarge")) == ("UPDATE_COMPLETE", [])
    assert launched_by(group) == {"2"}
    assert len(states(group)) == 4
    assert not before.keys() & states(group).keys()
    assert set(running()) == states(group).keys()


def test_an_alarm_stops_a_refresh_and_the_stack_is_as_it_was(aws: Any) -> None:
    create(aws, refreshed())
    group = physical(aws)["Blue1"]
    boto3.client("cloudwatch").set_alarm_state(AlarmName="bad", StateValue="ALARM", StateReason="a test")
    status, reasons = update(aws, refreshed(InstanceType="inf2.8xlarge"))
    assert status == "UPDATE_ROLLBACK_COMPLETE"
    assert reasons == ["Blue1: Instance refresh Failed: CloudWatch alarm bad in ALARM state"]
    assert launched_by(group) == {"1"}
    assert census(REGION) == []


@pytest.mark.parametrize("what", ["ABANDON", "SILENCE"])
def test_a_refresh_whose_instances_never_get_ready_fails_the_stack(aws: Any, what: Any) -> None:
    create(aws, refreshed())
    with hosts_answer(what):
        status, reasons = update(aws, refreshed(InstanceType="inf2.8xlarge"))
    assert status == "UPDATE_ROLLBACK_COMPLETE"
    assert "still wait for their lifecycle hooks" in reasons[0]


def test_a_refresh_goes_on_whenever_it_is_looked_at_and_rolls_back_when_told(aws: Any) -> None:
    create(aws, without(fleet(), "Warm", "Mixed"))
    ids, scaling, ec2 = physical(aws), boto3.client("autoscaling"), boto3.client("ec2")
    data = {"InstanceType": "inf2.24xlarge"}
    ec2.create_launch_template_version(LaunchTemplateId=ids["Template"], SourceVersion="1", LaunchTemplateData=data)
    desired = {"LaunchTemplate": {"LaunchTemplateId": ids["Template"], "Version": "2"}}
    group = {"AutoScalingGroupName": ids["Blue1"]}
    scaling.start_instance_refresh(**group, DesiredConfiguration=desired, Preferences={"SkipMatching": True})
    with pytest.raises(ClientError, match="already in progress"):
        scaling.start_instance_refresh(**group)
    (result,) = scaling.describe_instance_refreshes(**group)["InstanceRefreshes"]
    assert (result["Status"], result["PercentageComplete"], launched_by(ids["Blue1"])) == ("InProgress", 50, {"1", "2"})
    scaling.rollback_instance_refresh(**group)
    for _ in range(4):
        (result,) = scaling.describe_instance_refreshes(**group)["InstanceRefreshes"]
    assert (result["Status"], launched_by(ids["Blue1"])) == ("RollbackSuccessful", {"1"})
    with pytest.raises(ClientError, match="No in progress instance refresh"):
        scaling.cancel_instance_refresh(**group)


def test_a_deployment_beside_a_shift_changes_no_weight(aws: Any) -> None:
    resources = {**network(), **balancing()}
    create(aws, resources)
    ids, elb = physical(aws), boto3.client("elbv2")
    shifted = [
        {"TargetGroupArn": ids["Blue"], "Weight": 95},
        {"TargetGroupArn": ids["Green"], "Weight": 5},
    ]
    elb.modify_rule(RuleArn=ids["Rule"], Actions=[{"Type": "forward", "ForwardConfig": {"TargetGroups": shifted}}])
    later = changed(
        resources, {"Balancer": {"Tags": [{"Key": "team", "Value": "serving"}]}, "Blue": {"HealthCheckPath": "/ready"}}
    )
    assert update(aws, later) == ("UPDATE_COMPLETE", [])
    (rule,) = elb.describe_rules(RuleArns=[ids["Rule"]])["Rules"]
    assert rule["Actions"][0]["ForwardConfig"]["TargetGroups"] == shifted
    (blue,) = elb.describe_target_groups(TargetGroupArns=[ids["Blue"]])["TargetGroups"]
    assert blue["LoadBalancerArns"] == [ids["Balancer"]]


def test_a_protected_balancer_is_not_deleted_with_its_stack(aws: Any) -> None:
    protected = [{"Key": "deletion_protection.enabled", "Value": "true"}]
    create(aws, changed({**network(), **balancing()}, {"Balancer": {"LoadBalancerAttributes": protected}}))
    aws.delete_stack(StackName="s")
    status, reasons = settled(aws)
    assert status == "DELETE_FAILED"
    assert any("deletion protection is enabled" in reason for reason in reasons)


def test_what_others_need_is_not_deleted_under_them(aws: Any) -> None:
    create(aws, fleet())
    ids, ec2 = physical(aws), boto3.client("ec2")
    for call, arguments in (
        (ec2.delete_subnet, {"SubnetId": ids["SubnetA"]}),
        (ec2.delete_security_group, {"GroupId": ids["Group"]}),
        (ec2.delete_vpc, {"VpcId": ids["Vpc"]}),
    ):
        with pytest.raises(ClientError, match="DependencyViolation"):
            call(**arguments)


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ({"CreationPolicy": {"ResourceSignal": {"Count": 1}}}, "CreationPolicy"),
        ({"UpdatePolicy": {"AutoScalingRollingUpdate": {}}}, "AutoScalingRollingUpdate"),
    ],
)
def test_an_update_policy_that_nobody_carries_out_fails_the_stack(aws: Any, policy: Any, named: str) -> None:
    resources = fleet()
    resources["Block"] |= policy
    aws.create_stack(StackName="s", TemplateBody=json.dumps({"Resources": resources}), Capabilities=["CAPABILITY_IAM"])
    status, reasons = settled(aws)
    assert status == "ROLLBACK_COMPLETE"
    assert any(named in reason for reason in reasons)
