"""A serving fleet on the local AWS."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from aws_cdk import Tags
from aws_cdk.assertions import Annotations, Match

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config import ConfigInvalid, ServingFleet
from nxpipe.pipeline.fleet.agent import group as agent_group
from nxpipe.pipeline.fleet.agent.group import FleetInstance, GroupTurn
from nxpipe.pipeline.fleet.preflight_rules import interface_services
from nxpipe.stacks.lint.egress import GATEWAYS, needs
from nxpipe.stacks.project import PROJECT_TAG
from nxpipe.stacks.serving.load_balancer import COLOUR_HEADER
from tests.iam.evaluator import as_list
from tests.localaws.census import census
from tests.localaws.moto_patches.refreshes import hosts_answer
from tests.stacks.fleet_world import CERTIFICATE, IMAGE, OTHER_IMAGE, World, configured, read_only, world
from tests.stacks.linting import complaints
from tests.stacks.local import REGION, deploy, destroy, resources
from tests.stacks.metric_math import MINUTES, evaluated
from tests.stacks.permissions import allowed, statements_of

BLUE, GREEN = "demo-search-blue", "demo-search-green"
SPOT = '{ kind = "spot", on_demand_base = 2 }'
WARM = '{ kind = "on-demand", warm_pool = { min = 1, reuse = false } }'
ZONE = 'command = ["server"]\nzone = "us-east-2b"'
RESERVED = '{ kind = "reservation", id = "cr-0a1b2c3d4e5f60718" }'
BLOCK = (
    '{ kind = "capacity-block", id = "cr-0a1b2c3d4e5f60718", start = 2098-12-01T11:30:00Z, end = 2098-12-08T11:30:00Z }'
)
STANDBY = f'standby = {{ instance_type = "g5.xlarge", image = "{IMAGE}", size = {{ min = 1, max = 2 }} }}'


@pytest.fixture
def deployed(aws: None, tmp_path: Path) -> World:
    made = world(configured(tmp_path, more=f'command = ["server"]\n{STANDBY}'), tmp_path)
    deploy(*made.stacks)
    return made


def group(name: str) -> dict[str, Any]:
    found = boto3.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    auto_scaling_group: dict[str, Any] = found["AutoScalingGroups"][0]
    return auto_scaling_group


def sizes(name: str) -> tuple[int, int, int]:
    found = group(name)
    return found["MinSize"], found["DesiredCapacity"], found["MaxSize"]


def rules(made: World) -> dict[str, dict[str, Any]]:
    """Rules by priority."""
    elb = boto3.client("elbv2")
    (listener,) = resources(made.serve, "AWS::ElasticLoadBalancingV2::Listener")
    return {rule["Priority"]: rule for rule in elb.describe_rules(ListenerArn=listener)["Rules"]}


def weights(made: World) -> list[int]:
    (action,) = rules(made)["100"]["Actions"]
    return [target_group["Weight"] for target_group in action["ForwardConfig"]["TargetGroups"]]


def shift(made: World, *to: int) -> None:
    """Shift the weights as a rollout does."""
    rule = rules(made)["100"]
    (action,) = rule["Actions"]
    targets = action["ForwardConfig"]["TargetGroups"]
    weighed = [
        {"TargetGroupArn": target["TargetGroupArn"], "Weight": weight}
        for target, weight in zip(targets, to, strict=True)
    ]
    boto3.client("elbv2").modify_rule(
        RuleArn=rule["RuleArn"], Actions=[{"Type": "forward", "ForwardConfig": {"TargetGroups": weighed}}]
    )


@pytest.mark.sample(4)
def test_a_deployment_in_the_middle_of_a_shift_changes_neither_weights_nor_sizes(
    deployed: World, tmp_path: Path
) -> None:
    assert weights(deployed) == [100, 0]
    shift(deployed, 75, 25)
    boto3.client("autoscaling").update_auto_scaling_group(
        AutoScalingGroupName=GREEN, MinSize=1, DesiredCapacity=3, MaxSize=4
    )
    changed = configured(tmp_path, more=f'command = ["server"]\nready_within = "12m"\nhealth = "/ready"\n{STANDBY}')
    made = world(changed, tmp_path)
    Tags.of(made.serve).add(PROJECT_TAG, "renamed", priority=300)
    Tags.of(made.serve).add("team", "search")
    deploy(made.serve)
    tag_descriptions = boto3.client("elbv2").describe_tags(ResourceArns=[rules(deployed)["1"]["RuleArn"]])[
        "TagDescriptions"
    ]
    assert {"Key": "team", "Value": "search"} in tag_descriptions[0]["Tags"]  # of another rule: the tags have come
    assert group(GREEN)["HealthCheckGracePeriod"] == 60
    assert weights(deployed) == [75, 25]
    assert sizes(GREEN) == (1, 3, 4)


def test_a_standby_that_comes_in_the_middle_of_a_shift_changes_no_weight(aws: None, tmp_path: Path) -> None:
    made = world(configured(tmp_path), tmp_path)
    deploy(*made.stacks)
    shift(made, 40, 60)
    deploy(world(configured(tmp_path, more=f'command = ["server"]\n{STANDBY}'), tmp_path).serve)
    assert weights(made) == [40, 60]
    assert set(rules(made)) == {"1", "2", "3", "100", "default"}


@pytest.mark.sample(4)
def test_blue_serves_first_and_green_is_empty(deployed: World) -> None:
    assert (sizes(BLUE), sizes(GREEN), sizes("demo-search-standby")) == ((0, 2, 4), (0, 0, 4), (0, 1, 2))


@pytest.mark.sample(4)
def test_an_instance_waits_for_the_agent_and_its_instances_are_given_up_after_the_fleets_own_time(
    deployed: World,
) -> None:
    (hook,) = boto3.client("autoscaling").describe_lifecycle_hooks(AutoScalingGroupName=BLUE)["LifecycleHooks"]
    assert (hook["LifecycleHookName"], hook["DefaultResult"]) == ("demo-search-ready", "ABANDON")
    # `ready_within` of the agent, which starts minutes after the instance
    assert hook["HeartbeatTimeout"] == 1800 + 600
    assert {instance["LifecycleState"] for instance in group(BLUE)["Instances"]} == {"Pending:Wait"}


@pytest.mark.sample(4)
def test_a_header_reaches_a_colour_for_nobody_but_testers(deployed: World) -> None:
    direct = [rules(deployed)[priority] for priority in ("1", "2", "3")]
    conditions = [{entry["Field"]: entry for entry in rule["Conditions"]} for rule in direct]
    names = [entry["http-header"]["HttpHeaderConfig"] for entry in conditions]
    assert names == [{"HttpHeaderName": COLOUR_HEADER, "Values": [entry]} for entry in ("blue", "green", "standby")]
    sources = [entry["source-ip"]["SourceIpConfig"]["Values"] for entry in conditions]
    assert sources == [["10.20.0.0/32"]] * 3  # no interface has the first address of a network
    (weighed,) = rules(deployed)["100"]["Actions"]
    targets = [entry["Actions"][0]["TargetGroupArn"] for entry in direct]
    assert targets[:2] == [target_group["TargetGroupArn"] for target_group in weighed["ForwardConfig"]["TargetGroups"]]


def test_testers_are_addresses_that_the_fleet_names() -> None:
    found = of("AWS::ElasticLoadBalancingV2::ListenerRule", more='testers = ["10.20.3.0/28"]')
    direct = [entry for id_, entry in found.items() if "Direct" in id_]
    assert len(direct) == 2
    for entry in direct:
        (source,) = [entry for entry in entry["Conditions"] if entry["Field"] == "source-ip"]
        assert source["SourceIpConfig"]["Values"] == ["10.20.3.0/28"]


def attributes(properties: dict[str, Any], kind: str) -> dict[str, str]:
    return {entry["Key"]: entry["Value"] for entry in properties[kind]}


def test_streams_have_minutes_and_a_busy_server_stays_in_service() -> None:
    (balancer,) = of("AWS::ElasticLoadBalancingV2::LoadBalancer").values()
    assert attributes(balancer, "LoadBalancerAttributes")["idle_timeout.timeout_seconds"] == "300"
    for targets in of("AWS::ElasticLoadBalancingV2::TargetGroup").values():
        found = attributes(targets, "TargetGroupAttributes")
        assert found["deregistration_delay.timeout_seconds"] == "300"
        assert found["load_balancing.algorithm.type"] == "least_outstanding_requests"
        assert "load_balancing.algorithm.anomaly_mitigation" not in found
        misses = (targets["HealthCheckIntervalSeconds"], targets["UnhealthyThresholdCount"])
        assert (*misses, targets["HealthCheckTimeoutSeconds"]) == (20, 5, 15)


@pytest.mark.parametrize(("interval", "timeout"), [("5s", 3), ("10s", 7), ("20s", 15), ("1m", 15)])
def test_a_health_check_ends_before_the_next_one_begins(interval: str, timeout: int) -> None:
    for targets in of(
        "AWS::ElasticLoadBalancingV2::TargetGroup", more=f'health_check = {{ interval = "{interval}" }}'
    ).values():
        assert targets["HealthCheckTimeoutSeconds"] == timeout < targets["HealthCheckIntervalSeconds"]


def test_timeouts_health_check_and_routing_are_settings_of_the_fleet() -> None:
    more = (
        'idle_timeout = "30s"\ndraining = "10m"\nrouting = "weighted-random"\n'
        'health_check = { interval = "10s", timeout = "4s", healthy = 3, unhealthy = 4 }'
    )
    (balancer,) = of("AWS::ElasticLoadBalancingV2::LoadBalancer", more=more).values()
    assert attributes(balancer, "LoadBalancerAttributes")["idle_timeout.timeout_seconds"] == "30"
    for targets in of("AWS::ElasticLoadBalancingV2::TargetGroup", more=more).values():
        found = attributes(targets, "TargetGroupAttributes")
        assert found["deregistration_delay.timeout_seconds"] == "600"
        assert found["load_balancing.algorithm.type"] == "weighted_random"
        assert found["load_balancing.algorithm.anomaly_mitigation"] == "on"
        checked = ("HealthCheckIntervalSeconds", "HealthCheckTimeoutSeconds")
        assert [targets[name] for name in checked] == [10, 4]
        assert (targets["HealthyThresholdCount"], targets["UnhealthyThresholdCount"]) == (3, 4)


@pytest.mark.sample(4)
def test_what_no_rule_takes_is_not_answered_by_a_model(deployed: World) -> None:
    (action,) = rules(deployed)["default"]["Actions"]
    assert (action["Type"], action["FixedResponseConfig"]["StatusCode"]) == ("fixed-response", "404")


@pytest.mark.sample(4)
def test_instances_may_read_artifacts_and_answer_their_own_hook_and_nothing_else(deployed: World) -> None:
    role = next(resource for resource in resources(deployed.serve, "AWS::IAM::Role") if "Standby" not in resource)
    result = statements_of(role)
    (bucket,) = (resource for resource in resources(deployed.store, "AWS::S3::Bucket") if "artifacts" in resource)
    own = f"arn:aws:autoscaling:us-east-2:123456789012:autoScalingGroup:1-2-3:autoScalingGroupName/{BLUE}"
    assert allowed(result, "s3:GetObject", f"arn:aws:s3:::{bucket}/models/ac/1")
    assert allowed(result, "s3:ListBucket", f"arn:aws:s3:::{bucket}")
    assert allowed(result, "autoscaling:CompleteLifecycleAction", own)
    assert not allowed(result, "autoscaling:CompleteLifecycleAction", f"{own}-of-others")
    assert not allowed(result, "autoscaling:UpdateAutoScalingGroup", own)
    assert not allowed(result, "s3:PutObject", f"arn:aws:s3:::{bucket}/models/ac/1")
    assert not allowed(result, "s3:DeleteObject", f"arn:aws:s3:::{bucket}/models/ac/1")


def instance_policy(made: World) -> list[dict[str, Any]]:
    (policy,) = (
        policy for id_, policy in made.of("AWS::IAM::Policy").items() if id_.startswith("Role") and "Standby" not in id_
    )
    found: list[dict[str, Any]] = policy["PolicyDocument"]["Statement"]
    return found


_UPDATES = 'command = ["server"]\nupdates = {{ policy = "{}" }}'


class _Recorded:
    """A client of Auto Scaling that notes the operations that are called."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def call(**_: Any) -> Any:
            self.called.add("autoscaling:" + "".join(word.capitalize() for word in operation.split("_")))
            states = {"i-1": "InService", "i-2": "InService"}
            if "autoscaling:EnterStandby" in self.called:
                states["i-1"] = "Standby"
            instances = [
                {"InstanceId": id_, "LifecycleState": state, "HealthStatus": "Healthy", "ProtectedFromScaleIn": True}
                for id_, state in states.items()
            ]
            group = {"DesiredCapacity": list(states.values()).count("InService"), "Instances": instances}
            return {"AutoScalingGroups": [group]}

        return call


