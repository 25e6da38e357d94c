"""Metrics, alarms and notifications of a fleet, and the alarms that fail a release."""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import boto3
import pytest
from aws_cdk import Stack, aws_autoscaling, aws_ec2
from aws_cdk import aws_elasticloadbalancingv2 as balancing
from constructs import Construct

from nxpipe.pipeline.config.cloud import Budget, ClosedNetwork, Observe
from nxpipe.pipeline.config.device_measures import UPDATES_REFUSED
from nxpipe.pipeline.config.sections import Guards
from nxpipe.stacks.handles import NetworkHandle, ServeHandle
from nxpipe.stacks.measures import MEASURES
from nxpipe.stacks.network import NetworkStack
from nxpipe.stacks.observability import ObserveStack
from tests.localaws.census import census
from tests.stacks.local import ACCOUNT, HERE, REGION, deploy, destroy, new_app, template_of
from tests.stacks.metric_math import MINUTES, evaluated

COLOURS = ("blue", "green")


class FleetStack(Stack):
    """The parts of a serving fleet that alarms use."""

    def __init__(self, scope: Construct, id_: str, network: NetworkHandle, fleet: str) -> None:
        super().__init__(scope, id_, env=HERE)
        subnets = aws_ec2.SubnetSelection(subnets=list(network.subnets.values()))
        balancer = balancing.ApplicationLoadBalancer(self, "Balancer", vpc=network.vpc, vpc_subnets=subnets)
        groups = {
            colour: balancing.ApplicationTargetGroup(
                self, f"Targets-{colour}", vpc=network.vpc, port=8000, protocol=balancing.ApplicationProtocol.HTTP
            )
            for colour in COLOURS
        }
        listener = balancer.add_listener(
            "Listener", port=80, open=False, default_action=balancing.ListenerAction.fixed_response(404)
        )
        shares = [
            balancing.CfnListenerRule.TargetGroupTupleProperty(target_group_arn=group.target_group_arn, weight=1)
            for group in groups.values()
        ]
        forward = balancing.CfnListenerRule.ForwardConfigProperty(target_groups=shares)
        rule = balancing.CfnListenerRule(
            self,
            "Rule",
            listener_arn=listener.listener_arn,
            priority=1,
            actions=[balancing.CfnListenerRule.ActionProperty(type="forward", forward_config=forward)],
            conditions=[
                balancing.CfnListenerRule.RuleConditionProperty(
                    field="path-pattern",
                    path_pattern_config=balancing.CfnListenerRule.PathPatternConfigProperty(values=["*"]),
                )
            ],
        )
        data = aws_ec2.CfnLaunchTemplate.LaunchTemplateDataProperty(instance_type="inf2.xlarge")
        template = aws_ec2.CfnLaunchTemplate(self, "Template", launch_template_data=data)
        launched = aws_autoscaling.CfnAutoScalingGroup.LaunchTemplateSpecificationProperty(
            launch_template_id=template.ref, version=template.attr_latest_version_number
        )
        scaling = {
            colour: aws_autoscaling.CfnAutoScalingGroup(
                self,
                f"Group-{colour}",
                min_size="0",
                max_size="0",
                launch_template=launched,
                vpc_zone_identifier=[subnet.subnet_id for subnet in network.subnets.values()],
            )
            for colour in COLOURS
        }
        self.handle = ServeHandle(
            fleet,
            balancer,
            listener,
            rule,
            groups,
            scaling,
            rehearsal=fleet == "rehearsed",
            ready_within=30,
            follows_channel=fleet == "following",
        )


@dataclass(frozen=True)
class Asked:
    emails: tuple[str, ...] = ("oncall@example.com",)
    monthly: int | None = 5000
    max_p99: str | None = "800ms"
    max_error_rate: float = 0.01
    fleets: tuple[str, ...] = ("search",)


@dataclass(frozen=True)
class Made:
    below: tuple[Stack, ...]
    observe: ObserveStack


def make(asked: Asked) -> Made:
    app = new_app()
    network = NetworkStack(
        app, "demo-network", project="demo", network=ClosedNetwork(), zones=("us-east-2a", "us-east-2b"), env=HERE
    )
    fleets = [FleetStack(app, f"demo-serve-{name}", network.handle, name) for name in asked.fleets]
    limits = {"max_error_rate": asked.max_error_rate} | ({"max_p99": asked.max_p99} if asked.max_p99 else {})
    observe = ObserveStack(
        app,
        "demo-observe",
        project="demo",
        observe=Observe(emails=asked.emails),
        budget=Budget(monthly=asked.monthly),
        guards=Guards.model_validate(limits),
        fleets=[fleet.handle for fleet in fleets],
        hourly={"search": 0.76},
        env=HERE,
    )
    return Made((network, *fleets), observe)


