"""Observability stack: alarms, the dashboard and the budget of a project, and the topic that they notify."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aws_cdk import (
    CfnOutput,
    RemovalPolicy,
    Stack,
    aws_budgets,
    aws_cloudwatch,
    aws_cloudwatch_actions,
    aws_events,
    aws_iam,
    aws_kms,
    aws_sns,
    aws_sns_subscriptions,
)
from constructs import Construct

from nxpipe.pipeline.config.cloud import Budget, Observe
from nxpipe.pipeline.config.sections import Guards
from nxpipe.stacks.handles import EndpointHandle, ObserveHandle, ServeHandle, TrainHandle
from nxpipe.stacks.iam import own_account_service, wait_for_permissions
from nxpipe.stacks.measures import ENDPOINT_MEASURES, MEASURES, Measure, Subject, failed_hosts
from nxpipe.stacks.names import fleet_log
from nxpipe.stacks.project import PROJECT_TAG, tag_project
from nxpipe.stacks.references import by_value

# Services that publish by the topic's policy. EventBridge publishes with a role: its requests lack aws:SourceAccount. A
# policy that requires this key refuses them, and one that does not lets rules of other accounts publish.
_PUBLISHERS: Final = ("cloudwatch.amazonaws.com", "budgets.amazonaws.com")
_WARNINGS: Final = (("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100))  # percent of the budget


@dataclass(frozen=True)
class _Names:
    """Names in the metric dimensions of one serving fleet, which its stack may replace."""

    balancer: str
    groups: Mapping[str, str]  # by environment
    target_groups: Mapping[str, str]


class ObserveStack(Stack):
    """Alarms and dashboard of all fleets. The composite alarm `release-bad` of a serving fleet ends its rollouts."""

    handle: ObserveHandle

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        observe: Observe,
        budget: Budget,
        guards: Guards,
        fleets: Sequence[ServeHandle],
        endpoints: Sequence[EndpointHandle] = (),
        training: Sequence[TrainHandle] = (),
        hourly: Mapping[str, float],
        **kwargs: Any,
    ) -> None:
        """`hourly` is the price of an instance by fleet, in US dollars; without a price, no cost is shown."""
        super().__init__(scope, id_, description=f"Alarms and dashboard of {project}", **kwargs)
        self._project = project
        self._guards = guards
        self._topic, key = self._make_topic(observe)
        self._names = {fleet.fleet: self._names_of(fleet) for fleet in fleets}
        bad: dict[str, aws_cloudwatch.IAlarm] = {}
        rows: list[list[aws_cloudwatch.IWidget]] = []
        if fleets:
            self._add_launch_rules(fleets, self._publisher(key))
        for fleet in fleets:
            prices = {"hourly": hourly[fleet.fleet]} if fleet.fleet in hourly else {}
            bad[fleet.fleet] = self._add_alarms(fleet)
            rows += self._widgets(fleet, prices, bad[fleet.fleet])
        for endpoint in endpoints:
            rows += self._endpoint_widgets(endpoint)
        for trained in training:
            self._add_host_alarm(trained)
        if rows:
            aws_cloudwatch.Dashboard(self, "Dashboard", dashboard_name=project, widgets=rows)
        if budget.monthly is not None:
            self._add_budget(budget.monthly)
        self.handle = ObserveHandle(release_bad=bad, topic=self._topic, topic_key=key)
        tag_project(self, project)
        CfnOutput(self, "TopicArn", value=self._topic.topic_arn, description="Topic of all alarms")

    def _make_topic(self, observe: Observe) -> tuple[aws_sns.Topic, aws_kms.Key]:
        """Topic with a key of its own: the policy of SNS's default key does not permit CloudWatch alarms."""
        own_account = {"StringEquals": {"aws:SourceAccount": self.account}}
        publishers = [aws_iam.ServicePrincipal(service, conditions=own_account) for service in _PUBLISHERS]
        key = aws_kms.Key(
            self,
            "Key",
            description=f"Encrypts the alarms of {self._project}",
            enable_key_rotation=True,
            removal_policy=RemovalPolicy.DESTROY,  # messages are not stored
        )
        topic = aws_sns.Topic(self, "Topic", topic_name=f"{self._project}-alarms", master_key=key, enforce_ssl=True)
        for publisher in publishers:
            key.add_to_resource_policy(
                aws_iam.PolicyStatement(
                    actions=["kms:Decrypt", "kms:GenerateDataKey"], principals=[publisher], resources=["*"]
                )
            )
            topic.add_to_resource_policy(
                aws_iam.PolicyStatement(actions=["sns:Publish"], principals=[publisher], resources=[topic.topic_arn])
            )
        for email in observe.emails:
            topic.add_subscription(aws_sns_subscriptions.EmailSubscription(email))
        return topic, key

    def _add_alarms(self, fleet: ServeHandle) -> aws_cloudwatch.IAlarm:
        notify = aws_cloudwatch_actions.SnsAction(self._topic)
        by_release, by_launch = [], []
        for measure in MEASURES:
            for subject in self._subjects(measure, fleet):
                parts = (fleet.fleet, subject.name, measure.key) if subject.name else (fleet.fleet, measure.key)
                name = self._name(*parts)
                alarm = measure.alarm(
                    self,
                    "-".join(parts),
                    name=name,
                    subject=subject,
                    guards=self._guards,
                    ready_within=fleet.ready_within,
                    log=fleet_log(self._project, fleet.fleet),
                )
                if alarm is None or measure.limit is None:
                    continue
                if measure.limit.by_release:
                    by_release.append(alarm)
                elif measure.limit.by_launch:
                    by_launch.append(alarm)
                else:
                    alarm.add_alarm_action(notify)
        self._add_launch_alarm(fleet, by_launch).add_alarm_action(notify)
        bad = aws_cloudwatch.CompositeAlarm(
            self,
            f"{fleet.fleet}-release-bad",
            composite_alarm_name=self._name(fleet.fleet, "release-bad"),
            alarm_description=f"Fleet {fleet.fleet} fails in a way that rolls a rollout back",
            alarm_rule=aws_cloudwatch.AlarmRule.any_of(*by_release),
        )
        bad.add_alarm_action(notify)
        return bad

    def _add_launch_alarm(
        self, fleet: ServeHandle, alarms: Sequence[aws_cloudwatch.IAlarm]
    ) -> aws_cloudwatch.CompositeAlarm:
        """One notification for instances that do not start, however many of the alarms about it go off."""
        return aws_cloudwatch.CompositeAlarm(
            self,
            f"{fleet.fleet}-not-starting",
            composite_alarm_name=self._name(fleet.fleet, "not-starting"),
            alarm_description=f"Instances of fleet {fleet.fleet} do not start; filter the log group "
            f'{fleet_log(self._project, fleet.fleet)} by "is given up"',
            alarm_rule=aws_cloudwatch.AlarmRule.any_of(*alarms),
        )

    def _add_host_alarm(self, fleet: TrainHandle) -> None:
        measure = failed_hosts(fleet.failed_hosts)
        alarm = measure.alarm(
            self,
            f"{fleet.fleet}-{measure.key}",
            name=self._name(fleet.fleet, measure.key),
            subject=Subject("", {}),
            guards=self._guards,
            log=fleet_log(self._project, fleet.fleet),
        )
        if alarm is not None:
            alarm.add_alarm_action(aws_cloudwatch_actions.SnsAction(self._topic))

    def _publisher(self, key: aws_kms.Key) -> aws_iam.Role:
        """Role with which EventBridge publishes to the topic."""
        role = aws_iam.Role(
            self,
            "Publisher",
            description=f"Publishes events of {self._project} to the topic of alarms",
            path="/nxpipe/",
            assumed_by=own_account_service(self, "events"),
        )
        role.add_to_principal_policy(
            aws_iam.PolicyStatement(actions=["sns:Publish"], resources=[self._topic.topic_arn])
        )
        role.add_to_principal_policy(
            aws_iam.PolicyStatement(
                actions=["kms:Decrypt", "kms:GenerateDataKey"],
                resources=[key.key_arn],
                conditions={"StringEquals": {"kms:ViaService": f"sns.{self.region}.amazonaws.com"}},
            )
        )
        return role

    def _add_launch_rules(self, fleets: Sequence[ServeHandle], publisher: aws_iam.Role) -> None:
        for fleet in fleets:
            self._add_launch_rule(fleet, publisher)

    def _add_launch_rule(self, fleet: ServeHandle, publisher: aws_iam.Role) -> None:
        """Rule that publishes each failed launch with its reason. An alarm counts how often the rule is triggered."""
        groups = list(self._names[fleet.fleet].groups.values())
        message = (
            f"Fleet {fleet.fleet}: group <group> has not launched an instance. Reason: <reason> Instance: <instance>. "
            f"Log group: {fleet_log(self._project, fleet.fleet)}"
        )
        rule = aws_events.CfnRule(
            self,
            f"{fleet.fleet}-launches",
            name=self._name(fleet.fleet, "launches"),
            description=f"Failed launches of instances of fleet {fleet.fleet}",
            event_pattern={
                "source": ["aws.autoscaling"],
                "detail-type": ["EC2 Instance Launch Unsuccessful"],
                "detail": {"AutoScalingGroupName": groups},
            },
            targets=[
                aws_events.CfnRule.TargetProperty(
                    id="alarms",
                    arn=self._topic.topic_arn,
                    role_arn=publisher.role_arn,
                    input_transformer=aws_events.CfnRule.InputTransformerProperty(
                        input_paths_map={
                            "group": "$.detail.AutoScalingGroupName",
                            "instance": "$.detail.EC2InstanceId",
                            "reason": "$.detail.StatusMessage",
                        },
                        input_template=f'"{message}"',
                    ),
                )
            ],
        )
        wait_for_permissions(rule, publisher)

    def _widgets(
        self, fleet: ServeHandle, prices: Mapping[str, float], bad: aws_cloudwatch.IAlarm
    ) -> Iterator[list[aws_cloudwatch.IWidget]]:
        yield [aws_cloudwatch.TextWidget(markdown=_title(fleet.fleet, rehearsal=fleet.rehearsal), width=18, height=2)]
        yield [aws_cloudwatch.AlarmStatusWidget(alarms=[bad], title="Release", width=6, height=3)]
        graphs: list[aws_cloudwatch.IWidget] = []
        for measure in MEASURES:
            if measure.key == "cost" and not prices:
                continue
            lines = [
                measure.of(subject, prices, subject.name or fleet.fleet) for subject in self._subjects(measure, fleet)
            ]
            if not lines:
                continue
            axis = aws_cloudwatch.YAxisProps(label=measure.unit, min=0, show_units=False)
            title = f"{fleet.fleet}: {measure.title}"
            graphs.append(aws_cloudwatch.GraphWidget(title=title, left=lines, left_y_axis=axis, width=8))
        yield from (graphs[start : start + 3] for start in range(0, len(graphs), 3))

    def _endpoint_widgets(self, endpoint: EndpointHandle) -> Iterator[list[aws_cloudwatch.IWidget]]:
        """Widgets of an endpoint, and a composite alarm that notifies. Rollback by SageMaker uses the single alarms."""
        bad = aws_cloudwatch.CompositeAlarm(
            self,
            f"{endpoint.endpoint}-endpoint-bad",
            composite_alarm_name=self._name(endpoint.endpoint, "endpoint-bad"),
            alarm_description=f"Endpoint {endpoint.endpoint} exceeds a limit of rollout.guards",
            alarm_rule=aws_cloudwatch.AlarmRule.any_of(*self._alarms_of(endpoint)),
        )
        bad.add_alarm_action(aws_cloudwatch_actions.SnsAction(self._topic))
        subject = Subject("", endpoint.dimensions)
        title = _title(f"{endpoint.endpoint} (SageMaker)", rehearsal=endpoint.rehearsal)
        yield [aws_cloudwatch.TextWidget(markdown=title, width=18, height=2)]
        yield [aws_cloudwatch.AlarmStatusWidget(alarms=[bad], title="Endpoint", width=6, height=3)]
        yield [
            aws_cloudwatch.GraphWidget(
                title=f"{endpoint.endpoint}: {measure.title}",
                left=[measure.of(subject, {}, endpoint.endpoint)],
                left_y_axis=aws_cloudwatch.YAxisProps(label=measure.unit, min=0, show_units=False),
                width=8,
            )
            for measure in ENDPOINT_MEASURES
        ]

    def _subjects(self, measure: Measure, fleet: ServeHandle) -> list[Subject]:
        names = self._names[fleet.fleet]
        if measure.scope == "updates" and not fleet.follows_channel:
            return []
        if measure.scope in ("fleet", "updates"):
            return [Subject("", {"Project": self._project, "Fleet": fleet.fleet})]
        if measure.scope == "load balancer":
            return [Subject("", {"LoadBalancer": names.balancer})]
        if measure.scope == "launches":
            return [Subject("", {"RuleName": self._name(fleet.fleet, "launches")})]
        if measure.scope == "group":
            return [Subject(name, {"AutoScalingGroupName": group}) for name, group in names.groups.items()]
        return [
            Subject(name, {"LoadBalancer": names.balancer, "TargetGroup": targets})
            for name, targets in names.target_groups.items()
        ]

    def _names_of(self, fleet: ServeHandle) -> _Names:
        return _Names(
            balancer=by_value(self, fleet.load_balancer.load_balancer_full_name),
            groups={name: by_value(self, group.ref) for name, group in fleet.groups.items()},
            target_groups={
                name: by_value(self, targets.target_group_full_name) for name, targets in fleet.target_groups.items()
            },
        )

    def _alarms_of(self, endpoint: EndpointHandle) -> Iterator[aws_cloudwatch.IAlarm]:
        for number, alarm in enumerate(endpoint.alarms):
            id_ = f"{endpoint.endpoint}-alarm-{number}"
            yield aws_cloudwatch.Alarm.from_alarm_arn(self, id_, by_value(self, alarm.alarm_arn))

    def _name(self, *parts: str) -> str:
        return "-".join((self._project, *parts))

    def _add_budget(self, monthly: int) -> None:
        """Budget for resources with the project's tag. AWS applies the filter once the tag is activated for billing."""
        subscriber = aws_budgets.CfnBudget.SubscriberProperty(subscription_type="SNS", address=self._topic.topic_arn)
        aws_budgets.CfnBudget(
            self,
            "Budget",
            budget=aws_budgets.CfnBudget.BudgetDataProperty(
                budget_name=self._name("monthly"),
                budget_type="COST",
                time_unit="MONTHLY",
                budget_limit=aws_budgets.CfnBudget.SpendProperty(amount=monthly, unit="USD"),
                cost_filters={"TagKeyValue": [f"user:{PROJECT_TAG}${self._project}"]},
            ),
            notifications_with_subscribers=[
                aws_budgets.CfnBudget.NotificationWithSubscribersProperty(
                    notification=aws_budgets.CfnBudget.NotificationProperty(
                        notification_type=kind,
                        comparison_operator="GREATER_THAN",
                        threshold=percent,
                        threshold_type="PERCENTAGE",
                    ),
                    subscribers=[subscriber],
                )
                for kind, percent in _WARNINGS
            ],
        )
        CfnOutput(
            self, "CostTag", value=PROJECT_TAG, description="Cost allocation tag of the budget; activate it for billing"
        )


def _title(name: str, *, rehearsal: bool) -> str:
    """Title of a fleet's or an endpoint's part of the dashboard, in Markdown."""
    return f"# {name}: REHEARSAL, may serve programs of the emulator" if rehearsal else f"# {name}"