@pytest.mark.parametrize("policy", ["none", "swap", "replace"])
def test_a_fleet_that_follows_its_channel_may_do_in_its_own_groups_what_its_agents_do_and_nothing_else(
    policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded = _Recorded()
    monkeypatch.setattr(agent_group, "client", lambda *_: recorded)
    monkeypatch.setattr(GroupTurn, "_checks_take", 0.0)
    (fleet,) = configured(tmp_path, more=_UPDATES.format(policy)).fleets
    assert isinstance(fleet, ServingFleet)
    turn = GroupTurn(FleetInstance("i-1", "inf2.xlarge", "us-east-2", BLUE, "10.0.0.1"), fleet, None, settle=0)
    if policy != "none":
        monkeypatch.setattr(turn, "_is_free", lambda *_, **__: turn._group() is not None)
        assert turn.take()
    if policy == "swap":
        turn.leave()
    elif policy == "replace":
        turn.end()
    if policy != "none":
        turn.give_back()
    statements = instance_policy(read_only(more=_UPDATES.format(policy)))
    listed = [(action, st["Resource"]) for st in statements for action in as_list(st["Action"])]
    hook = {"autoscaling:CompleteLifecycleAction", "autoscaling:DescribeAutoScalingInstances"}
    granted = {action: resource for action, resource in listed if action.startswith("autoscaling:")}
    assert granted.keys() - hook == recorded.called
    for action, resource in granted.items():
        assert (resource == "*") == action.startswith("autoscaling:Describe"), action
        assert resource == "*" or f"autoScalingGroupName/{BLUE}" in json.dumps(resource)


def test_a_fleet_that_follows_its_channel_has_room_for_two_artifacts() -> None:
    def gib(made: World) -> int:
        (template,) = made.of("AWS::EC2::LaunchTemplate").values()
        size: int = template["LaunchTemplateData"]["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"]
        return size

    types = ("inf2.48xlarge",)
    swap, usual = (read_only(types=types, more=_UPDATES.format(policy)) for policy in ("swap", "none"))
    assert gib(swap) - gib(usual) == 2 * INSTANCES["inf2.48xlarge"].device_memory_gib


def test_instances_mount_no_file_system_and_speak_https_alone() -> None:
    """The artifact has every program, and no Neuron image has a client of EFS."""
    made = read_only()
    assert "elasticfilesystem" not in json.dumps(instance_policy(made))
    assert "fs-" not in json.dumps(made.template["Resources"]["Template"])
    groups = made.of("AWS::EC2::SecurityGroup").values()
    (group,) = (group for group in groups if group["GroupDescription"].startswith("Instances"))
    (egress,) = group["SecurityGroupEgress"]
    assert (egress["FromPort"], egress["ToPort"]) == (443, 443)


@pytest.mark.sample(4)
def test_instances_write_their_log_into_the_group_of_the_fleet_alone(deployed: World) -> None:
    role = next(resource for resource in resources(deployed.serve, "AWS::IAM::Role") if "Standby" not in resource)
    group = "arn:aws:logs:us-east-2:123456789012:log-group:/nxpipe/demo/{}:log-stream:i-1/agent"
    for action in ("logs:CreateLogStream", "logs:PutLogEvents"):
        assert allowed(statements_of(role), action, group.format("search"))
        assert not allowed(statements_of(role), action, group.format("other"))


def actions_of(made: World) -> set[str]:
    return {action for statement in instance_policy(made) for action in as_list(statement["Action"])}


def called_by(made: World) -> set[str]:
    """The endpoints of a closed network that the fleet's stack needs."""
    return {need.endpoint for need in needs("demo-serve-search", made.template["Resources"])}


def test_sessions_of_ssm_are_allowed_if_the_fleet_says_so_and_need_two_endpoints() -> None:
    without, with_ssm = read_only(), read_only(more="ssm = true\n[observe]\nlog_retention = 30")
    channels = {f"ssmmessages:{verb}{kind}Channel" for verb in ("Create", "Open") for kind in ("Control", "Data")}
    assert actions_of(with_ssm) - actions_of(without) == {"ssm:UpdateInstanceInformation", *channels}
    assert called_by(with_ssm) - called_by(without) == {"ssm", "ssmmessages"}


@pytest.mark.parametrize("more", ['command = ["server"]', "ssm = true\n[observe]\nlog_retention = 30"])
def test_the_preflight_checks_the_endpoints_that_the_fleet_needs(tmp_path: Path, more: str) -> None:
    assert interface_services(configured(tmp_path, more=more)) == called_by(read_only(more=more)) - set(GATEWAYS)


def test_the_retention_of_logs_is_a_setting_of_the_project() -> None:
    kept = [
        [group["RetentionInDays"] for group in read_only(more=more).of("AWS::Logs::LogGroup").values()]
        for more in ('command = ["server"]', "ssm = true\n[observe]\nlog_retention = 30")
    ]
    assert kept == [[90], [30]]


def test_a_retention_that_cloudwatch_does_not_offer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"observe\.log_retention.*one of 1, 3, 5, 7, 14, 30, 60, 90"):
        configured(tmp_path, more="[observe]\nlog_retention = 45")