def of_type(made: Made, type_: str) -> list[dict[str, Any]]:
    found = template_of(made.observe)["Resources"].values()
    return [entry["Properties"] for entry in found if entry["Type"] == type_]


def composites(made: Made) -> dict[str, dict[str, Any]]:
    return {entry["AlarmName"]: entry for entry in of_type(made, "AWS::CloudWatch::CompositeAlarm")}


def alarms() -> dict[str, dict[str, Any]]:
    response = boto3.client("cloudwatch").describe_alarms(AlarmTypes=["MetricAlarm", "CompositeAlarm"])
    return {
        metric_alarm["AlarmName"]: metric_alarm
        for metric_alarm in (*response["MetricAlarms"], *response["CompositeAlarms"])
    }


@pytest.fixture(scope="module")
def made() -> Made:
    return make(Asked())


def test_every_measure_is_on_the_dashboard_and_every_limit_is_an_alarm(made: Made) -> None:
    (dashboard,) = of_type(made, "AWS::CloudWatch::Dashboard")
    body = json.dumps(dashboard["DashboardBody"])
    named = [entry["AlarmName"] for entry in of_type(made, "AWS::CloudWatch::Alarm")]
    for measure in MEASURES:
        if measure.scope == "updates":
            continue
        assert f"search: {measure.title}" in body, measure.key
        of_each = measure.scope in ("target group", "group")
        names = (
            [f"demo-search-{colour}-{measure.key}" for colour in COLOURS] if of_each else [f"demo-search-{measure.key}"]
        )
        assert [name in named for name in names] == [measure.limit is not None] * len(names), measure.key


def test_a_refused_version_is_an_alarm_of_a_fleet_that_follows_its_channel_and_of_no_other(made: Made) -> None:
    def about(made: Made) -> list[dict[str, Any]]:
        alarms = of_type(made, "AWS::CloudWatch::Alarm")
        return [each for each in alarms if each["AlarmName"].endswith("-updates-refused")]

    assert about(made) == []
    (new,) = about(make(Asked(fleets=("search", "following"))))
    assert new["AlarmName"] == "demo-following-updates-refused"
    assert (new["Namespace"], new["MetricName"], new["Threshold"]) == ("nxpipe", UPDATES_REFUSED, 0)
    assert {each["Name"]: each["Value"] for each in new["Dimensions"]} == {"Project": "demo", "Fleet": "following"}
    assert new["AlarmDescription"].endswith("; see the log group /nxpipe/demo/following")
    assert new["AlarmActions"]


def test_a_rehearsal_is_marked_on_the_dashboard(made: Made) -> None:
    marked = "REHEARSAL, may serve programs of the emulator"
    (dashboard,) = of_type(make(Asked(fleets=("search", "rehearsed"))), "AWS::CloudWatch::Dashboard")
    body = json.dumps(dashboard["DashboardBody"])
    assert (body.count(marked), f"# rehearsed: {marked}" in body) == (1, True)
    assert marked not in json.dumps(of_type(made, "AWS::CloudWatch::Dashboard"))


def test_a_release_is_bad_by_exactly_the_limits_that_the_table_gives_to_releases(made: Made) -> None:
    composite = composites(made)["demo-search-release-bad"]
    ids = {
        name: resource["Properties"]["AlarmName"]
        for name, resource in template_of(made.observe)["Resources"].items()
        if resource["Type"] == "AWS::CloudWatch::Alarm"
    }
    rule = json.dumps(composite["AlarmRule"])
    by_release = tuple(f"-{measure.key}" for measure in MEASURES if measure.limit and measure.limit.by_release)
    for id_, name in ids.items():
        assert (f'"{id_}"' in rule) == name.endswith(by_release), name
    assert " AND " not in rule


def test_alarms_about_launches_notify_once_together(made: Made) -> None:
    """A fault of all new instances sounds two of them, and is one page."""
    composite = composites(made)["demo-search-not-starting"]
    about = {entry["AlarmName"] for entry in of_type(made, "AWS::CloudWatch::Alarm") if not entry.get("AlarmActions")}
    by_release = {f"demo-search-{key}" for key in ("refused", "compile-events")}
    assert about - by_release == {
        "demo-search-launch-failures",
        *(f"demo-search-{colour}-capacity" for colour in COLOURS),
    }
    rule = json.dumps(composite["AlarmRule"])
    assert rule.count("ALARM(") == 3
    assert " AND " not in rule
    assert "/nxpipe/demo/search" in composite["AlarmDescription"]


