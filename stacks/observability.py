"""Observability: the metrics table, the one source of alarms and dashboard, and the stack that creates them.

What the load balancer and Auto Scaling publish has their names. What hosts publish is in a namespace of ours, named as
neuron-monitor documents it for Prometheus and in its reports (what its CloudWatch program sends is documented nowhere),
with the project and the fleet as dimensions: so one series a fleet, whichever instances it has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal

from aws_cdk import (
    CfnOutput,
    Duration,
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
from nxpipe.stacks.project import PROJECT_TAG, tag_project

PERIOD: Final = Duration.minutes(1)
NAMESPACE: Final = "nxpipe"

Scope = Literal["fleet", "load balancer", "target group", "group", "endpoint"]


@dataclass(frozen=True)
class Series:
    """One metric of CloudWatch, but for whose it is."""

    namespace: str
    name: str
    statistic: str
    only: Mapping[str, str] = field(default_factory=dict)  # more dimensions


def _host(name: str, statistic: str, **only: str) -> Series:
    return Series(NAMESPACE, name, statistic, only)


def _balancer(name: str, statistic: str) -> Series:
    return Series("AWS/ApplicationELB", name, statistic)


def _hosted(name: str, statistic: str) -> Series:
    return Series("AWS/SageMaker", name, statistic)


@dataclass(frozen=True)
class Subject:
    """One thing that a measure is taken of; its name is empty where a fleet has only one."""

    name: str
    dimensions: Mapping[str, str]


@dataclass(frozen=True)
class AlarmLimit:
    """When a measure is wrong. `by_release` ones bring a rollout to its end, the others only tell.

    They are those that leave nothing to judge. Where versions can be compared, an alarm would end good releases by
    chance, and whenever something goes wrong that both versions share: there the judge of rollouts decides.
    """

    above: float | str  # a figure, or the name of one of the guards that the configuration gives
    minutes: int  # of the last `of`
    of: int
    by_release: bool
    meaning: str

    def figure(self, guards: Guards) -> float | None:
        """None where a project leaves the limit out."""
        if not isinstance(self.above, str):
            return self.above
        given = getattr(guards, self.above)
        return given.total_seconds() if isinstance(given, timedelta) else given


@dataclass(frozen=True)
class Measure:
    """A row: what is shown, of what it is made, and when it is wrong."""

    key: str  # in names of alarms
    title: str
    unit: str
    scope: Scope
    series: Mapping[str, Series]  # by the name that the expression gives it
    expression: str | None = None  # metric math over {names} of series; a measure of one needs none
    limit: AlarmLimit | None = None

    def of(self, subject: Subject, given: Mapping[str, float], label: str | None = None) -> aws_cloudwatch.IMetric:
        """The measure of one thing. `given` are the constants that an expression names."""
        made = {
            name: aws_cloudwatch.Metric(
                namespace=each.namespace,
                metric_name=each.name,
                statistic=each.statistic,
                dimensions_map={**subject.dimensions, **each.only},
                period=PERIOD,
                label=label,
            )
            for name, each in self.series.items()
        }
        if self.expression is None:
            (only,) = made.values()
            return only
        ids = {name: f"{name}_{subject.name}" for name in made}  # of all metrics of one graph, none twice
        return aws_cloudwatch.MathExpression(
            expression=self.expression.format_map({**ids, **given}),
            using_metrics={ids[name]: metric for name, metric in made.items()},
            period=PERIOD,
            label=label,
        )

    def alarm(
        self, scope: Construct, id_: str, *, name: str, subject: Subject, guards: Guards
    ) -> aws_cloudwatch.Alarm | None:
        """None where nothing is wrong with whatever is measured."""
        limit = self.limit
        if limit is None or (above := limit.figure(guards)) is None:
            return None
        return aws_cloudwatch.Alarm(
            scope,
            id_,
            alarm_name=name,
            alarm_description=f"{self.title} above {above:g} ({self.unit}): {limit.meaning}",
            metric=self.of(subject, {}),
            threshold=above,
            comparison_operator=aws_cloudwatch.ComparisonOperator.GREATER_THAN_THRESHOLD,
            datapoints_to_alarm=limit.minutes,
            evaluation_periods=limit.of,
            # A group without traffic has no latency, and a device that does not fail sends no failures.
            treat_missing_data=aws_cloudwatch.TreatMissingData.NOT_BREACHING,
        )


# Below so few requests a minute one failure would be a rate; the statistical test of a rollout judges those.
_ENOUGH: Final = 20

# What is no good answer of a target has failed: its 5XX, and what it never answered, for which the ALB answers 502 or
# 504. Those two it counts for all target groups together. An absent count is none.
ANSWERED: Final = {
    "requests": _balancer("RequestCount", "Sum"),
    **{f"good{kind}": _balancer(f"HTTPCode_Target_{kind}XX_Count", "Sum") for kind in (2, 3, 4)},
}
NOT_ANSWERED: Final = "({requests} - FILL({good2}, 0) - FILL({good3}, 0) - FILL({good4}, 0))"

MEASURES: Final = (
    Measure(
        "utilisation",
        "Tensor engines in use",
        "share of time",
        "fleet",
        {"used": _host("neuroncore_utilization_ratio", "Average")},
    ),
    Measure(
        "core-memory",
        "Memory of the fullest core",
        "bytes",
        "fleet",
        {"used": _host("neuroncore_memory_usage_bytes", "Maximum")},
    ),
    Measure(
        "throughput",
        "Requests",
        "a minute",
        "target group",
        {"requests": _balancer("RequestCount", "Sum")},
    ),
    Measure(
        "latency-p50",
        "Latency, half of the requests",
        "seconds",
        "target group",
        {"time": _balancer("TargetResponseTime", "p50")},
    ),
    Measure(
        "latency-p99",
        "Latency, 99 of 100 requests",
        "seconds",
        "target group",
        {"time": _balancer("TargetResponseTime", "p99")},
        limit=AlarmLimit("max_p99", 2, 3, by_release=False, meaning="slower than rollout.guards.max_p99"),
    ),
    Measure(
        "error-rate",
        "Requests that failed",
        "share",
        "target group",
        ANSWERED,
        f"IF({{requests}} >= {_ENOUGH}, {NOT_ANSWERED} / {{requests}}, 0)",
        AlarmLimit(
            "max_error_rate", 2, 3, by_release=False, meaning="more failures than rollout.guards.max_error_rate"
        ),
    ),
    Measure(
        "refused",
        "Requests that no instance got",
        "a minute",
        "load balancer",
        {"refused": _balancer("HTTPCode_ELB_503_Count", "Sum")},
        limit=AlarmLimit(
            0, 2, 3, by_release=True, meaning="traffic goes to a target group that has no healthy instance"
        ),
    ),
    Measure(
        "unanswered",
        "Requests that an instance did not answer",
        "share",
        "load balancer",
        {
            "requests": _balancer("RequestCount", "Sum"),
            "broken": _balancer("HTTPCode_ELB_502_Count", "Sum"),
            "late": _balancer("HTTPCode_ELB_504_Count", "Sum"),
        },
        f"IF({{requests}} >= {_ENOUGH}, (FILL({{broken}}, 0) + FILL({{late}}, 0)) / {{requests}}, 0)",
        AlarmLimit(
            "max_error_rate", 2, 3, by_release=False, meaning="instances hang or crash: more than max_error_rate allows"
        ),
    ),
    Measure(
        "healthy",
        "Healthy instances",
        "instances",
        "target group",
        {"healthy": _balancer("HealthyHostCount", "Minimum")},
    ),
    Measure(
        "execution-errors",
        "Executions that a device failed",
        "a minute",
        "fleet",
        {"failed": _host("execution_status_total", "Sum", status_type="hardware")},
        limit=AlarmLimit(0, 1, 1, by_release=False, meaning="a device of the fleet fails; replace its instance"),
    ),
    Measure(
        "compile-events",
        "Programs compiled on instances",
        "a minute",
        "fleet",
        {"compiled": _host("compile_events_total", "Sum")},
        limit=AlarmLimit(0, 1, 1, by_release=True, meaning="an instance compiles what its artifact should have held"),
    ),
    Measure(
        "cost",
        "Cost since the beginning of the graph",
        "US dollars",
        "group",
        {"instances": Series("AWS/AutoScaling", "GroupInServiceInstances", "Average")},
        "RUNNING_SUM(FILL({instances}, 0)) * {hourly} / 60",
    ),
)

# SageMaker counts for each variant, old and new instances together while calls shift; its times are microseconds.
ENDPOINT_MEASURES: Final = (
    Measure(
        "calls",
        "Calls",
        "a minute",
        "endpoint",
        {"calls": _hosted("Invocations", "Sum")},
    ),
    Measure(
        "latency-p99",
        "Latency, 99 of 100 calls",
        "seconds",
        "endpoint",
        {"time": _hosted("ModelLatency", "p99")},
        "{time} / 1000000",
        AlarmLimit("max_p99", 2, 3, by_release=True, meaning="slower than rollout.guards.max_p99"),
    ),
    Measure(
        "error-rate",
        "Calls that failed",
        "share",
        "endpoint",
        {"calls": _hosted("Invocations", "Sum"), "failed": _hosted("Invocation5XXErrors", "Sum")},
        f"IF({{calls}} >= {_ENOUGH}, FILL({{failed}}, 0) / {{calls}}, 0)",
        AlarmLimit("max_error_rate", 2, 3, by_release=True, meaning="more failures than rollout.guards.max_error_rate"),
    ),
)


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
            for measure in ENDPOINT_MEASURES
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