def test_a_compile_cache_in_s3_is_read_and_written_below_its_prefix_and_nowhere_else(aws: None, tmp_path: Path) -> None:
    made = world(configured(tmp_path, more='compile_cache = "s3://my-caches/neuron/"'), tmp_path)
    deploy(*made.stacks)
    (role,) = resources(made.serve, "AWS::IAM::Role")
    result = statements_of(role)
    for action in ("s3:GetObject", "s3:PutObject"):
        assert allowed(result, action, "arn:aws:s3:::my-caches/neuron/neuronxcc-2/MODULE_1/model.neff")
        assert not allowed(result, action, "arn:aws:s3:::my-caches/neuron-2/model.neff")
    listed = {"s3:prefix": "neuron/neuronxcc-2"}
    assert allowed(result, "s3:ListBucket", "arn:aws:s3:::my-caches", listed)
    assert not allowed(result, "s3:ListBucket", "arn:aws:s3:::my-caches", {"s3:prefix": "other"})
    assert not allowed(result, "s3:DeleteObject", "arn:aws:s3:::my-caches/neuron/neuronxcc-2/MODULE_1/model.neff")


def launched_from(name: str) -> set[str]:
    ids = [instance["InstanceId"] for instance in group(name)["Instances"]]
    reservations = boto3.client("ec2").describe_instances(InstanceIds=ids)["Reservations"]
    return {instance["ImageId"] for reservation in reservations for instance in reservation["Instances"]}


