"""Observability stack: notification topic, alarms, dashboard, and actual cost of the project."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from aws_cdk import (
    CfnOutput,
    RemovalPolicy,
    Stack,
    aws_budgets,
    aws_cloudwatch,
    aws_cloudwatch_actions,
    aws_iam,
    aws_kms,
    aws_sns,
    aws_sns_subscriptions,
)
from constructs import Construct

from nxpipe.pipeline.config.cloud import Budget, Observe
from nxpipe.pipeline.config.sections import Guards
from nxpipe.stacks.handles import EndpointHandle, ObserveHandle, ServeHandle
from nxpipe.stacks.observability.metrics import MEASURES, OF_ENDPOINTS, Measure, Subject
from nxpipe.stacks.project import PROJECT_TAG, tag_project

_SPEAKERS: Final = ("cloudwatch.amazonaws.com", "budgets.amazonaws.com")
_WARNINGS: Final = (("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100))  # percent of the budget


class ObserveStack(Stack):
    """Alarms of all serving fleets; the composite `release-bad` of each is what ends its rollouts."""

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
        hourly: Mapping[str, float],
        **kwargs: Any,
    ) -> None:
        """`hourly` is what an instance of each fleet costs an hour; without a price no cost is shown."""
        super().__init__(scope, id_, description=f"Alarms and dashboard of {project}", **kwargs)
        self._project = project
        self._guards = guards
        self._topic, key = self._make_topic(observe)
        bad: dict[str, aws_cloudwatch.IAlarm] = {}
        rows: list[list[aws_cloudwatch.IWidget]] = []
        for fleet in fleets:
            prices = {"hourly": hourly[fleet.fleet]} if fleet.fleet in hourly else {}
            bad[fleet.fleet] = self._add_alarms(fleet)
            rows += self._widgets(fleet, prices, bad[fleet.fleet])
        for endpoint in endpoints:
            rows += self._of_endpoint(endpoint)
        if rows:
            aws_cloudwatch.Dashboard(self, "Dashboard", dashboard_name=project, widgets=rows)
        if budget.monthly is not None:
            self._add_budget(budget.monthly)
        self.handle = ObserveHandle(release_bad=bad, topic=self._topic, topic_key=key)
        tag_project(self, project)
        CfnOutput(self, "TopicArn", value=self._topic.topic_arn, description="Alarms are sent here")

    def _make_topic(self, observe: Observe) -> tuple[aws_sns.Topic, aws_kms.Key]:
        """With a key of its own: the one that SNS has by default lets no alarm through."""
        ours = {"StringEquals": {"aws:SourceAccount": self.account}}
        speakers = [aws_iam.ServicePrincipal(each, conditions=ours) for each in _SPEAKERS]
        key = aws_kms.Key(
            self,
            "Key",
            description=f"Encrypts the alarms of {self._project}",
            enable_key_rotation=True,
            removal_policy=RemovalPolicy.DESTROY,  # nothing is kept under it
        )
        topic = aws_sns.Topic(self, "Topic", topic_name=f"{self._project}-alarms", master_key=key, enforce_ssl=True)
        for speaker in speakers:
            key.add_to_resource_policy(
                aws_iam.PolicyStatement(
                    actions=["kms:Decrypt", "kms:GenerateDataKey"], principals=[speaker], resources=["*"]
                )
            )
            topic.add_to_resource_policy(
                aws_iam.PolicyStatement(actions=["sns:Publish"], principals=[speaker], resources=[topic.topic_arn])
            )
        for email in observe.emails:
            topic.add_subscription(aws_sns_subscriptions.EmailSubscription(email))
        return topic, key

    def _add_alarms(self, fleet: ServeHandle) -> aws_cloudwatch.IAlarm:
        tell = aws_cloudwatch_actions.SnsAction(self._topic)
        of_releases = []
        for measure in MEASURES:
            for subject in self._subjects(measure, fleet):
                parts = (fleet.fleet, subject.name, measure.key) if subject.name else (fleet.fleet, measure.key)
                name = self._name(*parts)
                alarm = measure.alarm(self, "-".join(parts), name=name, subject=subject, guards=self._guards)
                if alarm is None or measure.limit is None:
                    continue
                if measure.limit.by_release:
                    of_releases.append(alarm)
                else:
                    alarm.add_alarm_action(tell)
        bad = aws_cloudwatch.CompositeAlarm(
            self,
            f"{fleet.fleet}-release-bad",
            composite_alarm_name=self._name(fleet.fleet, "release-bad"),
            alarm_description=f"The fleet {fleet.fleet} is as no release may leave it: a rollout goes back",
            alarm_rule=aws_cloudwatch.AlarmRule.any_of(*of_releases),
        )
        bad.add_alarm_action(tell)
        return bad

    def _widgets(
        self, fleet: ServeHandle, prices: Mapping[str, float], bad: aws_cloudwatch.IAlarm
    ) -> Iterator[list[aws_cloudwatch.IWidget]]:
        yield [aws_cloudwatch.TextWidget(markdown=f"# {fleet.fleet}", width=18, height=2)]
        yield [aws_cloudwatch.AlarmStatusWidget(alarms=[bad], title="Release", width=6, height=3)]
        graphs: list[aws_cloudwatch.IWidget] = []
        for measure in MEASURES:
            if measure.scope == "group" and not prices:
                continue
            lines = [
                measure.of(subject, prices, subject.name or fleet.fleet) for subject in self._subjects(measure, fleet)
            ]
            axis = aws_cloudwatch.YAxisProps(label=measure.unit, min=0, show_units=False)
            title = f"{fleet.fleet}: {measure.title}"
            graphs.append(aws_cloudwatch.GraphWidget(title=title, left=lines, left_y_axis=axis, width=8))
        yield from (graphs[start : start + 3] for start in range(0, len(graphs), 3))

    def _of_endpoint(self, endpoint: EndpointHandle) -> Iterator[list[aws_cloudwatch.IWidget]]:
        """What its alarms do is SageMaker's affair; here somebody is told of them."""
        bad = aws_cloudwatch.CompositeAlarm(
            self,
            f"{endpoint.endpoint}-endpoint-bad",
            composite_alarm_name=self._name(endpoint.endpoint, "endpoint-bad"),
            alarm_description=f"The endpoint {endpoint.endpoint} does worse than the guards of rollouts allow",
            alarm_rule=aws_cloudwatch.AlarmRule.any_of(*endpoint.alarms),
        )
        bad.add_alarm_action(aws_cloudwatch_actions.SnsAction(self._topic))
        subject = Subject("", endpoint.dimensions)
        yield [aws_cloudwatch.TextWidget(markdown=f"# {endpoint.endpoint} (SageMaker)", width=18, height=2)]
        yield [aws_cloudwatch.AlarmStatusWidget(alarms=[bad], title="Endpoint", width=6, height=3)]
        yield [
            aws_cloudwatch.GraphWidget(
                title=f"{endpoint.endpoint}: {measure.title}",
                left=[measure.of(subject, {}, endpoint.endpoint)],
                left_y_axis=aws_cloudwatch.YAxisProps(label=measure.unit, min=0, show_units=False),
                width=8,
            )
            for measure in OF_ENDPOINTS
        ]

    def _subjects(self, measure: Measure, fleet: ServeHandle) -> list[Subject]:
        balancer = fleet.load_balancer.load_balancer_full_name
        if measure.scope == "fleet":
            return [Subject("", {"Project": self._project, "Fleet": fleet.fleet})]
        if measure.scope == "load balancer":
            return [Subject("", {"LoadBalancer": balancer})]
        if measure.scope == "group":
            return [Subject(name, {"AutoScalingGroupName": each.ref}) for name, each in fleet.groups.items()]
        return [
            Subject(name, {"LoadBalancer": balancer, "TargetGroup": each.target_group_full_name})
            for name, each in fleet.target_groups.items()
        ]

    def _name(self, *parts: str) -> str:
        return "-".join((self._project, *parts))

    def _add_budget(self, monthly: int) -> None:
        """Of what carries the project's tag: AWS counts that only once the tag is activated for billing."""
        told = aws_budgets.CfnBudget.SubscriberProperty(subscription_type="SNS", address=self._topic.topic_arn)
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
                    subscribers=[told],
                )
                for kind, percent in _WARNINGS
            ],
        )
        CfnOutput(
            self, "CostTag", value=PROJECT_TAG, description="Activate this cost allocation tag: the budget counts by it"
        )