def test_the_guards_of_the_configuration_are_the_limits_of_the_alarms(made: Made) -> None:
    found = {entry["AlarmName"]: entry for entry in of_type(made, "AWS::CloudWatch::Alarm")}
    assert found["demo-search-green-latency-p99"]["Threshold"] == 0.8
    assert found["demo-search-green-error-rate"]["Threshold"] == 0.01
    for entry in found.values():
        assert entry["ComparisonOperator"] == "GreaterThanThreshold"
        assert entry["TreatMissingData"] == "notBreaching"


def test_without_a_limit_for_latency_there_is_no_alarm_of_it() -> None:
    found = [entry["AlarmName"] for entry in of_type(make(Asked(max_p99=None)), "AWS::CloudWatch::Alarm")]
    assert found
    assert not [name for name in found if "latency" in name]


def test_whatever_ends_no_release_tells_people_by_itself(made: Made) -> None:
    telling = [entry["AlarmName"] for entry in of_type(made, "AWS::CloudWatch::Alarm") if entry.get("AlarmActions")]
    judged = [f"demo-search-{colour}-{key}" for key in ("latency-p99", "error-rate") for colour in COLOURS]
    others = [f"demo-search-{key}" for key in ("execution-errors", "unanswered")]
    assert sorted(telling) == sorted([*judged, *others])
    assert [len(composite["AlarmActions"]) for composite in composites(made).values()] == [1, 1]


@pytest.mark.parametrize(("more", "share"), MINUTES)
def test_the_error_rate_has_what_no_target_answered_and_nothing_in_flight(
    made: Made, more: dict[str, int], share: float
) -> None:
    alarm = next(entry for entry in of_type(made, "AWS::CloudWatch::Alarm") if "blue-error-rate" in entry["AlarmName"])
    assert evaluated(alarm, {"RequestCount": 100, **more}) == pytest.approx(share)
    of_balancer = [
        {dimension["Name"] for dimension in metric["MetricStat"]["Metric"]["Dimensions"]}
        for metric in alarm["Metrics"]
        if "MetricStat" in metric and "_ELB_" in metric["MetricStat"]["Metric"]["MetricName"]
    ]
    assert of_balancer == [{"LoadBalancer"}] * 3
    assert len(alarm["Metrics"]) <= 10  # CloudWatch's limit for an alarm


def test_instances_that_never_become_ready_sound_an_alarm_after_the_fleets_own_time(made: Made) -> None:
    """An empty channel or a missing bundle: launched, abandoned, launched again, and never in service."""
    found = {entry["AlarmName"]: entry for entry in of_type(made, "AWS::CloudWatch::Alarm")}
    for colour in COLOURS:
        entry = found[f"demo-search-{colour}-capacity"]
        assert (entry["DatapointsToAlarm"], entry["EvaluationPeriods"], entry["Threshold"]) == (35, 35, 0)
        (math,) = (metric["Expression"] for metric in entry["Metrics"] if "Expression" in metric)
        assert math == f"wanted_{colour} - present_{colour}"
        series = {metric["Id"]: metric["MetricStat"]["Metric"] for metric in entry["Metrics"] if "MetricStat" in metric}
        assert series[f"wanted_{colour}"]["MetricName"] == "GroupDesiredCapacity"
        assert series[f"present_{colour}"]["MetricName"] == "GroupInServiceInstances"
        (dimension,) = series[f"present_{colour}"]["Dimensions"]
        assert dimension["Name"] == "AutoScalingGroupName"


def test_a_failed_launch_is_published_with_its_reason_and_repeated_ones_sound_an_alarm(made: Made) -> None:
    (rule,) = of_type(made, "AWS::Events::Rule")
    assert rule["EventPattern"]["detail-type"] == ["EC2 Instance Launch Unsuccessful"]
    assert len(rule["EventPattern"]["detail"]["AutoScalingGroupName"]) == len(COLOURS)
    (target,) = rule["Targets"]
    transformer = target["InputTransformer"]
    assert transformer["InputPathsMap"]["reason"] == "$.detail.StatusMessage"
    assert set(re.findall("<([a-z]+)>", transformer["InputTemplate"])) == set(transformer["InputPathsMap"])
    found = {entry["AlarmName"]: entry for entry in of_type(made, "AWS::CloudWatch::Alarm")}
    entry = found["demo-search-launch-failures"]
    assert entry["Dimensions"] == [{"Name": "RuleName", "Value": rule["Name"]}]
    assert (entry["Namespace"], entry["DatapointsToAlarm"], entry["EvaluationPeriods"]) == ("AWS/Events", 3, 120)