def with_another_image(folder: Path) -> World:
    return world(configured(folder, more=f'command = ["server"]\n{STANDBY}'), folder, image=OTHER_IMAGE)


@pytest.mark.sample(4)
def test_another_image_is_rolled_out_by_an_instance_refresh(deployed: World, tmp_path: Path) -> None:
    with hosts_answer("CONTINUE"):
        deploy(with_another_image(tmp_path).serve)
    (refresh,) = boto3.client("autoscaling").describe_instance_refreshes(AutoScalingGroupName=BLUE)["InstanceRefreshes"]
    assert refresh["Status"] == "Successful"
    assert launched_from(BLUE) == {OTHER_IMAGE}
    assert launched_from("demo-search-standby") == {IMAGE}


@pytest.mark.sample(4)
@pytest.mark.parametrize("trouble", ["the alarm", "the agents"])
def test_an_image_that_does_no_good_is_taken_back(deployed: World, tmp_path: Path, trouble: str) -> None:
    if trouble == "the alarm":
        boto3.client("cloudwatch").set_alarm_state(
            AlarmName=f"{BLUE}-errors", StateValue="ALARM", StateReason="a test says so"
        )
    with (
        hosts_answer("CONTINUE" if trouble == "the alarm" else "ABANDON"),
        pytest.raises(AssertionError, match="UPDATE_ROLLBACK"),
    ):
        deploy(with_another_image(tmp_path).serve)
    (template,) = boto3.client("ec2").describe_launch_template_versions(
        LaunchTemplateName="demo-search", Versions=["$Latest"]
    )["LaunchTemplateVersions"]
    assert template["LaunchTemplateData"]["ImageId"] == IMAGE
    assert weights(deployed) == [100, 0]


