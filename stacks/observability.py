"""Observability: the table of measures, from which alarms and dashboard are generated, and the stack with both.

Metrics of the load balancer and of Auto Scaling have AWS's names. Metrics of hosts are in the namespace `nxpipe`, under
the names that neuron-monitor documents for Prometheus and in its reports; the names of its CloudWatch program are not
documented. Their dimensions are project and fleet, so a fleet has one series, independent of its instances.
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
    aws_events,
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

Scope = Literal["fleet", "load balancer", "target group", "group", "launches", "endpoint"]


@dataclass(frozen=True)
class Series:
    """One CloudWatch metric without the dimensions of its subject."""

    namespace: str
    name: str
    statistic: str
    only: Mapping[str, str] = field(default_factory=dict)  # additional dimensions
    of_balancer: bool = False  # of the load balancer as a whole, also where the subject is a target group

    def metric(self, dimensions: Mapping[str, str], label: str | None = None) -> aws_cloudwatch.Metric:
        """The metric of a subject, given by its dimensions."""
        own = {name: value for name, value in dimensions.items() if not (self.of_balancer and name == "TargetGroup")}
        return aws_cloudwatch.Metric(
            namespace=self.namespace,
            metric_name=self.name,
            statistic=self.statistic,
            dimensions_map={**own, **self.only},
            period=PERIOD,
            label=label,
        )


def _host(name: str, statistic: str, **only: str) -> Series:
    return Series(NAMESPACE, name, statistic, only)


def _balancer(name: str, statistic: str) -> Series:
    return Series("AWS/ApplicationELB", name, statistic)


def _hosted(name: str, statistic: str) -> Series:
    return Series("AWS/SageMaker", name, statistic)


@dataclass(frozen=True)
class Subject:
    """The resource that a measure refers to. Its name is empty if a fleet has only one."""

    name: str
    dimensions: Mapping[str, str]


@dataclass(frozen=True)
class AlarmLimit:
    """Alarm threshold of a measure. `by_release` alarms roll a rollout back; the others only notify.

    `by_release` is for failures that allow no comparison. Where versions can be compared, the rollout's judge decides:
    an alarm would also end good releases, by chance or for a failure that both versions share.
    """

    above: float | str  # a number, or the name of a setting of [rollout.guards]
    minutes: int  # above the threshold, of the last `of`
    of: int
    by_release: bool
    meaning: str
    after_ready: bool = False  # count the minutes from the time limit for new instances (`ready_within`) on

    def periods(self, ready_within: int) -> tuple[int, int]:
        """Minutes above the threshold, of the last minutes."""
        later = ready_within if self.after_ready else 0
        return self.minutes + later, self.of + later

    def threshold(self, guards: Guards) -> float | None:
        """The threshold; None if the project does not set the guard."""
        if not isinstance(self.above, str):
            return self.above
        value = getattr(guards, self.above)
        return value.total_seconds() if isinstance(value, timedelta) else value


@dataclass(frozen=True)
class Measure:
    """One row of the table: title, metrics, expression, and alarm threshold."""

    key: str  # part of alarm names
    title: str
    unit: str
    scope: Scope
    series: Mapping[str, Series]  # by name in the expression
    expression: str | None = None  # metric math over {names} of series; None for a single series
    limit: AlarmLimit | None = None

    def of(self, subject: Subject, constants: Mapping[str, float], label: str | None = None) -> aws_cloudwatch.IMetric:
        """The metric of one subject. `constants` are values that the expression names."""
        metrics = {name: series.metric(subject.dimensions, label) for name, series in self.series.items()}
        if self.expression is None:
            (metric,) = metrics.values()
            return metric
        ids = {name: f"{name}_{subject.name}" for name in metrics}  # unique within a graph
        return aws_cloudwatch.MathExpression(
            expression=self.expression.format_map({**ids, **constants}),
            using_metrics={ids[name]: metric for name, metric in metrics.items()},
            period=PERIOD,
            label=label,
        )

    def alarm(
        self, scope: Construct, id_: str, *, name: str, subject: Subject, guards: Guards, ready_within: int = 0
    ) -> aws_cloudwatch.Alarm | None:
        """The alarm of one subject; None if the measure has no threshold. `ready_within` is the fleet's, in minutes."""
        limit = self.limit
        if limit is None or (above := limit.threshold(guards)) is None:
            return None
        minutes, of = limit.periods(ready_within)
        return aws_cloudwatch.Alarm(
            scope,
            id_,
            alarm_name=name,
            alarm_description=f"{self.title} above {above:g} ({self.unit}): {limit.meaning}",
            metric=self.of(subject, {}),
            threshold=above,
            comparison_operator=aws_cloudwatch.ComparisonOperator.GREATER_THAN_THRESHOLD,
            datapoints_to_alarm=minutes,
            evaluation_periods=of,
            # A group without traffic has no latency metric, and a device without failures no failure metric.
            treat_missing_data=aws_cloudwatch.TreatMissingData.NOT_BREACHING,
        )