def test_what_is_published_about_a_failed_launch_names_the_log_group(made: Made) -> None:
    (rule,) = of_type(made, "AWS::Events::Rule")
    assert rule["Targets"][0]["InputTransformer"]["InputTemplate"].endswith('Log group: /nxpipe/demo/search"')
    naming = {
        entry["AlarmName"]
        for entry in of_type(made, "AWS::CloudWatch::Alarm")
        if entry["AlarmDescription"].endswith("; see the log group /nxpipe/demo/search")
    }
    assert naming == {"demo-search-launch-failures", *(f"demo-search-{colour}-capacity" for colour in COLOURS)}


def test_alarms_and_budgets_of_this_account_alone_may_speak_and_be_encrypted(made: Made) -> None:
    (policy,) = of_type(made, "AWS::SNS::TopicPolicy")
    (key,) = of_type(made, "AWS::KMS::Key")
    for document, action in ((policy["PolicyDocument"], "sns:Publish"), (key["KeyPolicy"], "kms:Decrypt")):
        spoken = [
            (entry["Principal"]["Service"], entry["Condition"])
            for entry in document["Statement"]
            if entry["Effect"] == "Allow" and "Service" in entry["Principal"] and action in entry["Action"]
        ]
        services = [name for value, _ in spoken for name in ([value] if isinstance(value, str) else value)]
        assert sorted(services) == ["budgets.amazonaws.com", "cloudwatch.amazonaws.com"]
        assert all(only == {"StringEquals": {"aws:SourceAccount": ACCOUNT}} for _, only in spoken)
    plain = [entry for entry in policy["PolicyDocument"]["Statement"] if entry["Effect"] == "Deny"]
    assert plain[0]["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


def test_deployed_changed_and_destroyed_it_is_what_was_asked_for(aws: None) -> None:
    made = make(Asked())
    deploy(*made.below, made.observe)
    assert [entry for entry in census(REGION) if entry.stack == "demo-observe"] == []
    found = alarms()
    of_green = found["demo-search-green-latency-p99"]
    assert of_green["Threshold"] == 0.8
    assert of_green["ExtendedStatistic"] == "p99"
    dimensions = {dimension["Name"]: dimension["Value"] for dimension in of_green["Dimensions"]}
    assert dimensions["LoadBalancer"].startswith("app/")
    assert dimensions["TargetGroup"].startswith("targetgroup/")
    budget = boto3.client("budgets").describe_budget(AccountId=ACCOUNT, BudgetName="demo-monthly")["Budget"]
    assert float(budget["BudgetLimit"]["Amount"]) == 5000

    cloudwatch = boto3.client("cloudwatch")
    for state in ("ALARM", "OK"):
        cloudwatch.set_alarm_state(AlarmName="demo-search-refused", StateValue=state, StateReason="a test")
        assert alarms()["demo-search-release-bad"]["StateValue"] == state

    changed = make(replace(Asked(), emails=("night@example.com",), monthly=6000, max_error_rate=0.02))
    deploy(changed.observe)
    assert alarms()["demo-search-blue-error-rate"]["Threshold"] == 0.02
    assert alarms().keys() == found.keys()
    subscribed = boto3.client("sns").list_subscriptions()["Subscriptions"]
    assert [entry["Endpoint"] for entry in subscribed] == ["night@example.com"]
    budget = boto3.client("budgets").describe_budget(AccountId=ACCOUNT, BudgetName="demo-monthly")["Budget"]
    assert float(budget["BudgetLimit"]["Amount"]) == 6000

    destroy(changed.observe)
    assert alarms() == {}
    assert boto3.client("sns").list_topics()["Topics"] == []
    assert boto3.client("budgets").describe_budgets(AccountId=ACCOUNT)["Budgets"] == []
    assert boto3.client("cloudwatch").list_dashboards()["DashboardEntries"] == []


def test_a_project_without_fleets_or_budget_has_a_topic_and_nothing_else() -> None:
    kinds = {
        resource["Type"] for resource in template_of(make(Asked(monthly=None, fleets=())).observe)["Resources"].values()
    }
    assert kinds == {"AWS::KMS::Key", "AWS::SNS::Topic", "AWS::SNS::TopicPolicy", "AWS::SNS::Subscription"}