@pytest.mark.parametrize(("more", "share"), MINUTES)
def test_the_alarm_that_stops_a_refresh_counts_what_no_target_answered(more: dict[str, int], share: float) -> None:
    alarms = read_only(more=f'command = ["server"]\n{STANDBY}').of("AWS::CloudWatch::Alarm").values()
    errors = {alarm["AlarmName"]: alarm for alarm in alarms if alarm["AlarmName"].endswith("-errors")}
    assert errors.keys() == {f"{name}-errors" for name in (BLUE, GREEN, "demo-search-standby")}
    for alarm in errors.values():
        assert evaluated(alarm, {"RequestCount": 100, **more}) == pytest.approx(share)
        assert (alarm["Threshold"], alarm["ComparisonOperator"]) == (0.01, "GreaterThanThreshold")  # max_error_rate
        assert len(alarm["Metrics"]) <= 10  # CloudWatch's limit for an alarm


def test_the_alarm_that_stops_a_refresh_needs_no_minimum_of_requests_and_is_about_its_own_group() -> None:
    made = read_only(more='command = ["server"]')
    for colour, name in (("Blue", BLUE), ("Green", GREEN)):
        (alarm,) = (
            each for each in made.of("AWS::CloudWatch::Alarm").values() if each["AlarmName"] == f"{name}-errors"
        )
        few = {"RequestCount": 4, "HTTPCode_Target_2XX_Count": 3, "HTTPCode_ELB_504_Count": 1}
        assert evaluated(alarm, few) == pytest.approx(0.25)
        (targets,) = made.of("AWS::AutoScaling::AutoScalingGroup")[colour]["TargetGroupARNs"]
        of_group = [
            dimension["Value"]["Fn::GetAtt"][0]
            for metric in alarm["Metrics"]
            for dimension in metric.get("MetricStat", {"Metric": {"Dimensions": []}})["Metric"]["Dimensions"]
            if dimension["Name"] == "TargetGroup"
        ]
        assert set(of_group) == {targets["Ref"]}


@pytest.mark.sample(4)
def test_every_property_is_told_by_its_service_as_it_was_wanted(deployed: World) -> None:
    assert [str(entry) for entry in census(REGION) if entry.stack == deployed.serve.stack_name] == []