# With fewer requests a minute, one failure would exceed the threshold; a rollout's statistical test judges those.
_MIN_REQUESTS: Final = 20

# A request has failed if a target answered it with 5XX or not at all. Unanswered requests are the difference of
# requests and responses, as far as the ALB has returned so many 502, 504 and 4XX (460: the client gave up), which it
# counts for all target groups together: the remainder is in flight. An absent count is zero.
_KINDS: Final = (2, 3, 4, 5)
RESPONSES: Final = {
    "requests": _balancer("RequestCount", "Sum"),
    **{f"kind{kind}": _balancer(f"HTTPCode_Target_{kind}XX_Count", "Sum") for kind in _KINDS},
    **{
        f"own{code}": Series("AWS/ApplicationELB", f"HTTPCode_ELB_{code.upper()}_Count", "Sum", of_balancer=True)
        for code in ("502", "504", "4xx")
    },
}
_OPEN: Final = "({requests}" + "".join(f" - FILL({{kind{kind}}}, 0)" for kind in _KINDS) + ")"
_OWN: Final = "(FILL({own502}, 0) + FILL({own504}, 0) + FILL({own4xx}, 0))"
FAILED: Final = f"(FILL({{kind5}}, 0) + IF({_OPEN} > {_OWN}, {_OWN}, IF({_OPEN} > 0, {_OPEN}, 0)))"

MEASURES: Final = (
    Measure(
        "utilisation",
        "Tensor engine utilization",
        "share of time",
        "fleet",
        {"used": _host("neuroncore_utilization_ratio", "Average")},
    ),
    Measure(
        "core-memory",
        "Memory of the core that uses most",
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
        "Latency, p50",
        "seconds",
        "target group",
        {"time": _balancer("TargetResponseTime", "p50")},
    ),
    Measure(
        "latency-p99",
        "Latency, p99",
        "seconds",
        "target group",
        {"time": _balancer("TargetResponseTime", "p99")},
        limit=AlarmLimit("max_p99", 2, 3, by_release=False, meaning="slower than rollout.guards.max_p99"),
    ),
    Measure(
        "error-rate",
        "Failed requests",
        "share",
        "target group",
        RESPONSES,
        f"IF({{requests}} >= {_MIN_REQUESTS}, {FAILED} / {{requests}}, 0)",
        AlarmLimit(
            "max_error_rate", 2, 3, by_release=False, meaning="more failures than rollout.guards.max_error_rate"
        ),
    ),
    Measure(
        "refused",
        "Requests without a healthy target",
        "a minute",
        "load balancer",
        {"refused": _balancer("HTTPCode_ELB_503_Count", "Sum")},
        limit=AlarmLimit(
            0, 2, 3, by_release=True, meaning="traffic goes to a target group that has no healthy instance"
        ),
    ),
    Measure(
        "unanswered",
        "Requests without an answer",
        "share",
        "load balancer",
        {
            "requests": _balancer("RequestCount", "Sum"),
            "broken": _balancer("HTTPCode_ELB_502_Count", "Sum"),
            "late": _balancer("HTTPCode_ELB_504_Count", "Sum"),
        },
        f"IF({{requests}} >= {_MIN_REQUESTS}, (FILL({{broken}}, 0) + FILL({{late}}, 0)) / {{requests}}, 0)",
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
        "capacity",
        "Missing instances",
        "instances",
        "group",
        {
            "wanted": Series("AWS/AutoScaling", "GroupDesiredCapacity", "Average"),
            "present": Series("AWS/AutoScaling", "GroupInServiceInstances", "Average"),
        },
        "{wanted} - {present}",
        # A launch takes minutes before the lifecycle hook begins, which ends after `ready_within`.
        AlarmLimit(
            0, 5, 5, by_release=False, meaning="instances are launched and do not become ready", after_ready=True
        ),
    ),
    Measure(
        "launch-failures",
        "Failed launches",
        "a minute",
        "launches",
        {"failed": Series("AWS/Events", "TriggeredRules", "Sum")},
        limit=AlarmLimit(0, 3, 120, by_release=False, meaning="launches of instances fail again and again"),
    ),
    Measure(
        "execution-errors",
        "Failed executions",
        "a minute",
        "fleet",
        {"failed": _host("execution_status_total", "Sum", status_type="hardware")},
        limit=AlarmLimit(0, 1, 1, by_release=False, meaning="a device of the fleet has failures; replace its instance"),
    ),
    Measure(
        "compile-events",
        "Programs compiled on instances",
        "a minute",
        "fleet",
        {"compiled": _host("compile_events_total", "Sum")},
        limit=AlarmLimit(
            0, 1, 1, by_release=True, meaning="an instance compiles a program that its artifact should contain"
        ),
    ),
    Measure(
        "cost",
        "Cost since the start of the graph",
        "US dollars",
        "group",
        {"instances": Series("AWS/AutoScaling", "GroupInServiceInstances", "Average")},
        "RUNNING_SUM(FILL({instances}, 0)) * {hourly} / 60",
    ),
)

