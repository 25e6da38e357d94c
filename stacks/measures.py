"""The table of measures, from which alarms and dashboard are generated.

Metrics of the load balancer and of Auto Scaling have AWS's names. Metrics of devices are rows of
`pipeline.config.device_measures`, in the namespace `nxpipe`, under the names that neuron-monitor documents for
Prometheus and in its reports; the names of its CloudWatch program are not documented. Their dimensions are project and
fleet, so a fleet has one series, independent of its instances.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

from aws_cdk import Duration, aws_cloudwatch
from constructs import Construct

from nxpipe.pipeline.config.device_measures import DEVICE_MEASURES, NAMESPACE, UPDATES_REFUSED
from nxpipe.pipeline.config.sections import Guards

PERIOD: Final = Duration.minutes(1)

Scope = Literal["fleet", "updates", "load balancer", "target group", "group", "launches", "endpoint", "training fleet"]


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
    by_launch: bool = False  # an instance has failed: the alarm names the fleet's log group
    by_log: bool = False  # the log group says why
    after_ready: bool = False  # count the minutes from the time limit of the hook of new instances on

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
        self,
        scope: Construct,
        id_: str,
        *,
        name: str,
        subject: Subject,
        guards: Guards,
        ready_within: int = 0,
        log: str = "",
    ) -> aws_cloudwatch.Alarm | None:
        """The alarm of one subject; None if the measure has no threshold. `ready_within` and `log` (the name of the
        log group) are the handle's.
        """
        limit = self.limit
        if limit is None or (above := limit.threshold(guards)) is None:
            return None
        minutes, of = limit.periods(ready_within)
        return aws_cloudwatch.Alarm(
            scope,
            id_,
            alarm_name=name,
            alarm_description=f"{self.title} above {above:g} ({self.unit}): {limit.meaning}"
            + (f"; see the log group {log}" if limit.by_launch or limit.by_log else ""),
            metric=self.of(subject, {}),
            threshold=above,
            comparison_operator=aws_cloudwatch.ComparisonOperator.GREATER_THAN_THRESHOLD,
            datapoints_to_alarm=minutes,
            evaluation_periods=of,
            # A group without traffic has no latency metric, and a device without failures no failure metric.
            treat_missing_data=aws_cloudwatch.TreatMissingData.NOT_BREACHING,
        )


def _on_devices(key: str, limit: AlarmLimit | None = None) -> Measure:
    """A row of the table of devices, as a measure of a fleet."""
    row = DEVICE_MEASURES[key]
    assert row.series is not None
    series = Series(NAMESPACE, row.series.name, row.series.statistic, row.series.only)
    return Measure(row.key, row.title, row.unit, "fleet", {"measured": series}, limit=limit)


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
    _on_devices("utilisation"),
    _on_devices("core-memory"),
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
        # The lifecycle hook of a new instance ends 10 minutes after `ready_within`; a launch takes a minute before.
        AlarmLimit(
            0,
            5,
            5,
            by_release=False,
            meaning="instances are launched and do not become ready",
            by_launch=True,
            after_ready=True,
        ),
    ),
    Measure(
        "launch-failures",
        "Failed launches",
        "a minute",
        "launches",
        {"failed": Series("AWS/Events", "TriggeredRules", "Sum")},
        limit=AlarmLimit(
            0, 3, 120, by_release=False, meaning="launches of instances fail again and again", by_launch=True
        ),
    ),
    _on_devices(
        "execution-errors",
        AlarmLimit(0, 1, 1, by_release=False, meaning="a device of the fleet has failures; replace its instance"),
    ),
    _on_devices(
        "compile-events",
        AlarmLimit(0, 1, 1, by_release=True, meaning="an instance compiles a program that its artifact should contain"),
    ),
    Measure(
        "updates-refused",
        "Refused versions",
        "a minute",
        "updates",
        {"refused": Series(NAMESPACE, UPDATES_REFUSED, "Sum")},
        limit=AlarmLimit(
            0,
            1,
            1,
            by_release=False,
            meaning="an instance goes on with an earlier version, because that of its channel does not start",
            by_log=True,
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


def failed_hosts(metric: str) -> Measure:
    """The measure of a training fleet, whose metric has a name of its own."""
    return Measure(
        "failed-hosts",
        "Hosts that cannot be set up",
        "a minute",
        "training fleet",
        {"failed": Series(NAMESPACE, metric, "Sum")},
        # The hosts of a job start together, and are one notification.
        limit=AlarmLimit(
            0,
            1,
            60,
            by_release=False,
            meaning="a host is billed and takes no job, which stays RUNNABLE; terminate the job",
            by_launch=True,
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