@pytest.mark.sample(4)
def test_a_destroyed_fleet_leaves_nothing_behind(deployed: World) -> None:
    destroy(deployed.serve)
    assert not boto3.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    assert not boto3.client("elbv2").describe_load_balancers()["LoadBalancers"]
    assert not boto3.client("elbv2").describe_target_groups()["TargetGroups"]
    assert not boto3.client("ec2").describe_launch_templates()["LaunchTemplates"]
    instances = boto3.client("ec2").describe_instances()["Reservations"]
    assert {entry["State"]["Name"] for instance in instances for entry in instance["Instances"]} <= {"terminated"}


# Templates


def of(type_: str, **asked: Any) -> dict[str, dict[str, Any]]:
    return read_only(**asked).of(type_)


def test_several_types_or_spot_make_a_mixed_group_and_the_template_says_no_market() -> None:
    made = read_only(types=("inf2.xlarge", "inf2.8xlarge"), capacity=SPOT)
    policy = made.of("AWS::AutoScaling::AutoScalingGroup")["Blue"]["MixedInstancesPolicy"]
    assert [override["InstanceType"] for override in policy["LaunchTemplate"]["Overrides"]] == [
        "inf2.xlarge",
        "inf2.8xlarge",
    ]
    distribution = policy["InstancesDistribution"]
    assert (distribution["OnDemandBaseCapacity"], distribution["OnDemandPercentageAboveBaseCapacity"]) == (2, 0)
    (template,) = made.of("AWS::EC2::LaunchTemplate").values()
    assert "InstanceMarketOptions" not in template["LaunchTemplateData"]


@pytest.mark.parametrize(
    ("command", "grace", "warm_up"),
    [
        ('["server"]', 60, 300),  # it answers before it is in service
        ("[]", 1800, 1800),  # the image's own server may still load the model
    ],
)
def test_a_server_that_the_agent_supervises_needs_no_time_in_service_to_load(
    command: str, grace: int, warm_up: int
) -> None:
    groups = read_only(more=f"command = {command}").template["Resources"]
    for colour in ("Blue", "Green"):
        assert groups[colour]["Properties"]["HealthCheckGracePeriod"] == grace
        policy = groups[colour]["UpdatePolicy"]["AutoScalingInstanceRefresh"]
        assert policy["Preferences"]["InstanceWarmup"] == warm_up


def test_a_warm_pool_is_kept_for_each_colour() -> None:
    pools = of("AWS::AutoScaling::WarmPool", capacity=WARM)
    assert [pool["AutoScalingGroupName"] for pool in pools.values()] == [{"Ref": "Blue"}, {"Ref": "Green"}]
    assert all((pool["MinSize"], pool["PoolState"]) == (1, "Stopped") for pool in pools.values())


def test_a_warm_pool_has_the_size_that_was_asked_for_and_not_all_that_the_group_may_grow_by() -> None:
    """EC2 Auto Scaling: the size is absolute if minimum and maximum are the same, else it follows max - desired."""
    for pool in of("AWS::AutoScaling::WarmPool", capacity=WARM).values():
        assert pool["MaxGroupPreparedCapacity"] == pool["MinSize"] == 1


def test_volumes_and_network_interfaces_count_in_the_projects_budget() -> None:
    tag = {"Key": PROJECT_TAG, "Value": "demo"}
    for template in of("AWS::EC2::LaunchTemplate", more=f'command = ["server"]\n{STANDBY}').values():
        tagged = {each["ResourceType"]: each["Tags"] for each in template["LaunchTemplateData"]["TagSpecifications"]}
        assert set(tagged) == {"instance", "volume", "network-interface"}
        assert all(tag in tags for tags in tagged.values())


def test_a_reservation_is_named_and_nothing_is_launched_beside_it() -> None:
    made = read_only(capacity=RESERVED, more=ZONE)
    (template,) = made.of("AWS::EC2::LaunchTemplate").values()
    target = template["LaunchTemplateData"]["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": "cr-0a1b2c3d4e5f60718"}
    policy = made.template["Resources"]["Blue"]["UpdatePolicy"]["AutoScalingInstanceRefresh"]["Preferences"]
    assert policy["MaxHealthyPercentage"] == 100


@pytest.mark.parametrize(("types", "capacity"), [(("inf2.xlarge",), RESERVED), (("trn1.32xlarge",), BLOCK)])
def test_synthesis_warns_of_a_reservation_whose_size_is_not_compared_with_that_of_a_rollout(
    types: tuple[str, ...], capacity: str
) -> None:
    warned = Annotations.from_stack(read_only(types=types, capacity=capacity, more=ZONE).serve)
    warned.has_warning("/demo-serve-search", Match.string_like_regexp("not compared with the 8 instances of a rollout"))
    counted = capacity.replace(" }", ", instances = 8 }")
    silent = Annotations.from_stack(read_only(types=types, capacity=counted, more=ZONE).serve)
    silent.has_no_warning("/demo-serve-search", Match.any_value())