# SageMaker counts per variant: during a deployment, old and new instances together. Its times are in microseconds.
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
        "Latency, p99",
        "seconds",
        "endpoint",
        {"time": _hosted("ModelLatency", "p99")},
        "{time} / 1000000",
        AlarmLimit("max_p99", 2, 3, by_release=True, meaning="slower than rollout.guards.max_p99"),
    ),
    Measure(
        "error-rate",
        "Failed calls",
        "share",
        "endpoint",
        {"calls": _hosted("Invocations", "Sum"), "failed": _hosted("Invocation5XXErrors", "Sum")},
        f"IF({{calls}} >= {_MIN_REQUESTS}, FILL({{failed}}, 0) / {{calls}}, 0)",
        AlarmLimit("max_error_rate", 2, 3, by_release=True, meaning="more failures than rollout.guards.max_error_rate"),
    ),
)


_PUBLISHERS: Final = ("cloudwatch.amazonaws.com", "budgets.amazonaws.com", "events.amazonaws.com")
_WARNINGS: Final = (("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100))  # percent of the budget


class ObserveStack(Stack):
    """Alarms and dashboard of all serving fleets. The composite alarm `release-bad` of a fleet ends its rollouts."""

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
        """`hourly` is the price of an instance by fleet, in US dollars; without a price, no cost is shown."""
        super().__init__(scope, id_, description=f"Alarms and dashboard of {project}", **kwargs)
        self._project = project
        self._guards = guards
        self._topic, key = self._make_topic(observe)
        bad: dict[str, aws_cloudwatch.IAlarm] = {}
        rows: list[list[aws_cloudwatch.IWidget]] = []
        for fleet in fleets:
            prices = {"hourly": hourly[fleet.fleet]} if fleet.fleet in hourly else {}
            self._add_launch_rule(fleet)
            bad[fleet.fleet] = self._add_alarms(fleet)
            rows += self._widgets(fleet, prices, bad[fleet.fleet])
        for endpoint in endpoints:
            rows += self._endpoint_widgets(endpoint)
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
        by_release = []
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
                )
                if alarm is None or measure.limit is None:
                    continue
                if measure.limit.by_release:
                    by_release.append(alarm)
                else:
                    alarm.add_alarm_action(notify)
        bad = aws_cloudwatch.CompositeAlarm(
            self,
            f"{fleet.fleet}-release-bad",
            composite_alarm_name=self._name(fleet.fleet, "release-bad"),
            alarm_description=f"Fleet {fleet.fleet} fails in a way that rolls a rollout back",
            alarm_rule=aws_cloudwatch.AlarmRule.any_of(*by_release),
        )
        bad.add_alarm_action(notify)
        return bad

    def _add_launch_rule(self, fleet: ServeHandle) -> None:
        """Rule that publishes each failed launch with its reason. An alarm counts how often the rule is triggered."""
        groups = [group.ref for group in fleet.groups.values()]
        message = f"Fleet {fleet.fleet}: group <group> has not launched an instance. Reason: <reason>"
        aws_events.CfnRule(
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
                    input_transformer=aws_events.CfnRule.InputTransformerProperty(
                        input_paths_map={"group": "$.detail.AutoScalingGroupName", "reason": "$.detail.StatusMessage"},
                        input_template=f'"{message}"',
                    ),
                )
            ],
        )

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
            alarm_rule=aws_cloudwatch.AlarmRule.any_of(*endpoint.alarms),
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
        balancer = fleet.load_balancer.load_balancer_full_name
        if measure.scope == "fleet":
            return [Subject("", {"Project": self._project, "Fleet": fleet.fleet})]
        if measure.scope == "load balancer":
            return [Subject("", {"LoadBalancer": balancer})]
        if measure.scope == "launches":
            return [Subject("", {"RuleName": self._name(fleet.fleet, "launches")})]
        if measure.scope == "group":
            return [Subject(name, {"AutoScalingGroupName": group.ref}) for name, group in fleet.groups.items()]
        return [
            Subject(name, {"LoadBalancer": balancer, "TargetGroup": targets.target_group_full_name})
            for name, targets in fleet.target_groups.items()
        ]

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
