"""Metrics table: the one source of both alarms and dashboard.

What the load balancer and Auto Scaling publish has their names. What hosts publish is in a namespace of ours, named as
neuron-monitor documents it for Prometheus and in its reports (what its CloudWatch program sends is documented nowhere),
with the project and the fleet as dimensions: so one series a fleet, whichever instances it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

from aws_cdk import Duration, aws_cloudwatch
from constructs import Construct

from nxpipe.pipeline.config.sections import Guards

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
class Limit:
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
    limit: Limit | None = None

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
        limit=Limit("max_p99", 2, 3, by_release=False, meaning="slower than rollout.guards.max_p99"),
    ),
    Measure(
        "error-rate",
        "Requests that failed",
        "share",
        "target group",
        ANSWERED,
        f"IF({{requests}} >= {_ENOUGH}, {NOT_ANSWERED} / {{requests}}, 0)",
        Limit("max_error_rate", 2, 3, by_release=False, meaning="more failures than rollout.guards.max_error_rate"),
    ),
    Measure(
        "refused",
        "Requests that no instance got",
        "a minute",
        "load balancer",
        {"refused": _balancer("HTTPCode_ELB_503_Count", "Sum")},
        limit=Limit(0, 2, 3, by_release=True, meaning="traffic goes to a target group that has no healthy instance"),
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
        Limit(
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
        limit=Limit(0, 1, 1, by_release=False, meaning="a device of the fleet fails; replace its instance"),
    ),
    Measure(
        "compile-events",
        "Programs compiled on instances",
        "a minute",
        "fleet",
        {"compiled": _host("compile_events_total", "Sum")},
        limit=Limit(0, 1, 1, by_release=True, meaning="an instance compiles what its artifact should have held"),
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
OF_ENDPOINTS: Final = (
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
        Limit("max_p99", 2, 3, by_release=True, meaning="slower than rollout.guards.max_p99"),
    ),
    Measure(
        "error-rate",
        "Calls that failed",
        "share",
        "endpoint",
        {"calls": _hosted("Invocations", "Sum"), "failed": _hosted("Invocation5XXErrors", "Sum")},
        f"IF({{calls}} >= {_ENOUGH}, FILL({{failed}}, 0) / {{calls}}, 0)",
        Limit("max_error_rate", 2, 3, by_release=True, meaning="more failures than rollout.guards.max_error_rate"),
    ),
)