def test_the_hook_of_the_longest_start_is_the_longest_hook_of_ec2_auto_scaling() -> None:
    made = read_only(more='command = ["server"]\nready_within = "110m"')
    groups = made.of("AWS::AutoScaling::AutoScalingGroup")
    assert {groups[name]["LifecycleHookSpecificationList"][0]["HeartbeatTimeout"] for name in ("Blue", "Green")} == {
        7200
    }


@pytest.mark.parametrize(("types", "capacity"), [(("inf2.xlarge",), RESERVED), (("trn1.32xlarge",), BLOCK)])
def test_reserved_instances_start_in_the_zone_of_their_reservation_only(types: tuple[str, ...], capacity: str) -> None:
    made = read_only(types=types, capacity=capacity, more=f"{ZONE}\n{STANDBY}")
    groups = made.of("AWS::AutoScaling::AutoScalingGroup")
    counts = {name: len(group["VPCZoneIdentifier"]) for name, group in groups.items()}
    assert counts == {"Blue": 1, "Green": 1, "Standby": 2}
    assert groups["Blue"]["VPCZoneIdentifier"] == groups["Green"]["VPCZoneIdentifier"]
    assert groups["Blue"]["VPCZoneIdentifier"][0] == groups["Standby"]["VPCZoneIdentifier"][1]  # of us-east-2b


def test_a_capacity_blocks_fleet_is_empty_but_between_its_start_and_45_minutes_before_its_end() -> None:
    made = read_only(types=("trn1.32xlarge",), capacity=BLOCK, more=ZONE)
    for entry in made.of("AWS::AutoScaling::AutoScalingGroup").values():
        assert (entry["MinSize"], entry["DesiredCapacity"]) == ("0", "0")
    actions = made.of("AWS::AutoScaling::ScheduledAction")
    times = {id_: (action["StartTime"], action["DesiredCapacity"]) for id_, action in actions.items()}
    assert times == {
        "Blueopens": ("2098-12-01T11:30:00Z", 2),
        "Bluecloses": ("2098-12-08T10:45:00Z", 0),
        "Greencloses": ("2098-12-08T10:45:00Z", 0),
    }
    (template,) = made.of("AWS::EC2::LaunchTemplate").values()
    assert template["LaunchTemplateData"]["InstanceMarketOptions"] == {"MarketType": "capacity-block"}


@pytest.mark.parametrize(
    ("now", "desired", "actions"),
    [
        ("2098-12-01T11:29:00Z", ("0", "0"), {"Blueopens", "Bluecloses", "Greencloses"}),
        ("2098-12-01T11:30:00Z", ("2", "0"), {"Bluecloses", "Greencloses"}),
        ("2098-12-08T10:45:00Z", ("0", "0"), set()),
    ],
)
def test_a_stack_of_an_open_block_starts_its_instances_and_schedules_nothing_in_the_past(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    now: str,
    desired: tuple[str, str],
    actions: set[str],
) -> None:
    """EC2 Auto Scaling refuses a scheduled action in the past, and with it the whole stack."""
    for module in ("stacks.project", "stacks.serving.stack"):
        monkeypatch.setattr(f"nxpipe.{module}.current_time", lambda: datetime.fromisoformat(now))
    made = world(configured(tmp_path, types=("trn1.32xlarge",), capacity=BLOCK, more=ZONE), tmp_path)
    groups = made.of("AWS::AutoScaling::AutoScalingGroup")
    assert (groups["Blue"]["DesiredCapacity"], groups["Green"]["DesiredCapacity"]) == desired
    assert set(made.of("AWS::AutoScaling::ScheduledAction")) == actions
    annotations = Annotations.from_stack(made.serve)
    checked = annotations.has_no_warning if actions else annotations.has_warning
    checked("/demo-serve-search", Match.string_like_regexp("demo-serve-search stays empty"))


def test_with_a_certificate_plain_http_is_not_spoken() -> None:
    more = f'certificate = "{CERTIFICATE}"\nclients = ["10.0.0.0/8"]'
    made = read_only(more=more)
    (listener,) = made.of("AWS::ElasticLoadBalancingV2::Listener").values()
    assert (listener["Port"], listener["Protocol"]) == (443, "HTTPS")
    assert "TLS13" in listener["SslPolicy"]
    (front,) = (value for id_, value in made.of("AWS::EC2::SecurityGroup").items() if id_.startswith("Front"))
    assert [(entry["CidrIp"], entry["FromPort"]) for entry in front["SecurityGroupIngress"]] == [("10.0.0.0/8", 443)]


def test_callers_are_the_networks_own_if_nobody_is_named() -> None:
    groups = of("AWS::EC2::SecurityGroup")
    (front,) = (value for id_, value in groups.items() if id_.startswith("Front"))
    assert [entry["CidrIp"] for entry in front["SecurityGroupIngress"]] == ["10.20.0.0/16"]


def test_all_names_that_people_see_begin_with_the_projects() -> None:
    template = read_only().template
    for resource in template["Resources"].values():
        for key in ("AutoScalingGroupName", "LaunchTemplateName", "AlarmName"):
            if isinstance(resource["Properties"].get(key), str):
                assert resource["Properties"][key].startswith("demo-search")


def test_whatever_changes_in_a_fleet_the_text_of_its_weights_stays() -> None:
    """CloudFormation touches a rule whose text has changed, and would put back the weights of the first day."""

    def text(**asked: Any) -> Any:
        found = of("AWS::ElasticLoadBalancingV2::ListenerRule", **asked)
        return next(value for id_, value in found.items() if "Weights" in id_)

    usual = text()
    assert usual == text(more='testers = ["10.20.3.0/28"]\nrouting = "weighted-random"\nidle_timeout = "1m"')
    assert usual == text(types=("inf2.8xlarge", "inf2.xlarge"), capacity=SPOT, more="port = 9000")
    assert usual == text(more="rehearsal = true")
    assert usual == text(capacity=WARM, more=f'certificate = "{CERTIFICATE}"\nhealth = "/"\nready_within = "5m"')


def root_volume(**asked: Any) -> tuple[int, int, int]:
    """Its GiB, IOPS and MiB/s."""
    (template,) = of("AWS::EC2::LaunchTemplate", **asked).values()
    (device,) = template["LaunchTemplateData"]["BlockDeviceMappings"]
    volume = device["Ebs"]
    return volume["VolumeSize"], volume["Iops"], volume["Throughput"]


@pytest.mark.parametrize(
    ("type_", "capacity", "gib"),
    [
        ("inf2.xlarge", '{ kind = "on-demand" }', 200),
        ("inf2.48xlarge", '{ kind = "on-demand" }', 868),  # 384 GiB of device memory, twice, and the image
        ("trn1.32xlarge", '{ kind = "on-demand" }', 200),  # its instance store has the artifact
        ("trn1.32xlarge", WARM, 1124),  # which a stop empties
    ],
)
def test_the_root_volume_has_room_for_the_largest_artifact_that_the_devices_load(
    type_: str, capacity: str, gib: int
) -> None:
    assert root_volume(types=(type_,), capacity=capacity) == (gib, 3000, 500)


def test_a_fleet_sets_the_size_and_the_rates_of_its_root_volume() -> None:
    assert root_volume(more="disk = 600\niops = 8000\nthroughput = 2000") == (600, 8000, 2000)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("disk = 99", "100"),
        ("throughput = 100", "125"),
        ("iops = 2999", "3000"),
        ("disk = 100\niops = 50001", "at most 50000; EBS allows 500 for each GiB of `disk`"),
        ("throughput = 751", "at most 750, or `iops` of at least 3004; EBS allows 1 MiB/s for 4 IOPS"),
    ],
)
def test_a_volume_that_ebs_does_not_offer_is_refused_by_its_key(tmp_path: Path, more: str, told: str) -> None:
    with pytest.raises(ConfigInvalid, match=told):
        configured(tmp_path, more=more)


def test_a_rehearsal_says_so_in_its_description_and_its_tags_and_tells_the_agent() -> None:
    usual, rehearsal = read_only(), read_only(more='command = ["server"]\nrehearsal = true')
    tag = {"Key": "nxpipe:rehearsal", "Value": "true"}
    assert rehearsal.template["Description"] == "Fleet search of demo (rehearsal: may serve programs of the emulator)"
    assert usual.template["Description"] == "Fleet search of demo"
    for made, marked in ((rehearsal, True), (usual, False)):
        groups = made.of("AWS::AutoScaling::AutoScalingGroup").values()
        assert all(({**tag, "PropagateAtLaunch": True} in entry["Tags"]) == marked for entry in groups)
        (role,) = made.of("AWS::IAM::Role").values()
        assert (tag in role["Tags"]) == marked
        (template,) = made.of("AWS::EC2::LaunchTemplate").values()
        assert ("rehearsal = true" in json.dumps(template["LaunchTemplateData"]["UserData"])) == marked


def test_the_same_description_gives_the_same_bytes(tmp_path: Path) -> None:
    make: Callable[[], str] = lambda: json.dumps(world(configured(tmp_path), tmp_path).template)  # noqa: E731
    assert make() == make()


def test_cfn_lint_finds_nothing_to_say_of_a_warm_pool_and_a_standby_either() -> None:
    template = read_only(capacity=WARM, more=STANDBY).template
    assert complaints(template, "us-east-2") == []
